"""What ranks need to measure the same micro-batches at the same time, as their stages will run beside one another."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from lightning_pipeline.partition import tree
from lightning_pipeline.runtime.transport import Transport
from lightning_pipeline.strategy.lightning_private import num_cores

Described = dict[int, tuple[tree.Layout, list[Tensor], list[bool]]]

_ALIKE = 1.2
"""Ranks whose times differ by less have devices of one kind: a measurement is no more exact than that."""


def described(microbatches: Mapping[int, Any]) -> Described:
    """Micro-batches in a form that travels: layouts, tensors on the CPU, and which of these come from elsewhere."""
    found: Described = {}
    for count, microbatch in microbatches.items():
        tensors, layout = tree.flatten(microbatch)
        is_away = [tensor.device.type != "cpu" for tensor in tensors]
        found[count] = layout, [tensor.detach().to("cpu", copy=True) for tensor in tensors], is_away
    return found


def restored(microbatches: Described, device: torch.device) -> dict[int, Any]:
    """What `described` was given, on another rank."""
    found = {}
    for count, (layout, tensors, is_away) in microbatches.items():
        moved = [tensor.to(device) if away else tensor for tensor, away in zip(tensors, is_away, strict=True)]
        found[count] = tree.rebuild(layout, moved)
    return found


def relative_speeds(seconds: float, transport: Transport | None) -> tuple[float, ...]:
    """How fast each rank of this pipeline is beside the first, from the seconds that each took for the same work.

    Empty if they are alike. A rank that could not measure, with ``nan``, is as fast as the first.
    """
    if transport is None:
        return ()
    taken = transport.all_gather_vector(torch.tensor([seconds], dtype=torch.float64), "how long a step takes")
    speeds = (taken[0, 0] / taken[:, 0]).nan_to_num(1.0, 1.0, 1.0).tolist()
    return tuple(speeds) if max(speeds) > _ALIKE * min(speeds) else ()


def shared_cores(device: torch.device, num_ranks: int, ranks_on_node: int) -> float | None:
    """How many of a pipeline's ranks can compute at once, where a node has fewer cores than ranks; else None.

    Only for ranks of one thread: what more threads do beside one another is in their measured times.
    """
    if device.type != "cpu" or torch.get_num_threads() > 1:
        return None
    cores = num_cores()
    return num_ranks * cores / ranks_on_node if cores < ranks_on_node else None
