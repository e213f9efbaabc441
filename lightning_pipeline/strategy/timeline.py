"""PipelineTimeline: what each stage did when, as a picture and as a trace."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_info
from typing_extensions import override

from lightning_pipeline.runtime.executor import Span
from lightning_pipeline.runtime.transport import Transport
from lightning_pipeline.strategy.pipeline import PipelineStrategy
from lightning_pipeline.strategy.timeline_files import draw_timeline, measured_bubble, write_chrome_trace

_PINGS = 8


class PipelineTimeline(Callback):
    """Records the last training step's actions on every stage and draws them when training ends.

    Writes ``timeline.png`` and ``timeline.json`` (Chrome's trace format: open it in chrome://tracing or Perfetto) from
    rank 0 and prints their paths with the measured bubble, the idle share of all stages' time. The stages' clocks are
    aligned by an exchange of messages at the end.

    Args:
        dirpath: folder for the files; default: the Trainer's log folder.
        filename: their name without ending.
    """

    def __init__(self, dirpath: str | Path | None = None, filename: str = "timeline") -> None:
        self.dirpath = dirpath
        self.filename = filename
        self.bubble: float | None = None
        self._spans: list[Span] = []

    @override
    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        pipeline = getattr(trainer.strategy, "pipeline", None)
        if pipeline is not None:
            self._spans = []
            pipeline.observe = self._spans.append

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        pipeline = getattr(trainer.strategy, "pipeline", None)
        if pipeline is not None:
            pipeline.observe = None

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        strategy = trainer.strategy
        if not isinstance(strategy, PipelineStrategy):
            rank_zero_info("PipelineTimeline draws nothing: the Trainer does not use the pipeline strategy")
            return
        stages = _gather(self._spans, strategy.transport)
        dirpath = Path(trainer.strategy.broadcast(self.dirpath or trainer.log_dir or trainer.default_root_dir))
        if not trainer.is_global_zero or not any(stages):
            return
        self.bubble = measured_bubble(stages)
        dirpath.mkdir(parents=True, exist_ok=True)
        trace = write_chrome_trace(stages, dirpath / f"{self.filename}.json")
        picture = draw_timeline(stages, dirpath / f"{self.filename}.png")
        rank_zero_info(
            f"Timeline of the last training step (bubble {self.bubble:.1%}): {picture} "
            f"and, for chrome://tracing, {trace}"
        )


def _gather(spans: list[Span], transport: Transport | None) -> list[list[Span]]:
    """Every stage's spans on stage 0's clock."""
    if transport is None:
        return [spans]
    offset = _clock_offset(transport)
    moved = [(action, start - offset, end - offset) for action, start, end in spans]
    return [
        transport.broadcast_object(moved, stage, "recorded actions") for stage in range(len(transport.pipeline_ranks))
    ]


def _clock_offset(transport: Transport) -> float:
    """How far this stage's clock is ahead of stage 0's, from the quickest of several round trips."""
    what = "the time on stage 0"
    if transport.stage == 0:
        for peer in range(1, len(transport.pipeline_ranks)):
            for _ in range(_PINGS):
                transport.recv_object(peer, "a request for the time")
                transport.send_object(time.perf_counter(), peer)
        return 0.0
    best, offset = float("inf"), 0.0
    for _ in range(_PINGS):
        sent = time.perf_counter()
        transport.send_object(None, 0)
        theirs = transport.recv_object(0, what)
        received = time.perf_counter()
        if received - sent < best:
            best, offset = received - sent, (sent + received) / 2 - theirs
    return offset
