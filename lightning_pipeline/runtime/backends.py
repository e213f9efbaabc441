"""Process groups and their backends, and the rules of HCCL, which the package keeps on all backends.

1. *Pairs are ordered.* The sends and receives of two ranks within one group run on one in-order stream, in both
   directions: if both ranks send first, both wait forever. So each group carries one direction of one channel, or what
   both sides do in the same order, and receives are posted in the order of the sends.
2. *Tags are ignored.* Messages of a route arrive in the order they were sent, and nothing else tells them apart.
3. *First uses connect.* The communicator of a group, and of each pair in it, is made when it is first used, and waits
   for the other ranks: a ring of first uses waits forever. So each route and each group is used once at set-up, in an
   order that all ranks share (`first_uses`, `warm_up`), and none for the first time within a step.
4. *Streams are shared.* Each communicator takes the next one of 32 streams; two that share a stream wait for one
   another. So what works at the same time is connected one after another, the channels between neighbours first.
5. *Memory is contiguous, and not every dtype travels.* Complex numbers do not. Dtypes that not all backends have in
   common travel as bytes (`to_wire`).
6. *Not every dtype that travels can be reduced.* float64 cannot: it is gathered, and reduced on each rank
   (`all_reduce`).
7. *The CPU has ways of its own.* Objects and tensors on the CPU go over `streams`.

Rules 1 to 4 and 7 hold for NCCL as well; Gloo needs none. They were found in the source of torch_npu 2.13.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_pipeline import _torch
from lightning_pipeline.runtime.failure import waiting_for
from lightning_pipeline.runtime.store import BoundedStore
from lightning_pipeline.runtime.topology import Route

# Dtypes that every backend sends as they are.
NATIVE_DTYPES = frozenset({torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.uint8, torch.bool})

# Dtypes that a backend sends but cannot reduce. Other backends reduce every dtype that torch does.
NOT_REDUCED = {"hccl": frozenset({torch.float64, torch.complex128, torch.uint16, torch.uint32, torch.uint64})}


def new_group(ranks: Sequence[int] | None, timeout: timedelta, backend: str | None) -> dist.ProcessGroup:
    """``dist.new_group`` for some ranks (None: all), with a bound on all waits. Every rank has to call it.

    Raises:
        StoreLostError: the host of the store, by which the ranks find each other, ended or does not answer.
        PeerFailedError: another rank failed.
        PipelineTimeoutError: another rank did not come in time.
    """
    store = BoundedStore(_torch.default_store(), rank=dist.get_rank(), limit=timeout)
    with store.asked(), waiting_for("all ranks to make a process group"):
        return dist.new_group(None if ranks is None else list(ranks), timeout=timeout, backend=backend)


def own_group(of_all: Iterable[Sequence[int]], rank: int, timeout: timedelta, backend: str | None) -> dist.ProcessGroup:
    """The group of a rank, of those that divide the world among them. Every rank has to make all, as torch asks."""
    groups = [(ranks, new_group(ranks, timeout, backend)) for ranks in of_all]
    return next(group for ranks, group in groups if rank in ranks)


def check_environment(backend: str) -> None:
    """Check that each pair of ranks has a stream of its own, without which the first rule cannot be kept.

    Raises:
        ValueError: an environment variable gives all pairs one stream.
    """
    given = os.environ.get("P2P_HCCL_BUFFSIZE")
    megabytes = re.match(r"\s*\+?(\d*)", given or "")  # as torch_npu reads it: what is no number is 0
    if backend == "hccl" and given is not None and megabytes is not None and not int(megabytes[1] or 0):
        raise ValueError(
            f"P2P_HCCL_BUFFSIZE={given} gives all pairs of ranks in a group one stream, on which stages would wait for "
            "one another for ever: unset it, or give each pair some megabytes (torch_npu's default is 20)"
        )


def backend_of(device_type: str) -> str:
    """The default group's backend for tensors on a type of device."""
    by_device = dict(item.split(":", 1) for item in dist.get_backend_config().split(",") if ":" in item)
    return by_device.get(device_type) or dist.get_default_backend_for_device(device_type)


def first_uses(routes: Iterable[Route]) -> list[Route]:
    """Routes in the order in which all ranks use them first.

    Every rank takes its part of the same list, so there is no ring of waiting ranks. Even sources come first, so that
    pairs of neighbours connect at the same time.
    """
    return sorted(routes, key=lambda route: (route[0], route[1] % 2, route))


def warm_up(group: dist.ProcessGroup | None = None) -> None:
    """Use a group once, so that it is connected. All of its ranks have to call this. Gloo is connected already.

    The current device has to be this process's own.
    """
    group = _or_world(group)
    for device in group._device_types:
        if group.size() > 1 and device.type != "cpu" and _torch.group_backend(group, device).name() != HOST:
            dist.all_reduce(torch.zeros(1, device=device.type), group=group)


def all_reduce(tensor: Tensor, op: Any = dist.ReduceOp.SUM, *, group: dist.ProcessGroup | None = None) -> dist.Work:
    """``dist.all_reduce`` with ``async_op=True``, for any dtype that travels."""
    group = _or_world(group)
    if tensor.dtype in NOT_REDUCED.get(_torch.group_backend(group, tensor.device).name(), ()):
        return _GatheredWork(tensor, op, group)
    work: dist.Work = dist.all_reduce(tensor, op, group, async_op=True)
    return work


def reduce(tensor: Tensor, operation: Any, group: dist.ProcessGroup | None = None) -> Tensor:
    """Reduce `tensor` in place over a group, by one of torch's operations or its name, or "mean" or "avg"."""
    if not isinstance(operation, str):
        all_reduce(tensor, operation or dist.ReduceOp.SUM, group=group).wait()
        return tensor
    is_mean = operation.lower() in ("mean", "avg")  # ReduceOp.AVG is not on all backends
    all_reduce(tensor, getattr(dist.ReduceOp, "SUM" if is_mean else operation.upper()), group=group).wait()
    if is_mean:
        tensor.copy_(tensor / dist.get_world_size(group))
    return tensor


@torch.no_grad()
def broadcast(tensor: Tensor, source: int, group: dist.ProcessGroup | None = None) -> None:
    """Give all ranks of a group the value of `tensor` on `source`, a global rank; for any dtype and layout."""
    if tensor.layout is not torch.strided:
        found = [tensor.detach().cpu()]
        dist.broadcast_object_list(found, source, group)
        tensor.copy_(found[0])
        return
    value = tensor.detach().contiguous().resolve_conj().resolve_neg()
    dist.broadcast(flat(value), source, group)
    tensor.copy_(value)


class _GatheredWork(dist.Work):
    """An all-gather that is underway, after which each rank reduces in the order of ranks."""

    def __init__(self, tensor: Tensor, op: Any, group: dist.ProcessGroup) -> None:
        super().__init__()
        if op not in (dist.ReduceOp.SUM, dist.ReduceOp.MAX):
            raise ValueError(f"no {op} of {tensor.dtype} on this backend; SUM and MAX there are")
        self._tensor = tensor
        self._op = op
        self._parts = tensor.new_empty((group.size(), *tensor.shape))
        self._work = group._allgather_base(flat(self._parts), flat(tensor))

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        self._work.wait()
        parts = self._parts
        self._tensor.copy_(parts.sum(0) if self._op == dist.ReduceOp.SUM else parts.amax(0))
        return True


def to_wire(tensor: Tensor, device: torch.device) -> Tensor:
    """The contiguous tensor that is sent for `tensor` (which has no graph): its memory, in the order of its storage."""
    if not tensor.is_contiguous() and not is_dense(tensor):
        tensor = tensor.contiguous()
    if tensor.device != device:
        tensor = tensor.to(device)  # waits for the device, if it copies to the CPU
    return flat(tensor)


def flat(tensor: Tensor) -> Tensor:
    """The dense memory of `tensor` as a contiguous tensor that every backend takes."""
    if tensor.is_neg() or tensor.is_conj():  # its memory holds the negative or the conjugate
        tensor = tensor.resolve_neg().resolve_conj()
    if not tensor.is_contiguous():
        tensor = tensor.as_strided((tensor.numel(),), (1,))
    if tensor.dtype not in NATIVE_DTYPES:
        tensor = bytes_of(tensor)
    return tensor


def bytes_of(tensor: Tensor) -> Tensor:
    """A view of a contiguous tensor's memory, of any dtype."""
    # One element counts as contiguous under any stride, and `view(dtype)` takes only a stride of 1.
    return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)


def is_dense(tensor: Tensor) -> bool:
    """Whether a tensor's elements fill their memory without holes or overlaps, in some order of the dimensions."""
    return are_dense(tensor.shape, tensor.stride())


def are_dense(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """`is_dense` of a tensor with this shape and these strides."""
    expected = 1
    for stride, size in sorted((s, n) for s, n in zip(strides, shape, strict=True) if n != 1):
        if stride != expected:
            return False
        expected *= size
    return True


def _or_world(group: dist.ProcessGroup | None) -> dist.ProcessGroup:
    group = group or dist.group.WORLD
    assert group is not None
    return group


HOST = dist.Backend.GLOO


def backend_for(device: torch.device, asked: str | None = None) -> str:
    """The default process group's backend for tensors on `device`, such as ``"cpu:gloo,npu:hccl"``; "gloo" on the CPU.

    It is the default of torch, to which torch_npu adds HCCL. Objects are sent from the CPU, which HCCL and NCCL cannot,
    so Gloo is added.

    Args:
        asked: the backend that the user asks for; ``"device:backend"`` pairs are taken as they are.

    Raises:
        RuntimeError: torch has no backend for the device.
        ValueError: the backend that is asked for does not support the device.
    """
    if asked is not None and ":" in asked:
        return asked
    backend = asked or dist.Backend.default_device_backend_map.get(device.type)
    if backend is None:
        raise RuntimeError(
            f"torch knows no backend for tensors on {device}: the package that adds the device has to be imported "
            f"(torch_npu adds hccl), or name one as PipelineStrategy(process_group_backend=...)"
        )
    if device.type not in dist.Backend.backend_capability.get(backend.lower(), [device.type]):
        default = dist.Backend.default_device_backend_map.get(device.type)
        raise ValueError(
            f"process_group_backend={asked!r} does not take tensors on {device}: leave it out, and {default} is used"
        )
    return backend if backend == HOST else f"cpu:{HOST},{device.type}:{backend}"
