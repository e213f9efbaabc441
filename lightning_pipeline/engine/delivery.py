"""Delivers the batch: the first rank announces it, and sends each rank the tensors that it needs."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_pipeline.engine.microbatch import Microbatch, Structure
from lightning_pipeline.engine.work import StepTask
from lightning_pipeline.partition.batches import ListsOfSamples
from lightning_pipeline.partition.memory import ALIGNMENT, beginning, begun_at, extent, fill, laid_out, memory_of
from lightning_pipeline.partition.microbatch import num_samples, overlaps, signature
from lightning_pipeline.partition.placeholder import Placeholder, TensorSpec
from lightning_pipeline.partition.rng import mix
from lightning_pipeline.partition.tree import Layout
from lightning_pipeline.runtime.tensor_meta import TensorMeta, arrived, conform, wire
from lightning_pipeline.runtime.topology import Channel
from lightning_pipeline.runtime.transport import Transport

MAX_STRUCTURES = 64
"""Number of structures that are remembered; the least recently used one is dropped first."""


@dataclass(slots=True)
class Announcement:
    """The first rank's message about a step: the structure and size of each micro-batch.

    Attributes:
        numbers: number of each micro-batch's structure.
        new: structures announced for the first time, by number.
        layouts: by micro-batch, layouts that differ from their structure's in constants.
        beginnings: by micro-batch, where its tensors begin in memory (`beginning`), if any is not 0.
    """

    numbers: list[int]
    sizes: list[int]
    new: dict[int, Structure]
    layouts: dict[int, Layout]
    are_counted: bool = True
    beginnings: dict[int, list[int]] = field(default_factory=dict)


class _Part(NamedTuple):
    """A tensor of a micro-batch that every rank has.

    Attributes:
        of_loader: the first rank's, of which `tensor` is a copy.
        version: of `of_loader`, before the step.
    """

    of_loader: Tensor | None
    tensor: Tensor
    version: int | None

    @property
    def is_changed_elsewhere(self) -> bool:
        return self.of_loader is not None and self.version is not None and self.of_loader._version != self.version

    @classmethod
    def of(cls, of_loader: Tensor | None, tensor: Tensor) -> _Part:
        version = None if of_loader is None or of_loader.is_inference() else of_loader._version
        return cls(of_loader, tensor, version)


class Delivery:
    """Delivers the batches of one pipeline.

    Args:
        placement: the rank of each virtual stage. The first rank has the batches, and that of the first stage is given
            their large tensors.
    """

    def __init__(self, rank: int, placement: Sequence[int], transport: Transport | None) -> None:
        self._rank = rank
        self._num_ranks = max(placement) + 1
        self._first_stage = placement[0]
        self._transport = transport
        self._structures: OrderedDict[int, Structure] = OrderedDict()
        self._by_key: dict[Hashable, int] = {}
        self._next_number = 0
        self._parts: list[_Part] = []
        self._beginnings: dict[int, list[int]] = {}
        self._of_stages: set[int] = set()
        self.has_written = False

    def announce(
        self, work: StepTask, microbatches: list[Any] | None
    ) -> tuple[list[Microbatch], list[list[Tensor]] | None]:
        """Announce the step's micro-batches. Returns their states, and on the first rank their tensors."""
        tensors: list[list[Tensor]] | None = None
        if self._rank == 0:
            assert microbatches is not None
            announcement, tensors = self._describe(work.kind, microbatches)
            for peer in range(1, self._num_ranks):
                assert self._transport is not None
                self._transport.send_object(announcement, peer)
        else:
            assert self._transport is not None
            announcement = self._transport.recv_object(0, "the announcement of the next batch")
        self._beginnings = announcement.beginnings
        for number in announcement.numbers:
            if number not in announcement.new:
                self._structures.move_to_end(number)
        for number, structure in announcement.new.items():
            self._structures[number] = structure
            self._by_key[structure.key] = number
        while len(self._structures) > max(MAX_STRUCTURES, len(announcement.numbers)):
            _, structure = self._structures.popitem(last=False)
            del self._by_key[structure.key]
        return self._states(work, announcement), tensors

    def deliver(self, states: list[Microbatch], tensors: list[list[Tensor]] | None) -> None:
        """Send the small tensors of the batch to every rank, and the large ones to that of the first stage."""
        self._parts = []
        sparse = [
            (state.index, number)
            for state in states
            for number, spec in enumerate(state.structure.small)
            if spec.stride is None
        ]
        if tensors is not None:
            for state, own in zip(states, tensors, strict=True):
                everywhere, given = state.structure.split(own)
                # Views share a version counter: one micro-batch's in-place write would seem to touch the others'.
                state.given = [tensor if tensor.requires_grad else tensor.data for tensor in given]
                if self._num_ranks == 1:
                    state.everywhere = [tensor.data for tensor in everywhere]
                    continue
                # Copies rather than views, as on the other ranks.
                copies = [tensor.detach().clone() for tensor in everywhere]
                state.everywhere = in_memory(copies, state.structure, self._beginnings_of_small(state))
                self._parts += map(_Part.of, everywhere, state.everywhere)
            for peer in range(1, self._num_ranks):
                assert self._transport is not None
                for packed in _packed(states):
                    self._transport.send(packed, peer, Channel.BATCH)
                if sparse:
                    self._transport.send_object([states[i].everywhere[number] for i, number in sparse], peer)
            if self._first_stage != 0:
                self._send_large(states)
            return
        assert self._transport is not None
        for state in states:
            state.everywhere = [_ABSENT] * len(state.structure.small)
        arriving = []
        for places, dtype in _columns(states):
            size = sum(states[index].structure.small[number].shape.numel() for index, number in places)
            arriving.append((places, self._transport.recv(TensorMeta((size,), (1,), dtype), 0, Channel.BATCH)))
        for places, receive in arriving:
            flat = receive.wait("the batch")
            offset = 0
            for index, number in places:
                spec = states[index].structure.small[number]
                size = spec.shape.numel()
                states[index].everywhere[number] = flat[offset : offset + size].reshape(spec.shape).clone()
                offset += size
        if sparse:
            received = self._transport.recv_object(0, "the batch's sparse tensors")
            for (index, number), tensor in zip(sparse, received, strict=True):
                states[index].everywhere[number] = tensor
        for state in states:
            state.everywhere = in_memory(state.everywhere, state.structure, self._beginnings_of_small(state))
            # As on the first rank, so that all ranks ask for what stages have written into them.
            self._parts += (_Part.of(None, part) for part in state.everywhere)
        if self._rank == self._first_stage:
            self._receive_large(states)

    def note_written(self) -> None:
        """Before the end of a step: note the parts into which stages have written, which get their data there."""
        self._of_stages = {id(part) for _, part, _ in self._parts if type(part) is Placeholder}

    def write_back(self, states: Sequence[Microbatch]) -> None:
        """Copy the step's in-place changes of its batch back to the loader's tensors, as in one process.

        Raises:
            NotImplementedError: the step has written into the loader's tensors by another name, such as a buffer's.
        """
        parts, self._parts = self._parts, []
        if any(one.is_changed_elsewhere for one in parts):
            raise NotImplementedError(
                "the step has written into memory that a tensor of its batch shares with a buffer, an attribute or the "
                "dataset: the batch's tensor in the step is a copy, which has not seen it. Give one of them a clone()"
            )
        self.has_written = any(_is_written(tensor) for state in states for tensor in state.given)
        for state in states:
            for number, place in state.written.items():
                if state.given and type(place) is not Placeholder:
                    self.has_written = True
                    with torch.no_grad():
                        state.given[number].copy_(place)
        recordings = [state.recording for state in states if state.recording is not None]
        arrays = {memory for recording in recordings for memory in recording.memory.exposed}
        for tensor, part, _ in parts:
            if tensor is None or type(part) is Placeholder:
                continue
            # Version counters do not see writes through NumPy arrays, nor exist for inference tensors.
            if _is_written(part) or id(part) in self._of_stages or memory_of(part) in arrays:
                self.has_written = True
                with torch.no_grad():
                    tensor.copy_(part)

    # -- details ------------------------------------------------------------------------------------------------------

    def _send_large(self, states: Sequence[Microbatch]) -> None:
        assert self._transport is not None
        for state in states:
            for tensor, spec in zip(state.given, state.structure.large, strict=True):
                if spec.stride is None:
                    self._transport.send_object(tensor.detach(), self._first_stage)
                else:
                    self._transport.send(conform(tensor.detach(), spec), self._first_stage, Channel.BATCH)

    def _receive_large(self, states: Sequence[Microbatch]) -> None:
        """All receives are posted before the first wait, as sends may have to be received in their order."""
        assert self._transport is not None
        specs = [spec for state in states for spec in state.structure.large if spec.stride is not None]
        arriving = iter([self._transport.recv(wire(spec), 0, Channel.BATCH) for spec in specs])
        what = "a large tensor of the batch"
        for state in states:
            beginnings = state.given_beginnings or [0] * len(state.structure.large)
            for spec, begin in zip(state.structure.large, beginnings, strict=True):
                if spec.stride is None:
                    tensor = self._transport.recv_object(0, what)
                else:
                    tensor = arrived(next(arriving).wait(what), spec, begin)
                state.given.append(tensor.data.requires_grad_(spec.requires_grad))

    def _beginnings_of_small(self, state: Microbatch) -> list[int] | None:
        found = self._beginnings.get(state.index)
        return None if found is None else state.structure.split(found)[0]

    def _states(self, work: StepTask, announcement: Announcement) -> list[Microbatch]:
        total = sum(announcement.sizes)
        even = len(set(announcement.sizes)) == 1
        return [
            Microbatch(
                index=index,
                structure=self._structures[number],
                layout=announcement.layouts.get(index, self._structures[number].layout),
                num_samples=announcement.sizes[index],
                weight=announcement.sizes[index] / total,
                num_microbatches=len(announcement.numbers),
                even=even,
                is_counted=announcement.are_counted,
                seed=mix(work.seed, index),
                given_beginnings=self._structures[number].split(self._beginnings.get(index, ()))[1],
            )
            for index, number in enumerate(announcement.numbers)
        ]

    def _describe(self, kind: Hashable, microbatches: list[Any]) -> tuple[Announcement, list[list[Tensor]]]:
        announcement = Announcement([], [], {}, {})
        sizes: list[int | None] = []
        all_tensors = []
        for index, microbatch in enumerate(microbatches):
            tensors, layout, shape_key = signature(microbatch)
            key = (kind, shape_key)
            number = self._by_key.get(key)
            if number is None:
                number = self._next_number
                self._next_number += 1
                specs = [TensorSpec.of(tensor) for tensor in tensors]
                announcement.new[number] = Structure(key, layout, specs, overlaps(tensors))
                self._by_key[key] = number
            else:
                known = announcement.new.get(number) or self._structures[number]
                if not _same(layout, known.layout):
                    announcement.layouts[index] = layout
            beginnings = list(map(beginning, tensors)) if self._num_ranks > 1 else []
            if any(beginnings):
                announcement.beginnings[index] = beginnings
            announcement.numbers.append(number)
            sizes.append(num_samples(microbatch, tensors, layout))
            all_tensors.append(tensors)
        if isinstance(microbatches, ListsOfSamples):
            sizes = list(map(len, microbatches))
        counted = [size for size in sizes if size is not None]
        announcement.are_counted = len(counted) == len(sizes)
        # If the number of samples is unknown for any micro-batch, all have the same weight.
        announcement.sizes.extend(counted if announcement.are_counted else [1] * len(sizes))
        return announcement, all_tensors


def _columns(states: Sequence[Microbatch]) -> Iterator[tuple[list[tuple[int, int]], torch.dtype]]:
    """Small tensors grouped by dtype, as (micro-batch, number): each group is sent as one message."""
    found: dict[torch.dtype, list[tuple[int, int]]] = {}
    for state in states:
        for number, spec in enumerate(state.structure.small):
            if spec.stride is None:
                continue
            found.setdefault(spec.dtype, []).append((state.index, number))
    for dtype, places in found.items():
        yield places, dtype


def _packed(states: Sequence[Microbatch]) -> Iterator[Tensor]:
    for places, _ in _columns(states):
        yield torch.cat([states[index].everywhere[number].reshape(-1) for index, number in places])


def in_memory(tensors: Sequence[Tensor], structure: Structure, beginnings: Sequence[int] | None = None) -> list[Tensor]:
    """Copies of a micro-batch's small tensors, as they lie in memory in one process.

    Code that asks for strides goes on differently with others, kernels sum in other orders, and a write into one tensor
    is seen in those that overlap with it, as in ``tokens[:, :-1]`` and ``tokens[:, 1:]``. None counts as written into.

    Args:
        beginnings: of each; None if all begin at multiples of 64 bytes.
    """
    found = [
        tensor if spec.stride is None or tensor.stride() == spec.stride else laid_out(tensor, spec.stride).data
        for tensor, spec in zip(tensors, structure.small, strict=True)
    ]
    for group in structure.overlaps:
        own = [(number, structure.small[number], offset) for number, offset in group]
        specs = [(number, spec.shape, spec.stride or (), offset) for number, spec, offset in own]
        length = max(offset + extent(shape, stride) for _, shape, stride, offset in specs)
        memory = torch.empty(length, dtype=found[group[0][0]].dtype)
        if beginnings is not None:
            number, _, _, offset = specs[0]
            memory = begun_at(memory, (beginnings[number] - offset * memory.element_size()) % ALIGNMENT)
        begin = memory.storage_offset()
        for number, shape, stride, offset in specs:
            fill(memory.as_strided(shape, stride, begin + offset), found[number])
        memory = memory.data
        for number, shape, stride, offset in specs:
            found[number] = memory.as_strided(shape, stride, begin + offset)
    if beginnings is not None:
        grouped = {number for group in structure.overlaps for number, _ in group}
        found = [
            tensor if number in grouped else begun_at(tensor, begin)
            for number, (tensor, begin) in enumerate(zip(found, beginnings, strict=True))
        ]
    return found


_ABSENT = torch.empty(0, device="meta")


def _is_written(tensor: Tensor) -> bool:
    return tensor.is_inference() or tensor._version > 0


def _same(layout: Layout, other: Layout) -> bool:
    try:
        return bool(layout == other)
    except (RuntimeError, ValueError):  # constants that compare elementwise, such as arrays
        return False
