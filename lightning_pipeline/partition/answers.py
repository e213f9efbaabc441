"""Answering events of earlier stages from their records."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from lightning_pipeline.partition import tree
from lightning_pipeline.partition.absent import Absent, AbsentDataError, ValueId, ValueMeta
from lightning_pipeline.partition.hooks import call_hooks
from lightning_pipeline.partition.record import Alias, Event, Opaque


class Answers:
    """Makes the results of events that ran elsewhere, out of absent tensors.

    Args:
        places: what stands for each value in the user's code; grows with every answer.
        modules: modules by name, for what events do inside of leaves.
    """

    def __init__(self, places: dict[ValueId, Tensor], modules: dict[str, nn.Module], device: torch.device) -> None:
        self.places = places
        self._modules = modules
        self._device = device
        self.replaced: list[tuple[str, str, Any]] = []
        """Module, attribute and former value where an event set an attribute inside of a leaf; the last one first."""

    def answer(self, number: int, event: Event, function: Any, args: Any, kwargs: Any) -> Any:
        """The result of `event`, with what it does beside it. `function` is None for calls of modules.

        Raises:
            AbsentDataError: the result is Python data that cannot be sent between processes.
        """
        if event.draws and function is not None:
            _draw_again(function, args, kwargs)
        made: list[Tensor] = []
        arguments = tree.leaves((args, kwargs)) if event.takes_arguments else []
        for index, meta in enumerate(event.tensors):
            tensor: Tensor
            if type(meta) is ValueMeta:
                tensor = Absent.make(meta, self._device, (number, index), event.name)
            else:
                assert isinstance(meta, Alias)
                tensor = self.places[meta.value] if meta.argument is None else arguments[meta.argument]  # type: ignore[index]
            self.places[number, index] = tensor
            made.append(tensor)
        for offset, argument in enumerate(event.writes):
            self.places[number, len(made) + offset] = arguments[argument]
        if event.has_side_effects:
            self._side_effects(event, made, args, kwargs)
        result = tree.rebuild(event.layout, made)
        if type(result) is Opaque:
            raise AbsentDataError(
                f"{event.name} returned {result!r} on its own stage, and that cannot be sent to other stages"
            )
        return result

    def _side_effects(self, event: Event, made: list[Tensor], args: Any, kwargs: Any) -> None:
        holders = list(tree.containers((args, kwargs)))
        for index, layout in event.filled:
            holder, content = holders[index], tree.rebuild(layout, made)
            if isinstance(holder, list):
                holder[:] = content
            else:
                holder.clear()
                holder.update(content)
        for module, attribute, layout in event.attributes:
            self.replaced.insert(0, (module, attribute, getattr(self._modules[module], attribute, None)))
            setattr(self._modules[module], attribute, tree.rebuild(layout, made))
        for module, layout in event.hooked:
            call_hooks(self._modules[module], *tree.rebuild(layout, made))


def _draw_again(function: Any, args: Any, kwargs: Any) -> None:
    """Move the random stream as the owner of the event did: its function on data of the same shapes, for nothing."""

    def stand_in(tensor: Tensor) -> Tensor:
        return torch.ones(tensor.shape, dtype=tensor.dtype, device=tensor.device)

    function(*tree.replace(args, stand_in), **tree.replace(kwargs, stand_in))
