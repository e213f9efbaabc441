"""A GAN by manual optimization, as Lightning's users write it: `python -m tests.training.gan_script --stages 2`."""

from __future__ import annotations

import argparse
from typing import Any

import lightning as L
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_pipeline import PipelineStrategy

SIDE, LATENT, WIDTH = 8, 12, 16

CUTS: dict[str, dict[str, int]] = {
    "one": {},
    "between the two": {"discriminator.body.0": 1},
    "in the generator": {"generator.body.3": 1},
    "in the discriminator": {"discriminator.body.2": 1},
    "four": {"generator.body.3": 1, "discriminator.body.0": 2, "discriminator.body.2": 3},
}
"""Where stages begin."""


class Generator(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            *(nn.Linear(LATENT, WIDTH), nn.BatchNorm1d(WIDTH), nn.LeakyReLU(0.2)),
            *(nn.Linear(WIDTH, 2 * WIDTH), nn.BatchNorm1d(2 * WIDTH), nn.LeakyReLU(0.2)),
            *(nn.Linear(2 * WIDTH, SIDE * SIDE), nn.Tanh()),
        )

    def forward(self, z: Tensor) -> Tensor:
        return self.body(z).view(len(z), 1, SIDE, SIDE)


class Discriminator(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            *(nn.Linear(SIDE * SIDE, 2 * WIDTH), nn.LeakyReLU(0.2)),
            *(nn.Linear(2 * WIDTH, WIDTH), nn.LeakyReLU(0.2), nn.Linear(WIDTH, 1)),
        )

    def forward(self, image: Tensor) -> Tensor:
        return self.body(image.flatten(1))


class GAN(L.LightningModule):
    """The generator is updated first, and the discriminator on what it gave before."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.generator, self.discriminator = Generator(), Discriminator()
        self.register_buffer("validation_z", torch.randn(4, LATENT))
        self.images: list[Tensor] = []

    def forward(self, z: Tensor) -> Tensor:
        return self.generator(z)

    def loss(self, images: Tensor, real: bool) -> Tensor:
        judged = self.discriminator(images)
        target = torch.ones_like(judged) if real else torch.zeros_like(judged)
        return F.binary_cross_entropy_with_logits(judged, target)

    def training_step(self, batch: Any, batch_idx: int) -> None:
        (real,) = batch
        for_generator, for_discriminator = self.optimizers()
        z = torch.randn(len(real), LATENT).type_as(real)

        self.toggle_optimizer(for_generator)
        loss = self.loss(self(z), real=True)
        self.log("g_loss", loss, prog_bar=True)
        self.manual_backward(loss)
        for_generator.step()
        for_generator.zero_grad()
        self.untoggle_optimizer(for_generator)

        self.toggle_optimizer(for_discriminator)
        loss = (self.loss(real, real=True) + self.loss(self(z).detach(), real=False)) / 2
        self.log("d_loss", loss, prog_bar=True)
        self.manual_backward(loss)
        for_discriminator.step()
        for_discriminator.zero_grad()
        self.untoggle_optimizer(for_discriminator)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_d_loss", self.loss(batch[0], real=True))

    def on_validation_epoch_end(self) -> None:
        if not self.trainer.sanity_checking:
            self.images.append(self(self.validation_z).detach().clone())

    def configure_optimizers(self) -> Any:
        return [
            torch.optim.Adam(self.generator.parameters(), lr=2e-3, betas=(0.5, 0.999)),
            torch.optim.Adam(self.discriminator.parameters(), lr=2e-3, betas=(0.5, 0.999)),
        ], []


def main(stages: int, cut: str, **options: Any) -> dict[str, Any]:
    """Train. Returns the weights, what was logged, and the images of each epoch."""
    L.seed_everything(1, verbose=False)
    digits = torch.rand(48, 1, SIDE, SIDE, generator=torch.Generator().manual_seed(2)) * 2 - 1
    loader = DataLoader(TensorDataset(digits), batch_size=16, shuffle=True)
    strategy = PipelineStrategy(num_stages=stages, num_microbatches=4, stage_config=CUTS[cut])
    trainer = L.Trainer(strategy=strategy, accelerator="cpu", devices=stages, max_epochs=2, **options)
    module = GAN()
    trainer.fit(module, loader, DataLoader(TensorDataset(digits[:16]), batch_size=8))
    return {"weights": module.state_dict(), "logged": dict(trainer.callback_metrics), "images": module.images}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--stages", type=int, default=2)
    parser.add_argument("--cut", default="between the two", choices=CUTS)
    asked = parser.parse_args()
    print({name: float(value) for name, value in main(asked.stages, asked.cut)["logged"].items()})
