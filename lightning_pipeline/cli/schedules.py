"""`lightning-pipeline simulate` compares schedules, and `draw` shows one as text, picture, trace or table."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from lightning_pipeline.cli.common import CommandError, bare_table, errors_without_traceback, wide_console
from lightning_pipeline.cli.costs import CostOptions, numbers_by_stage, read_bounds
from lightning_pipeline.schedules import (
    SCHEDULE_NAMES,
    Costs,
    Schedule,
    ScheduleError,
    build,
    check,
    default_virtual_stages,
    load_csv,
    lower,
    optimize,
    render,
    save_chrome_trace,
    save_csv,
    save_picture,
)
from lightning_pipeline.schedules.offloading import away_in, describe_away
from lightning_pipeline.schedules.optimizing import OPTIMIZED
from lightning_pipeline.schedules.report import report_of_simulation
from lightning_pipeline.schedules.schedule import format_grid, loop_placement
from lightning_pipeline.schedules.summary import MAX_GRID_PASSES, save_overview, spread, summarize
from lightning_pipeline.schedules.validation import MAX_PICTURE_RANKS, require_counts

_NAMES_HELP = (
    f"{', '.join(SCHEDULE_NAMES)}; {OPTIMIZED}, an order that is searched for, for these times and the bounds below; "
    f"or a CSV file, which brings its own counts."
)
_TRACE_UNIT = 1e-3  # one unit of the costs is a millisecond in a trace, whose viewers have no other notion of time

Ranks = Annotated[int, typer.Option("--ranks", "-p", min=1, help="Ranks that hold one copy of the model.")]
Microbatches = Annotated[int, typer.Option("--microbatches", "-m", min=1, help="Micro-batches in one step.")]
VirtualStages = Annotated[
    int | None,
    typer.Option(
        "--virtual-stages",
        "-v",
        min=1,
        show_default="2 for schedules made for several, else 1",
        help="Virtual stages on each rank, where a schedule takes several.",
    ),
]
Forward = Annotated[
    str,
    typer.Option(
        metavar="TIME",
        help="Time of a micro-batch's forward on a rank. Each of v virtual stages takes a v-th of it, which keeps "
        "schedules comparable. Or a list such as 1,1,2: one for each of RANKS equal parts of the model.",
    ),
]
InputGrad = Annotated[str, typer.Option(metavar="TIME", help="Likewise, of the gradients of the inputs.")]
WeightGrad = Annotated[str, typer.Option(metavar="TIME", help="Likewise, of the gradients of the weights.")]
Transfer = Annotated[float, typer.Option(min=0, metavar="TIME", help="Time until a value is on another rank.")]
Offload = Annotated[
    float,
    typer.Option(
        "--offload-activations",
        min=0,
        max=1,
        metavar="SHARE",
        help="The share of activations that goes to host memory while they wait for their backward; 1: all.",
    ),
]
HostTransfer = Annotated[
    float,
    typer.Option(
        min=0,
        metavar="TIME",
        help="Time that all activations of a rank's share of the model take to host memory, or back.",
    ),
]
MostLive = Annotated[
    float | None,
    typer.Option("--max-live-microbatches", min=0, help=f"For {OPTIMIZED}: the most that a rank may hold."),
]
KeptBytes = Annotated[
    str | None,
    typer.Option(
        metavar="BYTES", help=f"For {OPTIMIZED}: what a rank's share of the model keeps of a micro-batch; or a list."
    ),
]
MaxBytes = Annotated[float | None, typer.Option(min=0, help=f"For {OPTIMIZED}: the most of these on a rank.")]


def simulate(
    schedules: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="SCHEDULE",
            help=f"{_NAMES_HELP} Default: all for training that can be built.",
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
    offload_activations: Offload = 0.0,
    host_transfer: HostTransfer = 0.0,
    max_live_microbatches: MostLive = None,
    kept_bytes: KeptBytes = None,
    max_bytes: MaxBytes = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Compare schedules: time of a step, bubble, and how many virtual stages' activations each rank holds at most."""
    with errors_without_traceback():
        costs = CostOptions.parse(forward, input_grad, weight_grad, transfer, offload_activations, host_transfer)
        bounds = read_bounds(max_live_microbatches, kept_bytes, max_bytes)
        left_out: dict[str, str] = {}
        if schedules:
            chosen = [
                _optimized(ranks, microbatches, virtual_stages, costs, bounds)
                if name == OPTIMIZED
                else _choose(name, ranks, microbatches, virtual_stages, falls_back=True)
                for name in schedules
            ]
        else:
            chosen = _all_that_fit(ranks, microbatches, virtual_stages, left_out)
        rows = [_figures(schedule, costs) for schedule in chosen]
    if as_json:
        typer.echo(json.dumps(rows, indent=2))
    else:
        _print_table(rows, costs)
        for name, reason in left_out.items():
            typer.echo(f"Left out: {name}, {reason}")


def draw(
    schedule: Annotated[str, typer.Argument(metavar="SCHEDULE", help=_NAMES_HELP)],
    ranks: Ranks = 4,
    microbatches: Microbatches = 8,
    virtual_stages: VirtualStages = None,
    forward: Forward = "1",
    input_grad: InputGrad = "1",
    weight_grad: WeightGrad = "1",
    transfer: Transfer = 0.0,
    offload_activations: Offload = 0.0,
    host_transfer: HostTransfer = 0.0,
    max_live_microbatches: MostLive = None,
    kept_bytes: KeptBytes = None,
    max_bytes: MaxBytes = None,
    lowered: Annotated[
        bool, typer.Option("--lowered", help="Text only: each rank's order with its sends and receives.")
    ] = False,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            metavar="FILE",
            help="Write a page for the browser (.html), a picture (.svg, .png), a trace for chrome://tracing and "
            "Perfetto (.json), a table that can be trained with (.csv), or the text (.txt).",
        ),
    ] = None,
) -> None:
    """Draw a schedule: a row for each rank, time to the right. Text and CSV have a slot for each action.

    On a terminal and in pictures, what is too large for that is drawn in brief, of some ranks.
    """
    with errors_without_traceback():
        costs = CostOptions.parse(forward, input_grad, weight_grad, transfer, offload_activations, host_transfer)
        bounds = read_bounds(max_live_microbatches, kept_bytes, max_bytes)
        if schedule == OPTIMIZED:
            chosen = _optimized(ranks, microbatches, virtual_stages, costs, bounds)
        else:
            chosen = _choose(schedule, ranks, microbatches, virtual_stages)
        simulation = costs.simulate(chosen)
        several = chosen.num_stages > chosen.num_ranks
        virtual = f", {_virtual_stages_of(chosen):g} virtual stages each" * several
        in_host = ""
        if offload_activations:
            in_host = describe_away(chosen.compute().orders, simulation.peak_live, simulation.waited_for_host)
        title = f"{chosen.name}: {chosen.num_ranks} ranks{virtual}, {chosen.num_microbatches} micro-batches"
        is_wide = chosen.num_stages * chosen.num_microbatches > MAX_GRID_PASSES
        title_and_bubble = f"{title}, bubble {simulation.bubble:.1%}"

        def text() -> str:
            if lowered:
                return f"{title}\n{format_grid([[str(action) for action in order] for order in lower(chosen)])}"
            if (output is None and is_wide) or chosen.is_large:
                return f"{title_and_bubble}\n{summarize(chosen, simulation.spans, simulation.makespan)}"
            return f"{title_and_bubble}\n{render(chosen)}"

        if output is None:
            drawn = text()
            typer.echo(f"{drawn}\n{in_host}" if in_host else drawn)
            _say_how_it_fits(max(map(len, drawn.splitlines())))
            return
        suffix = output.suffix.lower()
        if lowered and suffix != ".txt":
            raise CommandError(f"--lowered is drawn as text only, got --output {output}; write to a .txt file")
        output.parent.mkdir(parents=True, exist_ok=True)
        if suffix == ".txt":
            output.write_text(f"{text()}\n{in_host}\n" if in_host else f"{text()}\n", encoding="utf-8")
        elif suffix == ".csv":
            save_csv(chosen, output)
        elif suffix == ".html":
            chosen.require_small("written as a page")
            report_of_simulation(simulation, title, offload=offload_activations).save(output)
        elif suffix == ".json":
            chosen.require_small("written as a trace")
            save_chrome_trace(simulation.spans, output, unit=_TRACE_UNIT, offload=offload_activations)
        elif suffix in (".svg", ".png"):
            if is_wide or chosen.num_ranks > MAX_PICTURE_RANKS:
                save_overview(simulation.spans, output, simulation.makespan, title=title_and_bubble)
            else:
                save_picture(simulation.spans, output, title=title)
        else:
            raise CommandError(
                f"cannot write {output}; its ending chooses the format: .html, .svg, .png, .json, .csv or .txt"
            )
        typer.echo(f"{title_and_bubble}: {output}")


def _say_how_it_fits(columns: int) -> None:
    """Where lines are longer than the terminal's, or 80 columns of what is no terminal."""
    there = shutil.get_terminal_size().columns
    if columns > there:
        typer.echo(
            f"These lines have {columns} columns, and there are {there}: pipe them into `less -S`, write a page with "
            f"-o FILE.html, or draw fewer ranks (-p) or micro-batches (-m)",
            err=True,
        )


def _figures(schedule: Schedule, costs: CostOptions) -> dict[str, Any]:
    """A schedule's results as they are printed in JSON; `peak_microbatches` counts all of a rank's virtual stages."""
    simulation = costs.simulate(schedule)
    virtual = _virtual_stages_of(schedule)
    return {
        "schedule": schedule.name,
        "num_ranks": schedule.num_ranks,
        "num_microbatches": schedule.num_microbatches,
        "num_virtual_stages": virtual,
        "makespan": simulation.makespan,
        "bubble": simulation.bubble,
        "peak_live": simulation.peak_live,
        "peak_microbatches": [peak / virtual for peak in simulation.peak_live],
        **(
            {
                "in_host_memory": [len(away_in(order)) for order in schedule.compute().orders],
                "waited_for_host": list(simulation.waited_for_host),
            }
            if costs.offload
            else {}
        ),
    }


def _print_table(rows: list[dict[str, Any]], costs: CostOptions) -> None:
    counts = {f"{row['num_ranks']} ranks, {row['num_microbatches']} micro-batches" for row in rows}
    has_several_counts = len(counts) > 1
    right = ["\nranks", "micro-\nbatches"] * has_several_counts + ["virtual\nstages", "step\ntime", "\nbubble"]
    table = bare_table("\nschedule", right=right)
    table.columns[0].no_wrap = True
    table.add_column("activations\nby rank")
    table.add_column("the same in\nmicro-batches")
    if costs.offload:
        table.add_column("sent to\nhost")
        table.add_column("time not\nhidden")
    for row in rows:
        host = [spread(row["in_host_memory"]), spread(row["waited_for_host"])] if costs.offload else []
        table.add_row(
            row["schedule"],
            *([str(row["num_ranks"]), str(row["num_microbatches"])] * has_several_counts),
            f"{row['num_virtual_stages']:g}",
            f"{row['makespan']:.5g}",
            f"{row['bubble']:.1%}",
            spread(row["peak_live"]),
            spread(row["peak_microbatches"]),
            *host,
        )
    typer.echo(f"{costs}\n" if has_several_counts else f"{counts.pop()}; {costs}\n")
    wide_console().print(table)


def _choose(
    name: str, num_ranks: int, num_microbatches: int, num_virtual_stages: int | None, *, falls_back: bool = False
) -> Schedule:
    """Build a schedule, or read and check a CSV file, which brings its own counts.

    Args:
        falls_back: build it with its usual number of virtual stages where it cannot have the given one.

    Raises:
        ScheduleError: for an unknown name, counts that the schedule cannot have, or a faulty file.
    """
    if name.lower().endswith(".csv"):
        schedule = replace(load_csv(name), name=Path(name).name)
        check(schedule)
        return schedule
    usual = default_virtual_stages(name)
    try:
        return build(name, num_ranks, num_microbatches, num_virtual_stages or usual)
    except ScheduleError:
        if not falls_back or num_virtual_stages is None:
            raise
        return build(name, num_ranks, num_microbatches, usual)


def _optimized(
    num_ranks: int, num_microbatches: int, num_virtual_stages: int | None, costs: CostOptions, bounds: dict[str, Any]
) -> Schedule:
    """Search for an order, with stages placed in a loop."""
    virtual = num_virtual_stages or 1
    require_counts(num_ranks, num_microbatches, virtual)
    counts = (num_ranks, num_ranks * virtual)
    by_stage = costs.by_stage(OPTIMIZED, *counts)
    backward = list(map(sum, zip(by_stage["input_grad"], by_stage["weight_grad"], strict=True)))
    kept = bounds["kept_bytes"] and numbers_by_stage("--kept-bytes", bounds["kept_bytes"], OPTIMIZED, *counts)
    of_stages, bounds = Costs(**by_stage, transfer=costs.transfer, backward=backward), {**bounds, "kept_bytes": kept}
    return optimize(of_stages, loop_placement(num_ranks, virtual), num_microbatches, **bounds).schedule


def _all_that_fit(
    num_ranks: int, num_microbatches: int, num_virtual_stages: int | None, left_out: dict[str, str]
) -> list[Schedule]:
    """Every schedule for training that can be built for these counts; `left_out` gets the reasons for the others."""
    schedules: list[Schedule] = []
    for name in SCHEDULE_NAMES:
        try:
            schedule = _choose(name, num_ranks, num_microbatches, num_virtual_stages, falls_back=True)
        except ScheduleError as error:
            left_out[name] = str(error)
            continue
        # Schedules are equal that do the same on every rank, whatever their names.
        if schedule in schedules:
            left_out[name] = f"here the same as {schedules[schedules.index(schedule)].name}"
        elif schedule.has_backward:
            schedules.append(schedule)
    if not schedules:
        raise ScheduleError(next(iter(left_out.values())))
    return schedules


def _virtual_stages_of(schedule: Schedule) -> float:
    """Virtual stages on a rank: a mean, where a file places them unevenly."""
    whole, rest = divmod(schedule.num_stages, schedule.num_ranks)
    return schedule.num_stages / schedule.num_ranks if rest else whole
