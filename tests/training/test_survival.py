"""Whatever happens to one rank: all end in time and say why, or go on, or save and stop."""

from __future__ import annotations

import math
import os
import re
import shlex
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import lightning as L
import psutil
import pytest
import torch
from lightning.pytorch.callbacks import Callback, Checkpoint, EarlyStopping, ModelCheckpoint, OnExceptionCheckpoint
from lightning.pytorch.profilers import PassThroughProfiler
from lightning.pytorch.utilities.exceptions import SIGTERMException

from lightning_pipeline import PipelineStrategy
from lightning_pipeline.runtime import failure
from lightning_pipeline.runtime.failure import FailureNotice
from tests.launching import PATIENCE_S, SOON_S, launch, run_ranks
from tests.scripts import Host
from tests.training.faulty_script import fit as fit_faulty
from tests.training.measured import LitLayers, measured_stages, point_loader
from tests.training.runs import QUIET, Losses, differing, pipeline_trainer, plain_trainer

pytestmark = pytest.mark.multiprocess

SCRIPT = Path(__file__).with_name("faulty_script.py")
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2", "--max-restarts", "1")


# -- scripts, as a user starts them -----------------------------------------------------------------------------------


class ScriptEnded(NamedTuple):
    """A script's output and exit code, seconds from the fault to its end, and which of its processes were left."""

    output: str
    exit_code: int
    seconds: float
    left: list[int]


def run_script(fault: str, folder: Path) -> ScriptEnded:
    """Under Lightning's own launcher, without a stand-in: how an interpreter ends is part of it."""
    folder.mkdir()
    command = [sys.executable, str(SCRIPT), str(folder), fault]
    environment = {**os.environ, "PYTHONPATH": str(SCRIPT.parents[2]), "OMP_NUM_THREADS": "1"}
    return ended_script(
        subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True), folder
    )


def run_on_host(fault: str, folder: Path, launcher: Sequence[str] = ()) -> ScriptEnded:
    folder.mkdir()
    with closing(Host(SCRIPT, PATIENCE_S)) as host:
        return ended_script(host.start(launcher, [str(folder), fault]), folder)


def ended_script(process: subprocess.Popen[str], folder: Path) -> ScriptEnded:
    try:
        output = process.communicate(timeout=PATIENCE_S)[0]
    finally:
        process.kill()
    seconds = time.time() - float((folder / "fault").read_text())
    pids = [int(file.read_text()) for file in folder.glob("*.pid")]
    return ScriptEnded(output, process.returncode, seconds, [pid for pid in pids if psutil.pid_exists(pid)])


# -- ranks, as a cluster's launcher starts them -----------------------------------------------------------------------


class Met(Callback):
    """`act` on one rank, when the training batch with this number begins or has ended."""

    def __init__(self, act: Callable[[Any], None], *, rank: int, batch: int = 2, at_end: bool = False) -> None:
        self.act, self.rank, self.batch, self.at_end = act, rank, batch, at_end

    def on_train_batch_start(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        self.maybe(trainer, at_end=False)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        self.maybe(trainer, at_end=True)

    def maybe(self, trainer: Any, *, at_end: bool) -> None:
        if at_end == self.at_end and trainer.global_rank == self.rank and trainer.fit_loop.batch_idx == self.batch:
            self.act(trainer)


def fit(*callbacks: Callback, world: int = 2, strategy: dict[str, Any] | None = None, **options: Any) -> None:
    arguments = {"num_stages": 2, "num_microbatches": 4, "timeout": PATIENCE_S, **(strategy or {})}
    strategy = PipelineStrategy(stage_config=measured_stages(2), **arguments)
    saves = any(isinstance(callback, Checkpoint) for callback in callbacks)
    options = {**QUIET, "enable_checkpointing": saves, "max_epochs": 1, **options}
    L.Trainer(strategy=strategy, devices=world, callbacks=list(callbacks), **options).fit(
        LitLayers(), point_loader(64), point_loader(8)
    )


def raise_error(trainer: Any) -> None:
    raise ValueError("the user's own error")


def wait_for(file: Path) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not file.exists() and time.monotonic() < deadline:
        time.sleep(0.02)


def fails_while_saving_on_exceptions(folder: Path) -> None:
    by_error = ModelCheckpoint(folder, "error", save_on_exception=True, every_n_train_steps=10**6)
    fit(Met(raise_error, rank=1), by_error, OnExceptionCheckpoint(folder))


def fails_alike(folder: Path) -> None:
    class Interrupts(Callback):
        def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            if batch_idx == 2:
                torch.save(pl_module.state_dict(), folder / f"{os.getpid()}.weights")
                raise KeyboardInterrupt

    fit(Interrupts(), OnExceptionCheckpoint(folder))


def fails_while_another_sleeps(folder: Path) -> None:
    asleep = folder / "asleep"

    def sleep(trainer: Any) -> None:
        asleep.touch()
        time.sleep(PATIENCE_S)

    def fail(trainer: Any) -> None:
        wait_for(asleep)
        raise_error(trainer)

    fit(Met(fail, rank=1, at_end=True), Met(sleep, rank=0, at_end=True))


def fails_in_a_replica(folder: Path) -> None:
    fit(Met(raise_error, rank=3), world=4)


def fails_at_setup(folder: Path) -> None:
    class Unprepared(Callback):
        def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
            if trainer.global_rank == 1:
                raise ValueError("the user's own error")

    fit(Unprepared())


def wait_shortly(trainer: Any) -> None:
    """From now on this rank waits for the others for 2 s only."""
    trainer.strategy.transport.timeout = timedelta(seconds=2)


@contextmanager
def stopping(folder: Path) -> Iterator[Callable[[Any], None]]:
    """What lets its process stop, until another one is through with this."""
    told = folder / "told"

    def stop(trainer: Any) -> None:
        until_told = f"for i in $(seq 600); do [ -e {shlex.quote(str(told))} ] && break; sleep 0.1; done"
        if trainer is not None:
            trainer.strategy.transport.flush()  # what the other one has to come to before it waits
        subprocess.Popen(["sh", "-c", f"{until_told}; kill -KILL {os.getpid()}"])
        os.kill(os.getpid(), signal.SIGSTOP)

    try:
        yield stop
    finally:
        told.touch()


def hangs(folder: Path) -> None:
    with stopping(folder) as stop:
        fit(Met(wait_shortly, rank=0), Met(stop, rank=1))


def rank_0_hangs(folder: Path) -> None:
    """The store, by which the others would tell of it, is in its process."""
    with stopping(folder) as stop:
        fit(Met(wait_shortly, rank=1), Met(stop, rank=0))


def hangs_where_nothing_times_out(folder: Path) -> None:
    """Lightning waits for ever for the rank that prepares data. Rank 1 is ended there, and touches the file first."""

    class Data(L.LightningDataModule):
        def prepare_data(self) -> None:
            wait_for(folder / "waits")
            stop(None)

        def train_dataloader(self) -> Any:
            return point_loader(16)

    end = FailureNotice._end_process

    def end_and_tell(notice: FailureNotice, found: Any) -> None:
        (folder / "told").touch()
        end(notice, found)

    FailureNotice._end_process = end_and_tell  # type: ignore[method-assign]

    class ShortOfPatienceOnceConnected(PipelineStrategy):
        def setup_environment(self) -> None:
            super().setup_environment()
            if self.global_rank == 1:
                notice = FailureNotice._shared
                assert notice is not None
                limit = timedelta(seconds=2)
                assert FailureNotice.shared(notice._root, rank=1, world_size=2, timeout=limit) is notice

    new_group = torch.distributed.new_group

    def then_wait(*args: Any, **options: Any) -> Any:
        """The group with which Lightning waits for the data; what comes after it does not ask the store."""
        group = new_group(*args, **options)
        if os.environ["LOCAL_RANK"] == "1":
            (folder / "waits").touch()
        return group

    torch.distributed.new_group = then_wait
    vars(failure)["PERIOD_S"] = 0.5  # after which a wait that has begun knows of the shorter limit
    with stopping(folder) as stop:
        strategy = ShortOfPatienceOnceConnected(stage_config=measured_stages(2), num_stages=2, timeout=PATIENCE_S)
        L.Trainer(strategy=strategy, devices=2, **QUIET, max_epochs=1).fit(LitLayers(), Data())


def ends_before_data_is_prepared(folder: Path) -> None:
    """Lightning makes a process group before, by the store that has gone with its host."""

    class Data(L.LightningDataModule):
        def prepare_data(self) -> None:
            raise AssertionError("nobody prepares data")

    class Ends(PassThroughProfiler):  # between the connection of the ranks and the data
        def setup(self, *_: Any, **__: Any) -> None:
            if os.environ["LOCAL_RANK"] == "0":
                os.kill(os.getpid(), signal.SIGKILL)
            deadline = time.monotonic() + PATIENCE_S
            while FailureNotice._shared._host is None and time.monotonic() < deadline:
                time.sleep(0.02)

    strategy = PipelineStrategy(stage_config=measured_stages(2), num_stages=2, timeout=PATIENCE_S)
    L.Trainer(strategy=strategy, devices=2, **QUIET, max_epochs=1, profiler=Ends()).fit(LitLayers(), Data())


def ends_in_a_collective(folder: Path) -> None:
    """What the others are in does not say for whom they wait."""

    def leave_later(trainer: Any) -> None:
        time.sleep(1)  # until they are in it
        os._exit(0)

    leave = Met(leave_later, rank=3, at_end=True)
    waits = [Met(lambda trainer: trainer.strategy.barrier("the test's"), rank=rank, at_end=True) for rank in range(3)]
    fit(leave, *waits, world=4)


def ends_while_folders_are_saved(folder: Path) -> None:
    class Leaves(Callback):
        def on_save_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: Any) -> None:
            if trainer.global_rank == 1:
                os.kill(os.getpid(), signal.SIGKILL)

    strategy = {"save_distributed_checkpoint": True}
    fit(Leaves(), ModelCheckpoint(folder, every_n_train_steps=2), strategy=strategy)


def fails_without_threads(folder: Path) -> None:
    def fail(trainer: Any) -> None:
        def refused(*_: Any, **__: Any) -> None:
            raise RuntimeError("can't start new thread")

        threading.Thread.start = refused  # type: ignore[method-assign]
        raise_error(trainer)

    fit(Met(fail, rank=1))


def fails_without_memory(folder: Path) -> None:
    def fail(trainer: Any) -> None:
        def refused(*_: Any, **__: Any) -> None:
            raise MemoryError

        vars(failure)["traceback"] = SimpleNamespace(
            format_exception=refused, format_exception_only=traceback.format_exception_only
        )
        raise_error(trainer)

    fit(Met(fail, rank=1))


SCENARIOS = {
    "rank 0 hung": (rank_0_hangs, 2),
    "hung for ever": (hangs_where_nothing_times_out, 2),
    "before data": (ends_before_data_is_prepared, 2),
    "in a collective": (ends_in_a_collective, 4),
    "folders": (ends_while_folders_are_saved, 2),
    "threads": (fails_without_threads, 2),
    "memory": (fails_without_memory, 2),
    "saving": (fails_while_saving_on_exceptions, 2),
    "alike": (fails_alike, 2),
    "sleeping": (fails_while_another_sleeps, 2),
    "replicas": (fails_in_a_replica, 4),
    "setup": (fails_at_setup, 2),
    "hung": (hangs, 2),
}
MORE = {"memory", "threads", "replicas", "before data", "in a collective", "folders"}  # as others are


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory, wanted: Any) -> dict[str, Any]:
    """Several at once, as most of their time is waiting."""
    folder = tmp_path_factory.mktemp("survival")

    def scenario(name: str) -> Any:
        body, world = SCENARIOS[name]
        (folder / name).mkdir()
        return run_ranks(body, folder / name, world=world)

    with ThreadPoolExecutor(6) as threads:
        futures = {
            "forked": threads.submit(run_on_host, "raise", folder / "raise"),
            "torchrun": threads.submit(run_on_host, "kill", folder / "kill", TORCHRUN),
            "left": threads.submit(run_on_host, "leave", folder / "leave"),
        }
        if wanted(["interpreted"], ["interpreted"], "script"):
            futures["interpreted"] = threads.submit(run_script, "raise", folder / "interpreted")
        futures.update((name, threads.submit(scenario, name)) for name in wanted(SCENARIOS, MORE, "name"))
        return {"folder": folder, **{name: future.result() for name, future in futures.items()}}


@pytest.mark.parametrize("script", ["forked", pytest.param("interpreted", marks=pytest.mark.slow)])
def test_a_scripts_error_is_told_once_and_ends_it(script: str, ended: Any) -> None:
    output, exit_code, seconds, left = ended[script]
    assert exit_code == 1
    assert seconds < SOON_S
    assert not left
    assert output.count("Traceback (most recent call last)") == 1
    assert "[rank1]: ValueError: the user's own error" in output
    told = [line for line in output.splitlines() if line.startswith("[rank0]")]
    assert len(told) == 1, told
    assert told[0].startswith("[rank0]: stage 1 (rank 1) failed: ValueError: the user's own error; stage 0 (rank 0)")


def test_a_rank_that_ends_with_exit_code_0_in_a_run_has_failed(ended: Any) -> None:
    output, exit_code, seconds, left = ended["left"]
    assert exit_code == 1
    assert seconds < SOON_S
    assert not left
    assert re.search(r"\[rank0\]: stage 1 \(rank 1\) failed: its process \d+ ended with exit code 0; stage 0", output)


def test_torchrun_goes_on_from_the_last_checkpoint_after_a_killed_rank(ended: Any, tmp_path: Path) -> None:
    output, exit_code, _, left = ended["torchrun"]
    assert exit_code == 0, output
    assert not left
    assert "Restoring states from the checkpoint" in output
    assert "stage 1 (rank 1) failed: its process ended or lost its connections" in output
    assert "Traceback" not in output
    uninterrupted = launch(fit_faulty, "none", tmp_path, world=2)[0]
    assert not differing(torch.load(ended["folder"] / "kill" / "weights.pt"), dict(uninterrupted))


def test_an_error_is_told_though_callbacks_want_to_save(ended: Any) -> None:
    first, second = ended["saving"]
    assert second.error == "ValueError: the user's own error"
    assert first.error.startswith("PeerFailedError: stage 1 (rank 1) failed: ValueError")
    assert not list((ended["folder"] / "saving").glob("*.ckpt"))


def test_callbacks_save_where_a_hook_ends_all_ranks_alike(ended: Any) -> None:
    assert [end.exit_code for end in ended["alike"]] == [1, 1]
    saved = torch.load(ended["folder"] / "alike" / "on_exception.ckpt")
    assert saved["global_step"] == 3
    for weights in (ended["folder"] / "alike").glob("*.weights"):
        assert not differing(saved["state_dict"], torch.load(weights))


def test_a_rank_that_does_not_notice_ends_too(ended: Any) -> None:
    sleeping, failed = ended["sleeping"]
    assert failed.error == "ValueError: the user's own error"
    assert sleeping.exit_code == 1
    assert sleeping.error == "ended without an answer"
    assert sleeping.seconds - failed.seconds < SOON_S


@pytest.mark.parametrize("name", [pytest.param("replicas", marks=pytest.mark.slow), "setup"])
def test_an_error_ends_all_ranks(ended: Any, name: str) -> None:
    failed = ended[name][-1 if name == "replicas" else 1]
    assert failed.error == "ValueError: the user's own error"
    for end in ended[name]:
        assert end.exit_code == 1
        assert end.seconds - failed.seconds < SOON_S


def test_a_hung_rank_is_reported(ended: Any) -> None:
    told = ended["hung"][0]
    assert told.exit_code == 1
    assert "stage 0 (rank 0) waited 2 s for the gradients of micro-batch 0 (0B0) from stage 1 (rank 1)" in told.error


def test_a_hung_rank_0_is_reported(ended: Any) -> None:
    told = ended["rank 0 hung"][1]
    assert told.exit_code == 1
    assert "stage 1 (rank 1) waited 2 s for" in told.error
    assert "nothing came: stage 0 (rank 0) does not answer: its process is stopped, or its machine" in told.error


def test_a_rank_is_not_waited_for_where_nothing_times_out(ended: Any) -> None:
    waited = ended["hung for ever"][1]
    assert waited.exit_code == 1
    assert "rank 0 failed: it did not answer within 2 s: its process is stopped" in waited.log


@pytest.mark.slow
@pytest.mark.parametrize("name", ["before data"])
def test_a_rank_that_is_gone_before_data_is_prepared_is_named(ended: Any, name: str) -> None:
    told = ended[name][1]
    assert told.exit_code == 1
    assert told.error.startswith("PeerFailedError: rank 0 failed: its process ended or lost its connections")
    assert "rank 1 was waiting for the rank that prepares data" in told.error


@pytest.mark.slow
@pytest.mark.parametrize("name", ["in a collective"])
def test_a_collective_says_which_rank_is_gone(ended: Any, name: str) -> None:
    for rank, end in enumerate(ended[name][:3]):
        assert "stage 1 (rank 3) failed: its process ended or lost its connections" in end.error
        assert f'(rank {rank}) was waiting for all ranks at the barrier "the test\'s"' in end.error.replace("\n", " ")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["folders"])
def test_a_save_of_folders_says_which_rank_is_gone(ended: Any, name: str) -> None:
    told = ended[name][0]
    assert "stage 1 (rank 1) failed: its process ended or lost its connections" in told.error
    assert "stage 0 (rank 0) was waiting for" in told.error
    # A rank that has gone before the last message to it is noticed there.
    noticed = (f"the checkpoint {ended['folder'] / 'folders'}", "the receipt of a message by stage 1 (rank 1)")
    assert any(what in told.error for what in noticed)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["threads", "memory"])
def test_what_is_short_of_resources_is_told(ended: Any, name: str) -> None:
    told, failed = ended[name]
    assert failed.error == "ValueError: the user's own error"
    assert told.error.startswith("PeerFailedError: stage 1 (rank 1) failed: ValueError")
    assert told.seconds - failed.seconds < SOON_S


# -- SLURM ------------------------------------------------------------------------------------------------------------


def preempted(folder: Path) -> dict[str, Any]:
    """A job that SLURM asks to requeue itself, and ends; then the requeued one."""
    rank = os.environ["LOCAL_RANK"]
    names = {"NTASKS": "2", "NTASKS_PER_NODE": "2", "PROCID": rank, "LOCALID": rank, "NODEID": "0", "JOB_ID": "42"}
    os.environ.update({f"SLURM_{name}": value for name, value in names.items()}, SLURM_JOB_NAME="train")
    os.environ["PATH"] = f"{folder}:{os.environ['PATH']}"
    first, second = Losses(), Losses()
    asked = Met(lambda _: os.kill(os.getpid(), signal.SIGUSR1), rank=1, batch=2)
    ends = [Met(lambda _: os.kill(os.getpid(), signal.SIGTERM), rank=rank, batch=4) for rank in (0, 1)]
    L.seed_everything(1, verbose=False)
    with pytest.raises(SIGTERMException):
        fit(first, asked, *ends, default_root_dir=folder)
    fit(second, default_root_dir=folder)
    return {"first": first.values, "second": second.values}


def test_a_preempted_job_is_saved_requeued_and_resumed(tmp_path: Path) -> None:
    scontrol = tmp_path / "scontrol"
    scontrol.write_text(f'#!/bin/sh\necho "$@" >> {tmp_path}/called\n')
    scontrol.chmod(0o755)
    for rank in launch(preempted, tmp_path, world=2):
        assert len(rank["first"]) == 5  # the batch in which the signal came was the last
        assert len(rank["second"]) == 5  # after the three that the requeued job had saved
    assert (tmp_path / "called").read_text() == "requeue 42\n"
    assert torch.load(tmp_path / "hpc_ckpt_1.ckpt", weights_only=False)["global_step"] == 3


# -- losses that are not finite ---------------------------------------------------------------------------------------


class Diverges(LitLayers):
    """The third batch's loss is NaN, and so are its gradients."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        result = super().training_step(batch, batch_idx)
        if batch_idx == 2:
            result["loss"] = result["loss"] * math.nan
        return result


def diverge(world: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for anomalies in (False, True):
        losses = Losses()
        finite = EarlyStopping("train_loss_step", check_finite=True, check_on_train_epoch_end=True)
        options = {"callbacks": [losses, finite], "max_epochs": 3, "detect_anomaly": anomalies}
        trainer = pipeline_trainer(measured_stages(2), world=2, **options) if world > 1 else plain_trainer(**options)
        try:
            trainer.fit(Diverges(), point_loader(32), point_loader(8))
        except RuntimeError as error:
            found["anomaly"] = str(error)
        else:
            found["losses"], found["stopped"] = losses.values, finite.stopping_reason_message
    return found


def test_nan_losses_surface_as_in_plain_lightning() -> None:
    (plain,) = launch(diverge, 1, world=1)
    assert [math.isnan(loss) for loss in plain["losses"]] == [False, False, True, True]
    for rank in launch(diverge, 2, world=2):
        assert [math.isnan(loss) for loss in rank["losses"]] == [False, False, True, True]
        assert rank["stopped"] == plain["stopped"]
        assert plain["anomaly"] in rank["anomaly"]
