"""What a forward or backward of a stage takes beside the model's own work."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from lightning_pipeline.partition.interception import Interception
from lightning_pipeline.partition.random import Streams
from lightning_pipeline.partition.stage_config import resolve
from lightning_pipeline.runtime.pipeline import Pipeline
from lightning_pipeline.runtime.work import Work
from lightning_pipeline.schedules import build

_MICROBATCHES = 16
_TIMES = 4
_EVENTS = 20


@dataclass(frozen=True)
class Overhead:
    """What stages cost beside the model's work, in seconds of this thread.

    Attributes:
        action: of each action of a schedule, without messages (`measure_link` has those).
        event: of each call that a stage replays, its own or an earlier stage's.
    """

    action: float
    event: float


@torch.inference_mode(False)
@torch.enable_grad()
def measure_overhead(device: torch.device) -> Overhead:
    """By a model that has next to nothing to do, whose actions run one after the other in this process."""
    without, num_actions = _beyond_the_model(device, 0)
    with_events, _ = _beyond_the_model(device, _EVENTS)
    num_events = 2 * _EVENTS * _MICROBATCHES  # the second stage replays those of the first
    return Overhead(max(0.0, without) / num_actions, max(0.0, with_events - without) / num_events)


def _beyond_the_model(device: torch.device, num_events: int) -> tuple[float, int]:
    """Seconds that a step takes in two stages more than without, and its number of actions."""
    module = nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1)).to(device)
    schedule = build("gpipe", 1, _MICROBATCHES, 2)
    pipeline = Pipeline(
        rank=0,
        placement=schedule.placement,
        device=device,
        transport=None,
        interception=Interception(module, resolve(module, {"1": 1}, 2), Streams(device)),
        schedule=lambda count: schedule,
        num_microbatches=_MICROBATCHES,
    )
    microbatches = [torch.ones(1, 1, device=device) for _ in range(_MICROBATCHES)]

    def step(batch: Tensor) -> Tensor:
        hidden: Tensor = module[0](batch)
        for _ in range(num_events):
            hidden = hidden + 1
        return module[1](hidden).sum()

    work = Work(kind="overhead", step=lambda state, batch: step(batch), loss_of=lambda state, loss: loss, seed=0)

    def in_stages() -> None:
        report = pipeline.run(work, list(microbatches))
        if pipeline.is_new(report):
            pipeline.settle(report, pipeline.own_reports(report))

    def plainly() -> None:
        for microbatch in microbatches:
            step(microbatch).backward()

    return _fastest(in_stages) - _fastest(plainly), sum(len(order) for order in schedule.orders)


def _fastest(run: Callable[[], None]) -> float:
    times = []
    for _ in range(_TIMES):
        began = time.thread_time()
        run()
        times.append(time.thread_time() - began)
    return min(times)
