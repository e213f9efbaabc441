"""Which of the module's tensors a step writes into, be it through a view."""

from __future__ import annotations

from collections.abc import Iterable

from lightning_pipeline.partition.event import Event
from lightning_pipeline.partition.inference import writes_beside
from lightning_pipeline.partition.placeholder import Look


class ModuleWrites:
    """Follows events, in order.

    Attributes:
        number_of: of values that share memory with a tensor of the module, its number.
    """

    def __init__(self) -> None:
        self.number_of: dict[int, int] = {}

    def of(self, event: Event) -> dict[int, bool]:
        """The module's tensors that an event writes into, by number, and whether it gives them another memory."""
        found: dict[int, bool] = {}
        for slot, _, value in event.writes:
            number = self.behind(event.inputs[slot])
            if number is not None:
                is_replaced = event.name == "data.__set__"
                found[number] = is_replaced
                self.number_of[value] = number
        for output, slots in zip(event.outputs, event.result.shares, strict=True):
            for slot in slots:
                number = self.behind(event.inputs[slot])
                if number is not None and output is not None:
                    self.number_of[output] = number
        return found

    def behind(self, value: object) -> int | None:
        """The number of the module's tensor that a value is, or shares memory with."""
        if type(value) is not int:
            return None
        return -1 - value if value < 0 else self.number_of.get(value)


def needs_order(events: Iterable[Event], num_stages: int) -> bool:
    """Whether a micro-batch has to be done with before the next one begins: it writes into a tensor of the module that
    several stages use, or whose content before backward needs."""
    writes = ModuleWrites()
    written: set[int] = set()
    stages: dict[int, set[int]] = {}
    with_gradient: set[int] = set()
    for event in events:
        if event.visit < 0:
            continue
        beside = writes_beside(event.function, event.call)
        has_gradient = any(isinstance(look, Look) and look.requires_grad for look in event.result.tensors)
        for slot, value in enumerate(event.inputs):
            number = writes.behind(value)
            if number is not None:
                stages.setdefault(number, set()).add(event.visit % num_stages)
                if has_gradient and slot not in beside:
                    with_gradient.add(number)
        written |= writes.of(event).keys()
    return any(len(stages[number]) > 1 or number in with_gradient for number in written)
