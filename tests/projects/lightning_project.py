"""Lightning: what its examples/pytorch show, in their manner, on small random data."""

from __future__ import annotations

from functools import partial
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from common import Case, main
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import BaseFinetuning, Callback
from lightning.pytorch.demos import Transformer
from lightning.pytorch.utilities import rank_zero_only
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import Accuracy

SIDE, CLASSES, VOCABULARY = 8, 4, 32


def images(count: int, channels: int = 1) -> TensorDataset:
    drawn = torch.Generator().manual_seed(count)
    return TensorDataset(
        torch.rand(count, channels, SIDE, SIDE, generator=drawn),
        torch.randint(0, CLASSES, (count,), generator=drawn),
    )


# -- boring ---------------------------------------------------------------------------------------------------------


class BoringModel(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(32, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)

    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        loss = self(batch).sum()
        self.log("train_loss", loss)
        return {"loss": loss}

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("valid_loss", self(batch).sum())

    def test_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("test_loss", self(batch).sum())

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.layer.parameters(), lr=0.1)


def boring(trainer_kwargs: dict[str, Any]) -> Any:
    data = DataLoader(torch.randn(16, 32), batch_size=4)
    model = BoringModel()
    trainer = Trainer(limit_val_batches=1, num_sanity_val_steps=0, max_epochs=1, **trainer_kwargs)
    trainer.fit(model, train_dataloaders=data, val_dataloaders=data)
    return trainer.test(model, dataloaders=data)


# -- autoencoder ----------------------------------------------------------------------------------------------------


class ImageSampler(Callback):
    """As in the example, on the first rank alone."""

    sampled: list[Tensor]

    def __init__(self) -> None:
        self.sampled = []

    @rank_zero_only
    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        shown, _ = next(iter(DataLoader(images(6), batch_size=4)))
        with torch.no_grad():
            pl_module.eval()
            self.sampled.append(pl_module(shown.flatten(1).to(pl_module.device)).cpu())
            pl_module.train()


class ImageSamplerOnAll(ImageSampler):
    """Without `rank_zero_only`: every rank runs the module together with the others."""

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        ImageSampler.on_train_epoch_end.__wrapped__(self, trainer, pl_module)  # type: ignore[attr-defined]


class LitAutoEncoder(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(SIDE * SIDE, 16), nn.ReLU(), nn.Linear(16, 3))
        self.decoder = nn.Sequential(nn.Linear(3, 16), nn.ReLU(), nn.Linear(16, SIDE * SIDE))

    def forward(self, x: Tensor) -> Tensor:
        return self.decoder(self.encoder(x))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self._prepare_batch_and_loss(batch, "train")

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self._prepare_batch_and_loss(batch, "val")

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self._prepare_batch_and_loss(batch, "test")

    def predict_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Tensor:
        return self(batch[0].view(len(batch[0]), -1))

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=1e-3)

    def _prepare_batch_and_loss(self, batch: Any, stage: str) -> Tensor:
        x = batch[0].view(batch[0].size(0), -1)
        loss = F.mse_loss(x, self(x))
        self.log(f"{stage}_loss", loss, on_step=True)
        return loss


def autoencoder(sampler_type: Any, trainer_kwargs: dict[str, Any]) -> Any:
    sampler = sampler_type()
    trainer_kwargs["callbacks"].append(sampler)
    trainer = Trainer(max_epochs=2, **trainer_kwargs)
    trainer.fit(LitAutoEncoder(), DataLoader(images(24), 8, shuffle=True), DataLoader(images(16), 8))
    tested = trainer.test(ckpt_path="best", dataloaders=DataLoader(images(16), 8))
    predictions = trainer.predict(ckpt_path="best", dataloaders=DataLoader(images(16), 8))
    on_first = {"sampled": sampler.sampled} if sampler.sampled else {}
    return {"tested": tested, "predictions": predictions, **on_first}


# -- classifier -----------------------------------------------------------------------------------------------------


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(1, 4, 3, 1), nn.Conv2d(4, 8, 3, 1)
        self.dropout1, self.dropout2 = nn.Dropout(0.25), nn.Dropout(0.5)
        self.fc1, self.fc2 = nn.Linear(32, 16), nn.Linear(16, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.conv2(F.relu(self.conv1(x))))
        x = torch.flatten(self.dropout1(F.max_pool2d(x, 2)), 1)
        x = self.fc2(self.dropout2(F.relu(self.fc1(x))))
        return F.log_softmax(x, dim=1)


class ImageClassifier(LightningModule):
    def __init__(self, lr: float = 1.0, gamma: float = 0.7) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.model = Net()
        self.val_acc = Accuracy(task="multiclass", num_classes=CLASSES)
        self.test_acc = Accuracy(task="multiclass", num_classes=CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.model(x)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        return F.nll_loss(self(x), y.long())

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        logits = self(x)
        self.val_acc(logits, y)
        self.log("val_acc", self.val_acc)
        self.log("val_loss", F.nll_loss(logits, y.long()))

    def test_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        logits = self.forward(x)
        loss = F.nll_loss(logits, y.long())
        self.test_acc(logits, y)
        self.log("test_acc", self.test_acc)
        self.log("test_loss", loss)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.Adadelta(self.model.parameters(), lr=self.hparams.lr)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=self.hparams.gamma)]


def classifier(trainer_kwargs: dict[str, Any]) -> Any:
    trainer, model = Trainer(max_epochs=2, **trainer_kwargs), ImageClassifier()
    trainer.fit(model, DataLoader(images(24), 8, shuffle=True), DataLoader(images(16), 8))
    return trainer.test(model, DataLoader(images(16), 8))


# -- language -------------------------------------------------------------------------------------------------------


class LanguageModel(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.model = Transformer(vocab_size=VOCABULARY, ninp=16, nhead=2, nhid=16, nlayers=2)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        input, target = batch
        loss = F.nll_loss(self.model(input, target), target.view(-1))
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> Tensor:
        input, target = batch
        loss = F.nll_loss(self.model(input, target), target.view(-1))
        self.log("val_loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def language(trainer_kwargs: dict[str, Any]) -> None:
    tokens = torch.randint(0, VOCABULARY, (40, 9), generator=torch.Generator().manual_seed(0))
    data = TensorDataset(tokens[:, :-1], tokens[:, 1:])
    train, validation = torch.utils.data.random_split(data, [24, 16], generator=torch.Generator().manual_seed(1))
    trainer = Trainer(gradient_clip_val=0.25, max_epochs=2, **trainer_kwargs)
    trainer.fit(LanguageModel(), DataLoader(train, 8, shuffle=True), DataLoader(validation, 8))


# -- GAN ------------------------------------------------------------------------------------------------------------


class GAN(LightningModule):
    def __init__(self, latent: int = 6, lr: float = 0.002) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.automatic_optimization = False
        sizes = [latent, 16, 32, SIDE * SIDE]
        layers = [
            nn.Sequential(nn.Linear(a, b), nn.BatchNorm1d(b, 0.8), nn.LeakyReLU(0.2, inplace=True))
            for a, b in pairwise(sizes[:-1])
        ]
        self.generator = nn.Sequential(*layers, nn.Linear(sizes[-2], sizes[-1]), nn.Tanh())
        self.discriminator = nn.Sequential(
            nn.Linear(SIDE * SIDE, 16), nn.LeakyReLU(0.2, inplace=True), nn.Linear(16, 1), nn.Sigmoid()
        )
        self.register_buffer("validation_z", torch.randn(8, latent))

    def forward(self, z: Tensor) -> Tensor:
        return self.generator(z)

    def training_step(self, batch: Any) -> None:
        imgs = batch[0].flatten(1)
        opt_g, opt_d = self.optimizers()
        valid, fake = torch.ones(imgs.size(0), 1).type_as(imgs), torch.zeros(imgs.size(0), 1).type_as(imgs)
        z = torch.randn(imgs.shape[0], self.hparams.latent).type_as(imgs)
        self.toggle_optimizer(opt_g)
        g_loss = F.binary_cross_entropy(self.discriminator(self(z)), valid)
        opt_g.zero_grad()
        self.manual_backward(g_loss)
        opt_g.step()
        self.untoggle_optimizer(opt_g)
        self.toggle_optimizer(opt_d)
        real_loss = F.binary_cross_entropy(self.discriminator(imgs), valid)
        fake_loss = F.binary_cross_entropy(self.discriminator(self(z).detach()), fake)
        d_loss = (real_loss + fake_loss) / 2
        opt_d.zero_grad()
        self.manual_backward(d_loss)
        opt_d.step()
        self.untoggle_optimizer(opt_d)
        self.log_dict({"d_loss": d_loss, "g_loss": g_loss})

    def configure_optimizers(self) -> Any:
        options = {"lr": self.hparams.lr, "betas": (0.5, 0.999)}
        return [
            torch.optim.Adam(self.generator.parameters(), **options),
            torch.optim.Adam(self.discriminator.parameters(), **options),
        ], []

    def on_train_epoch_end(self) -> None:
        self.sampled = self(self.validation_z.type_as(self.generator[-2].weight)).detach()


def gan(trainer_kwargs: dict[str, Any]) -> Any:
    model = GAN()
    Trainer(max_epochs=2, **trainer_kwargs).fit(model, DataLoader(images(24), 8, shuffle=True))
    return model.sampled


# -- finetuning -----------------------------------------------------------------------------------------------------


class MilestonesFinetuning(BaseFinetuning):
    def __init__(self, milestones: tuple[int, int] = (1, 2), train_bn: bool = False) -> None:
        super().__init__()
        self.milestones = milestones
        self.train_bn = train_bn

    def freeze_before_training(self, pl_module: Any) -> None:
        self.freeze(modules=pl_module.feature_extractor, train_bn=self.train_bn)

    def finetune_function(self, pl_module: Any, epoch: int, optimizer: Any) -> None:
        layers = list(pl_module.feature_extractor)
        if epoch == self.milestones[0]:
            self.unfreeze_and_add_param_group(modules=layers[-3:], optimizer=optimizer, train_bn=self.train_bn)
        elif epoch == self.milestones[1]:
            self.unfreeze_and_add_param_group(modules=layers[:-3], optimizer=optimizer, train_bn=self.train_bn)


class TransferLearningModel(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        widths = [1, 4, 4, 8]
        blocks = [(nn.Conv2d(a, b, 3, padding=1), nn.BatchNorm2d(b), nn.ReLU()) for a, b in pairwise(widths)]
        self.feature_extractor = nn.Sequential(*(layer for block in blocks for layer in block))
        self.fc = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))
        self.train_acc, self.valid_acc = Accuracy(task="binary"), Accuracy(task="binary")

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.feature_extractor(x).mean((2, 3)))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        y_logits, y_true = self.forward(x), (y % 2).view((-1, 1)).type_as(x)
        train_loss = F.binary_cross_entropy_with_logits(y_logits, y_true)
        self.log("train_acc", self.train_acc(torch.sigmoid(y_logits), y_true.int()), prog_bar=True)
        return train_loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        y_logits, y_true = self.forward(x), (y % 2).view((-1, 1)).type_as(x)
        self.log("val_loss", F.binary_cross_entropy_with_logits(y_logits, y_true), prog_bar=True)
        self.log("val_acc", self.valid_acc(torch.sigmoid(y_logits), y_true.int()), prog_bar=True)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.Adam([p for p in self.parameters() if p.requires_grad], lr=0.01)
        return [optimizer], [torch.optim.lr_scheduler.MultiStepLR(optimizer, milestones=[1, 2], gamma=0.1)]


def finetuning(trainer_kwargs: dict[str, Any]) -> None:
    trainer_kwargs["callbacks"].append(MilestonesFinetuning())
    trainer = Trainer(max_epochs=4, **trainer_kwargs)
    trainer.fit(TransferLearningModel(), DataLoader(images(24), 8, shuffle=True), DataLoader(images(16), 8))


# -- segmentation ---------------------------------------------------------------------------------------------------


class DoubleConv(nn.Sequential):
    def __init__(self, a: int, b: int) -> None:
        conv = [nn.Conv2d(a, b, 3, padding=1), nn.BatchNorm2d(b), nn.ReLU(inplace=True)]
        super().__init__(*conv, nn.Conv2d(b, b, 3, padding=1), nn.BatchNorm2d(b), nn.ReLU(inplace=True))


class Up(nn.Module):
    def __init__(self, a: int, b: int) -> None:
        super().__init__()
        self.upsample, self.conv = nn.ConvTranspose2d(a, a // 2, 2, stride=2), DoubleConv(a, b)

    def forward(self, x1: Tensor, x2: Tensor) -> Tensor:
        x1 = self.upsample(x1)
        diff_h, diff_w = x2.shape[2] - x1.shape[2], x2.shape[3] - x1.shape[3]
        x1 = F.pad(x1, [diff_w // 2, diff_w - diff_w // 2, diff_h // 2, diff_h - diff_h // 2])
        return self.conv(torch.cat([x2, x1], dim=1))


class UNet(nn.Module):
    def __init__(self, num_layers: int = 3, features: int = 4) -> None:
        super().__init__()
        self.num_layers = num_layers
        layers: list[nn.Module] = [DoubleConv(3, features)]
        feats = features
        for _ in range(num_layers - 1):
            layers.append(nn.Sequential(nn.MaxPool2d(2), DoubleConv(feats, feats * 2)))
            feats *= 2
        for _ in range(num_layers - 1):
            layers.append(Up(feats, feats // 2))
            feats //= 2
        self.layers = nn.ModuleList([*layers, nn.Conv2d(feats, CLASSES, kernel_size=1)])

    def forward(self, x: Tensor) -> Tensor:
        xi = [self.layers[0](x)]
        for layer in self.layers[1 : self.num_layers]:
            xi.append(layer(xi[-1]))
        for i, layer in enumerate(self.layers[self.num_layers : -1]):
            xi[-1] = layer(xi[-1], xi[-2 - i])
        return self.layers[-1](xi[-1])


class SegModel(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = UNet()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        img, mask = batch
        loss = F.cross_entropy(self.net(img.float()), mask.long(), ignore_index=250)
        return {"loss": loss, "log": {"train_loss": loss.detach()}}

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        img, mask = batch
        loss_val = F.cross_entropy(self.net(img.float()), mask.long(), ignore_index=250)
        self.log("val_loss", loss_val)
        return {"val_loss": loss_val}

    def configure_optimizers(self) -> Any:
        opt = torch.optim.Adam(self.net.parameters(), lr=0.001)
        return [opt], [torch.optim.lr_scheduler.CosineAnnealingLR(opt, T_max=10)]


def segmentation(trainer_kwargs: dict[str, Any]) -> None:
    def pictures(count: int) -> TensorDataset:
        drawn = images(count, channels=3).tensors[0]
        return TensorDataset(drawn, (drawn.mean(1) * CLASSES).long())

    trainer = Trainer(max_epochs=2, **trainer_kwargs)
    trainer.fit(SegModel(), DataLoader(pictures(16), 8, shuffle=True), DataLoader(pictures(8), 8))


if __name__ == "__main__":
    main(
        {
            "bug report model": Case(boring, key=None, refused="calls 1 module that a stage can begin with"),
            "autoencoder": Case(partial(autoencoder, ImageSampler), key={"decoder": 1}),
            "autoencoder, samples on all ranks": Case(partial(autoencoder, ImageSamplerOnAll), key={"decoder": 1}),
            "image classifier": Case(classifier, key={"model.fc1": 1}, draws=True),
            "transformer": Case(language, key={"model.decoder": 1}, draws=True),
            "GAN": Case(gan, key={"discriminator": 1}, draws=True),
            "finetuning": Case(finetuning, key={"fc": 1}),
            "segmentation": Case(segmentation, key={"net.layers.3": 1}),
        },
        "lightning.pytorch",
    )
