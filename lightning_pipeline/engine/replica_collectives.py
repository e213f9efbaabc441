"""The replicas as a world of torch.distributed: its collectives, in terms of what all replicas have.

Each gathers what it needs and writes as torch's does. A gathering is recorded as any other operation on what stages
compute, so these run in steps too, before there is data.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ReduceOp

from lightning_pipeline.partition.users_code import users_line
from lightning_pipeline.runtime.replicas import Replicas, all_gather
from lightning_pipeline.runtime.topology import Topology


@dataclass(frozen=True)
class World:
    """The replicas, as the world of torch.distributed.

    Args:
        replicas: of this rank's stage; None where there is one, or where the others are taken to be like this one.
        is_known: they are the replicas of the run, and not of a run that is still to be set up.
    """

    topology: Topology
    replicas: Replicas | None = None
    is_known: bool = True

    @property
    def size(self) -> int:
        return self.topology.data_parallel_size

    @property
    def rank(self) -> int:
        return self.topology.replica

    def gather(self, tensor: Tensor) -> Tensor:
        """Every replica's tensor, [number of replicas, ...]."""
        if self.replicas is None:
            return torch.stack([tensor.detach()] * self.size)
        return all_gather(tensor, self.replicas.group)

    def gather_objects(self, obj: Any) -> list[Any]:
        """Every replica's object."""
        return [obj] * self.size if self.replicas is None else self.replicas.gather_objects(obj)


# Arguments have torch's names, by which they may be given.


def _all_reduce(world: World, tensor: Tensor, op: Any = ReduceOp.SUM) -> None:
    if world.size > 1:
        tensor.copy_(_reduced(world.gather(tensor), op))


def _reduce(world: World, tensor: Tensor, dst: int = 0, op: Any = ReduceOp.SUM) -> None:
    _all_reduce(world, tensor, op)


def _broadcast(world: World, tensor: Tensor, src: int = 0) -> None:
    if world.size > 1:
        tensor.copy_(world.gather(tensor)[src])


def _all_gather(world: World, tensor_list: list[Tensor], tensor: Tensor) -> None:
    for output, part in zip(tensor_list, world.gather(tensor), strict=True):
        output.copy_(part)


def _gather(world: World, tensor: Tensor, gather_list: list[Tensor] | None = None, dst: int = 0) -> None:
    gathered = world.gather(tensor)
    if gather_list:
        for output, part in zip(gather_list, gathered, strict=True):
            output.copy_(part)


def _all_gather_into_tensor(world: World, output_tensor: Tensor, input_tensor: Tensor) -> None:
    output_tensor.copy_(world.gather(input_tensor).view_as(output_tensor))


def _reduce_scatter(world: World, output: Tensor, input_list: Sequence[Tensor], op: Any = ReduceOp.SUM) -> None:
    output.copy_(_reduced(world.gather(torch.stack(list(input_list)))[:, world.rank], op))


def _reduce_scatter_tensor(world: World, output: Tensor, input: Tensor, op: Any = ReduceOp.SUM) -> None:
    _reduce_scatter(world, output, list(input.view(world.size, *output.shape)), op)


def _all_to_all(world: World, output_tensor_list: list[Any], input_tensor_list: list[Any]) -> None:
    for replica, tensor in enumerate(input_tensor_list):
        gathered = world.gather(tensor)
        if replica == world.rank:
            for output, part in zip(output_tensor_list, gathered, strict=True):
                output.copy_(part)


def _all_to_all_single(world: World, output: Tensor, input: Tensor) -> None:
    _all_to_all(world, list(output.chunk(world.size)), list(input.chunk(world.size)))


def _scatter(world: World, tensor: Tensor, scatter_list: list[Tensor] | None = None, src: int = 0) -> None:
    parts = torch.stack(scatter_list or [tensor] * world.size)
    tensor.copy_(world.gather(parts)[src][world.rank])


def _all_gather_object(world: World, object_list: list[Any], obj: Any) -> None:
    object_list[: world.size] = world.gather_objects(obj)


def _gather_object(world: World, obj: Any, object_gather_list: list[Any] | None = None, dst: int = 0) -> None:
    gathered = world.gather_objects(obj)
    if object_gather_list:
        object_gather_list[: world.size] = gathered


def _broadcast_object_list(world: World, object_list: list[Any], src: int = 0) -> None:
    if world.size > 1:
        object_list[:] = world.gather_objects(object_list)[src]


def _scatter_object_list(
    world: World,
    scatter_object_output_list: list[Any],
    scatter_object_input_list: list[Any] | None = None,
    src: int = 0,
) -> None:
    scatter_object_output_list[0] = world.gather_objects(scatter_object_input_list)[src][world.rank]


def _barrier(world: World) -> None:
    """What others do has no effect on a step."""


COLLECTIVES: dict[str, Callable[..., None]] = {
    "all_reduce": _all_reduce,
    "reduce": _reduce,
    "broadcast": _broadcast,
    "all_gather": _all_gather,
    "gather": _gather,
    "all_gather_into_tensor": _all_gather_into_tensor,
    "reduce_scatter": _reduce_scatter,
    "reduce_scatter_tensor": _reduce_scatter_tensor,
    "all_to_all": _all_to_all,
    "all_to_all_single": _all_to_all_single,
    "scatter": _scatter,
    "all_gather_object": _all_gather_object,
    "gather_object": _gather_object,
    "broadcast_object_list": _broadcast_object_list,
    "scatter_object_list": _scatter_object_list,
    "barrier": _barrier,
}


@torch.no_grad()
def all_reduced(world: World, tensor: Tensor, op: ReduceOp | str | None) -> Tensor:
    """The tensor, into which its reduction over the replicas is written. `op` may be one of Lightning's names."""
    if isinstance(op, str):
        op = getattr(ReduceOp, {"MEAN": "AVG"}.get(op.upper(), op.upper()))
    _all_reduce(world, tensor, ReduceOp.SUM if op is None else op)
    return tensor


def _reduced(tensors: Tensor, op: Any) -> Tensor:
    """The sum, or whatever `op` says, over the first dimension."""
    kind = op if isinstance(op, ReduceOp.RedOpType) else getattr(op, "op", op)
    for each, function in _REDUCTIONS:
        if kind == each:
            return function(tensors)
    raise NotImplementedError(
        f"torch.distributed.{kind} over the replicas of a pipeline ({users_line()}): use SUM, AVG, PRODUCT, MIN, MAX, "
        f"BAND, BOR or BXOR"
    )


_REDUCTIONS: tuple[tuple[Any, Callable[[Tensor], Tensor]], ...] = (
    (ReduceOp.SUM, lambda tensors: tensors.sum(0)),
    (ReduceOp.AVG, lambda tensors: tensors.mean(0)),
    (ReduceOp.PRODUCT, lambda tensors: tensors.prod(0)),
    (ReduceOp.MIN, lambda tensors: tensors.amin(0)),
    (ReduceOp.MAX, lambda tensors: tensors.amax(0)),
    (ReduceOp.BAND, lambda tensors: reduce(torch.bitwise_and, tensors)),
    (ReduceOp.BOR, lambda tensors: reduce(torch.bitwise_or, tensors)),
    (ReduceOp.BXOR, lambda tensors: reduce(torch.bitwise_xor, tensors)),
)
