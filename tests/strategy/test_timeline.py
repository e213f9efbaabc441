"""PipelineTimeline in real runs: its metrics beside the simulated ones, on every rank, and its files."""

from __future__ import annotations

import csv
import json
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import lightning as L
import pytest
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.loggers import CSVLogger

from lightning_pipeline import PipelineTimeline
from lightning_pipeline.schedules import Action, build, simulate
from lightning_pipeline.schedules.live import LiveRank, read_live
from lightning_pipeline.schedules.records import read_records
from tests.launching import SOON_S, launch
from tests.trace_format import complaints
from tests.training.models import LitTokens, gpt_stages, token_loader
from tests.training.runs import pipeline_trainer, plain_trainer

NUM_MICROBATCHES = 4
VIRTUAL_STAGES = {"1f1b": 1, "interleaved_1f1b": 2, "zbv": 2}
MORE = {"interleaved_1f1b", "zbv"}


class Seen(Callback):
    """What other callbacks see: after each training batch its metrics, in validation whether it is recorded."""

    def __init__(self) -> None:
        self.has_metrics: list[bool] = []
        self.observed: list[bool] = []

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.has_metrics.append("pipeline/bubble" in trainer.callback_metrics)

    def on_validation_batch_end(self, trainer: Any, *args: Any, **kwargs: Any) -> None:
        self.observed.append(trainer.strategy.pipeline.observe is not None)


class Late(Callback):
    """The second rank comes late to the second step, and looks what both are at meanwhile.

    Until it sees what is expected, or has looked for long: what each rank writes twice a second comes one by one.
    """

    EXPECTED = ((1, "waits for 1B0 of rank 1"), (1, "is between steps"))

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.seen: list[LiveRank] = []

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_rank == 1 and batch_idx == 1:
            limit = time.monotonic() + SOON_S
            while time.monotonic() < limit and tuple((rank.step, rank.now) for rank in self.seen) != self.EXPECTED:
                time.sleep(0.1)
                self.seen = [rank for rank, _ in read_live(self.folder)]


def run(schedule: str, world: int, folder: str, timeline: PipelineTimeline | None, **options: Any) -> dict[str, Any]:
    """Four training steps and a validation in the middle; metrics every two steps."""
    L.seed_everything(1, verbose=False)
    seen, late = Seen(), Late(Path(folder) / "timeline.live")
    callbacks = [timeline, seen] if timeline is not None else [seen]
    if schedule == "1f1b" and timeline is not None and world == 2 and not options:
        callbacks.append(late)
    trainer = pipeline_trainer(
        gpt_stages(world * VIRTUAL_STAGES[schedule]),
        world=world,
        strategy={"schedule": schedule, "num_microbatches": NUM_MICROBATCHES},
        callbacks=callbacks[::-1] if schedule == "zbv" else callbacks,
        logger=CSVLogger(folder, name="", version="") if schedule != "interleaved_1f1b" else False,
        max_epochs=1,
        log_every_n_steps=2,
        val_check_interval=2,
        num_sanity_val_steps=0,
        **options,
    )
    trainer.fit(LitTokens(), token_loader(32, 8), token_loader(8, 8))
    final = {k: float(v) for k, v in trainer.callback_metrics.items() if k.startswith("pipeline/")}
    return {
        "metrics": final,
        "has_metrics": seen.has_metrics,
        "observed": seen.observed,
        "live": [asdict(rank) for rank in late.seen],
        "bubble": timeline.bubble if timeline is not None else None,
    }


def two_rank_runs(folder: str, names: list[str]) -> dict[str, Any]:
    runs = {name: run(name, 2, f"{folder}/{name}", PipelineTimeline(f"{folder}/{name}")) for name in names}
    runs["accumulating"] = run(
        "1f1b", 2, f"{folder}/accumulating", PipelineTimeline(every_n_steps=2), accumulate_grad_batches=2
    )
    runs["off"] = run("1f1b", 2, f"{folder}/off", None)
    return runs


@pytest.fixture(scope="module")
def two_ranks(folder: Path, wanted: Any) -> list[dict[str, Any]]:
    return launch(two_rank_runs, str(folder), wanted(VIRTUAL_STAGES, MORE, "name"), world=2)


@pytest.mark.multiprocess
@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.slow] * (n in MORE)) for n in VIRTUAL_STAGES])
class TestSchedules:
    def test_every_rank_logs_the_same(self, two_ranks: list[dict[str, Any]], name: str) -> None:
        first, second = (rank[name]["metrics"] for rank in two_ranks)
        assert first == second
        live = [f"pipeline/live_activations{which}/rank{rank}" for which in ("", "_simulated") for rank in range(2)]
        busy = [f"pipeline/busy/rank{rank}" for rank in range(2)]
        others = [f"pipeline/{what}" for what in ("bubble", "bubble_simulated", "slowest_stage")]
        assert sorted(first) == sorted([*others, *busy, *live])
        assert first["pipeline/bubble"] == pytest.approx(1 - sum(map(first.get, busy)) / 2)  # type: ignore[arg-type]
        assert first["pipeline/slowest_stage"] in range(2 * VIRTUAL_STAGES[name])

    def test_bubbles_are_shares(self, two_ranks: list[dict[str, Any]], name: str) -> None:
        metrics = two_ranks[0][name]["metrics"]
        assert 0 < metrics["pipeline/bubble_simulated"] < 1
        assert 0 < metrics["pipeline/bubble"] < 1
        assert [0 < rank[name]["bubble"] < 1 for rank in two_ranks] == [True, True]

    def test_live_activations_are_those_of_the_schedule(self, two_ranks: list[dict[str, Any]], name: str) -> None:
        metrics = two_ranks[0][name]["metrics"]
        expected = simulate(build(name, 2, NUM_MICROBATCHES, VIRTUAL_STAGES[name])).peak_live
        assert [metrics[f"pipeline/live_activations/rank{rank}"] for rank in range(2)] == expected
        assert [metrics[f"pipeline/live_activations_simulated/rank{rank}"] for rank in range(2)] == expected

    def test_the_files_show_both_ranks(self, two_ranks: list[dict[str, Any]], name: str, folder: Path) -> None:
        assert (folder / name / "timeline.png").stat().st_size > 0
        assert complaints(folder / name / "timeline.json") == []
        events = json.loads((folder / name / "timeline.json").read_text())["traceEvents"]
        spans = [event for event in events if event["ph"] == "X"]
        forwards = [event["tid"] for event in spans if "F" in event["name"] and "_" not in event["name"]]
        each = NUM_MICROBATCHES * VIRTUAL_STAGES[name]
        assert [forwards.count(rank) for rank in sorted(set(forwards))] == [each, each]

    def test_the_records_and_the_report(self, two_ranks: list[dict[str, Any]], name: str, folder: Path) -> None:
        """Steps 2 and 4, with what was sent; and what is known of the stages, though the run has a step of its own."""
        found = read_records(folder / name / "timeline.jsonl")
        assert [number for number, _, _ in found.steps] == [2, 4]
        sent = found.steps[-1][2][0][0].sent
        samples, length, width, four_bytes = 8 // NUM_MICROBATCHES, 16, 6, 4
        assert sent[Action.parse("0SEND_F0")] == samples * length * width * four_bytes
        assert found.steps[-1][2][0][0].memory > 2**24
        assert len(found.advice["stages"]) == 2 * VIRTUAL_STAGES[name]
        assert all(stage["kept_bytes"] > 0 and stage["parameter_bytes"] > 0 for stage in found.advice["stages"])
        assert found.advice["moves"] and not found.advice.get("notes")
        assert '"LitTokens, schedule ' in (folder / name / "report.html").read_text()

    def test_validation_is_not_recorded(self, two_ranks: list[dict[str, Any]], name: str) -> None:
        assert two_ranks[0][name]["observed"] == [False, False]


@pytest.mark.multiprocess
def test_while_it_trains_each_rank_tells_what_it_is_at(two_ranks: list[dict[str, Any]], folder: Path) -> None:
    first, second = two_ranks[1]["1f1b"]["live"]
    assert tuple((rank["step"], rank["now"]) for rank in (first, second)) == Late.EXPECTED
    assert (first["rank"], first["stages"], first["is_waiting"]) == (0, [0], True)
    # 0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0: the receive is posted, and 0B0 waits for it.
    assert first["done"] == 5 and first["live"] == 2 and first["seconds"] > 0 and first["memory"] > 2**24
    assert (second["rank"], second["stages"], second["done"]) == (1, [1], 0)
    assert not (folder / "1f1b" / "timeline.live").exists()


@pytest.mark.multiprocess
def test_the_logger_gets_the_metrics_at_its_steps(two_ranks: list[dict[str, Any]], folder: Path) -> None:
    with (folder / "1f1b" / "metrics.csv").open() as file:
        rows = [row for row in csv.DictReader(file) if row.get("pipeline/bubble")]
    assert [row["step"] for row in rows] == ["1", "3"]
    assert float(rows[-1]["pipeline/bubble"]) == pytest.approx(two_ranks[0]["1f1b"]["metrics"]["pipeline/bubble"])


@pytest.mark.multiprocess
def test_batches_that_accumulate_are_not_steps(two_ranks: list[dict[str, Any]], folder: Path) -> None:
    accumulating = two_ranks[0]["accumulating"]
    assert accumulating["has_metrics"] == [False, False, False, True]
    assert (folder / "accumulating" / "timeline.json").is_file()


@pytest.mark.multiprocess
def test_without_the_callback_nothing_is_logged(two_ranks: list[dict[str, Any]], folder: Path) -> None:
    assert two_ranks[0]["off"]["metrics"] == {}
    assert not list((folder / "off").glob("timeline*"))


@pytest.mark.multiprocess
def test_one_stage(tmp_path: Path) -> None:
    (answer,) = launch(run, "1f1b", 1, str(tmp_path), PipelineTimeline(tmp_path), world=1)
    assert answer["metrics"]["pipeline/live_activations/rank0"] == 1
    assert answer["metrics"]["pipeline/bubble_simulated"] == 0
    assert (tmp_path / "timeline.png").is_file()


def test_another_strategy_is_left_alone(tmp_path: Path) -> None:
    timeline = PipelineTimeline(tmp_path, every_n_steps=1)
    trainer = plain_trainer(callbacks=[timeline], max_epochs=1)
    trainer.fit(LitTokens(), token_loader(8, 4))
    assert not [name for name in trainer.callback_metrics if name.startswith("pipeline/")]
    assert timeline.bubble is None
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("every_n_steps", [0, -1, 1.5])
def test_a_number_of_steps_that_is_none(every_n_steps: Any) -> None:
    with pytest.raises(ValueError, match=f"whole number from 1.*got {every_n_steps}"):
        PipelineTimeline(every_n_steps=every_n_steps)
