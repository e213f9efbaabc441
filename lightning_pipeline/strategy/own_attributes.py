"""What each micro-batch of a hand-optimized step has set on modules, while others run in between.

A step often keeps on `self` what it uses after a backward. Micro-batches wait there for one another, so that each would
find what the last one has kept::

    micro-batch 0   self.fake = ...  |               | score(self.fake)     its own
    micro-batch 1                    | self.fake = ..|                  ...

So an attribute that a micro-batch has set is what it has set when it goes on. Until then it finds what the others have
left, as one micro-batch does after another. Attributes that are made of what they were (``self.count += 1``) sum over
all micro-batches, and what a hook has set since holds for all. Entries of the LightningModule's dictionaries and plain
records are treated alike, but for numbers, which are taken for sums. Its lists and deques that only grow collect of all
micro-batches, and others are each one's own.

The settings of optimizers, such as learning rates, are the batch's: all micro-batches have to set the same, and each
begins with what there was, so that ``group["lr"] *= 0.5`` halves it once.
"""

from __future__ import annotations

import dis
import operator
import sys
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import is_dataclass
from functools import cache, lru_cache, wraps
from types import CodeType, SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from lightning_pipeline.engine.suspended import running_step
from lightning_pipeline.partition.overrides import overridden
from lightning_pipeline.partition.placeholder import Placeholder
from lightning_pipeline.partition.users_code import users_line

from .._lightning import LightningModule

_NONE = object()
"""An attribute that there is not."""


class _Place(NamedTuple):
    space: int  # its id
    name: Any


class _Attribute:
    """An attribute of a module, or an entry of a dictionary, that a step has set.

    Attributes:
        space: the dictionary that has it.
        owner: what that is of, for errors.
        line: of the user's code, which first set it, if that is known.
        before: what it was before the step.
        start: the same, or what its class has.
        left: what it was when the last part of a step ended.
        users: the micro-batches that have set it.
        is_own: a step has set it to something that is not made of what it was.
        is_changed: the first micro-batch has come to the end of a part with something else than `before`.
        is_put_back: and then has put that back.
    """

    def __init__(self, space: dict[Any, Any], name: Any, before: Any, start: Any, owner: str, line: str) -> None:
        self.space, self.name, self.owner, self.line = space, name, owner, line
        self.before = self.left = before
        self.start = start
        self.users: set[int] = set()
        self.is_own = self.is_changed = self.is_put_back = False

    @property
    def value(self) -> Any:
        return self.space.get(self.name, _NONE)

    @property
    def is_as_before(self) -> bool:
        value = self.start if self.value is _NONE else self.value
        plain = (bool, int, float, str, bytes)
        return value is self.start or (type(value) is type(self.start) and type(value) in plain and value == self.start)

    def put(self, value: Any) -> None:
        if value is _NONE:
            self.space.pop(self.name, None)
        else:
            self.space[self.name] = value


class _Sequence:
    """A list or deque that steps may change.

    Attributes:
        left: what each micro-batch that has changed it has left in it.
        is_own: a step has changed it otherwise than by adding to its end.
        last: what it had when the last part of a step ended.
    """

    def __init__(self, owner: str, items: Any) -> None:
        self.owner, self.items = owner, items
        self.left: dict[int, list[Any]] = {}
        self.is_own = False
        self.last: list[Any] = list(items)

    def begin_turn(self, index: int) -> list[Any]:
        """Give it what the micro-batch has left in it. Returns what it has."""
        if self.is_own and not _are_same(self.items, self.last):  # a hook has changed it
            self.left = {one: list(self.items) for one in self.left}
        if self.is_own and index in self.left:
            self.items.clear()
            self.items.extend(self.left[index])
        return list(self.items)

    def end_turn(self, index: int, before: list[Any], *, is_first: bool) -> None:
        """Keep what a part of a step has left in it.

        Args:
            before: what it had when the turn began.
            is_first: the micro-batch's, or there is no other micro-batch.
        """
        self.last = list(self.items)
        if not _are_same(self.last[: len(before)], before):
            if not (is_first or self.is_own) and index in self.left:
                raise NotImplementedError(
                    f"the training_step adds to {self.owner}, and takes from it after a call at which its micro-"
                    f"batches wait for one another, such as manual_backward or an optimizer's step, when others have "
                    f"added to it. Make the list anew or clear it at the begin of each step, or use a local one"
                )
            self.is_own = True
        if self.is_own or len(self.last) > len(before):
            self.left[index] = self.last


def _are_same(items: Collection[Any], others: Collection[Any]) -> bool:
    return len(items) == len(others) and all(map(operator.is_, items, others))


class _Settings:
    """What an optimizer's group of parameters has beside these.

    Attributes:
        before: what it had when the running part of a step began.
        first: what the first micro-batch has left in it.
        _data: of tensors in `before`, as a step may write into them.
    """

    def __init__(self, owner: str, group: dict[str, Any]) -> None:
        self.owner, self._group = owner, group
        self.before = self.first = self._now()
        self._data: dict[str, Tensor] = {}

    def begin_turn(self, index: int) -> None:
        if index == 0:
            self.before = self._now()
            self._data = {name: one.clone() for name, one in self.before.items() if _is_number(one)}
        else:
            for name in self._now().keys() - self.before.keys():
                del self._group[name]
            self._group.update(self.before)
            for name, data in self._data.items():
                self.before[name].copy_(data)

    def end_turn(self, index: int) -> None:
        """Raises `NotImplementedError` where the micro-batch has set another value than the first one."""
        now = self._now()
        if index == 0:
            self.first = {name: one.clone() if _is_number(one) else one for name, one in now.items()}
        for name, value in now.items():
            other = self.first.get(name)
            is_of_stage = type(value) is Placeholder and value is not self.before.get(name)
            if is_of_stage or (index and not _are_alike(value, other)):
                told = ["what a stage computes" if type(one) is Placeholder else str(one) for one in (other, value)]
                raise NotImplementedError(
                    f"the training_step sets {name!r} of {self.owner} to {told[0]} for its first micro-batch and to "
                    f"{told[1]} for micro-batch {index}, but there is one update for all: set it by what all of them "
                    f"have in common, as in on_before_optimizer_step, or use one micro-batch (num_microbatches=1)"
                )

    def _now(self) -> dict[str, Any]:
        return {name: value for name, value in self._group.items() if name != "params"}


def _is_number(value: Any) -> bool:
    """Whether a setting is a tensor with a number, which steps may write into."""
    return type(value) is Tensor and value.numel() == 1


def _are_alike(value: Any, other: Any) -> bool:
    if _is_number(value) and _is_number(other):
        return not value.is_cpu or torch.equal(value, other)  # on a device it would have to be waited for
    if isinstance(value, Tensor) or isinstance(other, Tensor):
        return value is other
    return type(value) is type(other) and (value == other or value != value)


class OwnAttributes:
    """The attributes of modules that the micro-batches of one step have set.

    Args:
        root: of whose attributes the dictionaries, and the plain objects, are looked at, too.
        shared: types of modules whose attributes are no micro-batch's own, such as metrics, which sum over all.
        optimizers: whose settings are looked at.
    """

    def __init__(
        self, root: nn.Module, shared: type | tuple[type, ...] = (), optimizers: Iterable[Optimizer] = ()
    ) -> None:
        self._shared = shared
        self._settings = [
            _Settings(f"param_groups[{place}] of {type(optimizer).__name__}", group)
            for optimizer in optimizers
            for place, group in enumerate(optimizer.param_groups)
        ]
        self._spaces = _spaces_of(root)
        self._sequences = [
            _Sequence(f"self.{name}", value)
            for name, value in vars(root).items()
            if type(value) in (list, deque) and len(value) <= _MAX_ITEMS and name not in _names_of_lightning()
        ]
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
            self._note_attribute(module, name, value)
            set_attribute(module, name, value)

        def noting_delete(module: nn.Module, name: str) -> None:
            self._note_attribute(module, name, None)
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
        for place, attribute in self._attributes.items():
            if attribute.value is not attribute.left:  # a hook has set it
                for own in self._own.values():
                    if place in own:
                        own[place] = attribute.value
        if index not in self._own:
            self._own[index] = {}
            for attribute in self._attributes.values():
                if attribute.name == "training":  # of `eval` for a part of the step, which others are not in
                    attribute.put(attribute.before)
        for place, value in self._own[index].items():
            attribute = self._attributes[place]
            if attribute.is_own and attribute.value is not value:
                attribute.put(value)
        self._num_turns[index] = self._num_turns.get(index, 0) + 1
        before = [(owner, space, dict(space)) for owner, space in self._spaces]
        items = [sequence.begin_turn(index) for sequence in self._sequences]
        for settings in self._settings:
            settings.begin_turn(index)
        try:
            yield
            for settings in self._settings:
                settings.end_turn(index)
            for sequence, earlier in zip(self._sequences, items, strict=True):
                sequence.end_turn(index, earlier, is_first=self._num_turns[index] == 1 or len(self._own) == 1)
        finally:
            for owner, space, entries in before:
                for name in space.keys() | entries.keys():
                    if space.get(name, _NONE) is not (was := entries.get(name, _NONE)):
                        attribute = self._note(_Attribute(space, name, was, was, owner, ""))
                        attribute.is_own |= type(attribute.value) not in (int, float)
            for place, attribute in self._attributes.items():
                attribute.left = attribute.value
                if index in attribute.users:
                    self._own[index][place] = attribute.value

    def end(self, index: int) -> None:
        """A micro-batch's step has ended."""
        if index == 0:
            for attribute in map(self._attributes.__getitem__, self._own[0]):
                attribute.is_put_back = attribute.is_changed and attribute.is_as_before
        self._own[index] = {}

    def pause(self, index: int) -> None:
        """A micro-batch's step has come to where it waits for the others."""
        if index == 0:
            for attribute in map(self._attributes.__getitem__, self._own[0]):
                attribute.is_changed |= not attribute.is_as_before

    def _note_attribute(self, module: nn.Module, name: str, value: Any) -> None:
        is_shared = isinstance(module, self._shared) and name != "_forward_cache"  # what a metric gave for a batch
        if running_step() is None or is_shared or isinstance(value, nn.Parameter) or name in module._parameters:
            return
        space: dict[str, Any] = vars(module)
        if isinstance(value, nn.Module) or name in module._modules:
            space = module._modules
        elif name in module._buffers:
            space = module._buffers
        attribute = self._attributes.get(_Place(id(space), name))
        if attribute is None:
            before = space.get(name, _NONE)
            start = getattr(type(module), name, _NONE) if before is _NONE else before
            line = "" if name == "training" else users_line()  # of all modules, by `eval`
            attribute = _Attribute(space, name, before, start, f"a {type(module).__name__}", line)
        frame = sys._getframe(2)
        attribute.is_own |= not _is_made_of_itself(frame.f_code, frame.f_lasti)
        self._note(attribute)

    def _note(self, attribute: _Attribute) -> _Attribute:
        attribute = self._attributes.setdefault(_Place(id(attribute.space), attribute.name), attribute)
        attribute.users.add(self._running)
        return attribute

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
        for attribute in self._attributes.values():
            if attribute.is_put_back and not attribute.is_as_before:
                raise NotImplementedError(
                    f"{_told(attribute)} and puts it back after a call at which its micro-batches wait for one "
                    f"another, such as manual_backward or an optimizer's step, so that others begin with what was set. "
                    f"{_WAY_OUT}"
                )


_MAX_ITEMS = 10_000
"""Of lists that are looked at."""
_REGISTERING = (
    *("register_forward_hook", "register_forward_pre_hook"),
    *("register_full_backward_hook", "register_full_backward_pre_hook"),
)
_WAY_OUT = (
    "Set it in one part of the step alone, keep what is a micro-batch's own in a local variable, or use one "
    "micro-batch (num_microbatches=1)"
)


def _told(attribute: _Attribute) -> str:
    line = f" ({attribute.line})" if attribute.line else ""
    return f"the training_step sets {attribute.name!r} of {attribute.owner}{line}"


@cache
def _names_of_lightning() -> frozenset[str]:
    return frozenset(vars(LightningModule()))


def _spaces_of(root: nn.Module) -> list[tuple[str, dict[Any, Any]]]:
    """The dictionaries and plain records that a module's attributes are, with their names."""
    found: list[tuple[str, dict[Any, Any]]] = []
    for name, value in vars(root).items():
        if name not in _names_of_lightning() and isinstance(value, dict):
            found.append((f"self.{name}", value))
        elif type(value) is SimpleNamespace or (is_dataclass(value) and not isinstance(value, (nn.Module, type))):
            found.append((f"self.{name}", getattr(value, "__dict__", {})))
    return found


@lru_cache(maxsize=4096)
def _is_made_of_itself(code: CodeType, last: int) -> bool:
    """Whether the instruction of a function that sets an attribute ends a statement that also reads it."""
    reads: set[Any] = set()
    for instruction in dis.get_instructions(code):
        if instruction.offset >= last:
            return instruction.offset == last and instruction.opname == "STORE_ATTR" and instruction.argval in reads
        if instruction.opname.startswith("STORE_") or instruction.opname == "POP_TOP":  # an earlier statement
            reads.clear()
        elif instruction.opname in ("LOAD_ATTR", "LOAD_METHOD"):
            reads.add(instruction.argval)
    return False
