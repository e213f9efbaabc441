"""Calls a function on several processes, in the environment that a launcher such as torchrun gives."""

from __future__ import annotations

import contextlib
import gc
import io
import itertools
import multiprocessing
import os
import socket
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import torch

PRELOADED = ["lightning.pytorch", "lightning_pipeline.strategy"]

_WORKER = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
_PORTS = itertools.count(16 * os.getpid() + _WORKER % 16, 16)


class Ended(NamedTuple):
    """How a rank ended.

    Attributes:
        error: its exception in a line, empty for none.
        traceback: of that exception.
        value: what the function returned.
        seconds: from the start of the last rank until it, and the ranks before it, had ended.
        exit_code: None if it had not ended in time.
    """

    error: str
    traceback: str
    value: Any
    seconds: float
    exit_code: int | None


def launch(function: Callable[..., Any], *args: Any, world: int, timeout: float = 90.0) -> list[Any]:
    """Call `function(*args)` on `world` new processes at once.

    They are forked from a server that has imported Lightning already, so that a launch costs little.

    Returns:
        What the function returned, by rank: nested containers of builtins and CPU tensors.

    Raises:
        AssertionError: a process failed, with its traceback, or did not end within `timeout` seconds.
    """
    ended = run_ranks(function, *args, world=world, timeout=timeout)
    errors = [
        f"rank {rank}: {end.traceback or end.error or f'exit code {end.exit_code}'}"
        for rank, end in enumerate(ended)
        if end.error or end.exit_code != 0
    ]
    assert not errors, "\n".join(errors)
    return [end.value for end in ended]


def run_ranks(function: Callable[..., Any], *args: Any, world: int = 2, timeout: float = 60.0) -> list[Ended]:
    """As `launch`, for ranks that may fail: how each of them ended, by rank."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    port = free_port()
    processes, pipes = [], []
    for rank in range(world):
        reader, writer = context.Pipe(duplex=False)
        process = context.Process(target=_rank, args=(rank, world, port, writer, function, args))
        process.start()
        writer.close()
        processes.append(process)
        pipes.append(reader)
    start = time.monotonic()
    ended = []
    try:
        for process, pipe in zip(processes, pipes, strict=True):
            error, trace, value = _answer(pipe, start + timeout)
            process.join(max(0.0, start + timeout - time.monotonic()))
            ended.append(Ended(error, trace, value, time.monotonic() - start, process.exitcode))
    finally:
        for process in processes:
            process.kill()
    return ended


def free_port() -> int:
    """A port that nothing listens on, and that no other worker of pytest is given.

    The system hands out ports from 32768 on its own account. This one is below, so that no connection can take it
    between this probe and its use.
    """
    while True:
        port = 10_000 + next(_PORTS) % 20_000
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


def _answer(pipe: Connection, deadline: float) -> tuple[str, str, Any]:
    """A rank's error, its traceback, and what it returned."""
    if not pipe.poll(max(0.0, deadline - time.monotonic())):
        return "no answer in time", "", None
    try:
        error, trace, payload = pipe.recv()
    except EOFError:
        return "ended without an answer", "", None
    return error, trace, torch.load(io.BytesIO(payload), weights_only=False) if payload else None


def _rank(
    rank: int, world: int, port: int, pipe: Connection, function: Callable[..., Any], args: tuple[Any, ...]
) -> None:
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
    try:
        buffer = io.BytesIO()
        torch.save(function(*args), buffer)
        pipe.send(("", "", buffer.getvalue()))
    except BaseException as error:
        pipe.send((f"{type(error).__name__}: {error}", traceback.format_exc(), b""))
        raise SystemExit(1) from None
