"""Batches under a pipeline: the first stage reads them, the others follow its iteration."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from lightning_pipeline.partition import tree
from lightning_pipeline.partition.tree import Layout
from lightning_pipeline.runtime.transport import Transport
from lightning_pipeline.strategy.lightning_private import sample_indices, set_sample_indices

_END = None


class AnnouncedLoader:
    """The first stage's loader: passes its batches on as they are and tells the other stages of each.

    Everything else is the wrapped loader's.
    """

    def __init__(self, loader: Any, transport: Transport) -> None:
        self._loader = loader
        self._transport = transport

    def __iter__(self) -> Iterator[Any]:
        told: dict[Any, int] = {}
        for number, batch in enumerate(self._loader):
            indices = sample_indices(self._loader)
            self._tell((_describe(batch, told), indices and indices[number]))
            yield batch
        self._tell(_END)

    def _tell(self, message: Any) -> None:
        for peer in range(1, len(self._transport.pipeline_ranks)):
            self._transport.send_object(message, peer)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)


class FollowingLoader:
    """Another stage's loader: yields what each batch looks like, on the meta device, and reads no data."""

    def __init__(self, loader: Any, transport: Transport) -> None:
        self._loader = loader
        self._transport = transport

    def __iter__(self) -> Iterator[Any]:
        known: list[Any] = []
        seen: list[list[int]] = []
        set_sample_indices(self._loader, seen)
        while True:
            message = self._transport.recv_object(0, "the first stage's next batch")
            if message is _END:
                return
            description, indices = message
            seen.append(indices)
            if isinstance(description, int):
                description = known[description]
            else:
                known.append(description)
            layout, metas = description
            yield tree.rebuild(layout, [torch.empty(shape, dtype=dtype, device="meta") for shape, dtype in metas])

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)


class SizedAnnouncedLoader(AnnouncedLoader):
    """An `AnnouncedLoader` of known length."""

    def __len__(self) -> int:
        return len(self._loader)


class SizedFollowingLoader(FollowingLoader):
    """A `FollowingLoader` of known length."""

    def __len__(self) -> int:
        return len(self._loader)


def share_loader(loader: Any, transport: Transport, *, first: bool) -> Any:
    """`loader` for the first stage or for one of the others."""
    try:
        len(loader)
    except (TypeError, NotImplementedError):
        return (AnnouncedLoader if first else FollowingLoader)(loader, transport)
    return (SizedAnnouncedLoader if first else SizedFollowingLoader)(loader, transport)


def _describe(batch: Any, told: dict[Any, int]) -> int | tuple[Layout, list[tuple[tuple[int, ...], torch.dtype]]]:
    """The number of an earlier batch that looked the same, or what this one looks like."""
    tensors, layout = tree.flatten(batch)
    metas = [(tuple(tensor.shape), tensor.dtype) for tensor in tensors]
    key: Any = (layout, tuple(metas))
    try:
        number = told.get(key)
    except TypeError:  # plain values that do not hash: told again each time
        key, number = object(), None
    if number is None:
        told[key] = len(told)
        return layout, metas
    return number
