"""Steps of a single process with one micro-batch, which Lightning runs itself.

The pipeline only has them draw the random numbers that several stages would, and tells observers of them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from lightning_pipeline.engine.draws import CountedDraws, Draws
from lightning_pipeline.engine.executor import Span
from lightning_pipeline.partition.rng import mix
from lightning_pipeline.schedules import Action, Kind


class WholeBatch:
    """A step and its backward.

    Args:
        observe: gets each of them with its start and end; None measures nothing.
    """

    def __init__(
        self, draws: Draws, seed: int, actions: Sequence[Action], observe: Callable[[Span], None] | None
    ) -> None:
        self._draws = draws
        self._seed = mix(seed, 0)  # of the first micro-batch
        self._counted = CountedDraws(draws, self._seed)
        self._actions = actions
        self._observe = observe

    @contextmanager
    def running(self) -> Iterator[None]:
        """Around the user's step."""
        with self._observed(is_forward=True), self._draws.kept(), self._counted.running():
            yield

    @contextmanager
    def running_backward(self) -> Iterator[None]:
        """Around its backward, in which hooks may draw random numbers."""
        with self._observed(is_forward=False), self._draws.kept():
            self._draws.seed(self._seed, self._counted.num_draws)
            yield

    @contextmanager
    def _observed(self, *, is_forward: bool) -> Iterator[None]:
        if self._observe is None:  # without a look at the clock: users' tests may patch it and count the calls
            yield
            return
        began = time.perf_counter()
        yield
        now = time.perf_counter()
        for action in self._actions:  # with several virtual stages, the first gets all the time
            if (action.kind is Kind.F) is is_forward:
                self._observe((action, began, now))
                began = now
