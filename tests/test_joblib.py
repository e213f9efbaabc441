"""A sweep whose jobs run in workers of joblib's, two at a time, each with processes of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.multiprocess, pytest.mark.slow]

SCRIPT = """
import hydra
import torch
from hydra.core.config_store import ConfigStore
from lightning import LightningModule, seed_everything
from torch.utils.data import DataLoader


class Lit(LightningModule):
    def __init__(self, lr):
        super().__init__()
        self.first, self.second, self.lr = torch.nn.Linear(4, 4), torch.nn.Linear(4, 1), lr

    def training_step(self, batch, batch_idx):
        return self.second(self.first(batch)).pow(2).mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), self.lr)


@hydra.main(version_base="1.3", config_path=None, config_name="config")
def main(config):
    seed_everything(1)
    trainer, module = hydra.utils.instantiate(config.trainer), Lit(config.lr)
    trainer.fit(module, DataLoader(torch.randn(16, 4), 8))
    if trainer.is_global_zero:
        print("\\ntrained", config.lr, trainer.strategy.topology.num_stages, module.second.bias.item(), flush=True)


if __name__ == "__main__":
    strategy = {"_target_": "lightning_pipeline.PipelineStrategy", "stage_config": {"second": 1}}
    options = {"accelerator": "cpu", "devices": 2, "max_epochs": 1, "logger": False, "enable_checkpointing": False}
    trainer = {"_target_": "lightning.Trainer", "strategy": strategy, **options}
    ConfigStore.instance().store("config", {"lr": 0.1, "trainer": trainer})
    main()
"""


def trained(folder: Path, *arguments: str) -> list[str]:
    command = [sys.executable, "script.py", "-m", "lr=0.1,0.2", *arguments]
    variables = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(command, cwd=folder, env=variables, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    return sorted(line for line in done.stdout.splitlines() if line.startswith("trained"))


def test_two_jobs_at_a_time_train_as_one_after_the_other(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    found = trained(tmp_path, "hydra/launcher=joblib", "hydra.launcher.n_jobs=2")
    assert [line.split()[1:3] for line in found] == [["0.1", "2"], ["0.2", "2"]]
    assert found == trained(tmp_path)
