"""Collectives of the user's own in a step: ranks of one stage come to them, and those of the others do not."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist

from lightning_pipeline.partition.users_line import users_line

_OVER_ALL = (
    *("all_reduce", "all_gather", "all_gather_into_tensor", "all_gather_object", "all_to_all", "all_to_all_single"),
    *("reduce_scatter", "reduce_scatter_tensor", "broadcast", "broadcast_object_list", "reduce", "gather", "scatter"),
    *("gather_object", "scatter_object_list", "barrier"),
)


@contextmanager
def over_all_refused() -> Iterator[None]:
    """While entered, a collective over all ranks raises instead of waiting for those that do not come.

    Where there is one rank it does as ever.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        yield
        return
    own = {name: getattr(dist, name) for name in _OVER_ALL if hasattr(dist, name)}
    for name, function in own.items():
        setattr(dist, name, _refused(name, function))
    try:
        yield
    finally:
        for name, function in own.items():
            setattr(dist, name, function)


def _refused(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        groups = [value for value in (*args, kwargs.get("group")) if isinstance(value, dist.ProcessGroup)]
        if groups and groups[0] is not dist.group.WORLD:
            return function(*args, **kwargs)
        raise RuntimeError(
            f"torch.distributed.{name} over all ranks within a step: the ranks of one stage come to it, and would wait "
            f"for those of the others for ever; let self.all_gather or self.log(..., sync_dist=True) go over replicas, "
            f"or call it outside of steps ({users_line()})"
        )

    return call
