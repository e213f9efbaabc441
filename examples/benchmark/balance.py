"""The automatic cut against equal ones and against all there are: ``python examples/benchmark/balance.py``.

All cuts of a model are trained for some steps each, in turns. Those that were fastest, the automatic ones and the equal
ones then meet in turns that are counted, in another order each time. Times are medians over these. Of many cuts that
are alike one is always the fastest by chance: in each turn the automatic cut is compared with the one that was the
fastest in all other turns, and the table has the mean of these ratios and its standard error. By ``--clock wall`` a
step is from the first forward to the last backward on the first stage. By ``--clock core`` each stage's forwards and
backwards count with the time that they had a core, and the step is what the schedule makes of the medians; transfers
are free. The memory is the peak of the rank that needs the most.

The cut is found several times, and what is expected is compared with the steps of the same run: a machine may change
its speed between a run's first step, when it is measured, and the others. The table has the medians of these runs.
"""

import argparse
import itertools
import json
import math
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from lightning_pipeline.schedules import build, simulate

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
SAMPLES = 4
"""In a micro-batch."""
FINALISTS = 6
"""Cuts that were fastest in the first turns and are tried again, beside the automatic one and the equal ones."""
AUTOMATIC = 3
"""Times that the automatic cut is found."""


def equal_layers(parts: Sequence[str], num_stages: int) -> dict[str, int]:
    """As many parts on each stage."""
    return {parts[stage * len(parts) // num_stages]: stage for stage in range(1, num_stages)}


def equal_parameters(parts: Sequence[str], sizes: Sequence[int], num_stages: int) -> dict[str, int]:
    """The cut whose largest stage has the fewest parameters."""

    def largest(cuts: tuple[int, ...]) -> int:
        return max(sum(sizes[a:b]) for a, b in itertools.pairwise((0, *cuts, len(parts))))

    cuts = min(itertools.combinations(range(1, len(parts)), num_stages - 1), key=largest)
    return {parts[cut]: stage for stage, cut in enumerate(cuts, 1)}


def all_cuts(parts: Sequence[str], num_stages: int) -> list[dict[str, int]]:
    """Every contiguous cut at the parts."""
    chosen = itertools.combinations(parts[1:], num_stages - 1)
    return [{name: stage for stage, name in enumerate(names, 1)} for names in chosen]


@contextmanager
def core_times() -> Iterator[dict[tuple[str, int], list[float]]]:
    """While entered, notes the time that each forward and backward of this process's stages had a core."""
    from lightning_pipeline.engine.visit import Visit

    times: dict[tuple[str, int], list[float]] = defaultdict(list)
    plain = {kind: getattr(Visit, kind) for kind in ("forward", "backward")}

    def timed(kind: str) -> Callable[[Visit, int], None]:
        def run(stage: Visit, microbatch: int) -> None:
            began = time.thread_time()
            plain[kind](stage, microbatch)
            times[kind, stage.visit].append(time.thread_time() - began)

        return run

    for kind in plain:
        setattr(Visit, kind, timed(kind))
    try:
        yield times
    finally:
        for kind, function in plain.items():
            setattr(Visit, kind, function)


def by_schedule(times: dict[tuple[str, int], list[float]], num_stages: int) -> float:
    """The step that 1F1B makes of all processes' times."""
    import torch.distributed as dist

    gathered: list[Any] = [None] * num_stages
    dist.all_gather_object(gathered, {key: statistics.median(own) for key, own in times.items()})
    together = {key: seconds for one in gathered for key, seconds in one.items()}
    forward, backward = ([together[kind, s] for s in range(num_stages)] for kind in ("forward", "backward"))
    halves = [seconds / 2 for seconds in backward]
    return simulate(build("1f1b", num_stages, 4 * num_stages), forward, halves, halves).makespan


def train(model: str, cut: dict[str, int] | str, num_stages: int, num_steps: int, clock: str) -> dict[str, Any]:
    """One turn in this process, one of `num_stages`: the step and, of an automatic cut, its plan."""
    import lightning as L
    import torch
    from torch.utils.data import DataLoader

    from balance_models import MODELS, LitModel
    from lightning_pipeline import PipelineStrategy
    from step_memory import StepMemory
    from with_lightning import Repeated

    num_microbatches = 4 * num_stages
    spans: list[tuple[float, float]] = []
    steps: list[float] = []

    class Watch(L.Callback):
        def on_train_batch_start(self, trainer: L.Trainer, *_: object) -> None:
            spans.clear()
            trainer.strategy.pipeline.observe = lambda span: spans.append(span[1:])  # type: ignore[attr-defined]

        def on_train_batch_end(self, *_: object) -> None:
            steps.append(max(end for _, end in spans) - min(start for start, _ in spans))

    memory = StepMemory(batch_idx=1) if cut == "auto" else None
    trainer = L.Trainer(
        accelerator="cpu",
        devices=num_stages,
        strategy=PipelineStrategy(num_stages=num_stages, num_microbatches=num_microbatches),
        max_steps=num_steps,
        callbacks=[Watch(), *([memory] if memory else [])],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    batch = MODELS[model].batch(SAMPLES * num_microbatches)
    with core_times() as times:
        trainer.fit(LitModel(MODELS[model], cut), DataLoader(Repeated(batch, num_steps), batch_size=None))
    plan = trainer.strategy.plan  # type: ignore[attr-defined]
    own = [by_schedule(times, num_stages)] if clock == "core" else steps[2:]
    found: dict[str, Any] = {"steps": own}
    if plan is not None and memory is not None:
        peaks: list[Any] = [None] * num_stages
        torch.distributed.all_gather_object(peaks, memory.peak_bytes)
        found.update(cut=plan.stage_config, expected=plan.step_seconds)
        found.update(expected_bytes=max(plan.peak_bytes), peak_bytes=max(peaks))
    return found


def beside_the_best(steps: Sequence[float], every: Sequence[Sequence[float]]) -> tuple[float, float]:
    """A cut's times in some turns beside those of the cut that was the fastest of all in the other turns: the geometric
    mean of their ratios, and its standard error as a share."""

    def without(turn: int) -> Sequence[float]:
        return min(every, key=lambda own: statistics.fmean([*own[:turn], *own[turn + 1 :]]))

    ratios = [math.log(own / without(turn)[turn]) for turn, own in enumerate(steps)]
    return math.exp(statistics.fmean(ratios)), statistics.stdev(ratios) / math.sqrt(len(ratios))


def record(model: str, num_stages: int, num_steps: int, num_turns: int, clock: str, path: Path) -> None:
    """All turns of one model in this process; rank 0 writes down what came of them."""
    import logging
    import warnings

    import torch

    from balance_models import MODELS, LitModel

    warnings.filterwarnings("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    shuffled = random.Random(0)  # alike on all ranks
    parts = MODELS[model].parts
    module = LitModel(MODELS[model], {})
    sizes = [sum(p.numel() for p in module.get_submodule(part).parameters()) for part in parts]

    def turns(cuts: Sequence[tuple[str, ...]], number: int) -> dict[tuple[str, ...], list[float]]:
        """The time of each of these cuts in each of some turns; all ranks agree on it."""
        times: dict[tuple[str, ...], list[float]] = {cut: [] for cut in cuts}
        for _ in range(number):
            for cut in shuffled.sample(cuts, len(cuts)):
                stage_config = {name: stage for stage, name in enumerate(cut, 1)}
                steps = train(model, stage_config, num_stages, num_steps, clock)["steps"]
                times[cut].append(statistics.median(steps))
        found = [times]
        torch.distributed.broadcast_object_list(found)
        return found[0]

    autos = [train(model, "auto", num_stages, 2 * num_steps, clock) for _ in range(AUTOMATIC)]
    every = [tuple(cut) for cut in all_cuts(parts, num_stages)]
    first = turns(every, max(1, num_turns // 4))
    named = {
        "equal layers": tuple(equal_layers(parts, num_stages)),
        "equal parameters": tuple(equal_parameters(parts, sizes, num_stages)),
    }
    others = [tuple(auto["cut"]) for auto in autos]
    fastest = sorted(every, key=lambda cut: statistics.median(first[cut]))[:FINALISTS]
    last = turns(list(dict.fromkeys([*fastest, *others, *named.values()])), num_turns)
    if int(os.environ["RANK"]) == 0:
        step = {cut: statistics.median(times) for cut, times in last.items()}
        contiguous = [cut for cut in every if cut in last]
        for auto in autos:
            own = tuple(auto["cut"])
            auto.update(step=step[own], ratio=beside_the_best(last[own], [last[cut] for cut in contiguous]))
        best = min(contiguous, key=step.__getitem__)
        steps = {name: step[cut] for name, cut in named.items()}
        path.write_text(json.dumps({"steps": steps, "autos": autos, "best": [step[best], best]}))


def measure(model: str, num_stages: int, num_steps: int, num_turns: int, clock: str) -> dict[str, Any]:
    """What `record` has written, from processes of its own."""
    path = os.pathsep.join([str(HERE), str(ROOT / "examples"), str(ROOT), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path}
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(num_stages)]
    with tempfile.TemporaryDirectory() as folder:
        written = Path(folder) / "steps.json"
        task = json.dumps([model, num_stages, num_steps, num_turns, clock, str(written)])
        subprocess.run([*launcher, __file__, "--record", task], env=environment, check=True, stdout=subprocess.DEVNULL)
        return json.loads(written.read_text())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    names = ["residual network", "uneven GPT", "U-Net", "T5", "ViT"]
    parser.add_argument("--models", nargs="+", default=names, choices=names, metavar="NAME")
    parser.add_argument("--num-stages", type=int, default=2)
    parser.add_argument("--num-steps", type=int, default=6)
    parser.add_argument("--num-turns", type=int, default=8, help="that are counted; two at least")
    parser.add_argument("--clock", choices=["wall", "core"], default="wall")
    parser.add_argument("--record", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.record:
        model, num_stages, num_steps, num_turns, clock, path = json.loads(arguments.record)
        record(model, num_stages, num_steps, num_turns, clock, Path(path))
        return
    headers = (
        "auto", "equal layers", "equal parameters", "best of all", "auto / best", "expected / its own run", "MiB",
        "expected MiB", "cut", "best cut",
    )  # fmt: skip
    table = Table("model", *headers)
    for model in arguments.models:
        found = measure(model, arguments.num_stages, arguments.num_steps, arguments.num_turns, arguments.clock)
        autos = found["autos"]
        usual = sorted(autos, key=lambda auto: auto["step"])[len(autos) // 2]
        best, best_cut = found["best"]
        ratios = [auto["expected"] / statistics.median(auto["steps"]) for auto in autos]
        memory = max(autos, key=lambda auto: abs(auto["expected_bytes"] / auto["peak_bytes"] - 1))
        table.add_row(
            model,
            f"{usual['step'] * 1e3:.1f}",
            *(f"{found['steps'][name] * 1e3:.1f}" for name in ("equal layers", "equal parameters")),
            f"{best * 1e3:.1f}",
            "{:.2f} ± {:.2f}".format(*usual["ratio"]),
            f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})",
            *(f"{memory[key] / 2**20:.1f}" for key in ("peak_bytes", "expected_bytes")),
            " ".join(usual["cut"]),
            " ".join(best_cut),
        )
    Console(width=None if sys.stdout.isatty() else 160).print(table)


if __name__ == "__main__":
    main()
