"""The norm of the gradients of all stages, with the bits of one process."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import lru_cache

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_pipeline import _torch
from lightning_pipeline.engine.slices import local_part
from lightning_pipeline.partition.ownership import Ownership
from lightning_pipeline.runtime.backends import all_reduce
from lightning_pipeline.runtime.failure import waiting_for
from lightning_pipeline.runtime.transport import Transport

_NO_GRADIENT = -1.0  # no norm is negative, and NaN stays free for gradients that are


@torch.no_grad()
def global_grad_norm(
    named_parameters: Iterable[tuple[str, nn.Parameter]],
    dtypes: Mapping[str, torch.dtype],
    *,
    ownership: Ownership,
    transport: Transport | None,
    norm_type: float = 2.0,
) -> Tensor:
    """The norm of the gradients of all stages, each shared parameter counted once. Every stage must call it.

    torch takes each gradient's norm, and then the norm of those in the model's order. Here each stage takes the norms
    of its own gradients, and all stages take the norm of all norms, in that same order: the result has the same bits.

    Args:
        dtypes: name and dtype of every parameter of the whole model, in the order in which one process lists them.

    Returns:
        A 0-d tensor on the device of this stage's gradients.
    """
    named_grads = [(name, parameter.grad) for name, parameter in named_parameters if parameter.grad is not None]
    if transport is None and not any(isinstance(grad, DTensor) for _, grad in named_grads):
        return torch.nn.utils.get_total_norm([grad for _, grad in named_grads], norm_type)
    columns = {name: column for column, name in enumerate(dtypes)}
    own = [columns[name] for name, _ in named_grads]
    norms = _norms([grad for _, grad in named_grads], float(norm_type)) if named_grads else None
    # A fixed place for each parameter: stages need not know which gradients the others have.
    if transport is not None and transport.can_share_on_device:
        # Without a wait for the device: hosts tell one another which gradients there are, devices the norms.
        device = transport.device
        here = torch.zeros(len(columns), dtype=torch.float64)
        here[own] = 1
        is_there = transport.all_gather_vector(here, "which gradients there are").tolist()
        vector = torch.zeros(len(columns), dtype=torch.float64, device=device)
        if norms is not None:
            vector[_index(tuple(own), device)] = norms.to(device)
        table = transport.all_gather_on_device(vector, "gradient norms")
    else:
        device = torch.device("cpu") if norms is None else norms.device
        vector = torch.full((len(columns),), _NO_GRADIENT, dtype=torch.float64)
        if norms is not None:
            vector[own] = norms.cpu()
        table = vector[None] if transport is None else transport.all_gather_vector(vector, "gradient norms")
        is_there = (table != _NO_GRADIENT).tolist()
    places: dict[str, int] = {}
    for name, column in columns.items():
        first = next((stage for stage in ownership.holders[name] if is_there[stage][column]), None)
        if first is not None:
            places[name] = first * len(columns) + column
    if not places:
        return torch.tensor(0.0)
    order, dtype = _order_of_norms(places, dtypes, device)
    found = table.flatten()[_index(tuple(places[name] for name in order), table.device)]
    return torch.linalg.vector_norm(found.to(device=device, dtype=dtype), float(norm_type))


@lru_cache(maxsize=64)
def _index(numbers: tuple[int, ...], device: torch.device) -> Tensor:
    """Numbers on a device, kept, as it waits for a copy from the host."""
    return torch.tensor(numbers, device=device)


def _norms(grads: list[Tensor], norm_type: float) -> Tensor:
    """Each gradient's norm as float64 (exact), by the kernels that torch's own clipping uses.

    Ranks that hold slices of the gradients must all call it.
    """
    slices: dict[dist.ProcessGroup, list[int]] = {}  # by the ranks that have them
    for index, grad in enumerate(grads):
        for ranks in _split_over(grad):
            slices.setdefault(ranks, []).append(index)
    # A parameter with fewer rows than replicas leaves some ranks an empty slice, of which torch takes no norm.
    parts = (local_part(grad) for grad in grads)
    grads = [part if part.numel() else part.new_zeros(1) for part in parts]
    kinds: dict[tuple[torch.device, torch.dtype], list[int]] = {}
    for index, grad in enumerate(grads):
        kinds.setdefault((grad.device, grad.dtype), []).append(index)
    found: list[Tensor] = []
    order: list[int] = []
    for (device, _), indices in kinds.items():
        group = [grads[index] for index in indices]
        if _torch.has_foreach_support(group, device):
            norms = list(_torch.foreach_norm(group, norm_type))
        else:
            norms = [torch.linalg.vector_norm(grad, norm_type) for grad in group]
        found.append(torch.stack(norms).to(grads[0].device, torch.float64))
        order += indices
    result = torch.cat(found)
    if order != sorted(order):
        places = sorted(range(len(order)), key=order.__getitem__)
        result = result[_index(tuple(places), result.device)]
    for ranks, indices in slices.items():
        here = _index(tuple(indices), result.device)
        result[here] = _over_slices(result[here], norm_type, ranks)
    return result


def _split_over(tensor: Tensor) -> list[dist.ProcessGroup]:
    """The groups of ranks of which each has a slice, one for each dimension of a mesh along which a tensor is split."""
    if not isinstance(tensor, DTensor):
        return []
    groups = zip(tensor.device_mesh.get_all_groups(), tensor.placements, strict=True)
    return [group for group, placement in groups if not placement.is_replicate()]


def _over_slices(norms: Tensor, norm_type: float, group: dist.ProcessGroup) -> Tensor:
    """The norms of whole gradients from those of this rank's slices, by one message."""
    is_maximum = norm_type == float("inf")
    powers = norms.pow(norm_type) if norm_type and not is_maximum else norms  # of order 0 it is a count
    with waiting_for("the norms of other ranks' slices of gradients"):
        all_reduce(powers, dist.ReduceOp.MAX if is_maximum else dist.ReduceOp.SUM, group=group).wait()
    if is_maximum:
        return powers
    return powers.pow(1 / norm_type) if norm_type else powers


def _order_of_norms(
    names: Iterable[str], dtypes: Mapping[str, torch.dtype], device: torch.device
) -> tuple[list[str], torch.dtype]:
    """The order and dtype in which torch puts all gradients' norms together."""
    order = list(names)
    if len({dtypes[name] for name in order}) > 1:
        # torch groups the norms by dtype; only its own grouping knows in which order.
        samples: list[Tensor | None] = [torch.empty(0, dtype=dtypes[name], device=device) for name in order]
        groups = _torch.group_by_device_and_dtype([samples], True).values()
        order = [order[index] for _, indices in groups for index in indices]
    dtype = dtypes[order[0]].to_real()
    for name in order:
        dtype = torch.promote_types(dtype, dtypes[name].to_real())
    return order, dtype
