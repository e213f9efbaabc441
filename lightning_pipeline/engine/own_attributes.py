"""What each micro-batch of a hand-optimized step has set on modules, while others run in between.

A step often keeps on `self` what it uses after a backward. Micro-batches wait there for one another, so that each would
find what the last one has kept::

    micro-batch 0   self.fake = ...  |               | score(self.fake)     its own
    micro-batch 1                    | self.fake = ..|                  ...

So an attribute that a micro-batch has set is what it has set when it goes on. Until then it finds what the others have
left, as one micro-batch does after another, and numbers to which each adds the same count on. Where it cannot be told
what is meant, the step is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from itertools import pairwise
from typing import Any, NamedTuple

from torch import nn
from torch.utils.hooks import RemovableHandle

from lightning_pipeline.engine.suspended import running_step
from lightning_pipeline.partition.overrides import overridden
from lightning_pipeline.partition.users_code import users_line

_NONE = object()
"""An attribute that there is not."""


class _Place(NamedTuple):
    module: int  # its id
    name: str


class _Attribute:
    """An attribute that a step has set.

    Attributes:
        before: what it was before the step.
        line: of the user's code, which first set it.
        turns: of each micro-batch that has set it, the turns in which it did.
        is_put_back: the first micro-batch has set it and then put back what it was.
        is_sum: each micro-batch has added the same to a number.
    """

    def __init__(self, module: nn.Module, name: str) -> None:
        self.module, self.name = module, name
        self.before = self.value
        self.line = users_line()
        self.turns: dict[int, set[int]] = {}
        self.is_put_back = self.is_sum = False

    @property
    def value(self) -> Any:
        return vars(self.module).get(self.name, _NONE)

    def put(self, value: Any) -> None:
        if value is _NONE:
            vars(self.module).pop(self.name, None)
        else:
            vars(self.module)[self.name] = value


class OwnAttributes:
    """The attributes of modules that the micro-batches of one step have set.

    Args:
        shared: types of modules whose attributes are no micro-batch's own, such as metrics, which sum over all.
    """

    def __init__(self, shared: type | tuple[type, ...] = ()) -> None:
        self._shared = shared
        self._attributes: dict[_Place, _Attribute] = {}
        self._own: dict[int, dict[_Place, Any]] = {}
        self._num_turns: dict[int, int] = {}
        self._hooks: dict[int, tuple[tuple[int, int], str]] = {}
        self._running = 0

    @contextmanager
    def noted(self) -> Iterator[None]:
        """Note what steps set while entered.

        Raises:
            NotImplementedError: the micro-batches have not come to what a step of the whole batch would.
        """
        set_attribute, delete_attribute = nn.Module.__setattr__, nn.Module.__delattr__

        def noting_set(module: nn.Module, name: str, value: Any) -> None:
            self._note(module, name)
            set_attribute(module, name, value)

        def noting_delete(module: nn.Module, name: str) -> None:
            self._note(module, name)
            delete_attribute(module, name)

        with overridden() as override:
            override(nn.Module, "__setattr__", noting_set)
            override(nn.Module, "__delattr__", noting_delete)
            for name in _REGISTERING:
                override(nn.Module, name, self._noting_hooks(getattr(nn.Module, name)))
            override(RemovableHandle, "remove", self._removing(RemovableHandle.remove))
            yield
        self._check()

    @contextmanager
    def turn(self, index: int) -> Iterator[None]:
        """Entered around a part of a micro-batch's step: it finds its own attributes."""
        self._running = index
        if index not in self._own:
            self._own[index] = {}
            for attribute in self._attributes.values():
                if attribute.name == "training":  # of `eval` for a part of the step, which others are not in
                    attribute.put(attribute.before)
        elif index == 0:
            self._find_sums()
        for place, value in self._own[index].items():
            attribute = self._attributes[place]
            if attribute.value is not value and not attribute.is_sum:
                attribute.put(value)
        self._num_turns[index] = self._num_turns.get(index, 0) + 1
        try:
            yield
        finally:
            for place, attribute in self._attributes.items():
                if index in attribute.turns:
                    self._own[index][place] = attribute.value

    def end(self, index: int) -> None:
        """A micro-batch's step has ended."""
        if index == 0:
            for place, value in self._own[0].items():
                self._attributes[place].is_put_back = _is_same(value, self._attributes[place].before)
        own = self._own[index]
        self._own[index] = {place: value for place, value in own.items() if type(value) in (int, float)}

    def _note(self, module: nn.Module, name: str) -> None:
        if running_step() is None or isinstance(module, self._shared):
            return
        place = _Place(id(module), name)
        attribute = self._attributes.get(place)
        if attribute is None:
            attribute = self._attributes[place] = _Attribute(module, name)
        attribute.turns.setdefault(self._running, set()).add(self._num_turns[self._running])

    def _find_sums(self) -> None:
        """All micro-batches have come to their next synchronization point."""
        for place, attribute in self._attributes.items():
            before = attribute.before
            if before is _NONE:  # its class may have it
                before = getattr(type(attribute.module), attribute.name, None)
            values = [before, *(own.get(place) for own in self._own.values())]
            if len(values) > 2 and all(type(value) in (int, float) for value in values):
                steps = {later - value for value, later in pairwise(values)}
                attribute.is_sum |= len(steps) == 1 and steps != {0}

    def _noting_hooks(self, register: Callable[..., RemovableHandle]) -> Callable[..., RemovableHandle]:
        @wraps(register)
        def noting(*args: Any, **kwargs: Any) -> RemovableHandle:
            handle = register(*args, **kwargs)
            if running_step() is not None:
                self._hooks[handle.id] = (self._running, self._num_turns[self._running]), users_line()
            return handle

        return noting

    def _removing(self, remove: Callable[[RemovableHandle], None]) -> Callable[[RemovableHandle], None]:
        @wraps(remove)
        def removing(handle: RemovableHandle) -> None:
            turn, line = self._hooks.get(handle.id, (None, ""))
            now = (self._running, self._num_turns.get(self._running, 0))
            if turn is not None and turn != now and running_step() is not None and len(self._own) > 1:
                raise NotImplementedError(
                    f"the training_step removes a hook on a module ({users_line()}) after a call at which its "
                    f"micro-batches wait for one another, such as manual_backward or an optimizer's step, so that the "
                    f"hook of each ({line}) has run for others: remove it before, or register it once, in "
                    f"on_train_start"
                )
            remove(handle)

        return removing

    def _check(self) -> None:
        for place, attribute in self._attributes.items():
            if attribute.is_put_back and not _is_same(attribute.value, attribute.before):
                raise NotImplementedError(
                    f"{_told(attribute)} and puts it back after a call at which its micro-batches wait for one "
                    f"another, such as manual_backward or an optimizer's step, so that others begin with what was set. "
                    f"{_WAY_OUT}"
                )
            numbers = [own[place] for own in self._own.values() if place in own and not attribute.is_sum]
            if max(map(len, attribute.turns.values()), default=0) > 1 and len({*numbers}) > 1:
                raise NotImplementedError(
                    f"{_told(attribute)} to a number, and again after a call at which its micro-batches wait for one "
                    f"another, such as manual_backward or an optimizer's step: it cannot be told whether the number is "
                    f"a sum over all of them or each one's own. {_WAY_OUT}"
                )


_REGISTERING = (
    *("register_forward_hook", "register_forward_pre_hook"),
    *("register_full_backward_hook", "register_full_backward_pre_hook"),
)
_WAY_OUT = (
    "Set it in one part of the step alone, keep what is a micro-batch's own in a local variable, or use one "
    "micro-batch (num_microbatches=1)"
)


def _told(attribute: _Attribute) -> str:
    return f"the training_step sets {attribute.name!r} of a {type(attribute.module).__name__} ({attribute.line})"


def _is_same(value: Any, other: Any) -> bool:
    plain = (bool, int, float, str, bytes)
    return value is other or (type(value) is type(other) and type(value) in plain and value == other)
