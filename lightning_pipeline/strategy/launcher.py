"""Launches a run's processes by running the script again, under Hydra with the composed configuration."""

import inspect
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar

import torch.distributed as dist
from typing_extensions import override

from lightning_pipeline.runtime.errors import Failure

from .._lightning import ClusterEnvironment, Trainer, _MultiProcessingLauncher, _SubprocessScriptLauncher
from .children import Children, start, watch_launcher
from .lightning_private import share_threads

# The variables that a launch sets in this process. The next job of a sweep must not find them: with LOCAL_RANK set,
# Lightning assumes that somebody else has started the processes.
_VARIABLES = ("LOCAL_RANK", "NODE_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "OMP_NUM_THREADS")


@dataclass
class _Launch:
    """The processes that one Hydra job started, and the environment as it was before."""

    job: str
    environment: dict[str, str | None]
    procs: list[subprocess.Popen]


class PipelineLauncher(_SubprocessScriptLauncher):
    """Lightning's subprocess launcher, with support for Hydra.

    In a script under ``@hydra.main`` the other processes get the overrides of *this* job and its output folder, not the
    sweep's. So ``-m a=1,2`` runs two jobs one after the other, each with processes of its own, and a run has one folder
    however many processes it has.

    Construct it whatever ``cluster_environment.creates_processes_externally`` says: in the second job of a sweep that
    is right only afterwards.
    """

    exit_timeout: ClassVar[float] = 60.0
    """Seconds that the next job of a sweep waits for the processes of the one before."""

    # On the class, as a process has one environment and one default process group; the script's next Trainer uses the
    # same processes.
    _launched: ClassVar[_Launch | None] = None
    _children: ClassVar[Children | None] = None

    def __init__(self, cluster_environment: ClusterEnvironment, num_processes: int, num_nodes: int) -> None:
        super().__init__(cluster_environment, num_processes, num_nodes)
        launched = PipelineLauncher._launched
        if launched is not None and launched.job != _job():
            _forget(launched)

    @property
    @override
    def is_interactive_compatible(self) -> bool:
        """Whether it works in a notebook or at a prompt, as one process does; a RuntimeError tells what else to use."""
        if self.num_processes * self.num_nodes > 1 and not self.cluster_environment.creates_processes_externally:
            raise RuntimeError(
                f"{self.num_processes * self.num_nodes} processes are started by running the script again, and a "
                f'notebook or prompt is none: use strategy="pipeline_notebook" (or PipelineStrategy(start_method='
                f'"fork")), which forks them, or one stage with devices=1, or put the code into a script'
            )
        return True

    @property
    def children(self) -> Children | None:
        """The processes that this one has started; None if none."""
        return self._children

    @override
    def launch(self, function: Callable, *args: Any, trainer: Trainer | None = None, **kwargs: Any) -> Any:
        _pass_on_trust(function, args, trainer)
        self.cluster_environment.validate_settings(num_devices=self.num_processes, num_nodes=self.num_nodes)
        # A single process sets no variables, which the next Trainer would take for those of a launcher.
        if self.num_processes * self.num_nodes > 1 and not self.cluster_environment.creates_processes_externally:
            if self.num_processes > 1:
                _check_script()
            self._call_children_scripts()
        watch_launcher()
        share_threads(self.num_processes)
        children = PipelineLauncher._children if self.num_processes > 1 else None
        if children is None:
            return function(*args, **kwargs)
        children.is_running = True
        try:
            return function(*args, **kwargs)
        except BaseException:
            children.failed = True
            raise
        finally:
            children.is_running = False

    def tell_of_failures(self, report: Callable[[Failure], None]) -> None:
        """From now on, call `report` when a child process ends before the run does."""
        if PipelineLauncher._children is not None:
            PipelineLauncher._children.tell = lambda rank, how: report(Failure(rank, f"its {how}", is_gone=True))

    def end_run(self) -> None:
        """From now on child processes may end."""
        if PipelineLauncher._children is not None:
            PipelineLauncher._children.is_running = False

    @override
    def _call_children_scripts(self) -> None:
        self._check_can_spawn_children()
        hydra, job = _hydra(), _job()
        before = {name: os.environ.get(name) for name in _VARIABLES}
        os.environ.update(
            MASTER_ADDR=self.cluster_environment.main_address,
            MASTER_PORT=str(self.cluster_environment.main_port),
            NODE_RANK=str(self.cluster_environment.node_rank()),
            LOCAL_RANK=str(self.cluster_environment.local_rank()),
            WORLD_SIZE=str(self.num_processes * self.num_nodes),
        )
        first = self.cluster_environment.node_rank() * self.num_processes
        started: dict[int, subprocess.Popen] = {}
        try:
            for local_rank in range(1, self.num_processes):
                arguments = sys.argv[1:] if hydra is None else hydra.arguments(local_rank)
                environment = {**os.environ, "LOCAL_RANK": str(local_rank)}
                folder = None if hydra is None else hydra.get_original_cwd()
                started[first + local_rank] = start([*_program(), *arguments], environment, folder)
            PipelineLauncher._children = Children(started)
        except BaseException:
            for process in started.values():
                process.kill()
            raise
        self.procs = list(started.values())
        if job is not None:
            PipelineLauncher._launched = _Launch(job, before, self.procs)


class ForkLauncher(_MultiProcessingLauncher):
    """Lightning's forking launcher, which here also works after a run in this process."""

    @override
    def launch(self, function: Callable, *args: Any, trainer: Trainer | None = None, **kwargs: Any) -> Any:
        _pass_on_trust(function, args, trainer)
        if dist.is_initialized():  # from that run: a fork would use the group, and wait in it for ever
            dist.destroy_process_group()
        return super().launch(function, *args, trainer=trainer, **kwargs)


def _pass_on_trust(function: Callable, args: tuple[Any, ...], trainer: Trainer | None) -> None:
    """Tell the strategy the ``weights_only`` of the Trainer's function."""
    if trainer is not None:
        given: Any = trainer.strategy
        given.weights_only = inspect.signature(function).bind_partial(*args).arguments.get("weights_only")


def _check_script() -> None:
    """Raise a RuntimeError if there is no script for the other processes to run."""
    import __main__

    script = sys.argv[0]
    path = _absolute(script)
    if __main__.__spec__ is not None or (script and os.path.exists(path)):
        return
    if script in ("", "-", "-c"):
        why = (
            "this process runs none: it is a prompt, a notebook, `python -c` or a worker of pytest-xdist; use a "
            "script, or pytest without -n, or start all processes with torchrun"
        )
    else:
        why = (
            f"there is no {path}: the working directory has changed since this process was started; start it by the "
            "script's absolute path"
        )
    raise RuntimeError(f"the other processes of this run are started by running the script again, and {why}")


def _program() -> list[str]:
    import __main__  # not at the top: by now it is the user's script

    if __main__.__spec__ is not None and __main__.__spec__.name.startswith("joblib."):
        return _sent_to_worker()
    if __main__.__spec__ is not None:
        return [sys.executable, "-m", __main__.__spec__.name]
    return [sys.executable, _absolute(sys.argv[0])]


def _sent_to_worker() -> list[str]:
    """The command of the script whose function runs in this joblib worker, as under hydra/launcher=joblib.

    The worker's main module is joblib's, but the function has come with the globals of its script.
    """
    frame = inspect.currentframe()
    script: list[str] = []
    while frame is not None:
        names = frame.f_globals
        if names.get("__name__") == "__main__" and names is not vars(sys.modules["__main__"]):
            file, package = frame.f_code.co_filename, names.get("__package__")
            path = _absolute(file)
            script = [sys.executable, *(["-m", f"{package}.{Path(path).stem}"] if package else [path])]
        frame = frame.f_back
    if not script:
        raise RuntimeError(
            "the other processes of this run are started by running the script again, and in this worker of joblib's "
            "nothing tells which one: call fit from a function of the script"
        )
    return script


def _hydra() -> ModuleType | None:
    """The functions for Hydra's jobs, if one runs in this process. Else Hydra is not imported: that takes 0.2 s."""
    if "hydra.core.hydra_config" not in sys.modules:
        return None
    from . import hydra_job

    return hydra_job if hydra_job.runs() else None


def _job() -> str | None:
    """Identifies the running Hydra job among the jobs of a sweep; None without Hydra."""
    hydra = _hydra()
    return None if hydra is None else hydra.identity()


def _absolute(path: str) -> str:
    """Under Hydra the working directory may be another one by now."""
    hydra = _hydra()
    return os.path.abspath(path) if hydra is None else hydra.to_absolute_path(path)


def _forget(launched: _Launch) -> None:
    """Wait for the processes of an earlier job, then undo what its launch has changed in this process."""
    for process in launched.procs:
        try:
            process.wait(PipelineLauncher.exit_timeout)
        except subprocess.TimeoutExpired as error:
            raise RuntimeError(
                f"Process {process.pid} of the earlier job ({launched.job}) still runs"
                f" {PipelineLauncher.exit_timeout} s after that job ended on rank 0; the sweep's next job cannot start."
                " Let the script end alike on all ranks."
            ) from error
    # The group's other members are gone, and Lightning would use it for the next job.
    if dist.is_initialized():
        dist.destroy_process_group()
    for name, value in launched.environment.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
    PipelineLauncher._launched = None
