"""Runs a Trainer on several ranks, as a cluster's launcher would, and tells how each rank ended."""

from __future__ import annotations

import multiprocessing
import os
import socket
import time
import traceback
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

PRELOADED = ["lightning.pytorch", "lightning_pipeline.strategy"]


class Ended(NamedTuple):
    """A rank's exception (empty for none), and the seconds from the start of the last rank to its end."""

    error: str
    traceback: str
    seconds: float
    exit_code: int | None


def run_ranks(body: Callable[..., None], *args: Any, world: int = 2, timeout: float = 60.0) -> list[Ended]:
    """Call `body(*args)` on `world` processes in the environment of torchrun, and wait until all have ended."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    pipes = [context.Pipe(duplex=False) for _ in range(world)]
    processes = [
        context.Process(target=_rank, args=(rank, world, port, pipes[rank][1], body, args)) for rank in range(world)
    ]
    for process in processes:
        process.start()
    start = time.monotonic()
    for _, writer in pipes:
        writer.close()
    ends: dict[int, float] = {}
    while len(ends) < world and time.monotonic() - start < timeout:
        ends.update(
            {r: time.monotonic() - start for r, p in enumerate(processes) if p.exitcode is not None and r not in ends}
        )
        time.sleep(0.02)
    ended = []
    for rank, process in enumerate(processes):
        try:
            error, trace = pipes[rank][0].recv()
        except EOFError:
            error, trace = "", ""
        code = process.exitcode
        process.kill()
        ended.append(Ended(error, trace, ends.get(rank, float("inf")), code))
    return ended


def _rank(rank: int, world: int, port: int, pipe: Any, body: Callable[..., None], args: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "GROUP_RANK": "0",
        "WORLD_SIZE": str(world),
        "LOCAL_WORLD_SIZE": str(world),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_RUN_ID": "tests",
    }
    try:
        body(*args)
        pipe.send(("", ""))
    except BaseException as error:
        pipe.send((f"{type(error).__name__}: {error}", traceback.format_exc()))
        raise SystemExit(1) from None
