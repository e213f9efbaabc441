"""Runs the forward of micro-batches before the step's Python, and undoes it where it was wrong (see `expectations`)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_pipeline import _torch
from lightning_pipeline.engine.microbatch import Microbatch
from lightning_pipeline.engine.rank_resources import RankResources
from lightning_pipeline.engine.work import LiveCount
from lightning_pipeline.partition.memory import copied
from lightning_pipeline.recording.provenance import is_same
from lightning_pipeline.recording.recording import Recording
from lightning_pipeline.runtime.tensor_meta import as_bytes, device_of, from_bytes, num_bytes, places

_RECEIVES_AHEAD = 4
"""Number of micro-batches whose receives are posted ahead of need."""


class EarlyForwards:
    """Exchanges the values that the step reads, and undoes forwards that ran on a wrong expectation.

    Args:
        microbatches: all micro-batches of the step; each has its `ahead` set.
    """

    def __init__(self, microbatches: Sequence[Microbatch], shared: RankResources) -> None:
        self._microbatches = microbatches
        self._placement, self._rank, self._transport = shared.placement, shared.rank, shared.transport
        self._tensors, self._device = shared.tensors, shared.device
        numbers = {number: None for one in microbatches if one.ahead for number in one.ahead.expectation.module_reads}
        own = [self._tensors.tensors[number] for number in numbers]
        for one in microbatches[:_RECEIVES_AHEAD]:
            self._post(one)
        self._of_module = dict(zip(map(id, own), shared.spread_module_tensors(own), strict=True)) if own else {}

    def note_written(self, state: Microbatch, visit: int) -> None:
        """Copy the module's tensors that a visit is about to modify in place, so that `pass_over` can restore them."""
        assert state.ahead is not None
        for number in state.ahead.expectation.written[visit]:
            tensor = self._tensors.tensors[number]
            state.ahead.before.append((tensor, copied(tensor)))

    def tell(self, state: Microbatch, visit: int) -> None:
        """Send the values of a visit that the step reads to the other ranks."""
        assert state.ahead is not None
        ahead = state.ahead
        reads = ahead.expectation.reads_by_visit.get(visit)
        if not reads or self._transport is None:
            return
        specs = ahead.expectation.specs_of(reads)
        message = torch.zeros(num_bytes(specs) + 1, dtype=torch.uint8)
        if ahead.error is None and not ahead.is_passed_over:
            for value, spec, place in zip(reads, specs, places(specs), strict=True):
                message[place] = as_bytes(state.kept[value], spec)
            message[-1] = True  # the values are valid: the forward neither failed nor was passed over
        self._transport.send_read(message, self._number(state, visit))

    def values(self, state: Microbatch, recording: Recording, values: Sequence[int]) -> list[Tensor] | None:
        """The data of values that the step reads; None if the step reached the read in an unexpected way.

        Raises:
            Exception: the error of a forward on this rank, on which the step depends.
        """
        assert state.ahead is not None
        expectation = state.ahead.expectation
        is_expected = recording.event in expectation.path and set(values) <= set(expectation.reads)
        if not is_expected or not self._has_taken_along(state, recording):
            return None
        answers = self._answers(state)
        if answers is None:
            return None
        if state.ahead.error is not None:
            raise state.ahead.error
        return [copied(answers[value]) for value in values]

    def values_of_module(self, tensors: Sequence[Tensor]) -> list[Tensor] | None:
        """The data of tensors of the module; None unless all of them were expected to be read."""
        if not all(id(tensor) in self._of_module for tensor in tensors):
            return None
        return [copied(self._of_module[id(tensor)]) for tensor in tensors]

    def has_ended(self, state: Microbatch, recording: Recording, loss_value: int, asked: Sequence[int]) -> bool:
        """Whether a step's Python has ended as expected, so that the micro-batch may run backward.

        Raises:
            Exception: the error of a forward on this rank.
        """
        if state.ahead is None or not state.ahead.is_open:
            return False
        expectation = state.ahead.expectation
        is_as_expected = (
            recording.event is expectation.end
            and recording.is_simple
            and loss_value == expectation.loss_value
            and set(asked) <= set(expectation.asked)
            and set(recording.reads) <= set(expectation.reads)
            and self._has_taken_along(state, recording)
            and self._answers(state) is not None
        )
        if is_as_expected:
            state.ahead.is_open = False
            if state.ahead.error is not None:
                raise state.ahead.error
        return is_as_expected

    def pass_over(self, first: Microbatch, go_on: Callable[[], None], live: LiveCount) -> None:
        """Undo the forwards of a micro-batch and of later ones.

        All ranks call it at the same point, as all see the same reads. First the rest of the schedule runs without
        computing, so that every message sent is received.
        """
        taken_back = [one for one in self._microbatches[first.index :] if one.ahead is not None and one.ahead.is_open]
        for state in taken_back:
            assert state.ahead is not None
            state.ahead.is_passed_over = True
        go_on()
        for state in taken_back:
            self._answers(state)  # receive the messages that nobody has read
        for state in reversed(taken_back):  # the oldest copy of a tensor is restored last
            assert state.ahead is not None
            for tensor, before in reversed(state.ahead.before):
                with torch.no_grad():
                    tensor.copy_(before)
            live.now -= state.ahead.num_live
            state.program, state.ahead, state.loss_value, state.loss_tensor = None, None, -1, None
            state.inside, state.kept, state.asked = {}, {}, ()

    # -- details ----------------------------------------------------------------------------------------------------

    def _has_taken_along(self, state: Microbatch, recording: Recording) -> bool:
        """Whether the events so far captured the same tensors and numbers as the forwards ran with."""
        assert state.ahead is not None
        ahead, captured = state.ahead, recording.captured
        if len(captured) > len(ahead.captured):
            return False
        with _torch.DisableTorchFunction():
            while ahead.num_compared < len(captured):
                if not is_same(ahead.captured[ahead.num_compared], captured[ahead.num_compared]):
                    return False
                ahead.num_compared += 1
        return True

    def _answers(self, state: Microbatch) -> dict[int, Tensor] | None:
        """Wait for the values that a micro-batch's step reads; None if any rank's are invalid."""
        assert state.ahead is not None
        ahead, expectation = state.ahead, state.ahead.expectation
        if ahead.has_answers:
            return ahead.answers
        for one in self._microbatches[state.index : state.index + _RECEIVES_AHEAD]:
            self._post(one)
        found: dict[int, Any] = {}
        are_fine = not ahead.is_passed_over
        for visit, reads in expectation.reads_by_visit.items():
            if self._placement[visit % len(self._placement)] == self._rank:
                are_fine &= ahead.error is None
                found.update((value, state.kept.get(value)) for value in reads)
                continue
            assert ahead.arriving is not None
            message = ahead.arriving[visit].wait(_what(state))
            are_fine &= bool(message[-1])
            specs = expectation.specs_of(reads)
            for value, spec, place in zip(reads, specs, places(specs), strict=True):
                tensor = from_bytes(message[place], spec, state.beginning_of(value))
                found[value] = tensor.to(device_of(spec, self._device))
        ahead.arriving = None
        ahead.has_answers = True
        ahead.answers = found if are_fine else None
        return ahead.answers

    def _post(self, state: Microbatch) -> None:
        """Post the receives of the values that a micro-batch's step reads."""
        ahead = state.ahead
        if ahead is None or ahead.arriving is not None or ahead.has_answers:
            return
        ahead.arriving = {}
        for visit, reads in ahead.expectation.reads_by_visit.items():
            rank = self._placement[visit % len(self._placement)]
            if rank != self._rank:
                assert self._transport is not None
                size, number = num_bytes(ahead.expectation.specs_of(reads)) + 1, self._number(state, visit)
                ahead.arriving[visit] = self._transport.receive_read(size, number, rank, _what(state))

    def _number(self, state: Microbatch, visit: int) -> int:
        """Number of a message, unique in the step: messages of a rank's visits may arrive in any order."""
        return state.index * len(self._placement) + visit


def _what(state: Microbatch) -> str:
    return f"what the step reads of micro-batch {state.index}"
