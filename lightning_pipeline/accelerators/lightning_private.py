"""The private parts of Lightning that a third-party accelerator needs, in one place.

Read in Lightning 2.6; each function says why the public interface does not serve.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch

from .._lightning import Accelerator, SingleDeviceStrategy, Strategy, _AcceleratorConnector


def choose_strategy_of_one_device(accelerator: type[Accelerator], make: Callable[[torch.device], Strategy]) -> None:
    """Let a Trainer with `accelerator` and one device, and no strategy asked for, have the one that `make` gives.

    For any accelerator but Lightning's own it takes the CPU, without a word. It decides in a method of an object that
    it makes and uses within the Trainer's constructor, so there is no instance to act on. Other accelerators see no
    difference.
    """
    choose = getattr(_AcceleratorConnector, "_choose_strategy", None)
    if choose is None or getattr(choose, "knows", None) is accelerator:
        return

    def choose_or_make(self: Any) -> Any:
        chosen = choose(self)
        if isinstance(self.accelerator, accelerator) and type(chosen) is SingleDeviceStrategy:
            return make(self._parallel_devices[0])
        return chosen

    choose_or_make.knows = accelerator  # type: ignore[attr-defined]
    _AcceleratorConnector._choose_strategy = choose_or_make  # type: ignore[method-assign]


def silence_scaler_warning() -> None:
    """Lightning makes a loss scaler for CUDA whatever the accelerator is, which warns that there is none; it is
    replaced before it is used.
    """
    warnings.filterwarnings("ignore", message=r"torch\.cuda\.amp\.GradScaler is enabled, but CUDA is not available")
