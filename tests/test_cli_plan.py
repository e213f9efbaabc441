"""`lightning-pipeline plan`: a script's model is cut on paper, without devices and without its parameters' memory."""

from __future__ import annotations

import re
import resource
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from lightning_pipeline.cli import app
from lightning_pipeline.partition.stage_config import read_stage_config
from lightning_pipeline.schedules import Action, build, save_chrome_trace, simulate
from tests.launching import launch

SCRIPT = """
import sys
from functools import partial
import lightning as L
import torch
from torch.utils.data import DataLoader, TensorDataset
from zoo.models.gpt import GPT
from zoo.models.language import LitLanguageModel
from lightning_pipeline import PipelineStrategy

blocks = int(sys.argv[1])
net = GPT(vocab_size=64, max_length=16, width={width}, num_blocks=blocks, num_heads=4, tied=True)
module = LitLanguageModel(net=net, optimizer=partial(torch.optim.AdamW, lr=0.1), stage_config={config})
ids = torch.zeros(16, 16, dtype=torch.long)
strategy = PipelineStrategy(num_stages=2, num_microbatches=8)
trainer = L.Trainer(accelerator="gpu", devices=2, strategy=strategy, precision="bf16-true", max_epochs=1)
trainer.fit(module, DataLoader(TensorDataset(ids, ids), batch_size=16))
raise RuntimeError("the script goes on after fit")
"""

runner = CliRunner()


def write(folder: Path, *, width: int = 64, config: str = "None") -> Path:
    path = folder / "train.py"
    path.write_text(SCRIPT.format(width=width, config=config))
    return path


def test_a_plan_of_each_schedule_without_devices(tmp_path: Path) -> None:
    path = write(tmp_path)
    saved, drawn = tmp_path / "plan.yaml", tmp_path / "timeline.json"
    schedules = ["-s", "1f1b", "-s", "zbv", "-s", "interleaved_1f1b"]
    options = [*schedules, "--stages", "2", "--memory", "1GiB", "-o", str(saved), "--draw", str(drawn)]
    result = runner.invoke(app, ["plan", str(path), "6", *options], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    for words in ("8 micro-batches", "1f1b", "zbv", "interleaved_1f1b", "net.blocks", "stage_config = {", "rank 1"):
        assert words in result.output, words
    config = read_stage_config(torch.nn.Linear(1, 1), saved)
    assert config and all(name.startswith("net.") for name in config)
    assert drawn.stat().st_size > 1000
    told = [line for line in result.stderr.splitlines() if line.endswith(" ...")]
    assert told == [
        f"running {path} until it calls Trainer.fit ...",
        "estimating the step of LitLanguageModel on a micro-batch ...",
        *(f"searching the best cut for {n} ({i} of 3) ..." for i, n in enumerate(schedules[1::2], 1)),
    ]


def test_one_schedule_with_unequal_devices(tmp_path: Path) -> None:
    page = tmp_path / "new" / "plan.html"
    options = ["-s", "1f1b", "--speeds", "1,3", "--stages", "2", "--draw", str(page)]
    result = runner.invoke(app, ["plan", str(write(tmp_path)), "8", *options], catch_exceptions=False)
    assert "{'net.blocks.2': 1}" in result.output
    text = page.read_text()
    assert "1f1b: a plan on paper" in text and '"stage_config":{"net.blocks.2":1}' in text and '"kept_bytes":' in text


def recorded(path: Path, times: list[float]) -> Path:
    """What PipelineTimeline writes of two stages with these times in milliseconds, whose sends take none."""
    spans = simulate(build("1f1b", 2, 8), times, times, times).spans
    sent = {"0F": "0SEND_F", "1B": "1SEND_B"}
    rows: list[list[Any]] = [[], []]
    for action, start, stop in chain(*spans):
        rows[action.stage].append((action, start, stop))
        if str(action)[:2] in sent:
            rows[action.stage].append((Action.parse(f"{sent[str(action)[:2]]}{action.microbatch}"), stop, stop))
    return save_chrome_trace(rows, path, unit=1e-3)


def test_modules_to_move_by_the_timeline_of_a_run(tmp_path: Path) -> None:
    """Stage 0 has one block of six and takes a fifth of the other's time."""
    path, saved = write(tmp_path, config="{'net.blocks.1': 1}"), tmp_path / "better.yaml"
    timeline = recorded(tmp_path / "timeline.json", [1.0, 5.0])
    result = runner.invoke(app, ["plan", str(path), "6", "--from-timeline", str(timeline), "-o", str(saved)])
    assert result.exit_code == 0, result.output
    moved = r"move net\.blocks\.1 to net\.blocks\.3\S* from stage 1 to stage 0: expects 8\S+ ms a step in place of 123,"
    assert re.search(moved, result.output)
    (name,) = read_stage_config(torch.nn.Linear(1, 1), saved) or {}
    assert name.startswith("net.blocks.3")


def test_a_timeline_of_no_run_is_refused(tmp_path: Path) -> None:
    spans = simulate(build("1f1b", 2, 8)).spans
    drawn = save_chrome_trace(spans, tmp_path / "drawn.json", unit=1e-3)
    result = runner.invoke(app, ["plan", str(write(tmp_path)), "6", "--from-timeline", str(drawn)])
    assert result.exit_code == 2
    assert "is of a simulation" in " ".join(result.output.split())


def test_what_does_not_fit_says_by_how_much(tmp_path: Path) -> None:
    result = runner.invoke(app, ["plan", str(write(tmp_path)), "6", "--stages", "2", "--memory", "100KiB"])
    assert result.exit_code == 2
    assert "the model does not fit" in result.output and "are missing" in result.output


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--memory", "64 parsecs"], "--memory takes a size such as 64GiB"),
        (["--memory", "1GiB,2GiB,3GiB", "--stages", "2"], "--memory has 3 sizes for 2 devices"),
        (["--speeds", "1,0", "--stages", "2"], "--speeds takes one number above 0 for each of 2 devices"),
        (["--speeds", "1,nan", "--stages", "2"], "--speeds takes one number above 0 for each of 2 devices"),
        (["--memory", "."], "--memory takes a size such as 64GiB"),
        (["--draw", "timeline.pdf"], "cannot draw timeline.pdf"),
        (["--draw", "new.svg", "--from-timeline", "old.json"], "leave one of them out"),
        (["-s", "2f2b"], "schedule is one of"),
    ],
)
def test_mistakes(tmp_path: Path, options: list[str], words: str) -> None:
    result = runner.invoke(app, ["plan", str(write(tmp_path)), "6", *options])
    assert result.exit_code == 2
    assert words in result.output


def test_a_script_without_fit(tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_text("print('nothing')")
    result = runner.invoke(app, ["plan", str(path)])
    assert result.exit_code == 2
    assert "ended without a call of Trainer.fit" in result.output


def planned(path: str) -> tuple[str, int]:
    """What is printed, and this process's peak memory in KiB."""
    result = runner.invoke(app, ["plan", path, "12", "-s", "1f1b"], catch_exceptions=False)
    return result.output, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


@pytest.mark.slow
@pytest.mark.multiprocess
def test_a_model_that_fits_nowhere_takes_little_memory(tmp_path: Path) -> None:
    """Twelve blocks of width 4096 have 2.4 billion parameters, 4.8 GB."""
    [(output, peak)] = launch(planned, str(write(tmp_path, width=4096)), world=1)
    assert "2.42 billion parameters" in output
    assert peak < 1.5e6


@pytest.mark.slow
def test_activations_in_host_memory(tmp_path: Path) -> None:
    """Of a plan under GPipe three micro-batches' activations are on a device, and not eight."""
    path, peaks = write(tmp_path), []
    for more in ([], ["--offload-activations", "1", "--host-gbps", "1000"]):
        result = runner.invoke(
            app, ["plan", str(path), "6", "-s", "gpipe", "--stages", "2", *more], catch_exceptions=False
        )
        assert result.exit_code == 0, result.output
        [told] = re.findall(r"peak memory of each rank: ([\d.]+) MiB", result.output)
        peaks.append(float(told))
    assert peaks[1] < 0.7 * peaks[0]  # parameters and optimizer states take 1.4 MiB of both
    assert "rank 0: 3 live at once, waits" in result.output
