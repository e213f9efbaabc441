"""What code that divides by the number of processes is told, and what is said of a step's parts."""

from __future__ import annotations

from typing import Any
from unittest import mock

import lightning as L
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_pipeline import PipelineStrategy
from lightning_pipeline.strategy import stage_runner
from tests.launching import PATIENCE_S, launch
from tests.training.runs import QUIET

pytestmark = pytest.mark.multiprocess

BATCH = 16  # samples a step, over all replicas


class Data(L.LightningDataModule):
    """Divides its batch by the processes, as public templates do, and asks in every way there is."""

    def __init__(self) -> None:
        super().__init__()
        self.told: dict[str, Any] = {}

    def prepare_data(self) -> None:
        self.told["prepare_data"] = self.trainer.world_size

    def setup(self, stage: str) -> None:
        strategy = self.trainer.strategy
        self.told["setup"] = [self.trainer.world_size, self.trainer.num_devices, strategy.num_processes, self.own()]
        self.told["devices"] = len(self.trainer.device_ids)
        self.batch_size = BATCH // self.trainer.world_size

    def own(self) -> int:
        return self.trainer.strategy.world_size

    def train_dataloader(self) -> Any:
        self.told["train_dataloader"] = self.trainer.world_size
        return DataLoader(TensorDataset(torch.ones(2 * BATCH, 4)), self.batch_size)


class Net(L.LightningModule):
    stage_config = {"layers.1": 1}

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)) for _ in range(2))
        self.told: dict[str, Any] = {}

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.told["training_step"] = self.trainer.world_size
        (x,) = batch
        for layer in self.layers:
            x = layer(x)
        return x.pow(2).mean()

    def on_train_epoch_end(self) -> None:
        self.told["on_train_epoch_end"] = self.trainer.world_size

    def configure_optimizers(self) -> Any:
        self.told["configure_optimizers"] = self.trainer.world_size
        return torch.optim.SGD(self.parameters(), 0.1 * self.trainer.world_size)


def trainer_of(world: int, **options: Any) -> L.Trainer:
    return L.Trainer(strategy=PipelineStrategy(timeout=PATIENCE_S, **options), devices=world, max_epochs=1, **QUIET)


def told(world: int) -> dict[str, Any]:
    net, data = Net(), Data()
    trainer = trainer_of(world, num_microbatches=2)
    with mock.patch.object(stage_runner, "rank_zero_info") as info:
        trainer.fit(net, datamodule=data)
    lines = [call.args[0] for call in info.call_args_list]
    return {**data.told, **net.told, "script": trainer.world_size, "lines": lines, "steps": trainer.global_step}


@pytest.mark.parametrize("replicas", [1, 2])
def test_steps_and_hooks_are_told_of_replicas(replicas: int) -> None:
    for found in launch(told, 2 * replicas, world=2 * replicas):
        assert found["setup"] == [replicas] * 4
        for hook in ("prepare_data", "train_dataloader", "configure_optimizers"):
            assert found.get(hook, replicas) == replicas
        assert found["configure_optimizers"] == found["train_dataloader"] == replicas
        assert found["training_step"] == found["on_train_epoch_end"] == replicas
        assert found["devices"] == found["script"] == 2 * replicas
        assert found["steps"] == 2  # as on one device
        summary, batch_norms = found["lines"]
        share = BATCH // replicas
        assert f"2 stages, {replicas} replica" in summary
        assert f"batch of {share} samples is 2 micro-batches of {share // 2}" in summary
        assert (f"{BATCH} samples a step over 2 replicas" in summary) is (replicas == 2)
        assert "layers.0.1, layers.1.1" in batch_norms and f"micro-batch of {share // 2} samples" in batch_norms


def late(world: int) -> str:
    """stage_config comes in configure_model, after data was set up for one replica."""
    net = Net()
    net.stage_config = None

    def configure_model() -> None:
        net.stage_config = {"layers.1": 1}

    net.configure_model = configure_model  # type: ignore[method-assign]
    trainer = trainer_of(world)
    with pytest.raises(ValueError) as raised:
        trainer.fit(net, datamodule=Data())
    return str(raised.value)


def test_a_number_of_stages_that_comes_too_late_is_told() -> None:
    for message in launch(late, 4, world=4):
        assert "was told of 1 replicas" in message and "num_stages=2" in message
