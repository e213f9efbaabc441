"""Activation checkpointing under a replay.

A recomputation runs during backward, when no replay is there to seed the modules that draw, so each checkpointed
function remembers where the random streams were. And a function that is checkpointed between modules may span stages:
it runs as it is, and each leaf in it is checkpointed by itself.

`torch.utils.checkpoint.checkpoint` is imported by name all over libraries, so what it calls is what has to be
replaced, while a step runs and no longer.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch.utils.checkpoint as torch_checkpoint

from lightning_pipeline.partition.random import Streams


class BetweenModules(Protocol):
    """What recomputation asks of the interception."""

    def between_modules(self) -> bool:
        """Whether a replay is running, and no leaf."""

    def checkpoint_leaves(self, more: int) -> None:
        """Enter (1) or leave (-1) a part whose leaves are checkpointed."""


@contextmanager
def recomputation(streams: Streams, interception: BetweenModules) -> Iterator[None]:
    """While entered, checkpointed functions draw the same random numbers again, and may span stages."""
    plain, reentrant = torch_checkpoint._checkpoint_without_reentrant_generator, torch_checkpoint.CheckpointFunction

    def generator(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Generator[None, None, None]:
        if interception.between_modules():
            return _leaf_by_leaf(interception)
        return plain(_resumable(function, streams), *args, **kwargs)

    class Reentrant:
        @staticmethod
        def apply(function: Callable[..., Any], preserve: bool, *args: Any) -> Any:
            if interception.between_modules():
                interception.checkpoint_leaves(1)
                try:
                    return function(*args)
                finally:
                    interception.checkpoint_leaves(-1)
            return reentrant.apply(_live_then_resumable(function, streams), preserve, *args)

    torch_checkpoint._checkpoint_without_reentrant_generator = generator  # type: ignore[assignment]
    torch_checkpoint.CheckpointFunction = Reentrant  # type: ignore[assignment,misc]
    try:
        yield
    finally:
        torch_checkpoint._checkpoint_without_reentrant_generator = plain
        torch_checkpoint.CheckpointFunction = reentrant  # type: ignore[misc]


def _leaf_by_leaf(interception: BetweenModules) -> Generator[None, None, None]:
    interception.checkpoint_leaves(1)
    yield
    interception.checkpoint_leaves(-1)


def _resumable(function: Callable[..., Any], streams: Streams) -> Callable[..., Any]:
    snapshot = streams.snapshot()

    def resumed(*args: Any, **kwargs: Any) -> Any:
        with streams.resumed(snapshot):
            return function(*args, **kwargs)

    return resumed


def _live_then_resumable(function: Callable[..., Any], streams: Streams) -> Callable[..., Any]:
    """The reentrant kind runs one function for the forward and again for the recomputation."""
    resumed = _resumable(function, streams)
    calls = 0

    def run(*args: Any) -> Any:
        nonlocal calls
        calls += 1
        return function(*args) if calls == 1 else resumed(*args)

    return run
