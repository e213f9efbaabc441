"""Each mistake gets an error that says what to do, on every rank, within seconds."""

from __future__ import annotations

import time
import warnings
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from lightning_pipeline import PipelineStrategy
from tests.errors import modules
from tests.launching import SOON_S, Ended, launch, run_ranks

pytestmark = pytest.mark.multiprocess


def errors_of(module: str, *args: Any, world: int = 2, **strategy: Any) -> list[Ended]:
    ended = run_ranks(fit, module, args, world, strategy, world=world)
    for rank, end in enumerate(ended):
        assert end.exit_code not in (0, None), f"rank {rank} ended with {end}"
        assert end.seconds < SOON_S
    return ended


def fit(module: str, args: tuple[Any, ...], world: int, strategy: dict[str, Any]) -> None:
    modules.fit(getattr(modules, module), *args, world=world, **strategy)


# What is wrong, and words of the error.
MISTAKES: list[tuple[str, dict[str, Any], list[str]]] = [
    ("Plain", {"stage_config": {"secnd": 1}}, ["KeyError", "'secnd'", "closest names are 'second'"]),
    ("Plain", {"stage_config": {"second": 2}}, ["ValueError", "3 stages need at least 3 devices, got 2"]),
    ("Plain", {"num_microbatches": 1}, ["ValueError", "num_microbatches=1", "num_stages=2"]),
    ("Plain", {"stage_config": {"second": 2}, "num_stages": 2}, ["ValueError", "'second' on stage 2"]),
    ("OneLayer", {"num_stages": 2}, ["OneLayer is to be cut into 2", "its training_step calls 1", "devices=1"]),
    ("RankDependent", {}, ["one rank alone uses what a stage computes", "x = x * 3", "asks for the rank"]),
    ("RankFromEnvironment", {}, ["did not run the same code", "ran add", "modules.py", "x = x + 3"]),
    ("Prunes", {"data_parallel": "fsdp"}, ["ValueError", "ModelPruning renames parameters", "torch.nn.utils.prune"]),
    ("LossInNoKey", {}, ["ValueError", "training_step returned dict ['error']"]),
    ("GradientAcrossStages", {}, ["grad goes back over what stages 0 and 1 compute", "modules.py"]),
    ("StepsAtTimes", {}, ["micro-batch 0 comes to ", "the step of optimizer 0, SGD", "the end of training_step"]),
    ("CreatesAGraph", {}, ["manual_backward is given create_graph beside the loss", "torch.autograd.grad"]),
    ("StepsWithoutALoss", {}, ["manual_backward is given a loss that has no gradients", "modules.py"]),
    ("GoesBackTwice", {}, ["a second time", "retain_graph=True"]),
]
NAMES = [" ".join([module, *map(str, strategy.values())]) for module, strategy, _ in MISTAKES]


def make_all() -> list[tuple[str, float]]:
    """What each mistake raised on this rank, and after how many seconds."""
    found = []
    for module, strategy, _ in MISTAKES:
        started = time.monotonic()
        try:
            fit(module, (), 2, strategy)
            error = "nothing"
        except Exception as raised:
            error = f"{type(raised).__name__}: {raised}"
        found.append((error, time.monotonic() - started))
    return found


@pytest.fixture(scope="module")
def mistakes() -> list[list[tuple[str, float]]]:
    return launch(make_all, world=2)


@pytest.mark.parametrize("number", range(len(MISTAKES)), ids=NAMES)
def test_a_mistake_is_named_on_every_rank(number: int, mistakes: Any) -> None:
    for rank in mistakes:
        error, seconds = rank[number]
        assert seconds < SOON_S
        for word in MISTAKES[number][2]:
            assert word in error, f"{word!r} is not in {error}"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"schedule": "1f1"}, "schedule is one of .*'1f1b', .*a function .*; got '1f1'"),
        ({"loss_reduction": "max"}, '"mean" or "sum", got \'max\''),
        ({"num_stages": 0}, "num_stages is a whole number from 1, got 0"),
        ({"num_stages": 10**12}, "num_stages is at most 4,096, got 1000000000000"),
        ({"num_microbatches": 10**12}, "num_microbatches is at most 262,144, got 1000000000000"),
        ({"num_stages": 2, "tensor_parallel_size": 10**12}, "tensor_parallel_size is at most 1,048,576"),
        ({"num_microbatches": 2.5}, "num_microbatches is a whole number from 1, got 2.5"),
    ],
)
def test_an_option_that_makes_no_sense_is_told_at_once(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        PipelineStrategy(**options)


def trained(world: int, names: Sequence[str]) -> dict[str, Any]:
    found = {}
    for name in names:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            values = modules.fit(getattr(modules, name), world=world, **ONE[world])
        found[name] = {"values": values, "warned": [str(warning.message) for warning in caught]}
    return found


ONE: dict[int, dict[str, Any]] = {1: {"num_stages": 1}, 2: {}, 3: {}}
UNREACHED = {"NeverReached": "gives it 'unused'", "BoundaryInFunction": "gives it 'second'"}
UNUSUAL = (
    *(*UNREACHED, "OutOfOrder", "LoopsBack", "SharedActivation", "SharedActivationTooSoon", "CallsItself", "Changing"),
)


@pytest.mark.parametrize(
    "unusual",
    [
        pytest.param(UNUSUAL[::3], id="often"),
        pytest.param([name for name in UNUSUAL if name not in UNUSUAL[::3]], id="others", marks=pytest.mark.slow),
    ],
)
def test_what_looks_like_a_mistake_and_is_none_trains_as_in_one_process(unusual: Sequence[str]) -> None:
    [alone], [found, _] = launch(trained, 1, unusual, world=1), launch(trained, 2, unusual, world=2)
    for name in unusual:
        expected, values = alone[name]["values"], found[name]["values"]
        assert expected.keys() == values.keys()
        for key, value in expected.items():
            torch.testing.assert_close(values[key], value, rtol=0, atol=1e-7, msg=f"{key} of {name}")
    for name in unusual:
        told = [text for text in found[name]["warned"] if "stage 1 is never reached by the first training step" in text]
        assert len(told) == (name in UNREACHED), name
        assert all(UNREACHED[name] in text for text in told)
        reads = [text for text in found[name]["warned"] if "reads what a stage computes" in text]
        assert len(reads) == (name == "ReadsItsLoss"), name
        assert all("modules.py" in text and "loss.item() > 0" in text for text in reads)


@pytest.mark.slow
def test_a_stage_without_modules_among_others_is_told_of() -> None:
    found = launch(trained, 3, ("SkippedStage",), world=3)[0]["SkippedStage"]["warned"]
    assert any("stage 1 is never reached" in text and "gives it 'unused'" in text for text in found)


@pytest.mark.parametrize("num_stages", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_weights_that_a_step_draws_are_refused_with_replicas(num_stages: int) -> None:
    for end in errors_of("DrawsWeights", world=2 * num_stages, num_stages=num_stages):
        assert "normal_ draws random numbers into second.weight" in end.error and "modules.py" in end.error
        assert "each replica would draw others" in end.error


def test_devices_that_are_no_multiple_of_stages() -> None:
    for end in errors_of("Plain", world=3):
        assert "ValueError: 3 devices are not a multiple of 2 stages" in end.error


@pytest.mark.parametrize("at", ["first", pytest.param("head", marks=pytest.mark.slow)])
def test_an_exception_in_a_step_ends_all_and_is_told_once(at: str) -> None:
    ended = errors_of("Raises", at)
    error = "FloatingPointError: the user's own error"
    own = [rank for rank, end in enumerate(ended) if end.error == error]
    assert own
    for rank, end in enumerate(ended):
        if rank not in own:
            assert end.error.startswith("PeerFailedError") and f"failed: {error}" in end.error


@pytest.mark.parametrize("rank", [pytest.param(0, marks=pytest.mark.slow), 1])
def test_a_killed_rank_ends_the_others(rank: int) -> None:
    ended = errors_of("Killed", rank)
    assert ended[rank].exit_code == -9
    assert ended[1 - rank].error.startswith("PeerFailedError")
    assert f"stage {rank} (rank {rank}) failed: its process ended" in ended[1 - rank].error
