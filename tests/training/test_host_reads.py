"""A step reads no tensor's values on the host: on a GPU each read would wait for all that was computed before it."""

from __future__ import annotations

from collections import Counter
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from tests.launching import launch
from tests.training.runs import pipeline_trainer, plain_trainer, weights

WARM_UP = 3
"""Batches before those that are watched: shapes are learnt and optimizer states made in them."""
READS = ("aten::_local_scalar_dense", "aten::nonzero", "aten::is_nonzero", "aten::equal")
SCHEDULES = {"gpipe": 1, "1f1b": 1, "zero_bubble": 1, "interleaved_1f1b": 2}  # with stages a rank


class Logging(L.LightningModule):
    """Logs and clips in each step, as many do."""

    def __init__(self, num_layers: int = 4) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(num_layers)))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = self.layers(batch).square().mean()
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


class CountReads(L.Callback):
    """Counts what reads values in the steps after the warm-up."""

    def __init__(self) -> None:
        self.found: Counter[str] = Counter()
        self.profiler: torch.profiler.profile | None = None

    def on_train_batch_start(self, trainer: L.Trainer, *_: Any) -> None:
        if trainer.global_step >= WARM_UP:
            self.profiler = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU])
            self.profiler.__enter__()

    def on_train_batch_end(self, *_: Any) -> None:
        if self.profiler is not None:
            self.profiler.__exit__(None, None, None)
            self.found.update(event.name for event in self.profiler.events() if event.name.startswith("aten::"))
            self.profiler = None


class ForbidReads(L.Callback):
    """Has a device raise an error at what waits for it in the steps after the warm-up."""

    def __init__(self, accelerator: str) -> None:
        self.device = torch.get_device_module(accelerator)

    def on_train_batch_start(self, trainer: L.Trainer, *_: Any) -> None:
        self.device.set_sync_debug_mode("error" if trainer.global_step >= WARM_UP else "default")

    def on_train_batch_end(self, *_: Any) -> None:
        self.device.set_sync_debug_mode("default")


def batches() -> DataLoader:
    return DataLoader(torch.randn(16 * (WARM_UP + 2), 8, generator=torch.Generator().manual_seed(1)), batch_size=16)


def train(trainer: L.Trainer) -> dict[str, Tensor]:
    trainer.fit(Logging(), batches())
    return {name: tensor.cpu() for name, tensor in weights(trainer).items()}


def on_stages(world: int, schedule: str, callback: L.Callback, **options: Any) -> L.Trainer:
    num_stages = world * SCHEDULES[schedule]
    cuts = {f"layers.{4 * stage // num_stages}": stage for stage in range(1, num_stages)}
    strategy = {"schedule": schedule}
    return pipeline_trainer(
        cuts, world=world, strategy=strategy, callbacks=[callback], max_epochs=1, gradient_clip_val=0.1, **options
    )


def reads_on_stages(schedule: str) -> dict[str, int]:
    callback = CountReads()
    train(on_stages(2, schedule, callback))
    return dict(callback.found)


@pytest.mark.multiprocess
@pytest.mark.parametrize("schedule", [pytest.param(n, marks=[pytest.mark.slow] * (n != "1f1b")) for n in SCHEDULES])
def test_steps_on_stages_read_no_values(schedule: str) -> None:
    for found in launch(reads_on_stages, schedule, world=2):
        assert found["aten::addmm"] or found["aten::linear"]  # the steps were watched
        assert not {name: found[name] for name in READS if name in found}


def forbidden_reads(world: int, schedule: str, accelerator: str) -> dict[str, Tensor]:
    return train(on_stages(world, schedule, ForbidReads(accelerator), accelerator=accelerator))


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.multiprocess
@pytest.mark.parametrize(
    ("world", "schedule"), [(1, "1f1b"), *((2, schedule) for schedule in SCHEDULES)], ids=lambda value: str(value)
)
def test_steps_on_devices_do_not_wait(world: int, schedule: str) -> None:
    found = launch(forbidden_reads, world, schedule, "cuda", world=world)[0]
    plain = train(plain_trainer(accelerator="cuda", max_epochs=1, gradient_clip_val=0.1))
    for name, tensor in plain.items():
        torch.testing.assert_close(
            found[name], tensor, rtol=1e-5, atol=1e-6, msg=lambda text, name=name: f"{name}: {text}"
        )
