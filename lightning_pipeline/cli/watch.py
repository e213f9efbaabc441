"""`lightning-pipeline watch`: a run's stages in the terminal, from what it writes as it goes."""

from __future__ import annotations

import time
from collections import defaultdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from lightning_pipeline.cli.common import CommandError, bare_table, errors_without_traceback, wide_console
from lightning_pipeline.cli.report import file_of
from lightning_pipeline.schedules import ScheduleError
from lightning_pipeline.schedules.live import SUFFIX, LiveRank, read_live
from lightning_pipeline.schedules.records import RecordedStep, Records, read_last
from lightning_pipeline.schedules.timeline import extent, idle_share, slowest_stage
from lightning_pipeline.schedules.waits import Cause, Wait, shares, waits

if TYPE_CHECKING:
    from rich.console import Group
    from rich.table import Table

_WIDTH = 30  # of the bar
SILENT_S = 5.0


def watch(
    run: Annotated[
        Path, typer.Argument(metavar="RUN", help="A folder of PipelineTimeline's files, which may be a shared one.")
    ],
    every: Annotated[float, typer.Option(min=0.1, help="Seconds between looks.")] = 1.0,
    once: Annotated[bool, typer.Option("--once", help="Look once and end.")] = False,
) -> None:
    """Show the stages of a run: busy, waiting for whom, live micro-batches, memory, and the time of a step.

    It shows what each rank is at, which is written twice a second, and the last recorded step, of which there is one as
    often as PipelineTimeline(every_n_steps=...) says.
    """
    from rich.live import Live

    with errors_without_traceback():
        console, news = wide_console(), News()
        if once:
            console.print(_view(run, news))
            return
        with Live(console=console, auto_refresh=False) as live:
            while True:
                try:
                    live.update(_view(run, news), refresh=True)
                except ScheduleError as error:  # nothing is recorded yet
                    live.update(str(error), refresh=True)
                try:
                    time.sleep(every)
                except KeyboardInterrupt:
                    return


class News:
    """How long ago each rank was heard of.

    Clocks of machines that share a folder differ. So only the first look trusts the time of a file; then a rank is
    heard of when that time changes.
    """

    def __init__(self) -> None:
        self._heard: dict[int, tuple[float, float]] = {}  # by rank: the file's time, and when it was first seen here

    def age(self, rank: int, written: float) -> float:
        """Seconds since a rank was heard of, whose file says that it was `written` then."""
        now = time.monotonic()
        if rank not in self._heard:
            self._heard[rank] = written, now - max(0.0, time.time() - written)
        elif self._heard[rank][0] != written:
            self._heard[rank] = written, now
        return now - self._heard[rank][1]


def _view(run: Path, news: News) -> Group:
    """What the ranks are at, if the run goes on, above its last recorded step, if there is one."""
    from rich.console import Group

    folders = [path for path in run.rglob(f"*{SUFFIX}") if path.is_dir()] if run.is_dir() else []
    ranks = read_live(max(folders, key=lambda path: path.stat().st_mtime)) if folders else []
    try:
        recorded: Table | str = _table(read_last(file_of(run)))
    except (CommandError, ScheduleError) as error:  # nothing is recorded yet
        if not ranks:
            raise
        recorded = str(error)
    return Group(_live_table(ranks, news), "", recorded) if ranks else Group(recorded)


def _live_table(ranks: list[tuple[LiveRank, float]], news: News) -> Table:
    """A rank that has written nothing for some seconds hangs, was killed, or its machine is not there."""
    table = bare_table("rank", "stages", "now", right=("actions", "live", "memory", "step", "the one before", "seen"))
    for rank, written in ranks:
        age = news.age(rank.rank, written)
        table.add_row(
            str(rank.rank),
            " ".join(map(str, rank.stages)),
            f"[yellow]{rank.now}[/]" if rank.is_waiting else rank.now,
            f"{rank.done} of {rank.actions}",
            str(rank.live),
            f"{rank.memory / 2**20:.0f} MiB",
            str(rank.step),
            f"{rank.seconds * 1e3:.4g} ms" if rank.seconds else "",
            f"{age:.0f} s ago" if age < SILENT_S else f"[red]{age:.0f} s ago[/]",
        )
    return table


def _table(records: Records) -> Table:
    number, ended, pipelines = records.steps[-1]
    rows = [rank.actions for pipeline in pipelines for rank in pipeline]
    begin, end = extent(rows)
    ago = max(0.0, time.time() - ended)
    table = bare_table("rank", "stages", "busy", "waits most for", right=("", "live", "memory"))
    table.title = (
        f"{records.run.get('module', '')}, step {number}, {ago:.0f} s ago: {(end - begin) * 1e3:.4g} ms, bubble "
        f"{idle_share(rows):.1%}, slowest stage {slowest_stage(rows)}"
    )
    table.title_justify = "left"
    for pipeline in pipelines:
        reductions = [rank.reductions for rank in pipeline]
        found = waits([rank.actions for rank in pipeline], reductions if any(reductions) else ())
        for rank, own in zip(pipeline, found, strict=True):
            table.add_row(*_cells(rank, own, end - begin))
    return table


def _cells(rank: RecordedStep, own: list[Wait], duration: float) -> tuple[str, ...]:
    idle = shares(own, duration)
    busy = 1 - sum(idle.values())
    stages = sorted({action.stage for action, _, _ in rank.actions})
    bar = "█" * round(busy * _WIDTH)
    return (
        str(rank.rank),
        " ".join(map(str, stages)),
        bar + "·" * (_WIDTH - len(bar)),
        _most(own, idle),
        f"{busy:.0%}",
        str(rank.peak_live),
        f"{rank.memory / 2**20:.0f} MiB",
    )


def _most(own: list[Wait], idle: dict[str, float]) -> str:
    """The greatest cause, and of a peer the stage."""
    cause = max(idle, key=idle.__getitem__)
    if idle[cause] < 0.005:
        return "nothing"
    by_stage: dict[int, float] = defaultdict(float)
    for wait in own:
        if wait.cause is Cause.PEER and wait.on is not None:
            by_stage[wait.on.stage] += wait.end - wait.start
    name = f"stage {max(by_stage, key=by_stage.__getitem__)}" if cause == Cause.PEER and by_stage else cause
    return f"{name}, {idle[cause]:.0%}"
