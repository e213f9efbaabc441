"""One run of the user's step on one micro-batch: which modules run when, what they make, use and compute.

A step is a row of *positions*: one begins with the step, and one with every call of a module. What happens in the
forward is noted under the position it happens in, and what happens in the backward under the position whose work it is
the backward of.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from lightning_pipeline.partition import tree
from lightning_pipeline.partition.memory import memory_of, num_storage_bytes
from lightning_pipeline.partition.torch_functions import FunctionKind, kind_of, written_by
from lightning_pipeline.planning.observing import (
    LiveBytes,
    Step,
    called_through,
    gradients_apart,
    run_backward,
    without_reentrant,
)
from lightning_pipeline.planning.restoring import about_to_write


@dataclass(frozen=True)
class DeviceSpeed:
    """What a device does in a second.

    Attributes:
        flops: floating-point operations of matrix products, as they are reached, not the peak.
        memory_bytes: bytes that are read and written.
        launch: seconds that any operation takes at least.
    """

    flops: float
    memory_bytes: float
    launch: float = 0.0


@dataclass(frozen=True, slots=True)
class ComputeCost:
    """Floating-point operations, and seconds on the device that was asked about."""

    flops: float = 0.0
    seconds: float = 0.0

    def __add__(self, other: ComputeCost) -> ComputeCost:
        return ComputeCost(self.flops + other.flops, self.seconds + other.seconds)


def work_of(func: Any, args: Any, kwargs: Any, result: Any, speed: DeviceSpeed) -> ComputeCost:
    """The work of one call of an ATen operation: as long as its arithmetic or its memory traffic takes."""
    if _is_view(func):
        return ComputeCost()
    packet = func._overloadpacket
    flops = 0.0
    if packet in flop_registry:
        flops = float(flop_registry[packet](*args, **kwargs, out_val=result))
    elif "scaled_dot_product" in packet.__name__:  # variants that torch does not count, that for the CPU among them
        flops = _attention_flops(args, backward="backward" in packet.__name__)
    size = sum(t.numel() * t.element_size() for t in tree_leaves((args, kwargs, result)) if isinstance(t, Tensor))
    return ComputeCost(flops, max(flops / speed.flops, size / speed.memory_bytes, speed.launch))


def _is_view(func: Any) -> bool:
    returns = func._schema.returns
    alias = returns[0].alias_info if returns else None
    return alias is not None and not alias.is_write


def _attention_flops(args: Any, *, backward: bool) -> float:
    shaped = [arg for arg in args if isinstance(arg, Tensor) and arg.dim() == 4]
    query, key, value = shaped[1:4] if backward else shaped[:3]
    scores = math.prod(query.shape[:3]) * key.shape[2]
    forward = 2.0 * scores * (query.shape[3] + value.shape[3])
    return 2.5 * forward if backward else forward


@dataclass(slots=True)
class Call:
    """One call of a module.

    Attributes:
        name: the module's name.
        start: the position that begins with it.
        end: the position after the last one inside of it.
        callers: names of the modules whose forwards it runs in, the outermost first.
        in_function: it runs inside of an autograd.Function.
        inputs: shapes of the tensors it is called with.
    """

    name: str
    start: int
    end: int
    callers: tuple[str, ...]
    in_function: bool
    inputs: tuple[tuple[int, ...], ...]


@dataclass(slots=True)
class Value:
    """A tensor that the step makes: its size and the positions in which it is made and last used."""

    made: int
    used: int
    num_bytes: float
    has_gradient: bool


@dataclass(slots=True)
class Trace:
    """What a run showed; lists have an entry for each position.

    Attributes:
        calls: in the order of their beginning; call number i begins position i + 1.
        values: what the step makes.
        parameters: names of parameters used, in the order of their first use.
        kept: bytes first kept there for backward.
        forward: the forward's work.
        backward: the backward's.
        forward_peak: the most bytes that the step's tensors take at once during the forward there; those of parameters
            and gradients do not count.
        backward_peak: likewise during the backward.
        optional: names of modules that other runs of the step leave out, or call in addition.
    """

    calls: list[Call] = field(default_factory=list)
    values: list[Value] = field(default_factory=list)
    parameters: list[dict[str, None]] = field(default_factory=lambda: [{}])
    kept: list[float] = field(default_factory=lambda: [0])
    forward: list[ComputeCost] = field(default_factory=lambda: [ComputeCost()])
    backward: list[ComputeCost] = field(default_factory=list)
    forward_peak: list[float] = field(default_factory=lambda: [0])
    backward_peak: list[float] = field(default_factory=list)
    optional: set[str] = field(default_factory=set)

    @property
    def names(self) -> list[str]:
        """Names of the modules, in the order of their calls."""
        return [call.name for call in self.calls]

    @property
    def num_positions(self) -> int:
        return len(self.calls) + 1


def trace_step(root: nn.Module, step: Step, batch: Any, speed: DeviceSpeed) -> Trace:
    """Run the step, and its backward, once.

    Args:
        batch: the micro-batch, on the device of the parameters; all of them may be fake tensors.
        speed: by which the work of each operation is turned into time.
    """
    with gradients_apart(root), without_reentrant():
        tracer = _Tracer(root, batch, speed)
        saved = torch.autograd.graph.saved_tensors_hooks(tracer.keep, lambda tensor: tensor)
        with called_through(root, tracer.call), tracer.functions(), _Operations(tracer):
            with saved, tracer:
                loss = step(batch)
            tracer.begin_backward()
            run_backward(loss, tracer.sequence, tracer.note_backward)
    return tracer.trace


class _Tracer(TorchFunctionMode):
    """Notes calls of modules, and of torch functions what they take and give."""

    def __init__(self, root: nn.Module, batch: Any, speed: DeviceSpeed) -> None:
        super().__init__()
        self.trace = Trace()
        self.sequence = [torch.autograd._get_sequence_nr()]
        self.speed = speed
        self._is_forward = True
        self._position = 0
        self._stack: list[str] = []
        self._in_function = 0
        self._parameters = {id(p): name for name, p in root.named_parameters()}
        self._foreign = {id(tensor) for tensor in (*root.buffers(), *tree.leaves(batch))}
        self._batch = batch  # or an id might be given out again
        self._values: dict[int, tuple[Value, weakref.ref[Tensor]]] = {}
        self._storages = set(map(memory_of, root.parameters()))
        self._live = LiveBytes(t for p in (*root.parameters(), *root.buffers()) for t in (p, p.grad) if t is not None)
        self._live.note(tree.leaves(batch))

    # -- forward ----------------------------------------------------------------------------------------------------

    def call(self, name: str, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """One call of a module; those of a recomputation are not told apart from the backward around them."""
        if not self._is_forward:
            return forward(*args, **kwargs)
        self._position += 1
        shapes = tuple(tuple(tensor.shape) for tensor in tree.leaves((args, kwargs)))
        call = Call(name, self._position, self._position, tuple(self._stack), self._in_function > 0, shapes)
        self.trace.calls.append(call)
        self.trace.parameters.append({})
        self.trace.kept.append(0)
        self.trace.forward.append(ComputeCost())
        self.trace.forward_peak.append(self._live.now)
        self.sequence.append(torch.autograd._get_sequence_nr())
        self._stack.append(name)
        try:
            return forward(*args, **kwargs)
        finally:
            self._stack.pop()
            call.end = self._position + 1

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not self._is_forward or kind_of(func) in (FunctionKind.DESCRIBES, FunctionKind.GRAD_MODE):
            return func(*args, **kwargs)
        self._use(tree.leaves((args, kwargs)))
        result = func(*args, **kwargs)
        self._use(tree.leaves(result))
        return result

    @contextmanager
    def functions(self) -> Iterator[None]:
        """Calls of autograd.Function do not come to a mode, so they are caught here."""
        plain = torch.autograd.Function.__dict__["apply"]

        def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
            if not self._is_forward:
                return plain.__get__(None, cls)(*args, **kwargs)
            self._use(tree.leaves((args, kwargs)))
            self._in_function += 1
            try:
                result = plain.__get__(None, cls)(*args, **kwargs)
            finally:
                self._in_function -= 1
            self._use(tree.leaves(result))
            return result

        setattr(torch.autograd.Function, "apply", classmethod(apply))  # noqa: B010  mypy knows it as a method
        try:
            yield
        finally:
            setattr(torch.autograd.Function, "apply", plain)  # noqa: B010

    def keep(self, tensor: Tensor) -> Tensor:
        """Of autograd: a tensor is kept for backward."""
        memory = memory_of(tensor)
        if memory not in self._storages:
            self._storages.add(memory)
            self.trace.kept[self._position] += num_storage_bytes(tensor)
        return tensor.detach()

    def before(self, func: Any, args: Any, kwargs: Any) -> None:
        """Of an operation: it may write into a parameter."""
        for tensor in written_by(func, args, kwargs):
            about_to_write(tensor)

    def _use(self, tensors: list[Tensor]) -> None:
        for tensor in tensors:
            key = id(tensor)
            if key in self._foreign:
                continue
            if key in self._parameters:
                self.trace.parameters[self._position][self._parameters[key]] = None
                continue
            known = self._values.get(key)
            if known is not None and known[1]() is tensor:
                known[0].used = self._position
                continue
            size = tensor.numel() * tensor.element_size()
            value = Value(self._position, self._position, size, tensor.requires_grad)
            self._values[key] = (value, weakref.ref(tensor))
            self.trace.values.append(value)

    # -- backward ---------------------------------------------------------------------------------------------------

    def begin_backward(self) -> None:
        self._is_forward = False
        self.trace.backward = [ComputeCost() for _ in range(self.trace.num_positions)]
        self.trace.backward_peak = [0] * self.trace.num_positions
        self._position = self.trace.num_positions - 1

    def note_backward(self, position: int) -> None:
        """The backward of a position begins."""
        self._position = position

    def add(self, work: ComputeCost, result: Any) -> None:
        """Count an operation to the position that it is done in."""
        totals, peaks = (
            (self.trace.forward, self.trace.forward_peak)
            if self._is_forward
            else (self.trace.backward, self.trace.backward_peak)
        )
        totals[self._position] += work
        self._live.note(tree_leaves(result))
        peaks[self._position] = max(peaks[self._position], self._live.now)


class _Operations(TorchDispatchMode):
    """Counts the work of each operation, and what it makes."""

    def __init__(self, tracer: _Tracer) -> None:
        super().__init__()
        self._tracer = tracer

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self._tracer.before(func, args, kwargs or {})
        result = func(*args, **(kwargs or {}))
        self._tracer.add(work_of(func, args, kwargs or {}, result, self._tracer.speed), result)
        return result
