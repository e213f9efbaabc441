"""What the benchmarks that start processes share: the processes' environment, torchrun's command, and an option."""

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from lightning_pipeline.schedules import SCHEDULE_NAMES

HERE = Path(__file__).resolve().parent
SCHEDULES = tuple(name for name in SCHEDULE_NAMES if name != "forward")


def argument_parser(description: str | None, schedules: Sequence[str]) -> argparse.ArgumentParser:
    """A parser of ``--schedules``, with its default, to which a benchmark adds its own options."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--schedules", nargs="+", choices=SCHEDULES, default=schedules, metavar="NAME", help="to run")
    return parser


def environment(**variables: str) -> dict[str, str]:
    """With one thread to a process, and imports from this checkout."""
    path = os.pathsep.join([str(HERE.parent), str(HERE.parents[1]), os.environ.get("PYTHONPATH", "")])
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path, **variables}


def torchrun(num_processes: int, *options: str) -> list[str]:
    """The command that starts so many processes of the script that follows it."""
    count = ["--nproc-per-node", str(num_processes)]
    return [sys.executable, "-m", "torch.distributed.run", "--standalone", *count, *options]
