"""What a user gets from pip: an installed wheel, without the checkout."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest

from tests.launching import PATIENCE_S

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def distributions(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the wheel and the sdist, made as `make package` makes them."""
    folder = tmp_path_factory.mktemp("dist")
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", str(folder), str(ROOT), cwd=folder)
    return folder


@pytest.fixture(scope="module")
def installed(distributions: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The scripts of an environment with the wheel, and with what it needs from the environment of the tests."""
    environment = tmp_path_factory.mktemp("environment")
    venv.create(environment)
    [wheel] = distributions.glob("*.whl")
    python = environment / "bin/python"
    run(sys.executable, "-m", "pip", "--python", str(python), "install", "--no-deps", "--quiet", str(wheel))
    [packages] = environment.glob("lib/python*/site-packages")
    (packages / "dependencies.pth").write_text(sysconfig.get_path("purelib"))
    return environment / "bin"


def run(*command: str, cwd: Path | None = None) -> str:
    """What a command prints on standard output."""
    variables = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(command, cwd=cwd, env=variables, capture_output=True, text=True, timeout=PATIENCE_S)
    assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def test_the_wheel_holds_the_package_alone(distributions: Path) -> None:
    [wheel] = distributions.glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    assert {name.split("/")[0].partition("-")[0] for name in names} == {"lightning_pipeline"}
    assert {"lightning_pipeline/py.typed", "lightning_pipeline/schedules/report.html"} <= set(names)


def test_the_sdist_holds_what_its_tests_need(distributions: Path) -> None:
    [sdist] = distributions.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True).stdout.split("\n")
    needed = [name for name in tracked if name and (ROOT / name).is_file() and not name.startswith(".github/")]
    assert set(needed) <= names
    assert not [name for name in names if name.endswith(".pyc") or "/logs/" in name]


def test_the_command_runs_outside_of_the_checkout(installed: Path, tmp_path: Path) -> None:
    where = "import lightning_pipeline; print(lightning_pipeline.__file__)"
    assert Path(run(str(installed / "python"), "-c", where, cwd=tmp_path).strip()).is_relative_to(installed.parent)
    told = run(str(installed / "lightning-pipeline"), "draw", "1f1b", "--ranks", "2", cwd=tmp_path)
    assert "0F0" in told and "1B7" in told


@pytest.mark.slow
@pytest.mark.multiprocess
def test_the_demo_runs_outside_of_the_checkout(installed: Path, tmp_path: Path) -> None:
    told = run(str(installed / "lightning-pipeline"), "demo", cwd=tmp_path)
    assert "40 losses: the same bits" in told and "1F0" in told
    report = tmp_path / "lightning-pipeline-demo" / "report.html"
    assert str(report) in told.splitlines()
    assert '"label":"step 40"' in report.read_text()
    assert list(tmp_path.iterdir()) == [report.parent]


SCRIPT = """
from lightning_pipeline import PipelineStrategy

strategy = PipelineStrategy(num_stages=2)
reveal_type(strategy)
PipelineStrategy(num_stages="two")
"""


@pytest.mark.slow
def test_a_type_checker_sees_the_types(installed: Path, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    command = [sys.executable, "-m", "mypy", "--python-executable", str(installed / "python"), str(script)]
    variables = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "MYPYPATH")}
    done = subprocess.run(command, cwd=tmp_path, env=variables, capture_output=True, text=True, timeout=PATIENCE_S)
    assert 'Revealed type is "lightning_pipeline.strategy.pipeline.PipelineStrategy"' in done.stdout, done.stdout
    assert 'Argument "num_stages" to "PipelineStrategy" has incompatible type "str"' in done.stdout
    assert "Found 1 error in 1 file" in done.stdout
