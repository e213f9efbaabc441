"""The debug log of what is cut, sent and waited for. Off by default.

Whether it is on is decided when connections are made, so that micro-batches cost nothing if it is off.
"""

from __future__ import annotations

import logging
import os
import time
from typing import Any

from torch import Tensor

from lightning_pipeline.runtime.endpoint import DeviceEndpoint, Endpoint, HostEndpoint, PendingReceive

VARIABLE = "LIGHTNING_PIPELINE_LOG"
logger = logging.getLogger("lightning_pipeline")

SLOW_S = 0.005
"""Shorter waits are not logged."""


def set_up_log(rank: int) -> None:
    """Write the log to standard error, with the rank and the time, if the environment sets a level.

    Raises:
        ValueError: the environment sets something else.
    """
    asked = os.environ.get(VARIABLE)
    if not asked:
        return
    level = logging.getLevelName(asked.upper())
    if not isinstance(level, int):
        raise ValueError(f"{VARIABLE}={asked} is no level of Python's logging: set debug, info, warning or error")
    for earlier in [handler for handler in logger.handlers if handler.name == VARIABLE]:
        logger.removeHandler(earlier)
    handler = logging.StreamHandler()
    handler.name = VARIABLE
    handler.setFormatter(logging.Formatter(f"%(asctime)s.%(msecs)03d rank {rank}: %(message)s", "%H:%M:%S"))
    logger.addHandler(handler)
    logger.propagate = False  # or a handler of the program's would write each line once more
    logger.setLevel(level)


def is_logging() -> bool:
    """Whether debug messages are logged."""
    return logger.isEnabledFor(logging.DEBUG)


class _Logged(Endpoint):
    """Logs what is sent and received."""

    __slots__ = ()

    def send(self, tensor: Tensor, tag: int = 0) -> None:
        logger.debug("sends %s to stage %d: %s", self.name, self.peer, _described(tensor))
        super().send(tensor, tag)

    def receive(self, buffer: Tensor, what: str, tag: int = 0) -> PendingReceive:
        logger.debug("expects %s from stage %d: %s", what, self.peer, _described(buffer))
        return super().receive(buffer, what, tag)

    def wait(self, work: Any, what: str) -> None:
        started = time.perf_counter()
        super().wait(work, what)
        waited = time.perf_counter() - started
        if waited >= SLOW_S:
            logger.debug("waited %.1f ms for %s stage %d", 1e3 * waited, what, self.peer)


class LoggedHostEndpoint(_Logged, HostEndpoint):
    __slots__ = ()

    def send_bytes(self, data: bytes) -> None:
        logger.debug("sends %s to stage %d: %s bytes", self.name, self.peer, f"{len(data):,}")
        super().send_bytes(data)


class LoggedDeviceEndpoint(_Logged, DeviceEndpoint):
    __slots__ = ()


def _described(tensor: Tensor) -> str:
    dtype = str(tensor.dtype).removeprefix("torch.")
    return f"{dtype} {list(tensor.shape)}, {tensor.numel() * tensor.element_size():,} bytes"
