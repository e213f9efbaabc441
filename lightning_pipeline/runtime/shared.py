"""Parameters that several stages hold: one value at the start, one gradient at each step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from lightning_pipeline.partition.ownership import Ownership
from lightning_pipeline.runtime.transport import Channel, TensorMeta, Transport

Holders = list[tuple[nn.Parameter, tuple[int, ...]]]


def shared_parameters(parameters: Mapping[str, nn.Parameter], ownership: Ownership) -> Holders:
    """Each parameter that several stages use, once, with these stages; in the same order everywhere."""
    shared = set(ownership.shared_names())
    found: Holders = []
    seen: set[int] = set()
    for name, parameter in parameters.items():
        if name in shared and id(parameter) not in seen:
            seen.add(id(parameter))
            found.append((parameter, ownership.holders[name]))
    return found


def sum_shared_gradients(shared: Holders, transport: Transport | None, stage: int) -> None:
    """Give every holder of a parameter the sum of all holders' gradients, added up in the order of backward."""
    if transport is None or not shared:
        return
    here = [1.0 if stage in stages and parameter.grad is not None else 0.0 for parameter, stages in shared]
    table = transport.all_gather_vector(torch.tensor(here, dtype=torch.float64), "presence of shared gradients")
    present = table.bool().tolist()
    for index, (parameter, stages) in enumerate(shared):
        givers = [holder for holder in stages if present[holder][index]]
        if stage in stages and givers:
            _sum_one(parameter, stages, givers, transport, stage)
    transport.flush()


def _sum_one(
    parameter: nn.Parameter, stages: Sequence[int], givers: Sequence[int], transport: Transport, stage: int
) -> None:
    owner = stages[0]
    meta = TensorMeta(tuple(parameter.shape), _contiguous(parameter), parameter.dtype)
    if stage != owner:
        if parameter.grad is not None:
            transport.send(parameter.grad.contiguous(), owner, Channel.SHARED)
        parameter.grad = transport.recv(meta, owner, Channel.SHARED).wait("the sum of a shared parameter's gradients")
        return
    total: Tensor | None = None
    for giver in sorted(givers, reverse=True):  # backward reaches the last stage first
        part = parameter.grad
        if giver != stage:
            part = transport.recv(meta, giver, Channel.SHARED).wait("a shared parameter's gradient")
        assert part is not None
        total = part if total is None else total + part
    assert total is not None
    parameter.grad = total
    for holder in stages[1:]:
        transport.send(total.contiguous(), holder, Channel.SHARED)


def spread_from_owner(tensors: Sequence[tuple[Tensor, Sequence[int]]], transport: Transport | None, stage: int) -> None:
    """Give every holder of a tensor its owner's value (the first holder is the owner)."""
    if transport is None:
        return
    with torch.no_grad():
        for tensor, stages in tensors:
            if stage == stages[0]:
                for holder in stages[1:]:
                    transport.send(tensor.detach().contiguous(), holder, Channel.SHARED)
            elif stage in stages and not tensor.is_meta:
                meta = TensorMeta(tuple(tensor.shape), _contiguous(tensor), tensor.dtype)
                tensor.copy_(transport.recv(meta, stages[0], Channel.SHARED).wait("a shared tensor's value"))
    transport.flush()


def _contiguous(tensor: Tensor) -> tuple[int, ...]:
    return tuple(torch.empty(tensor.shape, device="meta").stride())
