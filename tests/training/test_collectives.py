"""torch.distributed in steps and hooks, as code that was written for DDP calls it: replicas are its world."""

from __future__ import annotations

from typing import Any

import lightning as L
import pytest
import torch
import torch.distributed as dist
import torch.distributed.nn as distributed_nn
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from lightning_pipeline import PipelineStrategy
from tests.launching import PATIENCE_S, launch
from tests.training.runs import QUIET

pytestmark = pytest.mark.multiprocess

SAMPLES, WIDTH = 32, 8


class Gathered(torch.autograd.Function):
    """The features of all ranks, with gradients, as SimCLR's implementations have it."""

    @staticmethod
    def forward(ctx: Any, features: Tensor) -> tuple[Tensor, ...]:
        parts = [torch.zeros_like(features) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, features)
        return tuple(parts)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        total = torch.stack(gradients)
        dist.all_reduce(total)
        return total[dist.get_rank()]


class Net(L.LightningModule):
    stage_config = {"last": 1}

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(WIDTH, 16), nn.Linear(16, WIDTH)
        self.register_buffer("center", torch.zeros(1, WIDTH))
        self.losses: list[Tensor] = []
        self.found: list[Any] = []

    def train_dataloader(self) -> Any:
        data = TensorDataset(torch.randn(SAMPLES, WIDTH, generator=torch.Generator().manual_seed(1)))
        return DataLoader(data, self.trainer.batch_size, sampler=self.sampler(data))  # type: ignore[attr-defined]

    def sampler(self, data: Any) -> Any:
        return DistributedSampler(data, shuffle=False)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(self.last(self.first(batch[0]).relu()))
        self.losses.append(loss.detach())
        return loss

    def loss(self, features: Tensor) -> Tensor:
        with torch.no_grad():  # DINO's centre
            self.center = 0.9 * self.center + 0.1 * self.mean(features)
        return (features - self.center).pow(2).mean() + self.contrast(features, torch.cat(Gathered.apply(features)))

    def mean(self, features: Tensor) -> Tensor:
        total = features.sum(0, keepdim=True)
        dist.all_reduce(total)
        return total / (len(features) * dist.get_world_size())

    def contrast(self, features: Tensor, gathered: Tensor) -> Tensor:
        return F.cross_entropy(features @ gathered.T, torch.arange(len(features)) + len(features) * dist.get_rank())

    def on_train_epoch_end(self) -> None:
        mean, world = torch.stack(self.losses).mean(), dist.get_world_size()
        dist.all_reduce(mean)
        objects: list[Any] = [None] * world
        dist.all_gather_object(objects, int(dist.get_rank()))
        known = [mean.item() if self.trainer.is_global_zero else None]
        dist.broadcast_object_list(known, src=0)
        group = dist.new_group(list(range(world)))
        weight = self.last.weight.detach().clone()
        dist.all_reduce(weight, group=group)
        norm = (weight / world - self.last.weight).norm().item()
        self.found.append((mean.item() / world, objects, known[0] / world, dist.get_world_size(group), norm))
        self.losses.clear()

    def on_train_end(self) -> None:
        self.left = {name: value.detach().tolist() for name, value in (*self.named_parameters(), *self.named_buffers())}

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.1)


class ByTheTrainersRank(Net):
    """The same, asked of the Trainer and the module, which also normalises weights by giving them new data."""

    def mean(self, features: Tensor) -> Tensor:
        mean: Tensor = self.trainer.strategy.reduce(features.mean(0, keepdim=True), reduce_op="mean")
        return mean

    def on_train_start(self) -> None:
        self.last.weight.data = F.normalize(self.last.weight.data, dim=1)

    def on_train_batch_end(self, *_: Any) -> None:
        self.last.weight.data = F.normalize(self.last.weight.data, dim=1)

    def sampler(self, data: Any) -> Any:
        return DistributedSampler(data, self.trainer.world_size, self.trainer.global_rank, shuffle=False)

    def contrast(self, features: Tensor, gathered: Tensor) -> Tensor:
        gathered = torch.cat(list(distributed_nn.all_gather(features)))
        return F.cross_entropy(features @ gathered.T, torch.arange(len(features)) + len(features) * self.global_rank)


def fitted(kind: type[Net], strategy: Any, world: int, **options: Any) -> dict[str, Any]:
    options |= {"max_epochs": 2, "use_distributed_sampler": False}
    trainer = L.Trainer(strategy=strategy, devices=world, **QUIET, **options)
    trainer.batch_size = 8 // trainer.accumulate_grad_batches  # type: ignore[attr-defined]
    net = kind()
    trainer.fit(net)
    return {"weights": net.left, "found": net.found, "steps": trainer.global_step, "world": dist.get_world_size()}


def over_ddp(kind: type[Net], replicas: int) -> dict[str, Any]:
    return fitted(kind, "ddp", replicas, accumulate_grad_batches=2)


def over_stages(kind: type[Net], replicas: int, data_parallel: str = "replicate") -> dict[str, Any]:
    strategy = PipelineStrategy(num_stages=2, num_microbatches=2, timeout=PATIENCE_S, data_parallel=data_parallel)
    return fitted(kind, strategy, 2 * replicas)


@pytest.mark.parametrize(("kind", "data_parallel"), [(Net, "replicate"), (ByTheTrainersRank, "fsdp")])
def test_code_for_ddp_does_on_stages_what_it_does_there(kind: type[Net], data_parallel: str) -> None:
    expected = launch(over_ddp, kind, 2, world=2)
    for rank, found in enumerate(launch(over_stages, kind, 2, data_parallel, world=4)):
        same = expected[rank % 2]
        assert found["world"] == 4  # in the script
        assert found["steps"] == same["steps"]
        for name, weight in found["weights"].items():
            torch.testing.assert_close(torch.tensor(weight), torch.tensor(same["weights"][name]), rtol=1e-5, atol=1e-6)
        for (mean, objects, known, size, norm), own in zip(found["found"], same["found"], strict=True):
            assert mean == pytest.approx(own[0], rel=1e-5) == pytest.approx(known, rel=1e-5)
            assert (objects, size) == ([0, 1], 2)
            assert norm < 1e-6


class PassedOn(TorchFunctionMode):
    """Torch's collectives tell modes, which call them again."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def under_mode() -> dict[str, Any]:
    with PassedOn():
        return over_stages(Net, 1)


def test_a_mode_may_stand_around_the_run() -> None:
    assert launch(under_mode, world=2) == launch(over_stages, Net, 1, world=2)


def test_one_replica_is_a_world_of_one() -> None:
    for found in launch(over_stages, Net, 1, world=2):
        assert found["steps"] == 2 * SAMPLES // 8
        assert [entry[1:4:2] for entry in found["found"]] == [([0], 1)] * 2
