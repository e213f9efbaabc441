"""The bubble of each schedule, on paper and as measured: ``python examples/benchmark/bubbles.py``."""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

from rich.console import Console
from rich.table import Table

from lightning_pipeline.schedules import build, default_virtual_stages, placement_of, simulate
from processes import SCHEDULES, argument_parser, environment, torchrun

NUM_RANKS = 2


def record(schedule: str, num_microbatches: int, num_steps: int, folder: Path) -> None:
    """Train the GPT in this process, one of `NUM_RANKS`, and write down the timeline's metrics of its steps."""
    import lightning as L
    import torch
    from torch.utils.data import DataLoader

    from lightning_pipeline import PipelineStrategy, PipelineTimeline
    from with_lightning import LitWorkload, Repeated
    from workload import gpt

    torch.set_num_threads(1)
    steps: list[dict[str, float]] = []

    class Collect(L.Callback):
        def on_train_batch_end(self, trainer: L.Trainer, *_: object) -> None:
            logged = {name: float(value) for name, value in trainer.callback_metrics.items() if "pipeline/" in name}
            if logged:
                steps.append(logged)

    workload = gpt(
        num_stages=len(placement_of(schedule, NUM_RANKS, default_virtual_stages(schedule))),
        batch_size=2 * num_microbatches,
    )
    trainer = L.Trainer(
        accelerator="cpu",
        devices=NUM_RANKS,
        strategy=PipelineStrategy(num_stages=NUM_RANKS, num_microbatches=num_microbatches, schedule=schedule),
        max_steps=num_steps,
        callbacks=[PipelineTimeline(dirpath=folder, every_n_steps=1), Collect()],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(LitWorkload(workload), DataLoader(Repeated(workload.batch, num_steps), batch_size=None))
    if trainer.is_global_zero:
        (folder / "steps.json").write_text(json.dumps(steps[3:]))


def measure(schedule: str, num_microbatches: int, num_steps: int) -> list[dict[str, float]]:
    """The timeline's metrics of each counted step."""
    with tempfile.TemporaryDirectory() as folder:
        task = json.dumps([schedule, num_microbatches, num_steps, folder])
        command = [*torchrun(NUM_RANKS), __file__, "--record", task]
        subprocess.run(command, env=environment(), check=True, capture_output=True)
        return json.loads((Path(folder) / "steps.json").read_text())


def main() -> None:
    parser = argument_parser(__doc__, SCHEDULES)
    parser.add_argument("--num-microbatches", type=int, default=8)
    parser.add_argument("--num-steps", type=int, default=15)
    parser.add_argument("--record", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.record:
        schedule, num_microbatches, num_steps, folder = json.loads(arguments.record)
        record(schedule, num_microbatches, num_steps, Path(folder))
        return
    table = Table("schedule", "v", "F = I = W", "with measured times", "measured", "live, simulated", "live, measured")
    for schedule in arguments.schedules:
        v = default_virtual_stages(schedule)
        on_paper = simulate(build(schedule, NUM_RANKS, arguments.num_microbatches, v))
        steps = measure(schedule, arguments.num_microbatches, arguments.num_steps)
        middle = sorted(steps, key=lambda step: step["pipeline/bubble"])[len(steps) // 2]
        live = " ".join(f"{middle[f'pipeline/live_activations/rank{rank}']:g}" for rank in range(NUM_RANKS))
        table.add_row(
            schedule,
            str(v),
            f"{on_paper.bubble:.1%}",
            f"{middle['pipeline/bubble_simulated']:.1%}",
            f"{middle['pipeline/bubble']:.1%}",
            " ".join(map(str, on_paper.peak_live)),
            live,
        )
    Console(width=None if sys.stdout.isatty() else 120).print(table)


if __name__ == "__main__":
    main()
