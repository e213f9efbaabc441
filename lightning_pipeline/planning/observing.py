"""Runs a step under observation, call by call, without changing the module."""

from __future__ import annotations

import weakref
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from types import MethodType
from typing import Any

import torch
import torch.utils.checkpoint as torch_checkpoint
from torch import Tensor, nn

from lightning_pipeline import _torch
from lightning_pipeline.partition.compiled import is_compiled, uncompiled
from lightning_pipeline.partition.memory import memory_of
from lightning_pipeline.partition.overrides import InPlaceOf, MethodInPlaceOf, has_forward, overridden

Step = Callable[[Any], Tensor | None]
"""Runs the user's step on a micro-batch and returns the loss that backward starts from; None without a backward."""


def run_by_position(
    root: nn.Module,
    step: Step,
    batch: Any,
    *,
    begin: Callable[[str, Any], None],
    begin_backward: Callable[[int], None],
    end: Callable[[], None] = lambda: None,
) -> None:
    """Run a step and its backward, and report each position as it begins (see `profile`).

    Args:
        begin: called with the module's name and its arguments when a position begins in the forward.
        begin_backward: called with the number of the position whose backward begins.
        end: called when a module's call ends.
    """
    is_forward = True
    sequence = [_torch.next_sequence_number()]  # of the first autograd node that each position may make

    def call(name: str, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        if not is_forward:  # activation checkpointing computes it again, which belongs to the backward around it
            return forward(*args, **kwargs)
        begin(name, (args, kwargs))
        sequence.append(_torch.next_sequence_number())
        try:
            return forward(*args, **kwargs)
        finally:
            end()

    with called_through(root, call), _without_reentrant_checkpoints():
        with graphs_kept():
            loss = step(batch)
        is_forward = False
        if loss is not None and loss.grad_fn is not None:
            _run_backward(loss, sequence, begin_backward)


@contextmanager
def graphs_kept() -> Iterator[None]:
    """While entered, `torch.autograd.grad` lets no graph go: a step may call it after a backward that is not run here,
    but once for all at the end.
    """

    def run(outputs: Any, gradients: Any, retain_graph: bool, *args: Any, **kwargs: Any) -> Any:
        return _torch.run_backward(outputs, gradients, True, *args, **kwargs)

    with overridden() as override:
        override(torch.autograd, "_engine_run_backward", run)
        yield


def _run_backward(loss: Tensor, sequence: list[int], begin: Callable[[int], None]) -> None:
    """Autograd runs nodes in the reverse order of their making, so each position's backward begins with the last node
    that its forward has made."""
    last: dict[int, tuple[int, Any]] = {}
    seen = {loss.grad_fn}
    todo = [loss.grad_fn]
    while todo:
        node = todo.pop()
        unseen = {following for following, _ in node.next_functions} - seen - {None}  # type: ignore[union-attr]
        seen |= unseen
        todo += unseen
        number = node._sequence_nr()  # type: ignore[union-attr]
        if number < (1 << 62):  # AccumulateGrad nodes have numbers beyond all others
            position = bisect_right(sequence, number) - 1
            if position not in last or last[position][0] < number:
                last[position] = (number, node)
    handles = [
        node.register_prehook(lambda gradients, position=position: begin(position))
        for position, (_, node) in last.items()
    ]
    try:
        torch.autograd.backward(loss)
    finally:
        for handle in handles:
            handle.remove()


def called_names(root: nn.Module, step: Step, batch: Any) -> set[str]:
    """Names of the modules that a run of the step calls."""
    names: set[str] = set()

    def call(name: str, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        names.add(name)
        return forward(*args, **kwargs)

    with called_through(root, call):
        step(batch)
    return names


@contextmanager
def called_through(root: nn.Module, call: Callable[..., Any]) -> Iterator[None]:
    """While entered, the forward of each submodule runs as ``call(name, forward, args, kwargs)``, never compiled.

    A step may copy or pickle a submodule meanwhile: that has the forward of its own.
    """

    def through(name: str, forward: Callable[..., Any]) -> Callable[..., Any]:
        def observed(*args: Any, **kwargs: Any) -> Any:
            return call(name, forward, args, kwargs)

        if isinstance(forward, MethodType):
            return MethodInPlaceOf(forward, observed)
        return InPlaceOf(forward, observed)

    with overridden() as override:
        for name, module in root.named_modules():
            if is_compiled(module):
                override(module, *uncompiled(module))
            if name and not isinstance(module, torch.jit.ScriptModule) and has_forward(module):
                override(module, "forward", through(name, module.forward))
        yield


@contextmanager
def gradients_apart(root: nn.Module) -> Iterator[None]:
    """While entered, each parameter's ``.grad`` is a tensor of zeros to which backwards add, as all but the first
    micro-batch of a step do. Afterwards it is what it was. Hooks that wait for a gradient are not called."""
    parameters = [parameter for parameter in root.parameters() if parameter.requires_grad]
    gradients = [parameter.grad for parameter in parameters]
    hooks = [(own, dict(own)) for parameter in parameters if (own := parameter._post_accumulate_grad_hooks)]
    for own, _ in hooks:
        own.clear()
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
    try:
        yield
    finally:
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient
        for own, content in hooks:
            own.update(content)


@contextmanager
def _without_reentrant_checkpoints() -> Iterator[None]:
    """While entered, reentrant activation checkpoints are computed as the other kind.

    In a pipeline each leaf inside of them is checkpointed by itself, and their backward is not one node.
    """

    class NonReentrant:
        @staticmethod
        def apply(function: Callable[..., Any], preserve: bool, *args: Any) -> Any:
            return torch_checkpoint.checkpoint(function, *args, use_reentrant=False, preserve_rng_state=preserve)

    with overridden() as override:
        override(torch_checkpoint, "CheckpointFunction", NonReentrant)
        yield


class LiveBytes:
    """Counts the bytes of storages from when they are noted until they are freed.

    Args:
        others: tensors whose storages do not count.
    """

    def __init__(self, others: Iterable[Tensor]) -> None:
        self.now = 0
        self._others = set(map(memory_of, others))
        self._alive: dict[int, weakref.ref[Any]] = {}

    def note(self, values: Iterable[Any]) -> None:
        """Count the strided tensors among these values whose storages are new."""
        for tensor in values:
            if not isinstance(tensor, Tensor) or tensor.layout is not torch.strided:
                continue
            storage = tensor.untyped_storage()
            key, num_bytes = storage._cdata, storage.nbytes()
            if key in self._others or key in self._alive:
                continue
            self.now += num_bytes
            self._alive[key] = weakref.ref(storage, partial(self._freed, key, num_bytes))

    def _freed(self, key: int, num_bytes: int, _: object) -> None:
        self.now -= num_bytes
        del self._alive[key]
