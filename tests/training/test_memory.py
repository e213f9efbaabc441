"""Under 1F1B a stage holds few micro-batches, however many a step has; under GPipe it holds them all."""

from __future__ import annotations

import ctypes
import os
import resource
import sys
import weakref
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_pipeline.partition.placeholder import is_absent
from tests.launching import launch
from tests.training.models import LitTokens, gpt_stages, token_loader
from tests.training.runs import pipeline_trainer

pytestmark = pytest.mark.multiprocess

# A process's peak memory only grows, so the schedule that is to need little goes first.
RUNS = (("1f1b", 4), ("1f1b", 20), ("gpipe", 12), ("gpipe", 20))
M_MMAP_THRESHOLD = -3  # of malloc.h
SAMPLES, LENGTH, WIDTH = 8, 1024, 64  # of one micro-batch
ACTIVATION = SAMPLES * LENGTH * WIDTH * 4  # bytes


class LitWide(L.LightningModule):
    """Small batches that become large activations; two layers on each of two stages."""

    stage_config = {"layers.2": 1}

    def __init__(self) -> None:
        super().__init__()
        self.position = nn.Parameter(torch.randn(LENGTH, 1))
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(4))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x = batch[0].unsqueeze(1) * self.position
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.01)


def peaks() -> list[int]:
    """This process's peak memory in bytes so far, after each of RUNS."""
    # Large blocks go back to the system when they are freed, so that the process's memory is what is in use. The
    # strategy leaves the allocator alone where the environment sets it.
    os.environ["MALLOC_MMAP_THRESHOLD_"] = str(128 * 1024)
    ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, 128 * 1024)
    found = []
    for schedule, count in RUNS:
        strategy = {"schedule": schedule, "num_microbatches": count}
        trainer = pipeline_trainer(LitWide.stage_config, world=2, strategy=strategy, max_steps=2)
        data = TensorDataset(torch.ones(2 * count * SAMPLES, WIDTH))
        trainer.fit(LitWide(), DataLoader(data, batch_size=count * SAMPLES))
        found.append(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)
    return found


def held(module: nn.Module) -> list[nn.Parameter]:
    """The parameters whose data is on this rank."""
    return [parameter for parameter in module.parameters() if not is_absent(parameter)]


class LitWatchful(LitTokens):
    """Counts in each step how many gradients of the step before are still alive."""

    def __init__(self) -> None:
        super().__init__()
        self.last: list[weakref.ref[Tensor]] = []
        self.alive: list[int] = []

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.last = [weakref.ref(p.grad) for p in held(self) if p.grad is not None]

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if batch_idx:
            self.alive.append(sum(gradient() is not None for gradient in self.last))
        return super().training_step(batch, batch_idx)


class LooksAtZeroed(L.Callback):
    """Counts the gradients that it is shown before they are zeroed."""

    def __init__(self) -> None:
        self.shown = 0

    def on_before_zero_grad(self, trainer: L.Trainer, pl_module: L.LightningModule, optimizer: Any) -> None:
        self.shown = sum(p.grad is not None for p in held(pl_module))


def last_gradients(world: int) -> dict[str, Any]:
    """How many of the last step's gradients are alive during a step, without and with a callback that is shown them."""
    found: dict[str, Any] = {}
    for callback in (None, LooksAtZeroed()):
        module = LitWatchful()
        callbacks = [callback] if callback else []
        trainer = pipeline_trainer(gpt_stages(world), world=world, callbacks=callbacks, max_steps=3)
        trainer.fit(module, token_loader(24, 8))
        found["watched" if callback else "unseen"] = {"alive": module.alive, "last": len(module.last)}
    return {**found, "shown": callback.shown if callback else 0}


def live_microbatches(world: int) -> dict[Any, Any]:
    """The executor's count of micro-batches that were live at once, for each schedule and number of micro-batches."""
    found: dict[Any, Any] = {"gradients": last_gradients(world)}
    for schedule in ("1f1b", "gpipe"):
        count = 5
        strategy = {"schedule": schedule, "num_microbatches": count}
        trainer = pipeline_trainer(gpt_stages(world), world=world, strategy=strategy, max_steps=1)
        trainer.fit(LitTokens(), token_loader(count, count))
        found[schedule, count] = trainer.strategy.peak_live
    return found


def test_live_microbatches_and_gradients_are_as_few_as_can_be() -> None:
    world = 3
    for rank, found in enumerate(launch(live_microbatches, world, world=world)):
        gradients = found.pop("gradients")
        for (schedule, count), live in found.items():
            assert live == (world - rank if schedule == "1f1b" else count)
        # Lightning zeroes after training_step; a step would take the memory of two steps' gradients till then.
        unseen, watched = gradients["unseen"], gradients["watched"]
        assert unseen["last"] and set(unseen["alive"]) == {0}
        assert set(watched["alive"]) == {watched["last"]} == {gradients["shown"]}


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="the C library's malloc is told to give memory back")
def test_memory_stays_flat_under_1f1b_and_grows_under_gpipe() -> None:
    for rank in launch(peaks, world=2):
        first, last, twelve, all_live = (peak / ACTIVATION for peak in rank)
        assert last - first < 10  # 16 micro-batches more; keeping one tensor of each would be 16
        assert twelve - first > 2 * 8
        assert all_live - twelve > 2 * 8  # both of a stage's layers keep their input for each micro-batch more
