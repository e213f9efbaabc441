"""What ranks need to measure the same micro-batches at the same time, as their stages will run beside one another."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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


def of_all_ranks(
    times: Sequence[float], transport: Transport | None, *, share_cores: bool
) -> tuple[list[float], tuple[float, ...]]:
    """What the parts of the same work take on the ranks of this pipeline, which must all call it.

    Ranks that share cores change places, so that none is faster than another for long, and times differ by which of
    them had more of a core, or one with a busy neighbour.

    Args:
        times: this rank's seconds for each part; empty if it could not measure.

    Returns:
        The mean over ranks that are alike, else this rank's, and how fast each rank is beside the first: empty if they
        are alike. A rank that could not measure is as fast as the first.
    """
    if transport is None:
        return list(times), ()
    own = torch.tensor([len(times), sum(times) if times else float("nan")], dtype=torch.float64)
    lengths, totals = transport.all_gather_vector(own, "how long a step takes").T
    speeds = (totals[0] / totals).nan_to_num(1.0, 1.0, 1.0).tolist()
    if not share_cores and max(speeds) > _ALIKE * min(speeds):
        return list(times), tuple(speeds)
    if not lengths[0] or (lengths != lengths[0]).any():
        return list(times), ()
    everybody = transport.all_gather_vector(torch.tensor(times, dtype=torch.float64), "how long its parts take")
    return everybody.mean(0).tolist(), ()


def shared_cores(device: torch.device, num_ranks: int, ranks_on_node: int) -> float | None:
    """How many of a pipeline's ranks can compute at once, where a node has fewer cores than ranks; else None.

    Only for ranks of one thread: what more threads do beside one another is in their measured times.
    """
    if device.type != "cpu" or torch.get_num_threads() > 1:
        return None
    cores = num_cores()
    return num_ranks * cores / ranks_on_node if cores < ranks_on_node else None
