"""Gradient norms over all stages, with the bits of one process."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.utils._foreach_utils import _group_tensors_by_device_and_dtype, _has_foreach_support

from lightning_pipeline.partition.ownership import Ownership
from lightning_pipeline.runtime.backend_rules import all_reduce
from lightning_pipeline.runtime.failure import waiting_for
from lightning_pipeline.runtime.fully_sharded import local_part

if TYPE_CHECKING:
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
) -> torch.Tensor:
    """The norm of the gradients of all stages, each shared parameter counted once. Every stage must call it.

    torch takes each gradient's norm and then the norm of those, in the model's order. Each stage does the first
    part for its own gradients; the second part is done everywhere on all norms, in that same order.

    Args:
        named_parameters: this stage's parameters.
        dtypes: name and dtype of every parameter of the whole model, in the order in which one process lists them.
        ownership: who holds which parameter.
        transport: the connection to the other stages, or None with one stage.
        norm_type: order of the norm, may be ``inf``.

    Returns:
        A 0-d tensor on the device of this stage's gradients.
    """
    named_grads = [(name, parameter.grad) for name, parameter in named_parameters if parameter.grad is not None]
    if transport is None and not any(isinstance(grad, DTensor) for _, grad in named_grads):
        return torch.nn.utils.get_total_norm([grad for _, grad in named_grads], norm_type)
    columns = {name: column for column, name in enumerate(dtypes)}
    vector = torch.full((len(columns),), _NO_GRADIENT, dtype=torch.float64)
    if named_grads:
        norms = _norms([grad for _, grad in named_grads], float(norm_type))
        vector[[columns[name] for name, _ in named_grads]] = norms.cpu()
    table = [vector.tolist()]
    if transport is not None:
        table = transport.all_gather_vector(vector, "gradient norms").tolist()

    found: dict[str, float] = {}
    for name, column in columns.items():
        first = next((stage for stage in ownership.holders[name] if table[stage][column] != _NO_GRADIENT), None)
        if first is not None:
            found[name] = table[first][column]
    device = named_grads[0][1].device if named_grads else torch.device("cpu")
    return _norm_of_norms(found, dtypes, device, float(norm_type))


def _norms(grads: list[torch.Tensor], norm_type: float) -> torch.Tensor:
    """Each gradient's norm as float64 (exact), by the kernels that torch's own clipping uses.

    Ranks that hold slices of the gradients must all call it.
    """
    slices = {i: grad for i, grad in enumerate(grads) if isinstance(grad, DTensor) and not _is_replicated(grad)}
    # A parameter with fewer rows than replicas leaves some of them nothing, and torch knows no norm of that.
    parts = (local_part(grad) for grad in grads)
    grads = [part if part.numel() else part.new_zeros(1) for part in parts]
    result = torch.empty(len(grads), dtype=torch.float64, device=grads[0].device)
    kinds: dict[tuple[torch.device, torch.dtype], list[int]] = {}
    for index, grad in enumerate(grads):
        kinds.setdefault((grad.device, grad.dtype), []).append(index)
    for (device, _), indices in kinds.items():
        group = [grads[index] for index in indices]
        if _has_foreach_support(group, device):
            norms = list(torch._foreach_norm(group, norm_type))
        else:
            norms = [torch.linalg.vector_norm(grad, norm_type) for grad in group]
        result[indices] = torch.stack(norms).to(result)
    if slices:
        mesh = next(iter(slices.values())).device_mesh
        result[list(slices)] = _over_slices(result[list(slices)], norm_type, mesh)
    return result


def _is_replicated(tensor: DTensor) -> bool:
    return all(placement.is_replicate() for placement in tensor.placements)


def _over_slices(norms: torch.Tensor, norm_type: float, mesh: DeviceMesh) -> torch.Tensor:
    """The norms of whole gradients from those of this rank's slices, by one message."""
    is_maximum = norm_type == float("inf")
    powers = norms.pow(norm_type) if norm_type and not is_maximum else norms  # of order 0 it is a count
    with waiting_for("the norms of other ranks' slices of gradients"):
        all_reduce(powers, dist.ReduceOp.MAX if is_maximum else dist.ReduceOp.SUM, group=mesh.get_group()).wait()
    if is_maximum:
        return powers
    return powers.pow(1 / norm_type) if norm_type else powers


def _norm_of_norms(
    norms: Mapping[str, float], dtypes: Mapping[str, torch.dtype], device: torch.device, norm_type: float
) -> torch.Tensor:
    """The norm of all gradients' norms, in the order and dtype in which torch puts them together."""
    if not norms:
        return torch.tensor(0.0)
    order = list(norms)
    if len({dtypes[name] for name in order}) > 1:
        # torch lines the norms up dtype by dtype; which comes first is known to its own grouping only.
        samples: list[torch.Tensor | None] = [torch.empty(0, dtype=dtypes[name], device=device) for name in order]
        groups = _group_tensors_by_device_and_dtype([samples], True).values()
        order = [order[index] for _, indices in groups for index in indices]
    dtype = dtypes[order[0]].to_real()
    for name in order:
        dtype = torch.promote_types(dtype, dtypes[name].to_real())
    vector = torch.tensor([norms[name] for name in order], dtype=torch.float64).to(device=device, dtype=dtype)
    return torch.linalg.vector_norm(vector, norm_type)
