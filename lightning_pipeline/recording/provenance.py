"""Tracks how captured values are derived from the batch, so that they can be computed before the step's Python runs."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_pipeline.partition.memory import copied
from lightning_pipeline.recording.operation import Call, put_together, take_apart, tensors_in


class OfBatch(NamedTuple):
    """A tensor of the batch, by its number among those that every rank has."""

    number: int


class Constant(NamedTuple):
    """A number, or a tensor that the step did not make: the same again, as far as one can tell."""

    value: Any


class Made(NamedTuple):
    """A result of a call."""

    node: Node
    place: int


Origin = OfBatch | Constant | Made


class Node:
    """A call that every rank has made.

    Attributes:
        origins: of its tensors, in the order of their slots.
        draw: which draw of the micro-batch it is; None for what draws nothing.
    """

    __slots__ = ("call", "draw", "function", "origins")

    def __init__(self, function: Any, call: Call, origins: list[Origin], draw: int | None) -> None:
        self.function, self.call, self.origins, self.draw = function, call, origins, draw


class Provenance:
    """Follows one recording.

    Args:
        batch: the tensors of the batch that every rank has.

    Attributes:
        captured: the origin of each tensor that was taken along, by its place.
        is_known: whether calls that are made again come to the same; not where one writes into a tensor, or
            draws from a generator of the user's.
    """

    def __init__(self, batch: Sequence[Tensor]) -> None:
        self.captured: dict[int, Origin] = {}
        self.is_known = True
        # By id; the references tell whether it is still that tensor's.
        self._origins: dict[int, tuple[weakref.ref[Tensor], Origin]] = {}
        for number, tensor in enumerate(batch):
            self._note(tensor, OfBatch(number))

    def note_call(self, function: Any, args: Any, kwargs: dict[str, Any], found: Any, draw: int | None) -> None:
        """A call has been made on every rank, and has given `found`."""
        tensors = tensors_in(found)
        if any(self._known(tensor) is None for tensor in tensors):
            call = take_apart(function, args, kwargs)
            node = Node(function, call, [self.origin(tensor) for tensor in call.tensors], draw)
            call.tensors = []
            for place, tensor in enumerate(tensors):
                if self._known(tensor) is None:
                    self._note(tensor, Made(node, place))

    def note_captured(self, place: int, tensor: Tensor) -> None:
        self.captured[place] = self.origin(tensor)

    def origin(self, tensor: Tensor) -> Origin:
        return self._known(tensor) or Constant(tensor)

    def _known(self, tensor: Tensor) -> Origin | None:
        reference, origin = self._origins.get(id(tensor), (None, None))
        return origin if reference is not None and reference() is tensor else None

    def _note(self, tensor: Tensor, origin: Origin) -> None:
        self._origins[id(tensor)] = weakref.ref(tensor), origin


def made_again(origins: Sequence[Origin], batch: Sequence[Tensor], seed: Callable[[int], None]) -> list[Any]:
    """Numbers, and copies of tensors, as they come from another batch."""
    made: dict[Node, list[Tensor]] = {}

    def value(origin: Origin) -> Any:
        if isinstance(origin, Constant):
            return origin.value
        if isinstance(origin, OfBatch):
            return batch[origin.number]
        node = origin.node
        if node not in made:
            tensors = [value(one) for one in node.origins]
            if node.draw is not None:
                seed(node.draw)
            numbers = node.call.numbers
            args = put_together(node.call.args, tensors, numbers)
            made[node] = tensors_in(node.function(*args, **put_together(node.call.kwargs, tensors, numbers)))
        return made[node][origin.place]

    with torch.no_grad():
        found = [value(origin) for origin in origins]
        return [copied(one) if isinstance(one, Tensor) else one for one in found]


def is_same(first: Any, second: Any) -> bool:
    """Whether two things taken along are alike to the bit."""
    if not isinstance(first, Tensor) or not isinstance(second, Tensor):
        return type(first) is type(second) and repr(first) == repr(second)
    if first.shape != second.shape or first.dtype != second.dtype or first.layout != second.layout:
        return False
    if first.layout is not torch.strided or first.stride() != second.stride() or first.device != second.device:
        return False
    return torch.equal(_bits(first), _bits(second))


_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def _bits(tensor: Tensor) -> Tensor:
    """As integers, in which NaN equals itself."""
    if not (tensor.is_floating_point() or tensor.is_complex()):
        return tensor
    tensor = tensor.detach().resolve_conj().resolve_neg()
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    return tensor.view(_INTEGERS[tensor.itemsize])
