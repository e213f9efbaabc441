"""Micro-batches on their way to the other ranks, and how fast these are."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor

from lightning_pipeline.runtime.transport import Transport
from lightning_pipeline.strategy.measure import described, restored, speeds_of

CPU = torch.device("cpu")


class Ranks:
    """A transport whose other ranks have taken these times."""

    def __init__(self, *others: float) -> None:
        self.others = others

    def all_gather_vector(self, values: Tensor, what: str) -> Tensor:
        return torch.tensor([values.tolist(), *([own] for own in self.others)], dtype=torch.float64)


def together(own: float, *others: float) -> tuple[float, ...]:
    return speeds_of(own, cast(Transport, Ranks(*others)))


def test_ranks_are_as_fast_as_they_were() -> None:
    assert together(4.0, 4.4) == ()  # they differ by no more than a measurement's noise
    assert together(4.0, 2.0, 8.0) == (1.0, 2.0, 0.5)


def test_a_rank_that_could_not_measure_is_as_fast_as_the_first() -> None:
    nan = float("nan")
    assert together(2.0, nan, 1.0) == (1.0, 1.0, 2.0)
    assert together(2.0, nan, 2.0) == ()
    assert together(nan, 1.0) == ()


def test_microbatches_arrive_as_they_are_and_can_be_written_into() -> None:
    ids = torch.arange(6).view(2, 3)
    batch: Any = {"ids": ids, "again": ids, "names": ["a", "b"], "pair": (torch.ones(2), 7)}
    found = restored(described({4: batch}), CPU)[4]
    assert found["again"] is found["ids"] and torch.equal(found["ids"], ids)
    assert (found["names"], found["pair"][1]) == (["a", "b"], 7)
    found["ids"].zero_()
    assert ids.sum() == 15
