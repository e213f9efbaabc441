"""Replicas of a pipeline train as one process does on all their samples."""

from __future__ import annotations

import os
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import Callback
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, TensorDataset

from lightning_pipeline import PipelineStrategy, sync_pipeline_shared_parameters
from tests.launching import launch
from tests.training.measured import LitMeasured, measured_stages, point_loader
from tests.training.models import LitGPT, gpt_stages, tokens
from tests.training.runs import QUIET, Losses, weights

pytestmark = pytest.mark.multiprocess

WORLD = 4
SAMPLES, BATCH_SIZE, NUM_MICROBATCHES = 44, 16, 8  # of one process; the last batch has 12 samples
STAGES = [4, 2, 1]
OPTIMIZERS = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9),
    # The bias of attention's keys has a gradient of nothing but rounding, which the default eps blows up.
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=1e-3, eps=1e-4),
}


class Norms(Callback):
    """The norm of all gradients before each step, of orders 2 and infinity, before and after clipping alike."""

    def __init__(self) -> None:
        self.values: list[list[float]] = []

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        self.values.append([float(trainer.strategy.grad_norm(order)) for order in (2.0, float("inf"))])


class LitAny(LitGPT):
    """`LitGPT` with another optimizer."""

    def __init__(self, optimizer: str, **options: Any) -> None:
        super().__init__(**options)
        self.optimizer = optimizer

    def configure_optimizers(self) -> Any:
        return OPTIMIZERS[self.optimizer](self.parameters())


def trainer_of(num_stages: int, world: int, num_microbatches: int, **options: Any) -> L.Trainer:
    strategy = PipelineStrategy(
        stage_config=gpt_stages(num_stages), num_stages=num_stages, num_microbatches=num_microbatches, timeout=30
    )
    return L.Trainer(strategy=strategy, devices=world, **{**QUIET, **options})


def train(num_stages: int, world: int, optimizer: str, precision: str, **model: Any) -> dict[str, Any]:
    """Losses of every step on every rank, and the weights on rank 0."""
    num_replicas = world // num_stages
    L.seed_everything(1, verbose=False)
    losses, norms = Losses(), Norms()
    trainer = trainer_of(
        num_stages,
        world,
        NUM_MICROBATCHES // num_replicas,
        callbacks=[losses, norms],
        precision=precision,
        max_epochs=2,
        accumulate_grad_batches=2,
        gradient_clip_val=0.5,
        use_distributed_sampler=False,
    )
    # Lightning's own sampler shuffles; this one gives each replica every num_replicas-th sample, in order.
    data = tokens(SAMPLES)
    sampler = DistributedSampler(data, num_replicas, int(os.environ["LOCAL_RANK"]) % num_replicas, shuffle=False)
    module = LitAny(optimizer, **model)
    trainer.fit(module, DataLoader(data, batch_size=BATCH_SIZE // num_replicas, sampler=sampler))
    found = {"losses": losses.values, "weights": weights(trainer), "world": trainer.world_size, "norms": norms.values}
    tied = module.net.head.weight
    if not tied.is_meta:
        with torch.no_grad():
            tied.fill_(trainer.global_rank)
    sync_pipeline_shared_parameters(module)
    return {**found, "synced": None if tied.is_meta else float(tied.max())}


CASES: dict[str, dict[str, Any]] = {
    "sgd": {"optimizer": "sgd", "precision": "32-true"},
    "adamw tied": {"optimizer": "adamw", "precision": "32-true", "tied": True},
    "sgd in double": {"optimizer": "sgd", "precision": "64-true"},
}


def train_all(num_stages: list[int], world: int) -> dict[tuple[str, int], Any]:
    return {(name, stages): train(stages, world, **case) for name, case in CASES.items() for stages in num_stages}


class Stream(IterableDataset):
    """Vectors of ones; one more of them on rank 1."""

    def __iter__(self) -> Any:
        uneven = torch.distributed.get_rank() == 1
        yield from torch.ones(8 + 4 * uneven, 8)


def measure(world: int) -> dict[str, Any]:
    """Logged values, metrics and collectives, on a validation set that the replicas share."""
    trainer = L.Trainer(
        strategy=PipelineStrategy(stage_config=measured_stages(2), num_stages=2, num_microbatches=2, timeout=30),
        devices=world,
        **QUIET,
    )
    L.seed_everything(1, verbose=False)
    module = LitMeasured()
    found = trainer.validate(module, point_loader(32, 16 // (world // 2)), verbose=False)[0]
    gathered = module.all_gather(torch.tensor(float(trainer.global_rank)))
    reduced = trainer.strategy.reduce(torch.tensor(float(trainer.global_rank)), reduce_op="sum")
    return {"values": found, "gathered": gathered, "reduced": float(reduced)}


class LitSeen(LitMeasured):
    """Keeps the first number of every sample that stage 0 sees."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[int] = []

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if not batch[0].is_meta:
            self.seen += batch[0][:, 0].int().tolist()


def samples_seen(world: int) -> list[int]:
    strategy = PipelineStrategy(stage_config=measured_stages(2), num_stages=2, num_microbatches=2, timeout=30)
    trainer = L.Trainer(strategy=strategy, devices=world, **{**QUIET, "max_epochs": 1})
    module = LitSeen()
    numbered = torch.arange(24.0)[:, None].expand(24, 8)
    trainer.fit(module, DataLoader(TensorDataset(numbered, torch.zeros(24, dtype=torch.int64)), batch_size=4))
    return module.seen


def uneven(world: int) -> str:
    class Lit(LitMeasured):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return self(batch).square().mean()

    trainer = L.Trainer(
        strategy=PipelineStrategy(stage_config=measured_stages(2), num_stages=2, num_microbatches=2, timeout=20),
        devices=world,
        **{**QUIET, "max_epochs": 1},
    )
    try:
        trainer.fit(Lit(), DataLoader(Stream(), batch_size=4))
    except Exception as error:
        return str(error)
    return "nothing"


def disagree(world: int) -> str:
    rank = int(os.environ["LOCAL_RANK"])
    strategy = PipelineStrategy(stage_config={f"layers.{1 + rank // 3}": 1}, num_microbatches=2, timeout=20)
    trainer = L.Trainer(strategy=strategy, devices=world, **{**QUIET, "max_epochs": 1})
    try:
        trainer.fit(LitMeasured(), point_loader(32, 8))
    except Exception as error:
        return str(error)
    return "nothing"


def run_all(world: int) -> dict[str, Any]:
    found: dict[str, Any] = {"trained": train_all(STAGES, world), "measured": measure(world)}
    found["seen"] = samples_seen(world)
    found["disagree"] = disagree(world)
    found["uneven"] = uneven(world)
    return found


@pytest.fixture(scope="module")
def ranks() -> list[dict[str, Any]]:
    return launch(run_all, WORLD, world=WORLD)


@pytest.fixture(scope="module")
def alone() -> dict[tuple[str, int], Any]:
    return launch(train_all, [1], 1, world=1)[0]


@pytest.mark.parametrize("stages", STAGES)
@pytest.mark.parametrize("name", CASES)
def test_weights_are_those_of_one_process(name: str, stages: int, alone: Any, ranks: Any) -> None:
    expected, found = alone[name, 1], ranks[0]["trained"][name, stages]
    tolerance = 1e-12 if "double" in name else 1e-6
    for key, value in expected["weights"].items():
        scale = float(value.abs().max())
        assert float((found["weights"][key] - value).abs().max()) <= tolerance * max(scale, 1.0), key
    assert found["world"] == WORLD


@pytest.mark.parametrize("stages", STAGES)
def test_losses_are_the_means_over_replicas(stages: int, alone: Any, ranks: Any) -> None:
    num_replicas = WORLD // stages
    for name in CASES:
        by_replica = [ranks[replica]["trained"][name, stages]["losses"] for replica in range(num_replicas)]
        means = torch.tensor(by_replica, dtype=torch.float64).mean(0).tolist()
        assert means == pytest.approx(alone[name, 1]["losses"], rel=1e-5)
        for rank in range(WORLD):  # every stage of a replica has its losses
            assert ranks[rank]["trained"][name, stages]["losses"] == by_replica[rank % num_replicas]
        assert num_replicas == 1 or by_replica[0] != by_replica[1]


@pytest.mark.parametrize("stages", STAGES)
def test_the_norm_of_all_gradients_is_the_same_everywhere(stages: int, alone: Any, ranks: Any) -> None:
    for name in CASES:
        expected = alone[name, 1]["norms"]
        assert len(expected) == 4
        for rank in ranks:
            for found, one in zip(rank["trained"][name, stages]["norms"], expected, strict=True):
                assert found == pytest.approx(one, rel=1e-5)


def test_shared_parameters_take_the_value_of_their_owner(ranks: Any) -> None:
    found = [rank["trained"]["adamw tied", 2]["synced"] for rank in ranks]
    assert found == [0.0, 1.0, 0.0, 1.0]  # of the first stage in each replica
    untied = [rank["trained"]["sgd", 2]["synced"] for rank in ranks]
    assert untied == [None, None, 2.0, 3.0]


def test_metrics_and_collectives_act_on_replicas(ranks: Any) -> None:
    expected = launch(measure, 2, world=2)[0]["values"]
    for rank, found in enumerate(item["measured"] for item in ranks):
        assert found["values"]["val_accuracy"] == pytest.approx(expected["val_accuracy"])
        assert found["values"]["mean_loss"] == pytest.approx(expected["mean_loss"])
        first = rank - rank % 2
        assert found["gathered"].tolist() == [first, first + 1]
        assert found["reduced"] == 2 * first + 1


def test_every_sample_is_seen_once(ranks: Any) -> None:
    assert len(ranks[0]["seen"]) == len(ranks[1]["seen"]) == 12
    assert sorted(ranks[0]["seen"] + ranks[1]["seen"]) == list(range(24))
    assert ranks[2]["seen"] == ranks[3]["seen"] == []


def test_ranks_that_disagree_are_named(ranks: Any) -> None:
    for found in ranks:
        assert 'stage_config: {"layers.1": 1} on ranks 0 1 2, {"layers.2": 1} on rank 3' in found["disagree"]


def test_replicas_with_unequal_data_are_told(ranks: Any) -> None:
    assert "the data of replica 0 ended after 2 batches, and others have more" in ranks[0]["uneven"]
    assert all(rank["uneven"] != "nothing" for rank in ranks)
