"""Handles torch.distributed collectives that the user's code calls within a step, on one stage's ranks only.

To a step, the world consists of replicas. With one replica, collectives act as in a group of size one.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache, partial, wraps
from types import FunctionType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_pipeline.partition.users_code import users_line
from lightning_pipeline.runtime.topology import Topology


def _nothing(*_: Any, **__: Any) -> None:
    """Leave the tensor unchanged."""


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
"""What each collective does in a group of size one, given its first two arguments."""


@contextmanager
def over_replicas(topology: Topology | None) -> Iterator[None]:
    """While entered, `get_rank` and `get_world_size` count replicas instead of ranks.

    With one replica, collectives over all ranks act as in a group of size one; with several they raise, instead of
    waiting forever for the ranks of other stages. With one stage nothing changes.
    """
    is_entered = hasattr(dist.get_rank, "of_replicas")
    if topology is None or topology.num_stages == 1 or not dist.is_initialized() or is_entered:
        yield
        return
    changes = _changes(topology.data_parallel_size, topology.replica)
    before = [(holder, key, getattr(holder, key)) for holder, key, _ in changes]
    for holder, key, value in changes:
        setattr(holder, key, value)
    try:
        yield
    finally:
        for holder, key, value in before:
            setattr(holder, key, value)


Change = tuple[Any, str, Any]
"""An object, the name of its attribute, and the new value."""


@lru_cache(maxsize=4)  # every step needs them, so they are made once
def _changes(num_replicas: int, replica: int) -> list[Change]:
    """The attributes of torch to replace."""
    found = []
    for name, alone in _ALONE.items():
        instead = partial(_alone, alone) if num_replicas == 1 else partial(_refuse, name)
        found.append(_collective_replaced(name, instead))
    for name, number in (("get_world_size", num_replicas), ("get_rank", replica)):
        found += _number_replaced(name, number)
    return found


def _collective_replaced(name: str, instead: Callable[..., Any]) -> Change:
    """Replace a collective where it is called over all ranks.

    This must also work for modules that have imported it by name. Torch wraps each collective into a function that logs
    errors, and whose closure cell holds the original, so the cell is replaced. Functions that other libraries have
    patched in, such as torch_npu's, have no such cell and are replaced by name.
    """
    function = getattr(dist, name)
    is_wrapped = getattr(function, "__closure__", None) and function.__code__.co_freevars == ("func",)
    holder, key = (function.__closure__[0], "cell_contents") if is_wrapped else (dist, name)
    plain = getattr(holder, key)

    @wraps(plain)
    def replaced(*args: Any, **kwargs: Any) -> Any:
        return plain(*args, **kwargs) if _is_over_some(args, kwargs) else instead(*args, **kwargs)

    return holder, key, replaced


def _number_replaced(name: str, number: int) -> list[Change]:
    """Replace `get_rank` or `get_world_size`, also for modules that have imported it by name.

    These are not wrapped, so their code object is replaced. Torch's own modules still get the real numbers.
    """
    function = getattr(dist, name)
    plain = FunctionType(function.__code__, function.__globals__, name, function.__defaults__)

    def of_replicas(*args: Any, **kwargs: Any) -> int:
        return plain(*args, **kwargs) if _is_over_some(args, kwargs) else number

    def by_name(*args: Any, **kwargs: Any) -> int:
        is_torchs = sys._getframe(2).f_globals.get("__name__", "").startswith("torch.")
        return plain(*args, **kwargs) if is_torchs else of_replicas(*args, **kwargs)

    of_replicas.of_replicas = True  # type: ignore[attr-defined]
    return [
        (function, "__code__", _calls_default.__code__),
        (function, "__defaults__", (None, by_name)),
        (dist, name, of_replicas),
    ]


def _calls_default(group: Any = None, _instead: Any = None) -> Any:
    return _instead(group)


def _is_over_some(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether the arguments include a group other than that of all ranks."""
    groups = [value for value in (*args, *kwargs.values()) if isinstance(value, dist.ProcessGroup)]
    return bool(groups) and groups[0] is not dist.group.WORLD


def _alone(function: Callable[..., None], *args: Any, **kwargs: Any) -> Any:
    given = [*args, *(value for name, value in kwargs.items() if name not in _OPTIONS)][:2]
    with torch.no_grad():
        function(*given)
    return _Done() if kwargs.get("async_op") else None


_OPTIONS = frozenset(("op", "group", "async_op", "src", "dst", "group_src", "group_dst", "device", "device_ids"))


class _Done:
    """Handle of a finished collective, for ``async_op=True``."""

    def wait(self, *_: Any) -> bool:
        return True

    def is_completed(self) -> bool:
        return True


def _refuse(name: str, *_: Any, **__: Any) -> None:
    raise RuntimeError(
        f"torch.distributed.{name} over all ranks within a step: only the ranks of one stage reach it, and would wait "
        f"forever for the others; use self.all_gather or self.log(..., sync_dist=True), which go over replicas, or "
        f"call it outside of steps ({users_line()})"
    )
