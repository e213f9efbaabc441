"""Absent tensors: what a stage holds in place of the values that other stages compute."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_pipeline.partition.metadata import users_line

ValueId = tuple[int, int]
"""(number of the event, number of the tensor in its result). Tensors of the batch have event number -1."""


class AbsentDataError(RuntimeError):
    """Data of a value was needed on a stage that does not have it."""


class ValueMeta(NamedTuple):
    """What an absent tensor looks like."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool

    @staticmethod
    def of(tensor: Tensor) -> ValueMeta:
        return ValueMeta(tuple(tensor.shape), tuple(tensor.stride()), tensor.dtype, tensor.requires_grad)


class Absent(Tensor):
    """A tensor with shape, strides, dtype and device, and no data.

    Functions of torch never see its data: between modules a mode answers for them from the record, and anything that
    gets past the mode ends in `__torch_dispatch__`, which raises. When the stage begins that uses the value, the very
    same Python object is turned into the received tensor (`fill`), wherever the user's code has put it.
    """

    value: ValueId
    origin: str

    @staticmethod
    def make(meta: ValueMeta, device: torch.device, value: ValueId, origin: str) -> Absent:
        made = Tensor._make_wrapper_subclass(
            Absent,
            meta.shape,
            strides=meta.stride,
            dtype=meta.dtype,
            device=device,
            requires_grad=meta.requires_grad,
        )
        made.value = value
        made.origin = origin
        return made

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        absent = next((item for item in torch.utils._pytree.tree_leaves((args, kwargs)) if isinstance(item, cls)), None)
        origin = absent.origin if absent is not None else "an earlier stage"
        raise AbsentDataError(
            f"{func} needs the data of {origin!r}, which is not on this stage: it was not used here when a micro-batch "
            f"of this structure was first seen, and only what was used is sent. Use it in every step ({users_line()})"
        )

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"Absent(shape={tuple(self.shape)}, dtype={self.dtype}, result of {self.origin})"

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise AbsentDataError(f"the result of {self.origin} is not on this stage and cannot be copied or saved from it")

    __deepcopy__ = None  # type: ignore[assignment]


def fill(place: Tensor, data: Tensor) -> Tensor:
    """Turn the Python object `place` into the tensor `data`, which must have no other owner. Returns `place`."""
    torch._C._swap_tensor_impl(place, data)
    if type(place) is Absent:
        place.__class__ = Tensor  # type: ignore[assignment]
        place.__dict__.clear()
    return place
