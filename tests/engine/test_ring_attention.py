"""Attention over parts of a sequence, on several ranks, is that of the whole sequence, with its gradients."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from lightning_pipeline.engine.context import ContextRanks
from tests.launching import PATIENCE_S, launch

pytestmark = pytest.mark.multiprocess

CASES: dict[str, dict[str, Any]] = {
    "causal": {"is_causal": True},
    "full": {},
    "scale": {"is_causal": True, "scale": 0.3},
    "grouped": {"is_causal": True, "enable_gqa": True},
}
FORMULA = "formula"
"""Where the values have other sizes than the keys, torch has no kernel that tells what the ring needs."""


def attend_in_parts(world: int) -> dict[str, float]:
    rank, port = int(os.environ["LOCAL_RANK"]), os.environ["MASTER_PORT"]
    dist.init_process_group("gloo", f"tcp://127.0.0.1:{port}", rank=rank, world_size=world)
    ranks = ContextRanks(dist.group.WORLD, dist.group.WORLD)
    found = {}
    for name, options in {**CASES, FORMULA: {"is_causal": True}}.items():
        torch.manual_seed(0)
        heads = 2 if name == "grouped" else 4
        whole = [torch.randn(2, number, 24, 8, dtype=torch.float64) for number in (4, heads, heads)]
        if name == FORMULA:
            whole[2] = torch.randn(2, heads, 24, 6, dtype=torch.float64)
        weight = torch.randn(2, 4, 24, whole[2].shape[-1], dtype=torch.float64)
        whole = [one.requires_grad_() for one in whole]
        expected = F.scaled_dot_product_attention(*whole, **options)
        gradients = torch.autograd.grad((expected * weight).sum(), whole)
        own = [one.detach().requires_grad_() for one in whole]
        joined = ranks.join(ranks.attention(*(ranks.part(one, 2) for one in own), **options), 2)
        # Every rank's sum counts, and each gives gradients to its own copies.
        partial = torch.autograd.grad((joined * weight).sum(), own)
        for gradient in partial:
            dist.all_reduce(gradient)
        pairs = [(joined, expected), *((part / world, one) for part, one in zip(partial, gradients, strict=True))]
        found[name] = max(float(_distance(*pair)) for pair in pairs)
    return found


def _distance(first: Tensor, second: Tensor) -> Tensor:
    return (first - second).detach().abs().max()


@pytest.mark.parametrize("world", [2, 3])
def test_it_is_that_of_the_whole(world: int) -> None:
    for errors in launch(attend_in_parts, world, world=world, timeout=PATIENCE_S):
        assert errors == pytest.approx(dict.fromkeys((*CASES, FORMULA), 0.0), abs=1e-12)
