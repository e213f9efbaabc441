"""The automatic cut against equal ones and against all there are: ``python examples/benchmark/balance.py``.

Each cut of a model is trained for some steps, in turns, several times over, and the fastest turn counts, as other work
on the machine only ever makes a step slower. A step is from the first forward to the last backward on the first stage.
"""

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
SAMPLES = 4
"""In a micro-batch."""


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


def train(model: str, cut: dict[str, int] | str, num_stages: int, num_steps: int) -> dict[str, Any]:
    """One turn in this process, one of `num_stages`: the median step and, of an automatic cut, its plan."""
    import lightning as L
    from torch.utils.data import DataLoader

    from balance_models import MODELS, LitModel
    from lightning_pipeline import PipelineStrategy
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

    trainer = L.Trainer(
        accelerator="cpu",
        devices=num_stages,
        strategy=PipelineStrategy(num_stages=num_stages, num_microbatches=num_microbatches),
        max_steps=num_steps,
        callbacks=[Watch()],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    batch = MODELS[model].batch(SAMPLES * num_microbatches)
    trainer.fit(LitModel(MODELS[model], cut), DataLoader(Repeated(batch, num_steps), batch_size=None))
    plan = trainer.strategy.plan  # type: ignore[attr-defined]
    found: dict[str, Any] = {"step": statistics.median(steps[2:])}
    if plan is not None:
        found.update(cut=plan.stage_config, expected=plan.step_seconds)
    return found


def record(model: str, num_stages: int, num_steps: int, num_turns: int, path: Path) -> None:
    """All turns of one model in this process; rank 0 writes down the fastest of each cut."""
    import logging
    import warnings

    import torch

    from balance_models import MODELS, LitModel

    warnings.filterwarnings("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    parts = MODELS[model].parts
    module = LitModel(MODELS[model], {})
    sizes = [sum(p.numel() for p in module.get_submodule(part).parameters()) for part in parts]
    cuts: dict[str, dict[str, int] | str] = {
        "auto": "auto",
        "equal layers": equal_layers(parts, num_stages),
        "equal parameters": equal_parameters(parts, sizes, num_stages),
        **{f"cut {number}": cut for number, cut in enumerate(all_cuts(parts, num_stages))},
    }
    turns: dict[str, list[dict[str, Any]]] = {name: [] for name in cuts}
    for _ in range(num_turns):
        for name, cut in cuts.items():
            turns[name].append(train(model, cut, num_stages, num_steps))
        cuts["auto"] = turns["auto"][0]["cut"]  # it is found once; later turns are of the same cut
    if int(os.environ["RANK"]) == 0:
        fastest = {name: min(found["step"] for found in own) for name, own in turns.items()}
        path.write_text(json.dumps({"steps": fastest, "auto": turns["auto"][0], "cuts": cuts}))


def measure(model: str, num_stages: int, num_steps: int, num_turns: int) -> dict[str, Any]:
    """What `record` has written, from processes of its own."""
    path = os.pathsep.join([str(HERE), str(ROOT / "examples"), str(ROOT), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path}
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(num_stages)]
    with tempfile.TemporaryDirectory() as folder:
        written = Path(folder) / "steps.json"
        task = json.dumps([model, num_stages, num_steps, num_turns, str(written)])
        subprocess.run([*launcher, __file__, "--record", task], env=environment, check=True, stdout=subprocess.DEVNULL)
        return json.loads(written.read_text())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    names = ["residual network", "uneven GPT", "U-Net", "T5", "ViT"]
    parser.add_argument("--models", nargs="+", default=names, choices=names, metavar="NAME")
    parser.add_argument("--num-stages", type=int, default=2)
    parser.add_argument("--num-steps", type=int, default=10)
    parser.add_argument("--num-turns", type=int, default=3)
    parser.add_argument("--record", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.record:
        model, num_stages, num_steps, num_turns, path = json.loads(arguments.record)
        record(model, num_stages, num_steps, num_turns, Path(path))
        return
    table = Table("model", "auto", "expected", "equal layers", "equal parameters", "best of all", "auto / best", "cut")
    for model in arguments.models:
        found = measure(model, arguments.num_stages, arguments.num_steps, arguments.num_turns)
        steps = found["steps"]
        best = min(seconds for name, seconds in steps.items() if name.startswith("cut "))
        table.add_row(
            model,
            *(f"{seconds * 1e3:.1f}" for seconds in (steps["auto"], found["auto"]["expected"])),
            *(f"{steps[name] * 1e3:.1f}" for name in ("equal layers", "equal parameters")),
            f"{best * 1e3:.1f}",
            f"{steps['auto'] / best:.2f}",
            " ".join(found["auto"]["cut"]),
        )
    Console(width=None if sys.stdout.isatty() else 150).print(table)


if __name__ == "__main__":
    main()
