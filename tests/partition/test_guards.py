"""Modules that lack their tensors say so when they are called."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from lightning_pipeline.partition.guards import guard_forward, lift_guards, unguard


def absent_inside() -> nn.Sequential:
    leaf = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, device="meta"))
    guard_forward("blocks.3", leaf)
    return leaf


def test_a_call_names_the_module_that_is_elsewhere() -> None:
    leaf = absent_inside()
    assert leaf[0](torch.ones(1, 2)).shape == (1, 2) and "forward" not in vars(leaf[0])
    with pytest.raises(RuntimeError, match=r"'blocks\.3\.1' is on another stage, .* outside of a step"):
        leaf(torch.ones(1, 2))


def test_what_has_come_is_as_it_was() -> None:
    leaf = absent_inside()
    lift_guards(leaf)
    assert "forward" in vars(leaf[1])
    leaf.to_empty(device="cpu")
    assert leaf(torch.ones(1, 2)).shape == (1, 2)
    lift_guards(leaf)
    assert "forward" not in vars(leaf[1])


def test_a_guard_is_taken_off() -> None:
    leaf = absent_inside()
    unguard(leaf[1])
    assert "forward" not in vars(leaf[1])
