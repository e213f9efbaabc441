"""Activation checkpointing: tensors that are recomputed once in backward and kept until the graph is freed.

torch's own checkpointing computes them again in each backward that needs one, and one backward in two parts is many.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import CheckpointError

from lightning_pipeline import _torch

Metadata = tuple[torch.Size, torch.dtype, torch.device]


class Frame:
    """One run of a part of a step whose tensors are not kept.

    Args:
        function: computes it again, from `args` and what `add_input` is given.
        stop_early: whether to stop computing when all is there; also an attribute.
    """

    def __init__(self, function: Callable[..., Any], args: Sequence[Any] = (), *, stop_early: bool) -> None:
        self._function: Callable[..., Any] | None = function
        self._inputs: list[Any] = []
        self._versions: list[tuple[Tensor, int]] = []
        self.stop_early = stop_early
        self._places: list[tuple[weakref.ref[Place], Metadata]] = []
        self._num_computed = 0
        for arg in args:
            self.add_input(arg)

    def inputs(self) -> list[Tensor]:
        """The tensors that it computes from."""
        return [value for value in self._inputs if isinstance(value, Tensor)]

    def put_away(self, tensor: Tensor, saved: Saved) -> None:
        """Hold another form of an input, which checks the version itself, until the tensors are computed again."""
        self._versions = [(value, version) for value, version in self._versions if value is not tensor]
        self._inputs = [_SavedInput(saved, tensor.requires_grad) if one is tensor else one for one in self._inputs]

    def add_input(self, value: Any) -> int:
        """Take in one more of what the function computes from. Returns its place among the function's arguments."""
        if isinstance(value, Tensor):
            # Detached, as what the graph saves must not own the graph.
            value = value.detach().requires_grad_(value.requires_grad)
            self._versions.append((value, value._version))
        self._inputs.append(value)
        return len(self._inputs) - 1

    def keeping_nothing(self) -> saved_tensors_hooks:
        """While entered, a place is saved for backward where a tensor would be."""
        return saved_tensors_hooks(self._pack, Place.get)

    def compute(self) -> None:
        """Compute the tensors again, and put them in their places."""
        function = self._function
        if function is None:
            raise CheckpointError("a checkpointed function saved another number of tensors when it ran again")
        for value, version in self._versions:
            if value._version != version:
                raise RuntimeError(
                    f"an input of a checkpointed function, a tensor of shape {tuple(value.shape)}, was modified in "
                    "place after the call; clone it before"
                )
        before = torch.is_grad_enabled()
        try:
            with torch.enable_grad(), saved_tensors_hooks(self._put, lambda tensor: tensor):
                function(*(one.get() if isinstance(one, _SavedInput) else one for one in self._inputs))
        except _AllThere:
            pass
        finally:
            _torch.set_grad_enabled(before)
        if self._num_computed != len(self._places):
            raise CheckpointError(
                f"a checkpointed function saved {len(self._places)} tensors for backward, and {self._num_computed} "
                "when it ran again; it has to compute the same each time"
            )
        self._function, self._inputs, self._versions = None, [], []

    def _pack(self, tensor: Tensor) -> Place:
        place = Place(self)
        self._places.append((weakref.ref(place), _metadata(tensor)))
        return place

    def _put(self, tensor: Tensor) -> Tensor:
        number = self._num_computed
        self._num_computed += 1
        tensor = tensor.detach()
        if number < len(self._places):
            reference, before = self._places[number]
            if before != _metadata(tensor):
                raise CheckpointError(
                    f"tensor {number} of a checkpointed function was {before}, and {_metadata(tensor)} when it ran "
                    "again; it has to compute the same each time"
                )
            place = reference()
            if place is not None:
                place.put(tensor)
        if self.stop_early and self._num_computed == len(self._places):
            raise _AllThere
        return tensor


class Saved:
    """What autograd saves in place of a tensor."""

    __slots__ = ()

    def get(self) -> Tensor:
        raise NotImplementedError

    def let_go(self) -> None:
        """The tensor is not needed any more."""
        raise NotImplementedError


class _SavedInput(NamedTuple):
    saved: Saved
    requires_grad: bool

    def get(self) -> Tensor:
        return self.saved.get().requires_grad_(self.requires_grad)


class Place(Saved):
    """Where a tensor that was not kept goes when it is computed again."""

    __slots__ = ("__weakref__", "_tensor", "frame")

    def __init__(self, frame: Frame) -> None:
        self.frame: Frame | None = frame
        self._tensor: Tensor | None = None

    def put(self, tensor: Tensor) -> None:
        """The tensor is there."""
        if self.frame is not None:
            self._tensor = tensor

    def get(self) -> Tensor:
        if self._tensor is None:
            if self.frame is None:
                raise RuntimeError("trying to run backward a second time, after saved tensors were freed")
            self.frame.compute()
            assert self._tensor is not None
        return self._tensor

    def let_go(self) -> None:
        self.frame = self._tensor = None


class _AllThere(BaseException):
    """Ends a recomputation. No Exception, so that no handler of the user's catches it."""


def _metadata(tensor: Tensor) -> Metadata:
    return tensor.shape, tensor.dtype, tensor.device


def recomputed(function: Callable[..., Any], args: tuple[Any, ...], stop_early: bool) -> Any:
    """Call a function whose tensors are computed again in backward."""
    with Frame(function, args, stop_early=stop_early).keeping_nothing():
        return function(*args)
