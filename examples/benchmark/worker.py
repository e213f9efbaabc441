"""One process of one contender's turn; that of the last stage writes what it measured."""

import importlib
import json
import os
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from contenders import Contender, Plan, Unavailable
from workload import Workload, gpt, linear

NUM_WARMUP = 2
"""Steps of every turn that are not counted: shapes are learnt and buffers made in them."""

# Imported by name, so that no contender's process holds another's libraries.
MODULES = {
    "one process": "one_process",
    "lightning": "with_lightning",
    "torch": "with_torch",
    "ours": "with_lightning",
}


def take_turn(contender: Contender, workload: Workload, plan: Plan) -> dict[str, Any]:
    """Seconds of every counted step and the last loss, or why there are none."""
    try:
        measured = importlib.import_module(MODULES[contender.who]).train(workload, plan)
    except Unavailable as error:
        return {"unavailable": str(error)}
    return {"seconds": measured.seconds[NUM_WARMUP:], "loss": measured.loss}


def main(settings: dict[str, Any], output: Path) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    contender = Contender(settings["who"], settings["schedule"])
    num_ranks = settings["num_stages"]
    placement = contender.placement(num_ranks)
    sizes = {name: settings[name] for name in ("batch_size", "width", "num_blocks", "length")}
    num_samples = settings["num_linear_microbatches"]
    workloads = {
        "gpt": (gpt(num_stages=len(placement), **sizes), settings["num_microbatches"]),
        "linear": (linear(num_layers=max(num_ranks, len(placement)), batch_size=num_samples), num_samples),
    }
    num_steps, num_replicas = settings["num_steps"] + NUM_WARMUP, settings["num_replicas"]
    results = {}
    for name in settings["workloads"]:
        workload, num_microbatches = workloads[name]
        plan = Plan(contender.schedule or "", placement, num_microbatches, num_steps, num_replicas)
        results[name] = take_turn(contender, workload, plan)
    if int(os.environ.get("RANK", "0")) == placement[-1] * num_replicas:
        output.write_text(json.dumps(results))
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()


if __name__ == "__main__":
    main(json.loads(sys.argv[1]), Path(sys.argv[2]))
