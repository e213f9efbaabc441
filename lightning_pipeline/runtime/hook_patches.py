"""What is patched in torch while a hook runs, because it goes past function modes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import distributed_c10d
from torch.overrides import handle_torch_function

from lightning_pipeline.partition.ownership import holders_of
from lightning_pipeline.partition.placeholder import Placeholder, in_hook, placeholder
from lightning_pipeline.runtime.tensor_keys import TensorKeys


@contextmanager
def ranks_noted(send: Callable[[], None]) -> Iterator[None]:
    """While entered, it is noted who asks torch for the rank, and `send` is called before collectives of the user's:
    all of torch's ask whether this rank is in the group."""
    plain = distributed_c10d._rank_not_in_group

    def seen(group: Any) -> bool:
        if in_hook.is_here():
            in_hook.note_rank()
            send()
        return plain(group)

    distributed_c10d._rank_not_in_group = seen
    try:
        yield
    finally:
        distributed_c10d._rank_not_in_group = plain


@contextmanager
def parameters_seen(keys: TensorKeys) -> Iterator[None]:
    """While entered, modes see parameters that are copied or pickled, and those that are made get keys."""
    before = {name: nn.Parameter.__dict__[name] for name in ("__new__", "__deepcopy__", "__reduce_ex__")}
    new = before["__new__"].__func__

    def made(cls: Any, data: Any = None, requires_grad: bool = True) -> Any:
        holders = holders_of(data) if in_hook.on and isinstance(data, Tensor) else None
        if holders is None:
            return new(cls, data, requires_grad)
        if type(data) is Placeholder:
            look = data.look.but(requires_grad=requires_grad, is_leaf=True, is_parameter=True)
            return keys.note(placeholder(look, data.what), holders)
        with torch._C.DisableTorchFunction():
            return keys.note(new(cls, data.detach(), requires_grad), holders)

    def through(name: str) -> Callable[..., Any]:
        def run(tensor: Tensor, argument: Any) -> Any:
            if in_hook.on and holders_of(tensor) is not None:
                return handle_torch_function(getattr(Tensor, name), (tensor,), tensor, argument)
            return before[name](tensor, argument)

        return run

    nn.Parameter.__new__ = staticmethod(made)  # type: ignore[method-assign]
    nn.Parameter.__deepcopy__ = through("__deepcopy__")  # type: ignore[method-assign]
    nn.Parameter.__reduce_ex__ = through("__reduce_ex__")  # type: ignore[method-assign]
    try:
        yield
    finally:
        for name, function in before.items():
            setattr(nn.Parameter, name, function)
