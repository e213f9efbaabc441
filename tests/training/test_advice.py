"""schedule="auto": the first steps are recorded, one schedule is chosen on every rank, and the bits stay."""

from __future__ import annotations

from typing import Any

import lightning as L
import pytest

from lightning_pipeline import PipelineStrategy
from lightning_pipeline.schedules import ScheduleError, check, simulate
from lightning_pipeline.strategy.advisor import Advisor
from lightning_pipeline.strategy.schedule_choice import ScheduleChoice
from tests.launching import launch
from tests.training.models import LitTokens, token_loader
from tests.training.runs import Losses, differing, pipeline_trainer, weights

ALONG = {"net.blocks.1": 1, "net.blocks.2": 2, "net.blocks.3": 3}
HALVES = {"net.blocks.2": 1}
NUM_MICROBATCHES = 4


def run(
    schedule: str, stage_config: dict[str, int], world: int, *, default_root_dir: str | None = None, **options: Any
) -> dict[str, Any]:
    L.seed_everything(1, verbose=False)
    losses = Losses()
    strategy = {"schedule": schedule, "num_microbatches": NUM_MICROBATCHES, **options}
    trainer = pipeline_trainer(
        stage_config,
        world=world,
        strategy=strategy,
        callbacks=[losses],
        max_epochs=2,
        default_root_dir=default_root_dir,
    )
    trainer.fit(LitTokens(dropout=0.1), token_loader(8 * 7 + 5, 8))  # the last batch has other micro-batches
    advice = trainer.strategy.advice
    return {
        "losses": losses.values,
        "weights": weights(trainer),
        "live": trainer.strategy.peak_live,
        "advice": advice and (advice.schedule, advice.step_seconds, advice.bubble, advice.considered),
        "order": advice and advice.order,
    }


def run_all(world: int, folder: str) -> dict[str, Any]:
    if world == 1:
        return {"one": run("1f1b", HALVES, 1)}
    return {
        "one stage a rank": run("auto", HALVES, world),
        "two stages a rank": run("auto", ALONG, world),
        "bounded": run("auto", ALONG, world, max_live_microbatches=2),
        "optimized": run("optimized", HALVES, world, default_root_dir=folder),
        "optimized and bounded": run("optimized", ALONG, world, max_live_microbatches=1.5, default_root_dir=folder),
        "pinned": run(f"{folder}/optimized.csv", ALONG, world),
    }


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return launch(run_all, 2, str(tmp_path_factory.mktemp("advice")), world=2)


@pytest.mark.multiprocess
def test_the_bits_are_those_of_one_process(ranks: Any) -> None:
    expected = launch(run_all, 1, "", world=1)[0]["one"]
    assert expected["advice"] is None
    for name, found in ranks[0].items():
        assert found["losses"] == expected["losses"], name
        assert not differing(found["weights"], expected["weights"]), name


@pytest.mark.multiprocess
def test_all_ranks_choose_the_same_and_say_what_they_expect(ranks: Any) -> None:
    considered = {
        "one stage a rank": {"gpipe", "1f1b", "interleaved_1f1b", "zero_bubble", "zero_bubble_h2"},
        "two stages a rank": {
            "gpipe",
            "interleaved_1f1b",
            "interleaved_1f1b_low_memory",
            "interleaved_zero_bubble",
        },
        "bounded": {"interleaved_1f1b_low_memory", "interleaved_zero_bubble"},
    }
    for name, names in considered.items():
        schedule, seconds, bubble, expected = ranks[0][name]["advice"]
        assert ranks[1][name]["advice"] == (schedule, seconds, bubble, expected)
        assert set(expected) == names
        assert expected[schedule] == seconds > 0
        assert 0 < bubble < 1
        assert seconds <= min(expected.values()) * 1.01


@pytest.mark.multiprocess
@pytest.mark.parametrize("name", ["optimized", "optimized and bounded"])
def test_an_order_is_searched_for_that_is_no_slower_than_any_with_a_name(name: str, ranks: Any) -> None:
    schedule, seconds, _, expected = ranks[0][name]["advice"]
    assert schedule == "optimized"
    assert seconds == min(expected.values())
    assert ranks[0][name]["order"] == ranks[1][name]["order"]
    check(ranks[0][name]["order"])


@pytest.mark.multiprocess
def test_a_bound_that_no_name_keeps_is_kept_by_the_order_that_is_searched_for(ranks: Any) -> None:
    assert set(ranks[0]["optimized and bounded"]["advice"][-1]) == {"optimized"}
    assert max(rank["optimized and bounded"]["live"] for rank in ranks) == 1.5 * 2  # two virtual stages a rank


@pytest.mark.multiprocess
def test_the_order_that_was_found_is_written_and_can_be_pinned(ranks: Any) -> None:
    order = ranks[0]["optimized and bounded"]["order"]
    expected = simulate(order).peak_live
    assert [rank["pinned"]["live"] for rank in ranks] == expected


@pytest.mark.multiprocess
def test_the_bound_is_kept_from_the_first_step(ranks: Any) -> None:
    assert max(rank["bounded"]["live"] for rank in ranks) <= 2 * 2  # two virtual stages a rank


def test_a_bound_that_nothing_keeps_is_told_at_once() -> None:
    sizes = {"num_stages": 4, "num_virtual_stages": 2, "num_microbatches": 8}
    with pytest.raises(ValueError, match=r"max_live_microbatches=2 is less than any schedule holds; .* holds 4"):
        Advisor(**sizes, max_live_microbatches=2)


def test_what_can_only_be_simulated_is_not_trained_with() -> None:
    with pytest.raises(ScheduleError, match="at most 4,096 ranks, and 262,144 passes"):
        ScheduleChoice("1f1b").bind(num_stages=64, num_virtual_stages=1, num_microbatches=4097)


def test_a_bound_without_a_choice_is_refused() -> None:
    with pytest.raises(ValueError, match=r'max_live_microbatches=2 goes with schedule="auto" or "optimized"'):
        PipelineStrategy(schedule="gpipe", max_live_microbatches=2)
