"""One call of the user's between steps: which ranks compute it, with operands from where, and what the others get."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext, suppress
from typing import Any

import torch

from lightning_pipeline import _torch
from lightning_pipeline.hooks.operands import (
    NEEDS_ONLY_SPECS,
    Holders,
    Operands,
    TensorKeys,
    computing_ranks,
    empty_like,
    learns_everywhere,
    set_spec,
)
from lightning_pipeline.partition import tree
from lightning_pipeline.partition.ownership import holders_of
from lightning_pipeline.partition.placeholder import Placeholder, TensorSpec, placeholder
from lightning_pipeline.partition.torch_functions import (
    FunctionKind,
    function_name,
    is_drawing_of_own,
    is_quantizing,
    kind_of,
)
from lightning_pipeline.partition.users_code import users_line
from lightning_pipeline.recording.matcher import torch_state
from lightning_pipeline.recording.operation import Call, put_together
from lightning_pipeline.recording.recorder import Recorder


def is_draw(func: Any, kwargs: dict[str, Any]) -> bool:
    """Whether a call draws random numbers from a global generator."""
    return kind_of(func) is FunctionKind.DRAWS and not is_drawing_of_own(kwargs)


class PlacedCalls:
    """Runs calls on the ranks that own their operands. All ranks must make the same."""

    def __init__(self, recorder: Recorder, operands: Operands, keys: TensorKeys, rank: int) -> None:
        self._recorder, self._operands, self._keys, self._rank = recorder, operands, keys, rank

    def compute(self, func: Any, call: Call, name: str, kind: FunctionKind) -> Any:
        """The holders compute the call; the others get placeholders."""
        held = [holders_of(tensor) for tensor in call.tensors]
        if kind is FunctionKind.COMPUTES and torch.is_grad_enabled() and learns_everywhere(held, call.tensors):
            return self.run(func, call, self._operands.gather_everywhere(call.tensors, name))
        if is_quantizing(func):  # of which fake tensors know nothing
            return self.run(func, call, self._operands.gather_everywhere(call.tensors, name))
        specs = [TensorSpec.of(tensor) for tensor in call.tensors]
        with _torch.dispatch_modes_taken_off() if _torch.num_dispatch_modes() else nullcontext():
            result = self._recorder.result(func, call, specs, torch_state())
        if result is None:
            # The spec of the result depends on data.
            if kind is FunctionKind.WRITES:  # by a mask, as in x[x < 0] = y
                here = self._operands.gather(call.tensors, [held[0]] * len(held), name)
                return self.run(func, call, here) if self.is_among(held[0]) else call.tensors[0]
            return self.run(func, call, self._operands.gather_everywhere(call.tensors, name))
        bound = [slot for slot, _ in result.writes] + [slot for shared in result.shares for slot in shared]
        where = computing_ranks(held, specs, bound)
        needed: list[Holders] = [where] * len(held)
        if name in NEEDS_ONLY_SPECS:  # whoever holds the first tensor has all that is needed
            where = held[0]
            needed = [where, *([()] * (len(held) - 1))]
        here = self._operands.gather(call.tensors, needed, name)
        if self.is_among(where):
            found = self.run(func, call, here)
            # Written into tensors that all ranks hold, or a result that is the same on all: nothing to take note of.
            if where is None and all(here[slot] is tensor for slot, tensor in enumerate(call.tensors)):
                return found
            made, layout = tree.flatten(found)
            for index, known in enumerate(result.tensors):
                if isinstance(known, int):  # the result is an operand, which may have come from another rank
                    made[index] = call.tensors[known]
                elif made[index].shape != known.shape or made[index].dtype is not known.dtype:
                    given = TensorSpec.of(made[index])
                    raise RuntimeError(f"{name} gave {given} where {known} was expected ({users_line()})")
                else:
                    self._keys.note(made[index], where)
            return tree.rebuild(layout, made)
        if _torch.num_dispatch_modes():  # as the counter of operations that Lightning's summary of the model enters
            with suppress(Exception):
                self.run(func, call, self._recorder.inference.fakes(specs))
        # What the recorder expects is made here from placeholders, in the same order as on the ranks that compute.
        for slot, spec in result.writes:
            set_spec(call.tensors[slot], spec)
        return tree.rebuild(
            result.layout,
            [
                call.tensors[known] if isinstance(known, int) else self._keys.note(placeholder(known, name), where)
                for known in result.tensors
            ],
        )

    def run(self, func: Any, call: Call, tensors: Sequence[Any]) -> Any:
        """Run the call on data."""
        args, kwargs = put_together(call.args, tensors, call.numbers), put_together(call.kwargs, tensors, call.numbers)
        with _torch.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)

    def is_among(self, holders: Holders) -> bool:
        return holders is None or self._rank in holders

    def draw(self, func: Any, call: Call) -> Any:
        """All ranks draw, so that their generators stay alike; the holders keep what is drawn."""
        name = function_name(func)
        held = [holders_of(tensor) for tensor in call.tensors]
        if name in NEEDS_ONLY_SPECS:
            here = [empty_like(tensor) if type(tensor) is Placeholder else tensor for tensor in call.tensors]
        else:
            here = self._operands.gather_everywhere(call.tensors, name)
        made, layout = tree.flatten(self.run(func, call, here))
        for index, tensor in enumerate(made):
            slot = next((slot for slot, operand in enumerate(here) if operand is tensor), None)
            if slot is not None:  # drawn in place
                made[index] = call.tensors[slot]
            elif name in NEEDS_ONLY_SPECS and held[0] is not None:
                if not self.is_among(held[0]):
                    made[index] = tensor = placeholder(TensorSpec.of(tensor), name)
                self._keys.note(tensor, held[0])
        return tree.rebuild(layout, made)
