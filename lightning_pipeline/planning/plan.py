"""Plans: where a model is cut into stages, what to expect of it, and the table that shows one."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from lightning_pipeline.partition.stage_config import Stage
from lightning_pipeline.planning.cost_model import Machine, Plan, state_of
from lightning_pipeline.planning.large_module import LargeModule
from lightning_pipeline.schedules.schedule import loop_placement


@dataclass(frozen=True)
class PlannedStage:
    """One virtual stage of a plan, its times in seconds for one micro-batch on its rank.

    Attributes:
        rank: its place in the pipeline.
        first: the module that begins it; empty for the step's beginning.
        last: the module of the last candidate in it.
        forward: seconds.
        backward: seconds.
        flops: of forward and backward.
        parameter_bytes: of its parameters with their gradients and optimizer states.
        kept_bytes: what it keeps of a micro-batch for backward.
        received_bytes: what it receives of a micro-batch.
    """

    rank: int
    first: str
    last: str
    forward: float
    backward: float
    flops: float
    parameter_bytes: float
    kept_bytes: float
    received_bytes: float


@dataclass(frozen=True)
class StagePlan:
    """Where a model is cut, and what is expected of it.

    Attributes:
        stage_config: the first module of each later virtual stage, along the data; with its rank where the stages are
            not in a loop over the ranks.
        num_stages: ranks of a pipeline.
        num_microbatches: micro-batches a step.
        schedule: the schedule's name.
        stages: of each virtual stage.
        step_seconds: of a training step without what Lightning does around it.
        bubble: idle share of all ranks' time in the simulation, 0 to 1.
        peak_bytes: of each rank, parameters and activations.
        is_measured: the stages' times are measured, not estimated.
        is_best: no other cut at these places is faster.
        is_tried: steps have run in these stages, and `step_seconds` is what they took; else it is simulated.
        large_module: a module that makes every cut uneven; None if there is none.
        reduction_seconds: of `step_seconds`, what sums of gradients over replicas add, which is always simulated.
    """

    stage_config: dict[str, Stage]
    num_stages: int
    num_microbatches: int
    schedule: str
    stages: list[PlannedStage]
    step_seconds: float
    bubble: float
    peak_bytes: list[float]
    is_measured: bool
    is_best: bool
    is_tried: bool = False
    reduction_seconds: float = 0.0
    large_module: LargeModule | None = None

    @property
    def has_virtual_stages(self) -> bool:
        """Whether ranks hold several virtual stages."""
        return len(self.stages) > self.num_stages

    def save(self, path: str | Path) -> Path:
        """Write the cut as YAML, which ``PipelineStrategy(stage_config=path)`` reads. Returns the path."""
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        how = "measured" if self.is_measured else "estimated"
        lines = [
            f"# {self.num_stages} stages, {self.schedule}, {self.num_microbatches} micro-batches: {how}",
            f"# {self.step_seconds * 1e3:.4g} ms a step{' when it was tried' * self.is_tried}.",
            "stage_config:",
            *(f"  {json.dumps(name)}: {stage}" for name, stage in self.stage_config.items()),
            f"num_stages: {self.num_stages}",
            f"num_microbatches: {self.num_microbatches}",
            f"schedule: {self.schedule}",
        ]
        path.write_text("\n".join(lines) + "\n", encoding="utf-8")
        return path

    def as_dict(self) -> dict[str, Any]:
        """Builtins only, for checkpoints and loggers."""
        return asdict(self)

    def __str__(self) -> str:
        return f"stage_config = {self.stage_config}"


def describe(plan: Plan, machine: Machine, *, is_measured: bool, large_module: LargeModule | None = None) -> StagePlan:
    """A simulated cut with the names of modules."""
    placement, num_ranks = plan.schedule.placement, plan.schedule.num_ranks
    in_loop = placement == loop_placement(num_ranks, len(placement) // num_ranks)
    stages = [
        PlannedStage(
            rank=rank,
            first=stage.name,
            last=stage.last,
            forward=stage.forward / machine.speed(rank),
            backward=stage.backward / machine.speed(rank),
            flops=stage.flops,
            parameter_bytes=state_of([stage]),
            kept_bytes=stage.kept + stage.received,
            received_bytes=stage.received,
        )
        for rank, stage in zip(placement, plan.stages, strict=True)
    ]
    return StagePlan(
        stage_config={
            stage.first: number if in_loop else f"{number}@{stage.rank}"
            for number, stage in enumerate(stages)
            if number
        },
        num_stages=num_ranks,
        num_microbatches=plan.schedule.num_microbatches,
        schedule=plan.schedule.name,
        stages=stages,
        step_seconds=plan.seconds,
        bubble=plan.simulation.bubble,
        peak_bytes=plan.memory,
        is_measured=is_measured,
        is_best=plan.is_best,
        reduction_seconds=plan.seconds - plan.simulation.makespan,
        large_module=large_module,
    )


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
    if plan.large_module is not None:
        console.print(str(plan.large_module), soft_wrap=True, markup=False)
    console.print(str(plan), soft_wrap=True, markup=False)


def size(num_bytes: float) -> str:
    """Such as ``"1.5 GiB"``."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(num_bytes) < 1024:
            return f"{num_bytes:.3g} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:.4g} TiB"
