"""What ranks call a tensor that not all of them hold."""

from __future__ import annotations

from typing import Any
from weakref import WeakValueDictionary

from torch import Tensor, nn

from lightning_pipeline.partition.module_tensors import ModuleTensors
from lightning_pipeline.partition.ownership import holders_of, note_holders

Holders = tuple[int, ...] | None
"""The ranks that hold a tensor; None for all."""

_KEY = "_key"
"""The attribute of a tensor that was made in a hook."""


class TensorKeys:
    """Numbers, alike on all ranks, of tensors that hooks make: from 0 on; and of the module's tensors: below 0.

    Args:
        tensors: the module's.
    """

    def __init__(self, tensors: ModuleTensors) -> None:
        self._tensors = tensors
        self._made: WeakValueDictionary[int, Tensor] = WeakValueDictionary()
        self._held: list[Tensor] | None = None
        self._num_made = 0

    def note(self, tensor: Tensor, holders: Holders) -> Tensor:
        """Take note of a tensor, or its placeholder, that was made just now. All ranks must call it."""
        note_holders(tensor, holders)
        if holders is not None:
            tensor.__dict__[_KEY] = self._num_made
            self._made[self._num_made] = tensor
            self._num_made += 1
            if self._held is not None:
                self._held.append(tensor)
        return tensor

    def hold(self) -> None:
        """Keep what hooks have made until `let_go`: another rank may need what this one is done with."""
        self._held = list(self._made.values())

    def let_go(self) -> None:
        """Keep no more than others do."""
        self._held = None

    def kept(self) -> dict[int, Tensor]:
        """What hooks have made that is still there, and that some ranks hold, by its latest key."""
        return {key: tensor for key, tensor in self._made.items() if self.key_of(tensor) == key}

    def key_of(self, tensor: Tensor) -> int | None:
        """The key of a tensor; None where all ranks hold it, or it was not noted."""
        if holders_of(tensor) is None:
            return None
        number = self._tensors.number_of(tensor)
        return tensor.__dict__.get(_KEY) if number is None else -1 - number

    def tensor_of(self, key: int) -> Tensor | None:
        """The tensor of a key; None where it is gone."""
        return self._made.get(key) if key >= 0 else self._tensors.tensors[-1 - key]


def copy_of(tensor: Tensor, memo: dict[int, Any]) -> Any:
    """A deep copy of a tensor that is here, which has no key yet."""
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(tensor.detach().clone(), tensor.requires_grad)
    copied = Tensor.__deepcopy__(tensor, memo)
    copied.__dict__.pop(_KEY, None)
    return copied
