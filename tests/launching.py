"""Calls a function on several processes, in the environment that a launcher such as torchrun gives."""

from __future__ import annotations

import io
import multiprocessing
import os
import socket
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from typing import Any

import torch

PRELOADED = ["lightning.pytorch", "lightning_pipeline.strategy"]


def launch(function: Callable[..., Any], *args: Any, world: int, timeout: float = 90.0) -> list[Any]:
    """Call `function(*args)` on `world` new processes at once.

    They are forked from a server that has imported Lightning already, so that a launch costs little.

    Returns:
        What the function returned, by rank: nested containers of builtins and CPU tensors.

    Raises:
        AssertionError: a process failed, with its traceback, or did not answer within `timeout` seconds.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    processes, pipes = [], []
    for rank in range(world):
        reader, writer = context.Pipe(duplex=False)
        process = context.Process(target=_rank, args=(rank, world, port, writer, function, args))
        process.start()
        writer.close()
        processes.append(process)
        pipes.append(reader)
    try:
        return _answers(pipes, time.monotonic() + timeout)
    finally:
        for process in processes:
            process.join(5)
            process.kill()


def _answers(pipes: list[Connection], deadline: float) -> list[Any]:
    answers: dict[int, Any] = {}
    errors: dict[int, str] = {}
    while len(answers) + len(errors) < len(pipes):
        open_pipes = [pipe for rank, pipe in enumerate(pipes) if rank not in answers and rank not in errors]
        ready = wait(open_pipes, max(0.0, deadline - time.monotonic()))
        if not ready:
            missing = [rank for rank, pipe in enumerate(pipes) if pipe in open_pipes]
            errors.update(dict.fromkeys(missing, "no answer in time"))
        for pipe in ready:
            rank = pipes.index(pipe)  # type: ignore[arg-type]
            try:
                error, payload = pipes[rank].recv()
            except EOFError:
                error, payload = "ended without an answer", b""
            if error:
                errors[rank] = error
            else:
                answers[rank] = torch.load(io.BytesIO(payload), weights_only=False)
    if errors:
        raise AssertionError("\n".join(f"rank {rank}: {error}" for rank, error in sorted(errors.items())))
    return [answers[rank] for rank in range(len(pipes))]


def _rank(
    rank: int, world: int, port: int, pipe: Connection, function: Callable[..., Any], args: tuple[Any, ...]
) -> None:
    os.environ.update(
        LOCAL_RANK=str(rank),
        NODE_RANK="0",
        WORLD_SIZE=str(world),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        OMP_NUM_THREADS="1",
    )
    torch.set_num_threads(1)
    try:
        buffer = io.BytesIO()
        torch.save(function(*args), buffer)
        pipe.send(("", buffer.getvalue()))
    except BaseException:
        pipe.send((traceback.format_exc(), b""))
        pipe.close()
        os._exit(1)  # other ranks' connections may be half-way: nothing here is to wait for them
