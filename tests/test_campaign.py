"""The campaign of faults runs, and sees what does not hold. ``make campaign`` runs more of it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.campaign.__main__ import main
from tests.campaign.checks import problems_of
from tests.campaign.runs import Ended
from tests.campaign.trials import HOOKS, KINDS, LAYOUTS, PHASES, Trial, draw

KILLED = "[rank0]: stage 1 (rank 1) failed: its process 7 was killed by SIGKILL"


def test_trials_are_drawn_again_from_their_seed_and_number() -> None:
    everything: dict[str, Any] = {"kinds": list(KINDS), "layouts": list(LAYOUTS)}
    drawn = [draw(1, number, **everything) for number in range(3000)]
    assert drawn == [draw(1, number, **everything) for number in range(3000)]
    assert {trial.kind for trial in drawn} == set(KINDS)
    assert {trial.phase for trial in drawn} == {"", *PHASES}
    assert {trial.hook for trial in drawn} == {"", *HOOKS}
    assert all(trial.victim < trial.world for trial in drawn)


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({}, ""),
        ({"exit_code": 0}, "it ended with exit code 0"),
        ({"exit_code": None}, "it hangs"),
        ({"seconds": 500.0}, "it went on for 500 s after the fault"),
        ({"stayed": ["7 python"]}, "it left a process: 7 python"),
        ({"output": "rank 1 failed"}, "the cause is not told"),
        ({"output": KILLED.replace("rank 1", "a rank")}, "no line tells both of rank 1 and of the cause"),
        ({"happened": False}, "it failed though the fault did not come"),
    ],
)
def test_what_does_not_hold_is_seen(changes: dict[str, Any], problem: str) -> None:
    trial = Trial(0, 0, "2", kind="kill", victim=1, phase="steady")
    ended = replace(Ended(exit_code=1, happened=True, seconds=9.0, output=KILLED), **changes)
    told = problems_of(trial, ended, None, {"weight": torch.ones(1)}, usual=10.0)
    assert problem in "; ".join(told) if problem else not told


def test_other_weights_are_seen() -> None:
    trial, ended = Trial(0, 0, "2", kind="pause", phase="steady"), Ended(exit_code=0, happened=True)
    reference = {"weight": torch.ones(1)}
    assert not problems_of(trial, ended, {"weight": torch.ones(1)}, reference, usual=10.0)
    (told,) = problems_of(trial, ended, {"weight": torch.ones(1) + 1e-7}, reference, usual=10.0)
    assert "other weights than without the fault: weight" in told


@pytest.mark.slow
@pytest.mark.multiprocess
@pytest.mark.parametrize("trials", [1, 3])
def test_a_campaign(trials: int, tmp_path: Path) -> None:
    kinds = ["kill", "raise", "exit"]
    assert (
        main(["--trials", str(trials), "--kinds", *kinds, "--layouts", "2", "--forked", "--folder", str(tmp_path)]) == 0
    )
    lines = [json.loads(line) for line in (tmp_path / "trials.jsonl").read_text().splitlines()]
    assert [line["trial"] for line in lines] == list(range(trials))
    assert all(line["happened"] and not line["problems"] for line in lines)
