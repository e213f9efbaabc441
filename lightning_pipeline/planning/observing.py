"""Running a step under observation, call by call, without leaving a trace on the module."""

from __future__ import annotations

import weakref
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.utils.checkpoint as torch_checkpoint
from torch import Tensor, nn

from lightning_pipeline.partition.compiled import is_compiled, uncompiled
from lightning_pipeline.partition.memory import memory_of
from lightning_pipeline.partition.overrides import has_forward, overridden

Step = Callable[[Any], Tensor | None]
"""Runs the user's step on a micro-batch and returns the loss that backward starts from; None without a backward."""


@contextmanager
def gradients_apart(root: nn.Module) -> Iterator[None]:
    """While entered, ``.grad`` of each parameter is a tensor of zeros, to which backwards add, as all but the first of
    a step's micro-batches do. Afterwards it is what it was. Hooks that wait for a gradient are not called."""
    parameters = [parameter for parameter in root.parameters() if parameter.requires_grad]
    before = [(parameter, parameter.grad, parameter._post_accumulate_grad_hooks) for parameter in parameters]
    hooks = [(own, dict(own)) for _, _, own in before if own]
    for own, _ in hooks:
        own.clear()
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
    try:
        yield
    finally:
        for parameter, gradient, _ in before:
            parameter.grad = gradient
        for own, content in hooks:
            own.update(content)


def run_backward(loss: Tensor | None, sequence: list[int], reached: Callable[[int], None]) -> None:
    """Backward from `loss`.

    Autograd runs nodes in the reverse order of their making, so the backwards of positions follow one another.

    Args:
        sequence: number of the next autograd node at the beginning of each position.
        reached: called with the position whose backward begins.
    """
    if loss is None or loss.grad_fn is None:
        return
    first: dict[int, tuple[int, Any]] = {}
    seen = {loss.grad_fn}
    todo = [loss.grad_fn]
    while todo:
        node = todo.pop()
        for following, _ in node.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                todo.append(following)
        number = node._sequence_nr()
        if number < (1 << 62):  # those of AccumulateGrad are beyond all others
            position = bisect_right(sequence, number) - 1
            if position not in first or first[position][0] < number:
                first[position] = (number, node)
    handles = [
        node.register_prehook(lambda gradients, position=position: reached(position))
        for position, (_, node) in first.items()
    ]
    try:
        torch.autograd.backward(loss)
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def called_through(root: nn.Module, call: Callable[..., Any]) -> Iterator[None]:
    """While entered, the forward of each submodule runs as ``call(name, forward, args, kwargs)``, and none compiled."""

    def through(name: str, forward: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *args, **kwargs: call(name, forward, args, kwargs)

    with overridden() as override:
        for name, module in root.named_modules():
            if is_compiled(module):
                override(module, *uncompiled(module))
            if name and not isinstance(module, torch.jit.ScriptModule) and has_forward(module):
                override(module, "forward", through(name, module.forward))
        yield


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
def without_reentrant() -> Iterator[None]:
    """While entered, checkpointed parts of the reentrant kind are recomputed as the other kind's are.

    In a pipeline each leaf inside of them is checkpointed by itself, and their backward is not one node.
    """
    reentrant = torch_checkpoint.CheckpointFunction

    class AsTheOtherKind:
        @staticmethod
        def apply(function: Callable[..., Any], preserve: bool, *args: Any) -> Any:
            return torch_checkpoint.checkpoint(function, *args, use_reentrant=False, preserve_rng_state=preserve)

    torch_checkpoint.CheckpointFunction = AsTheOtherKind  # type: ignore[assignment,misc]
    try:
        yield
    finally:
        torch_checkpoint.CheckpointFunction = reentrant  # type: ignore[misc]


class LiveBytes:
    """Counts the bytes of storages from when they are noted until they are freed.

    Args:
        others: tensors whose storages do not count.
    """

    def __init__(self, others: Iterable[Tensor]) -> None:
        self.now = 0
        self._others = set(map(memory_of, others))
        self._alive: dict[int, weakref.ref[Any]] = {}

    def note(self, made: Iterable[Any]) -> None:
        """These may be new; what is no tensor is passed over, as are sparse ones."""
        for tensor in made:
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
