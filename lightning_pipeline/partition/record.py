"""Records: what a stage notes of the events of a step, so that other stages need not run them.

An event is one call of a leaf module or one torch function between modules, numbered in program order.
"""

from __future__ import annotations

import pickle
from dataclasses import dataclass, field

import torch

from lightning_pipeline.partition.absent import ValueId, ValueMeta
from lightning_pipeline.partition.tree import Constant, Layout, Pickled, Slot


class Alias:
    """In place of a `ValueMeta`: this tensor of the result is an argument, or a value that was there before."""

    __slots__ = ("argument", "value")

    def __init__(self, argument: int | None, value: ValueId | None) -> None:
        self.argument = argument
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Alias) and (self.argument, self.value) == (other.argument, other.value)


class Opaque:
    """In place of a constant that cannot be sent to another process."""

    def __init__(self, description: str) -> None:
        self.description = description

    def __repr__(self) -> str:
        return f"Opaque({self.description})"


@dataclass(slots=True)
class Event:
    """The result of one event.

    Attributes:
        name: the leaf module's name, or the function's.
        layout: the result's layout; its slots number `tensors`.
        tensors: metadata, or an alias, of each tensor of the result.
        writes: numbers of the argument tensors that the event wrote into; each is a new value, numbered after
            `tensors`.
        filled: containers among the arguments that the event changed: their number and new content.
        attributes: attributes of modules inside the leaf that it set: module name, attribute and value.
        hooked: calls of forward hooks inside the leaf: module name, arguments, keyword arguments and output.
        draws: it drew random numbers from the stream of the code between modules.
        dynamic: its result holds numbers, or has a shape, that depends on data.
        takes_arguments: its result is made with tensors of the arguments.
        has_side_effects: it does something beside its result that is not a write into a tensor.
    """

    name: str
    layout: Layout
    tensors: tuple[ValueMeta | Alias, ...] = ()
    writes: tuple[int, ...] = ()
    filled: tuple[tuple[int, Layout], ...] = ()
    attributes: tuple[tuple[str, str, Layout], ...] = ()
    hooked: tuple[tuple[str, Layout], ...] = ()
    draws: bool = False
    dynamic: bool = False
    takes_arguments: bool = field(init=False, compare=False)
    has_side_effects: bool = field(init=False, compare=False)

    def __post_init__(self) -> None:  # as every replay asks
        aliases = (meta for meta in self.tensors if isinstance(meta, Alias))
        self.takes_arguments = bool(self.writes) or any(alias.argument is not None for alias in aliases)
        self.has_side_effects = bool(self.filled or self.attributes or self.hooked)


@dataclass(slots=True)
class Record:
    """The events of a step up to some point, and the event with which each stage began."""

    events: list[Event] = field(default_factory=list)
    starts: dict[int, int] = field(default_factory=dict)
    counts: dict[str, int] = field(default_factory=dict)
    """How often each module that draws random numbers was called before the last start in `starts`."""

    @property
    def dynamic(self) -> bool:
        return any(event.dynamic for event in self.events)

    def names(self) -> tuple[str, ...]:
        return tuple(event.name for event in self.events)


def picklable(layout: Layout) -> Layout:
    """`layout` with constants that do not pickle replaced by `Opaque`."""
    if isinstance(layout, Constant):
        if isinstance(layout.value, (int, float, str, type(None))):
            return layout
        if isinstance(layout.value, (torch.UntypedStorage, torch.TypedStorage)):  # as long as its tensor is
            return Constant(Opaque(f"a {type(layout.value).__name__}"))
        try:
            pickle.dumps(layout.value)
        except Exception:
            return Constant(Opaque(repr(layout.value)[:200]))
        return layout
    if isinstance(layout, (Slot, Pickled)):
        return layout
    return layout._replace(items=tuple(picklable(item) for item in layout.items))


def is_constant(layout: Layout) -> bool:
    """Whether a result is Python data that is not known beforehand (None is)."""
    return isinstance(layout, Constant) and layout.value is not None
