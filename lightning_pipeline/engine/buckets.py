"""Buckets: tensors that replicas reduce as one flat tensor."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Hashable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_pipeline import _torch
from lightning_pipeline.runtime.backends import all_reduce


class Bucket:
    """Tensors of one dtype and device that are reduced as one flat tensor.

    A flag for each tensor follows them: 1 if the tensor is present.

    Args:
        places: the caller's numbers of the tensors.
        likes: tensors with the same shapes, memory formats, dtype and device.
    """

    def __init__(self, places: Sequence[int], likes: Sequence[Tensor]) -> None:
        self.places = tuple(places)
        self.dtype = likes[0].dtype
        self.device = likes[0].device
        self.numel = 0
        self._slices: list[tuple[torch.Size, tuple[int, ...], int]] = []
        for like in likes:
            dense = torch.empty_like(like, device="meta")  # the same memory format, but dense
            self._slices.append((dense.shape, dense.stride(), self.numel))
            self.numel += dense.numel()

    def empty(self) -> tuple[Tensor, list[Tensor]]:
        """Allocate the flat tensor. Returns it, and each tensor's view of it."""
        flat = torch.empty(self.numel + len(self.places), dtype=self.dtype, device=self.device)
        return flat, [flat.as_strided(shape, stride, offset) for shape, stride, offset in self._slices]


class BucketReduction:
    """A running all-reduce (sum) of a bucket over a group.

    Args:
        tensors: one for each place; None counts as zeros.
        divisor: divides the tensors before they are summed.
        timed: record when the collective ends on CPU, for `end`.

    Attributes:
        start: when the all-reduce was started (`time.perf_counter`).
        end: when the collective ended if `timed` on CPU; else when `wait` returned.

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
        present = [tensor for tensor in tensors if tensor is not None]
        if present:
            into = [view for view, tensor in zip(self._slices, tensors, strict=True) if tensor is not None]
            _torch.foreach_copy_(into, present)
        if divisor != 1:
            self.values.div_(divisor)
        work = all_reduce(flat, group=group)
        self._work: dist.Work | None = work
        if timed and flat.device.type == "cpu":
            work.get_future().add_done_callback(self._ended)

    def wait(self) -> None:
        """Wait until `values` hold the sums; on an accelerator the current stream waits, not the host."""
        work, self._work = self._work, None
        assert work is not None
        try:
            work.wait()
        finally:
            del work  # a traceback that refers to it would keep the group's connections open
        self.end = min(self.end, time.perf_counter())

    def results(self) -> list[Tensor | None]:
        """After `wait`: the sum of each tensor; None if no rank had it."""
        results: list[Tensor | None] = list(self._slices)
        if self._absent:  # only then: reading the flags synchronizes the host with the device
            flags = self._flags.tolist()
            for index in self._absent:
                if not flags[index]:
                    results[index] = None
        return results

    def _ended(self, _: torch.futures.Future) -> None:
        self.end = time.perf_counter()


def into_buckets(places: Sequence[int], likes: Sequence[Tensor], bucket_bytes: int) -> list[Bucket]:
    """Group tensors by dtype and device into buckets of up to `bucket_bytes`, in order; a larger tensor is alone."""
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
    found = sorted([*full, *filling.values()], key=lambda indices: indices[-1])  # in order of completion
    return [Bucket([places[index] for index in indices], [likes[index] for index in indices]) for indices in found]
