"""Recordings: the user's step runs once per micro-batch on placeholders, and its torch calls become events.

Each call is looked up among those that have followed the same calls before (`Event.children`). A known one is answered
by generated code that compares the arguments and hands out a placeholder, which is used again; an unknown one is
inferred on fake tensors and becomes a new child::

    beginning ── embedding ── linear ── relu ── cross_entropy      the step, as ever
                                    └── dropout ── relu ── ...     from epoch 3 on

What every rank has (the batch's small tensors, numbers, masks made of them) is computed everywhere and taken along as
*captured* values, which ranks compare at the end of the step.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from lightning_pipeline.partition.compiled import compiled_as_written
from lightning_pipeline.partition.gradient_hooks import REGISTERING, Handle, Hook
from lightning_pipeline.partition.memory import is_view_of_kept, memory_of, views_of
from lightning_pipeline.partition.ownership import HELD_BY, holders_of
from lightning_pipeline.partition.placeholder import Placeholder, TensorSpec, become, placeholder
from lightning_pipeline.partition.torch_functions import (
    FunctionKind,
    function_name,
    is_drawing_of_own,
    is_laid_out_by_others,
    kind_of,
)
from lightning_pipeline.partition.users_line import users_line
from lightning_pipeline.recording import attention, autograd_calls
from lightning_pipeline.recording.compiled_calls import CompiledCall
from lightning_pipeline.recording.contexts import refuse_transforms
from lightning_pipeline.recording.event import CHECKPOINT_BEGINS, CHECKPOINT_ENDS, MICROBATCHES_MEET, Event
from lightning_pipeline.recording.inference import NOTHING, Result, written_by_array
from lightning_pipeline.recording.matcher import CAPTURED, UNLIKE, EarlierValue, HookTensor, never, torch_state
from lightning_pipeline.recording.operation import Call, TensorSlot, put_together, take_apart, tensors_in
from lightning_pipeline.recording.placing import Placing
from lightning_pipeline.recording.provenance import Provenance
from lightning_pipeline.recording.python_state import Unclear
from lightning_pipeline.recording.recorder import Reads, Recorder
from lightning_pipeline.recording.split_modules import SplitCall, refuse_split, split_calls_seen

_NO_CHANGES = nullcontext()


class Recording(TorchFunctionMode):
    """The recording of one micro-batch's step.

    Args:
        beginning: the event that the step's path begins at.
        reads: brings the data that the step's Python asks for.
        seed_draw: starts the random numbers of a draw, by its number in the step.

    Attributes:
        event: the last one so far.
        captured: tensors and numbers that events have taken along.
        seeds: of the user's own generators that were drawn from.
        overwritten: ids of captured tensors that a stage writes into; what was in them may never have been set.
        hooks: on gradients of its values, in the order in which they were registered.
        retained: values whose gradients are retained.
        has_run_backward: whether the step has run a backward of its own.
        is_simple: whether nothing but reads of values keeps the micro-batch from running with others.
        reads: the values of its own that were read, in order.
        module_reads: likewise the module's tensors that not every rank holds, by number.
        provenance: follows where what it takes along comes from; None where nobody asks.
        floor: the lowest visit on which further events may run.
        delivered: tensors of the batch that every rank has.
        batch_places: what stands for tensors of the batch that only the first rank has.
        batch: the memory of the batch's tensors, which are parts of larger ones that no step sees.
        exposed: memory that numpy knows as well.
        skipped: ends of calls that were answered as a whole, with the event before each, and the one of its result.
        num_aside: torch functions that were met and are no event, but for those that describe tensors.
        attention: the flags that the step has set for attention; None if it has set none.
    """

    def __init__(self, recorder: Recorder, beginning: Event, reads: Reads, seed_draw: Callable[[int], None]) -> None:
        super().__init__()
        self.recorder = recorder
        self.event = self._beginning = beginning
        self.captured: list[Any] = []
        self.seeds: list[int] = []
        self.overwritten: set[int] = set()
        self.num_draws = 0
        self.is_simple = not recorder.has_hooks
        self.reads: list[int] = []
        self.module_reads: list[int] = []
        self.provenance: Provenance | None = None
        self.floor = 0
        self._kept: list[Placeholder] = []
        self._is_over = False
        self._reads = reads
        self._seed_draw = seed_draw
        self._placing: Placing | None = None
        self._tensors = recorder.tensors
        self.hooks: list[Hook] = []
        self.retained: list[tuple[int, Placeholder]] = []
        self.has_run_backward = False
        self._depth = 0  # of checkpointed functions
        self._views: dict[int, list[weakref.ref[Tensor]]] = {}  # tensors that every rank has, by shared memory
        self.batch: set[int] = set()
        self.delivered: list[Tensor] = []
        self.batch_places: list[weakref.ref[Placeholder]] = []
        self.exposed: set[int] = set()
        self._copied = frozenset(memory for memory, tensor in recorder.changing.items() if memory_of(tensor) == memory)
        self._places: dict[int, list[int]] = {}  # among what is captured, by memory, as far as it was looked through
        self._num_looked_through = 0
        recorder.recordings.append(self)
        self.num_modes = 0
        self._arrays: list[tuple[Any, bytes, Placeholder]] = []
        self.skipped: dict[Event, tuple[Event, Event | None]] = {}
        self.num_aside = 0
        self.attention: attention.Flags | None = None

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for child in self.event.children:
            result = child.match(func, args, kwargs, self)
            if result is not UNLIKE:
                self.event = child
                return result
        return self._meet(func, args, kwargs or {})

    @contextmanager
    def running(self) -> Iterator[None]:
        """While the user's step runs."""
        with self.resumed(), self:
            self.num_modes = torch._C._len_torch_function_stack()
            yield
            attention.refuse_left(self.attention)
        self._note_written_arrays()

    @contextmanager
    def resumed(self) -> Iterator[None]:
        """While the user's step, or a part of it, runs: what other code of the process is to know of it."""
        self.recorder.current = self
        calls = self._tensors.split_calls
        try:
            with split_calls_seen(calls) if calls else _NO_CHANGES, compiled_as_written(self.recorder.note_as_written):
                yield
        finally:
            self.recorder.current = None

    @contextmanager
    def entered(self) -> Iterator[None]:
        """While the user's step runs: what its thread is to know of it."""
        with self:
            self.num_modes = torch._C._len_torch_function_stack()
            yield
        self._note_written_arrays()

    def meet(self, what: str, loss: Tensor | None = None) -> int:
        """The step has come to where micro-batches meet. Returns the value that backward is to start from; -1 for none.

        Args:
            loss: what the user calls for the backward of.
        """
        self._note_written_arrays()
        value = self.value_of(loss)
        self._mark(MICROBATCHES_MEET, what, -1 if value is None else value)
        return -1 if value is None else value

    def value_of(self, tensor: Any) -> int | None:
        """The number of the value that a tensor stands for; None for other tensors."""
        is_own = type(tensor) is Placeholder and tensor.recording is self
        return tensor.value if is_own else None

    def home_of(self, value: int) -> int:
        """The visit that makes a value of a path that has ended."""
        program = self.event.program
        assert program is not None
        return program.homes[value]

    def origin(self, value: int) -> int:
        """The first of the values that show the same numbers in one memory, of which this is one."""
        event: Event | None = self.event
        while event is not None and event.parent is not None:
            if value in event.outputs:
                index = event.outputs.index(value)
                spec, shares = event.result.tensors[index], event.result.shares[index]
                base = event.inputs[shares[0]] if shares else None
                if isinstance(base, int) and base >= 0 and spec.shape.numel() == event.specs[shares[0]].shape.numel():  # type: ignore[union-attr]
                    value = base
            event = event.parent
        return value

    def placeholder_for(self, value: int, spec: TensorSpec, what: str) -> Placeholder:
        made = placeholder(spec, what)
        made.value, made.recording = value, self
        return made

    def take_alive(self) -> list[Placeholder]:
        """Placeholders that the user still refers to, in the order of their values. They are not used again."""
        found: dict[int, Placeholder] = {}
        for pool in self._pools():
            for index in range(len(pool)):
                # Those of the pool and of the call.
                if sys.getrefcount(pool[index]) > 2 and pool[index].recording is self:
                    place = pool[index]
                    found[place.value] = place
                    pool[index] = placeholder(place.spec, place.what)
        while self._kept:
            place = self._kept.pop()
            if sys.getrefcount(place) > 2:
                found[place.value] = place
        return [found[value] for value in sorted(found)]

    def values_in_use(self) -> set[int]:
        """Values that the user still refers to, in the middle of a step."""
        of_batch = (reference() for reference in self.batch_places)
        found = {place.value for place in of_batch if type(place) is Placeholder}
        for places in (self._kept, *self._pools()):
            for index in range(len(places)):
                # Those of the list and of the call.
                if sys.getrefcount(places[index]) > 2 and places[index].recording is self:
                    found.add(places[index].value)
        return found

    def _pools(self) -> Iterator[list[Placeholder]]:
        """Placeholders that were handed out, and perhaps others."""
        event: Event | None = self.event
        while event is not None:
            yield event.pool
            skipped = self.skipped.get(event)
            if skipped is None:
                event = event.parent
                continue
            before, maker = skipped
            if maker is not None and maker is not event:
                yield maker.pool
            event = before

    def let_go(self) -> None:
        """The step is over: placeholders, which refer to this, are used again for a long time."""
        self.captured, self._kept = [], []
        self._is_over = True

    def note_batch(self, tensors: Sequence[Tensor]) -> None:
        """Take in what the step is given."""
        self.batch.update(memory_of(tensor) for tensor in tensors if type(tensor) is not Placeholder)

    # -- what matchers ask of it ------------------------------------------------------------------------------------

    def capture(self, tensor: Tensor) -> None:
        if self.provenance is not None:
            self.provenance.note_captured(len(self.captured), tensor)
        if (self.exposed or self._copied) and memory_of(tensor) in (self.exposed | self._copied):
            with torch._C.DisableTorchFunction():
                tensor = tensor.clone()
        self.captured.append(tensor)

    def note_draw(self) -> None:
        self.captured.append(self.num_draws)
        self.num_draws += 1

    def note_draws_within(self, function: Any) -> None:
        """A function of the user's has been called, which may draw more than once."""
        event = self.event
        if event.parent is not None and event.function is function and event.result.draws > 1:
            self.num_draws += event.result.draws - 1
            self.num_aside += 1  # a call with it is not answered as a whole

    def keep(self, place: Placeholder) -> None:
        if not self._is_over:
            self._kept.append(place)

    def change(self, place: Placeholder, spec: TensorSpec) -> None:
        value = place.value
        become(place, placeholder(spec, place.what))
        place.value, place.recording = value, self

    def adopt(self, place: Placeholder, spec: TensorSpec, value: int) -> None:
        """An earlier micro-batch's value has been written into: it is one of this one now."""
        if spec is not place.spec:
            become(place, placeholder(spec, place.what))
        place.value, place.recording = value, self
        self._kept.append(place)

    def absorb(self, tensor: Tensor, spec: TensorSpec, value: int, what: str) -> None:
        """A tensor that every rank had has been written into by a stage: it is a value of that stage now."""
        memory = memory_of(tensor)
        others = [reference() for reference in self._views.get(memory, ())]
        is_seen = any(other is not None and other is not tensor for other in others)
        if memory in self.exposed or is_seen or (memory not in self.batch and is_view_of_kept(tensor)):
            raise NotImplementedError(
                f"what a stage computes is written into a tensor that every rank has and that shares its memory with "
                f"another one, a view or an array, which would not see it ({users_line()}): write into a clone(), or "
                f"where it is a view or the .data of a buffer of the module, into the buffer itself under no_grad"
            )
        with torch._C.DisableTorchFunction():
            # The stage needs what it was before, in an object of its own.
            before = tensor.detach()
        self.overwritten.add(id(before))
        for index, captured in enumerate(self.captured):
            if captured is tensor:
                self.captured[index] = before
        become(tensor, placeholder(spec, what))
        tensor.value, tensor.recording = value, self  # type: ignore[attr-defined]
        self._kept.append(tensor)  # type: ignore[arg-type]

    def register(
        self, how: Callable[[Tensor, Hook], None], tensor: Placeholder, function: Callable[..., Any]
    ) -> Handle:
        """Have a hook run when the gradient of a value comes."""
        self.is_simple = False
        hook = Hook(function, len(self.hooks))
        self.hooks.append(hook)
        self.__torch_function__(how, (), (tensor, hook))
        return Handle(hook)

    # -- calls off the known path -----------------------------------------------------------------------------------

    def inspect(
        self, func: Any, args: Any, kwargs: dict[str, Any]
    ) -> tuple[Call, list[int | HookTensor | EarlierValue | None], list[TensorSpec], tuple[bool, bool, Any]]:
        """A call, of each of its tensors what it stands for and its spec, and the `torch_state`."""
        call = take_apart(func, args, kwargs)
        inputs = [self._input(tensor) for tensor in call.tensors]
        return call, inputs, [TensorSpec.of(tensor) for tensor in call.tensors], torch_state()

    def _meet(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        kind = kind_of(func)
        if kind is FunctionKind.DESCRIBES:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        self.num_aside += 1  # unless it becomes an event, below
        if kind is FunctionKind.GRAD_MODE or kind is FunctionKind.ENTERED:
            return func(*args, **kwargs)
        if self._depth and kind is FunctionKind.WRITES and self._is_modules(args):
            pass  # once more when it is computed again, on its stage
        elif not self.is_ours(args) and not (kwargs and self.is_ours(tuple(kwargs.values()))):
            return self._compute_everywhere(func, kind, args, kwargs)
        if self._tensors.split_calls and type(func) is not SplitCall:
            refuse_split(func, args, kwargs)
        if kind is FunctionKind.PRINTS or kind is FunctionKind.READS:
            return self._read(func, args, kwargs)
        if kind is FunctionKind.CALLS:
            return self._call_back(func, args, kwargs)
        refuse_transforms(func)
        if is_drawing_of_own(kwargs):
            raise NotImplementedError(
                f"{function_name(func)} draws from a generator of the user's for what a stage computes, where the "
                f"other ranks' generators would not advance ({users_line()}): draw with torch.rand or torch.randn of "
                f"that shape and generator, which all ranks do alike, and compute with it, or use the global generator"
            )
        if isinstance(func, torch._ops.HigherOrderOperator):
            raise NotImplementedError(
                f"{function_name(func)} on what a stage computes is not supported within a step, as what it calls "
                f"cannot be told from outside ({users_line()}): write it with torch.where, or plain Python"
            )
        if kind is FunctionKind.HOOKS:
            return autograd_calls.hook(self, func, *args, **kwargs)
        if kind is FunctionKind.BACKWARD:
            return autograd_calls.differentiate(self, func, args, kwargs)
        if func in autograd_calls.GETTERS:
            return autograd_calls.read_gradient(self, *args)
        call, inputs, specs, state = self.inspect(func, args, kwargs)
        result = self.recorder.result(func, call, specs, state)
        depends = result is None
        if type(func) is CompiledCall:
            if result is None:
                raise Unclear("what it gives depends on data")
            if result.writes:
                raise Unclear("it writes into what it is given")
        if result is None:
            if type(func) is SplitCall:
                raise NotImplementedError(
                    f"what {func.__name__} gives cannot be known before it runs ({users_line()}): give modules that "
                    f"parallelize_module has split no data that the shapes of their results depend on"
                )
            result = self._result_on_data(func, call, specs)
        for slot, _ in result.writes:
            if inputs[slot] is CAPTURED and (number := self._tensors.number_of(call.tensors[slot])) is not None:
                inputs[slot] = -1 - number
        if depends:
            for child in self.event.children:
                if child.result == result:
                    found = child.matcher.match(func, args, kwargs, self)
                    if found is not UNLIKE:
                        self.event = child
                        return found
        autograd_calls.refuse_graph_of_earlier(call, inputs, specs, result)
        if func in REGISTERING or func is written_by_array:
            visit = self.placing.home(inputs[0])
            if func is written_by_array and self.placing.last_read(inputs[0]) > visit:  # type: ignore[arg-type]
                raise NotImplementedError(
                    f"an array that shares its memory with what a stage computes is written into, when a later stage "
                    f"has used that already (before {users_line()}): write into .numpy().copy()"
                )
        else:
            visit = self.placing.visit_of(inputs, result, self.recorder.calls.stage, self.floor)
        for value, spec in zip(inputs, specs, strict=True):
            if spec.stride is None and type(value) is int and value >= 0 and self.placing.home(value) != visit:
                raise NotImplementedError(
                    f"a sparse tensor would go from one stage to another, for {function_name(func)} ({users_line()}): "
                    f"make it dense with to_dense() where it is made, or keep both on one stage"
                )
        if type(func) is SplitCall:
            draws = args[1] in func.drawing
        else:
            draws = result.draws > 0 or (kind is FunctionKind.DRAWS and not is_drawing_of_own(kwargs))
        event = self.follow(func, call, inputs, specs, state, result, visit=visit, draws=draws)
        self.num_aside -= 1
        if depends:
            event.match = never
        return self.answer(event, func, args, kwargs)

    def follow(self, func: Any, call: Call, inputs: Any, specs: Any, state: Any, result: Result, **how: Any) -> Event:
        """A new event after the one so far."""
        call_tensors = call.tensors
        for slot, _ in result.writes:
            self._check_written(inputs[slot])
            if inputs[slot] is CAPTURED and memory_of(call.tensors[slot]) not in self.batch:
                views = map(weakref.ref, views_of(call.tensors[slot]))
                self._views.setdefault(memory_of(call.tensors[slot]), []).extend(views)
        event = self.event.followed_by(
            func, call, inputs, specs, state, result, line=users_line(), module_tensors=self._tensors.tensors, **how
        )
        self.placing.note(event)
        if self._beginning in self.recorder.num_events:
            self.recorder.num_events[self._beginning] += 1
        for value, tensor in zip(inputs, call_tensors, strict=True):
            if _is_module_tensor(value) and self._tensors.is_replicated(-1 - value):
                self.recorder.used[memory_of(tensor)] = -1 - value
        written = {-1 - inputs[slot] for slot, _ in result.writes if _is_module_tensor(inputs[slot])}
        if not written <= self._tensors.written:
            self._tensors.written |= written
            self.recorder.forget_paths()
        return event

    def _check_written(self, value: Any) -> None:
        """What was made in a hook is not written into, nor through a view: a step is over on one rank before others."""
        if type(value) is int and value >= 0:
            maker = next((one for one in self.event.path() if value in one.made()), None)
            if maker is None:
                return
            if value in maker.outputs:
                slots: Sequence[int] = maker.result.shares[maker.outputs.index(value)]
            else:
                slots = [slot for slot, _, number in maker.writes if number == value]
            for slot in slots:
                self._check_written(maker.inputs[slot])
        elif isinstance(value, HookTensor):
            raise NotImplementedError(
                f"a tensor that was made in a hook of what one stage holds is written into in a step ({users_line()}): "
                f"make it a buffer of the module, or write into it in a hook"
            )

    def answer(self, event: Event, func: Any, args: Any, kwargs: Any) -> Any:
        found = event.matcher.match(func, args, kwargs, self)
        assert found is not UNLIKE, event.name
        self.event = event
        return found

    # -- what else there is -----------------------------------------------------------------------------------------

    @contextmanager
    def checkpointed(self, stops_early: bool) -> Iterator[None]:
        """Around a checkpointed function."""
        self._mark(CHECKPOINT_BEGINS, stops_early)
        self._depth += 1
        try:
            yield
        finally:
            self._depth -= 1
        self._mark(CHECKPOINT_ENDS)

    def _mark(self, function: Any, *args: Any) -> None:
        """Something to know of the path that is no call: it runs nowhere."""
        for child in self.event.children:
            if child.match(function, args, None, self) is not UNLIKE:
                self.event = child
                return
        call = take_apart(function, args, {})
        event = self.event.followed_by(
            function, call, (), (), torch_state(), NOTHING, visit=-1, draws=False, line=users_line(), module_tensors=()
        )
        self.placing.note(event)
        self.event = event

    @property
    def placing(self) -> Placing:
        """Of the path so far."""
        if self._placing is None or self._placing.end is not self.event:
            self._placing = Placing(self.recorder.num_stages, self._tensors, self.event)
        return self._placing

    def _compute_everywhere(self, func: Any, kind: FunctionKind, args: Any, kwargs: dict[str, Any]) -> Any:
        """What is made of what every rank has is computed on every rank."""
        if kind is FunctionKind.HOOKS and args[0].requires_grad and function_name(func) != "retain_grad":
            raise NotImplementedError(
                f"a hook is registered on the gradient of a tensor that every rank has, which one stage computes "
                f"({users_line()}): register it on what the first module gives, or read the tensor's grad after it"
            )
        if (
            kind is FunctionKind.WRITES
            or kind is FunctionKind.CALLS
            or "out" in kwargs
            or (kind is FunctionKind.DRAWS and function_name(func).endswith("_"))
        ):
            if self.provenance is not None:
                self.provenance.is_known = False
            self._before_write([*tensors_in(args[0] if args else ()), *tensors_in(kwargs.get("out"))])
        draw = None
        if kind is FunctionKind.DRAWS and not is_drawing_of_own(kwargs):
            self._seed_draw(self.num_draws)
            draw = self.num_draws
            self.num_draws += 1
        elif kind is FunctionKind.DRAWS:
            self.seeds.append(kwargs["generator"].initial_seed())
        elif kind is FunctionKind.READS and function_name(func) in (
            "numpy",
            "__array__",
            "untyped_storage",
            "data_ptr",
        ):
            self._before_write(args[:1])
            self.exposed.add(memory_of(args[0]))
        found = func(*args, **kwargs)
        if self.provenance is not None:
            self.provenance.note_call(func, args, kwargs, found, draw)
        if isinstance(found, Tensor) and args and isinstance(args[0], Tensor) and found is not args[0]:
            memory = memory_of(found)
            if memory == memory_of(args[0]):
                self._views.setdefault(memory, []).extend((weakref.ref(found), weakref.ref(args[0])))
        return found

    def _before_write(self, tensors: Sequence[Tensor]) -> None:
        """Every rank is about to write into its own, which stages may have yet to use as they are."""
        for tensor in tensors:
            memory = memory_of(tensor)
            if memory in self._copied:
                continue
            earlier = [one for one in self.recorder.recordings if one is not self]
            number = self.recorder.used.get(memory)
            is_buffer = number is not None and memory_of(self._tensors.tensors[number]) == memory
            if is_buffer or any(one.places_of(memory) for one in earlier):
                self.recorder.note_changing(memory, tensor)
                is_used = is_buffer and any(-1 - number in event.inputs for event in self.event.path())  # type: ignore[operator]
                self.is_simple &= not is_used
                self._reads.finish_before(self, with_own=is_used)
                self.recorder.recordings[:] = [self]
                self._copied |= {memory}
                self.event.children.clear()  # which take a buffer as it is
                self.event.shortcuts = None
            for place in self.places_of(memory):
                with torch._C.DisableTorchFunction():
                    self.captured[place] = self.captured[place].clone()
            self._places.pop(memory, None)

    def places_of(self, memory: int) -> list[int]:
        """Where among what is captured tensors of a memory are."""
        for place in range(self._num_looked_through, len(self.captured)):
            if isinstance(self.captured[place], Tensor):
                self._places.setdefault(memory_of(self.captured[place]), []).append(place)
        self._num_looked_through = len(self.captured)
        return self._places.get(memory, [])

    def _read(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        call = take_apart(func, args, kwargs)
        if kind_of(func) is FunctionKind.PRINTS and type(value := self._input(args[0])) is int:
            self.is_simple = False
            return self._reads.shown(self, value, lambda tensor: func(tensor, *args[1:], **kwargs))
        data = self._data(call)
        with torch._C.DisableTorchFunction():
            found = func(*put_together(call.args, data, call.numbers), **put_together(call.kwargs, data, call.numbers))
        value = self.value_of(args[0]) if args else None
        if value is not None and args[0].device.type == "cpu" and function_name(func) in ("numpy", "__array__"):
            place = self.placeholder_for(value, args[0].spec, args[0].what)
            self._arrays.append((found, found.tobytes(), place))
            self._watch()
        return found

    def _call_back(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """`apply_` and the like: every rank calls the user's function, with each element."""
        call = take_apart(func, args, kwargs)
        data = [one.detach().clone() for one in self._data(call)]
        with torch._C.DisableTorchFunction():
            found = func(*put_together(call.args, data, call.numbers), **put_together(call.kwargs, data, call.numbers))
        return Recording.__torch_function__(self, Tensor.copy_, (), (args[0], found))

    def choose_attention(self, flags: attention.Flags) -> None:
        """Calls of attention to come are to run with these flags."""
        self.attention = flags
        self._watch()

    def _watch(self) -> None:
        """See each call before it is looked up."""
        self.__class__ = _Watching
        self.num_modes = -1

    def _note_written_arrays(self) -> None:
        """Have stages follow what was written into arrays that share memory with their values in one process."""
        arrays, self._arrays = self._arrays, []
        while arrays:
            array, before, place = arrays.pop()
            now = array.tobytes()
            if now != before:
                with torch._C.DisableTorchFunction():
                    content = torch.tensor(array)
                Recording.__torch_function__(self, written_by_array, (), (place, content))
            if sys.getrefcount(array) > 2:  # this variable's and the call's
                self._arrays.append((array, now, place))

    def _result_on_data(self, func: Any, call: Call, specs: Sequence[TensorSpec]) -> Result:
        """What a function gives whose result's specs depend on data."""
        data = self._known_data(func, call, specs)
        if data is None:
            self.is_simple = False
            data = self._data(call)
        with torch._C.DisableTorchFunction():
            return self.recorder.inference.result_on_data(func, call, data, specs)

    def _known_data(self, func: Any, call: Call, specs: Sequence[TensorSpec]) -> list[Tensor] | None:
        """Data that tells the specs of a result without a read: that of what every rank has, where that is enough."""
        if not is_laid_out_by_others(func) or not call.args or type(call.args[0]) is not TensorSlot:
            return None
        laid_out = call.args[0].number
        found = []
        for slot, (tensor, spec) in enumerate(zip(call.tensors, specs, strict=True)):
            if slot == laid_out:
                with torch._C.DisableTorchFunction():
                    found.append(torch.zeros((), dtype=spec.dtype, device=spec.device).expand(spec.shape))
            elif type(tensor) is not Placeholder and self._input(tensor) is CAPTURED:
                found.append(tensor)
            else:
                return None
        return found

    def _data(self, call: Call) -> list[Tensor]:
        """The data of a call's tensors."""
        inputs = [self._input(tensor) for tensor in call.tensors]
        values = [value for value in inputs if type(value) is int and value >= 0]
        held = {
            id(tensor): tensor
            for tensor, value in zip(call.tensors, inputs, strict=True)
            if isinstance(value, HookTensor)
            or (type(value) is int and value < 0 and not self._tensors.is_replicated(-1 - value))
        }
        found: dict[Any, Tensor] = {}
        for tensor, value in zip(call.tensors, inputs, strict=True):
            if type(value) is EarlierValue:
                self.is_simple = False
                [found[id(tensor)]] = self._reads.read(tensor.recording, [tensor.value])  # type: ignore[attr-defined]
        if values:
            self.reads += values
            found.update(zip(values, self._reads.read(self, values), strict=True))
        if held:
            numbers = [self._tensors.number_of(tensor) for tensor in held.values()]
            self.module_reads += [number for number in numbers if number is not None]
            self.is_simple &= None not in numbers
            if not self._tensors.written.isdisjoint(numbers):
                self.is_simple = False
                self._reads.finish_before(self, with_own=True)
            found.update(zip(held, self._reads.read_held(list(held.values())), strict=True))
        return [
            found.get(value if type(value) is int and value >= 0 else id(tensor), tensor)
            for tensor, value in zip(call.tensors, inputs, strict=True)
        ]

    def is_ours(self, values: Any, depth: int = 0) -> bool:
        """Whether a value of a stage, or a tensor that is not on every rank, is among some arguments."""
        for value in values:
            if type(value) is Placeholder:
                return True
            if isinstance(value, Tensor):
                number = self._tensors.number_of(value)
                if HELD_BY in value.__dict__ if number is None else not self._tensors.is_replicated(number):
                    return True
            elif type(value) in (list, tuple) and depth < 3:
                if self.is_ours(value, depth + 1):
                    return True
            elif type(value) is dict and depth < 3 and self.is_ours(value.values(), depth + 1):
                return True
        return False

    def _is_modules(self, args: Any) -> bool:
        """Whether a write is into a tensor of the module."""
        return bool(args) and isinstance(args[0], Tensor) and self._tensors.number_of(args[0]) is not None

    def _input(self, tensor: Tensor) -> int | HookTensor | EarlierValue | None:
        number = self._tensors.number_of(tensor)
        if number is not None:
            is_copied = self._tensors.is_replicated(number) and memory_of(tensor) in self._copied
            return CAPTURED if is_copied else -1 - number
        if type(tensor) is Placeholder and tensor.recording is self:
            return tensor.value
        ranks = holders_of(tensor)
        if ranks is not None:
            if tensor.requires_grad and torch.is_grad_enabled():
                raise NotImplementedError(
                    f"a tensor that was made in a hook of what one stage holds requires a gradient, and is used in a "
                    f"step ({users_line()}): make it a parameter of the module, or detach it"
                )
            return self.recorder.held(ranks)
        if type(tensor) is Placeholder:
            if tensor.recording is None:
                raise NotImplementedError(
                    f"{tensor.what} is not on this rank, and is used in a step ({users_line()}): make it a parameter "
                    f"or buffer of the module"
                )
            return EarlierValue(tensor.recording.home_of(tensor.value))
        return CAPTURED


class _Watching(Recording):
    """A recording from which the user has got arrays, or which has set flags."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self._note_written_arrays()
        return Recording.__torch_function__(self, attention.attending(func, self.attention), types, args, kwargs)


def _is_module_tensor(value: Any) -> bool:
    return type(value) is int and value < 0
