"""Copies that Python takes of tensors in a step: `copy.copy`, `copy.deepcopy`, pickles, and old-style variables."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.autograd.variable import Variable, VariableMeta
from torch.overrides import handle_torch_function

from lightning_pipeline import _torch
from lightning_pipeline.partition.overrides import overridden
from lightning_pipeline.partition.placeholder import TensorSpec

if TYPE_CHECKING:
    from lightning_pipeline.recording.recording import Recording


def deep_copy(recording: Recording, tensor: Tensor, memo: dict[int, Any]) -> Tensor:
    """Answer `copy.deepcopy` of a tensor that some ranks hold: a new leaf of autograd on the same stage."""
    if id(tensor) in memo:
        return memo[id(tensor)]
    if not tensor.is_leaf:
        with _torch.DisableTorchFunction():  # torch's own error
            (torch.ones(1, requires_grad=True) * 1).__deepcopy__(memo)
    made: Tensor = recording.record(Tensor.clone, (recording.record(Tensor.detach, (tensor,)),))
    if tensor.requires_grad:
        recording.record(Tensor.requires_grad_, (made,))
    if isinstance(tensor, nn.Parameter):
        made._is_param = True
    memo[id(tensor)] = made
    return made


def reduced(data: Tensor, spec: TensorSpec, protocol: Any) -> Any:
    """Answer `Tensor.__reduce_ex__`, with data that is pickled as the leaf or parameter that `spec` says it is."""
    with _torch.DisableTorchFunction():
        leaf = data.detach().requires_grad_(spec.requires_grad)
        return (nn.Parameter(leaf, spec.requires_grad) if spec.is_parameter else leaf).__reduce_ex__(protocol)


@contextmanager
def copies_of_parameters_seen(is_seen: Callable[[Tensor], bool]) -> Iterator[None]:
    """While entered, modes see that parameters are copied or pickled, which `nn.Parameter` does by itself."""

    def through(name: str) -> Callable[..., Any]:
        plain = nn.Parameter.__dict__[name]

        def run(tensor: Tensor, argument: Any) -> Any:
            if is_seen(tensor):
                return handle_torch_function(getattr(Tensor, name), (tensor,), tensor, argument)
            return plain(tensor, argument)

        return run

    with overridden() as override:
        for name in ("__deepcopy__", "__reduce_ex__"):
            override(nn.Parameter, name, through(name))
        yield


@contextmanager
def variables_seen() -> Iterator[None]:
    """While entered, modes see ``torch.autograd.Variable(tensor)`` as the `detach` that it is, which C++ does by
    itself."""

    def made(cls: type, *args: Any, **kwargs: Any) -> Any:
        data, *others = args or (kwargs.get("data"),)
        is_plain = isinstance(data, Tensor) and len(others) <= 1 and kwargs.keys() <= {"data", "requires_grad"}
        if cls is not Variable or not is_plain:
            return type.__call__(cls, *args, **kwargs)
        needs_grad = others[0] if others else kwargs.get("requires_grad", False)
        return data.detach().requires_grad_() if needs_grad else data.detach()

    with overridden() as override:
        override(VariableMeta, "__call__", made)
        yield
