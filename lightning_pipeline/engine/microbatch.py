"""One micro-batch of a step on this rank: its state, its results and a digest of its inputs."""

from __future__ import annotations

import operator
import zlib
from collections.abc import Collection, Hashable, Sequence
from dataclasses import dataclass, field
from itertools import compress
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from lightning_pipeline import _torch
from lightning_pipeline.engine.expectations import Expectation
from lightning_pipeline.engine.leaf_gradients import refusing_gradient
from lightning_pipeline.partition import tree
from lightning_pipeline.partition.memory import fill
from lightning_pipeline.partition.microbatch import Overlaps
from lightning_pipeline.partition.ownership import HELD_BY
from lightning_pipeline.partition.placeholder import Placeholder, TensorSpec
from lightning_pipeline.partition.tree import Layout
from lightning_pipeline.recording.event import Event
from lightning_pipeline.recording.program import Program, Strand
from lightning_pipeline.recording.recording import Recording
from lightning_pipeline.recording.saved_tensors import Block
from lightning_pipeline.recording.split_backward import SplitBackward
from lightning_pipeline.runtime.backends import bytes_of
from lightning_pipeline.runtime.tensor_meta import EVERYWHERE_BYTES

if TYPE_CHECKING:
    from lightning_pipeline.engine.transfers import Transfers


SAMPLE = 1 << 14
"""Largest number of elements of a tensor that a digest covers; larger tensors are sampled at even distances."""

Content = Sequence["int | Tensor"]


def contents(captured: Sequence[Any], known: Collection[int]) -> list[int | Tensor]:
    """For each captured object a hash, or a sampled tensor that `digests` hashes later.

    Args:
        known: ids of tensors that are known to be equal on all ranks, and are left out.
    """
    found: list[int | Tensor] = []
    seen: dict[int, int | Tensor] = {}
    with _torch.DisableTorchFunction(), torch.no_grad():
        for thing in captured:
            if not isinstance(thing, Tensor):
                found.append(hash(thing) if isinstance(thing, (int, float, complex)) and thing == thing else 0)
                continue
            content = seen.get(id(thing))
            if content is None:
                content = seen[id(thing)] = 0 if id(thing) in known else _sample(thing)
            found.append(content)
    return found


def digests(content: Content) -> list[int]:
    """Hash the sampled tensors, which copies them to the CPU."""
    return [_digest(one) if isinstance(one, Tensor) else one for one in content]


def _sample(tensor: Tensor) -> int | Tensor:
    """The digest of a tensor on the CPU, or the elements to digest later; 0 for tensors that are not compared.

    Tensors that only some ranks hold are not compared, nor floats on accelerators, where some kernels are not
    deterministic.
    """
    is_plain = type(tensor) in (Tensor, torch.nn.Parameter) and tensor.layout is torch.strided
    is_plain = is_plain and HELD_BY not in tensor.__dict__
    if not is_plain or tensor.is_meta or tensor.is_quantized or not tensor.numel():
        return 0
    is_on_cpu = tensor.device.type == "cpu"
    if not is_on_cpu and (tensor.is_floating_point() or tensor.is_complex()):
        return 0
    flat = tensor.detach().resolve_conj().resolve_neg().reshape(-1)
    if len(flat) > SAMPLE:
        flat = flat[:: len(flat) // SAMPLE + 1]
    return _digest(flat) if is_on_cpu else flat.clone()


def _digest(flat: Tensor) -> int:
    return zlib.crc32(bytes_of(flat.cpu().contiguous()).numpy())  # type: ignore[arg-type]


T = TypeVar("T")


class Structure:
    """What micro-batches of one kind share: the key, the nesting, and the specs of the tensors.

    Attributes:
        small: specs of the tensors that are sent to every rank.
        large: specs of the tensors that stay on the first rank.
        overlaps: the groups of small tensors that overlap in memory.
        overlapping: the numbers of large tensors that overlap with others.
    """

    def __init__(self, key: Hashable, layout: Layout, specs: list[TensorSpec], overlaps: Overlaps = ()) -> None:
        self.key, self.layout, self.specs = key, layout, specs
        # Sparse tensors count as small: stages cannot send them, and the size of their dense form means nothing.
        self._is_small = [
            (spec.num_bytes <= EVERYWHERE_BYTES or spec.stride is None) and not spec.requires_grad for spec in specs
        ]
        for group in overlaps:
            if not all(self._is_small[number] for number, _ in group):
                for number, _ in group:
                    self._is_small[number] = False
        self.small, self.large = self.split(specs)
        small, large = self.split(range(len(specs)))
        self.overlaps = [
            [(small.index(number), offset) for number, offset in group]
            for group in overlaps
            if self._is_small[group[0][0]]
        ]
        self.overlapping = {large.index(n) for group in overlaps for n, _ in group if not self._is_small[n]}

    def split(self, items: Sequence[T]) -> tuple[list[T], list[T]]:
        """Split items, one for each tensor of a micro-batch, into those of small and those of large tensors."""
        return list(compress(items, self._is_small)), list(compress(items, map(operator.not_, self._is_small)))

    def joined(self, small: Sequence[T], large: Sequence[T]) -> list[T]:
        """The inverse of `split`."""
        sides = iter(large), iter(small)
        return [next(sides[is_small]) for is_small in self._is_small]


class Arriving(Protocol):
    """A tensor on its way to this rank."""

    def wait(self, what: str) -> Tensor: ...


class ArrivedTensor:
    """A tensor from the previous or next visit on the same rank, which need not be waited for."""

    __slots__ = ("_tensor",)

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor

    def wait(self, what: str) -> Tensor:
        return self._tensor


@dataclass(slots=True)
class VisitState:
    """The state of a micro-batch on one visit.

    Attributes:
        arriving: inputs on their way from the previous visit, in the program's order.
        arriving_gradients: gradients on their way from the next visit.
        arriving_strides: the message with the strides of these gradients, if there is one.
        received: inputs that require a gradient, as leaves of the visit's graph.
        edges: gradient edges of the outputs that were sent.
        gradients: gradients of the inputs, to be sent to the previous visit.
        outputs: tensors to be sent to the next visit.
        split: the backward that `backward_input` began and `backward_weight` finishes.
        away: what of its saved tensors is in host memory, or on its way, by memory; None for nothing.
        kept_leaves, kept_edges: leaves and edges through which a later part of the step may run backward.
    """

    arriving: list[Arriving] | None = None
    arriving_gradients: list[Arriving] | None = None
    arriving_strides: Arriving | None = None
    received: dict[Strand, Tensor] = field(default_factory=dict)
    edges: dict[Strand, GradientEdge | Tensor] = field(default_factory=dict)
    gradients: list[Tensor] = field(default_factory=list)
    outputs: list[tuple[Strand, Tensor]] = field(default_factory=list)
    split: SplitBackward | None = None
    away: dict[int, Block] | None = None
    kept_leaves: dict[Strand, Tensor] = field(default_factory=dict)
    kept_edges: dict[Strand, GradientEdge | Tensor] = field(default_factory=dict)
    is_posted: bool = False
    are_gradients_posted: bool = False

    def keep_edges(self, visit: int, state: Microbatch) -> None:
        """Keep the gradient edges of the outputs for backward, without keeping their data alive."""
        assert state.program is not None
        wanted = set(state.program.returning(visit + 1, state.loss_value)) if state.loss_value >= 0 else set()
        for strand, tensor in self.outputs:
            if strand in wanted:
                self.edges[strand] = get_gradient_edge(tensor)
        for other, strand in state.carried.crossing if state.carried is not None else ():
            if other == visit:
                self.kept_leaves[strand] = self.received[strand]
            elif other == visit + 1:
                [tensor] = [tensor for sent, tensor in self.outputs if sent == strand]
                self.kept_edges[strand] = get_gradient_edge(tensor)


@dataclass(slots=True)
class EarlyForward:
    """The state of a micro-batch whose forward runs before its step's Python.

    Attributes:
        captured: the tensors and numbers that the forward captures, made ahead of the step.
        is_open: whether the step's Python has not ended yet.
        is_passed_over: whether the expectation failed, so that its actions only pass on messages.
        num_compared: how many of `captured` the Python has confirmed so far.
        num_live: number of virtual stages' activations alive on this rank.
        before: tensors of the module that the forward modified, with copies of their former data.
        answers: the values that the step reads; None until they have arrived, or if they are invalid.
        arriving: receives of the messages with these values, by visit.
    """

    expectation: Expectation
    captured: list[Any]
    is_open: bool = True
    is_passed_over: bool = False
    num_compared: int = 0
    num_live: float = 0
    before: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    error: Exception | None = None
    answers: dict[int, Tensor] | None = None
    has_answers: bool = False
    arriving: dict[int, Arriving] | None = None


@dataclass(slots=True)
class ContinuedStep:
    """The state of a hand-optimized step that is kept from one synchronization point to the next part.

    Attributes:
        program: the program of the path up to there.
        transfers: the transfers through which gradients may flow back to earlier parts.
        here: values that the user's code refers to, with their graphs, by visit and number.
        crossing: visit and strand of each value of the running part through which later gradients may flow back.
        parameter_homes: the visit to which each parameter's gradients return, by its number below zero.
    """

    event: Event
    program: Program
    transfers: Transfers
    here: dict[tuple[int, int], Tensor] = field(default_factory=dict)
    crossing: list[tuple[int, Strand]] = field(default_factory=list)
    parameter_homes: dict[int, int] = field(default_factory=dict)


@dataclass(slots=True)
class Microbatch:
    """The state of one micro-batch on this rank.

    Attributes:
        weight: its fraction of the step's samples.
        even: whether all micro-batches have the same number of samples.
        is_counted: whether `num_samples` is known, and not taken for 1.
        everywhere: tensors of the batch that every rank has.
        given: tensors of the batch that only the first rank has; empty elsewhere.
        given_beginnings: where these begin in the first rank's memory (`memory.beginning`), on every rank.
        written: placeholders for those into which the step writes; for all of them until its Python ends.
        recording: the recording of the user's step; None before that has run.
        program: the program that it runs by the schedule; None if it runs in order or is not recorded yet.
        result: what the step returned; contains placeholders until the end of the step.
        loss: the loss of a training step: a placeholder, or a tensor that every rank has.
        loss_value: the loss's number among the recording's values; -1 for none.
        loss_tensor: the loss with its graph, on the rank that computed it, until its backward.
        contents: what ranks compare of the recording's captures.
        asked: numbers of the values whose data is kept, in `kept`.
        kept: data of these values, by number, on the rank that computed them.
        places: placeholders that were alive when the step's Python ended, by value.
        inside: the state on each visit of this rank.
        gradients: placeholders on which `retain_grad` was called, with their gradients.
        is_done: whether it has run, so that its actions in the schedule are skipped.
        ahead: its state while its forward runs before the step's Python; None if it does not.
        in_use: at a synchronization point, the values that the user's code refers to.
        carried: what a hand-optimized step keeps from one synchronization point to the next.
    """

    index: int
    structure: Structure
    layout: Layout
    num_samples: int
    weight: float
    num_microbatches: int
    even: bool
    seed: int
    is_counted: bool = True
    everywhere: list[Tensor] = field(default_factory=list)
    given: list[Tensor] = field(default_factory=list)
    given_beginnings: Sequence[int] = ()
    written: dict[int, Placeholder] = field(default_factory=dict)
    recording: Recording | None = None
    program: Program | None = None
    result: Any = None
    loss: Any = None
    loss_value: int = -1
    contents: Content = ()
    logged: list[Any] = field(default_factory=list)
    asked: tuple[int, ...] = ()
    kept: dict[int, Tensor] = field(default_factory=dict)
    places: dict[int, Placeholder] = field(default_factory=dict)
    loss_tensor: Tensor | None = None
    inside: dict[int, VisitState] = field(default_factory=dict)
    gradients: list[tuple[Placeholder, Tensor | None]] = field(default_factory=list)
    is_done: bool = False
    ahead: EarlyForward | None = None
    in_use: set[int] = field(default_factory=set)
    carried: ContinuedStep | None = None

    def keep_written(self) -> None:
        """At the end of the step's Python: let go of tensors of the batch into which it has not written."""
        self.written = {number: place for number, place in self.written.items() if place._pl_value != number}

    def let_age(self) -> None:
        """Put into captured copies what the step's Python has written into the memory that they are copies of: backward
        is to find it, as in one process."""
        assert self.recording is not None
        outdated, self.recording.outdated = self.recording.outdated, {}
        captured = self.captured
        for place, content in outdated.items():
            fill(captured[place].data, content)

    def beginning_of(self, value: int) -> int:
        """Where one process has a value in memory (`memory.beginning`)."""
        program = self.recording.event.program if self.program is None and self.recording else self.program
        return 0 if program is None else program.beginnings.of(value, self.given_beginnings)

    @property
    def captured(self) -> list[Any]:
        """The tensors and numbers that its events capture."""
        if self.ahead is not None:
            return self.ahead.captured
        assert self.recording is not None
        return self.recording.captured

    @property
    def is_open(self) -> bool:
        """Whether its forward runs before the step's Python, and that has not ended yet."""
        return self.ahead is not None and self.ahead.is_open

    @property
    def is_passed_over(self) -> bool:
        """Whether its early forward was dropped, so that it runs in order."""
        return self.ahead is not None and self.ahead.is_passed_over

    def on(self, visit: int) -> VisitState:
        """Its state on a visit, created on first use."""
        found = self.inside.get(visit)
        if found is None:
            found = self.inside[visit] = VisitState()
        return found


@dataclass(slots=True)
class StepResult:
    """The result of a step, without references to its placeholders.

    Attributes:
        tensors: each a tensor, or the number and the spec of a value.
    """

    layout: Layout
    tensors: list[Tensor | tuple[int, TensorSpec]]

    @classmethod
    def of(cls, result: Any, recording: Recording) -> StepResult:
        tensors, layout = tree.flatten(result)
        numbers = [recording.value_of(tensor) for tensor in tensors]
        return cls(layout, [t if n is None else (n, TensorSpec.of(t)) for t, n in zip(tensors, numbers, strict=True)])

    def values(self) -> dict[int, TensorSpec]:
        return dict(item for item in self.tensors if isinstance(item, tuple))

    def on(self, data: dict[int, Tensor]) -> Any:
        tensors = [data[item[0]] if isinstance(item, tuple) else item for item in self.tensors]
        return tree.rebuild(self.layout, tensors)


def take_earlier_values(state: Microbatch, visit: int, microbatches: Sequence[Microbatch]) -> None:
    """Replace references to values of earlier micro-batches, which a visit captures, with the data on this rank."""
    assert state.program is not None
    captured = state.captured
    for place, line in state.program.foreign[visit]:
        content = captured[place]
        if type(content) is tuple:
            data = data_of(microbatches, *content)
            captured[place] = data = refusing_gradient(data, line) if line else data
            if state.recording is not None:  # its forward may run before the step's Python
                state.recording.of_stages.add(id(data))


def data_of(microbatches: Sequence[Microbatch], recording: Any, value: int) -> Tensor:
    """The data of an earlier micro-batch's value that this rank computed."""
    return next(one.kept[value] for one in microbatches if one.recording is recording)
