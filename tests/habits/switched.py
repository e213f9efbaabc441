"""Parameters that a step freezes and thaws by itself, as for one term of its loss or for one of two networks."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.habits.by_hand import Adversarial
from tests.habits.modules import WIDTH, Layers
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


@habit(without={"start": 100})
class UnfrozenInStep(Layers):
    """The first layers are frozen for the first epoch, and unfrozen by the step itself."""

    start = 3

    def __init__(self) -> None:
        super().__init__()
        self.layers[:2].requires_grad_(False)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if self.global_step == self.start:
            self.layers[:2].requires_grad_(True)
        return F.cross_entropy(self(batch[0]), batch[1])


@habit(plain=False, trainer={"accumulate_grad_batches": 2}, without={"start": 100})
class UnfrozenInWindow(Layers):
    """A layer is unfrozen by the second batch of a window, and frozen again in the second batch of a later one."""

    start = 1

    def __init__(self) -> None:
        super().__init__()
        self.layers[1].requires_grad_(False)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if self.current_epoch * 10 + batch_idx == self.start:
            self.layers[1].requires_grad_(True)
        if self.current_epoch == 1 and batch_idx == 1:
            self.layers[1].requires_grad_(False)
        return F.cross_entropy(self(batch[0]), batch[1])


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


class Shifted(Layers):
    """Two parameters take part in what all layers compute, one of which is the first layer's own."""

    freezes = True
    num_columns = 1

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, WIDTH))
        self.layers[0].shifts = nn.Parameter(torch.linspace(-1, 1, WIDTH * self.num_columns).view(WIDTH, -1))

    def features(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x) * self.scale + self.layers[0].shifts[:, 0]
        return x

    def switch(self, on: bool) -> None:
        for parameter in (self.scale, self.layers[0].shifts):
            parameter.requires_grad_(on or not self.freezes)


@habit(without={"freezes": False})
class ShiftFrozenForOneTerm(Shifted):
    """Shared parameters of a term that they take no part in the gradients of."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        loss = F.cross_entropy(self(x), y)
        self.switch(False)
        term = self(x + 0.1).pow(2).mean()
        self.switch(True)
        return loss + 0.1 * term


# Above a megabyte, gradients of all uses on a stage travel as one.
@habit(without={"freezes": False}, plain_tolerance=1e-5, tolerance=1e-5)
class LargeShiftFrozenForOneTerm(ShiftFrozenForOneTerm):
    """Shared parameters that are large."""

    num_columns = 40_000


@habit(without={"freezes": False}, plain_tolerance=1e-5, tolerance=1e-5)
class LargeShiftFrozenFirst(Shifted):
    """A large one is frozen for the first term, and thawed for the second one."""

    num_columns = 40_000

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        self.switch(False)
        term = self(x + 0.1).pow(2).mean()
        self.switch(True)
        return F.cross_entropy(self(x), y) + 0.1 * term
