"""The debug log: what is cut, sent and waited for. Off by default.

Nothing here is called for a micro-batch where the log is off: whether it is on is looked at when connections are made.
"""

from __future__ import annotations

import logging
import os
import time

import torch.distributed as dist
from torch import Tensor

from lightning_pipeline.runtime.endpoint import Endpoint, PendingReceive

VARIABLE = "LIGHTNING_PIPELINE_LOG"
logger = logging.getLogger("lightning_pipeline")

SLOW_S = 0.005
"""Waits that are shorter are not logged."""


def set_up_log(rank: int) -> None:
    """Write the log to standard error, with the rank and the time, if the environment gives a level.

    Raises:
        ValueError: it gives something else.
    """
    asked = os.environ.get(VARIABLE)
    if not asked:
        return
    level = logging.getLevelName(asked.upper())
    if not isinstance(level, int):
        raise ValueError(f"{VARIABLE}={asked} is no level of Python's logging: set debug, info, warning or error")
    for handler in [one for one in logger.handlers if isinstance(one, _OfRun)]:
        logger.removeHandler(handler)
    handler = _OfRun()
    handler.setFormatter(logging.Formatter(f"%(asctime)s.%(msecs)03d rank {rank}: %(message)s", "%H:%M:%S"))
    logger.addHandler(handler)
    logger.propagate = False  # or a handler of the program's would write each line once more
    logger.setLevel(level)


def is_logging() -> bool:
    """Whether somebody reads the log at debug level."""
    return logger.isEnabledFor(logging.DEBUG)


class _OfRun(logging.StreamHandler):
    """The handler of this module."""


class LoggedEndpoint(Endpoint):
    """One that logs what goes over it."""

    __slots__ = ()

    def send(self, tensor: Tensor, tag: int = 0) -> None:
        logger.debug("sends %s to stage %d: %s", self.name, self.peer, _described(tensor))
        super().send(tensor, tag)

    def receive(self, buffer: Tensor, what: str, tag: int = 0) -> PendingReceive:
        logger.debug("expects %s from stage %d: %s", what, self.peer, _described(buffer))
        return super().receive(buffer, what, tag)

    def wait(self, work: dist.Work, what: str, preposition: str) -> None:
        started = time.perf_counter()
        super().wait(work, what, preposition)
        waited = time.perf_counter() - started
        if waited >= SLOW_S:
            logger.debug("waited %.1f ms for %s %s stage %d", 1e3 * waited, what, preposition, self.peer)


def _described(tensor: Tensor) -> str:
    dtype = str(tensor.dtype).removeprefix("torch.")
    return f"{dtype} {list(tensor.shape)}, {tensor.numel() * tensor.element_size():,} bytes"
