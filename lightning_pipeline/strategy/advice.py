"""schedule="auto": the first steps are measured, and the schedule that would be fastest is chosen by simulation."""

from __future__ import annotations

import operator
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from lightning_pipeline.runtime.executor import Span
from lightning_pipeline.runtime.pipeline import Pipeline
from lightning_pipeline.runtime.recording import gather_spans
from lightning_pipeline.runtime.transport import Transport
from lightning_pipeline.schedules import Kind, Schedule, ScheduleError, extent, measured_costs, simulate
from lightning_pipeline.schedules.schedule import loop_placement

from .._lightning import rank_zero_info
from .schedule_choice import TRAINING_SCHEDULES, ScheduleChoice, Schedules

Observer = Callable[[Span], None]
"""Gets an action with its start and end, in seconds."""

RECORDED = 4
"""Steps that are recorded with whole backwards, and as many with split ones."""
SKIPPED = 1
"""Steps before them that are not: the first ones with a schedule are slower."""
TIE = 0.01
"""Of schedules that come this close to the fastest, the one that holds the fewest activations is taken."""


@dataclass(frozen=True)
class Advice:
    """What was chosen, and what is expected of it.

    Attributes:
        schedule: the schedule's name.
        step_seconds: expected time from one training step to the next.
        bubble: expected idle share of all ranks' time within the schedule.
        considered: expected seconds of a step under each schedule that fits.
    """

    schedule: str
    step_seconds: float
    bubble: float
    considered: dict[str, float]

    def __str__(self) -> str:
        others = ", ".join(f"{name} {seconds * 1e3:.1f}" for name, seconds in self.considered.items())
        return (
            f'schedule="auto" chose {self.schedule!r}: expects {self.step_seconds * 1e3:.1f} ms a step and a bubble of '
            f"{self.bubble:.1%} (ms a step: {others})"
        )


class Advisor:
    """Chooses among the schedules that fit the placement of the stages, the micro-batches and the memory.

    The module's stages stay where they are, so all virtual stages are in a loop, and "zbv" is not among them.

    Args:
        num_stages: device groups, with `num_virtual_stages` each.
        max_live_microbatches: the most micro-batches whose activations a rank may hold; None for no bound.

    Raises:
        ValueError: no schedule holds as few.
    """

    def __init__(
        self,
        *,
        num_stages: int,
        num_virtual_stages: int,
        num_microbatches: int,
        max_live_microbatches: float | None,
    ) -> None:
        self.advice: Advice | None = None
        self._peaks: dict[str, float] = {}
        self._candidates: dict[str, Schedules] = {}
        sizes = {
            "num_stages": num_stages,
            "num_virtual_stages": num_virtual_stages,
            "num_microbatches": num_microbatches,
        }
        for name in TRAINING_SCHEDULES:
            try:
                schedules = ScheduleChoice(name).bind(**sizes)
            except ScheduleError:
                continue
            # "looped_bfs" is "gpipe" by another name, and "interleaved_..." with one virtual stage is as without.
            known = any(schedules.full == other.full for other in self._candidates.values())
            if not known and tuple(schedules.placement) == loop_placement(num_stages, num_virtual_stages):
                self._candidates[name] = schedules
                self._peaks[name] = max(simulate(schedules.full).peak_live) / num_virtual_stages
        if max_live_microbatches is not None:
            least = min(self._peaks, key=self._peaks.__getitem__)
            if self._peaks[least] > max_live_microbatches:
                raise ValueError(
                    f"max_live_microbatches={max_live_microbatches} is less than any schedule holds; {least!r} holds "
                    f"{self._peaks[least]:g}: raise it, or use more stages or smaller micro-batches"
                )
            self._candidates = {n: s for n, s in self._candidates.items() if self._peaks[n] <= max_live_microbatches}
        self._probes = [name for splits in (False, True) if (name := self._leanest(splits=splits))]
        self._started = 0.0
        self._done = 0
        self._steps: list[list[Span]] = []
        self._intervals: list[float] = []
        self._recording = False

    @property
    def first(self) -> Schedules:
        """The schedules of the first steps."""
        return self._candidates[self._probes[0]]

    @contextmanager
    def watching(self, pipeline: Pipeline, transport: Transport | None) -> Iterator[None]:
        """Around a training step: record it, and after the last one that is needed choose. All ranks must call it."""
        if self.advice is not None:
            yield
            return
        now = time.perf_counter()
        if self._recording:
            self._intervals[-1] = now - self._started
        self._started = now
        if self._done == len(self._probes) * (SKIPPED + RECORDED):
            self._choose(pipeline, transport)
            yield
            return
        probe, turn = divmod(self._done, SKIPPED + RECORDED)
        pipeline.use(self._candidates[self._probes[probe]])
        spans: list[Span] = []
        with observed(pipeline, spans.append):
            yield
        usual = is_usual(spans, pipeline)
        self._done += usual
        self._recording = usual and turn >= SKIPPED
        if self._recording:
            self._steps.append(spans)
            self._intervals.append(0.0)

    def _choose(self, pipeline: Pipeline, transport: Transport | None) -> None:
        timelines = [gather_spans(spans, transport) for spans in self._steps]
        inside = [end - begin for begin, end in map(extent, timelines)]
        around = statistics.median(map(operator.sub, self._intervals, inside))
        if transport is not None:
            around = transport.broadcast_object(around, 0, "time outside of the schedule")
        costs = measured_costs(timelines, pipeline.placement)
        simulated = {name: costs.simulate(schedules.full) for name, schedules in self._candidates.items()}
        considered = {name: simulation.makespan + around for name, simulation in simulated.items()}
        fastest = min(considered.values())
        close = [name for name, seconds in considered.items() if seconds <= fastest * (1 + TIE)]
        chosen = min(close, key=lambda name: (self._peaks[name], considered[name]))
        pipeline.use(self._candidates[chosen])
        self.advice = Advice(chosen, considered[chosen], simulated[chosen].bubble, considered)
        rank_zero_info(str(self.advice))

    def _leanest(self, *, splits: bool) -> str:
        """The schedule that holds the fewest activations of those with split backwards, or with whole ones."""
        found = [name for name, schedules in self._candidates.items() if _splits(schedules.full) is splits]
        return min(found, key=lambda name: self._peaks[name], default="")


@contextmanager
def observed(pipeline: Pipeline, *observers: Observer) -> Iterator[None]:
    """While entered, `observers` get every action, beside whoever gets them already."""
    before = pipeline.observe
    everybody = (*observers, before) if before is not None else observers

    def observe(span: Span) -> None:
        for observer in everybody:
            observer(span)

    pipeline.observe = observe if everybody else None
    try:
        yield
    finally:
        pipeline.observe = before


def is_usual(spans: Sequence[Span], pipeline: Pipeline) -> bool:
    """Whether these are of a full batch, and of a known structure: of others there is little to learn about times."""
    num_forwards = sum(action.kind is Kind.F for action, _, _ in spans)
    return num_forwards == pipeline.num_microbatches * pipeline.num_virtual_stages and not pipeline.learning


def _splits(schedule: Schedule) -> bool:
    return any(action.kind is Kind.I for order in schedule for action in order)
