"""`lightning-pipeline simulate`: several schedules side by side."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Annotated

import typer

from lightning_pipeline.cli.common import (
    NAMES_HELP,
    Forward,
    InputGrad,
    Microbatches,
    Ranks,
    Transfer,
    VirtualStages,
    WeightGrad,
    bare_table,
    told_to_the_user,
    wide_console,
)
from lightning_pipeline.cli.schedule_args import CostOptions, all_that_fit, choose_for_comparison, virtual_stages_of
from lightning_pipeline.schedules import Schedule


@dataclass(frozen=True)
class Row:
    """One schedule's figures; ``peak_microbatches`` is ``peak_live`` counted in all of a rank's virtual stages."""

    schedule: str
    num_ranks: int
    num_microbatches: int
    num_virtual_stages: float
    makespan: float
    bubble: float
    peak_live: list[int]
    peak_microbatches: list[float]


def simulate(
    schedules: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="SCHEDULE",
            help=f"{NAMES_HELP} Default: all for training that can be built.",
            show_default=False,
        ),
    ] = None,
    ranks: Ranks = 4,
    microbatches: Microbatches = 8,
    virtual_stages: VirtualStages = None,
    forward: Forward = "1",
    input_grad: InputGrad = "1",
    weight_grad: WeightGrad = "1",
    transfer: Transfer = 0.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Compare schedules: time of a step, bubble, and how many virtual stages' activations each rank holds at most."""
    with told_to_the_user():
        costs = CostOptions.parse(forward, input_grad, weight_grad, transfer)
        if schedules:
            chosen = [choose_for_comparison(name, ranks, microbatches, virtual_stages) for name in schedules]
            left_out: dict[str, str] = {}
        else:
            chosen, left_out = all_that_fit(ranks, microbatches, virtual_stages)
        rows = [_row(schedule, costs) for schedule in chosen]
    if as_json:
        typer.echo(json.dumps([asdict(row) for row in rows], indent=2))
    else:
        _print_table(rows, costs)
        for name, reason in left_out.items():
            typer.echo(f"Left out: {name}, {reason}")


def _row(schedule: Schedule, costs: CostOptions) -> Row:
    simulation = costs.simulate(schedule)
    virtual = virtual_stages_of(schedule)
    return Row(
        schedule=schedule.name,
        num_ranks=schedule.num_ranks,
        num_microbatches=schedule.num_microbatches,
        num_virtual_stages=virtual,
        makespan=simulation.makespan,
        bubble=simulation.bubble,
        peak_live=simulation.peak_live,
        peak_microbatches=[peak / virtual for peak in simulation.peak_live],
    )


def _print_table(rows: list[Row], costs: CostOptions) -> None:
    counts = {f"{row.num_ranks} ranks, {row.num_microbatches} micro-batches" for row in rows}
    table = bare_table()
    table.add_column("\nschedule", no_wrap=True)
    if len(counts) > 1:
        table.add_column("\nranks", justify="right")
        table.add_column("micro-\nbatches", justify="right")
    for header in ("virtual\nstages", "step\ntime", "\nbubble"):
        table.add_column(header, justify="right")
    table.add_column("activations\nby rank")
    table.add_column("the same in\nmicro-batches")
    for row in rows:
        table.add_row(
            row.schedule,
            *([str(row.num_ranks), str(row.num_microbatches)] if len(counts) > 1 else []),
            f"{row.num_virtual_stages:g}",
            f"{row.makespan:.5g}",
            f"{row.bubble:.1%}",
            " ".join(str(peak) for peak in row.peak_live),
            " ".join(f"{peak:.3g}" for peak in row.peak_microbatches),
        )
    typer.echo(f"{counts.pop()}; {costs}\n" if len(counts) == 1 else f"{costs}\n")
    wide_console().print(table)
