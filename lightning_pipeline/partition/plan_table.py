"""A plan as a table for people to read."""

from __future__ import annotations

from rich import box
from rich.console import Console
from rich.table import Table

from lightning_pipeline.partition.plan import StagePlan


def plan_table(plan: StagePlan) -> Table:
    """A row for each virtual stage; times are of one micro-batch."""
    how = "measured" if plan.is_measured else "estimated"
    known = f"and a bubble of {plan.bubble:.1%} expected, from {how} times"
    if plan.is_tried:
        known = "when it was tried"
        if plan.reduction_seconds:
            known += f", {plan.reduction_seconds * 1e3:.3g} ms of it expected for sums over replicas"
    title = f"{plan.schedule}, {plan.num_microbatches} micro-batches: {plan.step_seconds * 1e3:.4g} ms a step {known}"
    table = Table(
        title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False, show_edge=False
    )
    table.add_column("virtual stage" if plan.has_virtual_stages else "stage", justify="right")
    table.add_column("rank", justify="right")
    table.add_column("begins with", overflow="fold")
    table.add_column("to", overflow="fold")
    for name in ("forward", "backward", "work", "state", "activations", "receives"):
        table.add_column(name, justify="right")
    for number, stage in enumerate(plan.stages):
        table.add_row(
            str(number),
            str(stage.rank),
            stage.first or "the step",
            stage.last or "",
            f"{stage.forward * 1e3:.3g} ms",
            f"{stage.backward * 1e3:.3g} ms",
            f"{stage.flops / 1e9:.3g} GFLOP",
            size(stage.parameter_bytes),
            size(stage.kept_bytes),
            size(stage.received_bytes),
        )
    return table


def print_plan(plan: StagePlan, *, width: int | None = None) -> None:
    """On standard output: the table, the peak memory, and the cut as it can be pasted."""
    console = Console(width=width, highlight=False)
    if not console.is_terminal and width is None:
        console = Console(width=140, highlight=False)
    console.print(plan_table(plan))
    console.print(f"peak memory of each rank: {', '.join(map(size, plan.peak_bytes))}")
    console.print(str(plan), soft_wrap=True, markup=False)


def size(num_bytes: float) -> str:
    """Such as ``"1.5 GiB"``."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(num_bytes) < 1024:
            return f"{num_bytes:.3g} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:.4g} TiB"
