"""Autograd within a step: hooks on gradients, `.grad`, `torch.autograd.grad` and backwards."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import CheckpointError

from lightning_pipeline import _torch
from lightning_pipeline.partition import tree
from lightning_pipeline.partition.gradient_hooks import HOOKS, hook_of_tensor, retained
from lightning_pipeline.partition.placeholder import Placeholder, TensorSpec
from lightning_pipeline.partition.torch_functions import function_name
from lightning_pipeline.partition.users_code import users_line
from lightning_pipeline.recording.event import GRADIENTS_SWITCHED, MICROBATCHES_MEET, Event
from lightning_pipeline.recording.execution import run_event, values_made
from lightning_pipeline.recording.graph_walk import edges_before
from lightning_pipeline.recording.inference import NOTHING, UNKNOWN, Inference, Result
from lightning_pipeline.recording.matcher import UNLIKE, never
from lightning_pipeline.recording.module_tensors import set_requires_grad
from lightning_pipeline.recording.new_events import refuse_graph_of_earlier
from lightning_pipeline.recording.operation import Call, put_together, tensors_in
from lightning_pipeline.recording.path import answer, follow, inspect, mark
from lightning_pipeline.recording.step_gradients import refuse_read

if TYPE_CHECKING:
    from lightning_pipeline.recording.recorder import Recorder
    from lightning_pipeline.recording.recording import Recording


class Graph:
    """What some values of a recording were computed from."""

    def __init__(self, end: Event, captured: Sequence[Any], outputs: Sequence[Any]) -> None:
        self._captured = captured
        self._homes: dict[int, int] = {}
        self._outputs = [value for value in outputs if type(value) is int and value >= 0]
        self._before: list[Event] = []  # in order
        self._hooked: list[Any] = []  # values that have hooks on their gradients
        needed: set[Any] = set(self._outputs)
        for event in reversed(end.path()):
            if event.function in HOOKS and event.inputs[0] in needed:
                self._hooked.append(event.inputs[0])
            made = event.made()
            self._homes.update(dict.fromkeys(made, event.visit))
            if event.visit >= 0 and not needed.isdisjoint(made):
                self._before.append(event)
                needed.update(
                    value
                    for value, spec in zip(event.inputs, event.specs, strict=True)
                    if type(value) is int and value >= 0 and spec.requires_grad
                )
        self._before.reverse()

    def visits(self, wanted: Sequence[tuple[Any, Tensor]] | None) -> dict[int, list[int]]:
        """The visits of what leads from `wanted` (all leaves, for None) to the outputs, each with the numbers of the
        module's tensors that take part in it there."""
        found: dict[int, list[int]] = {self._homes.get(value, 0): [] for value in self._outputs}
        for event in self._between(wanted)[0]:
            own = found.setdefault(event.visit, [])
            own += [-1 - value for value in event.inputs if type(value) is int and value < 0]
        return found

    def passes_hooks(self, wanted: Sequence[tuple[Any, Tensor]]) -> bool:
        """Whether gradients pass hooks on their way from the outputs to `wanted`."""
        if not self._hooked:
            return False
        return not self._between(wanted)[1].isdisjoint(self._hooked)

    def _between(self, wanted: Sequence[tuple[Any, Tensor]] | None) -> tuple[list[Event], set[int]]:
        """The events that lead from `wanted` (all leaves, for None) to the outputs, and the values on the way."""
        found: list[Event] = []
        reached = {value for value, _ in wanted or () if type(value) is int}
        leaves = [tensor for value, tensor in wanted or () if value is None]
        for event in self._before:
            if not event.gives_gradients():
                continue
            is_on_way = wanted is None or not reached.isdisjoint(event.inputs)
            for slot, place in event.matcher.captured_tensors.items():
                captured = self._captured[event.first_captured + place]
                is_on_way |= event.inputs[slot] is None and any(_comes_from(captured, leaf) for leaf in leaves)
            if is_on_way:
                reached.update(event.made())
                found.append(event)
        return found, reached

    def leading(self, events: Sequence[Event], wanted: Sequence[Any] | None = None) -> set[int]:
        """The places of those among some events that lead to the outputs, and that gradients go back through.

        Args:
            wanted: only those that lead there from these values, and module's tensors (below zero); None for all. What
                else there is among them may be anywhere.
        """
        reached = {value for value in wanted or () if type(value) is int}
        is_anywhere = wanted is None or len(reached) < len(wanted)
        before = set()
        for event in self._before:
            if is_anywhere or not reached.isdisjoint(event.inputs):
                reached.update(event.made())
                before.add(id(event))
        return {place for place, event in enumerate(events) if id(event) in before and event.gives_gradients()}

    def result(
        self,
        visit: int,
        function: Any,
        call: Call,
        inputs: Sequence[Any],
        specs: Sequence[TensorSpec],
        inference: Inference,
    ) -> Result:
        """What a call of autograd gives, found out on a graph of fake tensors."""
        if function is not torch.autograd.grad:
            return NOTHING
        fakes: dict[Any, Tensor] = {}
        leaves = [tensor for value, tensor in zip(inputs, call.tensors, strict=True) if value is None]

        def fake(value: Any, spec: TensorSpec, captured: Any = None) -> Tensor:
            key = value if value is not None else ("captured", id(captured))
            if key not in fakes:
                before = [leaf for leaf in leaves if leaf is not captured and _comes_from(captured, leaf)]
                if before:
                    given = [fake(None, TensorSpec.of(leaf), leaf) for leaf in before]
                    fakes[key] = inference.fake(spec.but(requires_grad=False)) + _summed(given)
                else:
                    fakes[key] = inference.fake(spec)
            return fakes[key]

        with inference.mode:
            for event in self._before:
                if event.visit != visit:
                    continue
                operands = []
                for slot, (value, spec) in enumerate(zip(event.inputs, event.specs, strict=True)):
                    place = event.matcher.captured_tensors.get(slot)
                    captured = None if place is None else self._captured[event.first_captured + place]
                    operands.append(fake(value if type(value) is int else None, spec, captured))
                fakes.update(made_of_fakes(event, operands, self._captured, inference))
            own = [
                fake(value if type(value) is int else None, spec, tensor)
                for value, spec, tensor in zip(inputs, specs, call.tensors, strict=True)
            ]
            kwargs = put_together(call.kwargs, own, call.numbers)
            with torch.autograd.set_detect_anomaly(False):  # it looks for NaN, and fake tensors have no numbers
                found = function(*put_together(call.args, own, call.numbers), **kwargs)
        made, layout = tree.flatten(found)
        return Result(layout, tuple(TensorSpec.of(tensor) for tensor in made), tuple(() for _ in made), ())


def _summed(tensors: Sequence[Tensor]) -> Any:
    """A number that is computed from tensors, and gives them gradients that are laid out as they are."""
    return sum((one * torch.ones_like(one)).sum() for one in tensors)


def _comes_from(tensor: Any, leaf: Tensor) -> bool:
    """Whether a tensor is a leaf of autograd, or was computed from it on every rank."""
    if tensor is leaf or not isinstance(tensor, Tensor):
        return tensor is leaf
    return any(getattr(edge.node, "variable", None) is leaf for _, _, edge in edges_before([tensor], ()))


def made_of_fakes(
    event: Event, operands: Sequence[Tensor], captured: Sequence[Any], inference: Inference
) -> dict[int, Tensor]:
    """The values that an event makes of fake operands: where only data tells their shapes, of those that they had, in a
    graph of the operands."""
    try:
        with torch.jit.optimized_execution(False):  # as where calls are inferred
            found = run_event(event, operands, captured, lambda number: None)
        return dict(values_made(event, operands, found))
    except UNKNOWN:
        pass
    before = _summed([one for one in operands if one.requires_grad]) if event.gives_gradients() else 0
    made = (*zip(event.result.tensors, event.outputs, strict=True), *(write[1:] for write in event.writes))
    return {
        value: inference.fake(spec.but(requires_grad=False)) + before if spec.requires_grad else inference.fake(spec)
        for spec, value in made
        if value is not None and isinstance(spec, TensorSpec)
    }


def hook(recording: Recording, func: Any, tensor: Tensor, function: Callable[..., Any] | None = None) -> Any:
    """Answer `register_hook`, `retain_grad`, and others of their kind."""
    recording.is_simple = False
    if recording.recorder.tensors.number_of(tensor) is not None or type(tensor) is not Placeholder:
        with _torch.DisableTorchFunction():
            return func(tensor) if function is None else func(tensor, function)
    if not tensor.requires_grad:
        with _torch.DisableTorchFunctionSubclass():
            return func(tensor) if function is None else func(tensor, function)  # torch's own error
    name = function_name(func)
    if name == "retain_grad":
        if not tensor.is_leaf:
            recording.retained.append((tensor._pl_value, tensor))
            recording.__torch_function__(retained, (), (tensor,))
        return None
    if name != "register_hook" or function is None:
        raise NotImplementedError(
            f"{name} on what a stage computes is not supported within a step: use register_hook ({users_line()})"
        )
    if function.__qualname__.startswith("register_multi_grad_hook."):
        raise NotImplementedError(
            f"register_multi_grad_hook waits for gradients that are on several stages ({users_line()}): use each "
            f"tensor's register_hook"
        )
    return recording.register(hook_of_tensor, tensor, function)


def read_gradient(recording: Recording, tensor: Tensor) -> None:
    """Answer ``tensor.grad``: before its backward a value has none."""
    number = recording.recorder.tensors.number_of(tensor)
    if number is not None:
        refuse_read(recording.recorder.tensors.names[number][0])
    if recording.has_run_backward:
        what = getattr(tensor, "_pl_what", "a parameter" if isinstance(tensor, nn.Parameter) else "a tensor")
        raise NotImplementedError(
            f"the gradient of {what} is read within a step, and is on one stage ({users_line()}): take "
            f"torch.autograd.grad, and where an optimizer of the step's own reads it, update by hand, as in `p -= rate "
            f"* gradient` under torch.no_grad()"
        )


SWITCHES = (Tensor.requires_grad_, Tensor.requires_grad.__set__)  # type: ignore[attr-defined]
"""The functions by which a tensor is made to require gradients, or not to."""


def is_switch(recording: Recording, func: Any, args: Any) -> bool:
    """Whether a call is `requires_grad_` on a parameter of the module."""
    return func in SWITCHES and isinstance(args[0], nn.Parameter) and recording.tensors.number_of(args[0]) is not None


def switch(recording: Recording, tensor: Tensor, value: bool = True, *, requires_grad: bool | None = None) -> Any:
    """Answer `requires_grad_` on a parameter. The step's Python finds it switched, and so do the stages when they come
    to the calls that follow: the micro-batch runs in order."""
    value = bool(value if requires_grad is None else requires_grad)
    number = recording.tensors.number_of(tensor)
    assert number is not None
    if tensor.requires_grad is value:
        return tensor
    if recording.is_in_checkpoint:
        raise NotImplementedError(
            f"{recording.tensors.names[number][0]} is made to require gradients, or not to, inside of a checkpointed "
            f"function, which would do so once more in backward ({users_line()}): do it before the function is called"
        )
    recording.is_simple = False
    recording.switched.setdefault(number, tensor.requires_grad)
    mark(recording, GRADIENTS_SWITCHED, number, tensor.requires_grad, value)
    set_requires_grad(tensor, value)
    return tensor


def differentiate(recording: Recording, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Answer `torch.autograd.grad`, or a backward, which has to be within one visit."""
    is_grad = func is torch.autograd.grad
    if recording.is_in_checkpoint:
        if not is_grad:
            raise CheckpointError(
                f"{function_name(func)} is called in a checkpointed function, and would be once more in backward "
                f"({users_line()}): call it outside, or take torch.autograd.grad"
            )
        recording.checkpoints.gradients_taken_at = users_line()
    if not is_grad:
        recording.is_simple = False  # gradients of parameters add up in the order of micro-batches
        recording.has_run_backward = True
    before, found = recording.event, UNLIKE
    for child in before.children:
        found = child.matcher.match(func, args, kwargs, recording)
        if found is not UNLIKE:
            recording.event = child
            break
    else:
        found = _new_call(recording, func, args, kwargs)
    if is_grad and (recording.hooks or recording.recorder.has_hooks):
        call, inputs, _, _ = inspect(recording, func, args, kwargs)
        graph, wanted = _graph(recording, before, call, inputs, args, kwargs)
        if graph.passes_hooks(wanted) or _have_hooks(recording, wanted):
            # They are Python: the step goes on with what they have done.
            recording.is_simple = False
            recording.with_hooks.add(recording.event)
            recording.data_source.finish_before(recording, with_own=True)
    return found


def _graph(
    recording: Recording, end: Event, call: Call, inputs: Sequence[Any], args: Any, kwargs: dict[str, Any]
) -> tuple[Graph, list[tuple[Any, Tensor]]]:
    """What the outputs of a call were computed from, and the inputs that it names, with their numbers."""
    values = {id(tensor): value for tensor, value in zip(call.tensors, inputs, strict=True)}
    outputs = tensors_in(args[0] if args else kwargs.get("outputs", kwargs.get("tensors")))
    graph = Graph(end, recording.captured, [values.get(id(one)) for one in outputs])
    named = tensors_in(args[1] if len(args) > 1 else kwargs.get("inputs"))
    return graph, [(values.get(id(one)), one) for one in named]


def _have_hooks(recording: Recording, wanted: Sequence[tuple[Any, Tensor]]) -> bool:
    """Whether there are hooks on the module's tensors among what a gradient is taken of."""
    with _torch.DisableTorchFunction():
        return any(type(value) is int and value < 0 and bool(tensor._backward_hooks) for value, tensor in wanted)


def _new_call(recording: Recording, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    recorder = recording.recorder
    call, inputs, specs, state = inspect(recording, func, args, kwargs)
    refuse_graph_of_earlier(call, inputs, specs)
    graph, wanted = _graph(recording, recording.event, call, inputs, args, kwargs)
    visits = graph.visits(wanted if func is torch.autograd.grad else None)
    if len(visits) != 1:
        raise NotImplementedError(
            f"{function_name(func)} goes back over {_shown(recorder, visits)} ({users_line()}): gradients within "
            f"a step can be had within one stage. {_way_out(recording, visits)}"
        )
    [visit] = visits
    result = graph.result(visit, func, call, inputs, specs, recorder.inference)
    event = follow(recording, func, call, inputs, specs, state, result, visit=visit, draws=False)
    event.match = never  # `differentiate` looks it up
    return answer(recording, event, func, args, kwargs)


def _shown(recorder: Recorder, visits: Iterable[int]) -> str:
    stages = [visit % recorder.num_stages for visit in sorted(visits)]
    if len(set(stages)) == 1:
        return f"what stage {stages[0]} computes before and after another one"
    return f"what stages {' and '.join(map(str, stages))} compute"


def _way_out(recording: Recording, visits: Mapping[int, Sequence[int]]) -> str:
    recorder = recording.recorder
    modules = [_modules_of(recorder, visits[visit]) for visit in sorted(visits)]
    if len({visit % recorder.num_stages for visit in visits}) == 1:
        meetings = [event for event in recording.event.path() if event.function is MICROBATCHES_MEET]
        if not meetings:
            return "Take the gradients of each part where it is computed"
        return (
            f"All micro-batches met in between, for {meetings[-1].call.args[0]} ({meetings[-1].line}): make that call "
            f"before what is differentiated is computed, or after its gradients are taken"
        )
    named = f" ({'; '.join(map(', '.join, modules))})" if all(modules) else ""
    return f"Put these modules on one stage{named}, or differentiate with respect to what its first module is given"


def _modules_of(recorder: Recorder, numbers: Sequence[int]) -> list[str]:
    """The names of the modules that have some of the module's tensors, in order."""
    names = [recorder.tensors.names[number][0].rpartition(".")[0] for number in numbers]
    return list(dict.fromkeys(name for name in names if name))
