"""Sums over samples are told from means, and what is not known counts as a mean."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lightning_pipeline.strategy.outputs import is_sum_over_samples

N, WIDTH, TOKENS = 4, 4, 5  # as many samples as features: shapes do not tell them apart


class Given:
    """What a loss is made of: logits [N, WIDTH] and [N, TOKENS, WIDTH], their targets, and parameters."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.x = self.layer(torch.randn(N, WIDTH))
        self.tokens = self.layer(torch.randn(N, TOKENS, WIDTH))
        self.labels = torch.randint(WIDTH, (N,))
        self.token_labels = torch.randint(WIDTH, (N, TOKENS))
        self.targets = torch.rand(N, WIDTH)
        self.mask = (torch.rand(N, WIDTH) > 0.3).float()

    @property
    def cross_entropy(self) -> Tensor:
        return F.cross_entropy(self.x, self.labels, reduction="none")


def vae(g: Given) -> Tensor:
    mu, logvar = g.x, 0.1 * g.x
    kl = -0.5 * torch.sum(1 + logvar - mu.pow(2) - logvar.exp())
    return F.binary_cross_entropy(torch.sigmoid(g.x), g.targets, reduction="sum") + kl


def added_in_place(g: Given) -> Tensor:
    loss = F.cross_entropy(g.x, g.labels, reduction="sum")
    loss += F.mse_loss(g.x, g.targets, reduction="sum")
    return loss


SUMS: dict[str, Callable[[Given], Tensor]] = {
    "cross entropy": lambda g: F.cross_entropy(g.x, g.labels, reduction="sum"),
    "module": lambda g: nn.CrossEntropyLoss(reduction="sum")(g.x, g.labels),
    "label smoothing": lambda g: F.cross_entropy(g.x, g.labels, reduction="sum", label_smoothing=0.1),
    "tokens": lambda g: F.cross_entropy(g.tokens.flatten(0, 1), g.token_labels.flatten(), reduction="sum"),
    "tokens by sample": lambda g: F.cross_entropy(g.tokens.transpose(1, 2), g.token_labels, reduction="sum"),
    "nll": lambda g: F.nll_loss(F.log_softmax(g.x, 1), g.labels, reduction="sum"),
    **{
        name: lambda g, name=name: getattr(F, name)(g.x, g.targets, reduction="sum")
        for name in ("mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "binary_cross_entropy_with_logits")
    },
    "of none": lambda g: g.cross_entropy.sum(),
    "of none by token": lambda g: (
        F.cross_entropy(g.tokens.transpose(1, 2), g.token_labels, reduction="none").sum(1).sum()
    ),
    "squares": lambda g: (g.x - g.targets).square().sum(),
    "squares by sample": lambda g: ((g.x - g.targets) ** 2).sum(dim=-1).sum(0),
    "absolute": lambda g: (g.x - g.targets).abs().view(-1).sum(),
    "ctc": lambda g: F.ctc_loss(
        F.log_softmax(g.tokens.transpose(0, 1), 2), torch.ones(N, 2).long(), [TOKENS] * N, [2] * N, reduction="sum"
    ),
    "vae": vae,
    "several": lambda g: g.cross_entropy.sum() + F.mse_loss(g.x, g.targets, reduction="sum") - 0.5 * g.x.sum(),
    "in place": added_in_place,
    "other dtype": lambda g: F.cross_entropy(g.x, g.labels, reduction="sum").double().reshape(1),
    "a constant": lambda g: F.cross_entropy(g.x, g.labels, reduction="sum") + 1,
    "autocast": lambda g: in_bfloat16(g),
    "frozen": lambda g: F.cross_entropy(g.x, g.labels, reduction="sum") + F.mse_loss(g.targets, g.mask),
}


def in_bfloat16(g: Given) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return F.cross_entropy(g.layer(g.targets), g.labels, reduction="sum")


NO_SUMS: dict[str, Callable[[Given], Tensor]] = {
    "cross entropy": lambda g: F.cross_entropy(g.x, g.labels),
    "label smoothing": lambda g: F.cross_entropy(g.x, g.labels, label_smoothing=0.1),
    "tokens": lambda g: F.cross_entropy(g.tokens.flatten(0, 1), g.token_labels.flatten()),
    "probabilities": lambda g: F.cross_entropy(g.x, g.targets),
    **{
        name: lambda g, name=name: getattr(F, name)(g.x, g.targets)
        for name in ("mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "kl_div", "soft_margin_loss")
    },
    "batch mean": lambda g: F.kl_div(F.log_softmax(g.x, 1), g.targets, reduction="batchmean"),
    "over tokens": lambda g: F.cross_entropy(g.x, g.labels, reduction="sum") / N,
    "times a fraction": lambda g: F.cross_entropy(g.x, g.labels, reduction="sum") * (1 / N),
    "divided in place": lambda g: g.cross_entropy.sum().div_(N),
    "added with a fraction": lambda g: torch.add(g.cross_entropy.sum(), g.cross_entropy.sum(), alpha=1 / N),
    "by tensors": lambda g: F.cross_entropy(g.x, g.labels, reduction="sum") / g.mask.sum(),
    "sum over features": lambda g: (g.x - g.targets).square().sum(1).mean(),
    "mean by sample": lambda g: F.mse_loss(g.x, g.targets, reduction="none").mean(0).sum(),
    "masked": lambda g: (F.mse_loss(g.x, g.targets, reduction="none") * g.mask).sum() / g.mask.sum(),
    "normalised weights": lambda g: (g.cross_entropy * torch.softmax(g.cross_entropy.detach(), 0)).sum(),
    "weight argument": lambda g: F.binary_cross_entropy_with_logits(
        g.x, g.targets, weight=g.mask / g.mask.sum(), reduction="sum"
    ),
    "class weights": lambda g: F.cross_entropy(g.x, g.labels, torch.full((WIDTH,), 1 / N), reduction="sum"),
    "weight decay": lambda g: F.cross_entropy(g.x, g.labels) + g.layer.weight.pow(2).sum(),
    "weight decay and a quotient": lambda g: (
        F.cross_entropy(g.x, g.labels, reduction="sum") / N + g.layer.weight.abs().sum()
    ),
    "a penalty": lambda g: F.cross_entropy(g.x, g.labels) + F.mse_loss(g.x, g.targets, reduction="sum"),
    "of means": lambda g: torch.stack([F.mse_loss(g.x, g.targets)] * N).sum(),
    "a dictionary's": lambda g: sum({"a": F.mse_loss(g.x, g.targets), "b": F.cross_entropy(g.x, g.labels)}.values()),
    "statistics": lambda g: F.mse_loss(g.tokens.mean((0, 1))[:3], torch.zeros(3), reduction="sum"),
    "contrastive": lambda g: F.cross_entropy(g.x @ g.x.T, torch.arange(N)),
    "both ways": lambda g: (F.cross_entropy(g.x, g.labels) + F.cross_entropy(g.x.T, g.labels)) / 2,
    "one sample": lambda g: F.cross_entropy(g.x[0], g.labels[0], reduction="sum"),
    "norm": lambda g: (g.x - g.targets).norm(),
    "custom": lambda g: Squares.apply(g.x),
    "nothing recorded": lambda g: F.cross_entropy(g.targets, g.labels, reduction="sum"),
    "a parameter": lambda g: g.layer.weight.sum(),
}


class Squares(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.square().sum()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient.expand(N, WIDTH)


@pytest.mark.parametrize("name", SUMS)
def test_sums_are_told(name: str) -> None:
    assert is_sum_over_samples(SUMS[name](Given()), N)


@pytest.mark.parametrize("name", NO_SUMS)
def test_means_are_not(name: str) -> None:
    assert not is_sum_over_samples(NO_SUMS[name](Given()), N)


def test_looking_runs_nothing_again() -> None:
    given, runs = Given(), []

    def loss(x: Tensor) -> Tensor:
        runs.append(x)
        return F.binary_cross_entropy_with_logits(x, given.targets, pos_weight=torch.ones(WIDTH), reduction="sum")

    assert is_sum_over_samples(checkpoint(loss, given.x, use_reentrant=False), N)
    assert len(runs) == 1
