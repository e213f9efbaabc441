"""Which values of a path are the same tensor at different times, and which share their memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from lightning_pipeline.partition.torch_functions import function_name
from lightning_pipeline.recording.event import Event
from lightning_pipeline.recording.matcher import HookTensor


class Memory:
    """Which operands of events share their memory. It is known by the first value that has it, or by the tensor of the
    module (below zero) or of a hook that it is of."""

    def __init__(self) -> None:
        self._firsts: dict[int, Any] = {}

    def of(self, operand: Any) -> Any:
        """What an operand's memory is known by."""
        return self._firsts.get(operand, operand)

    def module_tensor(self, operand: Any) -> int | None:
        """The number of the module's tensor that an operand is, or shares memory with."""
        first = self.of(operand)
        return -1 - first if type(first) is int and first < 0 else None

    def note(self, event: Event) -> dict[int, bool]:
        """Take in the next event. Returns the module's tensors that it writes into, by number, and whether it gives
        them another memory."""
        found: dict[int, bool] = {}
        for slot, _, value in event.writes:
            self._put(value, (event.inputs[slot],))
            if (number := self.module_tensor(event.inputs[slot])) is not None:
                found[number] = event.name == "data.__set__"
        for output, slots in zip(event.outputs, event.result.shares, strict=True):
            if output is not None:
                self._put(output, [event.inputs[slot] for slot in slots])
        return found

    def _put(self, value: int, shared: Sequence[Any]) -> None:
        firsts = list(map(self.of, shared))
        numbers = [first for first in firsts if type(first) is int]
        if numbers or any(isinstance(first, HookTensor) for first in firsts):
            self._firsts[value] = min(numbers) if numbers else firsts[0]


class View(NamedTuple):
    """How a tensor was made.

    Attributes:
        source: the tensor whose memory it shares; None for one that shares none.
        event: which made it; None for the batch's.
        place: its place among what that made.
        is_differentiable: gradients go back to the source.
    """

    source: int | None
    event: Event | None
    place: int
    is_differentiable: bool = False


class Views:
    """The tensors of a path that share memory. A tensor's number is that of its first value."""

    def __init__(self) -> None:
        self._tensors: dict[int, int] = {}  # of values that writes made
        self._latest: dict[int, int] = {}
        self._views: dict[int, View] = {}
        self._families: dict[int, list[int]] = {}
        self._makers: dict[int, View] = {}
        self._parted: set[int] = set()
        self._of_module: dict[int, int] = {}  # by tensor, where a write has made values of it

    def note(self, event: Event) -> None:
        """Take in the next event of the path."""
        for index, (value, shares) in enumerate(zip(event.outputs, event.result.shares, strict=True)):
            if value is None:
                continue
            sources = [event.inputs[slot] for slot in shares]
            source = next((one for one in sources if type(one) is int and one >= 0), None)
            if source is None:
                self._makers[value] = View(None, event, index)
                continue
            tensor = self.tensor_of(source)
            is_differentiable = event.state[0] and not _detaches(event)
            self._views[value] = View(tensor, event, index, is_differentiable)
            first = self.first_of(tensor)
            self._families.setdefault(first, [first]).append(value)
        for slot, _, value in event.writes:
            before = event.inputs[slot]
            if event.name == "data.__set__" and type(before) is int:
                self._parted.add(self.first_of(self.tensor_of(before)))
            tensor = self.tensor_of(before) if type(before) is int and before >= 0 else value
            if type(before) is int and before < 0:
                self._of_module[value] = -1 - before
            self._tensors[value], self._latest[tensor] = tensor, value

    def tensor_of(self, value: int) -> int:
        return self._tensors.get(value, value)

    def value_of(self, tensor: int) -> int:
        return self._latest.get(tensor, tensor)

    def first_of(self, tensor: int) -> int:
        """The tensor of which this one is a view, or a view of a view; itself without."""
        while tensor in self._views:
            source = self._views[tensor].source
            assert source is not None
            tensor = source
        return tensor

    def family(self, tensor: int) -> Sequence[int]:
        """The tensors that share a tensor's memory, in the order in which they were made; itself alone without."""
        return self._families.get(self.first_of(tensor), (tensor,))

    def has_parted(self, tensor: int) -> bool:
        """Whether one that shares a tensor's memory has been given another memory, by setting its ``.data``."""
        return self.first_of(tensor) in self._parted

    def view(self, tensor: int) -> View:
        return self._views.get(tensor) or self._makers.get(tensor) or View(None, None, 0)

    def module_tensor(self, operand: Any) -> int | None:
        """The number of the module's tensor that an operand is, itself."""
        if type(operand) is not int:
            return None
        return -1 - operand if operand < 0 else self._of_module.get(self.tensor_of(operand))

    def with_same_data(self, tensor: int) -> int:
        """The tensor of which this one is a detached one, and so on; itself without."""
        while (view := self.view(tensor)).source is not None and _detaches(view.event):
            tensor = view.source
        return tensor

    def whole_for_autograd(self, tensor: int) -> int:
        """The tensor that autograd takes it for a view of."""
        while (view := self.view(tensor)).is_differentiable and view.source is not None:
            tensor = view.source
        return tensor


def _detaches(event: Event | None) -> bool:
    return event is not None and function_name(event.function) in ("detach", "data.__get__")
