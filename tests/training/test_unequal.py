"""Unequal ranks: stages on ranks that are named, or chosen by what each rank takes and has; the bits stay."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any
from unittest import mock

import lightning as L
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from lightning_pipeline import PipelineStrategy
from lightning_pipeline.strategy import measure, partitioner
from tests.launching import launch
from tests.training.models import WIDTH, LitTokens, token_loader
from tests.training.runs import (
    NUM_MICROBATCHES,
    QUIET,
    Losses,
    Present,
    differing,
    measured_shortly,
    pipeline_trainer,
    weights,
)
from tests.training.unequal import WIDTH as LAYER_WIDTH
from tests.training.unequal import LitLayers, SlowedDown, rows

pytestmark = pytest.mark.multiprocess

SWAPPED = {"net.blocks.2": "1@0"}
FROM_THE_SECOND = {"net.blocks.1": "1@0", "net.blocks.2": 2, "net.blocks.3": 3}
IN_A_V = {"net.blocks.1": "1@1", "net.blocks.2": "2@1", "net.blocks.3": "3@0"}
RUNS: dict[str, tuple[Any, dict[str, Any]]] = {
    "swapped": (SWAPPED, {"output_broadcast": False}),
    "as text": ("net.blocks.2:1@0", {"schedule": "zero_bubble"}),
    "a loop from the second rank": (FROM_THE_SECOND, {"schedule": "interleaved_1f1b"}),
    "optimized in a V": (IN_A_V, {"schedule": "optimized"}),
}
MORE = {"as text", "a loop from the second rank"}


def run(world: int, config: Any, folder: str, ckpt_path: str | None = None, **strategy: Any) -> dict[str, Any]:
    L.seed_everything(1, verbose=False)
    losses, present = Losses(), Present()
    trainer = pipeline_trainer(
        config, world=world, strategy=strategy, callbacks=[losses, present], max_epochs=2, gradient_clip_val=0.5,
        default_root_dir=folder,
    )  # fmt: skip
    module = LitTokens(dropout=0.1, tied=True)
    trainer.fit(module, token_loader(8 * 6 + 5, 8, shuffle=True), token_loader(9, 8), ckpt_path=ckpt_path)
    trainer.save_checkpoint(f"{folder}/{world}.ckpt")
    return {
        "losses": losses.values,
        "val_loss": float(trainer.callback_metrics.get("val_loss", 0.0)),
        "weights": weights(trainer),
        "held": getattr(present, "names", []),  # none where nothing was left to train
        "placement": trainer.strategy.pipeline.placement,
        "considered": trainer.strategy.advice and set(trainer.strategy.advice.considered),
        "names": [trainer.strategy.topology.describe(rank) for rank in range(world)],
    }


SHARE = 0.35
"""What a rank that is four times slower than the other one gets of the layers at most: a fifth, and a layer more."""


def on_one_slow_rank() -> Any:
    """The plan where the matrix multiplications of rank 1 take four times as long. Measurements may fall into another
    process's burst, so a plan that gives that rank too much is made again, twice at most; it is the same on all ranks.
    """
    for _ in range(3):
        slow = SlowedDown(4) if torch.distributed.get_rank() == 1 else nullcontext()
        with slow, measured_shortly():
            trainer = pipeline_trainer("auto", world=2, max_steps=1)  # type: ignore[arg-type]
            trainer.fit(LitLayers(), rows(1))
        plan = trainer.strategy.plan.as_dict()
        if share_of(1, plan) <= SHARE:
            break
    return plan


def share_of(rank: int, plan: Any) -> float:
    """Which part of all parameters' bytes a plan gives a rank."""
    sizes = {stage["rank"]: stage["parameter_bytes"] for stage in plan["stages"]}
    return sizes.get(rank, 0) / sum(sizes.values())


class LargeEmbedding(LitTokens):
    """Its first module takes 4 MiB with gradients and optimizer state."""

    def make_net(self, **options: Any) -> nn.Module:
        net = super().make_net(**options)
        net.tokens = nn.Embedding(1 << 14, WIDTH)
        return net


def with_one_large_memory(folder: str) -> dict[str, Any]:
    """The first stage fits the second rank only."""
    memory = [1e6, 1e9][torch.distributed.get_rank()]
    with (
        mock.patch.object(measure, "_memory_of", lambda device: memory),
        mock.patch.object(partitioner.Partitioner, "_is_big", lambda self: False),
        measured_shortly(),
    ):
        L.seed_everything(1, verbose=False)
        trainer = pipeline_trainer("auto", world=2, max_steps=1)  # type: ignore[arg-type]
        trainer.fit(LargeEmbedding(), token_loader(32, 8))
    return {"plan": trainer.strategy.plan.as_dict(), "placement": trainer.strategy.pipeline.placement}


class LargeBatches(LitLayers):
    """Batches whose tensors only the first stage gets; it writes into them, and reads a value on some steps."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:  # type: ignore[override]
        x, targets = batch
        x.mul_(0.5)
        loss = (self.layers(x[:, 1:]) - targets[:, 1:]).square().mean()
        if batch_idx > 1 and x.mean() > 0:
            loss = loss * 2
        return loss

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.log("written", batch[0].abs().mean())


def run_large_batches(world: int, config: Any) -> dict[str, Any]:
    L.seed_everything(1, verbose=False)
    trainer = pipeline_trainer(config, world=world, callbacks=[losses := Losses()], max_epochs=1)
    data = TensorDataset(*torch.randn(2, 48, 27, 256, generator=torch.Generator().manual_seed(0)))
    trainer.fit(LargeBatches(), DataLoader(data, batch_size=4 * NUM_MICROBATCHES))
    return {"losses": losses.values, "written": trainer.callback_metrics["written"], "weights": weights(trainer)}


class Computed(IterableDataset):
    """The samples that a function computes."""

    def __init__(self, samples: Callable[[], Iterator[Tensor]]) -> None:
        self.samples = samples

    def __iter__(self) -> Iterator[Tensor]:
        return self.samples()


class ComputesItsSamples(LitLayers):
    """Its loader computes samples with all layers."""

    def training_step(self, batch: Tensor) -> Tensor:  # type: ignore[override]
        return self.layers(batch).square().mean()

    def samples(self) -> Iterator[Tensor]:
        sample = torch.linspace(-1, 1, LAYER_WIDTH)
        for _ in range(3 * NUM_MICROBATCHES):
            with torch.no_grad():
                sample = self.layers(sample) + torch.randn(LAYER_WIDTH)
            yield sample

    def train_dataloader(self) -> DataLoader:
        return DataLoader(Computed(self.samples), batch_size=NUM_MICROBATCHES)


def run_computed_samples(world: int) -> dict[str, Any]:
    """On two ranks the plan that is made before the first step puts the first stage on the second one."""

    def swapped(self: Any, config: Any, *options: Any) -> Any:
        return resolved(self, dict.fromkeys(config, "1@0"), *options)

    resolved = partitioner.Partitioner._resolved
    L.seed_everything(1, verbose=False)
    with mock.patch.object(partitioner.Partitioner, "_resolved", swapped), measured_shortly():
        trainer = pipeline_trainer("auto", world=world, callbacks=[losses := Losses()], max_epochs=1)  # type: ignore[arg-type]
        trainer.fit(ComputesItsSamples())
    return {"losses": losses.values, "placement": trainer.strategy.pipeline.placement, "weights": weights(trainer)}


def run_all(world: int, folder: str, names: list[str]) -> dict[str, Any]:
    if world == 1:
        return {
            "one": run(1, {}, folder),
            "large batches": run_large_batches(1, {}),
            "computed samples": run_computed_samples(1),
        }
    found = {name: run(world, RUNS[name][0], folder, **RUNS[name][1]) for name in names}
    found["from the other cut"] = run(world, {"net.blocks.2": 1}, folder, ckpt_path=f"{folder}/{world}.ckpt")
    return {
        "runs": found,
        "large batches": run_large_batches(world, {"layers.5": "1@0"}),
        "computed samples": run_computed_samples(world),
        "slow": on_one_slow_rank(),
        "memory": with_one_large_memory(folder),
    }


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: Any, wanted: Any) -> list[dict[str, Any]]:
    return launch(run_all, 2, str(tmp_path_factory.mktemp("unequal")), wanted(RUNS, MORE, "name"), world=2)


@pytest.fixture(scope="module")
def in_one_process(tmp_path_factory: Any) -> dict[str, Any]:
    return launch(run_all, 1, str(tmp_path_factory.mktemp("one")), [], world=1)[0]


@pytest.fixture(scope="module")
def expected(in_one_process: dict[str, Any]) -> dict[str, Any]:
    return in_one_process["one"]


@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.slow] * (name in MORE)) for name in RUNS])
def test_the_bits_are_those_of_one_process(name: str, ranks: Any, expected: Any) -> None:
    found = ranks[0]["runs"][name]
    assert found["losses"] == expected["losses"]
    assert found["val_loss"] == pytest.approx(expected["val_loss"], rel=1e-6)
    assert not differing(found["weights"], expected["weights"])


def test_large_tensors_of_a_batch_are_given_to_the_rank_of_the_first_stage(ranks: Any, in_one_process: Any) -> None:
    found, expected = ranks[0]["large batches"], in_one_process["large batches"]
    assert found["losses"] == expected["losses"] and found["written"] == expected["written"]
    assert not differing(found["weights"], expected["weights"])


def test_loaders_follow_a_plan_that_moves_the_first_stage(ranks: Any, in_one_process: Any) -> None:
    found, expected = ranks[0]["computed samples"], in_one_process["computed samples"]
    assert found["placement"] == (1, 0)
    assert found["losses"] == expected["losses"]
    assert not differing(found["weights"], expected["weights"])


def test_a_run_that_was_over_has_the_weights_on_another_cut(ranks: Any, expected: Any) -> None:
    resumed = ranks[0]["runs"]["from the other cut"]
    assert not resumed["losses"] and not differing(resumed["weights"], expected["weights"])


@pytest.mark.parametrize(
    ("name", "placement"),
    [
        ("swapped", (1, 0)),
        pytest.param("as text", (1, 0), marks=pytest.mark.slow),
        pytest.param("a loop from the second rank", (1, 0, 1, 0), marks=pytest.mark.slow),
        ("optimized in a V", (0, 1, 1, 0)),
    ],
)
def test_virtual_stages_lie_on_the_ranks_that_are_named(name: str, placement: tuple[int, ...], ranks: Any) -> None:
    assert ranks[0]["runs"][name]["placement"] == placement


def test_stages_lie_on_the_ranks_that_are_named(ranks: Any) -> None:
    assert ranks[0]["runs"]["swapped"]["names"] == ["stage 1 (rank 0)", "stage 0 (rank 1)"]
    assert "net.blocks.0.mlp.0.weight" in ranks[1]["runs"]["swapped"]["held"]
    assert "net.blocks.0.mlp.0.weight" not in ranks[0]["runs"]["swapped"]["held"]


def test_schedules_in_a_v_are_searched_where_the_stages_are_in_one(ranks: Any) -> None:
    assert ranks[0]["runs"]["optimized in a V"]["considered"] == {"zbv", "v_half", "v_min", "dualpipe_v", "optimized"}


def test_a_rank_that_is_four_times_slower_gets_fewer_layers(ranks: Any) -> None:
    first, second = (rank["slow"] for rank in ranks)
    assert first["stages"] == second["stages"]
    assert share_of(1, first) <= SHARE


def test_the_stage_that_needs_it_is_on_the_rank_with_more_memory(ranks: Any) -> None:
    for found in (rank["memory"] for rank in ranks):
        assert found["placement"] == (1, 0)
        assert list(found["plan"]["stage_config"].values()) == ["1@0"]
        assert found["plan"]["peak_bytes"][0] <= 1e6


def with_replicas(kind: str) -> dict[str, Any]:
    found = {}
    for name, config in (("in order", {"net.blocks.2": 1}), ("swapped", SWAPPED)):
        L.seed_everything(1, verbose=False)
        losses = Losses()
        trainer = L.Trainer(
            strategy=PipelineStrategy(
                stage_config=config, num_stages=2, num_microbatches=NUM_MICROBATCHES, data_parallel=kind
            ),
            devices=4,
            max_epochs=1,
            callbacks=[losses],
            **QUIET,
        )
        trainer.fit(LitTokens(dropout=0.1, tied=True), token_loader(32, 4), token_loader(8, 4))
        placement = trainer.strategy.pipeline.placement
        found[name] = {"losses": losses.values, "weights": weights(trainer), "placement": placement}
    return found


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["replicate", "fsdp"])
def test_replicas_of_named_ranks_come_to_the_same_bits(kind: str) -> None:
    found = launch(with_replicas, kind, world=4)[0]
    assert found["swapped"]["placement"] != found["in order"]["placement"]
    assert found["swapped"]["losses"] == found["in order"]["losses"]
    assert not differing(found["swapped"]["weights"], found["in order"]["weights"])
