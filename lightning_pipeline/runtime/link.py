"""How fast values travel from one stage to the next."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from lightning_pipeline.runtime.endpoint import PendingReceive, StagedReceive
from lightning_pipeline.runtime.routes import Channel
from lightning_pipeline.runtime.tensor_meta import TensorMeta
from lightning_pipeline.runtime.transport import Transport

_SIZES = (16, 1 << 20)
"""Numbers of four bytes: one message says the latency, the other what a byte adds."""
_TIMES = 4


@dataclass(frozen=True)
class Link:
    """Between two ranks.

    Attributes:
        latency: seconds of any transfer.
        bytes_per_second: of what is sent.
        message: seconds that a rank spends on a value that it sends or receives.
    """

    latency: float
    bytes_per_second: float
    message: float


def measure_link(transport: Transport | None, device: torch.device) -> Link | None:
    """Send values to and fro between the first two stages. All ranks of the pipeline must call it.

    Returns:
        The link on the first stage, None elsewhere and with one stage.
    """
    if transport is None or transport.stage > 1:
        return None
    is_cpu = device.type == "cpu"
    clock = own_clock(device)
    seconds = []
    messages = []
    for size in _SIZES:
        value = torch.zeros(size, device=device)
        meta = TensorMeta.of(value)
        times = []
        for _ in range(_TIMES):
            began, own = time.perf_counter(), clock()
            if transport.stage == 0:
                transport.send(value, 1, Channel.FORWARD)
                arriving = transport.recv(meta, 1, Channel.BACKWARD)
                if not is_cpu:  # which the wait would keep busy
                    messages.append(clock() - own)
                _wait(arriving)
            else:
                transport.send(_wait(transport.recv(meta, 0, Channel.FORWARD)), 0, Channel.BACKWARD)
            times.append((time.perf_counter() - began) / 2)
            if is_cpu:
                messages.append(clock() - own)
        seconds.append(min(times[1:]))  # the first one connects
    transport.flush()
    if transport.stage:
        return None
    small, large = seconds
    num_bytes = 4 * (_SIZES[1] - _SIZES[0])
    return Link(small, num_bytes / max(large - small, 1e-9), min(messages[1:]) / 2)


def own_clock(device: torch.device) -> Callable[[], float]:
    """Seconds in which this process had a core: on the CPU with Gloo's threads, which take them from the stages."""
    return time.process_time if device.type == "cpu" else time.thread_time


def _wait(arriving: PendingReceive | StagedReceive) -> torch.Tensor:
    value = arriving.wait("a measurement of the link")
    if value.device.type != "cpu":
        torch.get_device_module(value.device).synchronize()
    return value
