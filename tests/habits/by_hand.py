"""Other optimization than one backward and one update a batch: by hand, with closures, and of batches passed over."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_

from tests.habits.modules import WIDTH, Evaluated, Layer, Layers
from tests.habits.table import error, habit


class ByHand(Layers):
    """One optimizer."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def loss(self, batch: Any) -> Tensor:
        x, y = batch
        return F.cross_entropy(self(x), y)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        loss = self.loss(batch)
        self.log("train_loss", loss)
        self.manual_backward(loss)
        optimizer.step()


@habit(plain=False, without={"training_step": Layers.training_step, "automatic_optimization": True}, shows=False)
class ZeroBackwardStep(ByHand):
    """The plainest of all."""


@habit(plain=False)
class ReturnsItsLoss(ByHand):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        self.optimizers().zero_grad()  # between forward and backward
        self.manual_backward(loss)
        self.optimizers().step()
        return {"loss": loss, "other": loss * 2}


@habit(plain=False)
class AccumulatesByHand(ByHand):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.manual_backward(self.loss(batch) / 2)
        if (batch_idx + 1) % 2 == 0:
            self.clip_gradients(self.optimizers(), gradient_clip_val=0.5, gradient_clip_algorithm="norm")
            self.optimizers().step()
            self.optimizers().zero_grad()


@habit(plain=False)
class ClipsInTheFirstStep(ByHand):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(self.loss(batch))
        self.clip_gradients(optimizer, gradient_clip_val=0.1, gradient_clip_algorithm="norm")
        optimizer.step()


@habit(plain=False)
class StepsItsScheduler(ByHand):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        super().training_step(batch, batch_idx)
        self.lr_schedulers().step()

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)]


@habit(plain=False)
class StepsWithAClosure(ByHand):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        optimizer = self.optimizers()

        def closure() -> Tensor:
            loss = self.loss(batch)
            optimizer.zero_grad()
            self.manual_backward(loss)
            return loss

        self.log("by_step", optimizer.step(closure=closure))


@habit(plain=False)
class StepsTorchsOptimizer(ByHand):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        optimizer = self.optimizers(use_pl_optimizer=False)
        optimizer.zero_grad()
        self.manual_backward(self.loss(batch))
        optimizer.step()


@habit(plain=False, shows=False)
class CallsTorchsBackward(ByHand):
    """`loss.backward()` where Lightning asks for manual_backward, and then torch's function for two losses."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.loss(batch).backward()
        features = self.features(batch[0])
        torch.autograd.backward([features.square().mean(), features.abs().mean()])
        optimizer.step()


@habit(plain=False, without={"scale": 1.0})
class OverridesManualBackward(ByHand):
    """Of which the step's loss gets a factor."""

    scale = 0.25

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        super().training_step(batch, batch_idx)

    def manual_backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        super().manual_backward(self.scale * loss, *args, **kwargs)


@habit(plain=False, observed=["norms"], without={"limit": 1e3})
class ClipsByTorch(ByHand):
    """torch.nn.utils.clip_grad_norm_ between the backward and the step, whose norm is logged; then by value."""

    limit = 0.05

    def __init__(self) -> None:
        super().__init__()
        self.norms: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(self.loss(batch))
        norm = clip_grad_norm_(self.parameters(), self.limit)
        self.log("norm", norm)
        self.norms.append(norm.item())
        torch.nn.utils.clip_grad_value_(self.parameters(), clip_value=self.limit / 4)
        optimizer.step()


@habit(plain=False)
class TwiceABatch(ByHand):
    """Two updates on the same batch, the second with the weights of the first."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        for _ in range(2):
            super().training_step(batch, batch_idx)


class Adversarial(ByHand):
    """A generator, and a discriminator of what it gives."""

    def __init__(self) -> None:
        super().__init__()
        del self.head
        self.discriminator = nn.ModuleList([Layer() for _ in range(4)])
        self.judge = nn.Linear(WIDTH, 1)

    def chain(self) -> list[str]:
        return [*(f"layers.{i}" for i in range(4)), *(f"discriminator.{i}" for i in range(4))]

    def forward(self, z: Tensor) -> Tensor:
        return self.features(z)

    def noise(self, x: Tensor) -> Tensor:
        return torch.randn(x.shape[0], WIDTH).type_as(x)

    def judged(self, x: Tensor) -> Tensor:
        for layer in self.discriminator:
            x = layer(x)
        return self.judge(x)

    def adversarial_loss(self, logits: Tensor, is_real: float) -> Tensor:
        return F.binary_cross_entropy_with_logits(logits, torch.full((len(logits), 1), is_real).type_as(logits))

    def configure_optimizers(self) -> Any:
        return [
            torch.optim.Adam(self.layers.parameters(), lr=0.01, betas=(0.5, 0.999)),
            torch.optim.Adam([*self.discriminator.parameters(), *self.judge.parameters()], lr=0.01),
        ], []


@habit(plain=False, observed=["generated"], shows=False)  # nothing trains without it
class GANWithToggles(Adversarial):
    """As in Lightning's example: the generator runs once for each of the two."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, _ = batch
        for_generator, for_discriminator = self.optimizers()
        z = self.noise(x)
        self.toggle_optimizer(for_generator)
        self.generated = self(z)
        loss = self.adversarial_loss(self.judged(self(z)), 1.0)
        self.log("g_loss", loss, prog_bar=True)
        self.manual_backward(loss)
        for_generator.step()
        for_generator.zero_grad()
        self.untoggle_optimizer(for_generator)
        self.toggle_optimizer(for_discriminator)
        real = self.adversarial_loss(self.judged(x), 1.0)
        fake = self.adversarial_loss(self.judged(self(z).detach()), 0.0)
        loss = (real + fake) / 2
        self.log("d_loss", loss, prog_bar=True)
        self.manual_backward(loss)
        for_discriminator.step()
        for_discriminator.zero_grad()
        self.untoggle_optimizer(for_discriminator)


@habit(plain=False, shows=False)
class GANWithToggledModels(Adversarial):
    """As in Lightning's manual: each optimizer's part is within its toggle_model."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, _ = batch
        for_generator, for_discriminator = self.optimizers()
        fake = self(self.noise(x))
        with for_discriminator.toggle_model(sync_grad=batch_idx > 0):
            real = self.adversarial_loss(self.judged(x), 1.0)
            loss = real + self.adversarial_loss(self.judged(fake.detach()), 0.0)
            for_discriminator.zero_grad()
            self.manual_backward(loss)
            for_discriminator.step()
        with for_generator.toggle_model():
            loss = self.adversarial_loss(self.judged(self(self.noise(x))), 1.0)
            for_generator.zero_grad()
            self.manual_backward(loss)
            for_generator.step()
        self.log("g", loss)


@habit(plain=False, shows=False)
class GANWithOneForward(Adversarial):
    """As in torch's example: both losses go back from what the generator gave once."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, _ = batch
        for_generator, for_discriminator = self.optimizers()
        fake = self(self.noise(x))
        for_discriminator.zero_grad()
        real_loss = self.adversarial_loss(self.judged(x), 1.0)
        self.manual_backward(real_loss)
        fake_loss = self.adversarial_loss(self.judged(fake.detach()), 0.0)
        self.manual_backward(fake_loss)
        for_discriminator.step()
        for_generator.zero_grad()
        loss = self.adversarial_loss(self.judged(fake), 1.0)
        self.manual_backward(loss)
        for_generator.step()
        self.log_dict({"d": real_loss + fake_loss, "g": loss})


@habit(plain=False)
class RetainsTheGraph(ByHand):
    """Two losses of one forward, one backward after the other."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        optimizer = self.optimizers()
        optimizer.zero_grad()
        features = self.features(x)
        logits = self.head(features)
        self.manual_backward(F.cross_entropy(logits, y), retain_graph=True)
        self.manual_backward(features.square().mean() + logits.square().mean())
        optimizer.step()


@habit(plain=False)
class KeepsDetachedValues(ByHand):
    """What one part computes is data of the next."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, _ = batch
        optimizer = self.optimizers()
        target = self.features(x).detach()
        self.manual_backward(self.loss(batch))
        optimizer.step()
        optimizer.zero_grad()
        self.manual_backward(F.mse_loss(self.features(x), target + 1))
        optimizer.step()
        optimizer.zero_grad()
        self.log("kept", target.mean())


@habit(plain=False, shows=False)  # without it, the same is logged
class ReadsItsLoss(ByHand):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        loss = self.loss(batch)
        self.manual_backward(loss if loss.item() < 100 else loss * 0.5)
        optimizer.step()
        self.log("train_loss", loss.item())


@habit(plain=False, observed=["seen"])
class HooksAroundBackward(ByHand):
    """Hooks that look at the loss, at gradients, and change them."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Any] = []

    def on_before_backward(self, loss: Tensor) -> None:
        self.seen.append(loss.detach().clone())

    def on_after_backward(self) -> None:
        self.seen.append(sum(p.grad.norm() for p in self.parameters() if p.grad is not None))
        self.head.weight.grad.mul_(0.5)

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.seen.append(self.layers[0].linear.weight.grad.abs().max())

    def on_before_zero_grad(self, optimizer: Any) -> None:
        self.seen.append("zero_grad")


@habit(plain=False)
class LBFGS(Layers):
    """An optimizer that calls its closure several times."""

    def configure_optimizers(self) -> Any:
        return torch.optim.LBFGS(self.parameters(), lr=0.1, max_iter=4)


@habit(plain=False)
class LBFGSOnALine(Layers):
    """With the strong Wolfe conditions, which look at losses and gradients."""

    def configure_optimizers(self) -> Any:
        return torch.optim.LBFGS(self.parameters(), lr=1, max_iter=3, line_search_fn="strong_wolfe")


@habit(plain=False)
class LBFGSByHand(ByHand):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        optimizer = self.optimizers()

        def closure() -> Tensor:
            optimizer.zero_grad()
            loss = self.loss(batch)
            self.manual_backward(loss)
            return loss

        optimizer.step(closure)

    def configure_optimizers(self) -> Any:
        return torch.optim.LBFGS(self.parameters(), lr=0.1, max_iter=3)


@habit(plain=False)
class SkipsBatchByNone(Layers):
    """None is returned for a batch."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor | None:
        return None if self.global_step == 1 else super().training_step(batch, batch_idx)


@habit(plain=False)
class SkipsSomeMicrobatches(Layers):
    """None is returned where a micro-batch has nothing to train on."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor | None:
        loss = super().training_step(batch, batch_idx)
        return loss if (batch[1] > 0).all() else None


@habit(plain=False, shows=False)
class ReturnsNothing(Layers):
    """As where somebody has forgotten to return the loss: Lightning warns, and nothing is trained."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        super().training_step(batch, batch_idx)


@habit(plain=False)
class OptimizersOfHalves(ByHand):
    """Two optimizers, each of one half of the layers, take turns; gradients are clipped by value."""

    def configure_optimizers(self) -> Any:
        first = torch.optim.SGD([p for layer in self.layers[:2] for p in layer.parameters()], lr=0.1)
        second = torch.optim.Adam([*self.layers[2:].parameters(), *self.head.parameters()], lr=0.1)
        schedulers = [torch.optim.lr_scheduler.ExponentialLR(one, 0.9) for one in (first, second)]
        return [first, second], schedulers

    def training_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        optimizer = self.optimizers()[batch_idx % 2]  # type: ignore[index]
        self.toggle_optimizer(optimizer)
        optimizer.zero_grad()
        self.manual_backward(F.cross_entropy(self(x), y))
        self.clip_gradients(optimizer, 0.05, "value")
        optimizer.step()
        self.untoggle_optimizer(optimizer)

    def on_train_epoch_end(self) -> None:
        for scheduler in self.lr_schedulers():  # type: ignore[union-attr]
            scheduler.step()


@habit(plain=False, shows=False, batches=3)
class MovingAverageOfFeatures(Layers):
    """Kept by the module from one micro-batch to the next, as StyleGAN's ``w_avg``."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.average = torch.zeros(WIDTH)

    def training_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        features = self.features(x)
        self.average = 0.9 * self.average + 0.1 * features.detach().mean(0)
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(F.cross_entropy(self.head(features - self.average), y))
        optimizer.step()


@habit(plain=False, shows=False)
class JudgedAgainAfterUnfreezing(Layers):
    """A discriminator is frozen for the generator's backward, and called again on the same images, as in ESRGAN."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.judge = nn.Sequential(Layer(), Layer(), nn.Linear(WIDTH, 1))

    def chain(self) -> list[str]:
        return ["layers.0", "layers.1", "layers.2", "judge.0", "judge.1"]

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.layers.parameters(), lr=0.01), torch.optim.SGD(self.judge.parameters(), lr=0.01)

    def training_step(self, batch: Any, batch_idx: int) -> None:
        x = batch[0]
        self.judge.requires_grad_(False)
        made = self.features(x)
        self.manual_backward(self.judge(made).mean())
        self.judge.requires_grad_(True)
        relative = self.judge(made).detach().mean()
        self.manual_backward((self.judge(x) - relative).square().mean())
        self.manual_backward(self.judge(made.detach()).square().mean())
        for optimizer in self.optimizers():  # type: ignore[union-attr]
            optimizer.step()
            optimizer.zero_grad()


class WeightedByLastLayer(Layers):
    """A loss weighted by the norm of its gradient for the last layer, as in VQ-GAN."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(part.parameters(), lr=0.1) for part in (self.layers, self.head)]

    def update(self, optimizer: Any, loss: Tensor) -> None:
        try:
            [gradient] = torch.autograd.grad(loss, [self.layers[-1].linear.weight], retain_graph=True)
            weight = gradient.norm().detach()
        except RuntimeError:
            assert not self.training
            weight = torch.tensor(0.0)
        optimizer.zero_grad()
        self.manual_backward(loss * weight)
        optimizer.step()


@habit(plain=False, shows=False)
class WeightedByLastLayerToggledBefore(WeightedByLastLayer):
    """The optimizer is toggled before the forward."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer, _ = self.optimizers()  # type: ignore[misc]
        self.toggle_optimizer(optimizer)
        self.update(optimizer, (batch[0] - self.features(batch[0])).abs().mean())
        self.untoggle_optimizer(optimizer)


@habit(plain=False, shows=False, expect=error(r"toggle_optimizer.*by_hand\.py:\d+.*before what is differentiated"))
class WeightedByLastLayerToggledAfter(WeightedByLastLayer):
    """The optimizer is toggled after the forward, and the refusal is lost in an `except`."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        made = self.features(batch[0])
        optimizer, _ = self.optimizers()  # type: ignore[misc]
        self.toggle_optimizer(optimizer)
        self.update(optimizer, (batch[0] - made).abs().mean())
        self.untoggle_optimizer(optimizer)


@habit(plain=False, shows=False, trainer={"precision": "64-true"}, observed=["seen"])
class NotesDefaultDtype(Evaluated):
    """In double precision it is that throughout a step, and not after it."""

    automatic_optimization = False

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters())

    def note(self, expected: torch.dtype = torch.float64) -> None:
        assert torch.zeros(2).dtype is torch.get_default_dtype() is expected
        self.seen.append(str(expected))

    def on_after_backward(self) -> None:
        self.note()

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.note()

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()
        self.note()
        optimizer.zero_grad()
        self.manual_backward(F.cross_entropy(self(batch[0]), batch[1]))
        self.note()
        optimizer.step()
        self.note()

    def on_train_batch_end(self, *_: Any) -> None:
        self.note(torch.float32)

    def on_fit_end(self) -> None:
        self.note(torch.float32)


@habit(plain=False, shows=False, trainer={"precision": "64-true"}, observed=["seen"])
class NotesDefaultDtypeByClosure(NotesDefaultDtype):
    """Where the update is given a closure, in it and after it."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()

        def closure() -> Tensor:
            self.note()
            optimizer.zero_grad()
            loss = F.cross_entropy(self(batch[0]), batch[1])
            self.manual_backward(loss)
            self.note()
            return loss

        optimizer.step(closure)
        self.note()


class SetsRates(ByHand):
    """Sets the learning rate within the step."""

    def rate(self, loss: Tensor, batch_idx: int) -> float | Tensor:
        raise NotImplementedError

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        loss = self.loss(batch)
        self.manual_backward(loss)
        for group in optimizer.param_groups:
            group["lr"] = self.rate(loss, batch_idx)
        optimizer.step()
        self.seen = [group["lr"] for group in optimizer.param_groups]


@habit(plain=False, observed=["seen"])
class RateDecaysByHand(SetsRates):
    """By a factor for each batch, and not for each micro-batch."""

    def rate(self, loss: Tensor, batch_idx: int) -> float:
        return self.optimizers().param_groups[0]["lr"] * 0.9  # type: ignore[union-attr]

    def on_train_end(self) -> None:
        assert abs(self.seen[0] - 0.1 * 0.9**self.global_step) < 1e-9


@habit(plain=False, shows=False, expect=error(r"sets 'lr' of param_groups\[0\] of SGD to .* for its first micro-batch"))
class RateByLossOfMicrobatch(SetsRates):
    def rate(self, loss: Tensor, batch_idx: int) -> float:
        return 0.01 * loss.item()


@habit(plain=False, observed=["seen"])
class TensorRateHalvedByHand(SetsRates):
    """A rate that is a tensor is halved in place, and the group counts its updates."""

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=torch.tensor(0.1))

    def rate(self, loss: Tensor, batch_idx: int) -> Tensor:
        group = self.optimizers().param_groups[0]  # type: ignore[union-attr]
        group["n"] = group.get("n", 0) + 1
        group["lr"].mul_(0.8)
        return group["lr"]

    def on_train_end(self) -> None:
        assert abs(self.seen[0].item() - 0.1 * 0.8**self.global_step) < 1e-6
        assert self.optimizers().param_groups[0]["n"] == self.global_step  # type: ignore[union-attr]


@habit(plain=False, shows=False, expect=error(r"sets 'lr' of param_groups\[0\] of SGD to .* for its first micro-batch"))
class TensorRateByLossOfMicrobatch(SetsRates):
    def rate(self, loss: Tensor, batch_idx: int) -> Tensor:
        return 0.01 * loss.detach()


@habit(plain=False, without={"rate": 0.0})
class FollowsByRowsAndParts(ByHand):
    """A target follows the head row by row, and by lists of views of its weights, after the update."""

    rate = 0.1

    def __init__(self) -> None:
        super().__init__()
        self.target = copy.deepcopy(self.head).requires_grad_(False)

    def loss(self, batch: Any) -> Tensor:
        x, y = batch
        features = self.features(x)
        return F.cross_entropy(self.head(features), y) + 0.1 * F.mse_loss(self.head(features), self.target(features))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        super().training_step(batch, batch_idx)
        with torch.no_grad():
            for row, own in zip(self.target.weight.unbind(), self.head.weight.unbind(), strict=True):
                row.lerp_(own, self.rate)
            self.target.bias.chunk(2)[0].lerp_(self.head.bias.chunk(2)[0], self.rate)
            torch._foreach_mul_([one.view(-1) for one in self.target.parameters()], 1.0 - 0.1 * self.rate)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD([one for one in self.parameters() if one.requires_grad], lr=0.1)
