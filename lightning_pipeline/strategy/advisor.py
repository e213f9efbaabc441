"""The fastest schedule by measurement: the first steps are recorded, and every schedule that fits is simulated."""

from __future__ import annotations

import operator
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from lightning_pipeline.engine.executor import Span
from lightning_pipeline.engine.pipeline import Pipeline
from lightning_pipeline.engine.recorded_times import gather_spans
from lightning_pipeline.runtime.transport import Transport
from lightning_pipeline.schedules import (
    Costs,
    Kind,
    Schedule,
    ScheduleError,
    extent,
    measured_costs,
    optimize,
    save_csv,
    simulate,
)
from lightning_pipeline.schedules.optimizing import OPTIMIZED
from lightning_pipeline.schedules.recorded_costs import equal_costs

from .._lightning import rank_zero_info
from .schedule_choice import AUTO, TRAINING_SCHEDULES, ScheduleChoice, Schedules

Observer = Callable[[Span], None]
"""Gets an action with its start and end, in seconds."""

RECORDED = 4
"""Steps to record with whole backwards, and as many with split ones."""
SKIPPED = 1
"""Steps before them that are not recorded: the first ones with a schedule are slower."""
TIE = 0.01
"""Of schedules within this share of the fastest, the one that holds the fewest activations is chosen."""


@dataclass(frozen=True)
class Advice:
    """What was chosen, and what is expected of it.

    Attributes:
        schedule: the schedule's name.
        step_seconds: expected time from one training step to the next.
        bubble: expected idle share of all ranks' time within the schedule.
        considered: expected seconds of a step under each schedule that fits.
        order: the schedule itself, which :func:`save_csv` writes.
    """

    schedule: str
    step_seconds: float
    bubble: float
    considered: dict[str, float]
    order: Schedule | None = None

    def __str__(self) -> str:
        others = ", ".join(f"{name} {seconds * 1e3:.1f}" for name, seconds in self.considered.items())
        return (
            f'schedule="{OPTIMIZED if self.schedule == OPTIMIZED else AUTO}" chose {self.schedule!r}: expects '
            f"{self.step_seconds * 1e3:.1f} ms a step and a bubble of {self.bubble:.1%} (ms a step: {others})"
        )


class Advisor:
    """Chooses among the schedules that fit the placement of the stages, the micro-batches and the memory.

    Stages stay on their ranks, as their weights and optimizer states lie there. So of schedules with several virtual
    stages on a rank only those in a loop are considered, or those in a V if `ranks` puts the stages in one.

    Args:
        num_stages: device groups, with `num_virtual_stages` each.
        ranks: of the stages that are to be on certain ones.
        max_live_microbatches: the most micro-batches whose activations a rank may hold; None for no bound.
        offload: the share of activations that goes to host memory while they wait, and counts no more.
        optimizes: search for an order besides (see `optimize`), and use that.
        csv: where to write the order that was found; None: nowhere.

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
        ranks: Mapping[int, int] | None = None,
        offload: float = 0,
        optimizes: bool = False,
        csv: Path | None = None,
    ) -> None:
        self.advice: Advice | None = None
        self._optimizes = optimizes
        self._most_live = max_live_microbatches
        self._csv = csv
        self._offload = offload
        self._peaks: dict[str, float] = {}
        self._candidates: dict[str, Schedules] = {}
        sizes = {
            "num_stages": num_stages,
            "num_virtual_stages": num_virtual_stages,
            "num_microbatches": num_microbatches,
        }
        placement: Sequence[int] = ()
        refused: ScheduleError | None = None
        for name in TRAINING_SCHEDULES:  # those in a loop come first
            try:
                schedules = ScheduleChoice(name).bind(**sizes, ranks=ranks)
            except ScheduleError as error:
                refused = refused or error
                continue
            placement = placement or schedules.placement
            # With one virtual stage "looped_bfs" equals "gpipe", and "interleaved_..." the plain schedule.
            known = any(schedules.full == other.full for other in self._candidates.values())
            if not known and schedules.placement == placement:
                self._candidates[name] = schedules
                self._peaks[name] = max(simulate(schedules.full, offload=offload).peak_live) / num_virtual_stages
        if refused is not None and not self._candidates:
            raise refused
        if max_live_microbatches is not None:
            least = min(self._peaks, key=self._peaks.__getitem__)
            if self._peaks[least] > max_live_microbatches and not optimizes:
                raise ValueError(
                    f"max_live_microbatches={max_live_microbatches} is less than any schedule holds; {least!r} holds "
                    f"{self._peaks[least]:g}: raise it, or use more stages or smaller micro-batches"
                )
            self._candidates = {n: s for n, s in self._candidates.items() if self._peaks[n] <= max_live_microbatches}
        if not self._candidates:
            # Nothing that has a name holds as few: costs are measured with an order for equal ones.
            self._take(
                optimize(
                    equal_costs(len(placement)), placement, num_microbatches, max_live_microbatches=self._most_live
                ).schedule
            )
        self._probes = [name for splits in (False, True) if (name := self._leanest(splits=splits))]
        self._started = 0.0
        self._done = 0
        self._steps: list[list[Span]] = []
        self._intervals: list[float] = []
        self._recording = False

    def _take(self, schedule: Schedule) -> None:
        """Make a candidate of an order that was found."""
        num_ranks = schedule.num_ranks
        virtual = schedule.num_stages // num_ranks
        self._candidates[OPTIMIZED] = Schedules(schedule, "", num_ranks, virtual)
        self._peaks[OPTIMIZED] = max(simulate(schedule, offload=self._offload).peak_live) / virtual

    @property
    def first(self) -> Schedules:
        """The schedules of the first steps."""
        return self._candidates[self._probes[0]]

    @contextmanager
    def watching(self, pipeline: Pipeline, transport: Transport | None) -> Iterator[None]:
        """Around a training step: record it, or choose once enough steps are recorded. All ranks must call it."""
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
        usual = is_usual(spans, pipeline)  # a small batch or a new structure is recorded again
        self._done += usual
        self._recording = usual and turn >= SKIPPED
        if self._recording:
            self._steps.append(spans)
            self._intervals.append(0.0)

    def _choose(self, pipeline: Pipeline, transport: Transport | None) -> None:
        timelines = [gather_spans(spans, transport) for spans in self._steps]
        # What a step takes outside of its schedule is the same under all of them, so it is measured and added.
        inside = [end - begin for begin, end in map(extent, timelines)]
        around = statistics.median(map(operator.sub, self._intervals, inside))
        if transport is not None:
            around = transport.broadcast_object(around, 0, "time outside of the schedule")
        costs = measured_costs(timelines, pipeline.placement)
        if self._optimizes:
            self._take(self._found(costs, transport))
        simulated = {name: costs.simulate(schedules.full) for name, schedules in self._candidates.items()}
        considered = {name: simulation.makespan + around for name, simulation in simulated.items()}
        fastest = min(considered.values())
        close = [name for name, seconds in considered.items() if seconds <= fastest * (1 + TIE)]
        chosen = min(close, key=lambda name: (self._peaks[name], considered[name]))
        chosen = OPTIMIZED if self._optimizes else chosen
        order = self._candidates[chosen].full
        pipeline.use(self._candidates[chosen])
        self.advice = Advice(chosen, considered[chosen], simulated[chosen].bubble, considered, order)
        rank_zero_info(str(self.advice))
        if self._optimizes and self._csv is not None:
            self._csv.parent.mkdir(parents=True, exist_ok=True)
            save_csv(order, self._csv)
            rank_zero_info(f"schedule={str(self._csv)!r} runs this order again, without a search")

    def _found(self, costs: Costs, transport: Transport | None) -> Schedule:
        """The order that the first rank finds."""
        full = self.first.full
        if transport is not None and transport.stage > 0:
            return transport.recv_object(0, "the order that was found")
        found = optimize(costs, full.placement, full.num_microbatches, max_live_microbatches=self._most_live).schedule
        return found if transport is None else transport.broadcast_object(found, 0, "the order that was found")

    def _leanest(self, *, splits: bool) -> str:
        """Of the schedules with split backwards, or with whole ones, the one that holds the fewest activations."""
        found = [name for name, schedules in self._candidates.items() if _splits(schedules.full) is splits]
        return min(found, key=lambda name: self._peaks[name], default="")


@contextmanager
def observed(pipeline: Pipeline, *observers: Observer) -> Iterator[None]:
    """While entered, `observers` get every action, as well as whoever gets them already."""
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
    """Whether the spans are of a full batch of known structure: others tell little about times."""
    num_forwards = sum(action.kind is Kind.F for action, _, _ in spans)
    return num_forwards == pipeline.num_microbatches * pipeline.num_virtual_stages and not pipeline.learning


def _splits(schedule: Schedule) -> bool:
    return any(action.kind is Kind.I for order in schedule for action in order)
