"""Options of `Trainer(strategy="pipeline")` from environment variables."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import lightning as L
import pytest

from lightning_pipeline import PipelineStrategy


def strategy_of(name: str) -> Any:
    return L.Trainer(strategy=name, devices=2, accelerator="cpu", logger=False).strategy


def test_a_name_takes_its_options_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LIGHTNING_PIPELINE_NUM_MICROBATCHES", "6")
    monkeypatch.setenv("LIGHTNING_PIPELINE_STAGE_CONFIG", "layers.4:1")
    monkeypatch.setenv("LIGHTNING_PIPELINE_SCHEDULE", "gpipe")
    monkeypatch.setenv("LIGHTNING_PIPELINE_GRADIENTS_MEAN", "false")
    monkeypatch.setenv("LIGHTNING_PIPELINE_TIMEOUT", "90")
    monkeypatch.setenv("LIGHTNING_PIPELINE_LAUNCHER", "1")  # which is no option
    found = strategy_of("pipeline")
    assert (found.num_microbatches, found.stage_config, found.schedule) == (6, "layers.4:1", "gpipe")
    assert found.gradients_mean is False and found.timeout == timedelta(seconds=90)
    # A name that says the schedule keeps it, and so does an object all that it was given.
    assert strategy_of("pipeline_1f1b").schedule == "1f1b"
    assert PipelineStrategy().num_microbatches is None


@pytest.mark.parametrize(
    ("variable", "close"),
    [
        ("LIGHTNING_PIPELINE_NUM_MICROBATCH", "LIGHTNING_PIPELINE_NUM_MICROBATCHES"),
        ("LIGHTNING_PIPELINE_ACCELERATOR", "LIGHTNING_PIPELINE_"),
    ],
)
def test_a_variable_that_is_no_option_is_told(variable: str, close: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(variable, "8")
    with pytest.raises(ValueError, match=f"{variable}=8.*did you mean {close}"):
        strategy_of("pipeline")


def test_a_value_that_does_not_fit_is_told_as_for_an_object(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LIGHTNING_PIPELINE_NUM_MICROBATCHES", "many")
    with pytest.raises(ValueError, match="num_microbatches is a whole number"):
        strategy_of("pipeline")
