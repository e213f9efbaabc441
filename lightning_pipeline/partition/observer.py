"""What a stage notes while it runs a structure of micro-batch for the first time."""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from lightning_pipeline.partition import tree
from lightning_pipeline.partition.absent import ValueId, ValueMeta
from lightning_pipeline.partition.dynamic import DataDependence
from lightning_pipeline.partition.hooks import HookCall, note_calls, user_hooks
from lightning_pipeline.partition.metadata import DATA_DEPENDENT, HOOKING, users_line
from lightning_pipeline.partition.random import Streams
from lightning_pipeline.partition.record import Alias, Event, Record, is_constant, picklable


@dataclass(slots=True)
class Look:
    """The state before an event."""

    name: str
    arguments: list[Tensor]
    versions: list[int]
    holders: list[Any]
    contents: list[Any]
    states: list[Tensor] | None
    module: nn.Module | None
    attributes: dict[str, dict[str, Any]]
    hooks: list[HookCall]
    handles: list[Any]
    dependence: DataDependence | None
    explicit_generator: bool


@dataclass(slots=True)
class Usage:
    """What this stage used of what others hold.

    Attributes:
        values: values of earlier stages.
        batch: numbers of the batch's tensors.
        parameters: names of parameters and buffers used between modules.
    """

    values: set[ValueId] = field(default_factory=set)
    batch: set[int] = field(default_factory=set)
    parameters: set[str] = field(default_factory=set)


class Observer:
    """Notes the events of one stage.

    Args:
        record: the events before the stage; the stage's own are appended.
        streams: the stage's random streams.
        names: name of each parameter and buffer by the tensor's id.
        inner: qualified names of modules by the module's id.
        known: events of another structure; where an event has the same number and name as one of these, it is taken
            to do the same beside its result, which saves a closer look.
    """

    def __init__(
        self,
        record: Record,
        streams: Streams,
        names: dict[int, str],
        inner: dict[int, str],
        *,
        known: list[Event] | None = None,
    ) -> None:
        self.record = record
        self.usage = Usage()
        self.leaves: dict[str, int] = {}
        self._streams = streams
        self._names = names
        self._inner = inner
        self._ids: dict[int, tuple[ValueId, weakref.ref[Tensor]]] = {}
        self._start = 0
        self._aliases: dict[ValueId, int] = {}
        self._received: dict[int, ValueId] = {}
        self._written: set[ValueId] = set()
        self._known = known or []

    # -- the stage --------------------------------------------------------------------------------------------------

    def begin(self, number: int, values: dict[ValueId, Tensor]) -> None:
        """The stage begins with event `number`; `values` are those of earlier stages and of the batch."""
        self._start = number
        for value, tensor in values.items():
            self._ids[id(tensor)] = (value, weakref.ref(tensor))
            if value in self._aliases:
                self._received[id(tensor)] = value

    def end(self, stage: int) -> Record:
        """Complete the record with where this stage began and how far its random streams came."""
        self.record.starts[stage] = self._start
        return self.record

    def note_alias_groups(self, groups: dict[ValueId, int]) -> None:
        """Values that shared memory with one another on the stage they came from."""
        self._aliases = groups

    def abandon(self, look: Look) -> None:
        """The event did not come to its end."""
        for handle in look.handles:
            handle.remove()

    def alive(self) -> dict[ValueId, Tensor]:
        """Every value that later code could still use: those that Python still refers to.

        Raises:
            ValueError: a received value was written in place and one that shared its memory can still be used.
        """
        found = {}
        for value, reference in self._ids.values():
            tensor = reference()
            if tensor is not None and value[0] >= 0:
                found[value] = tensor
        self._check_written_aliases(found)
        return dict(sorted(found.items()))

    def use(self, tensors: list[Tensor]) -> None:
        """Note that the stage used `tensors`."""
        for tensor in tensors:
            key = id(tensor)
            name = self._names.get(key)
            if name is not None:
                self.usage.parameters.add(name)
                if tensor.is_meta:
                    raise ValueError(
                        f"{name!r} is used here and lives on another stage, whose list element it belongs to; give "
                        f"stage_config no key for it before its first use, or call it through its module "
                        f"({users_line()})"
                    )
                continue
            value = self._value_of(tensor)
            if value is None:
                continue
            if value[0] < 0:
                self.usage.batch.add(value[1])
            elif value[0] < self._start:
                self.usage.values.add(value)

    # -- events -----------------------------------------------------------------------------------------------------

    def before(self, name: str, args: Any, kwargs: Any, module: nn.Module | None) -> Look:
        """Look at the arguments of an event that is about to run."""
        arguments = tree.leaves((args, kwargs))
        self.use(arguments)
        if module is not None:
            self.leaves[name] = self.leaves.get(name, 0) + 1
        look = Look(
            name=name,
            arguments=arguments,
            versions=[_version(tensor) for tensor in arguments],
            holders=list(tree.containers((args, kwargs))),
            contents=[],
            states=self._streams.states() if module is None else None,
            module=module,
            attributes={},
            hooks=[],
            handles=[],
            dependence=None,
            explicit_generator=isinstance(kwargs.get("generator"), torch.Generator),
        )
        look.contents = [_shallow(holder) for holder in look.holders]
        if module is not None and not self._is_plain(name):
            self._watch(look, module)
        return look

    def after(self, look: Look, number: int, result: Any) -> None:
        """Note the event, now that it has run."""
        for handle in look.handles:
            handle.remove()
        filled = [
            index
            for index, holder in enumerate(look.holders)
            if _shallow(holder) != look.contents[index] and tree.leaves(holder)
        ]
        attributes = self._changed_attributes(look)
        parts = [result, *(look.holders[index] for index in filled), *(value for _, _, value in attributes)]
        parts += [content for _, content in look.hooks]
        tensors, layout = tree.flatten(parts)
        layouts = list(layout.items)  # type: ignore[union-attr]
        metas = tuple(self._describe(tensor, look.arguments) for tensor in tensors)
        taken = {meta.argument for meta in metas if isinstance(meta, Alias)}
        written = [i for i, tensor in enumerate(look.arguments) if _version(tensor) != look.versions[i]]
        self._written.update(
            self._received[id(look.arguments[i])] for i in written if id(look.arguments[i]) in self._received
        )
        writes = tuple(i for i in written if i not in taken and id(look.arguments[i]) not in self._names)
        draws = look.explicit_generator or (look.states is not None and self._streams.moved(look.states))
        event = Event(
            name=look.name,
            layout=picklable(layouts[0]),
            tensors=metas,
            writes=writes,
            filled=tuple((index, picklable(layouts[1 + i])) for i, index in enumerate(filled)),
            attributes=tuple(
                (module, attribute, picklable(layouts[1 + len(filled) + i]))
                for i, (module, attribute, _) in enumerate(attributes)
            ),
            hooked=tuple(
                (module, picklable(layouts[1 + len(filled) + len(attributes) + i]))
                for i, (module, _) in enumerate(look.hooks)
            ),
            draws=draws,
            dynamic=self._is_dynamic(look, layouts[0], bool(tree.leaves(result))),
        )
        self.record.events.append(event)
        assert len(self.record.events) == number + 1
        for index, tensor in enumerate(tensors):
            self._name_value(tensor, (number, index))
        for offset, argument in enumerate(writes):
            self._name_value(look.arguments[argument], (number, len(tensors) + offset))

    # -- details ----------------------------------------------------------------------------------------------------

    def _name_value(self, tensor: Tensor, value: ValueId) -> None:
        if id(tensor) not in self._names:
            self._ids[id(tensor)] = (value, weakref.ref(tensor))

    def _value_of(self, tensor: Tensor) -> ValueId | None:
        known = self._ids.get(id(tensor))
        return known[0] if known is not None and known[1]() is tensor else None

    def _describe(self, tensor: Tensor, arguments: list[Tensor]) -> ValueMeta | Alias:
        for index, argument in enumerate(arguments):
            if argument is tensor:
                return Alias(index, None)
        value = self._value_of(tensor)
        return ValueMeta.of(tensor) if value is None else Alias(None, value)

    def _is_dynamic(self, look: Look, layout: Any, has_tensors: bool) -> bool:
        if look.dependence is not None and look.dependence.found:
            return True
        if look.module is not None or look.name in HOOKING:
            return False
        if look.name in DATA_DEPENDENT or (look.name == "where" and len(look.arguments) == 1):
            return True
        if look.name == "__getitem__" and any(t.dtype in (torch.bool, torch.uint8) for t in look.arguments[1:]):
            return True
        return not has_tensors and is_constant(layout)

    def _is_plain(self, name: str) -> bool:
        """Whether the event that comes next is known to do nothing beside its result."""
        number = len(self.record.events)
        if number >= len(self._known):
            return False
        event = self._known[number]
        return event.name == name and not (event.attributes or event.hooked or event.dynamic)

    def _watch(self, look: Look, module: nn.Module) -> None:
        """Look at what a leaf may change beside its result."""
        for sub in module.modules():
            name = self._inner.get(id(sub), "")
            found = {k: id(v) for k, v in vars(sub).items() if not k.startswith("_") and not callable(v)}
            look.attributes[name] = found
            if sub is not module and user_hooks(sub):
                look.handles += note_calls([(name, sub)], look.hooks)
        look.dependence = DataDependence()
        look.dependence.__enter__()
        look.handles.append(look.dependence)

    def _changed_attributes(self, look: Look) -> list[tuple[str, str, Any]]:
        if look.module is None or not look.attributes:
            return []
        changed = []
        for sub in look.module.modules():
            name = self._inner.get(id(sub), "")
            for attribute, value in vars(sub).items():
                if attribute.startswith("_") or callable(value):
                    continue
                if look.attributes[name].get(attribute) != id(value) and tree.leaves(value):
                    changed.append((name, attribute, value))
        return changed

    def _check_written_aliases(self, alive: dict[ValueId, Tensor]) -> None:
        """Two received values that shared memory where they came from do not share it here."""
        for value in self._written:
            for other, group in self._aliases.items():
                if other == value or group != self._aliases[value]:
                    continue
                if other in self.usage.values or other in alive:
                    raise ValueError(
                        f"the result of {self._event_name(value)} is written in place on this stage, and it shares "
                        f"memory with the result of {self._event_name(other)}, which crossed the same boundary as a "
                        f"tensor of its own and does not see the write; write out of place, or move the boundary"
                    )

    def _event_name(self, value: ValueId) -> str:
        return repr(self.record.events[value[0]].name)


def _shallow(holder: Any) -> Any:
    if isinstance(holder, list):
        return [id(item) for item in holder]
    return {key: id(item) for key, item in holder.items()}


def _version(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version
