"""What the step's own code keeps on modules, apart for each of several virtual stages of a rank."""

from __future__ import annotations

from collections import OrderedDict, defaultdict, deque
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from lightning_pipeline.partition.absent import Absent
from lightning_pipeline.partition.registered import StageHooks

MAX_ITEMS = 1000
"""Longer lists, dictionaries and sets are tables, not what a step collects: all virtual stages share them."""

Snapshot = dict[tuple[int, str], tuple[Any, Any]]
"""Value and, of a collection, content of each attribute, by number of the module and name."""

# What torch keeps on a module, and where its calls are intercepted.
_SHARED = frozenset(vars(nn.Module())) - {"_buffers"} | {"forward"}
_COLLECTIONS = frozenset((list, dict, set, deque, OrderedDict, defaultdict))


class StageAttributes:
    """Shows each virtual stage the attributes that it would see on a rank of its own.

    Every virtual stage runs the user's step up to its own end. What the code between modules keeps in attributes (a
    mask made once, a counter, a list that the end of the step empties) would otherwise be kept once for each stage,
    and be seen by the others. Objects of the user's own are shared, as are modules that run on one stage.

    Args:
        around: the modules whose code runs on every stage.
        modules: all modules.
    """

    def __init__(self, around: Iterable[nn.Module], modules: Iterable[nn.Module]) -> None:
        self._homes = [vars(module) for module in around]
        self._hooks = StageHooks(modules)
        self._views: dict[int, Snapshot] = {}
        self._start: Snapshot = {}
        self._left: Snapshot = {}

    @contextmanager
    def step(self) -> Iterator[None]:
        """Around a step: what was changed since the last one every stage sees, what the last stage changed remains."""
        self._hooks.take_all()
        self._see_changes()
        self._start = dict(self._left)
        try:
            yield
        finally:
            self._see_changes()
            if self._views:
                together = self._together()
                self._put(together)
                self._left = together
            self._hooks.put_last()

    @contextmanager
    def of(self, stage: int) -> Iterator[None]:
        """Around a run of the step on a virtual stage."""
        self._see_changes()
        self._put(self._views.get(stage, self._start))
        self._hooks.put(stage)
        try:
            yield
        finally:
            self._hooks.take(stage)
            self._left = self._views[stage] = self._take()

    def _see_changes(self) -> None:
        """What was changed since a run, by hooks of Lightning's or of backward, every stage sees."""
        now, left = self._take(), self._left
        changed = [key for key, item in now.items() if key not in left or not _same(item, left[key])]
        changed += left.keys() - now.keys()
        for view in (self._start, *self._views.values()):
            for key in changed:
                view.pop(key, None)
                if key in now:
                    view[key] = now[key]
        self._left = now

    def _take(self) -> Snapshot:
        return {
            (number, name): (value, _content(value) if type(value) in _COLLECTIONS else None)
            for number, home in enumerate(self._homes)
            for name, value in home.items()
            if name not in _SHARED
        }

    def _put(self, snapshot: Snapshot) -> None:
        """In place of `_left`."""
        for number, name in self._left.keys() - snapshot.keys():
            del self._homes[number][name]
        for (number, name), (value, content) in snapshot.items():
            self._homes[number][name] = value
            if content is not None:
                _fill(value, content)

    def _together(self) -> Snapshot:
        """The last stage's attributes, with an earlier stage's tensor where the last one has none."""
        *earlier, last = (self._views[stage] for stage in sorted(self._views))
        together = dict(last)
        for key, (value, content) in last.items():
            for view in reversed(earlier):
                other, other_content = view.get(key, (None, None))
                if isinstance(value, Absent):
                    value, content = other, other_content
                elif isinstance(content, dict) and isinstance(other_content, dict):
                    content = {
                        name: other_content.get(name, item) if isinstance(item, Absent) else item
                        for name, item in content.items()
                    }
            together[key] = (value, content)
        return together


def _content(value: Any) -> Any:
    return value.copy() if len(value) <= MAX_ITEMS else None


def _fill(value: Any, content: Any) -> None:
    value.clear()
    if isinstance(value, (list, deque)):
        value.extend(content)
    else:
        value.update(content)


def _same(one: tuple[Any, Any], other: tuple[Any, Any]) -> bool:
    """Whether the same objects are there."""
    content, others = one[1], other[1]
    if one[0] is not other[0] or content is None or others is None:
        return one[0] is other[0] and content is others
    if isinstance(content, set):
        return bool(content == others)
    if isinstance(content, dict):
        return list(content) == list(others) and _all_same(content.values(), others.values())
    return _all_same(content, others)


def _all_same(ones: Collection[Any], others: Collection[Any]) -> bool:
    return len(ones) == len(others) and all(one is other for one, other in zip(ones, others, strict=True))
