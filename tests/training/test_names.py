"""Programs that `import pytorch_lightning`, `lightning`, or both train on stages, and alike."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from tests.launching import free_port, launch

pytestmark = pytest.mark.multiprocess

SCRIPT = Path(__file__).with_name("names_script.py")
TIMEOUT_S = 120
PYTORCH_LIGHTNING, LIGHTNING = "pytorch_lightning", "lightning.pytorch"
REFERENCE = (1, PYTORCH_LIGHTNING)
RUNS = ((2, PYTORCH_LIGHTNING), (2, LIGHTNING, PYTORCH_LIGHTNING))
MORE = RUNS[1:]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory, wanted: Any) -> dict[tuple[Any, ...], list[dict[str, Any]]]:
    """What each rank of each run has found, and that of one stage."""
    folder = tmp_path_factory.mktemp("names")

    def run(*names: str) -> dict[tuple[Any, ...], list[dict[str, Any]]]:
        numbers = [number for number in (1, 2) if (number, *names) in (REFERENCE, *RUNS)]
        command = [sys.executable, "-W", "ignore", str(SCRIPT), str(folder), str(free_port())]
        command += [",".join(map(str, numbers)), *names]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.getcwd()}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S)
        assert done.returncode == 0, done.stderr[-4000:]
        return {
            (number, *names): [
                torch.load(folder / f"{'+'.join(names)}-{number}-{rank}.pt", weights_only=False)
                for rank in range(number)
            ]
            for number in numbers
        }

    ended: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for _, *names in wanted(RUNS, MORE, "run"):
        ended |= run(*names)
    return ended


@pytest.mark.parametrize("run", [RUNS[0], *(pytest.param(run, marks=pytest.mark.slow) for run in MORE)])
def test_two_stages_give_the_bits_of_one_by_each_name(run: tuple[Any, ...], found: dict[tuple[Any, ...], Any]) -> None:
    [reference] = found[REFERENCE]
    expected = reference[PYTORCH_LIGHTNING]
    assert expected["own"] and len(expected["seen"]) == 6
    for of_rank in found[run]:
        for name in run[1:]:
            of_name = of_rank[name]
            assert of_name["own"] and of_name["drawn"]
            for what in ("weights", "loaded", "metrics"):
                assert of_name[what].keys() == expected[what].keys()
                for key, value in expected[what].items():
                    assert torch.equal(of_name[what][key], value), (name, what, key)
            assert of_name["seen"] == expected["seen"] and of_name["validated"] == expected["validated"]


def mixed_up() -> list[str]:
    """What Trainers of each name say of modules, and of data, of the other one."""
    import lightning.pytorch
    import pytorch_lightning

    import lightning_pipeline  # noqa: F401

    def modules(pl: Any) -> tuple[Any, Any]:
        class Net(pl.LightningModule):  # type: ignore[name-defined,misc]
            def __init__(self) -> None:
                super().__init__()
                self.layer = nn.Linear(2, 2)

            def training_step(self, batch: Any, batch_idx: int) -> None: ...

            def configure_optimizers(self) -> None: ...

        class Data(pl.LightningDataModule):  # type: ignore[name-defined,misc]
            def train_dataloader(self) -> DataLoader:
                return DataLoader([0.0])  # type: ignore[arg-type]

        return Net(), Data()

    told = []
    for own, other in ((lightning.pytorch, pytorch_lightning), (pytorch_lightning, lightning.pytorch)):
        for passed in ((modules(other)[0], DataLoader([0.0])), (modules(own)[0], modules(other)[1])):  # type: ignore[arg-type]
            trainer = own.Trainer(strategy="pipeline", devices=1, accelerator="cpu", logger=False)
            with pytest.raises(TypeError) as error:
                trainer.fit(*passed)
            told.append(str(error.value))
    return told


def test_what_is_of_the_other_name_says_which_import_to_change() -> None:
    [told] = launch(mixed_up, world=1)
    ways = [(LIGHTNING, PYTORCH_LIGHTNING)] * 2 + [(PYTORCH_LIGHTNING, LIGHTNING)] * 2
    for line, (own, other), name in zip(told, ways, ["LightningModule", "LightningDataModule"] * 2, strict=True):
        assert f"You passed a `{other}` object" in line and f"to a `{own}` Trainer" in line
        assert f"`from {own} import {name}`" in line
