"""How many bytes the tensors take that are alive."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from lightning_pipeline.partition.memory import memory_of


class LiveBytes:
    """Counts the bytes of storages from when they are noted until they are freed.

    Args:
        others: tensors whose storages do not count.
    """

    def __init__(self, others: Iterable[Tensor]) -> None:
        self.now = 0
        self._others = set(map(memory_of, others))
        self._alive: dict[int, weakref.ref[Any]] = {}

    def note(self, made: Iterable[Any]) -> None:
        """These may be new; what is no tensor is passed over, as are sparse ones."""
        for tensor in made:
            if not isinstance(tensor, Tensor) or tensor.layout is not torch.strided:
                continue
            storage = tensor.untyped_storage()
            key, num_bytes = storage._cdata, storage.nbytes()
            if key in self._others or key in self._alive:
                continue
            self.now += num_bytes
            self._alive[key] = weakref.ref(storage, partial(self._freed, key, num_bytes))

    def _freed(self, key: int, num_bytes: int, _: object) -> None:
        self.now -= num_bytes
        del self._alive[key]
