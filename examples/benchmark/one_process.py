"""One process without a pipeline, which accumulates over the micro-batches."""

import time

import torch

from contenders import LEARNING_RATE, Measured, Plan, intervals
from workload import Workload


def train(workload: Workload, plan: Plan) -> Measured:
    """Train all layers for ``plan.num_steps``."""
    optimizer = torch.optim.SGD(workload.layers.parameters(), lr=LEARNING_RATE)
    inputs, targets = (part.chunk(plan.num_microbatches) for part in workload.batch)
    measured, starts = Measured(), [time.perf_counter()]
    for _ in range(plan.num_steps):
        total = 0.0
        for x, y in zip(inputs, targets, strict=True):
            loss = workload.loss(workload.layers(x), y) / plan.num_microbatches
            loss.backward()
            total += float(loss.detach())
        optimizer.step()
        optimizer.zero_grad()
        measured.loss = total
        starts.append(time.perf_counter())
    measured.seconds = intervals(starts)
    return measured
