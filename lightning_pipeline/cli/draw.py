"""`lightning-pipeline draw`: a schedule as text, picture, trace or table."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from lightning_pipeline.cli.common import (
    NAMES_HELP,
    CommandError,
    Forward,
    InputGrad,
    Microbatches,
    Ranks,
    Transfer,
    VirtualStages,
    WeightGrad,
    told_to_the_user,
)
from lightning_pipeline.cli.schedule_args import CostOptions, choose, counts_of
from lightning_pipeline.schedules import Schedule, lower, render, save_chrome_trace, save_csv, save_picture
from lightning_pipeline.schedules.schedule import format_grid

# One unit of the costs is a millisecond in a trace, whose viewers have no other notion of time.
_TRACE_UNIT = 1e-3


def draw(
    schedule: Annotated[str, typer.Argument(metavar="SCHEDULE", help=NAMES_HELP)],
    ranks: Ranks = 4,
    microbatches: Microbatches = 8,
    virtual_stages: VirtualStages = None,
    forward: Forward = "1",
    input_grad: InputGrad = "1",
    weight_grad: WeightGrad = "1",
    transfer: Transfer = 0.0,
    lowered: Annotated[
        bool, typer.Option("--lowered", help="Text only: each rank's order with its sends and receives.")
    ] = False,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            metavar="FILE",
            help="Write a picture (.svg, .png), a trace for chrome://tracing and Perfetto (.json), a table that can be "
            "trained with (.csv), or the text (.txt).",
        ),
    ] = None,
) -> None:
    """Draw a schedule: a row for each rank, time to the right. Text and CSV have a slot for each action."""
    with told_to_the_user():
        costs = CostOptions.parse(forward, input_grad, weight_grad, transfer)
        chosen = choose(schedule, ranks, microbatches, virtual_stages)
        title = f"{chosen.name}: {counts_of(chosen)}"
        bubble = costs.simulate(chosen).bubble
        if output is None:
            text = _text(chosen, title, bubble, lowered=lowered)
        else:
            _write(chosen, output, title, costs, lowered=lowered)
            text = f"{title}, bubble {bubble:.1%}: {output}"
    typer.echo(text)


def _text(schedule: Schedule, title: str, bubble: float, *, lowered: bool) -> str:
    if lowered:
        return f"{title}\n{format_grid([[str(action) for action in order] for order in lower(schedule)])}"
    return f"{title}, bubble {bubble:.1%}\n{render(schedule)}"


def _write(schedule: Schedule, path: Path, title: str, costs: CostOptions, *, lowered: bool) -> None:
    suffix = path.suffix.lower()
    if lowered and suffix != ".txt":
        raise CommandError(f"--lowered is drawn as text only, got --output {path}; write to a .txt file")
    simulation = costs.simulate(schedule)
    if suffix == ".txt":
        path.write_text(_text(schedule, title, simulation.bubble, lowered=lowered) + "\n", encoding="utf-8")
    elif suffix == ".csv":
        save_csv(schedule, path)
    elif suffix == ".json":
        save_chrome_trace(simulation.spans, path, unit=_TRACE_UNIT)
    elif suffix in (".svg", ".png"):
        save_picture(simulation.spans, path, title=title)
    else:
        raise CommandError(f"cannot write {path}; its ending chooses the format: .svg, .png, .json, .csv or .txt")
