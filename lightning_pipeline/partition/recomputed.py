"""Tensors of a checkpointed function: not kept in its forward, computed again once, and kept until the graph goes.

torch's own checkpointing computes them again in each backward that needs one, and one backward in two parts is many.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import CheckpointError

from lightning_pipeline.partition.random import generators

Metadata = tuple[torch.Size, torch.dtype, torch.device]


class Frame:
    """One call of a checkpointed function.

    Args:
        function: computes it again.
        preserve_random: whether to draw the same random numbers again.
        stop_early: whether to stop computing when all is there.
        check: whether to compare shapes, dtypes and devices.
        context: is entered to compute it again; so is what `inside` makes.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        *,
        preserve_random: bool,
        stop_early: bool,
        check: bool,
        context: AbstractContextManager[Any],
        inside: Callable[[], AbstractContextManager[Any]],
    ) -> None:
        device = next((arg.device for arg in args if isinstance(arg, Tensor) and arg.device.type != "cpu"), None)
        self._function: Callable[..., Any] | None = function
        # Detached, as what the graph saves must not own the graph.
        self._args = tuple(map(_detached, args))
        self._kwargs = kwargs
        self._versions = [arg._version if isinstance(arg, Tensor) else 0 for arg in args]
        self._generators = generators(device or torch.device("cpu")) if preserve_random else []
        self._random = [generator.get_state() for generator in self._generators]
        self._stop_early = stop_early
        self._check = check
        self._contexts = [_autocast(kind) for kind in dict.fromkeys(("cpu", device.type if device else "cpu"))]
        self._contexts += [lambda: context, inside]
        self._places: list[tuple[weakref.ref[Place], Metadata]] = []
        self._num_computed = 0

    def keeping_nothing(self) -> saved_tensors_hooks:
        """While entered, a place is saved for backward where a tensor would be."""
        return saved_tensors_hooks(self._pack, _unpack)

    def compute(self) -> None:
        """Compute the tensors again, and put them in their places."""
        function = self._function
        if function is None:
            raise CheckpointError("a checkpointed function saved another number of tensors when it ran again")
        for arg, version in zip(self._args, self._versions, strict=True):
            if isinstance(arg, Tensor) and arg._version != version:
                raise RuntimeError(
                    f"an input of a checkpointed function, a tensor of shape {tuple(arg.shape)}, was modified in place "
                    "after the call; clone it before"
                )
        states = [generator.get_state() for generator in self._generators]
        try:
            with ExitStack() as stack:
                stack.enter_context(torch.enable_grad())
                for context in self._contexts:
                    stack.enter_context(context())
                for generator, state in zip(self._generators, self._random, strict=True):
                    generator.set_state(state)
                with saved_tensors_hooks(self._put, _same):
                    function(*self._args, **self._kwargs)
        except _AllThere:
            pass
        finally:
            for generator, state in zip(self._generators, states, strict=True):
                generator.set_state(state)
        if self._num_computed != len(self._places):
            raise CheckpointError(
                f"a checkpointed function saved {len(self._places)} tensors for backward, and {self._num_computed} "
                "when it ran again; it has to compute the same each time"
            )
        self._function, self._args, self._kwargs, self._contexts = None, (), {}, []

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
            if self._check and before != _metadata(tensor):
                raise CheckpointError(
                    f"tensor {number} of a checkpointed function was {before}, and {_metadata(tensor)} when it ran "
                    "again; it has to compute the same each time"
                )
            place = reference()
            if place is not None:
                place.put(tensor)
        if self._stop_early and self._num_computed == len(self._places):
            raise _AllThere
        return tensor


class Place:
    """Where a tensor that was not kept goes when it is computed again."""

    __slots__ = ("__weakref__", "_frame", "_tensor")

    def __init__(self, frame: Frame) -> None:
        self._frame: Frame | None = frame
        self._tensor: Tensor | None = None

    def put(self, tensor: Tensor) -> None:
        """The tensor is there."""
        if self._frame is not None:
            self._tensor = tensor

    def get(self) -> Tensor:
        """The tensor."""
        if self._tensor is None:
            if self._frame is None:
                raise RuntimeError("trying to run backward a second time, after saved tensors were freed")
            self._frame.compute()
            assert self._tensor is not None
        return self._tensor

    def let_go(self) -> None:
        """The tensor is not needed any more."""
        self._frame = self._tensor = None


class _AllThere(BaseException):
    """Ends a recomputation. No Exception, so that no handler of the user's catches it."""


def _unpack(place: Place) -> Tensor:
    return place.get()


def _same(tensor: Tensor) -> Tensor:
    return tensor


def _detached(value: Any) -> Any:
    return value.detach().requires_grad_(value.requires_grad) if isinstance(value, Tensor) else value


def _metadata(tensor: Tensor) -> Metadata:
    return tensor.shape, tensor.dtype, tensor.device


def _autocast(device_type: str) -> Callable[[], AbstractContextManager[Any]]:
    """What enters the present autocast state of a kind of device again."""
    enabled, dtype = torch.is_autocast_enabled(device_type), torch.get_autocast_dtype(device_type)
    cached = torch.is_autocast_cache_enabled()
    return lambda: torch.autocast(device_type, dtype=dtype, enabled=enabled, cache_enabled=cached)
