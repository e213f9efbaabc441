"""What a compiled module has in Python: its changes are seen, put back, or cannot be told."""

from __future__ import annotations

import itertools
import random
from collections import OrderedDict, deque
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from lightning_pipeline.recording.python_state import State, Unclear, as_it_was

SCALES = {"all": [1]}


class Options:
    def __init__(self) -> None:
        self.rate, self.parts = 0.5, [1]


class Layer(nn.Module):
    def __init__(self, own: Any = None) -> None:
        super().__init__()
        self.linear, self.own = nn.Linear(2, 2), own
        self.count, self.options, self.window = 0, Options(), deque([1], maxlen=2)
        self.nested: dict[str, Any] = OrderedDict(a=[1], b={"c": {2}})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.linear(x) * len(SCALES["all"])
        return found


CHANGES: dict[str, Any] = {
    "count": lambda layer: setattr(layer, "count", layer.count + 1),
    "new": lambda layer: setattr(layer, "new", 1),
    "object": lambda layer: setattr(layer.options, "rate", 0.25),
    "list": lambda layer: layer.options.parts.append(2),
    "deque": lambda layer: layer.window.extend([2, 3]),
    "set": lambda layer: layer.nested["b"]["c"].add(3),
    "order": lambda layer: layer.nested.move_to_end("a"),
    "global": lambda layer: SCALES["all"].append(2),
    "child": lambda layer: layer.linear.eval(),
}


def shown(layer: Layer) -> str:
    own = {**vars(layer), **vars(layer.options), "options": 0, "child": layer.linear.training}
    return repr((own, SCALES))


@pytest.mark.parametrize("what", CHANGES)
def test_changes_are_seen_and_put_back(what: str) -> None:
    layer = Layer()
    modules = list(layer.modules())
    before, first = shown(layer), State(modules)
    assert first.is_now()
    CHANGES[what](layer)
    after, second = shown(layer), State(modules)
    assert before != after and not first.is_now() and second.is_now() and first.key != second.key
    with as_it_was(modules, first):
        assert shown(layer) == before and first.is_now()
    assert shown(layer) == after
    first.put_back()
    assert shown(layer) == before and State(modules).key == first.key


@pytest.mark.parametrize(
    "own",
    [torch.ones(1), np.zeros(1), random.Random(1), itertools.count(), [nn.Linear(1, 1)], {Options()}, iter([1])],
    ids=lambda own: type(own).__name__,
)
def test_what_cannot_be_told(own: Any) -> None:
    layer = Layer(own)
    with pytest.raises(Unclear):
        State(list(layer.modules()))
