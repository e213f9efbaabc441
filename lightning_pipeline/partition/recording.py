"""Recording: the user's step runs once a micro-batch, on placeholders, and leaves behind what there is to compute."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from lightning_pipeline.partition import tree
from lightning_pipeline.partition.event import Event
from lightning_pipeline.partition.functions import Kind, function_name, kind_of
from lightning_pipeline.partition.inference import Inference, Result
from lightning_pipeline.partition.matcher import CAPTURED, UNLIKE, autocast_state
from lightning_pipeline.partition.operation import Call, key_of, take_apart
from lightning_pipeline.partition.placeholder import Look, Placeholder, become, placeholder
from lightning_pipeline.partition.placing import Placing
from lightning_pipeline.partition.users_line import users_line


class ModuleTensors:
    """A module's parameters and buffers, by number.

    Attributes:
        tensors: what is in the module now, on this rank: data, or a placeholder.
        names: all names of each.
        holders: the stages that hold each; None for one that every rank has, as no step has used it, or as it is a
            buffer that no step has written.
    """

    def __init__(self, module: torch.nn.Module) -> None:
        self.tensors: list[Tensor] = []
        self.names: list[list[str]] = []
        self.holders: list[set[int] | None] = []
        self.is_buffer: list[bool] = []
        self._numbers: dict[int, int] = {}
        for is_buffer, named in (
            (False, module.named_parameters(remove_duplicate=False)),
            (True, module.named_buffers(remove_duplicate=False)),
        ):
            for name, tensor in named:
                number = self._numbers.get(id(tensor))
                if number is None:
                    number = self._numbers[id(tensor)] = len(self.tensors)
                    self.tensors.append(tensor)
                    self.names.append([])
                    self.holders.append(None)
                    self.is_buffer.append(is_buffer)
                self.names[number].append(name)

    def number_of(self, tensor: Tensor) -> int | None:
        """None for tensors that are not the module's."""
        number = self._numbers.get(id(tensor))
        return number if number is not None and self.tensors[number] is tensor else None

    def is_replicated(self, number: int) -> bool:
        """Whether every rank computes with it: a buffer that only the code that all ranks run has written so far."""
        return self.is_buffer[number] and self.holders[number] is None


class Recorder:
    """What the recordings of one kind of step have in common.

    Args:
        tensors: the module's.
        num_stages: virtual stages along the data.
    """

    def __init__(self, tensors: ModuleTensors, num_stages: int) -> None:
        self.tensors = tensors
        self.num_stages = num_stages
        self.beginnings: dict[Any, Event] = {}
        self.inference = Inference()
        self._results: dict[Any, Result | None] = {}

    def beginning(self, key: Any, num_values: int) -> Event:
        found = self.beginnings.get(key)
        if found is None:
            found = self.beginnings[key] = Event.beginning(num_values, b"")
        return found

    def result(self, function: Any, call: Call, looks: Sequence[Look], state: tuple[bool, bool, Any]) -> Result | None:
        key = (function, key_of(call.args), key_of(call.kwargs), tuple(looks), state)
        if key not in self._results:
            self._results[key] = self.inference.result(function, call, looks)
        return self._results[key]


class Recording(TorchFunctionMode):
    """One micro-batch's.

    Attributes:
        event: the last one so far.
        captured: tensors and numbers that events have taken along.
        stage: of the module that is running, where a key names one; the lowest that it may have, where that is known.
    """

    def __init__(self, recorder: Recorder, beginning: Event) -> None:
        super().__init__()
        self.recorder = recorder
        self.event = beginning
        self.captured: list[Any] = []
        self.stage: tuple[int | None, int] = (None, 0)
        self.num_draws = 0
        self.kept: list[Placeholder] = []
        self._placing: Placing | None = None
        self._tensors = recorder.tensors

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for child in self.event.children:
            result = child.match(func, args, kwargs, self)
            if result is not UNLIKE:
                self.event = child
                return result
        return self._meet(func, args, kwargs or {})

    # -- what matchers ask of it ------------------------------------------------------------------------------------

    def capture(self, tensor: Tensor) -> None:
        self.captured.append(tensor)

    def note_draw(self) -> None:
        self.captured.append(self.num_draws)
        self.num_draws += 1

    def keep(self, place: Placeholder) -> None:
        self.kept.append(place)

    def change(self, place: Placeholder, look: Look) -> None:
        value = place.value
        become(place, placeholder(look, place.what))
        place.value, place.recording = value, self

    def absorb(self, tensor: Tensor, look: Look, value: int, what: str) -> None:
        become(tensor, placeholder(look, what))
        tensor.value, tensor.recording = value, self  # type: ignore[attr-defined]
        self.kept.append(tensor)  # type: ignore[arg-type]

    # -- calls off the known path -----------------------------------------------------------------------------------

    def _meet(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        kind = kind_of(func)
        if kind is Kind.DESCRIBES:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        if kind is Kind.GRAD_MODE:
            return func(*args, **kwargs)
        if not self._is_ours(args) and not (kwargs and self._is_ours(tuple(kwargs.values()))):
            return func(*args, **kwargs)
        call = take_apart(func, args, kwargs)
        inputs = [self._input(tensor) for tensor in call.tensors]
        looks = [Look.of(tensor) for tensor in call.tensors]
        state = (torch.is_grad_enabled(), torch.is_inference_mode_enabled(), autocast_state())
        result = self.recorder.result(func, call, looks, state)
        if result is None:
            raise NotImplementedError(f"{function_name(func)} {users_line()}")
        if self._placing is None:
            self._placing = Placing(self.recorder.num_stages, self._tensors, self.event)
        visit = self._placing.visit_of(inputs, result, self.stage)
        event = self.event.followed_by(
            func,
            call,
            inputs,
            looks,
            state,
            result,
            visit=visit,
            draws=kind is Kind.DRAWS,
            line=users_line(),
            module_tensors=self._tensors.tensors,
        )
        self._placing.note(event)
        found = event.match(func, args, kwargs, self)
        assert found is not UNLIKE, event.name
        self.event = event
        return found

    def _is_ours(self, values: Any, depth: int = 0) -> bool:
        """Whether a value of a stage, or a tensor that is not on every rank, is among some arguments."""
        for value in values:
            if type(value) is Placeholder:
                return True
            if isinstance(value, Tensor):
                number = self._tensors.number_of(value)
                if number is not None and not self._tensors.is_replicated(number):
                    return True
            elif type(value) in (list, tuple) and depth < 3 and self._is_ours(value, depth + 1):
                return True
        return False

    def _input(self, tensor: Tensor) -> int | None:
        if type(tensor) is Placeholder and tensor.recording is not None:
            assert tensor.recording is self
            return tensor.value
        number = self._tensors.number_of(tensor)
        return CAPTURED if number is None else -1 - number
