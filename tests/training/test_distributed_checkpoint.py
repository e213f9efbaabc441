"""Checkpoint folders, written by all ranks at once, hold what a plain file of the same run does, for any layout."""

from __future__ import annotations

import copy
import os
import shutil
import threading
from collections.abc import Generator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins import AsyncCheckpointIO
from torch.distributed import checkpoint as dcp
from torch.utils.data import DataLoader, DistributedSampler
from typer.testing import CliRunner

from lightning_pipeline import PipelineStrategy
from lightning_pipeline.cli import app
from tests.file_limit import small_files
from tests.launching import PATIENCE_S, launch
from tests.training.models import LitTokens, gpt_stages, tokens
from tests.training.runs import QUIET, Losses, plain_trainer

pytestmark = pytest.mark.multiprocess

WORLD = 4
SAMPLES, BATCH_SIZE, NUM_MICROBATCHES, EPOCHS = 16, 8, 4, 2  # of one process
VIRTUAL = "interleaved_1f1b"
LAYOUTS: dict[str, dict[str, Any]] = {
    "2 x 2, zero1": {"num_stages": 2, "data_parallel": "zero1"},
    "2 x 2, fsdp": {"num_stages": 2, "data_parallel": "fsdp"},
    "2 x 2, virtual stages": {"num_stages": 2, "schedule": VIRTUAL},
}
OTHERS: dict[str, dict[str, Any]] = {  # in which the runs above resume
    "2 x 2, zero1": {"num_stages": 2, "data_parallel": "fsdp"},
    "2 x 2, fsdp": {"num_stages": 4},
    "2 x 2, virtual stages": {"num_stages": 1, "data_parallel": "zero1"},
}


MORE = {"2 x 2, zero1", "2 x 2, virtual stages"}
NAMES = [pytest.param(name, marks=[pytest.mark.slow] * (name in MORE)) for name in LAYOUTS]


class LitTied(LitTokens):
    """With parameter groups, a buffer that is another one on each replica, and state that is no tensor."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**{**options, "tied": True})
        self.register_buffer("rank", torch.zeros(()))

    def on_train_batch_end(self, *args: Any) -> None:
        self.rank.fill_(self.global_rank)

    def get_extra_state(self) -> Any:
        return {"note": "kept"}

    def set_extra_state(self, state: Any) -> None:
        assert state == {"note": "kept"}

    def configure_optimizers(self) -> Any:
        matrices = [parameter for parameter in self.parameters() if parameter.ndim > 1]
        others = [parameter for parameter in self.parameters() if parameter.ndim <= 1]
        return torch.optim.AdamW([{"params": matrices}, {"params": others}], lr=1e-3, eps=1e-4)


class LitOneGroup(LitTied):
    """The same model with another optimizer."""

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters())


class LitOther(LitTied):
    """Another model."""

    def __init__(self) -> None:
        super().__init__()
        self.net.blocks[3].mlp[2] = torch.nn.Linear(64, 16, bias=False)
        self.net.blocks[0].mlp_norm = torch.nn.LayerNorm(8)
        self.net.more = torch.nn.Linear(2, 2)


def trainer_of(world: int, layout: dict[str, Any], **options: Any) -> L.Trainer:
    num_stages = layout["num_stages"]
    strategy = PipelineStrategy(
        stage_config=gpt_stages(4 if layout.get("schedule") == VIRTUAL else num_stages),
        num_microbatches=NUM_MICROBATCHES * num_stages // world,
        save_distributed_checkpoint=True,
        timeout=PATIENCE_S,
        **layout,
    )
    options = {**QUIET, "max_epochs": EPOCHS, "precision": "64-true", "use_distributed_sampler": False, **options}
    return L.Trainer(strategy=strategy, devices=world, **options)


def loader(trainer: L.Trainer, layout: dict[str, Any]) -> DataLoader:
    rank, world = int(os.environ["LOCAL_RANK"]), trainer.strategy.num_processes
    replicas = world // layout["num_stages"]
    sampler = DistributedSampler(tokens(SAMPLES), replicas, rank % replicas, shuffle=False)
    return DataLoader(tokens(SAMPLES), batch_size=BATCH_SIZE // replicas, sampler=sampler)


def fit(trainer: L.Trainer, layout: dict[str, Any], ckpt_path: Any = None) -> dict[str, Any]:
    L.seed_everything(1 if ckpt_path is None else 2, verbose=False)
    losses = Losses()
    trainer.callbacks.append(losses)
    trainer.fit(LitTied(), loader(trainer, layout), ckpt_path=ckpt_path)
    module = trainer.strategy.gather_module()
    return {"losses": losses.values, "step": trainer.global_step, "weights": module and module.state_dict()}


def write(world: int, folder: Path, layout: dict[str, Any]) -> dict[str, Any]:
    """A run with a folder of its first epoch and of its end, of which there is a plain file as well."""
    first = ModelCheckpoint(folder, "{epoch}", save_top_k=-1, every_n_train_steps=SAMPLES // BATCH_SIZE)
    trainer = trainer_of(world, layout, callbacks=[first], enable_checkpointing=True)
    found = fit(trainer, layout)
    trainer.save_checkpoint(folder / "end.ckpt")
    trainer.strategy.save_distributed_checkpoint = False
    trainer.save_checkpoint(folder / "file.ckpt")
    return found


def write_by_callback(world: int, folder: Path, layout: dict[str, Any]) -> tuple[L.Trainer, dict[str, Any]]:
    """A run whose callback keeps its best and its last folder, written in the background, which are then loaded.

    Returns:
        the Trainer of the run that loaded the last one, and what came of it all.
    """
    best = ModelCheckpoint(folder, "best-{epoch}", monitor="train_loss_epoch", save_last=True)
    options: dict[str, Any] = {"enable_checkpointing": True, "plugins": [AsyncCheckpointIO()]}
    trainer = trainer_of(world, layout, callbacks=[best], **options)
    fit(trainer, layout)
    ownership = trainer.strategy.ownership
    held = [p for name, p in trainer.lightning_module.named_parameters() if ownership.is_local(name)]
    with held_writes():
        trainer.save_checkpoint(folder / "weights.ckpt", weights_only=True)
        in_background = not (folder / "weights.ckpt").exists()
        for parameter in held:  # training goes on
            parameter.data.add_(1)
    trainer.strategy.remove_checkpoint(folder / "absent.ckpt")  # waits for the folder
    assert (folder / "weights.ckpt").exists()
    for parameter in held:
        parameter.data.sub_(1)
    [metrics] = trainer.validate(ckpt_path="best", dataloaders=loader(trainer, layout), verbose=False)
    last = trainer_of(world, layout, callbacks=[ModelCheckpoint(folder, save_last=True)], enable_checkpointing=True)
    step = fit(last, layout, "last")["step"]
    return last, {"val_loss": metrics["val_loss"], "last": step, "in background": in_background}


@contextmanager
def held_writes() -> Generator[None, None, None]:
    """Folders are written when the body is over; or after a while, where the body waits for them."""
    write, is_over = dcp.FileSystemWriter.write_data, threading.Event()

    def write_later(*arguments: Any) -> Any:
        is_over.wait(5)
        return write(*arguments)

    dcp.FileSystemWriter.write_data = write_later  # type: ignore[method-assign]
    try:
        yield
    finally:
        is_over.set()
        dcp.FileSystemWriter.write_data = write  # type: ignore[method-assign]


def fail_to_write(world: int, folder: Path, trainer: L.Trainer) -> list[str]:
    """What ranks are told when a folder cannot be made, and when one of them has no space left."""
    errors = []
    for path in (folder / "file.ckpt" / "inside.ckpt", folder / "end.ckpt"):
        is_full = path.name == "end.ckpt" and trainer.global_rank == world - 1
        try:
            with small_files(1000) if is_full else nullcontext():
                trainer.save_checkpoint(path)
        except RuntimeError as error:
            errors.append(str(error))
    return errors


def write_all(world: int, folder: Path, names: list[str]) -> dict[str, Any]:
    found: dict[str, Any] = {name: write(world, folder / name, LAYOUTS[name]) for name in names}
    for name in names:
        layout = OTHERS[name]
        trainer = trainer_of(world, layout)
        found[f"resumed {name}"] = fit(trainer, layout, folder / name / "epoch=0.ckpt")
    layout = LAYOUTS["2 x 2, fsdp"]
    trainer, found["callback"] = write_by_callback(world, folder / "callback", layout)
    found["errors"] = fail_to_write(world, folder / "2 x 2, fsdp", trainer)
    return found


def alone(world: int, folder: Path, names: list[str], with_slow: bool) -> dict[str, Any]:
    """One process's own run, and the rest of the others'."""
    layout = {"num_stages": 1}
    found: dict[str, Any] = {"whole": fit(trainer_of(world, layout), layout)}
    for name in names:
        found[name] = fit(trainer_of(world, layout), layout, folder / name / "epoch=0.ckpt")
    if with_slow:
        found["back"] = fit(trainer_of(world, layout, max_epochs=EPOCHS + 1), layout, folder / "back.ckpt")
        found["file"] = fit(trainer_of(world, layout, max_epochs=EPOCHS + 1), layout, folder / "from.ckpt")
    other, one_group = LitOther(), LitOneGroup()
    before = copy.deepcopy(other.double().state_dict())
    source = folder / "2 x 2, fsdp"
    for case, module, path in (
        ("other", other, source / "end.ckpt"),
        ("groups", one_group, source / "end.ckpt"),
        ("short", other, source / "short.ckpt"),
        ("foreign", other, source),
    ):
        try:
            trainer_of(world, layout).fit(module, DataLoader(tokens(8)), ckpt_path=path)
        except Exception as error:
            found[case] = f"{type(error).__name__}: {error}"
    found["unchanged"] = equal(other.double().state_dict(), before)  # optimizers come after weights, as in Lightning
    return found


@pytest.fixture(scope="module")
def names(wanted: Any) -> list[str]:
    return wanted(LAYOUTS, MORE, "name")


@pytest.fixture(scope="module")
def ranks(folder: Path, names: list[str]) -> list[dict[str, Any]]:
    return launch(write_all, WORLD, folder, names, world=WORLD)


def convert(*arguments: Any) -> str:
    result = CliRunner().invoke(app, ["checkpoint", "convert", *map(str, arguments)])
    assert result.exit_code == 0, result.output
    return result.output


@pytest.fixture(scope="module")
def one(folder: Path, ranks: Any, names: list[str], with_slow: bool) -> dict[str, Any]:
    """What one process does with the folders, and with what has been converted."""
    source = folder / "2 x 2, fsdp"
    convert(source / "file.ckpt", folder / "back.ckpt")
    shutil.copy(source / "file.ckpt", folder / "from.ckpt")
    shutil.copytree(source / "end.ckpt", source / "short.ckpt")
    largest = max((source / "short.ckpt").glob("*.distcp"), key=lambda path: path.stat().st_size)
    os.truncate(largest, largest.stat().st_size // 2)
    return launch(alone, 1, folder, names, with_slow, world=1)[0]


def equal(one: Any, other: Any) -> bool:
    """Whether nested values are the same, keys in the same order."""
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and one.shape == other.shape and torch.equal(one, other)
    if isinstance(one, dict):
        return list(one) == list(other) and all(equal(value, other[key]) for key, value in one.items())
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(equal, one, other))
    return one == other


@pytest.mark.parametrize("name", NAMES)
def test_a_folder_becomes_the_plain_file_of_the_run(name: str, folder: Path, ranks: Any, tmp_path: Path) -> None:
    said = convert(folder / name / "end.ckpt", tmp_path / "converted.ckpt")
    assert str(tmp_path / "converted.ckpt") in said.replace("\n", "")
    found = torch.load(tmp_path / "converted.ckpt", weights_only=True)
    expected = torch.load(folder / name / "file.ckpt", weights_only=True)
    assert equal(found, expected)
    assert found["state_dict"]._metadata == expected["state_dict"]._metadata
    tied = [found["state_dict"][f"net.{name}.weight"] for name in ("tokens", "head")]
    assert tied[0].data_ptr() == tied[1].data_ptr()
    assert found["optimizer_states"][0]["state"][0]["exp_avg"].abs().max() > 0
    assert (tmp_path / "converted.ckpt").stat().st_size <= 1.01 * (folder / name / "file.ckpt").stat().st_size


def test_a_file_becomes_a_folder_and_a_file_again(folder: Path, ranks: Any, tmp_path: Path) -> None:
    source = folder / "2 x 2, fsdp" / "file.ckpt"
    convert(source, tmp_path / "folder.ckpt")
    convert(tmp_path / "folder.ckpt", tmp_path / "again.ckpt")
    before = torch.load(source, weights_only=True)
    assert equal(torch.load(tmp_path / "again.ckpt", weights_only=True), before)


def test_all_ranks_write(folder: Path, names: list[str], ranks: Any) -> None:
    for name in names:
        sizes = [path.stat().st_size for path in sorted((folder / name / "end.ckpt").glob("*.distcp"))]
        assert len(sizes) == WORLD
        assert max(sizes) < 0.45 * sum(sizes), name  # a file of one rank would have all of it


def test_a_callback_keeps_and_removes_folders(folder: Path, ranks: Any) -> None:
    found = {path.name for path in (folder / "callback").iterdir()}
    assert found == {"best-epoch=1.ckpt", "last.ckpt", "weights.ckpt"}
    for rank in ranks:
        assert rank["callback"]["in background"]
        assert rank["callback"]["last"] == EPOCHS * SAMPLES // BATCH_SIZE


@pytest.mark.parametrize("name", NAMES)
def test_runs_resume_in_another_layout(name: str, ranks: Any, one: Any) -> None:
    expected = one["whole"]
    half = len(expected["losses"]) // EPOCHS
    for found in (ranks[0][name], ranks[0][f"resumed {name}"], one[name]):
        assert found["step"] == expected["step"]
        for key, value in expected["weights"].items():
            if isinstance(value, torch.Tensor):
                torch.testing.assert_close(found["weights"][key], value, rtol=1e-10, atol=1e-12, msg=key)
    assert one[name]["losses"] == pytest.approx(expected["losses"][half:], rel=1e-10)
    assert len(ranks[0][f"resumed {name}"]["losses"]) == half


@pytest.mark.slow
def test_a_converted_folder_goes_on_as_the_file_does(one: Any) -> None:
    assert one["back"]["losses"] == one["file"]["losses"] != []
    assert equal(one["back"]["weights"], one["file"]["weights"])


def test_mismatches_are_named_before_anything_is_changed(one: Any) -> None:
    assert one["other"].startswith("CheckpointError")
    for part in (
        "net.blocks.0.mlp_norm.weight (",
        ") in the file, (",
        "missing: net.more.weight",
        "unknown to the module: net.blocks.3.",
    ):
        assert part in one["other"]
    assert "has 2 groups with " in one["groups"] and "AdamW has 1 with " in one["groups"]
    assert one["unchanged"]
    assert one["short"].startswith("CheckpointError: the checkpoint ") and ".distcp has " in one["short"]
    assert "is no checkpoint that save_distributed_checkpoint=True has written" in one["foreign"]


def test_failed_writes_are_told_everywhere_and_leave_the_checkpoint_before(folder: Path, ranks: Any) -> None:
    for rank in ranks:
        no_folder, no_space = rank["errors"]
        assert "NotADirectoryError" in no_folder
        assert "rank 3: OSError(27, 'File too large')" in no_space
    assert not list((folder / "2 x 2, fsdp").glob(".checkpoint-*"))
    assert (folder / "2 x 2, fsdp" / "end.ckpt" / "meta.pt").is_file()


def test_the_command_keeps_what_is_there(folder: Path, ranks: Any, tmp_path: Path) -> None:
    source, target = folder / "callback" / "weights.ckpt", tmp_path / "there.ckpt"
    target.write_text("precious")
    for arguments, sentence in (
        ((source, target), "exists"),
        ((tmp_path / "absent", tmp_path / "new"), "absent"),
        ((tmp_path, tmp_path / "new"), "is no checkpoint"),
        ((target, tmp_path / "new"), "there.ckpt"),
    ):
        result = CliRunner().invoke(app, ["checkpoint", "convert", *map(str, arguments)])
        assert result.exit_code == 2 and sentence in result.output.replace("\n", ""), result.output
    assert target.read_text() == "precious"
    convert(source, target, "--force")
    expected = torch.load(folder / "2 x 2, fsdp" / "file.ckpt", weights_only=True)["state_dict"]
    assert equal(torch.load(target, weights_only=True)["state_dict"], expected)


def test_a_converted_file_opens_without_the_pipeline(folder: Path, ranks: Any, tmp_path: Path) -> None:
    convert(folder / "callback" / "best-epoch=1.ckpt", tmp_path / "plain.ckpt")
    module = LitTied.load_from_checkpoint(tmp_path / "plain.ckpt")
    trainer = plain_trainer(precision="64-true")
    [metrics] = trainer.validate(module, DataLoader(tokens(SAMPLES), batch_size=BATCH_SIZE), verbose=False)
    by_replica = [rank["callback"]["val_loss"] for rank in ranks[:2]]
    assert metrics["val_loss"] == pytest.approx(sum(by_replica) / 2, rel=1e-6)
