"""What a stage's action takes beside the model's work."""

from __future__ import annotations

import time

import pytest
import torch

from lightning_pipeline.partition.interception import Interception
from lightning_pipeline.runtime.overhead import measure_overhead

CPU = torch.device("cpu")


def test_it_is_that_of_the_replay(monkeypatch: pytest.MonkeyPatch) -> None:
    with torch.inference_mode():  # as in a validation step before training
        plain = measure_overhead(CPU)
    assert 0 < plain.action < 0.02 and 0 < plain.event < 0.002

    run = Interception.run

    def slower(*args: object) -> object:  # a forward that takes 2 ms more is 1 ms more for forwards and backwards
        began = time.thread_time()
        while time.thread_time() - began < 2e-3:
            pass
        return run(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(Interception, "run", slower)
    assert 0.9e-3 < measure_overhead(CPU).action - plain.action < 0.02
