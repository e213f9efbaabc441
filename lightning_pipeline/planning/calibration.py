"""Measures the cost of messages between stages, and the overhead of an action."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import fmean

import torch
from torch import Tensor, nn

from lightning_pipeline.engine.pipeline import Pipeline
from lightning_pipeline.engine.rank_resources import RankResources
from lightning_pipeline.engine.work import StepTask
from lightning_pipeline.partition.stage_map import resolve
from lightning_pipeline.recording.keyed_calls import KeyedCalls
from lightning_pipeline.recording.module_tensors import ModuleTensors
from lightning_pipeline.runtime.endpoint import PendingReceive
from lightning_pipeline.runtime.tensor_meta import TensorMeta
from lightning_pipeline.runtime.topology import Channel
from lightning_pipeline.runtime.transport import Transport
from lightning_pipeline.schedules import build

_SIZES = (16, 1 << 20)
"""Numbers of four bytes: one message shows the latency, the other what a byte adds."""
_LINK_TIMES = (32, 8)
"""Messages of each size. Their mean counts: some take ten times as long as the fastest, until a thread wakes, and the
stages of a run wait for these as well."""


@dataclass(frozen=True)
class Link:
    """Between two ranks.

    Attributes:
        message: seconds that a rank spends on a value that it sends or receives.
        byte: seconds that it spends on each byte of it.
    """

    latency: float
    bytes_per_second: float
    message: float
    byte: float


def measure_link(transport: Transport | None, device: torch.device) -> Link | None:
    """Send values to and fro between the first two stages. All ranks of the pipeline must call it.

    Returns:
        The link on the first stage, None elsewhere and with one stage.
    """
    if transport is None or transport.stage > 1:
        return None
    is_cpu = device.type == "cpu"
    clock = own_clock(device)
    passed, spent = [], []
    for size, number in zip(_SIZES, _LINK_TIMES, strict=True):
        value = torch.zeros(size, device=device)
        meta = TensorMeta.of(value)
        times: list[float] = []
        own_times: list[float] = []
        for _ in range(number):
            began, own = time.perf_counter(), clock()
            if transport.stage == 0:
                transport.send(value, 1, Channel.FORWARD)
                arriving = transport.recv(meta, 1, Channel.BACKWARD)
                if not is_cpu:  # waiting would keep the thread busy
                    own_times.append(clock() - own)
                _wait(arriving)
            else:
                transport.send(_wait(transport.recv(meta, 0, Channel.FORWARD)), 0, Channel.BACKWARD)
            times.append((time.perf_counter() - began) / 2)
            if is_cpu:
                own_times.append(clock() - own)
        if transport.stage == 0:
            spent.append(fmean(own_times[1:]) / 2)  # the first one connects
            passed.append(fmean(times[1:]))
    transport.flush()
    if transport.stage:
        return None
    num_bytes = 4 * (_SIZES[1] - _SIZES[0])
    return Link(
        latency=passed[0],
        bytes_per_second=num_bytes / max(passed[1] - passed[0], 1e-9),
        message=spent[0],
        byte=max(0.0, spent[1] - spent[0]) / num_bytes,
    )


def own_clock(device: torch.device) -> Callable[[], float]:
    """The time in which this process had a core: on the CPU with all its threads, which take cores from the stages."""
    return time.process_time if device.type == "cpu" else time.thread_time


def _wait(arriving: PendingReceive) -> torch.Tensor:
    value = arriving.wait("a measurement of the link")
    if value.device.type != "cpu":
        torch.get_device_module(value.device).synchronize()
    return value


_MICROBATCHES = 8
_TIMES = 5
_WIDTH, _SAMPLES = 384, 16
"""Layers that take about as long as their overhead and fill half a megabyte of cache, so that stages find the cache as
full of other data as in a run."""


@torch.inference_mode(False)
@torch.enable_grad()
def measure_overhead(transport: Transport, device: torch.device, message: float) -> float:
    """Seconds that each action of a schedule takes from a rank beside the model's work, without messages.

    Measured by a model of small layers, one on each rank, so that ranks compete for caches and cores as in a run. All
    ranks of the pipeline must call it.

    Args:
        message: seconds that a rank spends on a value that it sends or receives.
    """
    beyond = torch.tensor([_beyond_the_model(transport, device)], dtype=torch.float64)
    mean = transport.all_gather_vector(beyond, "what stages cost").mean().item()
    messages = 4 * (transport.num_stages - 1) / transport.num_stages  # of a micro-batch, sent and received
    return max(0.0, mean / _MICROBATCHES - messages * message) / 2


def _beyond_the_model(transport: Transport, device: torch.device) -> float:
    """Seconds of this rank that a step takes in stages, beyond its share of a step without stages."""
    num_stages = transport.num_stages
    module = nn.ModuleList(nn.Linear(_WIDTH, _WIDTH) for _ in range(num_stages)).to(device)
    stages = resolve(module, {str(stage): stage for stage in range(1, num_stages)}, num_stages)
    tensors, calls = ModuleTensors(module, stages), KeyedCalls(module, stages)
    every = range(num_stages)
    shared = RankResources(transport.stage, every, device, transport, tensors, calls, lambda number: every)
    pipeline = Pipeline(shared, schedule=lambda count: build("1f1b", num_stages, count), num_microbatches=_MICROBATCHES)
    microbatches = [torch.ones(_SAMPLES, _WIDTH, device=device) for _ in range(_MICROBATCHES)]

    def step(batch: Tensor) -> Tensor:
        for layer in module:
            batch = layer(batch)
        return batch.sum()

    work = StepTask(
        kind="overhead", step=lambda state, batch: (None, step(batch)), loss_of=lambda state, loss: loss, seed=0
    )

    def run_in_stages() -> None:
        pipeline.run(work, list(microbatches) if transport.stage == 0 else None)

    def run_alone() -> None:
        for microbatch in microbatches:
            step(microbatch).backward()

    return _mean(run_in_stages, device) - _mean(run_alone, device) / num_stages


def _mean(run: Callable[[], None], device: torch.device) -> float:
    clock = own_clock(device)
    run()  # learns shapes
    times = []
    for _ in range(_TIMES):
        began = clock()
        run()
        times.append(clock() - began)
    return fmean(times)
