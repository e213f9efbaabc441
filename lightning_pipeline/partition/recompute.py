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
from inspect import signature
from typing import Any, Protocol

import torch
import torch.utils.checkpoint as torch_checkpoint
from torch import Tensor

from lightning_pipeline.partition.random import Streams
from lightning_pipeline.partition.recomputed import Frame


class BetweenModules(Protocol):
    """What recomputation asks of the interception."""

    def between_modules(self) -> bool:
        """Whether a replay is running, and no leaf."""

    def checkpoint_leaves(self, more: int) -> None:
        """Enter (1) or leave (-1) a part whose leaves are checkpointed."""


@contextmanager
def recomputation(streams: Streams, interception: BetweenModules, *, keep: bool = False) -> Iterator[None]:
    """While entered, checkpointed functions draw the same random numbers again, and may span stages.

    Args:
        keep: compute again once, and keep it until the graph goes: for backwards that run in two parts.
    """
    plain, reentrant = torch_checkpoint._checkpoint_without_reentrant_generator, torch_checkpoint.CheckpointFunction
    kept = _Kept(streams, plain)

    def generator(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Generator[None, None, None]:
        if interception.between_modules():
            return _leaf_by_leaf(interception)
        if keep:
            return kept.generator(function, *args, **kwargs)
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
            # Without an input that requires grad this kind gives results that do not, whatever the parameters do.
            if keep and any(isinstance(arg, Tensor) and arg.requires_grad for arg in args):
                with kept.frame(function, args, {}, preserve_random=preserve):
                    return function(*args)
            return reentrant.apply(_live_then_resumable(function, streams), preserve, *args)

    torch_checkpoint._checkpoint_without_reentrant_generator = generator  # type: ignore[assignment]
    torch_checkpoint.CheckpointFunction = Reentrant  # type: ignore[assignment,misc]
    try:
        yield
    finally:
        torch_checkpoint._checkpoint_without_reentrant_generator = plain
        torch_checkpoint.CheckpointFunction = reentrant  # type: ignore[misc]


class _Kept:
    """Checkpointed functions whose recomputation is kept.

    Args:
        plain: torch's generator, whose parameters before `*args` are the options of a call.
    """

    def __init__(self, streams: Streams, plain: Callable[..., Any]) -> None:
        self._streams = streams
        named = [p.name for p in signature(plain).parameters.values() if p.kind is p.POSITIONAL_OR_KEYWORD]
        self._options = named[1:]
        self._inside = False

    def generator(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Generator[None, None, None]:
        """What torch runs around the function."""
        options = dict(zip(self._options, args, strict=False))
        with self.frame(
            function,
            args[len(self._options) :],
            kwargs,
            preserve_random=options.get("preserve_rng_state", True),
            contexts=options.get("context_fn", torch_checkpoint.noop_context_fn),
            check=options.get("determinism_check") != "none",
            stop_early=options.get("early_stop", True),
        ):
            yield

    @contextmanager
    def frame(
        self,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        *,
        preserve_random: bool,
        contexts: Callable[[], tuple[Any, Any]] = torch_checkpoint.noop_context_fn,
        check: bool = True,
        stop_early: bool = True,
    ) -> Iterator[None]:
        """While entered, `function` runs the first time. Inside of another, that one keeps nothing of it either."""
        if self._inside or not torch.is_grad_enabled():
            yield
            return
        now, again = contexts()
        everywhere = getattr(torch_checkpoint, "_enable_checkpoint_early_stop", None)
        frame = Frame(
            _resumable(function, self._streams),
            args,
            kwargs,
            preserve_random=preserve_random,
            stop_early=stop_early if everywhere is None else everywhere,
            check=check,
            context=again,
            inside=self._entered,
        )
        with self._entered(), frame.keeping_nothing(), now:
            yield

    @contextmanager
    def _entered(self) -> Iterator[None]:
        before, self._inside = self._inside, True
        try:
            yield
        finally:
            self._inside = before


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
