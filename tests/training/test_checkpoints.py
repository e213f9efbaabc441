"""Checkpoints are plain Lightning's files: any number of stages writes them, any number resumes from them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from tests.launching import launch
from tests.training.models import LitTokens, gpt_stages, token_loader
from tests.training.resumable import ResumableLoader
from tests.training.runs import NUM_MICROBATCHES, Losses, differing, pipeline_trainer, plain_trainer, weights

pytestmark = pytest.mark.multiprocess

BATCH_SIZE = 8
BATCHES = 3
EPOCHS = 2
PLAIN = 0  # in place of a number of stages


def trainer_of(num_stages: int, **options: Any) -> L.Trainer:
    """A Trainer over so many stages, or plain Lightning's over batches of micro-batch size."""
    options = {"max_epochs": EPOCHS, "gradient_clip_val": 0.5, "enable_checkpointing": True, **options}
    if num_stages == PLAIN:
        return plain_trainer(accumulate_grad_batches=NUM_MICROBATCHES, **options)
    return pipeline_trainer(gpt_stages(num_stages), world=num_stages, **options)


def data(num_stages: int) -> tuple[Any, Any]:
    """The same samples in the same order: for plain Lightning in batches of micro-batch size."""
    size = BATCH_SIZE // NUM_MICROBATCHES if num_stages == PLAIN else BATCH_SIZE
    return ResumableLoader(token_loader(BATCHES * BATCH_SIZE, size)), token_loader(2 * BATCH_SIZE, size)


def finish(trainer: L.Trainer, num_stages: int, *, dropout: float = 0.0, **named: Any) -> dict[str, Any]:
    """Fit, and give the losses of whole batches and the final weights."""
    losses = Losses()
    trainer.callbacks.append(losses)
    L.seed_everything(2, verbose=False)
    trainer.fit(LitTokens(dropout=dropout), *data(num_stages), **named)
    values = torch.tensor(losses.values)
    if num_stages == PLAIN:  # divided by the number of batches that are accumulated
        values = values.reshape(-1, NUM_MICROBATCHES).sum(1)
    return {"losses": values.tolist(), "weights": weights(trainer), "step": trainer.global_step}


def write(num_stages: int, folder: Path, dropout: float = 0.0) -> dict[str, Any]:
    """An uninterrupted run that leaves checkpoints: at each epoch's end, in the second's middle, after the fit."""
    best = ModelCheckpoint(folder, "best", monitor="val_loss", mode="max")
    every = ModelCheckpoint(folder, "epoch{epoch}", save_top_k=-1, auto_insert_metric_name=False)
    middle = ModelCheckpoint(folder, "step{step}", every_n_train_steps=4, save_top_k=-1, auto_insert_metric_name=False)
    trainer = trainer_of(num_stages, callbacks=[best, every, middle])
    result = finish(trainer, num_stages, dropout=dropout)
    trainer.save_checkpoint(folder / "saved.ckpt")
    trainer.save_checkpoint(folder / "weights.ckpt", weights_only=True)
    result["best_path"], result["best_score"] = best.best_model_path, float(best.best_model_score)
    (metrics,) = trainer.validate(ckpt_path="best", dataloaders=data(num_stages)[1], verbose=False)
    return {**result, "validated": metrics["val_loss"]}


def write_twice(folder: Path, dropouts: dict[str, float]) -> dict[str, Any]:
    """Two stages' runs."""
    return {name: write(2, folder / name, dropout) for name, dropout in dropouts.items()}


def resume(num_stages: int, folder: Path, with_slow: bool) -> dict[str, Any]:
    """What is left to do after the checkpoints of two stages and of plain Lightning."""
    runs: dict[str, Any] = {}
    for by in ("two", "plain"):
        trainer = trainer_of(num_stages, enable_checkpointing=False)
        runs[by] = finish(trainer, num_stages, ckpt_path=folder / by / "epoch0.ckpt")
    if num_stages != PLAIN and with_slow:  # plain Lightning counts other batches, and draws its dropout otherwise
        trainer = trainer_of(num_stages, enable_checkpointing=False)
        runs["dropout"] = finish(trainer, num_stages, dropout=0.1, ckpt_path=folder / "dropout" / "step4.ckpt")
    return runs


def validate_loaded(file: Path) -> float:
    """The file as somebody opens it who never heard of pipelines."""
    module = LitTokens.load_from_checkpoint(file)
    loader = token_loader(2 * BATCH_SIZE, BATCH_SIZE)
    return plain_trainer().validate(module, loader, verbose=False)[0]["val_loss"]


@pytest.fixture(scope="module")
def plain(folder: Path) -> dict[str, Any]:
    """Plain Lightning's uninterrupted run."""
    return launch(write, PLAIN, folder / "plain", world=1)[0]


@pytest.fixture(scope="module")
def two_stages(folder: Path, with_slow: bool) -> list[dict[str, Any]]:
    """Two stages' uninterrupted runs, by rank; with dropout among slow tests."""
    return launch(write_twice, folder, {"two": 0.0, **({"dropout": 0.1} if with_slow else {})}, world=2)


def test_files_look_like_plain_lightnings(folder: Path, plain: Any, two_stages: Any) -> None:
    names = {path.name for path in (folder / "plain").iterdir()}
    assert {path.name for path in (folder / "two").iterdir()} == names
    assert names == {"best.ckpt", "saved.ckpt", "weights.ckpt", "step4.ckpt"} | {
        f"epoch{epoch}.ckpt" for epoch in range(EPOCHS)
    }
    for name in names:
        ours, theirs = (torch.load(folder / by / name, weights_only=True) for by in ("two", "plain"))
        assert outline(ours["state_dict"]) == outline(theirs["state_dict"])
        assert ours.keys() == theirs.keys()
        assert not differing(dict(ours["state_dict"]), dict(theirs["state_dict"]))
        if name != "weights.ckpt":
            assert outline(ours["optimizer_states"]) == outline(theirs["optimizer_states"])
            torch.testing.assert_close(ours["optimizer_states"], theirs["optimizer_states"], rtol=0, atol=0)
            assert ours["epoch"] == theirs["epoch"] and ours["global_step"] == theirs["global_step"]


def outline(value: Any) -> Any:
    """Keys in order, types, shapes and dtypes."""
    if isinstance(value, dict):
        return [(key, outline(item)) for key, item in value.items()]
    if isinstance(value, (list, tuple)):
        return [outline(item) for item in value]
    if isinstance(value, torch.Tensor):
        return value.shape, value.dtype, value.device
    return type(value)


@pytest.mark.parametrize(
    "num_stages",
    [pytest.param(PLAIN, id="plain"), 2, *(pytest.param(count, marks=pytest.mark.slow) for count in (1, 4))],
)
def test_a_run_resumes_with_the_losses_of_the_uninterrupted_one(
    num_stages: int, folder: Path, plain: Any, two_stages: Any, with_slow: bool
) -> None:
    ranks = launch(resume, num_stages, folder, with_slow, world=max(num_stages, 1))
    expected = {"two": (plain, 3), "plain": (plain, 3), "dropout": (two_stages[0].get("dropout"), 4)}
    for rank in ranks:
        for name, run in rank.items():
            uninterrupted, done = expected[name]
            assert run["losses"] == uninterrupted["losses"][done:], name
            assert run["step"] == EPOCHS * BATCHES
    for name, run in ranks[0].items():
        assert not differing(run["weights"], expected[name][0]["weights"]), name


def test_two_stages_are_uninterrupted_alike(plain: Any, two_stages: Any) -> None:
    for rank in two_stages:
        assert rank["two"]["losses"] == plain["losses"]
    assert not differing(two_stages[0]["two"]["weights"], plain["weights"])


@pytest.mark.slow
def test_both_ranks_draw_the_same_dropout(plain: Any, two_stages: Any) -> None:
    first, second = (rank["dropout"]["losses"] for rank in two_stages)
    assert first == second != plain["losses"]


def test_a_file_opens_without_the_pipeline(folder: Path, two_stages: Any) -> None:
    (value,) = launch(validate_loaded, folder / "two" / "best.ckpt", world=1)
    assert value == pytest.approx(two_stages[0]["two"]["best_score"], rel=1e-6)


def test_the_best_checkpoint_is_loaded_on_every_rank(two_stages: Any) -> None:
    for rank in two_stages:
        run = rank["two"]
        assert run["validated"] == run["best_score"] == two_stages[0]["two"]["best_score"]
        assert run["best_path"].endswith("two/best.ckpt")
    assert torch.load(two_stages[0]["two"]["best_path"])["epoch"] < EPOCHS - 1
