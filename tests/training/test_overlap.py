"""Gradients travel between replicas while other backwards run, and PipelineTimeline shows it."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning as L
import pytest
from lightning.pytorch.callbacks import Callback
from torch import Tensor

from lightning_pipeline import PipelineStrategy, PipelineTimeline
from lightning_pipeline.engine import recorded_times
from lightning_pipeline.engine.recorded_times import gather_recordings
from lightning_pipeline.runtime.replicas import Replicas
from lightning_pipeline.schedules import build, simulate
from lightning_pipeline.schedules.records import RecordedStep
from tests.launching import PATIENCE_S, launch
from tests.trace_format import complaints
from tests.training.models import LitTokens, gpt_stages, token_loader
from tests.training.runs import QUIET

pytestmark = pytest.mark.multiprocess

WORLD, NUM_STAGES, NUM_REPLICAS = 4, 2, 2
LAST = 3  # micro-batch
VIRTUAL_STAGES = {"1f1b": 1, "interleaved_1f1b": 2}
CLOCKS_APART = 1000.0  # seconds


class LastGradients(Callback):
    """Notes when each of this rank's parameters last got a gradient."""

    def __init__(self) -> None:
        self.times: dict[str, float] = {}

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        for name, parameter in pl_module.named_parameters():
            if not parameter.is_meta:
                parameter.register_post_accumulate_grad_hook(self.noted(name))

    def noted(self, name: str) -> Callable[[Tensor], None]:
        def note(_: Tensor) -> None:
            self.times[name] = time.perf_counter()

        note.__module__ = "torch.of_the_test"  # a user's would be refused, as it runs on one stage only
        return note

    def of_blocks(self, *numbers: int) -> float:
        """When the last of the parameters in these blocks got it."""
        prefixes = tuple(f"net.blocks.{number}." for number in numbers)
        return max(when for name, when in self.times.items() if name.startswith(prefixes))


def run(schedule: str, folder: str) -> dict[str, Any]:
    num_virtual = VIRTUAL_STAGES[schedule]
    timeline, gradients = PipelineTimeline(folder, schedule, every_n_steps=1), LastGradients()
    strategy = PipelineStrategy(
        stage_config=gpt_stages(NUM_STAGES * num_virtual),
        num_stages=NUM_STAGES,
        num_microbatches=LAST + 1,
        schedule=schedule,
        timeout=PATIENCE_S,
    )
    trainer = L.Trainer(
        strategy=strategy, devices=WORLD, callbacks=[timeline, gradients], **{**QUIET, "max_steps": 2, "max_epochs": 1}
    )
    trainer.fit(LitTokens(), token_loader(32, 8))
    # Four blocks: two a rank, or one for each of its two virtual stages. Backwards end on the last one first.
    stage = strategy.topology.stage_rank
    blocks = [[2 * stage, 2 * stage + 1]] if num_virtual == 1 else [[stage + 2], [stage]]
    return {
        "metrics": {k: float(v) for k, v in trainer.callback_metrics.items() if k.startswith("pipeline/")},
        "bubble": timeline.bubble,
        "starts": [start for start, _ in timeline.recorded.reductions],
        "final": [gradients.of_blocks(*numbers) for numbers in blocks],
        "gathered": gather_with_clocks_apart(strategy),
    }


def gather_with_clocks_apart(strategy: PipelineStrategy) -> list[list[float]]:
    """What all ranks record at about the same time, each by another clock, is brought on one."""
    ahead = CLOCKS_APART * (strategy.global_rank - 1.5)
    recorded_times.time = SimpleNamespace(perf_counter=lambda: time.perf_counter() + ahead)
    try:
        recording = RecordedStep(strategy.global_rank, reductions=[(time.perf_counter() + ahead, 0.0)])
        replicas = Replicas.shared(strategy.topology, strategy.timeout)
        gathered = gather_recordings(recording, strategy.transport, replicas)
        strategy.barrier("after what was gathered")  # a process that ends takes along what it has yet to send
    finally:
        recorded_times.time = time
    return [[rank.reductions[0][0] for rank in pipeline] for pipeline in gathered]


def run_all(folder: str, schedules: list[str]) -> dict[str, Any]:
    return {schedule: run(schedule, folder) for schedule in schedules}


@pytest.fixture(scope="module")
def ranks(folder: Path, wanted: Any) -> list[dict[str, Any]]:
    return launch(run_all, str(folder), wanted(VIRTUAL_STAGES, ["interleaved_1f1b"], "schedule"), world=WORLD)


class Trace:
    """The written trace: times of events by row and name, in microseconds."""

    def __init__(self, path: Path) -> None:
        assert complaints(path) == []
        events = json.loads(path.read_text())["traceEvents"]
        self.rows = {e["args"]["name"]: e["tid"] for e in events if e["ph"] == "M"}
        self.actions = [e for e in events if e["ph"] == "X"]
        rows = self.rows.values()
        self.starts = {row: [e["ts"] for e in events if e["ph"] == "b" and e["tid"] == row] for row in rows}
        self.ends = {row: [e["ts"] for e in events if e["ph"] == "e" and e["tid"] == row] for row in rows}

    def span(self, row: int, action: str) -> tuple[float, float]:
        (event,) = [e for e in self.actions if e["tid"] == row and e["name"] == action]
        return event["ts"], event["ts"] + event["dur"]


@pytest.fixture(scope="module", params=["1f1b", pytest.param("interleaved_1f1b", marks=pytest.mark.slow)])
def schedule(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def trace(schedule: str, folder: Path, ranks: Any) -> Trace:
    return Trace(folder / f"{schedule}.json")


def test_buckets_start_in_the_cool_down(schedule: str, trace: Trace) -> None:
    for replica in range(NUM_REPLICAS):
        first, last = NUM_STAGES * replica, NUM_STAGES * replica + 1
        # The first stage waits for what the last one sends after it has started its bucket.
        assert trace.starts[last][0] < trace.span(first, f"0B{LAST}")[0]
        if schedule == "interleaved_1f1b":  # the first rank holds a later part of the model, too
            assert trace.starts[first][0] < trace.span(first, f"0B{LAST}")[0]


def test_no_bucket_starts_before_its_gradients_are_final(schedule: str, ranks: Any) -> None:
    for rank in ranks:
        starts, final = rank[schedule]["starts"], rank[schedule]["final"]
        assert len(starts) == len(final)
        assert all(start >= last for start, last in zip(starts, final, strict=True))


def test_the_trace_has_every_bucket(schedule: str, trace: Trace, ranks: Any) -> None:
    numbers = ["0", "1"] if schedule == "1f1b" else ["0, 2", "1, 3"]
    term = "stage" if schedule == "1f1b" else "stages"
    labels = [f"rank {rank} (replica {rank % 2}, {term} {numbers[rank // 2]})" for rank in (0, 2, 1, 3)]
    assert list(trace.rows) == labels
    for row, rank in zip(trace.rows.values(), (0, 2, 1, 3), strict=True):
        starts, ends = trace.starts[row], trace.ends[row]
        own = ranks[rank][schedule]["starts"]
        assert [start - starts[0] for start in starts] == pytest.approx([1e6 * (start - own[0]) for start in own])
        assert all(start < end for start, end in zip(starts, ends, strict=True))


def test_the_bubble_has_no_part_of_them(schedule: str, trace: Trace, ranks: Any) -> None:
    busy = sum(event["dur"] for event in trace.actions if len(event["cat"]) == 1)
    end = max(event["ts"] + event["dur"] for event in trace.actions)
    for rank in ranks:
        assert rank[schedule]["bubble"] == pytest.approx(1 - busy / (end * WORLD))
        assert rank[schedule]["metrics"] == ranks[0][schedule]["metrics"]
    metrics = ranks[0][schedule]["metrics"]
    assert metrics["pipeline/bubble"] == pytest.approx(ranks[0][schedule]["bubble"])
    assert 0 < metrics["pipeline/reduction_overlap"] <= 1
    expected = simulate(build(schedule, NUM_STAGES, LAST + 1, VIRTUAL_STAGES[schedule])).peak_live
    for rank in range(WORLD):
        for name in ("live_activations", "live_activations_simulated"):
            assert metrics[f"pipeline/{name}/rank{rank}"] == expected[rank // NUM_REPLICAS]


def test_clocks_are_brought_together(schedule: str, ranks: Any) -> None:
    for rank in ranks:
        times = [when for pipeline in rank[schedule]["gathered"] for when in pipeline]
        assert len(times) == WORLD
        assert max(times) - min(times) < CLOCKS_APART / 10
