"""torch.distributed as the user's code finds it in a run: its world consists of the replicas.

All stages of a replica run the same Python on the same samples, so steps and hooks that count, share out or add up over
"all ranks" mean the replicas, as with `self.all_gather` and `trainer.world_size`::

                     replica 0   replica 1        to the user's code, on each rank:
           stage 0   rank 0      rank 1           get_world_size() == 2, get_rank() is 0 or 1,
           stage 1   rank 2      rank 3           all_reduce(x) adds the x of one row of ranks

A group of its own that the code gives stays as it is.
"""

from __future__ import annotations

import inspect
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import lru_cache, wraps
from types import FrameType, FunctionType
from typing import Any

import torch
import torch.distributed as dist

from lightning_pipeline.engine.replica_collectives import COLLECTIVES, World
from lightning_pipeline.partition.ownership import holders_of
from lightning_pipeline.partition.users_code import in_hook, is_in_run, users_line
from lightning_pipeline.recording.one_rank import note_kept
from lightning_pipeline.runtime.topology import ReplicaRank


class _Done:
    """Handle of a finished collective, for ``async_op=True``."""

    def wait(self, *_: Any) -> bool:
        return True

    def is_completed(self) -> bool:
        return True


_FROM_ONE = frozenset(("broadcast", "broadcast_object_list", "scatter", "scatter_object_list", "barrier"))
"""In hooks these are between all processes: the first alone may know what is sent. Not so for one stage's tensors."""
_OPTIONS = frozenset(("group", "async_op", "device", "device_ids", "timeout"))


class _Current:
    """The world of the running step, what gives that of the run's hooks, and how often torch's functions were to be
    replaced."""

    step: World | None = None
    run: Callable[[], World | None] | None = None
    depth = 0


_current = _Current()


class _Passed(threading.local):
    """The names of torch's collectives that run in this thread as they are: each tells the modes of torch that stand,
    which call it again."""

    names: frozenset[str] = frozenset()

    @contextmanager
    def on(self, name: str) -> Iterator[None]:
        before, self.names = self.names, self.names | {name}
        try:
            yield
        finally:
            self.names = before


_passed = _Passed()


@contextmanager
def over_replicas(world: World | None) -> Iterator[None]:
    """While entered, in a step, torch.distributed's world are the replicas. With one stage nothing changes."""
    if world is None or world.topology.num_stages == 1 or not dist.is_initialized() or _current.step is not None:
        yield
        return
    with _replaced():
        _current.step = world
        try:
            yield
        finally:
            _current.step = None


@contextmanager
def over_replicas_in_hooks(world: Callable[[], World | None]) -> Iterator[None]:
    """While entered, torch.distributed's world are the replicas to the user's hooks.

    Args:
        world: called when they do; None for the world as it is.
    """
    with _replaced():
        _current.run = world
        try:
            yield
        finally:
            _current.run = None


def _world_for(frame: FrameType | None) -> World | None:
    """What code that calls torch.distributed means by all ranks; None for all processes, as torch's own code does."""
    while frame is not None and _module(frame) == "torch.distributed.c10d_logger":
        frame = frame.f_back
    if frame is None or (_module(frame).startswith("torch.") and not _module(frame).startswith(_FOR_USERS)):
        return None
    if _current.step is not None:
        return _current.step
    while frame is not None and _module(frame).startswith("torch."):
        frame = frame.f_back
    return _current.run() if _current.run is not None and is_in_run(frame) else None


def _module(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__"))


_FOR_USERS = ("torch.distributed.nn.", "torch.utils.data.")
"""Modules of torch that mean what their caller means."""


@contextmanager
def _replaced() -> Iterator[None]:
    """While entered, torch's functions ask which world is meant."""
    changes = _changes() if _current.depth == 0 else []
    before = [(holder, key, getattr(holder, key)) for holder, key, _ in changes]
    for holder, key, value in changes:
        setattr(holder, key, value)
    _current.depth += 1
    try:
        yield
    finally:
        _current.depth -= 1
        for holder, key, value in before:
            setattr(holder, key, value)


Change = tuple[Any, str, Any]
"""An object, the name of its attribute, and the new value."""


@lru_cache(maxsize=1)  # steps of a plan's trials need them each, so they are made once
def _changes() -> list[Change]:
    """The attributes of torch to replace."""
    found = [_collective_replaced(name, collective) for name, collective in COLLECTIVES.items()]
    found.append(_new_group_replaced())
    for name, number in (("get_world_size", lambda world: world.size), ("get_rank", _rank)):
        found += _number_replaced(name, number)
    return found


def _collective_replaced(name: str, collective: Callable[..., None]) -> Change:
    """Replace a collective where it is called over all ranks."""
    holder, key = _place(name)
    plain = getattr(holder, key)
    parameters = inspect.signature(plain)

    @wraps(plain)
    def replaced(*args: Any, **kwargs: Any) -> Any:
        if name in _passed.names:
            return plain(*args, **kwargs)
        world = None if _is_over_some(args, kwargs) else _world_for(sys._getframe(1))
        if world is None:
            with _passed.on(name):
                return plain(*args, **kwargs)
        given = parameters.bind(*args, **kwargs).arguments
        for end in ("src", "dst"):
            if given.get(f"group_{end}") is not None:
                given[end] = given[f"group_{end}"]
            given.pop(f"group_{end}", None)
        if _current.step is None and name in _FROM_ONE and not _is_of_some(given.get("tensor")):
            if given.get("src") is not None:
                given["src"] = world.topology.ranks_of_first_stage[given["src"]]
            with _passed.on(name):
                return plain(**given)
        if not world.is_known:
            raise RuntimeError(
                f"torch.distributed.{name} over all ranks before the pipeline is set up, when they do not know their "
                f"replicas yet ({users_line()}): call it in on_fit_start or later, or over a group of your own"
            )
        with torch.no_grad():
            collective(world, **{key: value for key, value in given.items() if key not in _OPTIONS})
        return _Done() if given.get("async_op") else None

    return holder, key, replaced


def _new_group_replaced() -> Change:
    """Replace `new_group` in hooks: its ranks are replicas, and each stage has a group of them."""
    holder, key = _place("new_group")
    plain = getattr(holder, key)

    @wraps(plain)
    def replaced(ranks: Sequence[int] | None = None, *args: Any, **kwargs: Any) -> Any:
        world = _world_for(sys._getframe(1)) if _current.step is None else None
        if world is None:
            return plain(ranks, *args, **kwargs)
        topology, own = world.topology, dist.GroupMember.NON_GROUP_MEMBER
        rows = (tuple(replace(topology, rank=rank).data_ranks) for rank in range(topology.world_size))
        for row in dict.fromkeys(rows):
            group = plain([row[replica] for replica in ranks or range(world.size)], *args, **kwargs)
            own = group if topology.rank in row else own
        return own

    return holder, key, replaced


def _place(name: str) -> tuple[Any, str]:
    """The object and attribute that hold a function of torch.distributed for all who call it.

    Modules may have imported it by name. Torch wraps it into a function that logs errors, and whose closure cell holds
    the original. Functions that other libraries have patched in, such as torch_npu's, have no such cell.
    """
    function = getattr(dist, name)
    is_wrapped = getattr(function, "__closure__", None) and function.__code__.co_freevars == ("func",)
    return (function.__closure__[0], "cell_contents") if is_wrapped else (dist, name)


def _number_replaced(name: str, number: Callable[[World], int]) -> list[Change]:
    """Replace `get_rank` or `get_world_size`, also for modules that have imported it by name: their code is replaced,
    as they are not wrapped.
    """
    function = getattr(dist, name)
    plain = FunctionType(function.__code__, function.__globals__, name, function.__defaults__)

    def of_replicas(group: Any = None) -> int:
        world = None if _is_over_some((group,), {}) else _world_for(sys._getframe(2))
        return plain(group) if world is None else number(world)

    return [(function, "__code__", _calls_default.__code__), (function, "__defaults__", (None, of_replicas))]


def _calls_default(group: Any = None, _instead: Any = None) -> Any:
    return _instead(group)


def _rank(world: World) -> int:
    if _current.step is not None:
        return world.rank
    frame = sys._getframe(3)  # of the user's, which calls `dist.get_rank`
    note_kept(frame if is_in_run(frame) else None)
    in_hook.note_rank()
    return ReplicaRank(world.rank, world.topology.rank)


def _is_of_some(tensor: torch.Tensor | None) -> bool:
    """Whether not all stages hold it."""
    return tensor is not None and holders_of(tensor) is not None


def _is_over_some(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether the arguments include a group other than that of all ranks."""
    groups = [value for value in (*args, *kwargs.values()) if isinstance(value, dist.ProcessGroup)]
    return bool(groups) and groups[0] is not dist.group.WORLD
