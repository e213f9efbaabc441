"""What hooks do with optimizers and schedulers: their states, their groups, their rates."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor

from tests.habits.modules import Evaluated, Layers
from tests.habits.table import habit


class Noting(Layers):
    """Notes what its hooks find."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[Any] = []


@habit(observed=["found"], plain=False)
class MomentumRead(Noting):
    """Reads the momentum of all parameters after each update."""

    def on_train_batch_end(self, *_: Any) -> None:
        state = self.trainer.optimizers[0].state
        self.found.append(sum(state[p]["momentum_buffer"].norm().item() for p in self.parameters()))


@habit(plain=False)
class MomentumForgotten(Layers):
    """Clears the optimizer's state after an epoch."""

    def on_train_epoch_end(self) -> None:
        self.trainer.optimizers[0].state.clear()


@habit(plain=False)
class MomentumHalved(Layers):
    """Halves the momentum of each group's parameters after an epoch."""

    def on_train_epoch_end(self) -> None:
        optimizer = self.trainer.optimizers[0]
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                optimizer.state[parameter]["momentum_buffer"].mul_(0.5)


@habit(observed=["found"], plain=False)
class OptimizerStateDict(Noting):
    """Reads the optimizer's state dict."""

    def on_train_epoch_end(self) -> None:
        state = self.optimizers().state_dict()["state"]  # type: ignore[union-attr]
        self.found.append({index: entries["momentum_buffer"].norm().item() for index, entries in state.items()})


@habit(observed=["found"], plain=False)
class AdamMomentsChanged(Noting):
    """Changes the state of all parameters, and drops that of some."""

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.05)

    def on_train_batch_end(self, *_: Any) -> None:
        state = self.optimizers().state  # type: ignore[union-attr]
        self.found.append([state[p]["exp_avg_sq"].mean().item() for p in self.parameters() if p in state])
        self.found.append(int(state[self.head.weight]["step"]))
        if self.global_step % 3 == 0:
            for parameter in self.parameters():
                state[parameter]["exp_avg"].zero_()
                state[parameter]["exp_avg_sq"] = state[parameter]["exp_avg_sq"] * 0.5
            del state[self.layers[0].linear.weight]  # type: ignore[union-attr, arg-type]
            state[self.head.bias] = {}


@habit(observed=["found"], plain=False)
class StateOfOnesOwn(Noting):
    """Keeps slow weights in the optimizer's state."""

    def on_train_batch_end(self, *_: Any) -> None:
        state = self.trainer.optimizers[0].state
        for parameter in self.parameters():
            slow = state[parameter].setdefault("slow", parameter.detach().clone())
            slow.lerp_(parameter.detach(), 0.5)
            self.found.append(slow.sum().item())


@habit(plain=False, epochs=3)
class OptimizerRewound(Layers):
    """Goes back to the optimizer's state of the epoch's beginning."""

    def on_train_epoch_start(self) -> None:
        if self.current_epoch == 1:
            self.snapshot = copy.deepcopy(self.trainer.optimizers[0].state_dict())

    def on_train_epoch_end(self) -> None:
        if self.current_epoch == 1:
            self.trainer.optimizers[0].load_state_dict(self.snapshot)


@habit(observed=["found"], plain=False)
class OptimizerCopied(Noting):
    """Copies the optimizer."""

    def on_train_epoch_end(self) -> None:
        state = copy.deepcopy(self.trainer.optimizers[0]).state
        self.found.append(sum(entries["momentum_buffer"].sum().item() for entries in state.values()))


@habit(observed=["found"], plain=False)
class NormsOfGroups(Noting):
    """The largest and the total norm of each group's gradients."""

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        for group in optimizer.param_groups:
            gradients = [p.grad for p in group["params"] if p.grad is not None]
            self.found.append(float(torch.stack([gradient.norm() for gradient in gradients]).max()))
            self.found.append(float(torch.nn.utils.get_total_norm(gradients)))


@habit(plain=False)
class AveragedByHand(Layers):
    """Averages all weights, and has the averages in the end."""

    def __init__(self) -> None:
        super().__init__()
        self.averages: dict[str, Tensor] = {}
        self.number = 0

    def on_train_batch_end(self, *_: Any) -> None:
        self.number += 1
        for name, parameter in self.named_parameters():
            before = self.averages.get(name, torch.zeros_like(parameter))
            self.averages[name] = before + (parameter.detach() - before) / self.number

    def on_train_end(self) -> None:
        with torch.no_grad():
            for name, parameter in self.named_parameters():
                parameter.copy_(self.averages[name])


@habit(plain=False)
class OneCycle(Layers):
    """A schedule over all steps of the run, as the Trainer estimates them; a hook looks at batches."""

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.05)
        steps = int(self.trainer.estimated_stepping_batches)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=steps)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        batch[0].mul_(0.9)


@habit(plain=False)
class SchedulerStepOverridden(Layers):
    """`lr_scheduler_step` of the user's."""

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        return [optimizer], [torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: 0.5**epoch)]

    def lr_scheduler_step(self, scheduler: Any, metric: Any) -> None:
        scheduler.step(epoch=self.current_epoch + 1)


@habit(plain=False)
class Plateau(Evaluated):
    """A schedule that watches the validation loss."""

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, threshold=10.0)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "monitor": "val_loss"}}


@habit()
class GroupRates(Layers):
    """Groups with rates and decays of their own."""

    def configure_optimizers(self) -> Any:
        matrices = [parameter for parameter in self.parameters() if parameter.ndim > 1]
        vectors = [parameter for parameter in self.parameters() if parameter.ndim <= 1]
        groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "lr": 0.3}]
        return torch.optim.AdamW(groups, lr=0.05)


@habit(plain=False, epochs=3)
class OptimizerSwapped(Layers):
    """Another optimizer from the second epoch on."""

    def on_train_epoch_start(self) -> None:
        if self.current_epoch == 1:
            self.trainer.optimizers = [torch.optim.Adam(self.parameters(), lr=0.02)]


@habit(plain=False, epochs=3)
class OptimizerSwappedAtTheEnd(Layers):
    """A fresh optimizer after the last epoch, which the checkpoint has."""

    def on_train_epoch_end(self) -> None:
        if self.current_epoch == 2:
            self.trainer.strategy.optimizers = [torch.optim.SGD(self.parameters(), lr=0.02)]
