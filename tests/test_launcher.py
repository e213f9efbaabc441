"""The launcher starts the other processes with the composed run: one folder a run, one set of processes a job."""

import json
import os
import re
import subprocess
import sys
from contextlib import closing
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

import pytest
from lightning.fabric.plugins.environments import LightningEnvironment

from lightning_pipeline.strategy.launcher import PipelineLauncher
from tests.launching import PATIENCE_S, launch
from tests.scripts import Host

HYDRA_SCRIPT = """
import json, os, sys
from pathlib import Path

import hydra
import lightning as L
from hydra.core.hydra_config import HydraConfig
from hydra.utils import get_original_cwd
from lightning.pytorch.demos.boring_classes import BoringModel
from lightning.pytorch.strategies import DDPStrategy
from omegaconf import OmegaConf

from lightning_pipeline.strategy.launcher import PipelineLauncher


class Strategy(DDPStrategy):
    def _configure_launcher(self):
        self._launcher = PipelineLauncher(self.cluster_environment, self.num_processes, self.num_nodes)


@hydra.main(version_base=None, config_path="conf", config_name="config")
def main(cfg):
    trainer = L.Trainer(
        accelerator="cpu", devices=2, strategy=Strategy(process_group_backend="gloo"), max_steps=1, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False, limit_test_batches=1,
        limit_val_batches=0,
    )
    model = BoringModel()
    trainer.fit(model)
    trainer.test(model, verbose=False)
    seen = dict(config=OmegaConf.to_container(cfg, resolve=True), world_size=trainer.world_size,
                cwd=os.getcwd(), original=get_original_cwd(), port=os.environ["MASTER_PORT"])
    folder = Path(HydraConfig.get().runtime.output_dir)
    (folder / f"rank{trainer.global_rank}.json").write_text(json.dumps(seen))


if __name__ == "__main__":
    main()
"""


def run(*args: str, cwd: Path) -> str:
    """Runs Python in ``cwd`` and returns its output; a failure shows it."""
    done = subprocess.run([sys.executable, *args], cwd=cwd, text=True, capture_output=True, timeout=PATIENCE_S)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def seen_by(folder: Path) -> list[dict[str, Any]]:
    return [json.loads((folder / f"rank{rank}.json").read_text()) for rank in (0, 1)]


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A folder with a package ``job``, its configuration, and a second configuration folder."""
    files = {
        "job/__init__.py": "",
        "job/train.py": HYDRA_SCRIPT,
        "job/conf/config.yaml": "value: none\nnumber: 0\n",
        "job/conf/other.yaml": "value: other\nnumber: ${hydra:job.num}\n",
        "more/extra/blue.yaml": "color: blue\n",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


@pytest.mark.multiprocess
def test_a_sweep_runs_each_job_once_with_its_own_processes(project: Path) -> None:
    flags = ["--config-name", "other", "--config-dir", "more"]
    sweep = ["-m", "+extra=blue", "value=1,2", "hydra.sweep.dir=sweep", "hydra.job.chdir=true"]
    with closing(Host(project / "job/train.py", PATIENCE_S)) as host:
        process = host.start([], [*flags, *sweep], cwd=project)
        output = process.communicate(timeout=PATIENCE_S)[0]
    assert process.returncode == 0, output

    ports = set()
    for job, value in enumerate((1, 2)):
        folder = project / "sweep" / str(job)
        first, second = seen_by(folder)
        for rank in (first, second):
            assert rank["config"] == {"value": value, "number": job, "extra": {"color": "blue"}}
            assert rank["world_size"] == 2
            assert rank["original"] == str(project)
            assert rank["cwd"] == str(folder)
        assert first["port"] == second["port"]
        ports.add(first["port"])
        assert sorted(p.name for p in folder.iterdir() if p.suffix == ".log") == ["train.log", "train_rank1.log"]
    assert len(ports) == 2
    folders = sorted(str(p.relative_to(project)) for p in project.glob("**/.hydra"))
    assert folders == ["sweep/0/.hydra", "sweep/1/.hydra"]
    assert not (project / "outputs").exists() and not (project / "multirun").exists()


@pytest.mark.multiprocess
@pytest.mark.slow
def test_a_module_runs_and_odd_characters_survive(project: Path) -> None:
    folder = project / "out" / "value='it is',n=1"
    quoted = str(folder).replace("'", "\\'")
    run("-m", "job.train", "value='a b=c,d'", f"hydra.run.dir='{quoted}'", cwd=project)
    assert [rank["config"]["value"] for rank in seen_by(folder)] == ["a b=c,d"] * 2
    assert list(project.glob("**/.hydra")) == [folder / ".hydra"]


def commands(module: str | None, *argv: str) -> list[Any]:
    """What a launch of three processes starts from a script that was called so: arguments, LOCAL_RANK, folder.

    Args:
        module: that was run by `python -m`, None for a file.
    """
    started = []

    class Recorder:
        returncode = 0

        def __init__(self, args: list[str], env: dict[str, str], cwd: str | None) -> None:
            started.append((args, env["LOCAL_RANK"], cwd))

        def poll(self) -> int:
            return self.returncode

    del os.environ["LOCAL_RANK"]  # with it, the processes are there already
    sys.argv = list(argv)
    sys.modules["__main__"].__spec__ = None if module is None else ModuleSpec(module, None)
    subprocess.Popen = Recorder  # type: ignore[misc,assignment]
    try:
        PipelineLauncher(LightningEnvironment(), 3, 1).launch(lambda: None)
    except RuntimeError as error:
        return [str(error)]
    return started


@pytest.mark.multiprocess
@pytest.mark.parametrize("module", [None, "pytest.__main__"])
def test_without_hydra_the_command_is_lightnings(module: str | None, tmp_path: Path) -> None:
    script = tmp_path / "plain.py"
    script.touch()
    [started] = launch(commands, module, str(script), "--lr", "1", world=1)
    command = [sys.executable, *([str(script)] if module is None else ["-m", module]), "--lr", "1"]
    # Behind what ends them with the process that starts them.
    assert [(args[-len(command) :], *others) for args, *others in started] == [
        (command, "1", None),
        (command, "2", None),
    ]


@pytest.mark.multiprocess
@pytest.mark.parametrize(
    ("script", "words"),
    [
        ("-c", "this process runs none: it is a prompt, a notebook, `python -c` or a worker of pytest-xdist; use a"),
        ("", "this process runs none: "),
        ("job/gone.py", "there is no /.*/job/gone.py: the working directory has changed .* by the script's absolute "),
    ],
)
def test_what_cannot_be_run_again_is_told(script: str, words: str) -> None:
    [[message]] = launch(commands, None, script, world=1)
    assert re.search(f"are started by running the script again, and {words}", message)
