"""Who is intercepted: the thread in which the step runs, and no other."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from lightning_pipeline.partition.interception import Interception
from lightning_pipeline.partition.random import Streams
from lightning_pipeline.partition.stage_config import resolve


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return 2 * x


def test_what_another_thread_does_meanwhile_is_no_part_of_the_step() -> None:
    root = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    interception = Interception(root, resolve(root, {"1": 1}, 2), Streams(torch.device("cpu")))
    seen: list[str] = []

    def note(name: str, *arguments: Any) -> Any:
        seen.append(name)
        return torch.zeros(2)

    def step() -> None:
        Doubled.apply(torch.ones(2))
        with ThreadPoolExecutor(1) as thread:
            assert torch.equal(thread.submit(Doubled.apply, torch.ones(2)).result(), torch.full((2,), 2.0))
            assert thread.submit(root[0], torch.ones(2)).result().requires_grad

    replay: Any = SimpleNamespace(run=lambda step: step(), function=note, inside=False, stage=0, replaced=[])
    with interception.installed(observing=False):
        interception.run(replay, step)
    assert seen == ["Doubled.apply"]
