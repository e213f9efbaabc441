"""Draws of random numbers in hooks: all ranks draw, so that their generators stay alike."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lightning_pipeline.hooks.operands import NEEDS_ONLY_SPECS, Holders, Operands, TensorKeys, empty_like
from lightning_pipeline.partition import tree
from lightning_pipeline.partition.ownership import holders_of
from lightning_pipeline.partition.placeholder import Placeholder, TensorSpec, placeholder
from lightning_pipeline.partition.torch_functions import FunctionKind, function_name, is_drawing_of_own, kind_of
from lightning_pipeline.recording.operation import Call


def is_draw(func: Any, kwargs: dict[str, Any]) -> bool:
    """Whether a call draws random numbers from a global generator."""
    return kind_of(func) is FunctionKind.DRAWS and not is_drawing_of_own(kwargs)


def drawn_by_all(
    func: Any,
    call: Call,
    operands: Operands,
    keys: TensorKeys,
    run: Callable[[Any, Call, list[Any]], Any],
    is_among: Callable[[Holders], bool],
) -> Any:
    """The result of a call that draws, of which the holders of its operand keep what is drawn.

    Args:
        run: runs the call on data.
        is_among: whether this rank is among these holders.
    """
    name = function_name(func)
    held = [holders_of(tensor) for tensor in call.tensors]
    if name in NEEDS_ONLY_SPECS:
        here = [empty_like(tensor) if type(tensor) is Placeholder else tensor for tensor in call.tensors]
    else:
        here = operands.gather_everywhere(call.tensors, name)
    made, layout = tree.flatten(run(func, call, here))
    for index, tensor in enumerate(made):
        slot = next((slot for slot, operand in enumerate(here) if operand is tensor), None)
        if slot is not None:  # drawn in place
            made[index] = call.tensors[slot]
        elif name in NEEDS_ONLY_SPECS and held[0] is not None:
            if not is_among(held[0]):
                made[index] = tensor = placeholder(TensorSpec.of(tensor), name)
            keys.note(tensor, held[0])
    return tree.rebuild(layout, made)
