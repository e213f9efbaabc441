"""A program with LightningCLI, as its users write it; run by test_lightning_cli."""

from __future__ import annotations

from typing import Any

import lightning as L
import torch
from lightning.pytorch.cli import LightningCLI
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset


class Net(L.LightningModule):
    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.layers = nn.Sequential(*(nn.Linear(width, width) for _ in range(4)))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.layers(batch[0]).pow(2).mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.1)


class Data(L.LightningDataModule):
    def train_dataloader(self) -> Any:
        return DataLoader(TensorDataset(torch.ones(16, 4)), 8)


if __name__ == "__main__":
    cli = LightningCLI(Net, Data)
    print(f"rank {cli.trainer.global_rank}: {cli.trainer.global_step} steps of {type(cli.trainer.strategy).__name__}")
