"""The schedule that `schedule=` asks for: by name, file or function, or the fastest one by measurement."""

from __future__ import annotations

import inspect
import operator
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any

from lightning_pipeline.engine.executor import Span
from lightning_pipeline.engine.pipeline import Pipeline
from lightning_pipeline.engine.recorded_times import gather_spans
from lightning_pipeline.runtime.transport import Transport
from lightning_pipeline.schedules import (
    SCHEDULE_NAMES,
    Costs,
    Kind,
    Schedule,
    ScheduleError,
    as_schedule,
    build,
    build_for_batch,
    check,
    default_virtual_stages,
    extent,
    fuse,
    load_csv,
    measured_costs,
    optimize,
    save_csv,
    simulate,
)
from lightning_pipeline.schedules.builders import V_NAMES
from lightning_pipeline.schedules.optimizing import OPTIMIZED
from lightning_pipeline.schedules.recorded_costs import equal_costs
from lightning_pipeline.schedules.schedule import loop_placement
from lightning_pipeline.schedules.validation import require_counts

from .._lightning import rank_zero_info

AUTO = "auto"
TRAINING_SCHEDULES = tuple(name for name in SCHEDULE_NAMES if name != "forward")

ScheduleArgument = str | PathLike[str] | Schedule | Callable[..., Any]


class ScheduleChoice:
    """The schedule of training steps, as far as it is known before the module is cut.

    Args:
        schedule: a name, "auto", "optimized", the path of a ``.csv`` file, a :class:`Schedule`, or a function
            ``(num_stages, num_microbatches) -> schedule`` that may also take ``num_virtual_stages`` and returns a
            :class:`Schedule` or, for each rank, a list such as ``["0F0", "0B0"]``.

    Raises:
        ValueError: the argument is none of these.
        FileNotFoundError: the file does not exist.
    """

    def __init__(self, schedule: ScheduleArgument) -> None:
        self.name = ""
        self.fixed: Schedule | None = None
        self.function: Callable[..., Any] | None = None
        if isinstance(schedule, Schedule):
            self.fixed = schedule.compute()
        elif isinstance(schedule, (str, PathLike)) and str(schedule).endswith(".csv"):
            if not Path(schedule).is_file():
                raise FileNotFoundError(f"schedule={str(schedule)!r} is not a file; save one with schedules.save_csv")
            self.fixed = load_csv(schedule)
        elif callable(schedule):
            self.function = schedule
        elif schedule in (AUTO, OPTIMIZED) or schedule in TRAINING_SCHEDULES:
            self.name = str(schedule)
        else:
            raise ValueError(
                f"schedule is one of {', '.join(map(repr, (*TRAINING_SCHEDULES, AUTO, OPTIMIZED)))}, the path of a "
                f".csv file, a Schedule or a function (num_stages, num_microbatches) -> schedule; got {schedule!r}"
            )
        self.label = self.name or (self.fixed.name if self.fixed else getattr(schedule, "__name__", repr(schedule)))

    @property
    def is_auto(self) -> bool:
        """Whether the first steps are to decide."""
        return self.name in (AUTO, OPTIMIZED)

    @property
    def optimizes(self) -> bool:
        """Whether they are to be followed by a search for an order of its own."""
        return self.name == OPTIMIZED

    @property
    def has_virtual_stages(self) -> bool:
        """Whether a rank may hold several virtual stages, so that stage_config may number more stages than ranks."""
        if self.fixed is not None:
            return self.fixed.num_stages > self.fixed.num_ranks
        return self.function is not None or self.is_auto or default_virtual_stages(self.name) > 1

    @property
    def usual_virtual_stages(self) -> int:
        """Virtual stages per rank where stage_config does not tell."""
        if self.fixed is not None:
            return self.fixed.num_stages // self.fixed.num_ranks
        return 1 if self.function is not None or self.is_auto else default_virtual_stages(self.name)

    @property
    def num_microbatches(self) -> int | None:
        """The number that a file or a `Schedule` is made for; None if any goes."""
        return self.fixed.num_microbatches if self.fixed is not None else None

    def bind(self, *, num_stages: int, num_virtual_stages: int, num_microbatches: int) -> Schedules:
        """The schedules for `num_stages` ranks with `num_virtual_stages` each.

        Raises:
            ScheduleError: the schedule is unsound, or not one for these counts.
        """
        full = self._full(num_stages, num_virtual_stages, num_microbatches)
        if self.name:
            check(full)
            return Schedules(fuse(full), full.name, num_stages, num_virtual_stages)
        _require(full, self.label, num_stages, num_virtual_stages, num_microbatches)
        check(full)
        return Schedules(full, "", num_stages, num_virtual_stages)

    def _full(self, num_stages: int, num_virtual_stages: int, num_microbatches: int) -> Schedule:
        if self.fixed is not None:
            return self.fixed
        if self.function is not None:
            return self._called(self.function, num_stages, num_virtual_stages, num_microbatches)
        if self.name in V_NAMES and num_virtual_stages != 2 and num_stages > 1:
            raise ScheduleError(
                f"{self.name} lays 2 virtual stages on each device, so {num_stages} devices take {2 * num_stages}, and "
                f"stage_config makes {num_stages * num_virtual_stages}; cut the model into {2 * num_stages}, or choose "
                f"interleaved_zero_bubble"
            )
        require_counts(num_stages, num_microbatches, num_virtual_stages)  # larger ones can be simulated, not run
        # On one device nothing is cut, and every schedule is the same.
        name = self.name if num_stages > 1 else "1f1b"
        return build(name, num_stages, num_microbatches, num_virtual_stages)

    def _called(
        self, function: Callable[..., Any], num_stages: int, num_virtual_stages: int, num_microbatches: int
    ) -> Schedule:
        """The schedule that the user's function gives."""
        parameters = inspect.signature(function)
        takes_virtual = "num_virtual_stages" in parameters.parameters
        keywords = {"num_virtual_stages": num_virtual_stages} if takes_virtual else {}
        try:
            parameters.bind(num_stages, num_microbatches, **keywords)
        except TypeError as error:
            raise ValueError(
                f"the schedule {self.label!r} cannot be called as (num_stages, num_microbatches): {error}; give its "
                f"other parameters defaults, or bind them with functools.partial"
            ) from None
        made = function(num_stages, num_microbatches, **keywords)
        return as_schedule(made, name=self.label, num_microbatches=num_microbatches).compute()


class Schedules:
    """The schedule of a step for each number of micro-batches, all on one placement."""

    def __init__(self, full: Schedule, name: str, num_stages: int, num_virtual_stages: int) -> None:
        self.full = full
        self.placement: Sequence[int] = full.placement
        self._name = name
        self._num_stages = num_stages
        self._num_virtual_stages = num_virtual_stages

    def __call__(self, num_microbatches: int) -> Schedule:
        """The schedule for `num_microbatches`, of which a small last batch makes fewer than usual."""
        if self._name:
            return fuse(build_for_batch(self._name, self._num_stages, num_microbatches, self._num_virtual_stages))
        return self.full.take(num_microbatches)


def _require(schedule: Schedule, label: str, num_stages: int, num_virtual_stages: int, num_microbatches: int) -> None:
    """Check that a schedule of the user's fits the counts and the engine."""
    found = (schedule.num_ranks, schedule.num_stages, schedule.num_microbatches)
    wanted = (num_stages, num_stages * num_virtual_stages, num_microbatches)
    if found != wanted:
        raise ScheduleError(
            f"schedule {label!r} is for {found[0]} ranks, {found[1]} virtual stages and {found[2]} micro-batches, and "
            f"num_stages={wanted[0]}, {wanted[1]} virtual stages in stage_config and num_microbatches={wanted[2]} ask "
            f"for another; change either"
        )
    if schedule.placement[0] != 0:
        raise ScheduleError(
            f"schedule {label!r} has stage 0 on rank {schedule.placement[0]}; it has to be on rank 0, which reads the "
            f"data: reorder the rows"
        )
    if not schedule.has_backward:
        raise ScheduleError(f"schedule {label!r} has forwards only; training needs B, or I and W, of every micro-batch")
    for rank, order in enumerate(schedule.orders):
        latest: dict[int, int] = {}
        for position, action in enumerate(order):
            if action.kind is Kind.F and action.microbatch < latest.get(action.stage, 0):
                raise schedule.error(
                    f"rank {rank} runs {action} after micro-batch {latest[action.stage]}; forwards of a stage ascend",
                    {(rank, position)},
                )
            if action.kind is Kind.F:
                latest[action.stage] = action.microbatch


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

    Stages stay on their ranks, so only schedules with a looped placement are considered, which leaves out those in a V.

    Args:
        num_stages: device groups, with `num_virtual_stages` each.
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
        for name in TRAINING_SCHEDULES:
            try:
                schedules = ScheduleChoice(name).bind(**sizes)
            except ScheduleError:
                continue
            # With one virtual stage "looped_bfs" equals "gpipe", and "interleaved_..." the plain schedule.
            known = any(schedules.full == other.full for other in self._candidates.values())
            if not known and tuple(schedules.placement) == loop_placement(num_stages, num_virtual_stages):
                self._candidates[name] = schedules
                self._peaks[name] = max(simulate(schedules.full, offload=offload).peak_live) / num_virtual_stages
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
            placement = loop_placement(num_stages, num_virtual_stages)
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
