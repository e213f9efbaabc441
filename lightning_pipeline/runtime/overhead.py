"""What a forward or backward of a stage takes beside the model's own work."""

from __future__ import annotations

import time
from collections.abc import Callable

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


@torch.inference_mode(False)
@torch.enable_grad()
def measure_overhead(device: torch.device) -> float:
    """Seconds of this thread for each action of a schedule, by a model that has next to nothing to do.

    The actions run one after the other in this process, without messages (`measure_link` has those).
    """
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
    work = Work(
        kind="overhead", step=lambda state, batch: module(batch).sum(), loss_of=lambda state, loss: loss, seed=0
    )
    microbatches = [torch.ones(1, 1, device=device) for _ in range(_MICROBATCHES)]

    def in_stages() -> None:
        report = pipeline.run(work, list(microbatches))
        if pipeline.is_new(report):
            pipeline.settle(report, pipeline.own_reports(report))

    def plainly() -> None:
        for microbatch in microbatches:
            loss: Tensor = module(microbatch).sum()
            loss.backward()

    seconds = _fastest(in_stages) - _fastest(plainly)
    return max(0.0, seconds) / sum(len(order) for order in schedule.orders)


def _fastest(run: Callable[[], None]) -> float:
    times = []
    for _ in range(_TIMES):
        began = time.thread_time()
        run()
        times.append(time.thread_time() - began)
    return min(times)
