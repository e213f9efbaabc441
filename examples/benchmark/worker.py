"""One rank of the benchmark: the contenders take turns, and the last rank writes what it measured."""

import json
import logging
import os
import sys
import warnings
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from contenders import Measured, ours, single, torch_pipelining
from workload import Workload, gpt, linear

NUM_WARMUP = 2
"""Steps of every turn that are not counted: shapes are learnt and buffers made in them."""

SCHEDULES = ("1f1b", "gpipe")


def measure(make: Callable[[], Workload], *, num_microbatches: int, num_steps: int, num_rounds: int) -> dict[str, Any]:
    """Seconds of every counted step and the last loss, by contender."""
    counts = {"num_microbatches": num_microbatches, "num_steps": num_steps + NUM_WARMUP}
    seconds: dict[str, list[float]] = defaultdict(list)
    losses: dict[str, float] = {}

    def take_turn(name: str, turn: Callable[[], Measured]) -> None:
        dist.barrier()
        measured = turn()
        seconds[name] += measured.seconds[NUM_WARMUP:]
        losses[name] = measured.loss

    for _ in range(num_rounds):
        # The other ranks wait at the next barrier and leave the cores alone.
        if is_last_rank():
            take_turn("one process", partial(single, make(), **counts))
        else:
            dist.barrier()
        for schedule in SCHEDULES:
            for name, contender in (("torch", torch_pipelining), ("ours", ours)):
                take_turn(f"{name} {schedule}", partial(contender, make(), schedule, **counts))
    return {name: {"seconds": seconds[name], "loss": losses[name]} for name in seconds}


def is_last_rank() -> bool:
    return dist.get_rank() == dist.get_world_size() - 1


def main(settings: dict[str, Any], output: Path) -> None:
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    dist.init_process_group("gloo")
    num_stages = dist.get_world_size()
    sizes = {name: settings[name] for name in ("batch_size", "width", "num_blocks", "length")}
    rounds = {"num_steps": settings["num_steps"], "num_rounds": settings["num_rounds"]}
    small = settings["num_linear_microbatches"]
    results = {
        "gpt": measure(
            lambda: gpt(num_stages=num_stages, **sizes), num_microbatches=settings["num_microbatches"], **rounds
        ),
        "linear": measure(lambda: linear(num_stages=num_stages, batch_size=small), num_microbatches=small, **rounds),
    }
    if is_last_rank():
        output.write_text(json.dumps(results))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(json.loads(sys.argv[1]), Path(sys.argv[2]))
