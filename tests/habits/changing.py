"""What a step does changes while training goes on."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import BaseFinetuning, Callback, LearningRateFinder, LearningRateMonitor
from torch import Tensor, nn

from tests.habits.modules import CLASSES, SAMPLES, WIDTH, Layers
from tests.habits.table import habit


@habit(without={"beta": 0.0})
class KLFromSecondEpoch(Layers):
    """A VAE whose KL term is switched on after the first epoch."""

    beta = 0.3

    def __init__(self) -> None:
        super().__init__()
        self.to_latent = nn.Linear(WIDTH, 2 * WIDTH)

    def chain(self) -> list[str]:
        return ["layers.0", "layers.1", "to_latent", "layers.2", "layers.3"]

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, _ = batch
        hidden = self.layers[1](self.layers[0](x))
        mean, log_var = self.to_latent(hidden).chunk(2, dim=-1)
        z = mean + 0.1 * torch.exp(0.5 * log_var)
        reconstruction = F.mse_loss(self.layers[3](self.layers[2](z)), x)
        kl = -0.5 * (1 + log_var - mean**2 - log_var.exp()).mean()
        weight = self.beta if self.current_epoch > 0 else 0.0
        loss = reconstruction
        if weight > 0:
            loss = loss + weight * kl
        self.log_dict({"reconstruction": reconstruction, "kl": kl, "train_loss": loss})
        return loss


@habit(without={"beta": 0.0})
class KLWeightAnnealed(KLFromSecondEpoch):
    """The KL weight grows linearly from 0 with the global step."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, _ = batch
        mean, log_var = self.to_latent(self.layers[1](self.layers[0](x))).chunk(2, dim=-1)
        reconstruction = F.mse_loss(self.layers[3](self.layers[2](mean)), x)
        kl = -0.5 * (1 + log_var - mean**2 - log_var.exp()).mean()
        return reconstruction + self.beta * min(1.0, self.global_step / 4) * kl


@habit(without={"start": 100})
class AuxiliaryLossFromStep(Layers):
    """Deep supervision on the first layer's output, from the third step on."""

    start = 2

    def __init__(self) -> None:
        super().__init__()
        self.aux_head = nn.Linear(WIDTH, CLASSES)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        first = self.layers[0](x)
        hidden = first
        for layer in self.layers[1:]:
            hidden = layer(hidden)
        loss = F.cross_entropy(self.head(hidden), y)
        if self.global_step >= self.start:
            loss = loss + 0.4 * F.cross_entropy(self.aux_head(first), y)
        return loss


@habit(without={"start": 100})
class ActivityPenaltyFromStep(Layers):
    """A penalty on an early layer's own output only, without a head."""

    start = 2

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        first = self.layers[0](x)
        hidden = self.layers[3](self.layers[2](self.layers[1](first)))
        loss = F.cross_entropy(self.head(hidden), y)
        if self.global_step >= self.start:
            loss = loss + 0.1 * first.abs().mean()
        return loss


@habit(without={"start": 100})
class AuxiliaryFirstDetached(Layers):
    """An auxiliary term that is only watched in the first epoch, and trained on afterwards."""

    start = 1

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        early = self.layers[1](self.layers[0](x))
        loss = F.cross_entropy(self.head(self.layers[3](self.layers[2](early))), y)
        aux = early.pow(2).mean()
        if self.current_epoch < self.start:
            aux = aux.detach()
        self.log("aux", aux)
        return loss + 0.1 * aux


@habit(without={"start": 100})
class AuxiliaryFirstWithoutGradient(Layers):
    """An auxiliary head that runs under no_grad until it is trained."""

    start = 1

    def __init__(self) -> None:
        super().__init__()
        self.aux_head = nn.Linear(WIDTH, CLASSES)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        early = self.layers[1](self.layers[0](x))
        with torch.set_grad_enabled(self.current_epoch >= self.start):
            aux = F.cross_entropy(self.aux_head(early), y)
        loss = F.cross_entropy(self.head(self.layers[3](self.layers[2](early))), y)
        self.log("aux", aux)
        return loss + 0.3 * aux


@habit(without={"epoch": 100})
class UnfrozenByHand(Layers):
    """The first layers are frozen, and unfrozen when the second epoch begins."""

    epoch = 1

    def __init__(self) -> None:
        super().__init__()
        for layer in self.layers[:2]:
            layer.requires_grad_(False)

    def on_train_epoch_start(self) -> None:
        if self.current_epoch == self.epoch:
            for parameter in self.layers[:2].parameters():
                parameter.requires_grad = True


@habit(without={"epoch": 100})
class UnfrozenOneByOne(Layers):
    """ULMFiT's gradual unfreezing: from the head down, a layer each step."""

    epoch = 0

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        for number, layer in enumerate(reversed(self.layers)):
            layer.requires_grad_(self.current_epoch >= self.epoch and number <= self.global_step)


class Unfreezes(BaseFinetuning):
    def freeze_before_training(self, pl_module: Any) -> None:
        self.freeze(pl_module.layers[:2])

    def finetune_function(self, pl_module: Any, epoch: int, optimizer: Any) -> None:
        if epoch == 1:
            self.unfreeze_and_add_param_group(pl_module.layers[:2], optimizer, lr=0.05)


@habit(callbacks=lambda: [Unfreezes()])
class UnfrozenByCallback(Layers):
    """Lightning's BaseFinetuning adds the first layers to the optimizer in the second epoch."""

    shared_lr = 0.1

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], lr=self.shared_lr)


@habit(callbacks=lambda: [LearningRateMonitor(), Unfreezes()])
class UnfrozenBesideRates(UnfrozenByCallback):
    """Another callback has asked for the rank, in a warning, before the first layers are added."""


class UnfreezesAtOnce(Unfreezes):
    def finetune_function(self, pl_module: Any, epoch: int, optimizer: Any) -> None:
        super().finetune_function(pl_module, epoch + 1, optimizer)


@habit(plain=False, callbacks=lambda: [UnfreezesAtOnce(), LearningRateFinder(num_training_steps=5)])
class RateFoundWhileUnfreezing(UnfrozenByCallback):
    """Layers are frozen and unfrozen in a search for a rate, which is a run within a hook."""

    lr = shared_lr = 0.1


@habit(plain=False, callbacks=lambda: [UnfreezesAtOnce(), LearningRateFinder(num_training_steps=5)])
class RateFoundBesideFirstRank(RateFoundWhileUnfreezing):
    """The first rank alone reads a weight in hooks of the search."""

    norm = 0.0

    def on_train_end(self) -> None:
        if self.trainer.is_global_zero:
            self.norm = self.head.weight.norm().item()

    on_train_epoch_end = on_train_end


class ReadsOnFirstRank(Callback):
    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        if trainer.is_global_zero:
            self.norm = pl_module.head.weight.norm().item()


@habit(plain=False, callbacks=lambda: [ReadsOnFirstRank(), LearningRateFinder(num_training_steps=5)])
class RateFoundBesideFirstRankInUpdate(RateFoundBesideFirstRank):
    """It does so before updates of the search, too, and has asked for the rank before it."""

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.on_train_end()


@habit(plain=False, callbacks=lambda: [UnfreezesAtOnce()])
class UnfrozenOfSameValues(UnfrozenByCallback):
    """Lightning leaves out parameters whose values others in the optimizer have, as all biases have here."""

    def __init__(self) -> None:
        super().__init__()
        for layer in self.layers:
            nn.init.zeros_(layer.linear.bias)


@habit(without={"epoch": 0})
class GradientsByEpoch(Layers):
    """The backbone runs under set_grad_enabled(epoch > 0)."""

    epoch = 1

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        with torch.set_grad_enabled(self.current_epoch >= self.epoch):
            x = self.layers[1](self.layers[0](x))
        return F.cross_entropy(self.head(self.layers[3](self.layers[2](x))), y)


@habit(without={"epoch": 100})
class SkipFromSecondEpoch(Layers):
    """A long skip connection, used from the second epoch on."""

    epoch = 1

    def features(self, x: Tensor) -> Tensor:
        first = self.layers[0](x)
        hidden = self.layers[2](self.layers[1](first))
        if self.current_epoch >= self.epoch:
            hidden = hidden + first
        return self.layers[3](hidden)


@habit(without={"epoch": 100})
class BatchTensorFromSecondEpoch(Layers):
    """Sample weights of the batch, which the loss uses from the second epoch on."""

    epoch = 1

    @staticmethod
    def batch(generator: torch.Generator) -> Any:
        x, y = Layers.batch(generator)
        return {"x": x, "y": y, "weight": torch.rand(SAMPLES, generator=generator)}

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        losses = F.cross_entropy(self(batch["x"]), batch["y"], reduction="none")
        if self.current_epoch >= self.epoch:
            losses = losses * batch["weight"]
        return losses.mean()


@habit(without={"epoch": 100})
class ParameterFromSecondEpoch(Layers):
    """A parameter of the LightningModule itself that is first used in the second epoch."""

    epoch = 1

    def __init__(self) -> None:
        super().__init__()
        self.temperature = nn.Parameter(torch.tensor(1.5))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        logits = self(x)
        if self.current_epoch >= self.epoch:
            logits = logits / self.temperature
        return F.cross_entropy(logits, y)


@habit(without={"epoch": 100})
class EarlyParameterFromSecondEpoch(Layers):
    """As before, used before the first layer."""

    epoch = 1

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.full((WIDTH,), 0.9))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x * self.scale if self.current_epoch >= self.epoch else x)


@habit(without={"epoch": 100})
class FrozenAgain(Layers):
    """Layers that were trained are frozen in the second epoch, by requires_grad_ on the whole list."""

    epoch = 1

    def on_train_epoch_start(self) -> None:
        self.layers[2:].requires_grad_(self.current_epoch < self.epoch)


@habit(without={"epoch": 100})
class LossSwitched(Layers):
    """Another loss, and another head, in the second epoch."""

    on_last_stage = ("head",)
    epoch = 1

    def __init__(self) -> None:
        super().__init__()
        self.decoder = nn.Linear(WIDTH, WIDTH)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        hidden = self.features(x)
        if self.current_epoch < self.epoch:
            loss = F.mse_loss(self.decoder(hidden), x)
            self.log("reconstruction", loss)
        else:
            loss = F.cross_entropy(self.head(hidden), y)
            self.log("classification", loss)
        return loss


@habit(without={"epoch": 100})
class UncertaintyWeightsLearned(Layers):
    """Kendall's learned weights of two losses, the second of which joins later."""

    epoch = 1

    def __init__(self) -> None:
        super().__init__()
        self.log_vars = nn.Parameter(torch.zeros(2))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        early = self.layers[0](x)
        hidden = self.layers[3](self.layers[2](self.layers[1](early)))
        losses = [F.cross_entropy(self.head(hidden), y)]
        if self.current_epoch >= self.epoch:
            losses.append(early.pow(2).mean())
        return sum(torch.exp(-self.log_vars[i]) * loss + self.log_vars[i] for i, loss in enumerate(losses))


@habit(without={"epoch": 100})
class DeeperEachEpoch(Layers):
    """Progressive growing: the second half of the layers joins in the second epoch."""

    on_last_stage = ("head",)
    epoch = 1

    def features(self, x: Tensor) -> Tensor:
        depth = 4 if self.current_epoch >= self.epoch else 2
        for layer in self.layers[:depth]:
            x = layer(x)
        return x


@habit(without={"epoch": 100})
class ShallowerInSecondEpoch(Layers):
    """The last layers are left out in the second epoch."""

    on_last_stage = ("head",)
    epoch = 1

    def features(self, x: Tensor) -> Tensor:
        for number, layer in enumerate(self.layers):
            if number < 2 or self.current_epoch < self.epoch:
                x = layer(x)
        return x


class Activated(nn.Module):
    """A layer with an activation that can be exchanged."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.act: nn.Module = nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        return self.act(self.linear(x))


@habit(without={"epoch": 100})
class ActivationsSwapped(Layers):
    """ReLU is replaced by GELU in every layer."""

    layer = Activated
    epoch = 1

    def on_train_epoch_start(self) -> None:
        if self.current_epoch == self.epoch:
            for layer in self.layers:
                layer.act = nn.GELU()


@habit(without={"epoch": 100})
class LayerSwappedForIdentity(Layers):
    """A layer is cut out, by an nn.Identity in its place. It stays in the optimizer."""

    epoch = 1

    def on_train_epoch_start(self) -> None:
        if self.current_epoch == self.epoch:
            self.layers[2].linear = nn.Identity()


@habit(without={"epoch": 100})
class ForwardSwapped(Layers):
    """A layer's forward is replaced by another of its class."""

    epoch = 1

    def on_train_epoch_start(self) -> None:
        if self.current_epoch == self.epoch:
            layer = self.layers[1]
            layer.forward = lambda x: x + 0.5 * torch.sin(layer.linear(x))


@habit(without={"epoch": 100})
class HeadReinitialised(Layers):
    """The head starts over in the second epoch."""

    epoch = 1

    def on_train_epoch_start(self) -> None:
        if self.current_epoch == self.epoch:
            with torch.no_grad():
                self.head.weight.mul_(0.1)
                nn.init.zeros_(self.head.bias)


@habit(without={"every": 100})
class RegularizerEveryOtherStep(Layers):
    """StyleGAN's lazy regularisation: a term in every other step only, of a middle layer."""

    every = 2

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        middle = self.layers[1](self.layers[0](x))
        loss = F.cross_entropy(self.head(self.layers[3](self.layers[2](middle))), y)
        if self.global_step % self.every == 1:
            loss = loss + 0.2 * middle.var(0).mean()
        return loss


@habit(without={"epoch": 100})
class StopsItsGradient(Layers):
    """Features are detached from the second epoch on: early stages get no more gradients."""

    epoch = 1

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        hidden = self.layers[1](self.layers[0](x))
        if self.current_epoch >= self.epoch:
            hidden = hidden.detach()
        return F.cross_entropy(self.head(self.layers[3](self.layers[2](hidden))), y)


@habit(without={"weight": 0.0})
class TrainsEarlyStagesOnlyAtFirst(Layers):
    """The first epoch trains the first layers by a loss of their own; the rest waits."""

    on_last_stage = ("head",)
    weight = 1.0

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        hidden = self.layers[1](self.layers[0](x))
        if self.current_epoch == 0:
            return self.weight * F.mse_loss(hidden, x)
        return F.cross_entropy(self.head(self.layers[3](self.layers[2](hidden))), y)


@habit()
class StageNeverReached(Layers):
    """Only the first layer is called: later stages have nothing to do but what becomes of its result."""

    def features(self, x: Tensor) -> Tensor:
        return self.layers[0](x)
