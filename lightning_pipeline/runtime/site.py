"""Where a virtual stage is in a pipeline."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Site:
    """A virtual stage's place.

    Attributes:
        stage: counted along the data, of `num_stages`.
        last: whether it is the last one.
        rank_before: the rank of the stage before; of the first stage, that of the last.
        rank_after: the rank of the stage after; of the last stage, that of the first.
        term: what users call it.
    """

    stage: int
    num_stages: int
    last: bool
    rank_before: int
    rank_after: int
    term: str

    @staticmethod
    def of(stage: int, placement: Sequence[int]) -> Site:
        """The place of a stage, with the rank of each stage in `placement`."""
        count = len(placement)
        return Site(
            stage=stage,
            num_stages=count,
            last=stage == count - 1,
            rank_before=placement[stage - 1],
            rank_after=placement[(stage + 1) % count],
            term=stage_term(placement),
        )


def stage_term(placement: Sequence[int]) -> str:
    """What users call a part of the model: ranks that hold several of them hold virtual stages."""
    return "virtual stage" if len(placement) > max(placement) + 1 else "stage"
