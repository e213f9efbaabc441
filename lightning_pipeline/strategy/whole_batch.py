"""Steps of one process with one micro-batch, which Lightning runs itself.

What remains is that they draw the random numbers that several stages would, and that observers see them.
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
    """A step, and the backwards from what it has computed.

    Args:
        draws: of the device.
        seed: from which the random numbers of the step derive.
        actions: of the step, by its schedule.
        observe: gets every action with its start and end, where somebody looks at them.
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
        """While the user's step runs."""
        with self._told(is_forward=True), self._draws.kept(), self._counted.running():
            yield

    @contextmanager
    def going_back(self) -> Iterator[None]:
        """While a backward runs, in which hooks may draw."""
        with self._told(is_forward=False), self._draws.kept():
            self._draws.seed(self._seed, self._counted.number)
            yield

    @contextmanager
    def _told(self, *, is_forward: bool) -> Iterator[None]:
        if self._observe is None:  # and nobody looks at the clock, which tests of the user's may count
            yield
            return
        began = time.perf_counter()
        yield
        now = time.perf_counter()
        for action in self._actions:  # the first of several virtual stages has taken all the time
            if (action.kind is Kind.F) is is_forward:
                self._observe((action, began, now))
                began = now
