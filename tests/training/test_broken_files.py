"""Killed while it saves, a run goes on from the file before; a file that does not fit is refused by all ranks alike."""

from __future__ import annotations

import itertools
import os
import pickle
import re
import resource
import shutil
import signal
import sys
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from torch import Tensor, nn
from torch.distributed import checkpoint as dcp
from torch.utils.data import DataLoader, TensorDataset

from lightning_pipeline.checkpoint.files import SUFFIX, AtomicCheckpointIO, CheckpointError
from lightning_pipeline.checkpoint.folder import read_folder
from lightning_pipeline.strategy.left_states import used_in_parts
from tests.launching import launch, run_ranks
from tests.training.runs import Losses, differing, pipeline_trainer

pytestmark = pytest.mark.multiprocess

STEPS = 6
KILLED_AT = 4


class Lit(L.LightningModule):
    """Two layers with dropout on two stages."""

    def __init__(self, width: int = 8, num_groups: int = 1) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.num_groups = num_groups
        self.first = nn.Sequential(nn.Linear(4, width), nn.Dropout(0.1))
        self.second = nn.Linear(width, 4)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return nn.functional.mse_loss(self.second(self.first(batch[0])), batch[0])

    def configure_optimizers(self) -> Any:
        groups = [{"params": [parameter]} for parameter in self.parameters()]
        return torch.optim.Adam(groups if self.num_groups > 1 else self.parameters(), lr=0.1)


def loader() -> DataLoader:
    """One batch an epoch, as a plain loader does not go on in the middle of one."""
    return DataLoader(TensorDataset(torch.linspace(-1, 1, 32).reshape(8, 4)), batch_size=8)


def trainer_of(folder: Path | None, *, steps: int = STEPS, **options: Any) -> L.Trainer:
    callbacks = options.pop("callbacks", [])
    if folder is not None:
        callbacks = [*callbacks, ModelCheckpoint(folder, save_last=True, every_n_train_steps=1)]
        options["enable_checkpointing"] = True
    L.seed_everything(3, verbose=False)
    return pipeline_trainer({"second": 1}, world=2, max_steps=steps, callbacks=callbacks, **options)


# -- killed while saving --------------------------------------------------------------------------------------------


class KilledInTheWrite(AtomicCheckpointIO):
    """Lets its process die in the middle of the KILLED_AT'th save of ``last.ckpt``, every second save."""

    def __init__(self) -> None:
        super().__init__()
        self.saves = 0

    def write(self, checkpoint: dict[str, Any], file: Any) -> None:
        self.saves += 1
        if self.saves < 2 * KILLED_AT:
            super().write(checkpoint, file)
            return

        super().write(checkpoint, HalfAFile(file))


class HalfAFile:
    """Dies with some of the first tensor written."""

    def __init__(self, file: Any) -> None:
        self.file = file

    def write(self, data: Any) -> int:
        self.file.write(data)
        if len(data) > 100 and self.file.tell() > 2000:
            self.file.flush()
            os.kill(os.getpid(), signal.SIGKILL)
        return len(data)

    def flush(self) -> None:
        pass


def killed(folder: Path) -> None:
    trainer_of(folder, plugins=[KilledInTheWrite()]).fit(Lit(), loader())


def killed_in_its_shard(folder: Path) -> None:
    """Rank 1 dies with its part of the KILLED_AT'th folder ``last.ckpt`` half written."""
    saves = itertools.count(1)
    write = dcp.FileSystemWriter.write_data

    def write_or_die(self: Any, plan: Any, planner: Any) -> Any:
        if os.environ["LOCAL_RANK"] == "1" and next(saves) == 2 * KILLED_AT:
            (Path(self.path) / "__1_0.distcp").write_bytes(b"half a file")
            os.kill(os.getpid(), signal.SIGKILL)
        return write(self, plan, planner)

    dcp.FileSystemWriter.write_data = write_or_die  # type: ignore[method-assign]
    trainer_of(folder, strategy={"save_distributed_checkpoint": True}).fit(Lit(), loader())


def resumed(folder: Path, in_folders: bool) -> dict[str, Any]:
    """The rest of a killed run, and an uninterrupted one."""
    runs: dict[str, Any] = {}
    for name, where in (("resumed", folder), ("uninterrupted", None)):
        losses = Losses()
        options = {"save_distributed_checkpoint": in_folders and where is not None}
        trainer = trainer_of(where, callbacks=[losses, NoFileIsMapped()], strategy=options)
        trainer.fit(Lit(), loader(), ckpt_path="last" if where else None)
        module = trainer.strategy.gather_module()
        runs[name] = {"losses": losses.values, "step": trainer.global_step, "weights": module and module.state_dict()}
    return runs


class NoFileIsMapped(Callback):
    """Nothing that a run goes on with lies in the checkpoint's file, which may be replaced."""

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        if sys.platform == "linux":
            assert ".ckpt" not in Path("/proc/self/maps").read_text()


def goes_on(folder: Path, *, in_folders: bool) -> None:
    """The killed run, to its end and as if nothing had happened."""
    for rank, runs in enumerate(launch(resumed, folder, in_folders, world=2)):
        assert runs["resumed"]["step"] == runs["uninterrupted"]["step"] == STEPS
        assert runs["resumed"]["losses"] == runs["uninterrupted"]["losses"][KILLED_AT - 1 :]
        if rank == 0:
            assert not differing(runs["resumed"]["weights"], runs["uninterrupted"]["weights"])
    assert not list(folder.glob(f"*{SUFFIX}"))


def test_a_run_that_is_killed_as_it_saves_goes_on_from_the_checkpoint_before(tmp_path: Path) -> None:
    first, second = run_ranks(killed, tmp_path)
    assert first.exit_code == -signal.SIGKILL and second.exit_code not in (0, None)
    leftovers = list(tmp_path.glob(f"*{SUFFIX}"))
    assert len(leftovers) == 1 and (leftovers[0] / "content").stat().st_size > 0
    assert torch.load(tmp_path / "last.ckpt", weights_only=True)["global_step"] == KILLED_AT - 1
    goes_on(tmp_path, in_folders=False)
    assert torch.load(tmp_path / "last.ckpt", weights_only=True)["global_step"] == STEPS


@pytest.mark.slow
def test_a_run_that_is_killed_as_it_saves_a_folder_goes_on_from_the_one_before(tmp_path: Path) -> None:
    first, second = run_ranks(killed_in_its_shard, tmp_path)
    assert second.exit_code == -signal.SIGKILL and first.exit_code not in (0, None)
    assert read_folder(tmp_path / "last.ckpt")["global_step"] == KILLED_AT - 1
    goes_on(tmp_path, in_folders=True)
    assert read_folder(tmp_path / "last.ckpt")["global_step"] == STEPS


# -- files that do not fit ------------------------------------------------------------------------------------------


def state_of(trainer: L.Trainer) -> Any:
    """What a load changes, of this rank."""
    module = trainer.strategy.lightning_module
    tensors = [parameter.detach().clone() for parameter in module.parameters() if not parameter.is_meta]
    states = [value.clone() for state in trainer.optimizers[0].state.values() for value in state.values()]
    return tensors, states, trainer.global_step, trainer.current_epoch


def broken_files(folder: Path, good: dict[str, Any]) -> None:
    """Files beside a good one, each wrong in its way."""
    content = (folder / "good.ckpt").read_bytes()
    (folder / "cut.ckpt").write_bytes(content[: len(content) // 2])
    (folder / "text.ckpt").write_text("notes")
    torch.save(good["state_dict"], folder / "bare.ckpt")
    torch.save({**good, "hook": Callback()}, folder / "objects.ckpt")
    shutil.copytree(folder / "folder.ckpt", folder / "objects in a folder.ckpt")
    meta = torch.load(folder / "folder.ckpt" / "meta.pt", weights_only=True)
    meta["checkpoint"]["hook"] = Callback()
    torch.save(meta, folder / "objects in a folder.ckpt" / "meta.pt")
    shutil.copytree(folder / "folder.ckpt", folder / "code in a folder.ckpt")
    metadata = pickle.loads((folder / "folder.ckpt" / ".metadata").read_bytes())
    metadata.planner_data = Callback()
    (folder / "code in a folder.ckpt" / ".metadata").write_bytes(pickle.dumps(metadata))
    shutil.copytree(folder / "folder.ckpt", folder / "cut in a folder.ckpt")
    os.truncate(folder / "cut in a folder.ckpt" / "meta.pt", 1000)
    wide = Lit(width=9)
    torch.save({**good, "state_dict": wide.state_dict(), "hyper_parameters": dict(wide.hparams)}, folder / "wide.ckpt")
    groups = Lit(num_groups=2).configure_optimizers().state_dict()
    torch.save({**good, "optimizer_states": [groups]}, folder / "groups.ckpt")
    del good["optimizer_states"]
    torch.save(good, folder / "weights.ckpt")


REFUSED = {
    "cut": "is cut off after",
    "text": "is no checkpoint: it starts with b'note'",
    "bare": "holds bare weights (first.0.weight, first.0.bias, second.weight and 1 more)",
    "objects": "Callback), and these can run any code",
    "objects in a folder": "Callback), and these can run any code",
    "code in a folder": ".metadata names lightning.pytorch.callbacks.callback.Callback, which is none of the classes",
    "cut in a folder": "meta.pt is cut off after 1,000 bytes",
    "wide": "(9, 4) in the file, (8, 4) in the module",
    "groups": "has 4 groups with [1, 1, 1, 1] parameters, and Adam has 1 with [4]",
    "weights": "holds weights only",
}


def refusals(folder: Path) -> dict[str, str]:
    """What this rank says to each broken file, then to one that is broken on the other rank; ends in a refused fit."""
    trainer = trainer_of(None, steps=2, plugins=[AtomicCheckpointIO(weights_only=True)])
    trainer.fit(Lit(), loader())
    trainer.save_checkpoint(folder / "good.ckpt")
    trainer.strategy.save_distributed_checkpoint = True
    trainer.save_checkpoint(folder / "folder.ckpt")
    if trainer.is_global_zero:
        broken_files(folder, torch.load(folder / "good.ckpt", weights_only=True))
    trainer.strategy.barrier()
    strategy = trainer.strategy
    trainer.state.fn = "fit"
    before = state_of(trainer)

    def told(path: Path) -> str:
        with pytest.raises((CheckpointError, FileNotFoundError)) as error:
            checkpoint = strategy.load_checkpoint(path)
            strategy.load_model_state_dict(checkpoint)
            strategy.load_optimizer_state_dict(checkpoint)
        return str(error.value)

    messages = {name: told(folder / f"{name}.ckpt") for name in REFUSED}
    messages["on rank 1"] = told(folder / ("cut.ckpt" if trainer.global_rank == 1 else "good.ckpt"))
    messages["on rank 0"] = told(folder / ("folder.ckpt" if trainer.global_rank == 0 else "nowhere.ckpt"))
    torch.testing.assert_close(state_of(trainer), before, rtol=0, atol=0)

    trainer = trainer_of(None, steps=4)
    with pytest.raises(CheckpointError) as error:
        trainer.fit(Lit(), loader(), ckpt_path=folder / "groups.ckpt")
    [optimizer] = trainer.optimizers
    with used_in_parts(optimizer):
        assert not optimizer.state  # weights and loops are restored by then, as in Lightning
    return {**messages, "fit": str(error.value)}


def test_a_file_that_does_not_fit_is_refused_alike_before_anything_changes(tmp_path: Path) -> None:
    first, second = launch(refusals, tmp_path, world=2)
    for name, words in {**REFUSED, "fit": REFUSED["groups"]}.items():
        assert first[name] == second[name]
        assert words in first[name]
    assert "nowhere.ckpt" in second["on rank 0"]
    assert first["on rank 0"].startswith("rank 1 cannot load the checkpoint: FileNotFoundError")
    assert second["on rank 1"] == first["cut"]
    assert first["on rank 1"] == f"rank 1 cannot load the checkpoint: CheckpointError: {first['cut']}"


# -- a full disk ----------------------------------------------------------------------------------------------------


class FullDisk(AtomicCheckpointIO):
    """Has no room for a file from the KILLED_AT'th save of ``last.ckpt`` on, every second save."""

    saves = 0

    def write(self, checkpoint: dict[str, Any], file: Any) -> None:
        self.saves += 1
        if self.saves == 2 * KILLED_AT:
            limit = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
            resource.setrlimit(resource.RLIMIT_FSIZE, (2000, limit))
        super().write(checkpoint, file)


def full_disk(folder: Path) -> None:
    trainer_of(folder, plugins=[FullDisk()]).fit(Lit(), loader())


def test_a_full_disk_ends_all_ranks_and_leaves_the_file_before(tmp_path: Path) -> None:
    first, second = run_ranks(full_disk, tmp_path)
    assert re.search(r"^OSError: .*cannot write checkpoint .*last\.ckpt.*it needs .*still whole", first.error)
    assert second.exit_code not in (0, None)
    assert max(first.seconds, second.seconds) < 20  # from start-up, on a busy machine
    assert torch.load(tmp_path / "last.ckpt", weights_only=True)["global_step"] == KILLED_AT - 1
    assert not [path.name for path in tmp_path.iterdir() if path.name.endswith(SUFFIX)]
