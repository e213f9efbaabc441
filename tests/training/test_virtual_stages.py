"""Trainer's functions, checkpoints, memory and failures with several virtual stages on a rank."""

from __future__ import annotations

import gc
import os
import signal
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import EMAWeightAveraging, ModelCheckpoint
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_pipeline.engine.visit import Visit
from lightning_pipeline.schedules import build
from tests.launching import SOON_S, launch, run_ranks
from tests.training.measured import LitMeasured, measured_stages, point_loader
from tests.training.models import LitTokens, gpt_stages, token_loader
from tests.training.runs import Losses, differing, pipeline_trainer, plain_trainer, weights

pytestmark = pytest.mark.multiprocess

WORLD = 2
LOOP, V = "interleaved_1f1b", "zbv"
LAST = {LOOP: 1, V: 0}  # the rank of the last virtual stage
SCHEDULES = [pytest.param(LOOP, marks=pytest.mark.slow), V]
Result = dict[str, Any]


# -- what runs on one rank and on two ----------------------------------------------------------------------------------


def measured(schedule: str, world: int) -> Result:
    """All functions of a Trainer; the last batches have 5 samples, or one, which make fewer micro-batches."""
    stage_config = measured_stages(2 * world if world > 1 else 1)

    def make(**options: Any) -> L.Trainer:
        kept = {"schedule": schedule if world > 1 else "1f1b", "output_broadcast": options.pop("broadcast", True)}
        return pipeline_trainer(stage_config, world=world, strategy=kept, **options)

    L.seed_everything(5, verbose=False)
    losses = Losses()
    options = {"precision": "bf16-mixed", "accumulate_grad_batches": 2, "gradient_clip_val": 0.1, "max_epochs": 2}
    trainer = make(callbacks=[losses, EMAWeightAveraging(decay=0.5)], inference_mode=False, **options)
    module = LitMeasured(scheduler="one_cycle")
    trainer.fit(module, point_loader(21, shuffle=True), point_loader(21, seed=1))
    return {
        "losses": losses.values,
        "metrics": {name: float(value) for name, value in trainer.callback_metrics.items()},
        "test": trainer.test(module, point_loader(17, seed=3), verbose=False),
        "predict": trainer.predict(module, point_loader(17, seed=4)),
        "weights": weights(trainer),
        "kept": make(broadcast=False).predict(module, point_loader(9, seed=4)),
    }


class LitKeeps(LitTokens):
    """What its steps keep between the layers changes what later steps do."""

    def __init__(self) -> None:
        super().__init__()
        self.steps = 0
        self.since_hook: list[int] = []
        self.losses: list[Tensor] = []
        self.register_buffer("average", torch.zeros(()))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.steps += 1
        self.since_hook.append(batch_idx)
        loss = self.loss(batch) * (1 + 0.1 * self.steps + 0.01 * len(self.since_hook))
        self.average = 0.5 * self.average + 0.5 * loss.detach()
        self.losses.append(self.average)
        return loss + (loss - self.average).square()

    def on_train_batch_end(self, *_: Any) -> None:
        self.since_hook.clear()


def keeping(schedule: str, world: int) -> Result:
    L.seed_everything(1, verbose=False)
    losses, module = Losses(), LitKeeps()
    stage_config, strategy = gpt_stages(2 * world if world > 1 else 1), {"schedule": schedule if world > 1 else "1f1b"}
    trainer = pipeline_trainer(stage_config, world=world, strategy=strategy, callbacks=[losses], max_epochs=2)
    trainer.fit(module, token_loader(16, 8))
    return {
        "losses": losses.values,
        "weights": weights(trainer),
        "steps": module.steps,
        "kept": [float(loss) for loss in module.losses],
    }


def resumable(schedule: str | None, folder: Path, *, dropout: float, resume: bool = False) -> Result:
    """Two epochs, each of which leaves a checkpoint, or the second alone. Without a schedule: plain Lightning."""
    losses = Losses()
    options: dict[str, Any] = {"max_epochs": 2, "gradient_clip_val": 0.5, "callbacks": [losses]}
    if not resume:
        options["callbacks"].append(ModelCheckpoint(folder, "{epoch}", save_top_k=-1, auto_insert_metric_name=False))
        options["enable_checkpointing"] = True
    world = 1 if schedule in (None, "1f1b") else WORLD
    if schedule is None:
        trainer = plain_trainer(accumulate_grad_batches=4, **options)
    else:
        stage_config = gpt_stages(2 * world if world > 1 else 1)
        trainer = pipeline_trainer(stage_config, world=world, strategy={"schedule": schedule}, **options)
    L.seed_everything(2, verbose=False)
    loader = token_loader(16, 2 if schedule is None else 8)
    trainer.fit(LitTokens(dropout=dropout), loader, ckpt_path=folder / "0.ckpt" if resume else None)
    values = torch.tensor(losses.values)
    return {
        "losses": (values.reshape(-1, 4).sum(1) if schedule is None else values).tolist(),
        "weights": weights(trainer),
    }


class LiveActivations(L.Callback, TorchDispatchMode):
    """Bytes of what normalisations and activation functions have given and is alive: at most at once, and after each
    step."""

    def __init__(self) -> None:
        super().__init__()
        self.alive: list[StorageWeakRef] = []
        self.bytes: dict[int, int] = {}
        self.peak = 0
        self.left: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        if func in (torch.ops.aten.native_layer_norm.default, torch.ops.aten.gelu.default):
            storage = (found[0] if isinstance(found, tuple) else found).untyped_storage()
            self.alive.append(StorageWeakRef(storage))
            self.bytes[self.alive[-1].cdata] = storage.nbytes()
            self.peak = max(self.peak, self.count())
        return found

    def count(self) -> int:
        self.alive = [storage for storage in self.alive if not storage.expired()]
        return sum(self.bytes[cdata] for cdata in {storage.cdata for storage in self.alive})

    def on_train_start(self, *_: Any) -> None:
        self.forward = forward = Visit.forward

        def watched(visit: Visit, microbatch: int) -> None:
            with self:
                forward(visit, microbatch)

        Visit.forward = watched  # type: ignore[method-assign]

    def on_train_batch_end(self, *_: Any) -> None:
        self.left.append(self.count())

    def on_train_end(self, *_: Any) -> None:
        Visit.forward = self.forward  # type: ignore[method-assign]


def live(schedule: str, num_virtual_stages: int) -> Result:
    activations = LiveActivations()
    stage_config = gpt_stages(WORLD * num_virtual_stages)
    strategy = {"schedule": schedule, "num_microbatches": 8}
    trainer = pipeline_trainer(stage_config, world=WORLD, strategy=strategy, max_steps=2, callbacks=[activations])
    gc.disable()  # what is let go by itself does not wait for the collector
    try:
        trainer.fit(LitTokens(dropout=0.1), token_loader(32, 16))
    finally:
        gc.enable()
    return {"peak": activations.peak, "left": activations.left}


RESUMED = {  # dropout, the schedules that write and that go on, and on one stage
    "plain": (0.0, LOOP, V, ("1f1b", None)),
    "dropout": (0.1, V, "interleaved_zero_bubble", ("1f1b",)),
}
LIVE = {"1f1b": 1, "zero_bubble": 1, LOOP: 2, "interleaved_1f1b_low_memory": 2, "interleaved_zero_bubble": 2, V: 2}
MORE_LIVE = {"1f1b", "zero_bubble", LOOP, "interleaved_1f1b_low_memory", "interleaved_zero_bubble"}


def on_two(folder: Path, schedules: list[str], resumed: list[str], lively: list[str]) -> Result:
    results: Result = {schedule: measured(schedule, WORLD) for schedule in schedules}
    results["keeping"] = {schedule: keeping(schedule, WORLD) for schedule in schedules}
    results["written"], results["resumed"] = {}, {}
    for name in resumed:
        dropout, first, second, _ = RESUMED[name]
        results["written"][name] = resumable(first, folder / name, dropout=dropout)
        results["resumed"][name] = resumable(second, folder / name, dropout=dropout, resume=True)
    results["live"] = {schedule: live(schedule, LIVE[schedule]) for schedule in lively}
    return results


def on_one() -> Result:
    return {"measured": measured("1f1b", 1), "keeping": keeping("1f1b", 1)}


def resume_on_one(folder: Path, name: str) -> list[Result]:
    dropout, _, _, others = RESUMED[name]
    return [resumable(by, folder / name, dropout=dropout, resume=True) for by in others]


@pytest.fixture(scope="module")
def one() -> Result:
    return launch(on_one, world=1)[0]


@pytest.fixture(scope="module")
def ranks(folder: Path, wanted: Any, with_slow: bool) -> list[Result]:
    schedules, resumed = wanted([LOOP, V], [LOOP], "schedule"), wanted(RESUMED, RESUMED, "resumed")
    lively = [schedule for schedule in LIVE if with_slow or schedule not in MORE_LIVE]
    return launch(on_two, folder, schedules, resumed, lively, world=WORLD)


# -- tests -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_every_function_of_the_trainer_gives_the_bits_of_one_stage(schedule: str, one: Any, ranks: Any) -> None:
    expected = one["measured"]
    assert {"train_accuracy_epoch", "val_recall", "mean_hidden", "mean_loss"} <= expected["metrics"].keys()
    for rank in ranks:
        found = rank[schedule]
        for name in ("losses", "metrics", "test"):
            assert found[name] == expected[name], name
        assert [len(batch) for batch in found["predict"]] == [8, 8, 1]
        for batch, other in zip(found["predict"], expected["predict"], strict=True):
            assert torch.equal(batch, other)
    assert not differing(ranks[0][schedule]["weights"], expected["weights"])


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_predictions_stay_with_the_last_virtual_stage_when_asked(schedule: str, one: Any, ranks: Any) -> None:
    last = LAST[schedule]
    assert ranks[1 - last][schedule]["kept"] == [None, None]
    for batch, other in zip(ranks[last][schedule]["kept"], one["measured"]["kept"], strict=True):
        assert torch.equal(batch, other)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_every_rank_has_what_a_step_keeps(schedule: str, one: Any, ranks: Any) -> None:
    expected = one["keeping"]
    for rank in ranks:
        found = rank["keeping"][schedule]
        assert found["losses"] == expected["losses"]
        assert found["steps"] == expected["steps"] == 2 * 2 * 4  # epochs, batches, micro-batches
        assert found["kept"] == expected["kept"]
    assert not differing(ranks[0]["keeping"][schedule]["weights"], expected["weights"])
    assert float(expected["weights"]["average"]) != 0


@pytest.mark.slow
@pytest.mark.parametrize("resumed", RESUMED)
def test_a_run_resumes_on_any_placement(resumed: str, folder: Path, ranks: Any) -> None:
    (others,) = launch(resume_on_one, folder, resumed, world=1)
    written = ranks[0]["written"][resumed]
    assert len(written["losses"]) == 4
    for rank in ranks:
        assert rank["written"][resumed]["losses"] == written["losses"]
        assert rank["resumed"][resumed]["losses"] == written["losses"][2:]
    for found in (ranks[0]["resumed"][resumed], *others):
        assert found["losses"] == written["losses"][2:]
        assert not differing(found["weights"], written["weights"])


@pytest.mark.parametrize("lively", [pytest.param(n, marks=[pytest.mark.slow] * (n in MORE_LIVE)) for n in LIVE])
def test_no_activation_outlives_its_step(lively: str, ranks: Any) -> None:
    for rank in ranks:
        assert rank["live"][lively]["peak"] > 0
        assert rank["live"][lively]["left"] == [0, 0]


@pytest.mark.slow
def test_low_memory_orders_need_less_memory(ranks: Any) -> None:
    peaks = {name: [rank["live"][name]["peak"] for rank in ranks] for name in LIVE}
    assert peaks["interleaved_1f1b_low_memory"][0] < 0.9 * peaks[LOOP][0]
    assert max(peaks["zero_bubble"]) <= 1.1 * max(peaks["1f1b"])
    assert max(peaks[V]) <= 1.1 * max(peaks["1f1b"])


# -- failures ----------------------------------------------------------------------------------------------------------


class LitFails(LitTokens):
    """Something happens to one rank in one block at the third batch.

    Args:
        kill: the process is killed; else an exception is raised.
    """

    def __init__(self, block: int, rank: int, *, kill: bool) -> None:
        super().__init__()
        next(self.net.blocks[block].children()).register_forward_pre_hook(self.fail)
        self.rank = rank
        self.kill = kill
        self.calls = 0

    def fail(self, *_: Any) -> None:
        self.calls += 1
        if self.calls > 10 and self.global_rank == self.rank:
            if self.kill:
                os.kill(os.getpid(), signal.SIGKILL)
            raise FloatingPointError("the rank's own error")


def fail(block: int, rank: int, kill: bool, schedule: str) -> None:
    trainer = pipeline_trainer(gpt_stages(4), world=WORLD, strategy={"schedule": schedule}, max_steps=4)
    trainer.fit(LitFails(block, rank, kill=kill), token_loader(32, 8))


@pytest.mark.parametrize(
    ("failing", "block", "kill"),
    [
        pytest.param(V, 3, False, id="zbv raises"),
        pytest.param(LOOP, 2, True, id="interleaved is killed", marks=pytest.mark.slow),
        pytest.param(V, 3, True, id="zbv is killed", marks=pytest.mark.slow),
        pytest.param(LOOP, 2, False, id="interleaved raises", marks=pytest.mark.slow),
    ],
)
def test_a_failure_on_a_virtual_stage_ends_all_ranks(failing: str, block: int, kill: bool) -> None:
    placement = build(failing, WORLD, 4, 2).placement
    failed = placement[block]
    ended = run_ranks(fail, block, failed, kill, failing, world=WORLD)
    stages = [" and ".join(str(s) for s, place in enumerate(placement) if place == rank) for rank in range(WORLD)]
    assert ended[failed].exit_code == (-9 if kill else 1)
    other = ended[1 - failed]
    assert other.seconds < SOON_S
    reason = "its process ended" if kill else "FloatingPointError: the rank's own error"
    assert f"rank {failed} (virtual stages {stages[failed]}) failed: {reason}" in other.error
    assert f"rank {1 - failed} (virtual stages {stages[1 - failed]}) was waiting for" in other.error
