"""Calls a function on several processes, in the environment that a launcher such as torchrun gives."""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import io
import itertools
import multiprocessing
import multiprocessing.connection
import os
import signal
import socket
import tempfile
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import torch

from tests import on_device

PRELOADED = ["lightning.pytorch", "lightning_pipeline.strategy", "pytest"]

PATIENCE_S = 300.0
"""How long a test waits for what ought to come. It is there to end a hang: a machine may be slow and busy."""
SOON_S = 60.0
"""What does not wait for a timeout takes less, on a machine that is slow and busy, too."""
AFTER_FAILURE_S = 90.0
"""How long the other ranks of a launch may go on once one of them has failed."""

_LOG_LINES = 60
_WORKER = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
_PORTS = itertools.count(16 * os.getpid() + _WORKER % 16, 16)


class Ended(NamedTuple):
    """How a rank ended.

    Attributes:
        error: its exception in a line, empty for none.
        traceback: of that exception.
        value: what the function returned.
        seconds: from the start of the last rank until it had ended.
        exit_code: None if it had not ended in time.
        log: the end of what it printed and, where it had not ended in time, where each of its threads was.
    """

    error: str
    traceback: str
    value: Any
    seconds: float
    exit_code: int | None
    log: str


def launch(function: Callable[..., Any], *args: Any, world: int, timeout: float = 2 * PATIENCE_S) -> list[Any]:
    """Call `function(*args)` on `world` new processes at once.

    They are forked from a server that has imported Lightning already, so that a launch costs little.

    Returns:
        What the function returned, by rank: nested containers of builtins and CPU tensors.

    Raises:
        AssertionError: a process failed, with its traceback, or did not end within `timeout` seconds. The logs of
            those that did not are in it.
    """
    ended = run_ranks(function, *args, world=world, timeout=timeout)
    errors = [
        f"rank {rank}: {end.traceback or end.error or f'exit code {end.exit_code}'}"
        + (f"\nits log:\n{end.log}" if end.log and not end.traceback else "")
        for rank, end in enumerate(ended)
        if end.error or end.exit_code != 0
    ]
    assert not errors, "\n".join(errors)
    return [end.value for end in ended]


def run_ranks(function: Callable[..., Any], *args: Any, world: int = 2, timeout: float = 2 * PATIENCE_S) -> list[Ended]:
    """As `launch`, for ranks that may fail: how each of them ended, by rank."""
    context = multiprocessing.get_context("forkserver")
    preloaded = [*PRELOADED]
    on_device.prepare(preloaded)
    context.set_forkserver_preload(preloaded)
    port = free_port()
    with tempfile.TemporaryDirectory(prefix="ranks-") as folder:
        logs = [Path(folder) / f"rank{rank}.log" for rank in range(world)]
        processes, pipes = [], []
        for rank in range(world):
            reader, writer = context.Pipe(duplex=False)
            process = context.Process(target=_rank, args=(rank, world, port, writer, logs[rank], function, args))
            process.start()
            writer.close()
            processes.append(process)
            pipes.append(reader)
        try:
            answers, seconds = _answers(pipes, processes, timeout)
            stuck = [process.exitcode is None for process in processes]
            for process, is_stuck in zip(processes, stuck, strict=True):
                if is_stuck:
                    os.kill(process.pid, signal.SIGUSR1)  # which writes to its log where it is
            time.sleep(0.5 * any(stuck))
        finally:
            for process in processes:
                process.kill()
        ended = []
        for rank, (answer, process) in enumerate(zip(answers, processes, strict=True)):
            exit_code = None if stuck[rank] else process.exitcode
            ended.append(Ended(*answer, seconds[rank], exit_code, _end_of(logs[rank])))
        for process in processes:
            process.join()
    return ended


def free_port(first: int = 25_000) -> int:
    """A port that nothing listens on, and that no other worker of pytest is given.

    The system hands out ports from 32768 on its own account. This one is below, so that no connection can take it
    between this probe and its use, and above those that jobs under SLURM and with a rank table have by themselves
    (15000 to 24999).
    """
    while True:
        port = first + next(_PORTS) % 7_680
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


def _answers(
    pipes: list[Connection], processes: list[Any], timeout: float
) -> tuple[list[tuple[str, str, Any]], list[float]]:
    """Each rank's error, its traceback and what it returned; and when it had ended."""
    start = time.monotonic()
    deadline = start + timeout
    answers: list[tuple[str, str, Any]] = [("no answer in time", "", None) for _ in pipes]
    seconds = [timeout] * len(pipes)
    unheard: dict[Any, int] = {pipe: rank for rank, pipe in enumerate(pipes)}
    running: dict[Any, int] = {process.sentinel: rank for rank, process in enumerate(processes)}
    while running and (left := deadline - time.monotonic()) > 0:
        for ready in multiprocessing.connection.wait([*unheard, *running], left):
            if ready in unheard:
                rank = unheard.pop(ready)
                answers[rank] = _answer(pipes[rank])
                failed = bool(answers[rank][0])
            else:
                rank = running.pop(ready)
                seconds[rank] = time.monotonic() - start
                processes[rank].join()
                failed = processes[rank].exitcode != 0
            if failed:
                deadline = min(deadline, time.monotonic() + AFTER_FAILURE_S)
    for rank in unheard.values():
        if pipes[rank].poll():
            answers[rank] = _answer(pipes[rank])
    return answers, seconds


def _answer(pipe: Connection) -> tuple[str, str, Any]:
    try:
        error, trace, payload = pipe.recv()
    except EOFError:
        return "ended without an answer", "", None
    return error, trace, torch.load(io.BytesIO(payload), weights_only=False) if payload else None


def _end_of(log: Path) -> str:
    return "\n".join(log.read_text(errors="replace").splitlines()[-_LOG_LINES:]) if log.exists() else ""


def _rank(
    rank: int,
    world: int,
    port: int,
    pipe: Connection,
    log: Path,
    function: Callable[..., Any],
    args: tuple[Any, ...],
) -> None:
    with log.open("wb", buffering=0) as file:
        for stream in (1, 2):
            os.dup2(file.fileno(), stream)
    faulthandler.register(signal.SIGUSR1, file=2)
    gc.freeze()  # what was imported is there to stay: the collector need not look through it again and again
    os.environ.update(
        LOCAL_RANK=str(rank),
        NODE_RANK="0",
        WORLD_SIZE=str(world),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        OMP_NUM_THREADS="1",
    )
    multiprocessing.set_start_method(None, force=True)  # loaders start their workers as they do in a user's script
    torch.set_num_threads(1)
    on_device.use(rank, world)
    try:
        buffer = io.BytesIO()
        torch.save(function(*args), buffer)
        pipe.send(("", "", buffer.getvalue()))
    except BaseException as error:
        pipe.send((f"{type(error).__name__}: {error}", traceback.format_exc(), b""))
        raise SystemExit(1) from None
