"""Manual optimization: calls that are the batch's run once, when all micro-batches have reached them.

They are the module's manual_backward, toggle_optimizer, untoggle_optimizer and clip_gradients, the methods of its
schedulers and optimizers, those of the user's own included, the zero_grad of modules, and torch's functions that clip
gradients. The rest of the step runs per micro-batch.
"""

from __future__ import annotations

import functools
import inspect
import itertools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from enum import Enum
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.overrides import TorchFunctionMode

from lightning_pipeline.engine.suspended import BACKWARD, SyncPoint, running_step
from lightning_pipeline.partition.memory import memory_of
from lightning_pipeline.partition.overrides import InPlaceOf, Override, overridden
from lightning_pipeline.partition.placeholder import Placeholder
from lightning_pipeline.partition.torch_functions import kind_of
from lightning_pipeline.partition.users_code import users_line
from lightning_pipeline.recording.own_changes import result_of_write
from lightning_pipeline.recording.step_gradients import GETTERS, GRADIENT_CALLS, given, written

from .._lightning import LightningModule, LightningOptimizer, Precision
from .lightning_private import lightning_optimizers
from .stage_optimizers import inner

Closure = Callable[[], Any]
Update = Callable[[Optimizer, Callable[[Closure | None], Any], Closure | None], Any]
"""Runs an update, given the optimizer, its own step and the closure for it."""

_CLIPPING = (torch.nn.utils.clip_grad_norm_, torch.nn.utils.clip_grad_value_)
_ZERO_GRAD = nn.Module.zero_grad
_OF_MODULE = ("toggle_optimizer", "untoggle_optimizer", "clip_gradients")


@contextmanager
def batch_calls_met(
    module: LightningModule,
    update: Update,
    clear: Callable[..., None],
    *,
    inside: Callable[[], AbstractContextManager[None]],
    aside: Callable[[], AbstractContextManager[None]],
) -> Iterator[None]:
    """While entered, micro-batches meet at the calls of their step that are the batch's.

    Args:
        update: runs an update that the user calls on torch's own optimizer, not on Lightning's.
        clear: clears the gradients of parameters, `set_to_none` or not.
        inside: entered around what the batch does with the whole module.
        aside: entered around closures, which run the schedule in the middle of that.
    """

    def clips(function: Callable[..., Any]) -> Callable[..., Any]:
        return _once(f"torch.nn.utils.{function.__name__}", function, inside)

    def zero_grad(owner: nn.Module, *args: Any, **kwargs: Any) -> None:
        name = next((name for name, one in module.named_modules() if one is owner), None)
        if name is None:
            _ZERO_GRAD(owner, *args, **kwargs)
        else:
            clear_all = functools.partial(clear, [*owner.parameters()])
            _deferred(f"the zero_grad of {name or 'self'}", clear_all)(*args, **kwargs)

    # Both a LightningOptimizer and torch's optimizer in it are covered: users reach the inner one, too.
    with overridden() as override, _clipping_by(clips), _backwards_given_to(meet_backward, in_step=True):
        override(nn.Module, "zero_grad", zero_grad)
        for kind, owner, name, what in _calls(module):
            function = getattr(owner, name)
            if kind is _Kind.ONCE:
                override(owner, name, _once(what, function, inside))
            elif kind is _Kind.DEFERRED:
                override(owner, name, _deferred(what, function))
            elif isinstance(owner, LightningOptimizer):
                override(owner, name, _step(what, function, aside))
            else:
                override(owner, name, _step(what, _update_of(owner, update), aside, function))
        yield


@contextmanager
def _clipping_by(other: Callable[[Callable[..., Any]], Callable[..., Any]]) -> Iterator[None]:
    """While entered, torch's functions that clip gradients call what `other` makes of them.

    Users may have imported these functions by name, so the functions stay and what they call is replaced: torch wraps
    each of them, and the wrapper has the original in its closure.
    """
    closures = [function.__closure__ or () for function in _CLIPPING]
    cells = [next(cell for cell in closure if callable(cell.cell_contents)) for closure in closures]
    before = [cell.cell_contents for cell in cells]
    for cell, function in zip(cells, before, strict=True):
        cell.cell_contents = other(function)
    try:
        yield
    finally:
        for cell, function in zip(cells, before, strict=True):
            cell.cell_contents = function


@contextmanager
def losses_noted(module: LightningModule) -> Iterator[list[Tensor]]:
    """While entered, a step's calls that are the batch's do nothing, nor what it writes into parameters, and gradients
    are zeros. Gives the losses that it calls backward on."""
    losses: list[Tensor] = []

    def step(closure: Closure | None = None, **kwargs: Any) -> Any:
        return None if closure is None else closure()

    def note(loss: Tensor, *args: Any, **kwargs: Any) -> None:
        losses.append(loss)

    def nothing(*args: Any, **kwargs: Any) -> Tensor:
        return torch.zeros((), device=module.device)  # the norm of gradients

    with overridden() as override, _clipping_by(lambda function: nothing), _backwards_given_to(note):
        override(nn.Module, "zero_grad", lambda *args, **kwargs: None)
        override(module.trainer.strategy, "backward", note)  # which manual_backward calls
        for kind, owner, name, _ in _calls(module):
            override(owner, name, step if kind is _Kind.UPDATE else lambda *args, **kwargs: None)
        with _WithoutUpdates(module):
            yield losses


class _WithoutUpdates(TorchFunctionMode):
    """Gives gradients of parameters that there are none of, as zeros, and writes into no parameters."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self._memory = set(map(memory_of, module.parameters()))

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in GRADIENT_CALLS and isinstance(args[0], nn.Parameter):
            return torch.zeros_like(args[0]) if func in GETTERS else None
        if any(map(self._is_of_parameter, written(func, kind_of(func), args, kwargs))):
            return result_of_write(func, args, kwargs)
        return func(*args, **kwargs)

    def _is_of_parameter(self, tensor: Tensor) -> bool:
        """Whether a tensor is a parameter, or shares memory with one."""
        if type(tensor) is Placeholder and tensor._pl_recording is not None:  # the step is recorded, views are events
            number = tensor._pl_recording.placing.memory.module_tensor(tensor._pl_value)
            return number is not None and not tensor._pl_recording.tensors.is_buffer[number]
        return memory_of(tensor) in self._memory


class _Kind(Enum):
    ONCE = "once"
    DEFERRED = "deferred"
    UPDATE = "update"


def _calls(module: LightningModule) -> list[tuple[_Kind, Any, str, str]]:
    """The batch's calls that a step may make, except backward: the object, its method, and a description."""
    found: list[tuple[_Kind, Any, str, str]] = [(_Kind.ONCE, module, name, f"self.{name}") for name in _OF_MODULE]
    for index, optimizer in enumerate(lightning_optimizers(module.trainer)):
        for owner in (optimizer, inner(optimizer)):
            of = f"of optimizer {index}, {type(inner(optimizer)).__name__},"
            found.append((_Kind.DEFERRED, owner, "zero_grad", f"the zero_grad {of}"))
            found.append((_Kind.UPDATE, owner, "step", f"the step {of}"))
            own_methods = _own_methods(type(inner(optimizer)))  # type: ignore[arg-type]  # mypy: no class is Hashable
            found += [(_Kind.ONCE, owner, name, f"the {name} {of}") for name in own_methods]
    for index, config in enumerate(module.trainer.lr_scheduler_configs):
        scheduler = config.scheduler
        found.append((_Kind.ONCE, scheduler, "step", f"the step of scheduler {index}, {type(scheduler).__name__},"))
    return found


@functools.cache
def _own_methods(kind: type[Optimizer]) -> list[str]:
    """The public methods that optimizers have beside those of torch's, such as the two halves of SAM's step."""
    classes = itertools.takewhile(lambda one: not one.__module__.startswith("torch."), kind.__mro__)
    found = {name for one in classes for name, value in vars(one).items() if inspect.isfunction(value)}
    return sorted(name for name in found if not name.startswith("_") and not hasattr(Optimizer, name))


def _once(
    what: str, function: Callable[..., Any], inside: Callable[[], AbstractContextManager[None]]
) -> Callable[..., Any]:
    """A call that runs once, where the micro-batches meet."""

    def call(*args: Any, **kwargs: Any) -> Any:
        step = running_step()
        if step is None:
            return function(*args, **kwargs)

        def perform(closures: Any) -> Any:
            with inside():
                return function(*args, **kwargs)

        return step.meet(SyncPoint(what, perform))

    return call


def _deferred(what: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """A call that may run later, as the step cannot tell: the micro-batches need not meet for it."""

    def call(*args: Any, **kwargs: Any) -> Any:
        step = running_step()
        if step is None:
            return function(*args, **kwargs)

        def perform() -> None:
            given.note_changes()
            function(*args, **kwargs)

        return step.defer(what, perform)

    return call


def _step(
    what: str,
    function: Callable[..., Any],
    aside: Callable[[], AbstractContextManager[None]],
    elsewhere: Callable[..., Any] | None = None,
) -> Callable[..., Any]:
    """An optimizer's step.

    Args:
        elsewhere: runs instead where it is not called in the user's step.
    """

    @functools.wraps(function)  # schedulers mark an optimizer's step, and look for the mark
    def call(closure: Closure | None = None, **kwargs: Any) -> Any:
        step = running_step()
        if step is None:
            return (elsewhere or function)(closure, **kwargs)

        def perform(run_closures: Callable[[], Any] | None) -> Any:
            if run_closures is None:
                return function(None, **kwargs)

            def run() -> Any:
                with aside():
                    return run_closures()

            return function(run, **kwargs)

        return step.meet(SyncPoint(what, perform, closure))

    return call


def _update_of(optimizer: Optimizer, update: Update) -> Callable[..., Any]:
    plain = optimizer.step

    @functools.wraps(plain)
    def call(closure: Closure | None = None, **kwargs: Any) -> Any:
        return update(optimizer, functools.partial(plain, **kwargs), closure)

    return call


@contextmanager
def _backwards_given_to(take: Callable[..., None], *, in_step: bool = False) -> Iterator[None]:
    """While entered, calls of torch's backward go to `take`.

    Args:
        in_step: only those that a micro-batch's step makes.
    """
    of_tensor, of_tensors = torch.Tensor.backward, torch.autograd.backward

    def backward(loss: Tensor, *args: Any, **kwargs: Any) -> None:
        is_other = in_step and running_step() is None
        (of_tensor if is_other else take)(loss, *args, **kwargs)

    def backward_from(tensors: Any, *args: Any, **kwargs: Any) -> None:
        if in_step and running_step() is None:
            of_tensors(tensors, *args, **kwargs)
        else:
            take(tensors if isinstance(tensors, Tensor) else sum(tensors), *args, **kwargs)

    with overridden() as override:
        override(torch.Tensor, "backward", backward)
        override(torch.autograd, "backward", backward_from)
        yield


def backwards_met(plugin: Precision, other_backward: Callable[..., None], override: Override) -> None:
    """Let micro-batches meet where their step calls manual_backward, which calls the precision plugin.

    Args:
        other_backward: called for other backwards, with the plugin's own function and its arguments.
    """
    before, backward, after = plugin.pre_backward, plugin.backward, plugin.post_backward

    def pre_backward(loss: Tensor, module: LightningModule) -> Tensor:
        return before(loss, module) if running_step() is None else loss

    def run_backward(
        loss: Tensor, module: LightningModule, optimizer: Optimizer | None, *args: Any, **kwargs: Any
    ) -> None:
        if running_step() is None:
            other_backward(backward, loss, module, optimizer, *args, **kwargs)
        else:
            meet_backward(loss, *args, **kwargs)

    def post_backward(loss: Tensor, module: LightningModule) -> Tensor:
        return after(loss, module) if running_step() is None else loss

    override(plugin, "pre_backward", InPlaceOf(before, pre_backward))
    override(plugin, "backward", InPlaceOf(backward, run_backward))
    override(plugin, "post_backward", InPlaceOf(after, post_backward))


def meet_backward(loss: Tensor, *args: Any, **kwargs: Any) -> None:
    """Run the backward of a micro-batch's loss with those of the others. To be called in its step.

    Raises:
        NotImplementedError: more than ``retain_graph`` is given beside the loss.
        RuntimeError: the loss has no gradients to give.
    """
    step = running_step()
    assert step is not None
    retain_graph = kwargs.pop("retain_graph", None)
    if args or any(value is not None and value is not False for value in kwargs.values()):
        given = ", ".join([*(type(arg).__name__ for arg in args), *kwargs])
        raise NotImplementedError(
            f"manual_backward is given {given} beside the loss ({users_line()}), but in a pipeline it takes only "
            f"retain_graph: make the loss a single number, and use torch.autograd.grad for gradients of gradients"
        )
    if not loss.requires_grad:
        raise RuntimeError(
            f"manual_backward is given a loss that has no gradients to give ({users_line()}): nothing that it was "
            f"computed from requires them, or they were off"
        )
    step.meet(SyncPoint(BACKWARD, loss=loss, retain_graph=bool(retain_graph)))
