"""Tensors of which each rank has a slice, as DTensors: over replicas (FSDP2), by tensor parallelism, or both."""

from __future__ import annotations

import weakref
from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version
from torch.distributed.tensor import DTensor, distribute_tensor

from lightning_pipeline.partition.kept_parameters import in_its_place
from lightning_pipeline.runtime.failure import waiting_for


def slice_like(sharded: Tensor, tensor: Tensor) -> Tensor:
    """This rank's slice of `tensor`, which is equal on all ranks, sharded like `sharded`."""
    assert isinstance(sharded, DTensor)
    return distribute_tensor(tensor.detach(), sharded.device_mesh, sharded.placements, src_data_rank=None)


def as_slice(sharded: Tensor, part: Tensor) -> Tensor:
    """`part`, which is this rank's slice, as the whole that it belongs to: a DTensor where `sharded` is one."""
    if not isinstance(sharded, DTensor):
        return part
    return DTensor.from_local(
        part,
        sharded.device_mesh,
        sharded.placements,
        run_check=False,
        shape=sharded.shape,
        stride=sharded.stride(),
    )


def own_rows(sharded: Tensor, tensor: Tensor) -> Tensor:
    """A view of this replica's rows of what its rank holds of `tensor`: all of it, or what tensor parallelism leaves.

    Replicas are the first dimension of the mesh of `sharded`, and divide the rows as FSDP2 does.
    """
    assert isinstance(sharded, DTensor)
    mesh, part = sharded.device_mesh, local_part(tensor.detach())
    chunks, replica = part.chunk(mesh.size(0)), mesh.get_local_rank(0)
    return chunks[replica] if replica < len(chunks) else part[:0]


def sliced_further(sharded: Tensor, tensor: Tensor) -> Tensor:
    """This replica's slice of what its rank holds of `tensor`, sharded like `sharded`."""
    return as_slice(sharded, own_rows(sharded, tensor).clone())


def whole(tensor: Tensor) -> Tensor:
    """The whole of a sharded tensor, or the tensor itself. All ranks that hold its parts must call it."""
    if not isinstance(tensor, DTensor):
        return tensor
    with waiting_for("other ranks' slices of a tensor"):
        return tensor.full_tensor().detach()


def local_part(tensor: Tensor) -> Tensor:
    """This rank's slice of a sharded tensor, in the same memory, or the tensor itself."""
    return tensor.to_local().detach() if isinstance(tensor, DTensor) else tensor


@torch.no_grad()
def write(sharded: Tensor, tensor: Tensor) -> None:
    """Copy this rank's slice of `tensor`, which is equal on all ranks, into that of `sharded`."""
    local_part(sharded).copy_(local_part(slice_like(sharded, tensor)))
    increment_version(sharded)  # or a backward from before would take the new data without a word


class GatheredMemory:
    """Memory with wholes of slices, which the user's code has kept as a view, such as `parameter.data`.

    Args:
        parts: slices, and the tensor in this memory that is their whole.
    """

    def __init__(self, parts: list[tuple[DTensor, Tensor]]) -> None:
        self.parts = parts
        self._versions = [slices._version for slices, _ in parts]
        self._before: list[int] = []
        _memories.add(self)

    @property
    def is_fresh(self) -> bool:
        """Whether slices are as they were when the memory took them in."""
        return all(slices._version == seen for (slices, _), seen in zip(self.parts, self._versions, strict=True))

    @torch.no_grad()
    def refresh(self) -> None:
        """Take in how slices have changed. All ranks that hold them must call it."""
        for index, (slices, found) in enumerate(self.parts):
            if slices._version != self._versions[index]:
                found.detach().copy_(whole(slices))
                self._versions[index] = slices._version

    @torch.no_grad()
    def part_from(self, slices: Tensor, data: Tensor | None) -> None:
        """Go on without some slices, which get other memory. `data` is theirs until then; None if this has it."""
        for index in [index for index, (one, _) in enumerate(self.parts) if one is slices]:
            if data is not None and slices._version != self._versions[index]:
                self.parts[index][1].detach().copy_(data)
            for those in (self.parts, self._versions, self._before):
                del those[index : index + 1]

    @torch.no_grad()
    def write_back(self) -> None:
        """Give the slices what has been written into the memory."""
        for index, (slices, found) in enumerate(self.parts):
            write(slices, found)
            self._versions[index] = slices._version

    @torch.no_grad()
    def begin_step(self) -> None:
        """Take in the gathered parameters, when a step begins."""
        gathered = [in_its_place(slices) for slices, _ in self.parts]
        for whole_one, (_, found) in zip(gathered, self.parts, strict=True):
            found.detach().copy_(whole_one)
        self._before = [one._version for one in gathered]

    @torch.no_grad()
    def end_step(self) -> None:
        """Give the gathered parameters what a step has written into the memory."""
        for before, (slices, found) in zip(self._before, self.parts, strict=False):
            gathered = in_its_place(slices)
            if gathered._version == before and not torch.equal(gathered, found):
                gathered.copy_(found)
        self._versions = [-1 for _ in self.parts]


_memories: weakref.WeakSet[GatheredMemory] = weakref.WeakSet()
"""All there are."""


def part_from_views(slices: Tensor, *, is_gathered: bool = False) -> None:
    """Let views of a parameter that the user's code has kept have their data for themselves. All ranks that hold the
    slices must call it."""
    data = None if is_gathered else whole(slices)
    for memory in list(_memories):
        memory.part_from(slices, data)


def local_gradient(parameter: Tensor) -> Tensor | None:
    """A parameter's gradient, or the slice of it that belongs to this rank's slice of the parameter.

    Where tensor parallelism leaves a partial sum as the gradient of a replicated parameter, the ranks add it up: all
    that hold slices of the parameter must call it.
    """
    gradient = parameter.grad
    if not isinstance(gradient, DTensor):
        return gradient
    assert isinstance(parameter, DTensor)
    if gradient.placements != parameter.placements:
        with waiting_for("other ranks' parts of a gradient"):
            gradient = gradient.redistribute(placements=parameter.placements)
    return local_part(gradient)


def place_gradients(parameters: Iterable[nn.Parameter]) -> None:
    """Redistribute gradients as their parameters are. All ranks that hold slices must call it."""
    for parameter in parameters:
        gradient = parameter.grad
        if isinstance(gradient, DTensor) and gradient.placements != parameter.placements:  # type: ignore[attr-defined]
            part = local_gradient(parameter)
            assert part is not None
            parameter.grad = as_slice(parameter, part)


def plain(parameters: Iterable[Tensor]) -> list[Tensor]:
    """The parameters, each sharded one as this rank's slice with that of its gradient, in the same memory.

    For torch's kernels over lists of gradients, which take no mixture of sharded and whole ones.
    """
    return [_plain(parameter) if isinstance(parameter, DTensor) else parameter for parameter in parameters]


def _plain(parameter: DTensor) -> Tensor:
    part = local_part(parameter)
    if parameter.grad is not None:
        part.grad = local_part(parameter.grad)
    return part
