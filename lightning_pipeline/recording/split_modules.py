"""Modules split by `parallelize_module`: a call of one is recorded as one function.

What goes on inside is torch's matter: pieces of tensors, and what the ranks of a stage send each other.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.func import functional_call
from torch.overrides import TorchFunctionMode, handle_torch_function

from lightning_pipeline import _torch
from lightning_pipeline.partition import tree
from lightning_pipeline.partition.overrides import overridden
from lightning_pipeline.partition.torch_functions import FunctionKind, function_name, kind_of
from lightning_pipeline.partition.users_code import users_line
from lightning_pipeline.recording.inference import CallError
from lightning_pipeline.recording.operation import take_apart

_OF_TORCH = "torch.distributed.tensor"


class SplitCall:
    """The call of a module, as a function of its tensors, the training modes of the modules in it, and its arguments.

    Attributes:
        drawing: the training modes in which it has drawn random numbers.
    """

    def __init__(self, name: str, module: nn.Module) -> None:
        self.__name__ = f"the call of {name}"
        self.module = module
        self.drawing: set[tuple[bool, ...]] = set()

    def __call__(
        self, tensors: Sequence[Tensor], training: tuple[bool, ...], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        own = self._tensors()
        if all(tensor is given for tensor, given in zip(own.values(), tensors, strict=True)):
            return self.module(*args, **kwargs)
        # On stand-ins, to learn what it gives.
        given = {
            key: _split(tensor, split) if isinstance(split, DTensor) else tensor
            for (key, split), tensor in zip(own.items(), tensors, strict=True)
        }
        with _Draws() as draws:
            found = functional_call(self.module, given, args, kwargs)
        if draws.found:
            self.drawing.add(training)
        if any(isinstance(tensor, DTensor) for tensor in tree.leaves(found)):
            raise CallError(
                f"{self.__name__} gives a DTensor, which does not leave the module in a pipeline: let it give its "
                f"local part, with use_local_output=True in the plan of parallelize_module"
            )
        return found

    def of(self, *args: Any, **kwargs: Any) -> Any:
        """The module's call, as a mode is to see it."""
        if not _torch.num_function_modes():
            return type(self.module)._call_impl(self.module, *args, **kwargs)
        training = tuple(module.training for module in self.module.modules())
        return handle_torch_function(self, (), list(self._tensors().values()), training, args, kwargs)

    def _tensors(self) -> dict[str, Tensor]:
        return {**dict(self.module.named_parameters()), **dict(self.module.named_buffers())}


def split_calls(root: nn.Module) -> list[SplitCall]:
    found: list[SplitCall] = []
    inner: set[nn.Module] = set()
    for name, module in root.named_modules():
        if module not in inner and _is_split(module):
            found.append(SplitCall(name, module))
            inner.update(module.modules())
    return found


@contextmanager
def split_calls_seen(calls: Sequence[SplitCall]) -> Iterator[None]:
    """While entered, a mode sees these calls."""
    with overridden() as override:
        for call in calls:
            override(call.module, "_call_impl", call.of)
        yield


def refuse_split(func: Any, args: Any, kwargs: dict[str, Any]) -> None:
    """Refuse a call of another function on split tensors."""
    if any(isinstance(tensor, DTensor) for tensor in take_apart(func, args, kwargs).tensors):
        raise NotImplementedError(
            f"{function_name(func)} is given a parameter that tensor parallelism has split, outside of the module "
            f"that parallelize_module has split ({users_line()}): compute it in a module with a plan of its own, "
            f"or leave the parameter whole"
        )


def _is_split(module: nn.Module) -> bool:
    hooks = (*module._forward_pre_hooks.values(), *module._forward_hooks.values())
    return any(str(getattr(hook, "__module__", "")).startswith(_OF_TORCH) for hook in hooks)


def _split(tensor: Tensor, like: DTensor) -> Tensor:
    split = distribute_tensor(tensor.detach(), like.device_mesh, like.placements, src_data_rank=None)
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(split, requires_grad=tensor.requires_grad)
    return split


class _Draws(TorchFunctionMode):
    """Finds out whether random numbers are drawn while it is entered."""

    found = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.found = self.found or kind_of(func) is FunctionKind.DRAWS
        return func(*args, **(kwargs or {}))
