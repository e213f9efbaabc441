"""Unchanged models train on 2 and 4 stages, and on 4 virtual ones on 2 ranks, with the gradients of one process.

Poison is part of runs on two stages, of a model of each kind: see `tests.poison`.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.launching import launch
from tests.models.zoo import CASES
from tests.models.zoo_worker import train

pytestmark = pytest.mark.multiprocess

STAGES = ("2", "4", "2x2")
# Virtual stages are as stages are, which every third case shows; these are about them.
ABOUT_VIRTUAL_STAGES = {"counts_calls", "keeps_state", "caches_mask", "gpt2_dropout", "gpt2_checkpointing"}
NAMES = {
    "plain": [name for name, case in CASES.items() if not case.random],
    "2": list(CASES),
    "4": list(CASES),
    "2x2": [name for index, name in enumerate(CASES) if index % 3 == 0 or name in ABOUT_VIRTUAL_STAGES],
}
# What follows is run by default, the rest where there is time for it. What models show on two stages, they show on four
# and on virtual ones. Some are variants: bert is vit but for what it embeds, and llama a gpt2. Others are habits of
# tests/habits that run by default.
OFTEN = {
    "plain": {"gpt2", "keeps_state"},
    "2": {
        *("gpt2", "gpt2_embedding_as_head", "gpt2_dropout", "gpt2_checkpointing", "unet", "frozen"),
        *("layerdrop", "shared_layer"),
    },
    "4": {"gpt2", "shared_layer"},
    "2x2": {"keeps_state", "shared_layer"},
}
SLOW = "4"
"""The layout of which nothing is run by default."""


def laid_out(*layouts: str) -> list[Any]:
    """The names of these layouts' cases, with the layout."""
    return [
        pytest.param(name, layout, marks=() if name in OFTEN[layout] and layout != SLOW else pytest.mark.slow)
        for layout in layouts
        for name in NAMES[layout]
    ]


LAID_OUT = laid_out(*STAGES)

Results = dict[str, list[dict[str, Any]]]


@pytest.fixture(scope="module")
def results(request: pytest.FixtureRequest) -> Results:
    """What each rank of each launch gave, by layout: of the cases that are run often and those that are asked for."""
    items = [item for item in request.session.items if item.path == request.path]
    asked = {(item.callspec.params["name"], item.callspec.params.get("layout")) for item in items if is_of_case(item)}
    wanted = {
        layout: [name for name in NAMES[layout] if name in OFTEN[layout] or (name, layout) in asked] for layout in OFTEN
    }
    compared = {name for names in wanted.values() for name in names}
    wanted["1"] = [name for name in CASES if name in compared]
    early = {"1", "2"} | {item.callspec.params["early"] for item in items if "early" in params_of(item)}
    if SLOW not in early and not any(params_of(item).get("layout") == SLOW for item in items):
        del wanted[SLOW]
    return {
        layout: launch(train, layout, names, layout in early, world=1 if layout == "plain" else int(layout[0]))
        for layout, names in wanted.items()
    }


def is_of_case(item: Any) -> bool:
    return "name" in params_of(item)


def params_of(item: Any) -> dict[str, Any]:
    return item.callspec.params if hasattr(item, "callspec") else {}


def of(results: Results, layout: str, name: str, kind: str) -> list[dict[str, Any]]:
    """The results of a case, by rank."""
    for rank, saved in enumerate(results[layout]):
        failed = {case: text for case, text in saved.items() if isinstance(text, str)}
        if name in failed:
            pytest.fail(f"{name} failed on rank {rank} of {layout}:\n{failed[name]}")
        if name not in saved:
            pytest.fail(f"{name} did not run on rank {rank} of {layout}, as {', '.join(failed)} failed")
    return [saved[name][kind] for saved in results[layout]]


def merged(ranks: list[dict[str, Any]]) -> list[dict[str, Tensor]]:
    """The gradients of all ranks; where several have a parameter's, they have to be the same."""
    steps = []
    for step in zip(*(rank["gradients"] for rank in ranks), strict=True):
        together: dict[str, Tensor] = {}
        for gradients in step:
            for name, gradient in gradients.items():
                assert torch.equal(together.setdefault(name, gradient), gradient), f"stages disagree on {name}"
        steps.append(together)
    return steps


def assert_close(found: dict[str, Tensor], expected: dict[str, Tensor], tolerance: dict[str, float]) -> None:
    """Equal names; equal bits where the tolerance is 0, else a difference relative to the largest element."""
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        if tolerance[name] == 0:
            assert torch.equal(found[name], value), name
        else:
            scale = float(value.abs().max()) if value.numel() else 0.0
            assert float((found[name] - value).abs().max()) <= tolerance[name] * scale + 1e-12, name


@pytest.mark.parametrize(("name", "layout"), laid_out("plain"))
def test_one_stage_has_the_bits_of_plain_lightning(results: Results, name: str, layout: str) -> None:
    [one], [plain] = of(results, "1", name, "one"), of(results, layout, name, "plain")
    assert len(one["gradients"]) == len(plain["gradients"]) == len(CASES[name].batches())
    for found, expected in zip(one["gradients"], plain["gradients"], strict=True):
        assert_close(found, expected, dict.fromkeys(expected, 0.0))
    assert_close(one["state"], plain["state"], dict.fromkeys(plain["state"], 0.0))


@pytest.mark.parametrize(("name", "layout"), LAID_OUT)
def test_stages_have_the_gradients_of_one(results: Results, name: str, layout: str) -> None:
    [one], ranks = of(results, "1", name, "one"), of(results, layout, name, "stages")
    summed = CASES[name].summed.get(2 if layout == "2" else 4, ())
    later = 1e-4 if summed else 0.0  # the first step's rounding goes into everything after it
    for step, (found, expected) in enumerate(zip(merged(ranks), one["gradients"], strict=True)):
        tolerance = {n: max(later if step else 0.0, 1e-5 if n.startswith(summed) else 0.0) for n in expected}
        assert_close(found, expected, tolerance)
    assert_close(ranks[0]["state"], one["state"], dict.fromkeys(one["state"], later))
    for rank in ranks:
        assert rank["losses"] == (pytest.approx(one["losses"], rel=1e-5) if summed else one["losses"])


@pytest.mark.parametrize(("name", "layout"), LAID_OUT)
def test_a_stage_does_without_what_others_hold(results: Results, name: str, layout: str) -> None:
    ranks = of(results, layout, name, "stages")
    assert all(rank["faults"] == [] for rank in ranks)
    poisons = layout in map(str, CASES[name].poison)
    assert any(rank["poisoned"] for rank in ranks) is poisons
    held = [set(rank["held"]) for rank in ranks]
    everything = set.union(*held)
    assert everything >= set(ranks[0]["state"])
    if "layerdrop" not in name:  # there a layer may not have been called yet, and then everybody has it
        assert all(stage < everything for stage in held)


def test_the_first_module_of_the_second_stage_is_configuration_enough(results: Results) -> None:
    name = "gpt2_embedding_as_head"
    assert CASES[name].cuts[2] == {"transformer.h.2": 1}
    first, second = ({n.removeprefix("transformer.") for n in r["held"]} for r in of(results, "2", name, "stages"))
    tops = [{".".join(n.split(".")[: 2 if n.startswith("h.") else 1]) for n in held} for held in (first, second)]
    assert tops == [{"wte", "wpe", "h.0", "h.1"}, {"wte", "h.2", "h.3", "ln_f"}]


@pytest.mark.parametrize(
    ("name", "layout", "frozen"), [("frozen", "2", [0]), pytest.param("frozen", "4", [0, 1], marks=pytest.mark.slow)]
)
def test_a_frozen_backbone_costs_no_backward(results: Results, name: str, layout: str, frozen: list[int]) -> None:
    backwards = [rank["backwards"] for rank in of(results, layout, name, "stages")]
    assert [rank for rank, count in enumerate(backwards) if count == 0] == frozen


@pytest.mark.parametrize("early", ["2", *(pytest.param(layout, marks=pytest.mark.slow) for layout in ("4", "2x2"))])
def test_steps_that_return_early_give_their_outputs(results: Results, early: str) -> None:
    [one], ranks = [saved["early_features"] for saved in results["1"]], [s["early_features"] for s in results[early]]
    for rank in ranks:
        for when in ("before", "after"):
            for found, expected in zip(rank[when], one[when], strict=True):
                assert_close(found, expected, dict.fromkeys(expected, 0.0))
        assert torch.equal(rank["early"], one["early"])


@pytest.mark.parametrize("layout", ["2", pytest.param(SLOW, marks=pytest.mark.slow), "2x2"])
def test_trainers_that_follow_one_another_share_their_connections(results: Results, layout: str) -> None:
    for rank in range(int(layout[0])):
        names = [name for name in NAMES[layout] if name in results[layout][rank]]
        numbers = [of(results, layout, name, "stages")[rank]["num_threads"] for name in names]
        assert max(numbers) <= numbers[1] + 4  # autograd and torch start some of their own later


@pytest.mark.parametrize("layout", ["2", *(pytest.param(layout, marks=pytest.mark.slow) for layout in ("4", "2x2"))])
def test_checkpointing_draws_the_same_numbers_again(results: Results, layout: str) -> None:
    plain = merged(of(results, layout, "gpt2_dropout", "stages"))
    checkpointed = merged(of(results, layout, "gpt2_checkpointing", "stages"))
    for found, expected in zip(checkpointed, plain, strict=True):
        assert_close(found, expected, dict.fromkeys(expected, 0.0))
