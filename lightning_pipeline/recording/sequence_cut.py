"""Which values of a program are cut along the sequence, where each of several ranks computes its part.

The user's step sees whole sequences, and so do events as they are recorded. What runs is found out from attention::

    ids ── embedding ── norm ── linear ── view ── transpose ── attention ── ... ── linear ── view ── cross_entropy
           cut here     each rank computes its part            a ring             its part   joined here

Backwards from the queries, keys and values, as far as rules tell that parts give parts (`sequence_rules`), values are
wanted in parts; forwards, they stay in parts until a function has no such rule, which then gets the whole.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

import torch.nn.functional as F
from torch import Tensor

from lightning_pipeline.partition.placeholder import TensorSpec
from lightning_pipeline.recording.event import MICROBATCHES_MEET, Event
from lightning_pipeline.recording.operation import Template, TensorSlot
from lightning_pipeline.recording.program import Program
from lightning_pipeline.recording.sequence_rules import Axes, argument, axes_of, resized
from lightning_pipeline.recording.views import Memory

ATTENTION = F.scaled_dot_product_attention
_POSITIONS = 2
"""The dimension of the sequence in what attention takes: [batch, heads, positions, head size]."""
_INPUTS = ("query", "key", "value")


class Ranks(Protocol):
    """The ranks that share a sequence (`engine.context.ContextRanks`)."""

    size: int

    def part(self, tensor: Tensor, dim: int) -> Tensor: ...
    def join(self, tensor: Tensor, dim: int) -> Tensor: ...

    @property
    def attention(self) -> Callable[..., Tensor]: ...
    @property
    def dropout(self) -> Callable[..., Tensor]: ...


class SequenceCut:
    """How the ranks that share a sequence run a program.

    Attributes:
        ranks: have the functions that are called.
        dims: of each value that is cut, the dimension.
        specs: of each value that is cut, that of a part.
        taken: for an event and a slot of its: what makes a part of a whole operand, or the reverse, and the dimension.
        calls: of events that are called otherwise: the function, and the templates of its arguments.
        skipped: events that give their arguments back.
        joined: events between parts that are computed on the whole sequence.
    """

    def __init__(self, program: Program, ranks: Ranks, attending: dict[int, list[int]]) -> None:
        self.ranks = ranks
        self.dims: dict[int, int] = {}
        self.specs: dict[int, TensorSpec] = {}
        self.taken: dict[tuple[int, int], tuple[Callable[..., Tensor], int]] = {}
        self.calls: dict[int, tuple[Any, tuple[Template, ...], dict[str, Template]]] = {}
        self.skipped: set[int] = set()
        self.joined: list[Event] = []
        self._wanted = _wanted(program, attending)
        self._memory = Memory()
        self._in_parts: set[Any] = set()  # memory of what is cut, or has been cut or joined
        for number, event in enumerate(program.events):
            if event.visit >= 0:
                self._follow(number, event, attending.get(number))

    def _follow(self, number: int, event: Event, inputs: list[int] | None) -> None:
        """Decide how an event runs. `inputs`: its slots, if it is attention."""
        cut = {slot: self.dims[value] for slot, value in enumerate(event.inputs) if value in self.dims}
        made = [value for value in event.outputs if value is not None]
        self._memory.note(event)
        if inputs is not None:
            self.calls[number] = self.ranks.attention, event.call.args, event.call.kwargs
            self._cut(number, event, cut, dict.fromkeys(inputs, _POSITIONS), _POSITIONS)
        elif cut and event.result.tensors and not made and not event.writes:
            self.skipped.add(number)
        elif (dim := self._dim(event, cut, made)) is not None:
            self._cut(number, event, cut, _axes(event)[dim], dim)
            self._call(number, event, dim)
        else:
            for slot, own in cut.items():
                self._take(number, event, slot, self.ranks.join, own)
            if cut and any(value in self._wanted for value in made):
                self.joined.append(event)
            self._refuse_write(event)

    def _dim(self, event: Event, cut: dict[int, int], made: list[int]) -> int | None:
        """The dimension along which an event's results are cut; None if they are whole."""
        axes = _axes(event)
        if cut:
            found = (dim for dim, slots in axes.items() if all(slots.get(slot) == own for slot, own in cut.items()))
            return next(found, None)
        return next((self._wanted[value] for value in made if axes.get(self._wanted.get(value, -1))), None)

    def _cut(self, number: int, event: Event, cut: dict[int, int], slots: dict[int, int], dim: int) -> None:
        """Have an event compute a part of its results, from parts of the operands in these slots."""
        for slot, own in slots.items():
            if cut.get(slot) != own:
                if slot in cut:
                    raise AssertionError(f"{event.name} at {event.line} is cut along two dimensions")
                self._take(number, event, slot, self.ranks.part, own)
        for spec, value in zip(event.result.tensors, event.outputs, strict=True):
            if value is not None:
                assert isinstance(spec, TensorSpec)
                self.dims[value], self.specs[value] = dim, _part_of(spec, dim, self.ranks.size)
                self._in_parts.add(self._memory.of(value))

    def _call(self, number: int, event: Event, dim: int) -> None:
        function, spec = resized(event), event.result.tensors[0]
        assert isinstance(spec, TensorSpec)
        if function is not None:
            self.calls[number] = function, (TensorSlot(0), tuple(_part_of(spec, dim, self.ranks.size).shape)), {}
        elif event.function is F.dropout:
            self.calls[number] = partial(self.ranks.dropout, spec, dim), event.call.args, event.call.kwargs

    def _take(self, number: int, event: Event, slot: int, how: Callable[..., Tensor], dim: int) -> None:
        self.taken[number, slot] = how, dim
        self._in_parts.add(self._memory_of(event, slot))

    # -- writes into what several values share ----------------------------------------------------------------------

    def _memory_of(self, event: Event, slot: int) -> Any:
        value = event.inputs[slot]
        return self._memory.of(value) if type(value) is int else (event.first_captured, slot)

    def _refuse_write(self, event: Event) -> None:
        for slot, _, _ in event.writes:
            if self._memory_of(event, slot) in self._in_parts:
                raise NotImplementedError(
                    f"{event.name} writes in place into a tensor of which context_parallel_size={self.ranks.size} "
                    f"gives each rank a part ({event.line}): write x = x + y instead of x += y, and leave out "
                    f"inplace=True"
                )


def cut_sequence(program: Program, ranks: Ranks, *, training: bool) -> SequenceCut | None:
    """How the ranks run a program of a step; None if each of them runs all of it, as steps without backward may.

    Raises:
        NotImplementedError: a training step has no attention that can be cut.
    """
    attending: dict[int, list[int]] = {}
    for number, event in enumerate(program.events):
        if event.visit < 0 or event.name != ATTENTION.__name__:
            continue
        obstacle = _obstacle(event, 2 * ranks.size)
        if not obstacle:
            slots = (argument(event, place, name) for place, name in enumerate(_INPUTS))
            attending[number] = [slot.number for slot in slots]
        elif training:
            raise NotImplementedError(
                f"context_parallel_size={ranks.size} cannot cut the sequence of scaled_dot_product_attention "
                f"({event.line}): {obstacle}"
            )
    if not attending and training:
        raise NotImplementedError(
            f"context_parallel_size={ranks.size} cuts the sequence of torch's scaled_dot_product_attention, which the "
            f"training step does not call: call it instead of computing attention by hand (for Hugging Face models: "
            f'attn_implementation="sdpa"), or leave context_parallel_size out'
        )
    return SequenceCut(program, ranks, attending) if attending and not _is_whole(program) else None


def _is_whole(program: Program) -> bool:
    """Whether gradients of values are asked for, of which parts would give parts."""
    names = ("grad", "backward")
    return bool(program.leaves or program.carried) or any(
        event.function is MICROBATCHES_MEET if event.visit < 0 else event.name in names for event in program.events
    )


def _obstacle(event: Event, num_pieces: int) -> str:
    """Why attention cannot be computed on parts of the sequence, and the way out; empty if it can."""
    if event.function is not ATTENTION:
        return "its kernel is chosen by sdpa_kernel in the step: leave that out, as a ring has its own"
    if argument(event, 3, "attn_mask") is not None:
        return (
            "it has an attn_mask, and a ring knows is_causal=True and no mask: leave the attention_mask out where "
            "nothing is padded"
        )
    if argument(event, 4, "dropout_p", 0.0) != 0:
        return "it drops attention at random: set dropout_p (attention_dropout, attn_pdrop) to 0"
    slots = [argument(event, place, name) for place, name in enumerate(_INPUTS)]
    shapes = [event.specs[slot.number].shape for slot in slots]
    if any(len(shape) != 4 for shape in shapes):
        return f"its inputs have {len(shapes[0])} dimensions: give it [batch, heads, positions, head size]"
    lengths = {shape[_POSITIONS] for shape in shapes}
    if len(lengths) > 1 or len({shape[0] for shape in shapes}) > 1:
        return (
            f"its query, key and value have shapes {', '.join(str(list(shape)) for shape in shapes)}: they need "
            f"to be of one length"
        )
    is_grouped = argument(event, 7, "enable_gqa", False)
    if not is_grouped and len({shape[1] for shape in shapes}) > 1:
        return f"its heads are broadcast: expand keys and values to {shapes[0][1]} heads"
    [length] = lengths
    if length % num_pieces:
        return (
            f"its {length} positions are not a multiple of {num_pieces}, twice the number of ranks: pad the samples or "
            f"cut them to {length - length % num_pieces} or {length - length % num_pieces + num_pieces}"
        )
    return ""


def _wanted(program: Program, attending: dict[int, list[int]]) -> dict[int, int]:
    """The values that are wanted in parts, from attention backwards, each with its dimension."""
    wanted: dict[int, int] = {}
    for number in reversed(range(len(program.events))):
        event = program.events[number]
        if event.visit < 0:
            continue
        slots = [dict.fromkeys(attending.get(number, ()), _POSITIONS)]
        if number not in attending:
            axes, made = _axes(event), [value for value in event.outputs if value in wanted]
            slots = [axes.get(wanted[value], {}) for value in made]
        for slot, dim in (pair for each in slots for pair in each.items()):
            value = event.inputs[slot]
            if type(value) is int and value >= 0:
                wanted.setdefault(value, dim)
    return wanted


def _axes(event: Event) -> Axes:
    if event.function is F.dropout and not event.writes and isinstance(event.result.tensors[0], TensorSpec):
        return {dim: {0: dim} for dim in range(len(event.specs[0].shape))}
    return axes_of(event)


def _part_of(spec: TensorSpec, dim: int, size: int) -> TensorSpec:
    """The spec of a part, in dense memory in the same order of dimensions."""
    shape = [*spec.shape]
    shape[dim] //= size
    assert spec.stride is not None
    strides, step = [0] * len(shape), 1
    for place in sorted(range(len(shape)), key=lambda place: (spec.stride[place], -place)):  # type: ignore[index]
        strides[place], step = step, step * max(shape[place], 1)
    return spec.but(shape=type(spec.shape)(shape), stride=tuple(strides))
