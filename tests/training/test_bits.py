"""The same bits on any number of stages, under any schedule, and in plain Lightning."""

from __future__ import annotations

from typing import Any

import lightning as L
import pytest
import torch

from tests.launching import launch
from tests.training.models import LitGPT, gpt_stages, token_loader
from tests.training.runs import NUM_MICROBATCHES, Losses, differing, pipeline_trainer, plain_trainer, weights

pytestmark = pytest.mark.multiprocess

BATCH_SIZE = 8
# Three optimizer steps an epoch, of two batches each; in the ragged runs the fifth batch has 5 samples and steps alone.
EVEN, RAGGED = 6 * BATCH_SIZE, 4 * BATCH_SIZE + 5
TRAINING = {"accumulate_grad_batches": 2, "max_epochs": 2, "gradient_clip_val": 0.5}
SHORT = {**TRAINING, "max_epochs": 1}

Run = dict[str, Any]
RUNS: dict[str, Run] = {
    "dropout": {"model": {"dropout": 0.1}, "trainer": TRAINING, "samples": RAGGED},
    "plain": {"model": {}, "trainer": SHORT, "samples": EVEN},
    "tied": {"model": {"tied": True}, "trainer": SHORT, "samples": RAGGED},
    "by_value": {
        "model": {"dropout": 0.1},
        "trainer": {**SHORT, "gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"},
        "samples": 4 * BATCH_SIZE + 1,
    },
    "bf16-mixed": {"model": {"dropout": 0.1}, "trainer": {**SHORT, "precision": "bf16-mixed"}, "samples": RAGGED},
    "bf16-true": {"model": {"dropout": 0.1}, "trainer": {**SHORT, "precision": "bf16-true"}, "samples": RAGGED},
}
SPLIT = [("dropout", "1f1b"), ("dropout", "gpipe"), *((name, "1f1b") for name in RUNS if name != "dropout")]
MORE = {("dropout", "gpipe"), ("by_value", "1f1b"), ("bf16-true", "1f1b")}  # as others are


def run_all(world: int, runs: list[tuple[str, str]]) -> dict[tuple[str, str], Any]:
    """Each run with its schedule: losses on every rank, weights on rank 0."""
    results = {}
    for name, schedule in runs:
        run = RUNS[name]
        trainer = pipeline_trainer(gpt_stages(world), world=world, strategy={"schedule": schedule}, **run["trainer"])
        results[name, schedule] = fit(trainer, run, BATCH_SIZE)
    return results


def run_plain() -> Any:
    """The run without dropout in plain Lightning, over batches of micro-batch size."""
    options = {**SHORT, "accumulate_grad_batches": 2 * NUM_MICROBATCHES}
    return fit(plain_trainer(**options), RUNS["plain"], BATCH_SIZE // NUM_MICROBATCHES)


def fit(trainer: L.Trainer, run: Run, batch_size: int) -> dict[str, Any]:
    L.seed_everything(1, verbose=False)
    losses = Losses()
    trainer.callbacks.append(losses)
    module = LitGPT(**run["model"])
    trainer.fit(module, token_loader(run["samples"], batch_size, shuffle=True))
    return {"losses": losses.values, "weights": weights(trainer), "steps": trainer.global_step}


@pytest.fixture(scope="module")
def one_stage(wanted: Any) -> dict[str, Any]:
    asked = wanted([(name, "1f1b") for name in RUNS], MORE, "name", "schedule")
    runs = launch(run_all, 1, asked, world=1)[0]
    return {name: run for (name, _), run in runs.items()}


@pytest.fixture(
    scope="module", params=[pytest.param(2, id="2 stages"), pytest.param(4, id="4 stages", marks=pytest.mark.slow)]
)
def stages(request: pytest.FixtureRequest, wanted: Any) -> list[dict[tuple[str, str], Any]]:
    """All runs, by rank."""
    return launch(run_all, request.param, wanted(SPLIT, MORE, "name", "schedule"), world=request.param)


@pytest.mark.parametrize(
    ("name", "schedule"), [pytest.param(*run, marks=[pytest.mark.slow] * (run in MORE)) for run in SPLIT]
)
def test_losses_and_weights_are_those_of_one_stage(name: str, schedule: str, one_stage: Any, stages: Any) -> None:
    expected, found = one_stage[name], stages[0][name, schedule]
    assert found["steps"] == expected["steps"] == (6 if RUNS[name]["trainer"] is TRAINING else 3)
    assert found["losses"] == expected["losses"]
    assert not differing(found["weights"], expected["weights"])


def test_every_rank_sees_the_same_losses(stages: Any) -> None:
    for key, expected in stages[0].items():
        for other in stages[1:]:
            assert other[key]["losses"] == expected["losses"]


def test_the_runs_train_and_differ(one_stage: Any) -> None:
    for name, run in one_stage.items():
        assert len(set(run["losses"])) > len(run["losses"]) // 2, name
    assert one_stage["dropout"]["losses"][-1] < one_stage["dropout"]["losses"][0]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "schedule"), [("by_value", "1f1b")])
def test_clipping_by_value_differs(name: str, schedule: str, one_stage: Any) -> None:
    assert one_stage[name]["losses"] != one_stage["dropout"]["losses"][:5]


def test_plain_lightning_accumulating_over_the_micro_batches_gets_the_same_bits(one_stage: Any) -> None:
    plain = launch(run_plain, world=1)[0]
    ours = one_stage["plain"]
    assert plain["steps"] == ours["steps"] == 3
    assert not differing(plain["weights"], ours["weights"])
    # Lightning's own losses are divided by the number of batches that it accumulates over.
    assert torch.tensor(plain["losses"]).reshape(-1, NUM_MICROBATCHES).sum(1).tolist() == ours["losses"]
