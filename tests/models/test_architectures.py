"""Architectures of different families train on 2 and 4 stages, unconfigured, to the gradients of one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.launching import launch
from tests.models.architectures import ARCHITECTURES, NUM_BATCHES
from tests.models.architectures_worker import train

pytestmark = pytest.mark.multiprocess

OFTEN: dict[int, list[str]] = {2: [], 4: []}  # by number of stages; test_zoo.py trains some by default
LAID_OUT = [
    pytest.param(name, num_stages, marks=() if name in OFTEN[num_stages] else pytest.mark.slow)
    for num_stages in OFTEN
    for name in ARCHITECTURES
]


@pytest.fixture(scope="module")
def results(request: pytest.FixtureRequest) -> dict[int, list[dict[str, Any]]]:
    """By number of stages, what each rank found; 0 is plain Lightning. Of the architectures that are asked for."""
    items = [item for item in request.session.items if item.module is request.module and hasattr(item, "callspec")]
    asked = {(item.callspec.params["num_stages"], item.callspec.params["name"]) for item in items}
    asked |= {(0, name) for _, name in asked}
    return {
        n: launch(train, n, names, world=max(n, 1))
        for n in (0, 2, 4)
        if (names := [name for name in ARCHITECTURES if (n, name) in asked])
    }


def of(results: dict[int, list[dict[str, Any]]], name: str, num_stages: int) -> list[dict[str, Any]]:
    for rank, found in enumerate(results[num_stages]):
        assert name in found, f"{name} did not run on rank {rank}, as one before it failed"
        assert not isinstance(found[name], str), f"{name} failed on rank {rank}:\n{found[name]}"
    return [found[name] for found in results[num_stages]]


@pytest.mark.parametrize(("name", "num_stages"), LAID_OUT)
def test_the_gradients_are_those_of_one_process(results: Any, name: str, num_stages: int) -> None:
    [plain], ranks = of(results, name, 0), of(results, name, num_stages)
    assert len(plain["gradients"]) == NUM_BATCHES
    for number, expected in enumerate(plain["gradients"]):
        # A parameter that several stages use adds up its uses in another order, which the second step sees everywhere.
        scale = max(float(gradient.abs().max()) for gradient in expected.values())
        found = {key for rank in ranks for key in rank["gradients"][number]}
        assert found == expected.keys()
        for rank in ranks:
            for key, gradient in rank["gradients"][number].items():
                assert float((gradient - expected[key]).abs().max()) <= 2e-6 * scale, key


@pytest.mark.parametrize(("name", "num_stages"), LAID_OUT)
def test_every_stage_has_a_part(results: Any, name: str, num_stages: int) -> None:
    ranks = of(results, name, num_stages)
    assert sorted(ranks[0]["plan"].values()) == list(range(1, num_stages))
    everything = {key for rank in ranks for key in rank["gradients"][0]}
    assert all(rank["gradients"][0] for rank in ranks)
    # One may have them all: the last, where the first has nothing but an embedding that is the head as well.
    assert any(set(rank["gradients"][0]) < everything for rank in ranks)
    assert all(rank["plan"] == ranks[0]["plan"] for rank in ranks)


def test_thirty_families() -> None:
    assert len({architecture.family for architecture in ARCHITECTURES.values()}) >= 30
    assert torch.tensor([len(a.batches()) for a in ARCHITECTURES.values()]).eq(NUM_BATCHES).all()
