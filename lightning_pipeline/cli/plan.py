"""`lightning-pipeline plan`: where to cut a model, and what to expect, without devices."""

from __future__ import annotations

import re
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from lightning_pipeline.cli.common import CommandError, bare_table, errors_without_traceback, wide_console
from lightning_pipeline.planning.cost_model import Machine
from lightning_pipeline.schedules import Simulation, save_chrome_trace, save_picture
from lightning_pipeline.schedules.chrome_trace import load_chrome_trace
from lightning_pipeline.schedules.offloading import describe_away
from lightning_pipeline.schedules.report import report_of_simulation
from lightning_pipeline.schedules.timeline import Timeline, extent
from lightning_pipeline.schedules.validation import MAX_PROCESSES, MAX_TIME, require_counts, shown

if TYPE_CHECKING:
    from lightning_pipeline.planning.plan import StagePlan
    from lightning_pipeline.strategy.offline_plan import OfflinePlans

_LAUNCH_S = 5e-6
"""The least time of any operation."""
_UNITS = {"": 1, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40, "KB": 1e3, "MB": 1e6, "GB": 1e9, "TB": 1e12}


def plan(
    script: Annotated[
        Path,
        typer.Argument(metavar="SCRIPT", help="A training script: it runs until it calls Trainer.fit.", exists=True),
    ],
    overrides: Annotated[
        list[str] | None, typer.Argument(metavar="ARGUMENT", help="The script's own arguments.")
    ] = None,
    stages: Annotated[int, typer.Option("--stages", "-p", min=2, help="Devices that share one copy of the model.")] = 2,
    microbatches: Annotated[
        int | None,
        typer.Option(
            "--microbatches",
            "-m",
            min=1,
            help="Micro-batches in one step.",
            show_default="the script's, else 4 for each stage",
        ),
    ] = None,
    schedule: Annotated[
        list[str] | None,
        typer.Option(
            "--schedule",
            "-s",
            metavar="NAME",
            show_default="all",
            help="A schedule to plan for. May be given several times.",
        ),
    ] = None,
    memory: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE",
            help="Memory of a device, such as 64GiB; or of each, as in 64GiB,32GiB.",
            show_default="no limit",
        ),
    ] = None,
    device_tflops: Annotated[
        float, typer.Option(min=1e-6, help="Tflop/s that matrix products reach, not the peak.")
    ] = 100.0,
    device_gbps: Annotated[float, typer.Option(min=1e-6, help="GB/s to and from a device's memory.")] = 1000.0,
    link_gbps: Annotated[float, typer.Option(min=1e-6, help="Gbit/s between two devices.")] = 100.0,
    link_latency: Annotated[float, typer.Option(min=0, help="Microseconds of any transfer.")] = 20.0,
    offload_activations: Annotated[
        float,
        typer.Option(
            min=0,
            max=1,
            metavar="SHARE",
            help="The share of activations that goes to host memory while they wait for their backward; 1: all.",
        ),
    ] = 0.0,
    host_gbps: Annotated[float, typer.Option(min=1e-6, help="GB/s from a device to host memory, and back.")] = 20.0,
    speeds: Annotated[
        str, typer.Option(metavar="FACTORS", help="How fast each device is, such as 1,1,0.5.", show_default="equal")
    ] = "",
    replicas: Annotated[
        int, typer.Option(min=1, max=MAX_PROCESSES, help="Copies of the pipeline that sum their gradients.")
    ] = 1,
    from_timeline: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="The .json that PipelineTimeline wrote of a run: say which modules to move to other stages instead.",
        ),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", metavar="FILE", help="Write the best plan as YAML, for stage_config=FILE."),
    ] = None,
    draw: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Write its timeline: a page (.html), a picture (.svg, .png) or a trace (.json)."
        ),
    ] = None,
) -> None:
    """Plan without devices: where to cut, and time, bubble and peak memory of each stage under each schedule.

    The script builds its model without memory for its parameters, and its step runs on tensors without data.
    """
    with errors_without_traceback(ValueError):
        require_counts(stages, microbatches or 1, 1)
        _require_finite(device_tflops, device_gbps, link_gbps, link_latency, host_gbps)
        limits = [_bytes(part) for part in memory.split(",")] if memory else []
        if len(limits) not in (0, 1, stages):
            raise CommandError(f"--memory has {len(limits)} sizes for {stages} devices; give one, or one for each")
        factors = _factors(speeds, stages)
        if draw is not None and draw.suffix not in (".html", ".svg", ".png", ".json"):
            raise CommandError(f"cannot draw {draw}; its ending chooses the format: .html, .svg, .png or .json")
        if draw is not None and from_timeline is not None:
            raise CommandError("--draw shows a new plan, and --from-timeline makes none: leave one of them out")
        from lightning_pipeline.planning.tracing import DeviceSpeed
        from lightning_pipeline.strategy.offline_plan import plan_on_paper, rebalance_on_paper

        speed = DeviceSpeed(device_tflops * 1e12, device_gbps * 1e9, _LAUNCH_S)
        if from_timeline is not None:
            found = rebalance_on_paper(script, overrides or [], load_chrome_trace(from_timeline), speed=speed)
            typer.echo(str(found))
            if output is not None:
                typer.echo(f"written: {found.better.save(output)}")
            return
        plans = plan_on_paper(
            script,
            overrides or [],
            num_stages=stages,
            num_microbatches=microbatches,
            schedules=schedule or [],
            speed=speed,
            machine=Machine(
                memory=None if not limits else limits[0] if len(limits) == 1 else limits,
                speeds=factors,
                bytes_per_second=link_gbps * 1e9 / 8,
                latency=link_latency * 1e-6,
                replicas=replicas,
                offload=offload_activations,
                host_bytes_per_second=host_gbps * 1e9,
            ),
            progress=lambda what: typer.echo(f"{what} ...", err=True),
        )
        _show(plans)
        name, (best, simulation) = next(iter(plans.plans.items()))
        typer.echo(f"\n{name}\n{_drawn(simulation.spans)}")
        if offload_activations:
            orders = [[action for action, _, _ in row] for row in simulation.spans]
            typer.echo(describe_away(orders, simulation.peak_live, [1e3 * one for one in simulation.waited_for_host]))
            typer.echo("(times in ms)")
        if output is not None:
            typer.echo(f"\nwritten: {best.save(output)}")
        if draw is not None:
            _draw(best, simulation, draw, f"{plans.model}, {name}: a plan on paper", offload_activations)


def _show(plans: OfflinePlans) -> None:
    from lightning_pipeline.planning.plan import print_plan, size

    best, _ = next(iter(plans.plans.values()))
    table = bare_table("schedule", right=("virtual stages", "step", "bubble", "peak memory by rank"))
    for name, (made, _) in plans.plans.items():
        virtual = len(made.stages) // made.num_stages
        peaks = " ".join(map(size, made.peak_bytes))
        table.add_row(name, str(virtual), f"{made.step_seconds * 1e3:.4g} ms", f"{made.bubble:.1%}", peaks)
    console = wide_console()
    typer.echo(
        f"{plans.model}: {plans.num_parameters / 1e9:.3g} billion parameters, {plans.batch_size} samples a batch, "
        f"{best.num_microbatches} micro-batches\n"
    )
    console.print(table)
    for name, reason in plans.left_out.items():
        typer.echo(f"Left out: {name}, {reason}")
    typer.echo()
    print_plan(best, width=console.width)


def _drawn(spans: Timeline, width: int = 71) -> str:
    """A row for each rank, to scale: the micro-batch's last digit for a forward, # for a backward, a dot for idle."""
    begin, end = extent(spans)
    rows = []
    for rank, row in enumerate(spans):
        cells = ["."] * width
        for action, start, stop in row:
            first, last = (int((moment - begin) / (end - begin) * width) for moment in (start, stop))
            mark = str(action.microbatch % 10) if str(action.kind) == "F" else "#"
            cells[first : max(last, first + 1)] = [mark] * (max(last, first + 1) - first)
        rows.append(f"rank {rank:<3} {''.join(cells[:width])}")
    return "\n".join(rows)


def _draw(plan: StagePlan, simulation: Simulation, path: Path, title: str, offload: float) -> None:
    stages, spans = [asdict(stage) for stage in plan.stages], simulation.spans
    if path.suffix == ".html":
        config = plan.stage_config
        report_of_simulation(
            simulation, title, unit="ms", scale=1e3, stages=stages, stage_config=config, offload=offload
        ).save(path)
    elif path.suffix == ".json":
        kept = {number: stage["kept_bytes"] for number, stage in enumerate(stages)}
        save_chrome_trace(spans, path, kept=kept, offload=offload)
    else:
        milliseconds = [[(action, start * 1e3, end * 1e3) for action, start, end in row] for row in spans]
        save_picture(milliseconds, path, title=title, time_label="milliseconds")
    typer.echo(f"drawn: {path}")


def _require_finite(*numbers: float) -> None:
    for number in numbers:
        if not number <= MAX_TIME:
            raise CommandError(f"speeds and latencies are at most {MAX_TIME:g}, got {number}")


def _bytes(text: str) -> float:
    match = re.fullmatch(r"\s*(\d+(?:\.\d*)?)\s*([A-Za-z]*)\s*", text)
    unit = match[2].upper() if match else ""
    if match is None or unit not in _UNITS:
        raise CommandError(f"--memory takes a size such as 64GiB, got {shown(text)}")
    return float(match[1]) * _UNITS[unit]


def _factors(text: str, stages: int) -> list[float]:
    try:
        factors = [float(part) for part in text.split(",")] if text else []
    except ValueError:
        factors = [0.0]
    if len(factors) not in (0, stages) or not all(0 < factor < float("inf") for factor in factors):
        raise CommandError(f"--speeds takes one number above 0 for each of {stages} devices, got {shown(text)}")
    return factors
