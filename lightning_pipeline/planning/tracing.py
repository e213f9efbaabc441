"""Traces a step: one run, and its backward, that shows what each position makes, uses, keeps and computes."""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention.bias import CausalBias
from torch.overrides import TorchFunctionMode
from torch.utils.flop_counter import flop_registry

from lightning_pipeline import _torch
from lightning_pipeline.partition import tree
from lightning_pipeline.partition.compiled import compiled_as_written
from lightning_pipeline.partition.memory import memory_of, num_storage_bytes
from lightning_pipeline.partition.overrides import overridden
from lightning_pipeline.partition.placeholder import higher_order_error
from lightning_pipeline.partition.torch_functions import FunctionKind, kind_of, written_by
from lightning_pipeline.planning.observing import LiveBytes, Step, gradients_apart, run_by_position
from lightning_pipeline.planning.profile import Position, Profile, Value
from lightning_pipeline.planning.restoring import about_to_write


@dataclass(frozen=True)
class DeviceSpeed:
    """What a device does in a second.

    Attributes:
        flops: floating-point operations of matrix products, as they are reached, not the peak.
        launch: seconds that any operation takes at least.
    """

    flops: float = math.inf
    memory_bytes: float = math.inf
    launch: float = 0.0


def trace_step(root: nn.Module, step: Step, batch: Any, speed: DeviceSpeed | None = None) -> Profile:
    """Run the step, and its backward, once.

    Args:
        batch: the micro-batch, on the device of the parameters; all of them may be fake tensors.
        speed: of a device, from which the times of the profile are estimated; None for times of 0.
    """
    with gradients_apart(root):
        tracer = _Tracer(root, batch, speed or DeviceSpeed())

        def forward(batch: Any) -> Tensor | None:
            saved = torch.autograd.graph.saved_tensors_hooks(tracer.keep, lambda tensor: tensor)
            with tracer.autograd_functions(), saved, tracer:
                loss = step(batch)
            tracer.end_forward()
            return loss

        # Under a dispatch mode the compiler compiles nothing, which is an error of functions with fullgraph=True.
        with _biases_made(), compiled_as_written(), _Operations(tracer):
            run_by_position(
                root, forward, batch, begin=tracer.begin, end=tracer.end, begin_backward=tracer.begin_backward
            )
    return tracer.profile


def estimate_step(root: nn.Module, step: Step, batch: Any, speed: DeviceSpeed) -> Profile:
    """Trace a step, and its backward, on fake tensors; parameters may be on the meta device, and stay as they are.

    Raises:
        ValueError: the step needs values of tensors.
    """
    with _torch.FakeTensorMode(allow_non_fake_inputs=True), _fake_state(root):
        fake = tree.replace(batch, _fake_like)
        try:
            return trace_step(root, step, fake, speed)
        except RuntimeError as error:
            raise ValueError(
                f"the step cannot be estimated, as it needs values of tensors ({type(error).__name__}: {error}): name "
                f"the cut in stage_config, or let a run measure it"
            ) from error


class _Tracer(TorchFunctionMode):
    """Notes calls of modules, and the inputs and results of torch functions."""

    def __init__(self, root: nn.Module, batch: Any, speed: DeviceSpeed) -> None:
        super().__init__()
        self.profile = Profile(root, [Position("", 0, 1)])
        self._speed = speed
        self._is_forward = True
        self._current = self.profile.positions[0]
        self._open: list[Position] = []
        self._function_depth = 0
        self._parameters = {id(p): name for name, p in root.named_parameters()}
        # Tensors that the step does not make. They are kept alive, or another tensor might get the same id.
        self._given = {id(tensor): tensor for tensor in (*root.buffers(), *tree.leaves(batch))}
        self._values: dict[int, tuple[Value, weakref.ref[Tensor]]] = {}
        self._kept = set(map(memory_of, root.parameters()))
        self._live = LiveBytes(t for p in (*root.parameters(), *root.buffers()) for t in (p, p.grad) if t is not None)
        self._live.note(tree.leaves(batch))

    def begin(self, name: str, arguments: Any) -> None:
        """A module is called in the forward."""
        positions = self.profile.positions
        number = len(positions)
        self._current = Position(
            name,
            start=number,
            end=number + 1,
            callers=tuple(position.name for position in self._open),
            in_function=self._function_depth > 0,
            inputs=tuple(tuple(tensor.shape) for tensor in tree.leaves(arguments)),
            forward_peak=self._live.now,
        )
        positions.append(self._current)
        self._open.append(self._current)

    def end(self) -> None:
        """The last call that has begun ends."""
        self._open.pop().end = len(self.profile.positions)

    def end_forward(self) -> None:
        self._is_forward = False

    def begin_backward(self, number: int) -> None:
        """The backward of a position begins."""
        self._current = self.profile.positions[number]

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if kind_of(func) in (FunctionKind.DESCRIBES, FunctionKind.GRAD_MODE):
            return func(*args, **kwargs)
        self._use(tree.leaves((args, kwargs)))
        try:
            result = func(*args, **kwargs)
        except NotImplementedError as error:
            if isinstance(func, _torch.HigherOrderOperator):
                raise higher_order_error(func) from error
            raise
        self._use(tree.leaves(result))
        return result

    @contextmanager
    def autograd_functions(self) -> Iterator[None]:
        """While entered, calls of an autograd.Function are noted, too: a function mode does not see them."""
        plain = torch.autograd.Function.__dict__["apply"]

        def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
            self._use(tree.leaves((args, kwargs)))
            self._function_depth += 1
            try:
                result = plain.__get__(None, cls)(*args, **kwargs)
            finally:
                self._function_depth -= 1
            self._use(tree.leaves(result))
            return result

        with overridden() as override:
            override(torch.autograd.Function, "apply", classmethod(apply))
            yield

    def _use(self, tensors: list[Tensor]) -> None:
        number = len(self.profile.positions) - 1
        for tensor in tensors:
            key = id(tensor)
            if key in self._given:
                continue
            if key in self._parameters:
                self._current.parameters[self._parameters[key]] = None
                continue
            known = self._values.get(key)
            if known is not None and known[1]() is tensor:
                known[0].used = number
                continue
            value = Value(number, number, tensor.numel() * tensor.element_size(), tensor.requires_grad)
            self._values[key] = (value, weakref.ref(tensor))
            self.profile.values.append(value)

    def keep(self, tensor: Tensor) -> Tensor:
        """Called by autograd with a tensor that it saves for the backward."""
        memory = memory_of(tensor)
        if memory not in self._kept:
            self._kept.add(memory)
            self._current.kept += num_storage_bytes(tensor)
        return tensor.detach()

    def count(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        """An ATen operation takes as long as its arithmetic or its memory traffic."""
        self._live.note(_torch.tree_leaves(result))
        position, live = self._current, self._live.now
        seconds = flops = 0.0
        if not _is_view(func):
            flops = _flops(func, args, kwargs, result)
            tensors = (value for value in _torch.tree_leaves((args, kwargs, result)) if isinstance(value, Tensor))
            size = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
            seconds = max(flops / self._speed.flops, size / self._speed.memory_bytes, self._speed.launch)
        position.flops += flops
        if self._is_forward:
            position.forward += seconds
            position.forward_peak = max(position.forward_peak, live)
        else:
            position.backward += seconds
            position.backward_peak = max(position.backward_peak, live)


class _Operations(_torch.TorchDispatchMode):
    """Counts ATen operations, of the forward and of the backward."""

    def __init__(self, tracer: _Tracer) -> None:
        super().__init__()
        self._tracer = tracer

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        for tensor in written_by(func, args, kwargs):  # it may be a parameter
            about_to_write(tensor)
        result = func(*args, **kwargs)
        self._tracer.count(func, args, kwargs, result)
        return result


@contextmanager
def _biases_made() -> Iterator[None]:
    """While entered, torch's biases of attention can be made under a dispatch mode: they are tensors of a class without
    a constructor of its own, which takes over an empty tensor, and a mode has made a plain one of that before."""

    def made(cls: type[CausalBias], *args: Any, **kwargs: Any) -> Any:
        with _torch.dispatch_modes_taken_off():
            return Tensor.__new__(cls)

    with overridden() as override:
        override(CausalBias, "__new__", staticmethod(made))
        yield


def _is_view(func: Any) -> bool:
    returns = func._schema.returns
    alias = returns[0].alias_info if returns else None
    return alias is not None and not alias.is_write


def _flops(func: Any, args: Any, kwargs: Any, result: Any) -> float:
    packet = func._overloadpacket
    if packet in flop_registry:
        return float(flop_registry[packet](*args, **kwargs, out_val=result))
    if "scaled_dot_product" not in packet.__name__:
        return 0.0
    # Variants of attention that torch does not count, that for the CPU among them.
    is_backward = "backward" in packet.__name__
    shaped = [arg for arg in args if isinstance(arg, Tensor) and arg.dim() == 4]
    query, key, value = shaped[1:4] if is_backward else shaped[:3]
    scores = math.prod(query.shape[:3]) * key.shape[2]
    forward = 2.0 * scores * (query.shape[3] + value.shape[3])
    return 2.5 * forward if is_backward else forward


@contextmanager
def _fake_state(root: nn.Module) -> Iterator[None]:
    """Under a fake mode: while entered, parameters and buffers are fake ones on the CPU."""
    swapped: list[tuple[dict[str, Any], str, Tensor]] = [
        (slots, key, tensor)
        for module in root.modules()
        for slots in (module._parameters, module._buffers)
        for key, tensor in slots.items()
        if tensor is not None
    ]
    made: dict[int, Tensor] = {}  # tied parameters stay tied
    for slots, key, tensor in swapped:
        if id(tensor) not in made:
            fake = _fake_like(tensor)
            is_parameter = isinstance(tensor, nn.Parameter)
            made[id(tensor)] = nn.Parameter(fake, tensor.requires_grad) if is_parameter else fake
        slots[key] = made[id(tensor)]
    try:
        yield
    finally:
        for slots, key, tensor in swapped:
            slots[key] = tensor


def _fake_like(tensor: Tensor) -> Tensor:
    """Under a fake mode: a fake tensor on the CPU. The mode does not see `tensor`, as it would keep weak references."""
    return torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device="cpu")
