"""Compares one process, torch.distributed.pipelining and PipelineStrategy: ``python examples/benchmark/run.py``."""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from rich.console import Console

from contenders import Contender, line_up
from lightning_pipeline.schedules import ScheduleError
from processes import HERE, argument_parser, environment, torchrun
from report import gpt_table, ideal_share, linear_table

WORKLOADS = ("gpt", "linear")
DEFAULT_SCHEDULES = ("1f1b", "gpipe", "interleaved_1f1b", "zero_bubble")


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argument_parser(__doc__, DEFAULT_SCHEDULES)
    parser.add_argument("--num-stages", type=int, default=2, help="processes, which schedules that interleave cut in 2")
    parser.add_argument("--num-microbatches", type=int, default=8, help="of the GPT's batch")
    parser.add_argument("--num-linear-microbatches", type=int, default=64, help="of the Linear's batch, a sample each")
    parser.add_argument("--num-rounds", type=int, default=3, help="turns of every contender")
    parser.add_argument("--num-steps", type=int, default=10, help="counted steps a turn")
    parser.add_argument("--batch-size", type=int, default=16, help="sequences a step")
    parser.add_argument("--width", type=int, default=256, help="of the GPT")
    parser.add_argument("--num-blocks", type=int, default=8, help="of the GPT")
    parser.add_argument("--length", type=int, default=128, help="tokens a sequence")
    parser.add_argument("--json", type=Path, help="a file for every step's time as well")
    parsed = parser.parse_args(arguments)
    for schedule in parsed.schedules:
        num_cuts = len(Contender("ours", schedule).placement(parsed.num_stages))
        if parsed.num_blocks < num_cuts:
            parser.error(f"--num-blocks {parsed.num_blocks} is less than the {num_cuts} stages of {schedule}")
        for num_microbatches in (parsed.num_microbatches, parsed.num_linear_microbatches):
            try:
                ideal_share(schedule, parsed.num_stages, num_microbatches)
            except ScheduleError as error:
                parser.error(str(error))
    return parsed


def take_turns(
    contenders: list[Contender], settings: dict[str, Any], console: Console
) -> tuple[dict[str, dict[str, Any]], dict[str, str]]:
    """What each contender measured, by workload and name, and what it could not run, with the reason."""
    results: dict[str, dict[str, Any]] = {workload: {} for workload in WORKLOADS}
    left_out: dict[str, str] = {}
    for turn in range(settings["num_rounds"]):
        for contender in contenders:
            for workload, measured in run_turn(contender, settings).items():
                if "unavailable" in measured:
                    left_out[f"{contender.name} ({workload})"] = measured["unavailable"]
                    continue
                result = results[workload].setdefault(contender.name, {"seconds": []})
                result["seconds"] += measured["seconds"]
                result["loss"] = measured["loss"]
            console.print(f"round {turn + 1} of {settings['num_rounds']}: {contender.name}")
    return results, left_out


def run_turn(contender: Contender, settings: dict[str, Any]) -> dict[str, Any]:
    """One turn, in processes of its own with one thread each."""
    num_processes = settings["num_stages"] * settings["num_replicas"]
    python = [sys.executable] if contender.schedule is None else torchrun(num_processes)
    turn = {**settings, "who": contender.who, "schedule": contender.schedule}
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "results.json"
        command = [*python, str(HERE / "worker.py"), json.dumps(turn), str(output)]
        subprocess.run(command, env=environment(), check=True)
        return json.loads(output.read_text())


def main() -> None:
    settings = {**vars(parse_arguments()), "workloads": WORKLOADS, "num_replicas": 1}
    output = settings.pop("json")
    # A file or a pipe has no width of its own, and the table of the GPT wants this one.
    console = Console(width=None if sys.stdout.isatty() else 132)
    contenders, absent = line_up(settings["schedules"])
    results, refused = take_turns(contenders, settings, console)
    left_out = absent | refused
    console.print(
        gpt_table(results["gpt"], contenders, settings), linear_table(results["linear"], contenders, settings)
    )
    for name, reason in left_out.items():
        console.print(f"Left out: {name}: {reason}")
    if output:
        counts = settings["num_stages"], settings["num_microbatches"]
        ideals = {schedule: ideal_share(schedule, *counts) for schedule in settings["schedules"]}
        output.write_text(
            json.dumps({"settings": settings, **results, "ideal_share": ideals, "left_out": left_out}, indent=2)
        )
        console.print(f"Written to {output}")


if __name__ == "__main__":
    main()
