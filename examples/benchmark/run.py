"""Compares one process, torch.distributed.pipelining and PipelineStrategy: ``python examples/benchmark/run.py``."""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--num-stages", type=int, default=2, help="processes, one stage each")
    parser.add_argument("--num-microbatches", type=int, default=8, help="of the GPT's batch")
    parser.add_argument("--num-linear-microbatches", type=int, default=64, help="of the Linear's batch, a sample each")
    parser.add_argument("--num-rounds", type=int, default=3, help="turns of every contender")
    parser.add_argument("--num-steps", type=int, default=10, help="counted steps a turn")
    parser.add_argument("--batch-size", type=int, default=16, help="sequences a step")
    parser.add_argument("--width", type=int, default=256, help="of the GPT")
    parser.add_argument("--num-blocks", type=int, default=8, help="of the GPT")
    parser.add_argument("--length", type=int, default=128, help="tokens a sequence")
    parser.add_argument("--json", type=Path, help="a file for every step's time as well")
    return parser.parse_args(arguments)


def run_workers(settings: dict[str, Any]) -> dict[str, Any]:
    """Runs the contenders on ``settings["num_stages"]`` processes with one thread each."""
    path = os.pathsep.join([str(ROOT / "examples"), str(ROOT), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path}
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "results.json"
        command = [*launch, str(settings["num_stages"]), str(HERE / "worker.py"), json.dumps(settings), str(output)]
        subprocess.run(command, env=environment, check=True)
        return json.loads(output.read_text())


def ideal_share(num_stages: int, num_microbatches: int) -> float:
    """The share of one process's time that a perfect pipeline takes: (m + p - 1) / (m p)."""
    return (num_microbatches + num_stages - 1) / (num_microbatches * num_stages)


def gpt_table(measured: dict[str, Any], settings: dict[str, Any]) -> Table:
    ideal = ideal_share(settings["num_stages"], settings["num_microbatches"])
    alone = measured["one process"]["seconds"]
    table = Table(
        "", "median ms", "min ms", "median / ideal", "min / ideal", "loss", title="GPT: time of a step", min_width=72
    )
    for name, result in measured.items():
        median, least = statistics.median(result["seconds"]), min(result["seconds"])
        to_ideal = [median / (ideal * statistics.median(alone)), least / (ideal * min(alone))]
        ratios = ["", ""] if name == "one process" else [f"{ratio:.3f}" for ratio in to_ideal]
        table.add_row(name, f"{median * 1e3:.1f}", f"{least * 1e3:.1f}", *ratios, f"{result['loss']:.5f}")
    return table


def linear_table(measured: dict[str, Any], settings: dict[str, Any]) -> Table:
    share = 1e3 / settings["num_linear_microbatches"]
    table = Table("", "median ms", "min ms", title="8x8 Linear a stage: time of a micro-batch", min_width=72)
    for name, result in measured.items():
        median, least = statistics.median(result["seconds"]), min(result["seconds"])
        table.add_row(name, f"{median * share:.3f}", f"{least * share:.3f}")
    return table


def main() -> None:
    arguments = parse_arguments()
    settings = {name: value for name, value in vars(arguments).items() if name != "json"}
    results = run_workers(settings)
    console = Console()
    console.print(gpt_table(results["gpt"], settings), linear_table(results["linear"], settings))
    if arguments.json:
        arguments.json.write_text(json.dumps({"settings": settings, **results}, indent=2))
        console.print(f"Written to {arguments.json}")


if __name__ == "__main__":
    main()
