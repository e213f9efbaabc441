"""Micro-batches on their way to the other ranks, and what is made of their times."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor

from lightning_pipeline.runtime.transport import Transport
from lightning_pipeline.strategy.measuring import described, of_all_ranks, restored

CPU = torch.device("cpu")


class Ranks:
    """A transport whose other ranks have taken these times."""

    def __init__(self, *others: list[float]) -> None:
        self.others = others

    def all_gather_vector(self, values: Tensor, what: str) -> Tensor:
        rows = list(self.others)
        if what == "how long a step takes":
            rows = [[len(own), sum(own) if own else float("nan")] for own in self.others]
        return torch.tensor([values.tolist(), *rows], dtype=torch.float64)


def together(*times: list[float]) -> tuple[list[float], tuple[float, ...]]:
    return of_all_ranks(times[0], cast(Transport, Ranks(*times[1:])))


def test_times_are_means_over_ranks_that_are_alike() -> None:
    assert together([1.0, 3.0], [1.2, 2.8]) == ([1.1, 2.9], ())  # they differ by no more than a measurement's noise
    assert together([1.0, 3.0], [0.5, 1.5], [2.0, 6.0]) == ([1.0, 3.0], (1.0, 2.0, 0.5))


def test_a_rank_that_could_not_measure_is_as_fast_as_the_first() -> None:
    assert together([2.0], [], [1.0]) == ([2.0], (1.0, 1.0, 2.0))
    assert together([2.0], [], [2.0]) == ([2.0], ())
    assert together([], [1.0]) == ([], ())


def test_microbatches_arrive_as_they_are_and_can_be_written_into() -> None:
    ids = torch.arange(6).view(2, 3)
    batch: Any = {"ids": ids, "again": ids, "names": ["a", "b"], "pair": (torch.ones(2), 7)}
    found = restored(described({4: batch}), CPU)[4]
    assert found["again"] is found["ids"] and torch.equal(found["ids"], ids)
    assert (found["names"], found["pair"][1]) == (["a", "b"], 7)
    found["ids"].zero_()
    assert ids.sum() == 15
