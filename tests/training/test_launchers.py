"""A script runs under Lightning's own launcher and under torchrun, and what it cannot do ends it on every rank."""

from __future__ import annotations

import json
import subprocess
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import lightning as L
import psutil
import pytest
from torch import Tensor

from tests.launching import PATIENCE_S, SOON_S, launch
from tests.scripts import Host
from tests.training.measured import LitLayers, measured_stages, point_loader
from tests.training.runs import pipeline_trainer

pytestmark = pytest.mark.multiprocess

SCRIPT = Path(__file__).with_name("script.py")
LIGHTNING: tuple[str, ...] = ()
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2")


def ended(process: subprocess.Popen[str], folder: Path) -> str:
    """Its output, once it and the process of the other rank are gone."""
    try:
        output = process.communicate(timeout=PATIENCE_S)[0]
    finally:
        process.kill()
    running = {int(file.read_text()) for file in folder.glob("*.pid")}
    assert len(running) == 2
    deadline = time.monotonic() + SOON_S
    while running and time.monotonic() < deadline:
        running = {pid for pid in running if psutil.pid_exists(pid)}
        time.sleep(0.05)
    assert not running, f"still running: {running}"
    return output


def test_lightnings_launcher_and_torchrun_run_a_script(tmp_path: Path) -> None:
    processes = {}
    with closing(Host(SCRIPT, PATIENCE_S)) as host:
        for name, launcher in (("lightning", LIGHTNING), ("torchrun", TORCHRUN)):
            (tmp_path / name).mkdir()
            processes[name] = host.start(launcher, [str(tmp_path / name), "Split"])
        outputs = {name: ended(process, tmp_path / name) for name, process in processes.items()}
    results = {}
    for name, process in processes.items():
        assert process.returncode == 0, outputs[name]
        results[name] = [json.loads((tmp_path / name / f"{rank}.json").read_text()) for rank in (0, 1)]
    assert results["lightning"] == results["torchrun"]
    first, second = results["lightning"]
    assert (first["stage"], second["stage"]) == (0, 1)
    assert first["loss"] == second["loss"] > 0


def test_a_refusal_ends_both_processes_of_a_script(tmp_path: Path) -> None:
    with closing(Host(SCRIPT, PATIENCE_S)) as host:
        process = host.start(LIGHTNING, [str(tmp_path), "ReadsByItself"])
        output = ended(process, tmp_path)
    assert process.returncode != 0
    assert output.count("ValueError: ReadsByItself.training_step takes a dataloader_iter") == 2
    assert not list(tmp_path.glob("*.json"))


class WithIterator(LitLayers):
    """Reads its batches by itself."""

    def training_step(self, dataloader_iter: Any) -> Tensor:
        return super().training_step(next(dataloader_iter)[0], 0)


REFUSED: dict[type[L.LightningModule], tuple[str, str]] = {
    WithIterator: ("dataloader_iter", "let it take (batch, batch_idx)"),
}


def refusals() -> dict[str, str]:
    messages = {}
    for module in REFUSED:
        trainer = pipeline_trainer(measured_stages(2), world=2, max_steps=1)
        with pytest.raises(ValueError) as error:
            trainer.fit(module(), point_loader(8))
        messages[module.__name__] = str(error.value)
    return messages


def test_what_cannot_work_is_refused_at_setup_with_the_way_out() -> None:
    for messages in launch(refusals, world=2):
        for module, (what, way_out) in REFUSED.items():
            assert what in messages[module.__name__]
            assert way_out in messages[module.__name__]
