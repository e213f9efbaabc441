"""Parameters that the user's code has kept, as in a list, from before replicas keep slices of them.

FSDP2 puts new tensors into the module: one of slices, and in steps one that is gathered. Calls on the parameter from
before mean whichever has its place. So do calls in a step on the one of slices, which code between steps has seen.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_pipeline import _torch
from lightning_pipeline.partition import tree

_SLICES = "_slices_in_its_place"
"""The attribute of a parameter from before: the one of slices."""
_GATHERED = "_gathered_in_its_place"
"""The attribute of a parameter of slices: the gathered one, in a step."""

_GATHERED_FROM = "_gathered_from"
"""The attribute of a gathered parameter, while it is: that of slices."""
_IN_STEPS = "_whole_in_steps"
"""The same, since the first step that has gathered it."""
_BEFORE = "_before_slices"
"""The attribute of a parameter of slices: the one from before, where that has hooks on its gradient."""


_OF_FSDP2 = "_of_fsdp2"
"""The attribute of a tensor by which FSDP2 holds gathered memory."""


class KeptParameter(nn.Parameter):
    """A parameter from before, which has no data of its own any more."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = in_their_places(args, kwargs or {})
        return func(*args, **kwargs)


class KeptPart(DTensor):
    """The same of what tensor parallelism has split."""

    __slots__ = ()  # or it would be laid out otherwise, and no DTensor could become one
    __torch_function__ = KeptParameter.__torch_function__


def leave(parameter: nn.Parameter, sharded: Tensor) -> None:
    """Free the memory of a parameter, and let calls on it mean `sharded`."""
    parameter.__dict__[_SLICES] = sharded
    if parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None):
        sharded.__dict__[_BEFORE] = parameter
    parameter.grad = None
    nothing = torch.empty(0, dtype=parameter.dtype, device=parameter.device)
    if isinstance(parameter, DTensor):
        parameter._local_tensor = nothing
        parameter.__class__ = KeptPart  # type: ignore[assignment]
        return
    with _torch.DisableTorchFunction():
        parameter.data = nothing
    parameter.__class__ = KeptParameter


def note_gathered(sharded: Tensor, whole: Tensor | None) -> None:
    """Let calls on a parameter of slices mean the whole one; None when they mean the slices again."""
    if whole is None and (before := sharded.__dict__.get(_GATHERED)) is not None:
        before.__dict__[_GATHERED_FROM] = None
    sharded.__dict__[_GATHERED] = whole
    if whole is not None:
        whole.__dict__[_GATHERED_FROM] = sharded
    if whole is not None and sharded.__dict__.get(_IN_STEPS) is not whole:
        _move_hooks(sharded.__dict__.get(_IN_STEPS, sharded.__dict__.get(_BEFORE)), whole)
        sharded.__dict__[_IN_STEPS] = whole


def gathered_from(tensor: Tensor) -> Tensor | None:
    """The parameter of slices, if a tensor is what it is gathered into now."""
    return tensor.__dict__.get(_GATHERED_FROM)


def note_of_fsdp2(tensor: Tensor) -> None:
    """Note that a tensor is FSDP2's, in memory that it gathers into."""
    tensor.__dict__[_OF_FSDP2] = True


def is_of_fsdp2(tensor: Tensor) -> bool:
    return _OF_FSDP2 in tensor.__dict__


def whole_in_steps(tensor: Tensor) -> Tensor | None:
    """The tensor that a parameter of slices is gathered into for steps, whose gradients pass hooks."""
    return tensor.__dict__.get(_IN_STEPS)


def _move_hooks(before: Tensor | None, now: Tensor) -> None:
    """Register the hooks on the gradient of a parameter on what has its place."""
    if before is None:
        return
    with _torch.DisableTorchFunction():
        for hook in (before._backward_hooks or {}).values():
            now.register_hook(hook)
        for hook in (getattr(before, "_post_accumulate_grad_hooks", None) or {}).values():
            now.register_post_accumulate_grad_hook(hook)


def in_its_place(tensor: Tensor) -> Tensor:
    """What the module has in the place of a parameter that was kept; any other tensor itself."""
    tensor = tensor.__dict__.get(_SLICES, tensor)
    whole = tensor.__dict__.get(_GATHERED)
    return tensor if whole is None else whole


def between_steps(tensor: Tensor) -> Tensor:
    """What the module has in the place of a parameter between steps: slices, also while they are gathered."""
    tensor = tensor.__dict__.get(_SLICES, tensor)
    slices = gathered_from(tensor)
    return tensor if slices is None else slices


def is_kept(tensor: Tensor) -> bool:
    """Whether the module has another tensor in the place of this one."""
    return in_its_place(tensor) is not tensor


def in_their_places(args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """A call's arguments, with what the module has in the places of parameters that were kept."""
    if any(map(is_kept, tree.leaves((args, kwargs)))):
        return tree.replace((args, kwargs), in_its_place)
    return args, kwargs
