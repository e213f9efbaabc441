"""How costs grow with blocks, micro-batches, ranks, replicas and schedules: ``python examples/benchmark/growth.py``.

Writes growth.json and growth.png. Beside this package stand torch.distributed.pipelining, DDP for the start, and
for one stage Lightning alone, which accumulates over the same micro-batches.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from contenders import Contender
from processes import environment
from run import run_turn

SIZES = {"batch_size": 16, "width": 32, "num_blocks": 8, "length": 16, "num_microbatches": 8}
SETTINGS = {**SIZES, "num_stages": 2, "num_replicas": 1, "num_linear_microbatches": 16}
OURS, TORCH, DDP, ALONE = "ours 1f1b", "torch 1f1b", "ddp", "lightning"
START = "--start"


@dataclass(frozen=True)
class Sweep:
    """One cost over one size.

    Attributes:
        sizes: what it is measured for, in rising order.
        measure: one turn of a contender at a size, in the unit that ``cost`` names.
        contenders: their names, in the order of their turns.
    """

    title: str
    size: str
    cost: str
    sizes: tuple[int, ...]
    contenders: tuple[str, ...]
    measure: Callable[[str, int, int], float]


def step_ms(contender: str, num_steps: int, workload: str, **changed: int) -> float:
    """Median milliseconds of a step."""
    settings = {**SETTINGS, **changed, "num_steps": num_steps, "workloads": [workload]}
    turn = run_turn(Contender(*contender.split()), settings)[workload]
    return statistics.median(turn["seconds"]) * 1e3


def of_blocks(contender: str, num_blocks: int, num_steps: int) -> float:
    return step_ms(contender, num_steps, "gpt", num_blocks=num_blocks)


def of_microbatches(contender: str, number: int, num_steps: int) -> float:
    return step_ms(contender, num_steps, "linear", num_linear_microbatches=number) / number


def of_one_stage(contender: str, number: int, num_steps: int) -> float:
    return step_ms(contender, num_steps, "linear", num_linear_microbatches=number, num_stages=1) / number


def of_ranks(contender: str, number: int, num_steps: int) -> float:
    return step_ms(contender, num_steps, "linear", num_stages=number) / SETTINGS["num_linear_microbatches"]


def of_replicas(contender: str, number: int, num_steps: int) -> float:
    return step_ms(contender, num_steps, "gpt", num_replicas=number)


def of_start(contender: str, num_ranks: int, num_steps: int) -> float:
    """Seconds from the launch of a script to the end of its first step."""
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "seconds"
        task = json.dumps([contender, num_ranks, str(output), time.time()])
        command = [sys.executable, __file__, START, task]
        ended = subprocess.run(command, env=environment(), capture_output=True, text=True)
        if not output.exists():  # Gloo may abort a process that ends, which is no matter here
            raise RuntimeError(f"{contender} on {num_ranks} ranks has not come to its first step:\n{ended.stderr}")
        return float(output.read_text())


def of_schedule(contender: str, num_ranks: int, num_steps: int) -> float:
    """Seconds to build, check and simulate 1F1B with eight micro-batches a rank."""
    from lightning_pipeline.schedules import build, check, simulate

    began = time.process_time()
    schedule = build("1f1b", num_ranks, 8 * num_ranks)
    check(schedule)
    simulate(schedule)
    return time.process_time() - began


SWEEPS = {
    "blocks": Sweep("64 narrow blocks on 2 ranks", "blocks", "ms a step", (8, 16, 32, 64), (TORCH, OURS), of_blocks),
    "micro-batches": Sweep(
        "an 8x8 Linear a stage, 2 ranks",
        "micro-batches",
        "ms a micro-batch",
        (4, 16, 64, 256),
        (TORCH, OURS),
        of_microbatches,
    ),
    "one stage": Sweep(
        "an 8x8 Linear in one process",
        "micro-batches",
        "ms a micro-batch",
        (4, 16, 64, 256),
        (ALONE, OURS),
        of_one_stage,
    ),
    "ranks": Sweep(
        "an 8x8 Linear a stage, 16 micro-batches", "ranks", "ms a micro-batch", (2, 4, 8), (TORCH, OURS), of_ranks
    ),
    "replicas": Sweep(
        "8 narrow blocks on 2 ranks a replica", "replicas", "ms a step", (1, 2, 4), (TORCH, OURS), of_replicas
    ),
    "start": Sweep("to the end of the first step", "ranks", "seconds", (2, 4, 8), (DDP, OURS), of_start),
    "schedules": Sweep(
        "build, check and simulate 1F1B, m = 8p",
        "ranks",
        "seconds of CPU",
        (64, 128, 256, 512, 1024),
        (OURS,),
        of_schedule,
    ),
}


def start(contender: str, num_ranks: int, output: Path, launched: float) -> None:
    """Train one step, in this process and those it starts, and write down how long that took since the launch."""
    import lightning as L
    import torch
    from torch.utils.data import DataLoader

    from lightning_pipeline import PipelineStrategy
    from with_lightning import LitWorkload, Repeated
    from workload import linear

    workload = linear(num_layers=num_ranks, batch_size=num_ranks)
    ours = PipelineStrategy(num_microbatches=num_ranks, schedule="1f1b")
    trainer = L.Trainer(
        accelerator="cpu",
        devices=num_ranks,
        strategy=DDP if contender == DDP else ours,
        max_steps=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    torch.set_num_threads(1)
    trainer.fit(LitWorkload(workload), DataLoader(Repeated(workload.batch, num_ranks), batch_size=None))
    if trainer.is_global_zero:
        output.write_text(str(time.time() - launched))


def measure(names: list[str], largest: int, num_rounds: int, num_steps: int, console: Console) -> dict[str, Any]:
    """For each sweep and contender, the least of the rounds' figures at each size."""
    results: dict[str, Any] = {}
    for name in names:
        sweep = SWEEPS[name]
        sizes = [size for size in sweep.sizes if size <= largest]
        costs: dict[str, list[float]] = {contender: [] for contender in sweep.contenders}
        for size in sizes:
            rounds = [
                {contender: sweep.measure(contender, size, num_steps) for contender in sweep.contenders}
                for _ in range(num_rounds)
            ]
            for contender, found in costs.items():
                found.append(min(one[contender] for one in rounds))
            shown = ", ".join(f"{contender} {found[-1]:.3g}" for contender, found in costs.items())
            console.print(f"{sweep.title}, {size} {sweep.size}: {shown} {sweep.cost}")
        results[name] = {"size": sweep.size, "cost": sweep.cost, "title": sweep.title, "sizes": sizes, "costs": costs}
    return results


def plot(results: dict[str, Any], path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(4.2 * min(3, len(results)), 3.4 * -(-len(results) // 3)), layout="constrained")
    for place, result in enumerate(results.values(), start=1):
        axes = figure.add_subplot(-(-len(results) // 3), min(3, len(results)), place)
        for contender, costs in result["costs"].items():
            axes.plot(result["sizes"], costs, marker="o", label=contender)
        axes.set(xscale="log", xticks=result["sizes"], xticklabels=result["sizes"], ylim=(0, None))
        axes.minorticks_off()
        axes.set(title=result["title"], xlabel=result["size"], ylabel=result["cost"])
        axes.legend()
    figure.savefig(path, dpi=100)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument(
        "--sweeps", nargs="+", choices=list(SWEEPS), default=list(SWEEPS), metavar="NAME", help="to run"
    )
    parser.add_argument("--largest", type=int, default=1024, help="leave out larger sizes")
    parser.add_argument("--num-rounds", type=int, default=2, help="turns of every contender, of which the best counts")
    parser.add_argument("--num-steps", type=int, default=10, help="counted steps a turn")
    parser.add_argument("--output", type=Path, default=Path(), help="folder for growth.json and growth.png")
    parser.add_argument(START, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.start:
        contender, num_ranks, output, launched = json.loads(arguments.start)
        start(contender, num_ranks, Path(output), launched)
        return
    console = Console(width=None if sys.stdout.isatty() else 120)
    results = measure(arguments.sweeps, arguments.largest, arguments.num_rounds, arguments.num_steps, console)
    arguments.output.mkdir(parents=True, exist_ok=True)
    (arguments.output / "growth.json").write_text(json.dumps(results, indent=1))
    plot(results, arguments.output / "growth.png")
    console.print(f"{arguments.output / 'growth.json'} and {arguments.output / 'growth.png'}")


if __name__ == "__main__":
    main()
