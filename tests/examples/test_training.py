"""The models of the examples learn with plain Lightning, so the pipeline is all that the strategy adds."""

from pathlib import Path

import lightning as L
import pytest
import torch

from train import train
from zoo.data.digits import DigitsDataModule
from zoo.data.text import StdlibTextDataModule, read_sources

from .conftest import Compose
from .test_cifar10 import write_archive

PLAIN = ["trainer.strategy=auto", "trainer.devices=1", "callbacks.timeline=null", "callbacks.progress=null"]
QUIET = ["+trainer.enable_progress_bar=false", "+trainer.enable_model_summary=false"]


def fit(compose_train: Compose, *overrides: str) -> L.Trainer:
    return train(compose_train(*PLAIN, *QUIET, *overrides))


def test_digits_are_learnt(compose_train: Compose, tmp_path: Path) -> None:
    small = ["data.batch_size=32", "+trainer.limit_train_batches=12"]
    fit(compose_train, *small, "trainer.max_epochs=1")
    assert (tmp_path / "checkpoints/last.ckpt").exists()
    assert "val/acc" in (tmp_path / "csv/metrics.csv").read_text()
    assert "CosineAnnealingLR" in (tmp_path / "csv/hparams.yaml").read_text()

    # The checkpoint holds tensors and plain Python only.
    state = torch.load(tmp_path / "checkpoints/last.ckpt", weights_only=True)
    assert state["epoch"] == 0
    resumed = fit(compose_train, *small, "trainer.max_epochs=2", f"ckpt_path={tmp_path}/checkpoints/last.ckpt")
    assert resumed.current_epoch == 2
    assert resumed.global_step == 2 * 12
    assert resumed.callback_metrics["train/loss"] < 1  # ln 10 = 2.3 at the start


@pytest.mark.slow
def test_the_mlp_learns(compose_train: Compose) -> None:
    trainer = fit(compose_train, "experiment=mlp_oneflow", "trainer.max_epochs=2", "model.optimizer.lr=0.1")
    assert trainer.callback_metrics["val/acc"] > 0.5


def test_the_gpt_learns(compose_train: Compose) -> None:
    small = ["data.length=32", "data.num_chars=60000", "model.net.width=32", "model.net.num_blocks=2"]
    trainer = fit(compose_train, "experiment=gpt_text", *small, "trainer.max_epochs=1", "model.optimizer.lr=0.01")
    assert trainer.callback_metrics["val/loss"] < 3.6  # ln 128 = 4.85 at the start
    net = trainer.model.net
    assert net.head.weight is net.tokens.weight


@pytest.mark.slow
def test_resnet50_takes_a_step(compose_train: Compose, tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    md5 = write_archive(tmp_path / "data/cifar-10-binary.tar.gz")
    small = ["data.image_size=32", "data.batch_size=4", f"+data.md5={md5}", "trainer.max_epochs=1"]
    trainer = fit(compose_train, "experiment=resnet50_cifar10", *small, "+trainer.limit_train_batches=2")
    assert trainer.global_step == 2
    assert 0 <= trainer.callback_metrics["val/acc"] <= 1


def test_digits_are_split_alike_every_time() -> None:
    first, second = DigitsDataModule(batch_size=8), DigitsDataModule(batch_size=8, image_size=28)
    first.setup("fit")
    second.setup("fit")
    assert (len(first.train), len(first.val)) == (1438, 359)
    assert first.val.indices == second.val.indices
    images, labels = next(iter(second.train_dataloader()))
    assert (tuple(images.shape), images.dtype, labels.dtype) == ((8, 1, 28, 28), torch.float32, torch.int64)


def test_text_gives_windows_and_the_next_characters(tmp_path: Path) -> None:
    (tmp_path / "b.py").write_text("klmnopqrst")
    (tmp_path / "a.py").write_text("abcdéfghij")
    assert bytes(read_sources(tmp_path, 12).tolist()) == b"abcd\0\0fghijk"
    data = StdlibTextDataModule(batch_size=2, length=1, folder=str(tmp_path))
    data.setup("fit")
    ids, targets = next(iter(data.val_dataloader()))
    assert (bytes(ids.flatten().tolist()), bytes(targets.flatten().tolist())) == (b"rs", b"st")

    with pytest.raises(FileNotFoundError, match=r"no \.py files.*data\.folder"):
        read_sources(tmp_path / "empty", 10)
    with pytest.raises(ValueError, match="too few for a window of 50"):
        StdlibTextDataModule(length=50, folder=str(tmp_path)).setup("fit")
