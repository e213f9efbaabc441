"""Real processes for the strategy's parts, connected by a transport over Gloo."""

from __future__ import annotations

import multiprocessing
import traceback
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from lightning_pipeline.runtime.topology import Topology
from lightning_pipeline.runtime.transport import Transport
from tests.launching import PATIENCE_S, free_port


class CountingTransport(Transport):
    """Counts the exchanges."""

    num_calls = 0

    def broadcast_object(self, obj: Any, source: int, what: str) -> Any:
        self.num_calls += 1
        return super().broadcast_object(obj, source, what)

    def all_gather_vector(self, values: torch.Tensor, what: str) -> torch.Tensor:
        self.num_calls += 1
        return super().all_gather_vector(values, what)


def _child(function: Callable[..., Any], stage: int, num_stages: int, port: int, results: Any) -> None:
    torch.set_num_threads(1)
    try:
        timeout = timedelta(seconds=PATIENCE_S)
        store = dist.TCPStore("127.0.0.1", port, num_stages, is_master=stage == 0, timeout=timeout)
        dist.init_process_group("gloo", store=store, rank=stage, world_size=num_stages, timeout=timeout)
        topology = Topology(num_ranks_per_pipeline=num_stages, world_size=num_stages, rank=stage)
        transport = CountingTransport(topology, torch.device("cpu"), timeout, store)
        results.put((stage, None, function(stage, transport)))
        transport.close()
        dist.destroy_process_group()
    except BaseException:
        results.put((stage, traceback.format_exc(), None))


@pytest.fixture
def run_stages() -> Callable[..., list[Any]]:
    """``run_stages(function, num_stages)`` calls ``function(stage, transport)`` in one process a stage.

    Gives what they returned (to be plain numbers or text), by stage.
    """

    def run(function: Callable[..., Any], num_stages: int) -> list[Any]:
        context = multiprocessing.get_context("fork")
        results = context.Queue()
        port = free_port()
        processes = [
            context.Process(target=_child, args=(function, stage, num_stages, port, results), daemon=True)
            for stage in range(num_stages)
        ]
        for process in processes:
            process.start()
        try:
            answers = [results.get(timeout=PATIENCE_S) for _ in processes]
        finally:
            for process in processes:
                process.join(timeout=5)
                process.kill()
        errors = [f"stage {stage}:\n{error}" for stage, error, _ in answers if error]
        assert not errors, "\n".join(errors)
        return [value for _, _, value in sorted(answers, key=lambda answer: answer[0])]

    return run
