"""stage_config="auto": a module that says nothing is cut well, alike on all ranks, and trains to the same bits."""

from __future__ import annotations

import os
import re
import signal
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.tuner import Tuner
from lightning.pytorch.utilities.exceptions import SIGTERMException
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import MeanMetric, SumMetric

from lightning_pipeline import PipelineRebalance, PipelineStrategy
from lightning_pipeline.engine.step import PipelineStep
from lightning_pipeline.partition.placeholder import is_absent
from lightning_pipeline.planning.profile import Profile
from lightning_pipeline.strategy import partitioner, trials
from tests.launching import launch
from tests.models.lit import LayerDrop
from tests.training.models import VOCABULARY, LitTokens, token_loader, tokens
from tests.training.runs import (
    NUM_MICROBATCHES,
    Losses,
    Present,
    differing,
    measured_shortly,
    pipeline_trainer,
    weights,
)

pytestmark = pytest.mark.multiprocess

RUNS: dict[str, dict[str, Any]] = {
    "1f1b": {"schedule": "1f1b"},
    "virtual": {"schedule": "interleaved_1f1b"},
    "v": {"schedule": "zbv"},
    "all chosen": {"schedule": "auto", "num_microbatches": "auto"},
    "1f1b, measured as ever": {"schedule": "1f1b"},
}
AS_EVER = "1f1b, measured as ever"  # and not shortly
MORE = {"virtual", "v", AS_EVER}  # as "all chosen" and "1f1b"
NUM_STAGES = {"1f1b": 2, AS_EVER: 2, "virtual": 4}  # of plans for two ranks


class Watched(LitTokens):
    """Counts what a step does to the module, the random numbers and the data."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.norm = nn.BatchNorm1d(17)
        self.steps = 0
        self.seen: list[int] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.steps += 1
        self.seen.append(batch_idx)
        logits = self(batch[0]).flatten(0, 1)
        loss = F.cross_entropy(self.norm(logits), batch[1].flatten())
        self.log("train_loss", loss)
        return loss


def fit(module: L.LightningModule, world: int, strategy: dict[str, Any], **options: Any) -> dict[str, Any]:
    losses, present = Losses(), Present()
    config = {} if world == 1 else "auto"
    trainer = pipeline_trainer(config, world=world, strategy=strategy, callbacks=[losses, present], **options)  # type: ignore[arg-type]
    trainer.fit(module, token_loader(8 * 2 + 5, 8, shuffle=True), options.pop("val", None))
    plan = trainer.strategy.plan
    return {
        "losses": losses.values,
        "weights": weights(trainer),
        "plan": plan and plan.as_dict(),
        "parameters": sorted(n for n, _ in module.named_parameters()),
        "live": present.names,
    }


def watched(world: int, strategy: dict[str, Any], **options: Any) -> dict[str, Any]:
    L.seed_everything(1, verbose=False)
    module = Watched(dropout=0.1)
    found = fit(module, world, strategy, **options)
    return {**found, "steps": module.steps, "seen": module.seen, "draw": float(torch.rand(()))}


def with_sanity_check(world: int) -> dict[str, Any]:
    L.seed_everything(1, verbose=False)
    losses = Losses()
    trainer = pipeline_trainer("auto" if world > 1 else {}, world=world, callbacks=[losses], max_epochs=1)  # type: ignore[arg-type]

    class Returning(LitTokens):
        def validation_step(self, batch: Any, batch_idx: int) -> Any:
            super().validation_step(batch, batch_idx)
            return {"of": batch_idx}  # and no loss

    module = Returning(dropout=0.1)
    trainer.fit(module, token_loader(32, 8), token_loader(16, 8))
    first = trainer.strategy.plan
    trainer.validate(module, token_loader(16, 8), verbose=False)
    again = pipeline_trainer(None, world=world, callbacks=[losses], max_epochs=1)  # type: ignore[arg-type]
    again.fit(module, token_loader(32, 8))
    return {
        "losses": losses.values,
        "val_loss": float(trainer.callback_metrics["val_loss"]),
        "cut": first and first.stage_config,
        "second": again.strategy.plan,
    }


class ReturnsEarly(LitTokens):
    """Validates the first layers alone."""

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.net.blocks[0](self.net.tokens(batch[0])).square().mean())


class CallsOthers(LitTokens):
    """Validates with a module that training does not call."""

    def __init__(self) -> None:
        super().__init__()
        self.probe = nn.Linear(VOCABULARY, 4)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.probe(self(batch[0])).square().mean())


class FastPath(LitTokens):
    """torch's own encoder calls no layers in evaluation."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.1, batch_first=True)
        encoder = nn.TransformerEncoder(layer, 4)
        self.net = nn.Sequential(nn.Embedding(VOCABULARY, 16), encoder, nn.Linear(16, VOCABULARY))


VALIDATING = (CallsOthers, ReturnsEarly, FastPath)


def validating(world: int) -> dict[str, Any]:
    """Fits that begin with a validation of another kind, before which a Trainer has validated as well."""
    found = {}
    for kind in VALIDATING:
        L.seed_everything(1, verbose=False)
        module, losses, seen = kind(), Losses(), []

        class Logged(L.Callback):
            def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule, seen: Any = seen) -> None:
                seen.append(float(trainer.callback_metrics["val_loss"]))

        trainer = pipeline_trainer(
            "auto" if world > 1 else {}, world=world, callbacks=[losses, Logged()], max_steps=1, max_epochs=1
        )  # type: ignore[arg-type]
        if kind is CallsOthers:
            trainer.validate(module, token_loader(8, 8), verbose=False)
        trainer.fit(module, token_loader(32, 8), token_loader(8, 8))
        found[kind.__name__] = {"losses": losses.values, "val": seen, "plan": trainer.strategy.plan}
    return found


def only_predicting(world: int) -> list[Tensor]:
    L.seed_everything(1, verbose=False)

    class Predicting(LitTokens):
        def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
            return self(batch[0])

    trainer = pipeline_trainer("auto" if world > 1 else {}, world=world)  # type: ignore[arg-type]
    return trainer.predict(Predicting(), token_loader(16, 8))  # type: ignore[return-value]


def a_stream(world: int) -> list[float]:
    """A data set that can be read once."""

    class Stream(torch.utils.data.IterableDataset):
        def __init__(self) -> None:
            self.left = iter([tokens(40)[i] for i in range(40)])

        def __iter__(self) -> Any:
            return self.left

    L.seed_everything(1, verbose=False)
    losses = Losses()
    trainer = pipeline_trainer("auto" if world > 1 else {}, world=world, callbacks=[losses], max_epochs=1)  # type: ignore[arg-type]
    trainer.fit(LitTokens(), DataLoader(Stream(), batch_size=8))
    return losses.values


def saved_and_read(world: int, folder: str) -> dict[str, Any]:
    """A checkpoint carries the plan, and a run that reads the saved plan is cut the same."""
    if world == 1:
        return {}
    L.seed_everything(1, verbose=False)
    trainer = pipeline_trainer("auto", world=world, max_steps=2)  # type: ignore[arg-type]
    trainer.fit(LitTokens(), token_loader(32, 8))
    trainer.save_checkpoint(f"{folder}/last.ckpt")
    plan = trainer.strategy.plan
    path = f"{folder}/plan.yaml"
    if trainer.is_global_zero:
        plan.save(path)
    trainer.strategy.barrier()
    pinned = L.Trainer(
        strategy=PipelineStrategy(stage_config=path, num_microbatches=4), devices=world, accelerator="cpu",
        max_steps=1, logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    pinned.fit(LitTokens(), token_loader(32, 8))
    stored = torch.load(f"{folder}/last.ckpt", weights_only=True)["pipeline_plan"]
    return {
        "plan": plan.as_dict(),
        "stored": stored,
        "pinned": pinned.strategy.plan is None,
        "keys": dict(pinned.strategy.pipeline.recorder.calls.stages.exact),
    }


def on_meta(world: int) -> dict[str, Any]:
    """What is not to be whole anywhere is cut before it is made."""
    if world == 1:
        return {}
    L.seed_everything(1, verbose=False)
    with torch.device("meta"):
        module = LitTokens()
    trainer = pipeline_trainer("auto", world=world, max_steps=2)  # type: ignore[arg-type]
    made: list[int] = []

    class Notes(L.Callback):
        def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
            blocks = [block for block in pl_module.net.blocks if not is_absent(next(block.parameters()))]
            made.append(len(blocks))

    trainer.callbacks.append(Notes())
    trainer.fit(module, token_loader(32, 8))
    return {"blocks": made, "plan": trainer.strategy.plan.as_dict()}


def out_of_memory(world: int) -> dict[str, Any]:
    """Where a measurement of the whole model does not fit, it is estimated."""
    if world == 1:
        return {}

    def fails(*_: Any) -> Any:
        raise torch.OutOfMemoryError("no memory")

    before, partitioner.measure_step = partitioner.measure_step, fails
    try:
        L.seed_everything(1, verbose=False)
        return fit(LitTokens(), world, {}, max_steps=1)
    finally:
        partitioner.measure_step = before


def unequal(world: int) -> dict[str, Any]:
    """Everything takes a millisecond on the first rank, as it does by itself, and three on the second one."""
    if world == 1:
        return {}
    measure_step = partitioner.measure_step
    seconds = 1e-3 * (1 + 2 * torch.distributed.get_rank())

    def even(*args: Any) -> Profile:
        costs = measure_step(*args)
        times = [seconds] * len(costs.positions)
        return costs.timed(times, times)

    with (
        mock.patch.object(partitioner, "measure_step", even),
        mock.patch.object(partitioner.Partitioner, "_measure_what_stages_cost"),
        mock.patch.object(trials, "worth_trying", lambda *args: []),
    ):
        L.seed_everything(1, verbose=False)
        return fit(LitTokens(), world, {}, max_steps=1)


def another_is_faster(world: int) -> dict[str, Any]:
    """Steps show what the simulation did not know."""
    if world == 1:
        return {}
    plans: list[Any] = []

    def takes(self: Any, found: Any) -> list[list[float]]:
        plans.extend(found)
        return [[2.0, 2.1, 2.0], [1.0, 1.1, 1.0]]

    with (
        mock.patch.object(trials.TrialSteps, "times", takes),
        mock.patch.object(trials, "worth_trying", lambda module, plans, limit: plans[:2]),
    ):
        L.seed_everything(1, verbose=False)
        found = fit(LitTokens(), world, {"schedule": "auto"}, max_steps=2)
    return {**found, "tried": [(plan.schedule, plan.stage_config) for plan in plans]}


def in_order_while_tried(world: int) -> list[int]:
    """How many micro-batches of each step of a trial run call by call, with a norm whose statistics a step changes."""
    if world == 1:
        return []
    counts: list[int] = []
    finished: list[Any] = []
    seconds, finish_in_order = trials.TrialSteps._seconds, PipelineStep._finish_in_order

    def step(self: Any, pipeline: Any) -> float:
        before = len(finished)
        took = seconds(self, pipeline)
        counts.append(len(finished) - before)
        return took

    def call_by_call(self: Any, *args: Any) -> None:
        finished.append(args)
        finish_in_order(self, *args)

    with (
        mock.patch.object(trials.TrialSteps, "_seconds", step),
        mock.patch.object(PipelineStep, "_finish_in_order", call_by_call),
        mock.patch.object(trials, "worth_trying", lambda module, plans, limit: plans[:1]),
    ):
        watched(world, {}, max_steps=1)
    return counts


def other_ways_between_ranks(world: int) -> dict[str, Any]:
    """Plans that are tried send where the pipeline did not before."""
    if world == 1:
        return {}
    with mock.patch.object(partitioner, "_CONSIDERED", {2: ("interleaved_1f1b",)}):
        return watched(world, {"schedule": "auto"}, max_steps=2)


def layers_left_out(world: int) -> dict[str, Any]:
    """Half of the layers are, at random: a cut inside of one would be missed."""
    L.seed_everything(1, verbose=False)
    losses = Losses()
    trainer = pipeline_trainer("auto" if world > 1 else {}, world=world, callbacks=[losses], max_steps=6)  # type: ignore[arg-type]
    data = torch.randn(48, 8, generator=torch.Generator().manual_seed(0))
    trainer.fit(LayerDrop(), DataLoader(TensorDataset(data, torch.arange(48) % 4), batch_size=8))
    return {"losses": losses.values, "cut": trainer.strategy.plan and trainer.strategy.plan.stage_config}


class Twice(LitTokens):
    """Calls all of its modules twice, so that no stage can begin with one."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        ids, targets = batch
        return super().training_step(batch, batch_idx) + self.loss((ids.flip(1), targets))


def all_called_twice(world: int) -> dict[str, Any]:
    L.seed_everything(1, verbose=False)
    losses = Losses()
    trainer = pipeline_trainer("auto" if world > 1 else {}, world=world, callbacks=[losses], max_epochs=1)  # type: ignore[arg-type]
    trainer.fit(Twice(), token_loader(32, 8))
    return {"losses": losses.values, "cut": trainer.strategy.plan and trainer.strategy.plan.stage_config}


def found_learning_rate(world: int) -> dict[str, Any]:
    """A search for it is a whole run within a hook, in which the module is cut."""
    L.seed_everything(1, verbose=False)
    module, losses = LitTokens(), Losses()
    trainer = pipeline_trainer("auto" if world > 1 else {}, world=world, callbacks=[losses], max_epochs=1)  # type: ignore[arg-type]
    found = Tuner(trainer).lr_find(
        module, token_loader(32, 8), num_training=6, early_stop_threshold=None, update_attr=False
    )
    trainer.fit(module, token_loader(32, 8))
    return {"losses": losses.values, "found": found.results}


class Counts(LitTokens):
    """Its loss comes out of a metric, is written into another one, and changes with the calls."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0
        self.mean, self.sum = MeanMetric(), SumMetric()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.calls += 1
        loss = self.mean(super().training_step(batch, batch_idx)) * (1 + self.calls % 3)
        self.sum.update(loss.detach())
        return loss


def state_of_the_module(world: int) -> list[float]:
    L.seed_everything(1, verbose=False)
    losses = Losses()
    trainer = pipeline_trainer("auto" if world > 1 else {}, world=world, callbacks=[losses], max_epochs=1)  # type: ignore[arg-type]
    module = Counts()
    trainer.fit(module, token_loader(32, 8))
    return [*losses.values, float(module.sum.sum_value)]


def badly_cut(world: int) -> dict[str, Any]:
    """A run with an uneven cut is told of a better one, and goes on with its own."""
    if world == 1:
        return {}
    L.seed_everything(1, verbose=False)
    advisor = PipelineRebalance(first_step=2, num_steps=3)
    trainer = pipeline_trainer({"net.blocks.1": 1}, world=world, callbacks=[advisor], max_epochs=1)
    trainer.fit(LitTokens(), token_loader(8 * 8, 8))
    found = advisor.rebalance
    assert found is not None
    return {"now": found.now.stage_config, "better": found.better.stage_config, "text": str(found), "gain": found.gain}


def stopped_before_it_is_cut(world: int) -> int:
    """A signal that comes before the first step counts, though that step sets the pipeline up anew."""
    if world == 1:
        return 0

    class Stops(L.Callback):
        def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
            if trainer.global_rank == 1:
                os.kill(os.getpid(), signal.SIGTERM)

    losses = Losses()
    trainer = pipeline_trainer("auto", world=world, callbacks=[losses, Stops()], max_epochs=1)  # type: ignore[arg-type]
    with pytest.raises(SIGTERMException):
        trainer.fit(LitTokens(), token_loader(32, 8))
    return len(losses.values)


def run_all(world: int, folder: str, names: list[str], with_slow: bool) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name in names:
        with nullcontext() if name == AS_EVER else measured_shortly():
            found[name] = watched(world, {**RUNS[name]}, max_epochs=1)
    with measured_shortly():
        rare = rare_ones(world) if with_slow else {}
        return {"runs": found, **others(world, folder), **rare}


def others(world: int, folder: str) -> dict[str, Any]:
    return {
        "sanity": with_sanity_check(world),
        "saved": saved_and_read(world, folder),
        "meta": on_meta(world),
        "out of memory": out_of_memory(world),
        "unequal": unequal(world),
        "another": another_is_faster(world),
        "in order": in_order_while_tried(world),
        "badly cut": badly_cut(world),
        "stopped": stopped_before_it_is_cut(world),
    }


def rare_ones(world: int) -> dict[str, Any]:
    """Those of slow tests."""
    return {
        "validating": validating(world),
        "left out": layers_left_out(world),
        "learning rate": found_learning_rate(world),
        "predictions": only_predicting(world),
        "stream": a_stream(world),
        "twice": all_called_twice(world),
        "state": state_of_the_module(world),
        "other ways": other_ways_between_ranks(world),
    }


@pytest.fixture(scope="module")
def one(tmp_path_factory: Any, with_slow: bool) -> dict[str, Any]:
    return launch(run_all, 1, str(tmp_path_factory.mktemp("one")), ["1f1b"], with_slow, world=1)[0]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: Any, wanted: Any, with_slow: bool) -> list[dict[str, Any]]:
    return launch(run_all, 2, str(tmp_path_factory.mktemp("two")), wanted(RUNS, MORE, "name"), with_slow, world=2)


@pytest.mark.parametrize("name", ["1f1b", *(pytest.param(name, marks=pytest.mark.slow) for name in sorted(MORE))])
def test_the_bits_are_those_of_one_process(name: str, one: Any, ranks: Any) -> None:
    expected, found = one["runs"]["1f1b"], ranks[0]["runs"][name]
    assert expected["plan"] is None
    assert found["losses"] == expected["losses"]
    assert not differing(found["weights"], expected["weights"])


def test_all_ranks_have_the_same_plan_and_hold_their_part(ranks: Any) -> None:
    for name in ranks[0]["runs"]:
        first, second = (rank["runs"][name] for rank in ranks)
        assert first["plan"] == second["plan"]
        assert first["plan"]["is_measured"] and first["plan"]["is_tried"]
        assert len(first["plan"]["stages"]) == {"1f1b": 2, AS_EVER: 2, "virtual": 4}.get(
            name, len(first["plan"]["stages"])
        )
        assert first["live"] and second["live"] and set(first["live"]).isdisjoint(second["live"])
        assert sorted(first["live"] + second["live"]) == first["parameters"]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["v"])
def test_schedules_of_virtual_stages_are_given_them(name: str, ranks: Any) -> None:
    assert [stage["rank"] for stage in ranks[0]["runs"][name]["plan"]["stages"]] == [0, 1, 1, 0]


def test_the_number_of_micro_batches_is_chosen(ranks: Any) -> None:
    assert ranks[0]["runs"]["all chosen"]["plan"]["num_microbatches"] in (2, 4, 8)


def test_measuring_leaves_no_trace(one: Any, ranks: Any) -> None:
    expected = one["runs"]["1f1b"]
    for rank in ranks:
        found = rank["runs"]["1f1b"]
        assert found["losses"] == expected["losses"]
        assert (found["steps"], found["seen"]) == (expected["steps"], expected["seen"])
    assert ranks[0]["runs"]["1f1b"]["draw"] == expected["draw"]  # the others do not shuffle


def test_a_sanity_check_and_other_trainers_come_before_and_after(one: Any, ranks: Any) -> None:
    for rank in ranks:
        assert rank["sanity"]["losses"] == one["sanity"]["losses"]
        assert rank["sanity"]["val_loss"] == pytest.approx(one["sanity"]["val_loss"])
        assert rank["sanity"]["cut"]
        assert rank["sanity"]["second"] is None  # its parts are on their ranks already


@pytest.mark.slow
@pytest.mark.parametrize("kind", VALIDATING)
def test_the_training_step_decides_whatever_is_validated_before(kind: Any, one: Any, ranks: Any) -> None:
    expected = one["validating"][kind.__name__]
    for rank in ranks:
        found = rank["validating"][kind.__name__]
        assert found["losses"] == expected["losses"]
        assert found["val"] == pytest.approx(expected["val"], rel=1e-5)
        assert found["plan"].stage_config


@pytest.mark.slow
def test_a_module_that_only_predicts(one: Any, ranks: Any) -> None:
    for found, expected in zip(ranks[0]["predictions"], one["predictions"], strict=True):
        assert torch.equal(found, expected)


@pytest.mark.slow
def test_data_that_can_be_read_once_is_read_once(one: Any, ranks: Any) -> None:
    assert len(one["stream"]) == 5
    assert ranks[1]["stream"] == one["stream"]


def test_a_plan_is_stored_saved_and_read(ranks: Any) -> None:
    found = ranks[1]["saved"]
    assert found["stored"] == found["plan"]
    assert found["pinned"]
    assert found["keys"] == found["plan"]["stage_config"]


def test_a_module_on_the_meta_device_is_cut_before_it_is_made(ranks: Any) -> None:
    plans = [rank["meta"]["plan"] for rank in ranks]
    assert plans[0] == plans[1]
    assert not plans[0]["is_measured"]
    assert [rank["meta"]["blocks"] for rank in ranks] == [[2], [2]]


def test_what_does_not_fit_to_be_measured_is_estimated(ranks: Any) -> None:
    for plan in (rank["out of memory"]["plan"] for rank in ranks):
        assert not plan["is_measured"] and not plan["is_tried"]


@pytest.mark.slow
def test_layers_that_are_left_out_at_random(one: Any, ranks: Any) -> None:
    assert len(one["left out"]["losses"]) == 6
    for rank in ranks:
        assert rank["left out"]["losses"] == one["left out"]["losses"]
        assert all(name.count(".") < 2 for name in rank["left out"]["cut"])


@pytest.mark.slow
def test_modules_that_are_called_twice_are_shared_out(one: Any, ranks: Any) -> None:
    for rank in ranks:
        assert rank["twice"]["losses"] == one["twice"]["losses"]
        assert {*rank["twice"]["cut"].values()} == {0, 1}


@pytest.mark.slow
def test_a_learning_rate_is_searched_for_before_the_cut(one: Any, ranks: Any) -> None:
    assert one["learning rate"]["found"]["loss"]
    for rank in ranks:
        assert rank["learning rate"] == one["learning rate"]


@pytest.mark.slow
def test_plans_are_tried_on_the_module_as_it_was(one: Any, ranks: Any) -> None:
    """Though ranks have measured its step more or less often, and one of them has recorded it."""
    assert len(one["state"]) == 5
    for rank in ranks:
        assert rank["state"] == one["state"]


def test_a_slower_device_gets_less_to_do(ranks: Any) -> None:
    first, second = ranks[1]["unequal"]["plan"]["stages"]
    assert 0 < second["flops"] < 0.5 * first["flops"]
    assert second["forward"] / first["forward"] == pytest.approx(1, abs=0.5)  # each on its rank


def test_a_plan_that_is_faster_than_the_simulated_best_is_taken(ranks: Any) -> None:
    for found in (rank["another"] for rank in ranks):
        plan = found["plan"]
        assert (plan["schedule"], plan["stage_config"]) == found["tried"][1] != found["tried"][0]
        assert plan["step_seconds"] == 1.0 and plan["is_tried"]
        assert len(found["losses"]) == 2


def test_plans_are_timed_as_they_will_run(ranks: Any) -> None:
    """As in training, stages run all at once from the second step on, though one of them writes into buffers."""
    for first, *timed in (rank["in order"] for rank in ranks):
        assert first == NUM_MICROBATCHES
        assert len(timed) >= 2 and not any(timed)


@pytest.mark.slow
def test_plans_of_virtual_stages_are_tried(one: Any, ranks: Any) -> None:
    found = ranks[0]["other ways"]
    assert len(found["plan"]["stages"]) == 4 and found["plan"]["is_tried"]
    assert found["losses"] == one["runs"]["1f1b"]["losses"][:2]


def test_a_run_says_which_modules_to_move(ranks: Any) -> None:
    first, second = (rank["badly cut"] for rank in ranks)
    assert first == second
    assert first["now"] == {"net.blocks.1": 1}
    # What it says depends on how busy the machine was; tests/planning/test_costs.py gives it times.
    assert first["gain"] >= 0
    assert (first["better"] == first["now"]) or re.search(
        r"move \S+( to \S+)? from stage . to stage .: expects", first["text"]
    )


def test_a_signal_before_the_cut_ends_all_after_the_first_batch(ranks: Any) -> None:
    assert [rank["stopped"] for rank in ranks] == [1, 1]


def test_a_file_without_a_cut_is_refused(tmp_path: Path) -> None:
    from lightning_pipeline.partition.stage_config import read_stage_config

    with pytest.raises(FileNotFoundError, match=r"plan.yaml' is no file: give \"auto\""):
        read_stage_config(nn.Linear(1, 1), tmp_path / "plan.yaml")
    (tmp_path / "plan.yaml").write_text("num_stages: 2\nstage_config:\n")
    with pytest.raises(ValueError, match="has no stage_config"):
        read_stage_config(nn.Linear(1, 1), str(tmp_path / "plan.yaml"))
