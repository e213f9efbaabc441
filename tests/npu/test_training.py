"""``Trainer(accelerator="npu", strategy="pipeline")`` on the real torch_npu; `stand_in` says what is simulated."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_pipeline import PipelineStrategy
from tests.launching import launch
from tests.training.runs import QUIET, Losses, differing, weights

NUM_BLOCKS = 8


class LitBlocks(L.LightningModule):
    """Blocks with normalisation, and with dropout if asked for; a plain classifier."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.blocks = nn.Sequential(
            nn.Linear(8, 16),
            *(
                nn.Sequential(nn.Linear(16, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(dropout))
                for _ in range(NUM_BLOCKS - 2)
            ),
            nn.Linear(16, 3),
        )

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = F.cross_entropy(self.blocks(batch[0]), batch[1])
        self.log("train_loss", loss, on_epoch=True, on_step=False)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", F.cross_entropy(self.blocks(batch[0]), batch[1]))

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def stages(num_virtual_stages: int) -> dict[str, int]:
    """Equally many blocks on each virtual stage."""
    return {f"blocks.{stage * NUM_BLOCKS // num_virtual_stages}": stage for stage in range(1, num_virtual_stages)}


def loader() -> DataLoader:
    """Three batches, the last one ragged."""
    generator = torch.Generator().manual_seed(5)
    x, y = torch.randn(80, 8, generator=generator), torch.randint(0, 3, (80,), generator=generator)
    return DataLoader(TensorDataset(x, y), batch_size=32)


def fit(
    accelerator: str,
    world: int,
    *,
    num_stages: int | None = None,
    schedule: str = "1f1b",
    num_virtual_stages: int = 1,
    dropout: float = 0.0,
    ckpt_path: str | None = None,
    **options: Any,
) -> tuple[L.Trainer, list[float]]:
    """A trainer after its fit, and the loss of each batch."""
    L.seed_everything(3)
    num_stages = num_stages or world
    losses = Losses()
    callbacks = [losses, *options.pop("callbacks", [])]
    trainer = L.Trainer(
        devices=world,
        strategy=PipelineStrategy(
            stage_config=stages(num_stages * num_virtual_stages),
            num_stages=num_stages,
            num_microbatches=8,
            schedule=schedule,
            timeout=30,
        ),
        **{**QUIET, "max_epochs": 2, "accelerator": accelerator, "callbacks": callbacks, **options},
    )
    trainer.fit(LitBlocks(dropout), loader(), loader(), ckpt_path=ckpt_path)
    return trainer, losses.values


def schedules(world: int) -> None:
    """In float32 each schedule gives the bits of the same run on the CPU."""
    cases = [("gpipe", 1), ("1f1b", 1), ("interleaved_1f1b", 2)]
    for schedule, num_virtual_stages in cases:
        options: Any = {"schedule": schedule, "num_virtual_stages": num_virtual_stages}
        trainer, losses = fit("npu", world, **options)
        assert trainer.strategy.process_group_backend == "cpu:gloo,npu:hccl"
        assert trainer.strategy.root_device == torch.device("npu", trainer.local_rank)
        expected_trainer, expected = fit("cpu", world, **options)
        assert losses == expected, schedule
        assert not differing(weights(trainer), weights(expected_trainer)), schedule
        assert trainer.callback_metrics["val_loss"] == expected_trainer.callback_metrics["val_loss"]


@pytest.mark.parametrize("world", [2, 4])
def test_schedules(world: int) -> None:
    launch(schedules, world, world=world)
