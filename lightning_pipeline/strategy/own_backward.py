"""`LightningModule.backward`, which the user may override. The rank that computes the loss calls it, for each
micro-batch, as the others have no graph of it."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from lightning_pipeline.partition.placeholder import is_absent
from lightning_pipeline.partition.torch_functions import function_name
from lightning_pipeline.partition.users_code import users_line
from lightning_pipeline.recording.backward_calls import backward_from_loss
from lightning_pipeline.recording.function_state import Use
from lightning_pipeline.recording.reachable_state import Places

from .._lightning import LightningModule

_BACKWARDS: tuple[Any, ...] = (Tensor.backward, torch.autograd.backward)
_GRADIENTS = ("grad.__get__", "grad.__set__", "_grad.__get__", "_grad.__set__")


def backward_of(module: LightningModule) -> tuple[Callable[..., None], bool]:
    """What runs backward from a loss, and whether it is Lightning's own rather than the user's."""
    is_plain = type(module).backward is LightningModule.backward and "backward" not in vars(module)
    if is_plain:
        return backward_from_loss, True
    if not any(is_absent(parameter) for parameter in module.parameters()):
        return module.backward, False
    return _Alone(module), False


class _Alone(TorchFunctionMode):
    """The user's backward on one rank, where it may do nothing that the others would have to do as well."""

    def __init__(self, module: LightningModule) -> None:
        super().__init__()
        self._module = module
        self._known: OrderedDict[Any, Places] = OrderedDict()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if args and isinstance(args[0], nn.Parameter) and function_name(func) in _GRADIENTS:
            raise NotImplementedError(
                f"{self._name}.backward uses the gradients of parameters, where each rank has those of its stage "
                f"({users_line()}): do it in on_after_backward"
            )
        if func in _BACKWARDS and (kwargs or {}).get("inputs") is not None:
            raise NotImplementedError(
                f"{self._name}.backward gives backward the inputs that are to have gradients, of which each rank has "
                f"those of its stage ({users_line()}): let it run without, and set requires_grad of the other "
                f"parameters to False in a hook before the step"
            )
        return func(*args, **(kwargs or {}))

    def __call__(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        backward = self._module.backward
        use = Use(self._known, [backward], [self._module], ["self"])
        with self:
            backward(loss, *args, **kwargs)
        if (name := use.changed([self._module])) is not None:
            code = backward.__code__
            raise NotImplementedError(
                f"{self._name}.backward changes {name}, on the rank that computes the loss alone "
                f"({code.co_filename}:{code.co_firstlineno}): do it in on_before_backward or on_after_backward"
            )

    @property
    def _name(self) -> str:
        return type(self._module).__name__
