"""schedule="auto": the first steps are recorded, one schedule is chosen on every rank, and the bits stay."""

from __future__ import annotations

import re
from typing import Any

import lightning as L
import pytest
from lightning.pytorch.callbacks import Callback

from lightning_pipeline import PipelineStrategy
from lightning_pipeline.schedules import ScheduleError, check, simulate
from lightning_pipeline.schedules.optimizing import held_of_one
from lightning_pipeline.strategy.advisor import Advisor
from lightning_pipeline.strategy.schedule_choice import ScheduleChoice
from lightning_pipeline.strategy.validation import check_by_hand
from tests.launching import launch
from tests.training.models import LitTokens, token_loader
from tests.training.runs import Losses, differing, pipeline_trainer, weights

ALONG = {"net.blocks.1": 1, "net.blocks.2": 2, "net.blocks.3": 3}
HALVES = {"net.blocks.2": 1}
NUM_MICROBATCHES = 4
IN_BYTES = {"bytes": (HALVES, (0, 1), 1.0), "bytes of several": (ALONG, (0, 1, 0, 1), 1.5)}
MORE = {"bytes of several"}
"""Where the model is cut, the rank of each virtual stage, and room for how many micro-batches there is."""


class Peaks(Callback):
    """Keeps the most bytes that were saved at once in each step."""

    def __init__(self) -> None:
        self.values: list[int] = []

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        trainer.strategy.observers.add(lambda span: None)  # so that bytes are counted in all steps

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        offload = trainer.strategy.pipeline.offload
        self.values.append(0 if offload is None else offload.peak_bytes)


def run(
    schedule: str, stage_config: dict[str, int], world: int, *, default_root_dir: str | None = None, **options: Any
) -> dict[str, Any]:
    """An epoch of twelve steps, of which the first ten are recorded at most, where a schedule is chosen."""
    L.seed_everything(1, verbose=False)
    losses, peaks = Losses(), Peaks()
    strategy = {"schedule": schedule, "num_microbatches": NUM_MICROBATCHES, **options}
    trainer = pipeline_trainer(
        stage_config,
        world=world,
        strategy=strategy,
        callbacks=[losses, peaks],
        max_epochs=1,
        default_root_dir=default_root_dir,
    )
    trainer.fit(LitTokens(dropout=0.1), token_loader(8 * 11 + 5, 8))  # the last batch has other micro-batches
    advice, advisor = trainer.strategy.advice, trainer.strategy.session.advisor
    return {
        "kept": advisor and advisor.kept,
        "peak": max(peaks.values),
        "losses": losses.values,
        "weights": weights(trainer),
        "live": trainer.strategy.peak_live,
        "advice": advice and (advice.schedule, advice.step_seconds, advice.bubble, advice.considered),
        "order": advice and advice.order,
    }


def run_all(world: int, folder: str, with_slow: bool) -> dict[str, Any]:
    if world == 1:
        return {"one": run("1f1b", HALVES, 1)}
    found = {
        "one stage a rank": run("auto", HALVES, world),
        "optimized and bounded": run("optimized", ALONG, world, max_live_microbatches=1.5, default_root_dir=folder),
        "pinned": run(f"{folder}/optimized.csv", ALONG, world),
    }
    if with_slow:
        found |= {
            "two stages a rank": run("auto", ALONG, world),
            "bounded": run("auto", ALONG, world, max_live_microbatches=2),
            "optimized": run("optimized", HALVES, world, default_root_dir=folder),
        }
    folder = f"{folder}/in bytes"
    for name, (cut, placement, room) in IN_BYTES.items():
        if name in MORE and not with_slow:
            continue
        free = found[f"{name} without a bound"] = run(
            "optimized", cut, world, max_live_bytes=1 << 60, default_root_dir=folder
        )
        most = int(room * max(held_of_one(placement, free["kept"])))
        found[name] = run("optimized", cut, world, max_live_bytes=most, default_root_dir=folder) | {"most": most}
    return found


def refuse(world: int) -> list[str]:
    found = []
    for most in (100, 12_345):
        with pytest.raises(ValueError) as error:
            run("optimized", HALVES, world, max_live_bytes=most)
        found.append(str(error.value))
    return found


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory, with_slow: bool) -> list[dict[str, Any]]:
    return launch(run_all, 2, str(tmp_path_factory.mktemp("advice")), with_slow, world=2)


@pytest.mark.multiprocess
def test_the_bits_are_those_of_one_process(ranks: Any) -> None:
    expected = launch(run_all, 1, "", False, world=1)[0]["one"]
    assert expected["advice"] is None
    for name, found in ranks[0].items():
        assert found["losses"] == expected["losses"], name
        assert not differing(found["weights"], expected["weights"]), name


CONSIDERED = {
    "one stage a rank": {"gpipe", "1f1b", "interleaved_1f1b", "zero_bubble", "zero_bubble_h2"},
    "two stages a rank": {"gpipe", "interleaved_1f1b", "interleaved_1f1b_low_memory", "interleaved_zero_bubble"},
    "bounded": {"interleaved_1f1b_low_memory", "interleaved_zero_bubble"},
}


@pytest.mark.multiprocess
@pytest.mark.parametrize(
    "name", ["one stage a rank", *(pytest.param(n, marks=pytest.mark.slow) for n in ("two stages a rank", "bounded"))]
)
def test_all_ranks_choose_the_same_and_say_what_they_expect(name: str, ranks: Any) -> None:
    schedule, seconds, bubble, expected = ranks[0][name]["advice"]
    assert ranks[1][name]["advice"] == (schedule, seconds, bubble, expected)
    assert set(expected) == CONSIDERED[name]
    assert expected[schedule] == seconds > 0
    assert 0 < bubble < 1
    assert seconds <= min(expected.values()) * 1.01


@pytest.mark.multiprocess
@pytest.mark.parametrize("name", [pytest.param("optimized", marks=pytest.mark.slow), "optimized and bounded"])
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


@pytest.mark.slow
@pytest.mark.multiprocess
def test_the_bound_is_kept_from_the_first_step(ranks: Any) -> None:
    assert max(rank["bounded"]["live"] for rank in ranks) <= 2 * 2  # two virtual stages a rank


@pytest.mark.multiprocess
@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.slow] * (name in MORE)) for name in IN_BYTES])
def test_a_bound_in_bytes_is_kept_in_every_step(name: str, ranks: Any) -> None:
    bounded, free = ([rank[key] for rank in ranks] for key in (name, f"{name} without a bound"))
    assert bounded[0]["kept"] == bounded[1]["kept"] == free[0]["kept"]
    assert all(size > 0 for size in bounded[0]["kept"])
    assert all(0 < rank["peak"] <= rank["most"] for rank in bounded)
    assert max(rank["peak"] for rank in free) > bounded[0]["most"]
    assert bounded[0]["order"] == bounded[1]["order"]
    check(bounded[0]["order"])


@pytest.mark.multiprocess
def test_too_few_bytes_are_told_with_the_least_that_do() -> None:
    for told in zip(*launch(refuse, 2, world=2), strict=True):
        assert len(set(told)) == 1
        assert re.search(
            r"max_live_bytes=(100|12345) is less than rank 1 of the pipeline saves of one micro-batch, (\d{5}) bytes "
            r"in the first steps: give \2 or more, or raise num_microbatches=4 or num_stages",
            told[0],
        )


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
    for schedule in ("1f1b", "auto"):
        with pytest.raises(ValueError, match=rf'max_live_bytes=2 goes with schedule="optimized".* {schedule!r} leave'):
            PipelineStrategy(schedule=schedule, max_live_bytes=2)


def test_steps_by_hand_are_not_bounded_in_bytes() -> None:
    module = LitTokens()
    check_by_hand(module, None)
    with pytest.raises(ValueError, match=r"max_live_bytes=9 is kept by .*, and LitTokens has automatic_opt"):
        check_by_hand(module, 9)


def test_one_bound_at_a_time() -> None:
    with pytest.raises(ValueError, match="max_live_bytes=9 and max_live_microbatches=2 bound the same: leave one"):
        PipelineStrategy(schedule="optimized", max_live_bytes=9, max_live_microbatches=2)
    for value in (0, 1.5, "1GiB", True):
        with pytest.raises(ValueError, match=f"max_live_bytes is a whole number from 1, got {value!r}"):
            PipelineStrategy(schedule="optimized", max_live_bytes=value)  # type: ignore[arg-type]
