"""Patches of torch while a hook runs, for calls that function modes do not see, and calls on sharded parameters."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_pipeline import _torch
from lightning_pipeline.engine.slices import whole, write
from lightning_pipeline.hooks.operands import TensorKeys
from lightning_pipeline.partition import tree
from lightning_pipeline.partition.overrides import overridden
from lightning_pipeline.partition.ownership import holders_of, note_holders
from lightning_pipeline.partition.placeholder import Placeholder, TensorSpec, is_absent, placeholder
from lightning_pipeline.partition.users_code import in_hook, users_line
from lightning_pipeline.recording.tensor_copies import copies_of_parameters_seen


@contextmanager
def parameters_seen(keys: TensorKeys) -> Iterator[None]:
    """While entered, modes see that parameters are copied or pickled, and new parameters get keys."""
    new = nn.Parameter.__dict__["__new__"].__func__

    def made(cls: Any, data: Any = None, requires_grad: bool = True) -> Any:
        holders = holders_of(data) if in_hook.on and isinstance(data, Tensor) else None
        if holders is None:
            return new(cls, data, requires_grad)
        if type(data) is Placeholder:
            spec = data.spec.but(requires_grad=requires_grad, is_leaf=True, is_parameter=True)
            return keys.note(placeholder(spec, data.what), holders)
        with _torch.DisableTorchFunction():
            return keys.note(new(cls, data.detach(), requires_grad), holders)

    def is_seen(tensor: Tensor) -> bool:
        return in_hook.on and holders_of(tensor) is not None

    with overridden() as override, copies_of_parameters_seen(is_seen):
        override(nn.Parameter, "__new__", staticmethod(made))
        yield


_IS_VIEW = "_of_slices"
"""Marks a view of a tensor that was gathered for a call."""


def on_whole_tensors(
    run: Callable[[Any, Any, Any, Any], Any], func: Any, args: Any, kwargs: dict[str, Any], name: str
) -> Any:
    """Run a call on whole tensors in place of sharded ones, and copy what it writes back into these.

    All ranks must call it. Those whose stage does not hold a tensor that tensor parallelism has split run it on a
    placeholder.
    """
    gathered: dict[int, tuple[DTensor, Tensor, int]] = {}

    def gather(tensor: Tensor) -> Tensor:
        if not isinstance(tensor, DTensor):
            return tensor
        if id(tensor) not in gathered:
            found: Tensor
            if is_absent(tensor):
                found = placeholder(TensorSpec.of(tensor).but(is_parameter=False), name)
            else:
                found = whole(tensor).requires_grad_(tensor.requires_grad)
            note_holders(found, holders_of(tensor))
            gathered[id(tensor)] = tensor, found, found._version
        return gathered[id(tensor)][1]

    with _by_the_package():
        given = tree.replace((args, kwargs), gather)
    result = run(func, (), *given)
    with _by_the_package(), torch.no_grad():
        slices = {id(found): part for part, found, _ in gathered.values()}
        here = [item for item in gathered.values() if not is_absent(item[0])]
        memories = {found.untyped_storage().data_ptr() for _, found, _ in here}
        for part, found, version in here:
            if found._version > version:
                write(part, found)
        for made in tree.leaves(result):
            if type(made) is Placeholder or id(made) in slices or made.layout is not torch.strided:
                continue
            if made.untyped_storage().data_ptr() in memories:
                made.__dict__[_IS_VIEW] = True
        return tree.replace(result, lambda made: slices.get(id(made), made))


@contextmanager
def _by_the_package() -> Iterator[None]:
    """While entered, nothing counts as the user's: torch asks for the rank where it puts slices together."""
    before, in_hook.on = in_hook.on, False
    try:
        with _torch.DisableTorchFunction():
            yield
    finally:
        in_hook.on = before


def refuse_writing(tensor: Tensor, name: str) -> None:
    """Check that a write would not be lost.

    Raises:
        NotImplementedError: the tensor is a view of one that was gathered for an earlier call.
    """
    if _IS_VIEW in tensor.__dict__:
        raise NotImplementedError(
            f'{name} writes into a view, such as .data, of a parameter that data_parallel="fsdp" keeps in slices '
            f"({users_line()}): write into the parameter itself under torch.no_grad(), or use data_parallel='zero1'"
        )
