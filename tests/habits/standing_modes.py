"""Modes of torch that one hook enters and a later one leaves: they see what they see in one process."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from tests.habits.modules import Evaluated, Layers
from tests.habits.table import EQUAL, error, habit


class Doubling(TorchFunctionMode):
    """Changes what a function gives, and counts the calls of another."""

    scale = 2.0

    def __init__(self) -> None:
        super().__init__()
        self.num_norms = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        self.num_norms += func is Tensor.norm
        return found * self.scale if func is torch.tanh else found


class Entering(Evaluated):
    """Enters and leaves a mode."""

    mode: Any = None

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Any] = []

    def enter(self) -> None:
        self.mode = Doubling()
        self.mode.__enter__()

    def leave(self) -> None:
        self.seen += [self.mode.num_norms, self.layers[0].linear.weight.norm().item(), self.head.weight.norm().item()]
        self.mode.__exit__(None, None, None)
        self.seen += [self.mode.num_norms, self.layers[0].linear.weight.norm().item()]
        self.mode = None


@habit(plain=False, shows=False, observed=["seen"])
class ModeOverTraining(Entering):
    """It stands until training ends."""

    def on_train_start(self) -> None:
        self.enter()

    def on_train_end(self) -> None:
        self.leave()


@habit(plain=False, shows=False, observed=["seen"])
class ModeOverEpoch(Entering):
    """It stands for each epoch."""

    def on_train_epoch_start(self) -> None:
        self.enter()

    def on_train_epoch_end(self) -> None:
        self.leave()


@habit(plain=False, shows=False, observed=["seen"])
class ModeOverBatch(Entering):
    """It stands for each batch: what steps compute between is changed."""

    def on_train_batch_start(self, *_: Any) -> None:
        self.enter()

    def on_train_batch_end(self, *_: Any) -> None:
        self.leave()


@habit(plain=False, shows=False, observed=["seen"])
class ModeOverValidation(Entering):
    """It stands for validation alone."""

    def on_validation_epoch_start(self) -> None:
        self.enter()

    def on_validation_epoch_end(self) -> None:
        self.leave()


@habit(plain=False, shows=False)
class DeviceOverBatch(Layers):
    """Torch's own mode of a default device."""

    def on_train_batch_start(self, *_: Any) -> None:
        self.device_context = torch.device("cpu")
        self.device_context.__enter__()

    def on_train_batch_end(self, *_: Any) -> None:
        self.device_context.__exit__(None, None, None)


@habit(
    plain=False,
    shows=False,
    expect=error(r"backward.*not supported outside of steps.*self\.norm\(\)\.backward\(\)"),
    automatic=EQUAL,  # the first stage alone has the layer, and before the cut every rank
)
class RefusedUnderMode(Entering):
    """An error names the line that the mode passes on, and not the mode's own."""

    def norm(self) -> Tensor:
        return self.layers[0].linear.weight.norm()

    def on_train_start(self) -> None:
        self.enter()
        self.norm().backward()

    def on_train_end(self) -> None:
        self.leave()
