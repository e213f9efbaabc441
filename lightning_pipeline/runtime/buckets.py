"""Buckets of gradients, each summed over replicas by one collective."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Hashable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_pipeline.runtime.backend_rules import all_reduce


class Bucket:
    """Tensors of one dtype and device that travel in one flat tensor, followed by a flag each: one if it is there.

    Args:
        places: the tensors' numbers, for the caller.
        likes: tensors of their shapes, memory formats, dtype and device.
    """

    def __init__(self, places: Sequence[int], likes: Sequence[Tensor]) -> None:
        self.places = tuple(places)
        self.dtype = likes[0].dtype
        self.device = likes[0].device
        self.numel = 0
        self._slices: list[tuple[torch.Size, tuple[int, ...], int]] = []
        for like in likes:
            dense = torch.empty_like(like, device="meta")  # its memory format, without holes
            self._slices.append((dense.shape, dense.stride(), self.numel))
            self.numel += dense.numel()

    def empty(self) -> tuple[Tensor, list[Tensor]]:
        """Memory for the tensors and their flags, and each tensor's slice of it."""
        flat = torch.empty(self.numel + len(self.places), dtype=self.dtype, device=self.device)
        return flat, [flat.as_strided(shape, stride, offset) for shape, stride, offset in self._slices]


class Sum:
    """A bucket on its way: the sum of what all ranks of a group put in, from its start.

    Args:
        tensors: one for each place, or None, which counts as zeros.
        divisor: the tensors are divided by it beforehand.
        timed: note when it ends, for `end`.

    Attributes:
        start: when it was started (`time.perf_counter`).
        end: when the collective was over on CPU; elsewhere, when `wait` returned.

    Raises:
        RuntimeError: the group failed.
    """

    def __init__(
        self,
        bucket: Bucket,
        tensors: Sequence[Tensor | None],
        group: dist.ProcessGroup | None,
        *,
        divisor: int = 1,
        timed: bool = False,
    ) -> None:
        self.bucket = bucket
        self.start, self.end = time.perf_counter(), math.inf
        flat, self._slices = bucket.empty()
        self.values, self._flags = flat[: bucket.numel], flat[bucket.numel :].fill_(1)
        self._absent = [index for index, tensor in enumerate(tensors) if tensor is None]
        for index in self._absent:
            self._slices[index].zero_()
            self._flags[index].zero_()
        there = [tensor for tensor in tensors if tensor is not None]
        if there:
            into = [view for view, tensor in zip(self._slices, tensors, strict=True) if tensor is not None]
            torch._foreach_copy_(into, there)
        if divisor != 1:
            self.values.div_(divisor)
        work = all_reduce(flat, group=group)
        self._work: dist.Work | None = work
        if timed and flat.device.type == "cpu":
            work.get_future().add_done_callback(self._ended)

    def wait(self) -> None:
        """Until `values` are the sums; on an accelerator the current stream waits, not the host."""
        work, self._work = self._work, None
        assert work is not None
        try:
            work.wait()
        finally:
            del work  # in a traceback it would keep the group's connections open
        self.end = min(self.end, time.perf_counter())

    def results(self) -> list[Tensor | None]:
        """After `wait`: each slice, or None for what no rank put in."""
        results: list[Tensor | None] = list(self._slices)
        if self._absent:  # otherwise the host need not look at what is on the device
            flags = self._flags.tolist()
            for index in self._absent:
                if not flags[index]:
                    results[index] = None
        return results

    def _ended(self, _: torch.futures.Future) -> None:
        self.end = time.perf_counter()


def into_buckets(places: Sequence[int], likes: Sequence[Tensor], bucket_bytes: int) -> list[Bucket]:
    """Tensors of a kind in buckets of up to `bucket_bytes`, in the order given; a larger tensor has its own."""
    filling: dict[Hashable, list[int]] = {}
    sizes: Counter[Hashable] = Counter()
    full: list[list[int]] = []
    for index, like in enumerate(likes):
        kind, size = (like.dtype, like.device), like.numel() * like.element_size()
        if kind in filling and sizes[kind] + size > bucket_bytes:
            full.append(filling.pop(kind))
            sizes[kind] = 0
        filling.setdefault(kind, []).append(index)
        sizes[kind] += size
    found = sorted([*full, *filling.values()], key=lambda indices: indices[-1])  # as they become complete
    return [Bucket([places[index] for index in indices], [likes[index] for index in indices]) for indices in found]
