"""Tensor hooks: when a gradient arrives on its stage, every rank runs the user's function on it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from lightning_pipeline import _torch
from lightning_pipeline.engine.transfers import GRAD_SIGNATURE
from lightning_pipeline.partition import tree
from lightning_pipeline.partition.placeholder import TensorSpec, is_absent
from lightning_pipeline.partition.rng import generators
from lightning_pipeline.partition.torch_functions import FunctionKind, function_name, kind_of
from lightning_pipeline.partition.users_code import users_line
from lightning_pipeline.recording.autograd_calls import Graph
from lightning_pipeline.recording.module_tensors import ModuleTensors
from lightning_pipeline.recording.operation import Call, put_together, take_apart, tensors_in
from lightning_pipeline.recording.recording import Recording
from lightning_pipeline.recording.step_gradients import share_memory, written

if TYPE_CHECKING:
    from lightning_pipeline.engine.in_order import InOrder


class HookCalls:
    """Runs the gradient hooks of one micro-batch on every rank.

    Args:
        run: which it runs in; brings data to every rank.
        keeps_graph: gradients have graphs of their own, as under ``create_graph=True``.
    """

    def __init__(self, recording: Recording, run: InOrder, *, keeps_graph: bool = False) -> None:
        tensors = run.tensors
        self._recording = recording
        self._tensors = tensors
        self._direct = run.direct
        self._keeps_graph = keeps_graph
        self._mode = _OnData(recording, run, keeps_graph=keeps_graph)
        self._seed = run.seed
        self._generators = generators(tensors.tensors[0].device if tensors.tensors else torch.device("cpu"))
        self._random: list[Tensor] = []
        self._own = hooks_of_parameters(tensors)

    @property
    def are_there(self) -> bool:
        """Whether there are any hooks; the same on all ranks."""
        return bool(self._recording.hooks or self._own)

    @property
    def parameters(self) -> list[int]:
        """Numbers of the parameters that have hooks."""
        return list(self._own)

    @contextmanager
    def told(self) -> Iterator[None]:
        """Entered around a stage's backward: each gradient that a hook receives is sent to the other ranks."""
        before = []
        for hook in self._recording.hooks:
            hook.run = lambda hook, gradients: self._tell(hook.number, gradients)
        for number in self._own:
            if is_absent(self._tensors.tensors[number]):
                continue
            hooks = self._tensors.tensors[number]._backward_hooks
            assert hooks is not None
            before.append((hooks, dict(hooks)))
            hooks.clear()
            hooks[0] = partial(self._tell_of_parameter, number)
        try:
            yield
        finally:
            for hooks, own in before:
                hooks.clear()
                hooks.update(own)
            for hook in self._recording.hooks:
                hook.run = None
        if self._direct is not None:
            self._direct.tell(None)

    def listen(self, owner: int) -> None:
        """Run the same hooks as another rank, until its backward ends."""
        assert self._direct is not None
        while True:
            told = self._direct.hear(owner, "the gradients of hooks")
            if told is None:
                return
            number, layout, specs = told
            self._call(number, tree.rebuild(layout, [self._direct.receive(spec, owner) for spec in specs]))

    def _tell_of_parameter(self, number: int, gradient: Tensor) -> Any:
        return self._tell(-1 - number, (gradient,))

    def _tell(self, number: int, gradients: tuple[Any, ...]) -> Any:
        if self._direct is not None:
            tensors, layout = tree.flatten(gradients)
            self._direct.tell((number, layout, [TensorSpec.of(tensor) for tensor in tensors]))
            for tensor in tensors:
                self._direct.spread(tensor.detach(), TensorSpec.of(tensor), self._direct.rank)
        return self._call(number, gradients)

    def _call(self, number: int, gradients: tuple[Any, ...]) -> Any:
        with torch.set_grad_enabled(self._keeps_graph), self._drawing(), self._mode:
            if number >= 0:
                function = self._recording.hooks[number].function
                return None if function is None else function(*gradients)
            [gradient] = gradients
            for function in self._own[-1 - number]:
                found = function(gradient)
                gradient = gradient if found is None else found
            return gradient

    @contextmanager
    def _drawing(self) -> Iterator[None]:
        """Let hooks draw random numbers that continue the step's, from one hook to the next."""
        if not self._random:
            self._seed(self._recording.num_draws)
        for generator, state in zip(self._generators, self._random, strict=False):
            generator.set_state(state)
        yield
        self._random = [generator.get_state() for generator in self._generators]


class _OnData(TorchFunctionMode):
    """While entered, functions called on placeholders run on their data."""

    def __init__(self, recording: Recording, run: InOrder, *, keeps_graph: bool) -> None:
        super().__init__()
        self._recording = recording
        self._tensors = run.tensors
        self._data = run
        self._keeps_graph = keeps_graph
        self._views: list[Tensor] = []  # of data that is elsewhere, too, where a write would not come

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        kind = kind_of(func)
        if kind is FunctionKind.DESCRIBES:
            return func(*args, **kwargs)
        call = take_apart(func, args, kwargs)
        values: dict[int, int] = {}
        numbers: dict[int, int] = {}
        for place, tensor in enumerate(call.tensors):
            value, number = self._recording.value_of(tensor), self._tensors.number_of(tensor)
            if value is not None:
                values[place] = value
            if number is not None and not self._tensors.is_replicated(number):
                numbers[place] = number
        is_write = kind is FunctionKind.WRITES and 0 in {**values, **numbers}
        is_write |= bool(self._views) and share_memory(written(func, kind, args, kwargs), self._views)
        if not values and not numbers and not is_write:
            return func(*args, **kwargs)
        if is_write or function_name(func) == "grad.__get__":
            raise NotImplementedError(
                f"{function_name(func)} in a hook on a gradient, of what a stage computes or holds: do it in "
                f"on_after_backward ({users_line()})"
            )
        if func is torch.autograd.grad:
            taken = values | {place: -1 - number for place, number in numbers.items()}
            return self._differentiate(call, taken, GRAD_SIGNATURE.bind(*args, **kwargs).arguments)
        is_used = func is not Tensor.detach
        if self._keeps_graph and is_used and any(call.tensors[place].requires_grad for place in (*values, *numbers)):
            raise NotImplementedError(
                f"{function_name(func)} in a hook on a gradient that has a graph (create_graph=True), of what a stage "
                f"computes or holds: use its detach() ({users_line()})"
            )
        data = list(call.tensors)
        for place, value in values.items():
            [data[place]] = self._data.data_of([value])
        for place, number in numbers.items():
            data[place] = self._data.data_of_module(number)
        found = func(*put_together(call.args, data, call.numbers), **put_together(call.kwargs, data, call.numbers))
        given = [data[place] for place in (*values, *numbers)]
        self._views += [one for one in tree.leaves(found) if share_memory(one, given)]
        return found

    def _differentiate(
        self, call: Call, values: Mapping[int, int], arguments: Mapping[str, Any]
    ) -> tuple[Tensor | None, ...]:
        """`torch.autograd.grad` over what the step has computed, as implicit layers solve for their gradients.

        Args:
            values: the step's values and, below zero, the module's tensors, by their places in the call.
            arguments: of the call, by name.
        """
        of = {id(call.tensors[place]): value for place, value in values.items()}
        outputs, inputs = tensors_in(arguments["outputs"]), tensors_in(arguments["inputs"])
        graph = Graph(self._recording.event, self._recording.captured, [of.get(id(one)) for one in outputs])
        wanted = [(of.get(id(one)), one) for one in inputs]
        visits = graph.visits(wanted)
        if self._keeps_graph or arguments.get("create_graph"):
            refused = "with create_graph=True"
        elif len(visits) != 1 or any(id(one) not in of for one in (*outputs, *inputs)):
            refused = "over more than what one stage computes in the step"
        elif graph.passes_hooks(wanted):
            refused = "through other hooks"
        else:
            return self._data.gradients_of(call, values, *visits)
        raise NotImplementedError(
            f"torch.autograd.grad in a hook on a gradient, {refused}: do it in the step, on the way forward "
            f"({users_line()})"
        )


def hooks_of_parameters(tensors: ModuleTensors) -> dict[int, list[Callable[..., Any]]]:
    """Hooks that are registered on parameters, by their numbers; the same on all ranks.

    Raises:
        NotImplementedError: there is one that would see a parameter after its gradient was added.
    """
    found = {}
    with _torch.DisableTorchFunction():
        for number, tensor in enumerate(tensors.tensors):
            if tensor._backward_hooks:
                found[number] = list(tensor._backward_hooks.values())
            for function in (tensor._post_accumulate_grad_hooks or {}).values():
                if not (getattr(function, "__module__", None) or "").startswith("torch."):
                    raise NotImplementedError(
                        f"{tensors.names[number][0]} has a hook that runs after its gradient is accumulated, "
                        f"{_shown(function)}: it would run on one stage only. Do it in on_after_backward or "
                        f"on_before_optimizer_step"
                    )
    return found


def _shown(function: Any) -> str:
    code = getattr(function, "__code__", None)
    return f"{code.co_filename}:{code.co_firstlineno}" if code is not None else repr(function)
