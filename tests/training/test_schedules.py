"""Every schedule gives the bits of one stage, with virtual stages written either way, and of the user's own making."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning as L
import pytest
from torch import nn

from lightning_pipeline.schedules import Schedule, build, save_csv, simulate
from tests.launching import launch
from tests.training.models import NUM_BLOCKS, Block, LitTokens, token_loader
from tests.training.runs import Losses, differing, pipeline_trainer, weights

pytestmark = pytest.mark.multiprocess

SAMPLES, BATCH_SIZE, NUM_MICROBATCHES = 13, 8, 4  # the last batch has 5 samples, and so other micro-batches
WORLD = 2
ALONG = {"net.blocks.1": 1, "net.blocks.2": 2, "net.blocks.3": 3}
BY_GROUP = {"net.blocks.1": 1, "net.blocks.2": 0, "net.blocks.3": 1}
HALVES = {f"net.blocks.{NUM_BLOCKS // 2}": 1}


def own(num_stages: int, num_microbatches: int, num_virtual_stages: int) -> list[list[str]]:
    """The first rank does GPipe's order and the second one 1F1B's; as lists of text."""
    assert (num_stages, num_virtual_stages) == (WORLD, 1)
    microbatches = range(num_microbatches)
    first = [f"0F{i}" for i in microbatches] + [f"0B{i}" for i in microbatches]
    return [first, [f"1{kind}{i}" for i in microbatches for kind in "FB"]]


def ready(name: str) -> Schedule:
    return build(name, WORLD, NUM_MICROBATCHES, 2)


CASES: dict[str, tuple[Any, dict[str, int]]] = {
    "1f1b": ("1f1b", HALVES),
    "gpipe": ("gpipe", HALVES),
    "interleaved_1f1b": ("interleaved_1f1b", ALONG),
    "interleaved_1f1b by group": ("interleaved_1f1b", BY_GROUP),
    "interleaved_1f1b_low_memory": ("interleaved_1f1b_low_memory", ALONG),
    "looped_bfs": ("looped_bfs", BY_GROUP),
    "zero_bubble": ("zero_bubble", HALVES),
    "interleaved_zero_bubble": ("interleaved_zero_bubble", BY_GROUP),
    "zero_bubble_h2": ("zero_bubble_h2", HALVES),
    "zbv": ("zbv", ALONG),
    "v_half": ("v_half", ALONG),
    "v_min": ("v_min", ALONG),
    "dualpipe_v": ("dualpipe_v", ALONG),
    "a schedule": (ready("interleaved_1f1b"), ALONG),
    "a function": (own, HALVES),
}


MORE = {  # as others are
    *("interleaved_1f1b by group", "looped_bfs", "interleaved_zero_bubble", "zero_bubble_h2", "v_half", "v_min"),
    *("dualpipe_v", "a schedule", "a file"),
}
MORE_TIED = {"interleaved_1f1b by group", "zero_bubble", "zbv"}
NAMED = [name for name, (schedule, _) in CASES.items() if isinstance(schedule, str)]
TIED = ["1f1b", "interleaved_1f1b by group", "zero_bubble", "zbv"]


def often(names: list[str], more: set[str]) -> list[Any]:
    """Names of cases; those of `more` are slow."""
    return [pytest.param(name, marks=[pytest.mark.slow] * (name in more)) for name in names]


# On four ranks, of a model of eight blocks.
QUARTERS = {f"net.blocks.{2 * stage}": stage for stage in range(1, 4)}
EIGHTHS = {f"net.blocks.{stage}": stage for stage in range(1, 8)}
ON_FOUR = {"zero_bubble_h2": QUARTERS, "v_half": EIGHTHS, "v_min": EIGHTHS, "dualpipe_v": EIGHTHS}


class Deep(LitTokens):
    def make_net(self, **arguments: Any) -> nn.Module:
        net = super().make_net(**arguments)
        net.blocks.extend(Block(arguments["dropout"]) for _ in range(NUM_BLOCKS))
        return net


def run(
    schedule: Any, stage_config: dict[str, int], world: int, *, tied: bool, kind: type[LitTokens] = LitTokens
) -> dict[str, Any]:
    L.seed_everything(1, verbose=False)
    losses = Losses()
    strategy = {"schedule": schedule, "num_microbatches": NUM_MICROBATCHES}
    trainer = pipeline_trainer(
        stage_config, world=world, strategy=strategy, callbacks=[losses], max_epochs=1, gradient_clip_val=0.5
    )
    module = kind(dropout=0.1, tied=tied)
    loader = token_loader(SAMPLES, BATCH_SIZE, shuffle=True)
    trainer.fit(module, loader)
    found = {"losses": losses.values, "weights": weights(trainer), "live": trainer.strategy.peak_live}
    if not tied:
        found["loss"] = trainer.validate(module, loader, verbose=False)[0]["val_loss"]
    return found


def run_cases(world: int, csv: str, runs: list[tuple[str, bool]]) -> dict[tuple[str, bool], Any]:
    cases = {**CASES, "a file": (csv, ALONG)}
    return {(name, tied): run(*cases[name], world, tied=tied) for name, tied in runs}


def run_deep(world: int) -> dict[str, Any]:
    return {name: run(name, cut, world, tied=False, kind=Deep) for name, cut in ON_FOUR.items()}


@pytest.fixture(scope="module")
def csv(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("schedules") / "mine.csv"
    save_csv(ready("interleaved_1f1b_low_memory"), path)
    return path


@pytest.fixture(scope="module")
def one_process(csv: Path) -> dict[tuple[str, bool], Any]:
    return launch(run_cases, 1, str(csv), [("1f1b", False), ("1f1b", True)], world=1)[0]


@pytest.fixture(scope="module")
def two_ranks(csv: Path, wanted: Any) -> list[dict[tuple[str, bool], Any]]:
    runs = [(name, False) for name in wanted([*CASES, "a file"], MORE, "name")]
    runs += [(name, True) for name in wanted(TIED, MORE_TIED, "tied")]
    return launch(run_cases, WORLD, str(csv), runs, world=WORLD)


@pytest.mark.parametrize("name", often([*CASES, "a file"], MORE))
def test_the_bits_are_those_of_one_process(name: str, one_process: Any, two_ranks: Any) -> None:
    expected, found = one_process["1f1b", False], two_ranks[0][name, False]
    assert found["losses"] == two_ranks[1][name, False]["losses"] == expected["losses"]
    assert not differing(found["weights"], expected["weights"])
    assert found["loss"] == expected["loss"]


@pytest.mark.parametrize("tied", often(TIED, MORE_TIED))
def test_tied_weights_too(tied: str, one_process: Any, two_ranks: Any) -> None:
    expected, found = one_process["1f1b", True], two_ranks[0][tied, True]
    assert all(difference < 1e-5 for difference in differing(found["weights"], expected["weights"]).values())
    assert found["losses"] == pytest.approx(expected["losses"], abs=1e-5)


@pytest.mark.parametrize("name", often(NAMED, MORE))
def test_live_activations_are_as_many_as_simulated(name: str, two_ranks: Any) -> None:
    schedule, stage_config = CASES[name]
    num_virtual_stages = len(stage_config) // 2 + 1
    expected = simulate(build(schedule, WORLD, NUM_MICROBATCHES, num_virtual_stages)).peak_live
    assert [rank[name, False]["live"] for rank in two_ranks] == expected


@pytest.mark.slow
def test_four_ranks_give_the_bits_of_one_process_too() -> None:
    expected = launch(run_deep, 1, world=1)[0]["v_half"]
    ranks = launch(run_deep, 4, world=4)
    for name, cut in ON_FOUR.items():
        assert ranks[0][name]["losses"] == expected["losses"]
        assert not differing(ranks[0][name]["weights"], expected["weights"])
        assert ranks[0][name]["loss"] == expected["loss"]
        simulated = simulate(build(name, 4, NUM_MICROBATCHES, len(cut) // 4 + 1))
        assert [rank[name]["live"] for rank in ranks] == simulated.peak_live


def test_the_low_memory_order_holds_fewer(two_ranks: Any) -> None:
    low, usual = (two_ranks[0][name, False]["live"] for name in ("interleaved_1f1b_low_memory", "interleaved_1f1b"))
    assert low < usual
