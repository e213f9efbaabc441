"""Micro-batches on their way to the other ranks, and what is made of their times."""

from __future__ import annotations

import os
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from lightning_pipeline.runtime.transport import Transport
from lightning_pipeline.strategy.joint_measurement import described, relative_speeds, restored, shared_cores

CPU = torch.device("cpu")


class Ranks:
    """A transport whose ranks have taken so many seconds."""

    def __init__(self, *seconds: float) -> None:
        self.seconds = seconds

    def all_gather_vector(self, values: Tensor, what: str) -> Tensor:
        return torch.tensor([[s] for s in (float(values), *self.seconds)], dtype=torch.float64)


def speeds(first: float, *others: float) -> tuple[float, ...]:
    return relative_speeds(first, cast(Transport, Ranks(*others)))


def test_speeds_are_those_beside_the_first_rank() -> None:
    assert speeds(2.0, 1.0, 4.0) == (1.0, 2.0, 0.5)
    assert speeds(2.0, 1.9, 2.1) == ()  # no more than a measurement's noise
    assert speeds(2.0, float("nan"), 1.0) == (1.0, 1.0, 2.0)  # one that could not measure
    assert speeds(float("nan"), 1.0) == ()
    assert relative_speeds(1.0, None) == ()


def test_microbatches_arrive_as_they_are_and_can_be_written_into() -> None:
    ids = torch.arange(6).view(2, 3)
    batch: Any = {"ids": ids, "again": ids, "names": ["a", "b"], "pair": (torch.ones(2), 7)}
    found = restored(described({4: batch}), CPU)[4]
    assert found["again"] is found["ids"] and torch.equal(found["ids"], ids)
    assert (found["names"], found["pair"][1]) == (["a", "b"], 7)
    found["ids"].zero_()
    assert ids.sum() == 15


def test_cores_are_shared_where_there_are_fewer_than_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1, 2}, raising=False)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    assert shared_cores(CPU, 3, 3) is None
    assert shared_cores(CPU, 4, 4) == 3
    assert shared_cores(CPU, 4, 8) == 1.5  # of two pipelines on the node
    assert shared_cores(torch.device("cuda"), 4, 8) is None
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    assert shared_cores(CPU, 4, 4) is None
