"""What a call of a function has changed of Python."""

from __future__ import annotations

import itertools
import random
from collections import OrderedDict
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from lightning_pipeline.recording.reachable_state import Look

COUNTS = {"calls": 0}


class Statistics:
    def __init__(self) -> None:
        self.seen: list[int] = []

    def note(self, size: int) -> None:
        self.seen.append(size)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.calls, self.nested, self.statistics = 0, {"a": [0]}, Statistics()
        self.numbers, self.generator, self.cache = itertools.count(), np.random.default_rng(0), None

    def forward(self, x: Tensor, what: str = "") -> Tensor:
        if what == "counter":
            self.calls += 1
        elif what == "nested":
            self.nested["a"].append(1)
        elif what == "object":
            self.statistics.note(len(x))
        elif what == "iterator":
            next(self.numbers)
        elif what == "own generator":
            self.generator.random()
        elif what == "python":
            random.random()
        elif what == "numpy":
            np.random.rand()
        elif what == "global":
            COUNTS["calls"] += 1
        elif what == "class":
            Block.shared = [*getattr(Block, "shared", []), 1]
        elif what == "setattr":
            setattr(self, "added", len(x))  # noqa: B010
        elif what == "tensor":
            self.cache = x
        elif what == "buffer":
            self.register_buffer("kept", x)
        return self.linear(x)


CHANGES = [
    *("counter", "nested", "object", "iterator", "own generator", "python", "numpy", "global", "class", "setattr"),
    *("tensor", "buffer"),
]


@pytest.mark.parametrize("what", CHANGES)
@pytest.mark.parametrize("wrapped", [False, True])
def test_changes_are_seen(what: str, wrapped: bool) -> None:
    block, known, x = Block(), OrderedDict[Any, Any](), torch.ones(1, 2)
    function = partial(block.__call__, what=what) if wrapped else lambda x: block(x, what)
    for _ in range(2):
        quiet = Look(known, function, (x,))
        block(x)
        assert not quiet.changed()
    look = Look(known, function, (x,))
    function(x)
    assert len(look.changed()) == 1


def test_changes_of_what_a_closure_has() -> None:
    known: OrderedDict[Any, Any] = OrderedDict()
    for _ in range(2):
        seen: list[int] = []
        number = 0

        def run() -> None:
            nonlocal number
            number += 1
            seen.append(number)  # noqa: B023

        look = Look(known, run, ())
        run()
        assert "what it was given" in look.changed()
    assert len(known) == 1


def test_containers_that_are_exchanged_between_calls() -> None:
    block, known = Block(), OrderedDict[Any, Any]()
    Look(known, block, ())
    block.nested = {"a": [0]}
    look = Look(known, block, ())
    block(torch.ones(1, 2), "nested")
    assert look.changed() == ["Block.nested"]
