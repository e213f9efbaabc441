"""Where values begin in memory, on which sums of MKL's depend in their last bits (`memory.beginning`)."""

from __future__ import annotations

from collections.abc import Sequence

from lightning_pipeline.partition.memory import ALIGNMENT
from lightning_pipeline.recording.event import Event


class Beginnings:
    """Where the values of a path begin, in bytes past a multiple of 64: a stage that gets one has it there, too.

    The batch's tensors begin elsewhere in each micro-batch, and so do views of them, of which it is known where they
    begin within their tensor.

    Args:
        num_given: the number of tensors of the batch among the values, of which they are the first.
        before: of the path up to here.
    """

    def __init__(self, num_given: int, before: Beginnings | None = None) -> None:
        self._begins: dict[int, int] = {}
        self._within = {number: number for number in range(num_given)}
        if before is not None:
            self._begins, self._within = {**before._begins}, {**before._within}

    def note(self, event: Event) -> None:
        """Take in the values that an event makes."""
        if not self._begins and not self._within and not any(event.result.begins):
            return
        for value, shares, own in zip(event.outputs, event.result.shares, event.result.begins, strict=False):
            if value is not None:
                self._put(value, event.inputs[shares[0]] if shares else None, own)
        for slot, _, value in event.writes:
            self._put(value, event.inputs[slot], 0)

    def of(self, value: int, given: Sequence[int]) -> int:
        """Where a value begins.

        Args:
            given: where each of the batch's tensors does; empty if all begin at 0.
        """
        begin = self._begins.get(value, 0)
        return (begin + given[self._within[value]]) % ALIGNMENT if given and value in self._within else begin

    def _put(self, value: int, base: object, offset: int) -> None:
        begin = offset
        if type(base) is int:
            begin = (offset + self._begins.get(base, 0)) % ALIGNMENT
            if base in self._within:
                self._within[value] = self._within[base]
        if begin:
            self._begins[value] = begin
