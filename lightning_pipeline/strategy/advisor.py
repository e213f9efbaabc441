"""The fastest schedule by measurement: the first steps are recorded, and every schedule that fits is simulated."""

from __future__ import annotations

import operator
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

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
from lightning_pipeline.schedules.optimizing import OPTIMIZED, held_of_one, one_at_a_time
from lightning_pipeline.schedules.recorded_costs import equal_costs
from lightning_pipeline.schedules.simulation import peak_bytes

from .._lightning import rank_zero_info
from .schedule_choice import AUTO, TRAINING_SCHEDULES, ScheduleChoice, Schedules
from .tensor_parallel import TensorGroup

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
        max_live_bytes: the most bytes of them; None for no bound. What stages keep is measured first.
        offload: the share of activations that goes to host memory while they wait, and counts no more.
        optimizes: search for an order besides (see `optimize`), and use that.
        csv: where to write the order that was found; None: nowhere.

    Attributes:
        kept: the bytes that each virtual stage saves of a micro-batch, where they are bounded; 0 before they are known.

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
        max_live_bytes: int | None = None,
        ranks: Mapping[int, int] | None = None,
        offload: float = 0,
        optimizes: bool = False,
        csv: Path | None = None,
    ) -> None:
        self.advice: Advice | None = None
        self._optimizes = optimizes
        self._most_live, self._most_bytes = max_live_microbatches, max_live_bytes
        self.kept = [0.0] * (num_stages * num_virtual_stages)
        self._knows_kept = max_live_bytes is None
        self._counted = 0
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
        least = min(self._peaks, key=self._peaks.__getitem__)
        if max_live_microbatches is not None and self._peaks[least] > max_live_microbatches and not optimizes:
            raise ValueError(
                f"max_live_microbatches={max_live_microbatches} is less than any schedule holds; {least!r} holds "
                f"{self._peaks[least]:g}: raise it, or use more stages or smaller micro-batches"
            )
        self._placement, self._num_microbatches = placement, num_microbatches
        self.first = Schedules(one_at_a_time(placement, num_microbatches))
        """The schedules of the first steps."""
        if self._knows_kept:
            self._keep_bounds()
        self._started = 0.0
        self._done = 0
        self._steps: list[list[Span]] = []
        self._intervals: list[float] = []
        self._recording = False

    def _take(self, schedule: Schedule) -> None:
        """Make a candidate of an order that was found."""
        self._candidates[OPTIMIZED] = Schedules(schedule)
        virtual = schedule.num_stages // schedule.num_ranks
        self._peaks[OPTIMIZED] = max(simulate(schedule, offload=self._offload).peak_live) / virtual

    def _keep_bounds(self) -> None:
        """Leave the candidates that keep the bounds, or make one that does, and choose those that are recorded."""
        self._candidates = {name: schedules for name, schedules in self._candidates.items() if self._fits(name)}
        if not self._candidates:
            # Nothing that has a name holds as few: costs are measured with an order for equal ones.
            self._take(self._searched(equal_costs(len(self._placement))))
        self._probes = [name for splits in (False, True) if (name := self._leanest(splits=splits))]
        self.first = self._candidates[self._probes[0]]

    def _fits(self, name: str) -> bool:
        if self._most_live is not None and self._peaks[name] > self._most_live:
            return False
        return self._most_bytes is None or max(peak_bytes(self._candidates[name].full, self.kept)) <= self._most_bytes

    def _searched(self, costs: Costs) -> Schedule:
        return optimize(
            costs,
            self._placement,
            self._num_microbatches,
            max_live_microbatches=self._most_live,
            kept_bytes=self.kept,
            max_bytes=self._most_bytes,
        ).schedule

    @contextmanager
    def watching(
        self, pipeline: Pipeline, transport: Transport | None, neighbours: TensorGroup | None = None
    ) -> Iterator[None]:
        """Around a training step: record it, or choose once enough steps are recorded. All ranks must call it.

        Args:
            neighbours: the ranks that share this one's stage of a replica. They run collectives within stages, so they
                need the same order of actions.
        """
        if self.advice is not None:
            yield
            return
        if not self._knows_kept:
            spans: list[Span] = []
            with observed(pipeline, spans.append):
                yield
            self._note_kept(spans, pipeline, transport, neighbours)
            return
        if pipeline.offload is not None:
            pipeline.offload.may_measure = pipeline.observe is not None  # by others: it takes time
        now = time.perf_counter()
        if self._recording:
            self._intervals[-1] = now - self._started
        self._started = now
        if self._done == len(self._probes) * (SKIPPED + RECORDED):
            self._choose(pipeline, transport, neighbours)
            yield
            return
        probe, turn = divmod(self._done, SKIPPED + RECORDED)
        pipeline.use(self._candidates[self._probes[probe]])
        spans = []
        with observed(pipeline, spans.append):
            yield
        usual = is_usual(spans, pipeline)  # a small batch or a new structure is recorded again
        self._done += usual
        self._recording = usual and turn >= SKIPPED
        if self._recording:
            self._steps.append(spans)
            self._intervals.append(0.0)

    def _note_kept(
        self, spans: Sequence[Span], pipeline: Pipeline, transport: Transport | None, neighbours: TensorGroup | None
    ) -> None:
        """Note what the stages have saved in a step, and go on to measure times once all is known."""
        assert pipeline.offload is not None
        for stage, size in pipeline.offload.kept.items():
            self.kept[stage] = max(self.kept[stage], size)
        if not is_usual(spans, pipeline):
            return
        # What runs event by event holds one micro-batch. It may be so in all steps, or only until reads are expected.
        self._counted += 1
        if any(program is None for program, _ in pipeline.ran) and self._counted < RECORDED:
            return
        if transport is not None:
            own = torch.tensor(self.kept, dtype=torch.float64)
            self.kept = transport.all_gather_vector(own, "the bytes that stages save").amax(0).tolist()
        if neighbours is not None:
            self.kept = neighbours.same(self.kept)
        assert self._most_bytes is not None
        held = held_of_one(self._placement, self.kept)
        least = max(held)
        if least > self._most_bytes:
            raise ValueError(
                f"max_live_bytes={self._most_bytes} is less than rank {held.index(least)} of the pipeline saves of one "
                f"micro-batch, {least:.0f} bytes in the first steps: give {least:.0f} or more, or raise "
                f"num_microbatches={self._num_microbatches} or num_stages, so that a rank saves less of each"
            )
        self._knows_kept = True
        self._keep_bounds()

    def _choose(self, pipeline: Pipeline, transport: Transport | None, neighbours: TensorGroup | None) -> None:
        if pipeline.offload is not None:
            pipeline.offload.may_measure = True
        timelines = [gather_spans(spans, transport) for spans in self._steps]
        # What a step takes outside of its schedule is the same under all of them, so it is measured and added.
        inside = [end - begin for begin, end in map(extent, timelines)]
        around = statistics.median(map(operator.sub, self._intervals, inside))
        if transport is not None:
            around = transport.broadcast_object(around, 0, "time outside of the schedule")
        costs = measured_costs(timelines, pipeline.placement)
        if neighbours is not None:
            around, costs = neighbours.same((around, costs))
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
        if transport is not None and transport.stage > 0:
            return transport.recv_object(0, "the order that was found")
        found = self._searched(costs)
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
