"""torch.distributed.pipelining on one rank."""

import time
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import pipelining
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from contenders import LEARNING_RATE, TORCH_SCHEDULES, Measured, Plan, Unavailable, intervals
from workload import Workload

SINGLE_STAGE = ("1f1b", "gpipe")
"""Schedules that take a stage; the others take a list of them."""


def train(workload: Workload, plan: Plan) -> Measured:
    """Train this rank's stages for ``plan.num_steps``.

    Raises:
        Unavailable: torch does not run this schedule with these counts.
    """
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    num_ranks, num_stages = len(set(plan.placement)), len(plan.placement)
    mesh = init_device_mesh("cpu", (num_ranks, plan.num_replicas), mesh_dim_names=("stages", "replicas"))
    rank, stages, device = mesh.get_local_rank("stages"), mesh.get_group("stages"), torch.device("cpu")
    parts = {stage: workload.part(stage) for stage, place in enumerate(plan.placement) if place == rank}
    pipeline = make_pipeline(
        [pipelining.PipelineStage(part, stage, num_stages, device, group=stages) for stage, part in parts.items()],
        workload,
        plan,
    )
    parameters = [parameter for part in parts.values() for parameter in part.parameters()]
    optimizer = torch.optim.SGD(parameters, lr=LEARNING_RATE)
    inputs, targets = workload.batch
    measured, starts = Measured(), [time.perf_counter()]
    for _ in range(plan.num_steps):
        losses: list[Tensor] = []
        args = (inputs,) if 0 in parts else ()
        kwargs = {"target": targets, "losses": losses} if num_stages - 1 in parts else {}
        pipeline.step(*args, **kwargs, return_outputs=False)
        if plan.num_replicas > 1:
            average([parameter.grad for parameter in parameters if parameter.grad is not None], mesh["replicas"])
        optimizer.step()
        optimizer.zero_grad()
        if losses:
            measured.loss = float(torch.stack(losses).mean())
        starts.append(time.perf_counter())
    measured.seconds = intervals(starts)
    return measured


def average(gradients: list[Tensor], replicas: DeviceMesh) -> None:
    """Average gradients over replicas, in one message after the last backward."""
    flat = torch._utils._flatten_dense_tensors(gradients)
    dist.all_reduce(flat, group=replicas.get_group())
    flat /= replicas.size()
    for gradient, averaged in zip(gradients, torch._utils._unflatten_dense_tensors(flat, gradients), strict=True):
        gradient.copy_(averaged)


def make_pipeline(stages: list[Any], workload: Workload, plan: Plan) -> Any:
    """The schedule object; every rank gets the same refusal if there is one."""
    schedule_class = getattr(pipelining, TORCH_SCHEDULES[plan.schedule])
    try:
        return schedule_class(
            stages[0] if plan.schedule in SINGLE_STAGE else stages, plan.num_microbatches, loss_fn=workload.loss
        )
    except ValueError as error:
        raise Unavailable(str(error)) from error
