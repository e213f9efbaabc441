"""Costs of a step without running it: on fake tensors, which have shapes and no data, and with a device's speed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from lightning_pipeline.partition import tree
from lightning_pipeline.partition.costs import StepCosts
from lightning_pipeline.partition.observed_run import Step
from lightning_pipeline.partition.trace import trace_step
from lightning_pipeline.partition.work import DeviceSpeed


def estimate_step(root: nn.Module, step: Step, batch: Any, speed: DeviceSpeed) -> StepCosts:
    """Trace a step, and its backward, on fake tensors; parameters may be on the meta device, and stay as they are.

    Raises:
        ValueError: the step needs values of tensors.
    """
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    with mode, _fake(root):
        fake = tree.replace(batch, _like)
        try:
            trace = trace_step(root, step, fake, speed)
        except RuntimeError as error:
            raise ValueError(
                f"the step cannot be estimated, as it needs values of tensors ({type(error).__name__}: {error}): name "
                f"the cut in stage_config, or let a run measure it"
            ) from error
        times = [[work.seconds for work in way] for way in (trace.forward, trace.backward)]
        return StepCosts(root, trace, times[0], times[1], is_measured=False)


@contextmanager
def _fake(root: nn.Module) -> Iterator[None]:
    """Under the mode: parameters and buffers are fake ones on the CPU."""
    made: dict[int, Tensor] = {}
    swapped: list[tuple[dict[str, Any], str, Tensor]] = []
    for module in root.modules():
        homes: tuple[dict[str, Any], ...] = (module._parameters, module._buffers)
        for slots in homes:
            swapped += [(slots, key, tensor) for key, tensor in slots.items() if tensor is not None]
    for slots, key, tensor in swapped:
        if id(tensor) not in made:
            fake = _like(tensor)
            is_parameter = isinstance(tensor, nn.Parameter)
            made[id(tensor)] = nn.Parameter(fake, tensor.requires_grad) if is_parameter else fake
        slots[key] = made[id(tensor)]
    try:
        yield
    finally:
        for slots, key, tensor in swapped:
            slots[key] = tensor


def _like(tensor: Tensor) -> Tensor:
    """Under the mode: a fake tensor on the CPU. The mode does not see `tensor`, as it would keep weak references."""
    return torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device="cpu")
