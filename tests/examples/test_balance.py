"""What the automatic cut is compared with."""

from __future__ import annotations

import math
import sys
from pathlib import Path

import pytest
import torch

from .conftest import ROOT

sys.path.insert(0, str(Path(ROOT) / "examples/benchmark"))

from balance import all_cuts, beside_the_best, equal_layers, equal_parameters
from balance_models import MODELS, LitModel


def test_equal_cuts_and_all_there_are() -> None:
    parts = ["a", "b", "c", "d"]
    assert equal_layers(parts, 2) == {"c": 1}
    assert equal_parameters(parts, [9, 1, 1, 1], 2) == {"b": 1}
    assert equal_parameters(parts, [1, 1, 1, 9], 3) == {"b": 1, "d": 2}
    assert all_cuts(parts, 3) == [{"b": 1, "c": 2}, {"b": 1, "d": 2}, {"c": 1, "d": 2}]


def test_no_cut_is_the_best_for_its_luck_in_one_turn() -> None:
    steady, lucky = [10.0, 10.0, 10.0], [12.0, 12.0, 5.0]
    # In the first two turns the lucky one was the faster of the two in the others, in the third it was the slower.
    mean, error = beside_the_best(steady, [steady, lucky])
    assert mean == pytest.approx((10 / 12 * 10 / 12 * 1) ** (1 / 3))
    assert error == pytest.approx(math.log(12 / 10) / 3)
    assert beside_the_best([20.0, 20.0, 20.0], [steady]) == pytest.approx((2.0, 0.0))


@pytest.mark.parametrize("name", list(MODELS))
def test_a_models_parts_are_called_in_their_order(name: str) -> None:
    model = MODELS[name]
    module = LitModel(model, {})
    called: list[str] = []
    for part in model.parts:
        module.get_submodule(part).register_forward_hook(lambda *_, part=part: called.append(part))
    loss = module.training_step(model.batch(2), 0)
    assert list(dict.fromkeys(called)) == model.parts
    assert torch.isfinite(loss)
