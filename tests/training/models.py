"""Modules and data of these tests."""

from __future__ import annotations

from typing import Any

import lightning as L
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from zoo.models.gpt import GPT

VOCABULARY = 17
LENGTH = 6
WIDTH = 16
NUM_BLOCKS = 4


class Block(nn.Module):
    """A two-layer perceptron behind a norm, added to what came in."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.mlp_norm = nn.LayerNorm(WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.dropout(self.mlp(self.mlp_norm(x)))


class Perceptrons(nn.Module):
    """A GPT without attention, which has most of its operations."""

    def __init__(self, *, dropout: float, tied: bool) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.positions = nn.Embedding(LENGTH, WIDTH)
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.ModuleList(Block(dropout) for _ in range(NUM_BLOCKS))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        for embedding in (self.tokens, self.positions):
            nn.init.normal_(embedding.weight, std=0.02)
        if tied:
            self.head.weight = self.tokens.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.dropout(self.tokens(ids) + self.positions(torch.arange(ids.shape[1], device=ids.device)))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class LitTokens(L.LightningModule):
    """A small model that predicts the next token."""

    def __init__(self, *, dropout: float = 0.0, tied: bool = False, lr: float = 1e-2) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.lr = lr
        self.net = self.make_net(dropout=dropout, tied=tied)

    def make_net(self, *, dropout: float, tied: bool) -> nn.Module:
        return Perceptrons(dropout=dropout, tied=tied)

    def forward(self, ids: Tensor) -> Tensor:
        return self.net(ids)

    def loss(self, batch: Any) -> Tensor:
        ids, targets = batch
        return F.cross_entropy(self(ids).flatten(0, 1), targets.flatten())

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.log("train_loss", loss, on_step=True, on_epoch=True, prog_bar=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch), prog_bar=True)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=self.lr)


class LitGPT(LitTokens):
    """The same with attention."""

    def make_net(self, *, dropout: float, tied: bool) -> nn.Module:
        return GPT(
            vocab_size=VOCABULARY,
            max_length=LENGTH,
            width=WIDTH,
            num_blocks=NUM_BLOCKS,
            num_heads=2,
            dropout=dropout,
            tied=tied,
        )


def gpt_stages(num_stages: int) -> dict[str, int]:
    """The stage_config that cuts these into stages of equally many blocks."""
    return {f"net.blocks.{stage * NUM_BLOCKS // num_stages}": stage for stage in range(1, num_stages)}


def tokens(num_samples: int, seed: int = 0) -> TensorDataset:
    """Ids and next ids, both [num_samples, LENGTH]."""
    text = torch.randint(0, VOCABULARY, (num_samples, LENGTH + 1), generator=torch.Generator().manual_seed(seed))
    return TensorDataset(text[:, :-1], text[:, 1:])


def token_loader(num_samples: int, batch_size: int, *, shuffle: bool = False) -> DataLoader:
    return DataLoader(tokens(num_samples), batch_size=batch_size, shuffle=shuffle)
