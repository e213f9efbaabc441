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
from torch.autograd.graph import GradientEdge

from lightning_pipeline.engine.expectations import Expectation
from lightning_pipeline.partition import tree
from lightning_pipeline.partition.ownership import HELD_BY
from lightning_pipeline.partition.placeholder import Placeholder, TensorSpec
from lightning_pipeline.partition.tree import Layout
from lightning_pipeline.recording.event import Event
from lightning_pipeline.recording.program import Program, Strand
from lightning_pipeline.recording.recording import Recording
from lightning_pipeline.recording.split_backward import SplitBackward
from lightning_pipeline.runtime.backends import bytes_of
from lightning_pipeline.runtime.tensor_meta import EVERYWHERE_BYTES

if TYPE_CHECKING:
    from lightning_pipeline.engine.transfers import Transfers


SAMPLE = 1 << 14
"""The most elements of a tensor that count; of a larger one, as many at even distances."""

Content = Sequence["int | Tensor"]


def contents(captured: Sequence[Any], known: Collection[int]) -> list[int | Tensor]:
    """For each thing taken along, a number that tells it from others, or the tensor of which `digests` makes one.

    Args:
        known: ids of the tensors that do not count.
    """
    found: list[int | Tensor] = []
    seen: dict[int, int | Tensor] = {}
    with torch._C.DisableTorchFunction(), torch.no_grad():
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
    """All of it as numbers, for which tensors come from their devices."""
    return [_digest(one) if isinstance(one, Tensor) else one for one in content]


def _sample(tensor: Tensor) -> int | Tensor:
    """The elements that count: none of what some ranks hold, and no floats on devices, where some kernels do not give
    the same bits twice."""
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
    """What micro-batches have in common: kind, nesting, and specs of the tensors.

    Attributes:
        small: specs of those that every rank has.
        large: specs of those that the first rank alone has.
    """

    def __init__(self, key: Hashable, layout: Layout, specs: list[TensorSpec]) -> None:
        self.key, self.layout, self.specs = key, layout, specs
        # Sparse ones do not travel between stages, and what they are in dense form does not tell their size.
        self._is_small = [
            (spec.num_bytes <= EVERYWHERE_BYTES or spec.stride is None) and not spec.requires_grad for spec in specs
        ]
        self.small, self.large = self.split(specs)

    def split(self, items: Sequence[T]) -> tuple[list[T], list[T]]:
        """Of what there is one of for each tensor of a micro-batch, that of small ones and that of large ones."""
        return list(compress(items, self._is_small)), list(compress(items, map(operator.not_, self._is_small)))

    def joined(self, small: Sequence[T], large: Sequence[T]) -> list[T]:
        """What `split` has split."""
        sides = iter(large), iter(small)
        return [next(sides[is_small]) for is_small in self._is_small]


class Arriving(Protocol):
    """A tensor on its way to this rank."""

    def wait(self, what: str) -> Tensor: ...


class ArrivedTensor:
    """A tensor of the visit before or after, where both are on one rank."""

    __slots__ = ("_tensor",)

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor

    def wait(self, what: str) -> Tensor:
        return self._tensor


@dataclass(slots=True)
class VisitState:
    """A micro-batch on one visit.

    Attributes:
        arriving: what is on its way from the visit before, in the plan's order.
        arriving_gradients: likewise from the visit after.
        arriving_strides: what precedes these, if anything does.
        received: leaves of the visit's graph.
        edges: where the gradients of what was sent enter the graph.
        kept_leaves, kept_edges: those that a later part of the step may come back to.
    """

    arriving: list[Arriving] | None = None
    arriving_gradients: list[Arriving] | None = None
    arriving_strides: Arriving | None = None
    received: dict[Strand, Tensor] = field(default_factory=dict)
    edges: dict[Strand, GradientEdge | Tensor] = field(default_factory=dict)
    gradients: list[Tensor] = field(default_factory=list)
    outputs: list[tuple[Strand, Tensor]] = field(default_factory=list)
    split: SplitBackward | None = None
    kept_leaves: dict[Strand, Tensor] = field(default_factory=dict)
    kept_edges: dict[Strand, GradientEdge | Tensor] = field(default_factory=dict)
    is_posted: bool = False
    are_gradients_posted: bool = False


@dataclass(slots=True)
class EarlyForward:
    """A micro-batch whose forwards run before its step's Python.

    Attributes:
        expectation: what they run.
        captured: what they take along.
        is_open: whether the Python has not come to its end.
        is_passed_over: whether its forwards only pass on messages.
        num_compared: of what was taken along, how much has turned out to be right.
        num_live: forwards here whose activations are kept.
        before: tensors of the module that they have written into, with what was in them.
        error: what has failed in a forward here.
        answers: the values that the step reads, once they have come; None also where they are wrong.
        has_answers: whether they have come.
        arriving: the messages with them, by visit.
    """

    expectation: Expectation
    captured: list[Any]
    is_open: bool = True
    is_passed_over: bool = False
    num_compared: int = 0
    num_live: int = 0
    before: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    error: Exception | None = None
    answers: dict[int, Tensor] | None = None
    has_answers: bool = False
    arriving: dict[int, Arriving] | None = None


@dataclass(slots=True)
class ContinuedStep:
    """What a micro-batch's step carries on from where micro-batches have met.

    Attributes:
        event: the meeting.
        program: of the path up to there.
        here: values that the user's code refers to, with their graphs, by visit and number.
        transfers: over which gradients of these may go back.
        crossing: of the part that runs: what of it gradients may go back over later.
    """

    event: Event
    program: Program
    transfers: Transfers
    here: dict[tuple[int, int], Tensor] = field(default_factory=dict)
    crossing: list[tuple[int, Strand]] = field(default_factory=list)


@dataclass(slots=True)
class Microbatch:
    """One micro-batch.

    Attributes:
        index: its number in the step.
        layout: the batch's nesting.
        everywhere: the tensors of the batch that every rank has.
        given: on the first rank, those that it alone has.
        num_samples: its number of samples.
        weight: the share of its samples in the step's.
        num_microbatches: number of micro-batches in the step. even: whether all have as many samples.
        seed: from which its random numbers derive.
        recording: of the user's step, once it has run.
        result: what that returned; placeholders until the step's end.
        loss: of a training step: the value that backward starts from, or a tensor that every rank has.
        contents: of what the recording has taken along, in brief.
        gradients: what `retain_grad` was called on, with its gradient.
        kept: data of values that are asked for after the step, on the rank that has computed them.
        in_use: where micro-batches meet: the values that the user's code refers to.
        carried: what is carried on, of a step that stops where micro-batches meet.
        ahead: what is known of it while its forwards run before its step's Python.
    """

    index: int
    structure: Structure
    layout: Layout
    num_samples: int
    weight: float
    num_microbatches: int
    even: bool
    seed: int
    everywhere: list[Tensor] = field(default_factory=list)
    given: list[Tensor] = field(default_factory=list)
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

    @property
    def captured(self) -> list[Any]:
        """What its forwards take along."""
        if self.ahead is not None:
            return self.ahead.captured
        assert self.recording is not None
        return self.recording.captured

    @property
    def is_open(self) -> bool:
        """Whether its forwards run before its step's Python, which has not come to its end."""
        return self.ahead is not None and self.ahead.is_open

    @property
    def is_passed_over(self) -> bool:
        """Whether it is left to run in order."""
        return self.ahead is not None and self.ahead.is_passed_over

    def on(self, visit: int) -> VisitState:
        """Its state on a visit."""
        found = self.inside.get(visit)
        if found is None:
            found = self.inside[visit] = VisitState()
        return found


@dataclass(slots=True)
class StepResult:
    """What a step has returned, without its placeholders.

    Attributes:
        tensors: data, or the number and the spec of a value.
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
