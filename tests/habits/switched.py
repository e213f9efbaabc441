"""Parameters that a step freezes and thaws by itself, as for one term of its loss or for one of two networks."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from tests.habits.by_hand import Adversarial
from tests.habits.modules import Layers
from tests.habits.table import error, habit


@habit(without={"freezes": False})
class FrozenWithinStep(Layers):
    """A layer is frozen while the loss is computed, and thawed at the end."""

    freezes = True

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        self.layers[2].requires_grad_(not self.freezes)
        loss = F.cross_entropy(self(x), y)
        self.layers[2].requires_grad_(True)
        return loss


@habit(without={"freezes": False})
class FrozenForOneTerm(Layers):
    """A second pass through layers and head whose parameters take no part in its term of the loss."""

    freezes = True

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        loss = F.cross_entropy(self(x), y)
        for parameter in [*self.layers[1:3].parameters(), *self.head.parameters()]:
            parameter.requires_grad = not self.freezes
        term = self(x + 0.1).pow(2).mean()
        for parameter in [*self.layers[1:3].parameters(), *self.head.parameters()]:
            parameter.requires_grad = True
        return loss + 0.1 * term


@habit(without={"freezes": False})
class FrozenFirstForOneTerm(Layers):
    """The term with frozen layers comes first, and layers are frozen from the second epoch on."""

    freezes = True

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        is_frozen = self.freezes and self.current_epoch > 0
        for parameter in self.layers[0].parameters():
            parameter.requires_grad_(not is_frozen)
        term = self.features(x + 0.1).pow(2).mean()
        for parameter in self.layers[0].parameters():
            parameter.requires_grad_(True)
        return F.cross_entropy(self(x), y) + 0.1 * term


@habit(without={"freezes": False})
class FrozenForTheRestOfTheStep(Layers):
    """A layer is frozen in the middle and thawed when the next step begins."""

    freezes = True

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        self.requires_grad_(True)
        loss = F.cross_entropy(self(x), y)
        self.layers[3].requires_grad_(not self.freezes)
        return loss + 0.1 * self(x * 2).pow(2).mean()

    def on_train_end(self) -> None:
        self.requires_grad_(True)


@habit(plain=False, without={"freezes": False})
class FrozenWithCheckpoints(Layers):
    """Frozen and thawed in turn by steps whose layers are recomputed."""

    freezes = True

    def features(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False)
        return x

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        self.layers[1].requires_grad_(batch_idx % 2 == 0 or not self.freezes)
        return F.cross_entropy(self(x), y)


@habit(expect=error(r"layers.1.*switched\.py:\d+.*before"), shows=False)
class FrozenInsideCheckpoint(Layers):
    """A layer freezes inside of a function that is recomputed."""

    def run(self, x: Tensor) -> Tensor:
        self.layers[1].requires_grad_(False)
        x = self.layers[1](x)
        self.layers[1].requires_grad_(True)
        return x

    def features(self, x: Tensor) -> Tensor:
        return self.layers[3](self.layers[2](checkpoint(self.run, self.layers[0](x), use_reentrant=False)))


@habit(plain=False, without={"freezes": False})
class DiscriminatorFrozenByHand(Adversarial):
    """A GAN whose discriminator is frozen while the generator is trained, by loops over parameters."""

    freezes = True

    def switch(self, on: bool) -> None:
        for parameter in self.discriminator.parameters():
            parameter.requires_grad_(on)

    def training_step(self, batch: Any, batch_idx: int) -> None:
        x, _ = batch
        for_generator, for_discriminator = self.optimizers()
        if self.freezes:
            self.switch(False)
        for_generator.zero_grad()
        self.manual_backward(-F.logsigmoid(self.judged(self(self.noise(x)))).mean())
        for_generator.step()
        self.switch(True)
        if not self.freezes:
            for_discriminator.zero_grad()
        generated = self.judged(self(self.noise(x)).detach())
        self.manual_backward((F.softplus(generated) + F.softplus(-self.judged(x))).mean())
        for_discriminator.step()
        for_discriminator.zero_grad()


@habit(plain=False, shows=False)
class DiscriminatorFrozenInOneLoss(Adversarial):
    """Both losses are summed, automatically optimized: the generator's through a frozen discriminator."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = True

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=0.01)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, _ = batch
        fake = self(self.noise(x))
        judged = F.softplus(-self.judged(x)).mean() + F.softplus(self.judged(fake.detach())).mean()
        for parameter in self.discriminator.parameters():
            parameter.requires_grad = False
        fooled = F.softplus(-self.judged(fake)).mean()
        for parameter in self.discriminator.parameters():
            parameter.requires_grad = True
        return judged + fooled


@habit(plain=False, without={"freezes": False})
class FrozenByWhatIsRead(Layers):
    """A term with a frozen layer where the loss that was read is large, in layers that are recomputed."""

    freezes = True

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False)
        loss = F.cross_entropy(self.head(x), y)
        if loss.item() > 1.3:
            self.layers[1].requires_grad_(not self.freezes)
            loss = loss + 0.1 * self.layers[2](self.layers[1](self.layers[0](batch[0]))).pow(2).mean()
            self.layers[1].requires_grad_(True)
        return loss
