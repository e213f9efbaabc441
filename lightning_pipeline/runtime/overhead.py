"""What a forward or backward of a stage takes beside the model's own work."""

from __future__ import annotations

import statistics
from collections.abc import Callable

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
_WIDTH, _SAMPLES = 384, 16
"""Of layers that take about as long as their overhead, and half a megabyte of cache: a rank that finds it full of what
others left there is slower than in a loop of its own."""


@torch.inference_mode(False)
@torch.enable_grad()
def measure_overhead(transport: Transport, device: torch.device, message: float) -> float:
    """Seconds that each action of a schedule takes from a rank beside the model's work, without messages.

    By a model of small layers, one on each rank: they take caches and cores from one another as they do in a run. All
    ranks of the pipeline must call it.

    Args:
        message: seconds that a rank spends on a value that it sends or receives.
    """
    beyond = torch.tensor([_beyond_the_model(transport, device)], dtype=torch.float64)
    mean = transport.all_gather_vector(beyond, "what stages cost").mean().item()
    messages = 4 * (transport.num_stages - 1) / transport.num_stages  # of a micro-batch, sent and received
    return max(0.0, mean / _MICROBATCHES - messages * message) / 2


def _beyond_the_model(transport: Transport, device: torch.device) -> float:
    """Seconds that a step takes from this rank, beyond its share of what it takes without stages."""
    num_stages = transport.num_stages
    module = nn.ModuleList(nn.Linear(_WIDTH, _WIDTH) for _ in range(num_stages)).to(device)
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
        for layer in module:
            batch = layer(batch)
        return batch.sum()

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
