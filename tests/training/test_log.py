"""LIGHTNING_PIPELINE_LOG: what is cut, sent and waited for, on every rank; nothing without it."""

from __future__ import annotations

import io
import os
from contextlib import redirect_stderr
from pathlib import Path
from typing import Any

import pytest

from lightning_pipeline.runtime.log import VARIABLE, set_up_log
from tests.launching import launch
from tests.training.models import LitGPT, gpt_stages, token_loader
from tests.training.runs import pipeline_trainer


def fit(world: int, level: str, folder: Path) -> str:
    """What a rank writes to standard error in two steps."""
    os.environ[VARIABLE] = level
    written = io.StringIO()
    with redirect_stderr(written):
        strategy = {"num_microbatches": 2}
        trainer = pipeline_trainer(gpt_stages(world), world=world, strategy=strategy, max_steps=2)
        trainer.fit(LitGPT(), token_loader(8, 4))
        trainer.save_checkpoint(folder / "last.ckpt")
    return written.getvalue()


def fit_with_and_without(world: int, folder: Path) -> list[str]:
    return [fit(world, level, folder) for level in ("", "debug")]


@pytest.fixture(scope="module")
def logs(tmp_path_factory: pytest.TempPathFactory) -> list[list[str]]:
    return launch(fit_with_and_without, 2, tmp_path_factory.mktemp("log"), world=2)


@pytest.mark.multiprocess
@pytest.mark.parametrize("rank", [0, 1])
def test_every_rank_tells_what_it_does(logs: list[list[str]], rank: int) -> None:
    quiet, told = logs[rank]
    assert f"rank {rank}: " not in quiet
    lines = [line.partition(f"rank {rank}: ")[2] for line in told.splitlines() if f"rank {rank}: " in line]
    for beginning in (
        "stages begin with {",
        f"is stage {rank} (rank {rank}) of replica 0, on cpu; 2 micro-batches by schedule 1f1b",
        f"ran {rank}F0 in ",
        f"ran {rank}B1 in ",
        "sends FORWARD to stage 1: float32" if rank == 0 else "expects FORWARD from stage 0: float32",
        "saves checkpoint ",
    ):
        assert any(line.startswith(beginning) for line in lines), f"{beginning!r} in {lines}"


def test_what_is_no_level_is_told(monkeypatch: Any) -> None:
    monkeypatch.setenv(VARIABLE, "loud")
    with pytest.raises(ValueError, match="LIGHTNING_PIPELINE_LOG=loud is no level of Python's logging: set debug"):
        set_up_log(0)
