"""Collectives of the user's own in a step: ranks of one stage come to them, and those of the others do not.

In the eyes of a step a process is a replica. Where there is one, collectives are what they are in a group of one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_pipeline.partition.users_line import users_line


def _nothing(*_: Any, **__: Any) -> None:
    """The tensor keeps what it has."""


def _gathered(tensors: list[Tensor] | None, tensor: Tensor) -> None:
    if tensors:
        tensors[0].copy_(tensor)


def _gathered_object(objects: list[Any] | None, one: Any) -> None:
    if objects:
        objects[0] = one


def _gather(tensor: Tensor, tensors: list[Tensor] | None = None) -> None:
    _gathered(tensors, tensor)


def _gather_object(one: Any, objects: list[Any] | None = None) -> None:
    _gathered_object(objects, one)


def _copied(output: Tensor, given: Tensor) -> None:
    output.copy_(given.view_as(output))


def _copied_lists(outputs: list[Any], given: list[Any]) -> None:
    if isinstance(outputs[0], Tensor):
        outputs[0].copy_(given[0])
    else:
        outputs[0] = given[0]


def _scattered(output: Tensor, given: list[Tensor]) -> None:
    output.copy_(given[0])


_ALONE: dict[str, Callable[..., None]] = {
    **dict.fromkeys(("all_reduce", "broadcast", "broadcast_object_list", "reduce", "barrier"), _nothing),
    "all_gather": _gathered,
    "gather": _gather,
    "all_gather_object": _gathered_object,
    "gather_object": _gather_object,
    **dict.fromkeys(("all_gather_into_tensor", "reduce_scatter_tensor", "all_to_all_single"), _copied),
    **dict.fromkeys(("all_to_all", "scatter_object_list"), _copied_lists),
    **dict.fromkeys(("reduce_scatter", "scatter"), _scattered),
}
"""What collectives come to in a group of one, of their first two arguments."""


@contextmanager
def over_replicas(num_replicas: int) -> Iterator[None]:
    """While entered, a collective over all ranks does what it does where there is one, if there is one replica; else
    it raises instead of waiting for those that do not come.

    Where there is one rank it does as ever.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        yield
        return
    names = [*_ALONE, *(("get_world_size", "get_rank") if num_replicas == 1 else ())]
    own = {name: getattr(dist, name) for name in names}
    for name, function in own.items():
        if name in _ALONE:
            instead = partial(_alone, _ALONE[name]) if num_replicas == 1 else partial(_refuse, name)
        else:
            instead = partial(_number, int(name == "get_world_size"))
        setattr(dist, name, partial(_over_all, function, instead))
    try:
        yield
    finally:
        for name, function in own.items():
            setattr(dist, name, function)


def _over_all(function: Callable[..., Any], instead: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    groups = [value for value in (*args, *kwargs.values()) if isinstance(value, dist.ProcessGroup)]
    if groups and groups[0] is not dist.group.WORLD:
        return function(*args, **kwargs)
    return instead(*args, **kwargs)


def _number(number: int, *_: Any, **__: Any) -> int:
    return number


def _alone(function: Callable[..., None], *args: Any, **kwargs: Any) -> Any:
    given = [*args, *(value for name, value in kwargs.items() if name not in _OPTIONS)][:2]
    with torch.no_grad():
        function(*given)
    return _Done() if kwargs.get("async_op") else None


_OPTIONS = frozenset(("op", "group", "async_op", "src", "dst", "group_src", "group_dst", "device", "device_ids"))


class _Done:
    """The handle of a collective that is done."""

    def wait(self, *_: Any) -> bool:
        return True

    def is_completed(self) -> bool:
        return True


def _refuse(name: str, *_: Any, **__: Any) -> None:
    raise RuntimeError(
        f"torch.distributed.{name} over all ranks within a step: the ranks of one stage come to it, and would wait "
        f"for those of the others for ever; let self.all_gather or self.log(..., sync_dist=True) go over replicas, "
        f"or call it outside of steps ({users_line()})"
    )
