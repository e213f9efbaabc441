"""Ranks that wait for one another are told so, and those that only wait long are not."""

from __future__ import annotations

import os
import threading
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_pipeline import PipelineStrategy
from lightning_pipeline.runtime import deadlock
from lightning_pipeline.runtime.deadlock import Waits
from lightning_pipeline.runtime.store import BoundedStore
from tests.launching import SOON_S, run_ranks

ROUTE = "0/1"


class Ranks:
    """Ranks of one process, with a stream between each two of them, whose messages are only counted."""

    def __init__(self, number: int) -> None:
        self.store = BoundedStore(dist.HashStore(), rank=0, limit=timedelta(seconds=10))
        self.waits = [Waits(rank, "rank {}".format) for rank in range(number)]
        self.streams = {
            (rank, peer): SimpleNamespace(is_closed=False, route="", num_sent=0, num_received=0)
            for rank in range(number)
            for peer in range(number)
            if peer != rank
        }
        for rank, waits in enumerate(self.waits):
            own: Any = {(peer, 1): stream for (owner, peer), stream in self.streams.items() if owner == rank}
            waits.add(own)

    def message(self, rank: int, what: str, source: int) -> Any:
        return self.waits[rank].for_message(f"{what} from", source, ROUTE)

    def look(self, times: int = 6) -> list[str]:
        """Let all ranks look some times. Returns what each has found."""
        for _ in range(times):
            for waits in self.waits:
                waits.look(self.store)
        return [waits.message for waits in self.waits]


def test_two_that_wait_for_one_another() -> None:
    ranks = Ranks(2)
    with ranks.message(0, "a read", 1), ranks.message(1, "a batch", 0):
        first, second = ranks.look()
    assert first == second
    assert "rank 0 waits for a read from rank 1; rank 1 waits for a batch from rank 0" in first


def test_a_circle_and_one_that_waits_beside_it() -> None:
    ranks = Ranks(4)
    with ranks.message(0, "a", 1), ranks.message(1, "b", 2), ranks.message(2, "c", 0), ranks.message(3, "d", 0):
        found = ranks.look()
    assert found[0] == found[1] == found[2] and "rank 2 waits for c" in found[0]
    assert not found[3]


def test_a_message_that_is_on_its_way() -> None:
    ranks = Ranks(2)
    ranks.streams[1, 0].num_sent = 1
    with ranks.message(0, "a read", 1), ranks.message(1, "a batch", 0):
        assert ranks.look() == ["", ""]
        ranks.streams[0, 1].num_received = 1  # it was another one
        assert all(ranks.look())


def test_waits_that_follow_one_another() -> None:
    ranks = Ranks(2)
    for _ in range(6):
        with ranks.message(0, "a read", 1), ranks.message(1, "a batch", 0):
            assert ranks.look(2) == ["", ""]


def test_a_rank_that_computes() -> None:
    ranks = Ranks(2)
    with ranks.message(0, "a read", 1):
        assert ranks.look() == ["", ""]


def test_another_thread_may_wait() -> None:
    ranks = Ranks(2)
    waiting, is_over = threading.Event(), threading.Event()

    def wait() -> None:
        with ranks.message(1, "a batch", 0):
            waiting.set()
            is_over.wait()

    thread = threading.Thread(target=wait)
    thread.start()
    waiting.wait()
    with ranks.message(0, "a read", 1):
        found = ranks.look()
    is_over.set()
    thread.join()
    assert found == ["", ""]


def test_one_waits_for_a_message_and_one_for_all() -> None:
    ranks = Ranks(2)
    with ranks.message(0, "a read", 1), ranks.waits[1].for_all("the end"):
        assert "rank 1 waits for the end with all ranks" in ranks.look()[0]


def test_one_has_already_come_to_what_the_other_waits_for() -> None:
    ranks = Ranks(3)
    with ranks.waits[0].for_all("the end"):
        pass
    with ranks.message(0, "a read", 1), ranks.waits[1].for_all("the end"):
        assert ranks.look() == ["", "", ""]  # rank 1 waits for rank 2


class GoesByProcess(LightningModule):
    """One rank alone reads a value of another one's."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))

    def training_step(self, batch: Tensor) -> Tensor:
        loss = self.layers(batch).mean()
        if os.environ["LOCAL_RANK"] == "0" and loss > 0:
            return loss * 2
        return loss

    def on_train_batch_start(self, batch: Tensor, index: int) -> None:
        if os.environ["LOCAL_RANK"] == "0" and self.trainer.max_epochs == 2:
            print(float(self.layers[1].weight.sum()))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters())


def fit(epochs: int) -> None:
    deadlock.LOOK_S = 0.3
    strategy = PipelineStrategy(num_microbatches=2, stage_config={"layers.1": 1}, timeout=300)
    options: dict[str, Any] = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar"), False)
    trainer = Trainer(strategy=strategy, accelerator="cpu", devices=2, max_epochs=epochs, **options)
    trainer.fit(GoesByProcess(), DataLoader(torch.ones(8, 4), batch_size=4))


@pytest.mark.multiprocess
@pytest.mark.parametrize(("epochs", "line"), [(1, "and loss > 0"), (2, "self.layers[1].weight.sum()")])
def test_code_that_goes_by_the_process(epochs: int, line: str) -> None:
    ended = run_ranks(fit, epochs, world=2)
    assert max(end.seconds for end in ended) < SOON_S
    assert all("wait for one another" in end.error and line in end.error for end in ended)
