"""What a forward or backward of a stage takes beside the model's own work."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from lightning_pipeline.partition.keyed_calls import KeyedCalls
from lightning_pipeline.partition.module_tensors import ModuleTensors
from lightning_pipeline.partition.stage_config import resolve
from lightning_pipeline.runtime.link import own_clock
from lightning_pipeline.runtime.pipeline import Pipeline
from lightning_pipeline.runtime.transport import Transport
from lightning_pipeline.runtime.work import Work
from lightning_pipeline.schedules import build

_MICROBATCHES = 8
_TIMES = 5
_EVENTS = 40
_WIDTH, _SAMPLES = 384, 16
"""Of layers that take about as long as their overhead, and half a megabyte of cache: a rank that finds it full of what
others left there is slower than in a loop of its own."""


@dataclass(frozen=True)
class Overhead:
    """What stages cost beside the model's work, in seconds of a rank.

    Attributes:
        action: of each action of a schedule, without messages.
        event: of each call in the user's step, which every rank records.
    """

    action: float
    event: float


@torch.inference_mode(False)
@torch.enable_grad()
def measure_overhead(transport: Transport, device: torch.device, message: float) -> Overhead:
    """By a model of small layers, one on each rank: they take caches and cores from one another as they do in a run.
    All ranks of the pipeline must call it.

    Args:
        message: seconds that a rank spends on a value that it sends or receives.
    """
    beyond = [_beyond_the_model(transport, device, num_events) for num_events in (0, _EVENTS)]
    means = transport.all_gather_vector(torch.tensor(beyond, dtype=torch.float64), "what stages cost").mean(0).tolist()
    without, with_events = (max(0.0, mean) / _MICROBATCHES for mean in means)
    messages = 4 * (transport.num_stages - 1) / transport.num_stages  # of a micro-batch, sent and received
    action = max(0.0, without - messages * message) / 2
    # All of the events are the first rank's, and each rank records them.
    return Overhead(action, max(0.0, with_events - without) / _EVENTS)


def _beyond_the_model(transport: Transport, device: torch.device, num_events: int) -> float:
    """Seconds that a step takes from this rank, beyond its share of what it takes without stages."""
    num_stages = transport.num_stages
    module = nn.ModuleList(nn.Linear(_WIDTH, _WIDTH) for _ in range(num_stages)).to(device)
    first, *others = module
    stages = resolve(module, {str(stage): stage for stage in range(1, num_stages)}, num_stages)
    pipeline = Pipeline(
        rank=transport.stage,
        placement=range(num_stages),
        device=device,
        transport=transport,
        tensors=ModuleTensors(module, stages),
        calls=KeyedCalls(module, stages),
        holders=lambda number: range(num_stages),
        schedule=lambda count: build("1f1b", num_stages, count),
        num_microbatches=_MICROBATCHES,
    )
    microbatches = [torch.ones(_SAMPLES, _WIDTH, device=device) for _ in range(_MICROBATCHES)]

    def step(batch: Tensor) -> Tensor:
        hidden: Tensor = first(batch)
        for _ in range(num_events):
            hidden = hidden + 1
        for layer in others:
            hidden = layer(hidden)
        return hidden.sum()

    work = Work(
        kind="overhead", step=lambda state, batch: (None, step(batch)), loss_of=lambda state, loss: loss, seed=0
    )

    def in_stages() -> None:
        pipeline.run(work, list(microbatches) if transport.stage == 0 else None)

    def plainly() -> None:
        for microbatch in microbatches:
            step(microbatch).backward()

    return _mean(in_stages, device) - _mean(plainly, device) / num_stages


def _mean(run: Callable[[], None], device: torch.device) -> float:
    clock = own_clock(device)
    run()  # finds out what there is to know
    times = []
    for _ in range(_TIMES):
        began = clock()
        run()
        times.append(clock() - began)
    return statistics.fmean(times)
