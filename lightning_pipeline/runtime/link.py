"""How fast values travel from one stage to the next."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import fmean

import torch

from lightning_pipeline.runtime.endpoint import PendingReceive, StagedReceive
from lightning_pipeline.runtime.routes import Channel
from lightning_pipeline.runtime.tensor_meta import TensorMeta
from lightning_pipeline.runtime.transport import Transport

_SIZES = (16, 1 << 20)
"""Numbers of four bytes: one message says the latency, the other what a byte adds."""
_TIMES = (32, 8)
"""Messages of each size. Their mean counts: some take ten times as long as the fastest, until a thread wakes, and the
stages of a run wait for these as well."""


@dataclass(frozen=True)
class Link:
    """Between two ranks.

    Attributes:
        latency: seconds of any transfer.
        bytes_per_second: of what is sent.
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
    for size, number in zip(_SIZES, _TIMES, strict=True):
        value = torch.zeros(size, device=device)
        meta = TensorMeta.of(value)
        times: list[float] = []
        own_times: list[float] = []
        for _ in range(number):
            began, own = time.perf_counter(), clock()
            if transport.stage == 0:
                transport.send(value, 1, Channel.FORWARD)
                arriving = transport.recv(meta, 1, Channel.BACKWARD)
                if not is_cpu:  # which the wait would keep busy
                    own_times.append(clock() - own)
                _wait(arriving)
            else:
                transport.send(_wait(transport.recv(meta, 0, Channel.FORWARD)), 0, Channel.BACKWARD)
            times.append((time.perf_counter() - began) / 2)
            if is_cpu:
                own_times.append(clock() - own)
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
    """Seconds in which this process had a core: on the CPU with Gloo's threads, which take them from the stages."""
    return time.process_time if device.type == "cpu" else time.thread_time


def _wait(arriving: PendingReceive | StagedReceive) -> torch.Tensor:
    value = arriving.wait("a measurement of the link")
    if value.device.type != "cpu":
        torch.get_device_module(value.device).synchronize()
    return value
