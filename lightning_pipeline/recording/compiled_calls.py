"""Calls of compiled modules: each is recorded as one function, which its owner runs compiled.

What it gives is inferred by running the module as it was written, on fake tensors. That shows what else it does: a
module that leaves a trace, such as a counter or a buffer that it writes into, would leave it on its owner only. Such a
module runs as it was written, with a warning, and so does one with a stage boundary inside.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.func import functional_call
from torch.overrides import TorchFunctionMode, handle_torch_function

from lightning_pipeline import _torch
from lightning_pipeline.partition import tree
from lightning_pipeline.partition.compiled import (
    ORIGINAL,
    compiled_as_asked,
    compiled_as_written,
    is_compiled,
    is_wrapper,
    plain_name,
)
from lightning_pipeline.partition.overrides import Override, hooks_of
from lightning_pipeline.partition.rng import python_states, set_python_states
from lightning_pipeline.partition.torch_functions import FunctionKind, function_name, is_drawing_of_own, kind_of
from lightning_pipeline.recording.inference import writes_beside
from lightning_pipeline.recording.operation import NumberSlot, TensorSlot, is_atom, take_apart
from lightning_pipeline.recording.python_state import State, Unclear, as_it_was

MAX_STATES = 16
"""The most states of a module; one whose attributes change more often runs as it was written."""
_OVERRIDDEN = ("forward", "_call_impl", "_compiled_call_impl")
_TRACES = (FunctionKind.READS, FunctionKind.PRINTS, FunctionKind.HOOKS, FunctionKind.BACKWARD)
_NONE = object()


class CompiledCall:
    """The call of a compiled module, as a function of its tensors, its Python state and its arguments.

    Args:
        recorder: has the recording that runs as ``current``, and the stages of modules.

    Attributes:
        shaped_by_numbers: the specs of what it gives may depend on any number among its arguments.
        why: why it runs as it was written; empty where it runs compiled.
        num_draws: of the call that was inferred last.
    """

    shaped_by_numbers = True

    def __init__(self, name: str, module: nn.Module, recorder: Any) -> None:
        self.__name__ = f"the call of {plain_name(name)}"
        self.name = plain_name(name)
        self.module = module
        self.why = ""
        self.num_draws = 0
        self._recorder = recorder
        self._inner: nn.Module = getattr(module, ORIGINAL) if is_wrapper(module) else module
        self._modules = list(self._inner.modules())
        self._entry = "_call_impl" if is_wrapper(module) else "_compiled_call_impl"
        self._plain: list[tuple[dict[str, Any], str, Any]] = []
        self._has_own_forward = False  # one of its modules
        self._overrides: list[tuple[dict[str, Any], str, Any, Any]] = []
        self._states: list[tuple[str, State]] = []
        stages = recorder.calls.stages
        self._keys = [
            (stages.exact.get(key), stages.minimum.get(key, 0))
            for key in {*stages.exact, *stages.minimum}
            if key.startswith(f"{name}.")
        ]
        has_key = name in stages.exact or name in stages.minimum
        self._own_stage = (stages.exact.get(name), stages.minimum.get(name, 0)) if has_key else None

    def note_plain(self) -> None:
        """Note what the modules have before a step overrides anything."""
        modules = self._modules if self._inner is self.module else [self.module, *self._modules]
        self._plain = [(vars(m), key, vars(m).get(key, _NONE)) for m in modules for key in _OVERRIDDEN]
        self._has_own_forward = any("forward" in vars(m) for m in self._modules)

    def install(self, override: Override) -> None:
        override(self.module, self._entry, self.of)

    def note_overrides(self) -> None:
        """Note what the step has overridden."""
        self._overrides = [
            (attributes, key, plain, attributes[key])
            for attributes, key, plain in self._plain
            if attributes.get(key, _NONE) is not plain
        ]

    def of(self, *args: Any, **kwargs: Any) -> Any:
        """The module's call, as a mode is to see it."""
        recording = self._recorder.current
        tensors = self._tensors()
        if (
            recording is None
            or self.why
            or not _torch.num_function_modes()
            or not recording.is_ours((list(tensors.values()), args, kwargs))
        ):
            return self._called(args, kwargs)
        try:
            with self._on_its_stage():
                self._check_parts(args, kwargs)
                found = handle_torch_function(self, (), list(tensors.values()), self._key(), args, kwargs)
        except Unclear as error:
            return self._as_written(str(error), args, kwargs)
        draws = recording.event.result.draws
        recording.num_draws += max(draws - 1, 0)
        return found

    def __call__(self, tensors: Sequence[Tensor], key: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        own = self._tensors()
        if not all(tensor is given for tensor, given in zip(own.values(), tensors, strict=True)):
            return self.inferred(tensors, key, args, kwargs)
        state = next(state for known, state in self._states if known == key)
        with self._without_overrides(), as_it_was(self._modules, state), compiled_as_asked():
            return self._call()(*args, **kwargs)

    def seeded(self, seed: Callable[[int], None], first: int) -> Callable[..., Any]:
        """As `__call__`, with the random numbers of draws from number `first` on."""

        def call(*args: Any) -> Any:
            with SeededDraws(seed, first):
                return self(*args)

        return call

    def _call(self) -> Callable[..., Any]:
        plain = next(value for at, key, value in self._plain if at is vars(self.module) and key == self._entry)
        return partial(type(self.module)._call_impl, self.module) if plain is _NONE else plain

    def _called(self, args: Any, kwargs: Any) -> Any:
        """Call the module as without this class."""
        if self._recorder.current is None:
            return self._call()(*args, **kwargs)
        with compiled_as_written():
            return self._call()(*args, **kwargs)

    def _as_written(self, why: str, args: Any, kwargs: Any) -> Any:
        self.why = why
        if self._recorder.warns:
            warnings.warn(f"{self.name} runs as it was written, not compiled: {why}", stacklevel=2)
        return self._called(args, kwargs)

    @contextmanager
    def _on_its_stage(self) -> Iterator[None]:
        """While entered, the stage of the module that runs is this one's."""
        calls = self._recorder.calls
        stage = self._own_stage or calls.stage
        for exact, lowest in self._keys:
            if stage[0] is None or (exact is not None and exact != stage[0]) or lowest > stage[0]:
                raise Unclear("stage_config puts parts of it on stages of their own")
        before, calls.stage = calls.stage, stage
        try:
            yield
        finally:
            calls.stage = before

    def _check_parts(self, args: Any, kwargs: Any) -> None:
        if any(any(hooks_of(m)) for m in {self.module, *self._modules}):
            raise Unclear("it has hooks")
        if self._has_own_forward:
            raise Unclear("a module in it has a forward of its own")
        call = take_apart(self, args, kwargs)
        if not _is_clear((call.args, call.kwargs)):
            raise Unclear("it is given an object")

    def _key(self) -> str:
        for key, known in self._states:
            if known.is_now():
                return key
        state = State(self._modules)
        if len(self._states) == MAX_STATES:
            raise Unclear("its attributes change from call to call")
        key = f"{len(self._states)} {state.key}"
        self._states.append((key, state))
        return key

    def _tensors(self) -> dict[str, Tensor]:
        return {**dict(self._inner.named_parameters()), **dict(self._inner.named_buffers())}

    def inferred(self, tensors: Sequence[Tensor], key: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What it gives on other tensors than its own, as it was written.

        Raises:
            Unclear: that is not all that it does.
        """
        given = dict(zip(self._tensors(), tensors, strict=True))
        before, generators = State(self._modules), python_states()
        versions = [tensor._version for tensor in given.values()]
        recording, self._recorder.current = self._recorder.current, None
        self._recorder.infers = True
        watch = _Watching()
        try:
            with compiled_as_written(), watch:
                found = functional_call(self._inner, given, args, kwargs)
        finally:
            self._recorder.current, self._recorder.infers = recording, False
            is_changed = not before.is_now()
            before.put_back()
            has_drawn = generators != python_states()
            set_python_states(*generators)
        if is_changed:
            raise Unclear("it changes attributes or globals, which only its stage would see")
        if has_drawn:
            raise Unclear("it draws from a generator of Python's or numpy's")
        if versions != [tensor._version for tensor in given.values()]:
            raise Unclear("it writes into its parameters or buffers")
        if not _is_plain(tree.flatten(found)[1]):
            raise Unclear("it gives an object")
        self.num_draws = watch.num_draws
        return found

    @contextmanager
    def _without_overrides(self) -> Iterator[None]:
        """While entered, nothing of this package is in the module, as the compiler would follow it there."""
        for attributes, key, plain, _ in self._overrides:
            if plain is _NONE:
                del attributes[key]
            else:
                attributes[key] = plain
        try:
            yield
        finally:
            for attributes, key, _, override in self._overrides:
                attributes[key] = override


def compiled_calls(root: nn.Module, recorder: Any) -> list[CompiledCall]:
    """The calls of all compiled modules below the root."""
    return [CompiledCall(name, m, recorder) for name, m in root.named_modules() if m is not root and is_compiled(m)]


class _Watching(TorchFunctionMode):
    """Counts draws, and refuses what a call does beside computing."""

    num_draws = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        kind, name = kind_of(func), function_name(func)
        if kind in _TRACES or name.startswith("data.__") or is_drawing_of_own(kwargs):
            raise Unclear(f"it calls {name}, which its stage alone would do")
        if name in ("batch_norm", "instance_norm") and writes_beside(func, take_apart(func, args, kwargs)):
            raise Unclear(f"it writes into the statistics of {name}")
        self.num_draws += kind is FunctionKind.DRAWS
        return func(*args, **kwargs)


class SeededDraws(TorchFunctionMode):
    """Each draw is seeded, as without compilation."""

    def __init__(self, seed: Callable[[int], None], first: int) -> None:
        super().__init__()
        self._seed = seed
        self._number = first

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if kind_of(func) is FunctionKind.DRAWS:
            self._seed(self._number)
            self._number += 1
        return func(*args, **(kwargs or {}))


def _is_clear(template: Any) -> bool:
    """Whether there are no objects in arguments, in which tensors may be, or which may change."""
    kind = type(template)
    if kind in (tuple, list):
        return all(map(_is_clear, template))
    if kind is dict:
        return all(map(_is_clear, template.values()))
    return kind is slice or is_atom(template) or kind in (TensorSlot, NumberSlot)


def _is_plain(layout: tree.Layout) -> bool:
    if isinstance(layout, tree.Constant):
        return is_atom(layout.value)
    if isinstance(layout, (tree.Sequence, tree.Dictionary)):
        return all(map(_is_plain, layout.items))
    return isinstance(layout, tree.Slot)
