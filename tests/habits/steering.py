"""Steps that steer the run: stop it, step schedulers, set learning rates, and keep what callbacks take."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tests.habits.modules import Layers
from tests.habits.table import habit


@habit(plain=False, observed=["seen"])
class CallbackMetricsInStep(Layers):
    """The step reads what was logged before."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        last = self.trainer.callback_metrics.get("train_loss")
        self.seen.append(-1.0 if last is None else float(last))
        loss = super().training_step(batch, batch_idx)
        return loss if last is None else loss / (1 + last)


@habit(observed=["steps"], plain=False)
class StopsInStep(Layers):
    """`trainer.should_stop = True` on a value of the loss, in the step."""

    threshold = 1.2

    def __init__(self) -> None:
        super().__init__()
        self.steps = 0

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.steps += 1
        if loss < self.threshold:
            self.trainer.should_stop = True
        return loss


@habit(observed=["last_step"], plain=False)
class StopsInBatchEnd(Layers):
    """The same in on_train_batch_end, by the outputs, and min_steps unset."""

    last_step = -1

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.last_step = self.global_step
        if outputs["loss"] > 1.5:
            self.trainer.should_stop = True


@habit(observed=["epochs"], epochs=4, plain=False)
class StopsInEpochEnd(Layers):
    """The same by the mean of a list, at the end of an epoch."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: list[float] = []
        self.epochs: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.kept.append(loss.item())
        return loss

    def on_train_epoch_end(self) -> None:
        self.epochs.append(sum(self.kept) / len(self.kept))
        self.kept.clear()
        if len(self.epochs) > 1 and self.epochs[-1] < self.epochs[-2]:
            self.trainer.should_stop = True


@habit(plain=False)
class SchedulerSteppedByHand(Layers):
    """A scheduler that Lightning does not step (interval None), stepped at the end of each batch."""

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.8)
        return [optimizer], [{"scheduler": scheduler, "interval": "epoch", "frequency": 1000}]

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.lr_schedulers().step()


@habit()
class SchedulerSteppedInStep(SchedulerSteppedByHand):
    """The same in the last line of the step, once a micro-batch."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.lr_schedulers().step()
        return loss

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        pass


@habit(plain=False)
class LearningRateByHand(Layers):
    """The learning rate is set in the parameter groups before each batch."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        for group in self.optimizers().param_groups:
            group["lr"] = 0.1 / (1 + self.global_step)


@habit()
class LearningRateInStep(Layers):
    """The same at the end of the step, by the loss."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        rate = 0.05 * min(1.0, loss.item())
        for group in self.optimizers().param_groups:
            group["lr"] = rate
        self.log("lr", rate)
        return loss


@habit()
class WarmUpInOptimizerStep(Layers):
    """Learning-rate warm-up in an overridden optimizer_step, from Lightning's own documentation."""

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        optimizer.step(closure=optimizer_closure)
        if self.trainer.global_step < 4:
            scale = min(1.0, float(self.trainer.global_step + 1) / 4)
            for group in optimizer.param_groups:
                group["lr"] = scale * 0.1


@habit(observed=["norms"], plain=False)
class StopsByGradientsOfFirstLayer(Layers):
    """The run stops, and the rate falls, by gradients of the first layer, which one stage has."""

    def __init__(self) -> None:
        super().__init__()
        self.norms: list[float] = []

    def on_after_backward(self) -> None:
        largest = max(p.grad.abs().max() for p in self.layers[0].parameters() if p.grad is not None)
        self.norms.append(float(largest))
        if largest > 0.05 and self.global_step == 3:
            self.trainer.should_stop = True

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        if self.head.weight.grad.norm() > 0.1:
            for group in optimizer.param_groups:
                group["lr"] *= 0.9


@habit(plain=False)
class SkipsEpochByWeights(Layers):
    """The rest of an epoch is left out by the norm of a layer's weights."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> Any:
        return -1 if self.layers[0].linear.weight.norm() > 0.1 and self.global_step == 2 else None


@habit(observed=["steps"], plain=False)
class StopsByLossByHand(Layers):
    """A hand-optimized step stops the run by its loss."""

    def __init__(self) -> None:
        super().__init__()
        self.steps = 0
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()
        loss = super().training_step(batch, batch_idx)
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()
        self.steps += 1
        if loss.item() > 0.5 and batch_idx == 1:
            self.trainer.should_stop = True
