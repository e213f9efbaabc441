"""Activations that wait in host memory: the same bits, and as much less on the device as the simulator says."""

from __future__ import annotations

import re
import warnings
from typing import Any

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

from lightning_pipeline import PipelineStrategy
from lightning_pipeline.schedules import Action, Schedule, build, fuse
from lightning_pipeline.schedules.records import RecordedStep
from lightning_pipeline.schedules.simulation import peak_bytes, simulate
from lightning_pipeline.strategy.timeline import timeline_metrics
from lightning_pipeline.strategy.validation import warn_of_idle_offload
from tests.launching import PATIENCE_S, launch
from tests.training.runs import QUIET, Losses, differing, pipeline_trainer, weights

pytestmark = pytest.mark.multiprocess

WORLD, WIDTH, NUM_MICROBATCHES = 2, 64, 8
HALVES, QUARTERS = {"blocks.2": 1}, {"blocks.1": 1, "blocks.2": 2, "blocks.3": 3}


def split_gpipe(num_stages: int, num_microbatches: int) -> Schedule:
    """GPipe with backwards in halves."""
    orders = tuple(
        tuple(
            Action(kind, stage, index) for kinds in ("F", "IW") for index in range(num_microbatches) for kind in kinds
        )
        for stage in range(num_stages)
    )
    return Schedule("split", orders, num_microbatches=num_microbatches, placement=tuple(range(num_stages)))


CASES: dict[str, tuple[Any, dict[str, int]]] = {
    "1f1b": ("1f1b", HALVES),
    "gpipe": ("gpipe", HALVES),
    "interleaved_1f1b": ("interleaved_1f1b", QUARTERS),
    "zero_bubble": ("zero_bubble", HALVES),
    "interleaved_zero_bubble": ("interleaved_zero_bubble", QUARTERS),
    "zbv": ("zbv", QUARTERS),
    "split": (split_gpipe, HALVES),
}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.wide, self.narrow = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.narrow(self.dropout(F.gelu(self.wide(self.norm(x)))))


class Perceptrons(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        x, y = batch
        return F.mse_loss(self(x), y)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


class Checkpointed(Perceptrons):
    """Computes two blocks again in backward, in either way."""

    def forward(self, x: Tensor) -> Tensor:
        for index, block in enumerate(self.blocks):
            x = checkpoint(block, x, use_reentrant=index == 1) if index % 2 else block(x)
        return x


class Reading(Perceptrons):
    """Reads its loss, so that forwards run ahead of the step's Python."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        return loss * (1.0 if loss.item() > 0 else 2.0)


class ByHand(Perceptrons):
    """Two backwards and updates a step."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
        optimizer = self.optimizers()
        for scale in (1.0, 0.5):
            optimizer.zero_grad()
            self.manual_backward(scale * super().training_step(batch, batch_idx))
            optimizer.step()


def data(num_batches: int) -> DataLoader:
    rows = 64 * NUM_MICROBATCHES
    x = torch.randn(num_batches * rows, WIDTH, generator=torch.Generator().manual_seed(2))
    return DataLoader(TensorDataset(x, x.flip(0)), batch_size=rows)


def run(name: str, share: float, kind: type[L.LightningModule] = Perceptrons) -> dict[str, Any]:
    schedule, cut = CASES[name]
    L.seed_everything(1, verbose=False)
    strategy = {"schedule": schedule, "num_microbatches": NUM_MICROBATCHES, "offload_activations": share}
    trainer = pipeline_trainer(cut, world=WORLD, strategy=strategy, max_epochs=1)
    trainer.strategy.observers.add(lambda span: None)  # so that bytes are counted
    trainer.fit(kind(), data(4 if kind is Reading else 2))  # the first steps that read run event by event
    found = {"weights": weights(trainer), "live": trainer.strategy.peak_live}
    offload = trainer.strategy.pipeline.offload
    if offload is not None:
        found |= {"peak": offload.peak_bytes, "kept": offload.kept, "sent": offload.sent}
    return found


class Split(Perceptrons):
    """Splits its blocks over the ranks of a stage."""

    def configure_model(self) -> None:
        for block in self.blocks:
            plan = {"wide": ColwiseParallel(), "narrow": RowwiseParallel()}
            parallelize_module(block, self.device_mesh["tensor_parallel"], plan)


FOUR: dict[str, dict[str, Any]] = {
    "stages": {"stage_config": QUARTERS, "num_stages": 4, "schedule": "1f1b"},
    "zero1": {"stage_config": HALVES, "num_stages": 2, "schedule": "gpipe", "data_parallel": "zero1"},
    "fsdp": {"stage_config": HALVES, "num_stages": 2, "schedule": "gpipe", "data_parallel": "fsdp"},
    "split": {"stage_config": HALVES, "num_stages": 2, "schedule": "gpipe", "tensor_parallel_size": 2},
}
"""Options of runs on four ranks."""


def run_on_four(name: str, *, offload: bool) -> dict[str, Any]:
    L.seed_everything(1, verbose=False)
    losses = Losses()
    options = {"num_microbatches": NUM_MICROBATCHES, "timeout": PATIENCE_S, **FOUR[name]}
    strategy = PipelineStrategy(offload_activations=offload, **options)
    trainer = L.Trainer(strategy=strategy, devices=4, max_epochs=1, callbacks=[losses], **QUIET)
    strategy.observers.add(lambda span: None)  # so that bytes are counted
    trainer.fit((Split if name == "split" else Perceptrons)(), data(6))
    offloading = strategy.pipeline.offload
    sent = {} if offloading is None else offloading.sent
    return {"losses": losses.values, "weights": weights(trainer), "sent": sent, "live": strategy.peak_live}


def run_both_on_four(name: str) -> dict[bool, dict[str, Any]]:
    return {offload: run_on_four(name, offload=offload) for offload in (False, True)}


@pytest.mark.slow
@pytest.mark.parametrize("name", FOUR)
def test_bits_of_more_ranks_are_those_without(name: str) -> None:
    four = launch(run_both_on_four, name, world=4)
    for rank in four:
        assert len(set(rank[True]["losses"])) > 1
        assert rank[True]["losses"] == rank[False]["losses"]
    assert not differing(four[0][True]["weights"], four[0][False]["weights"])
    # Under 1F1B the last stages need at once what they have made.
    sending = four[:1] if name == "stages" else four
    assert all(sum(rank[True]["sent"].values()) > 0 for rank in sending)
    assert all(rank[True]["live"] < rank[False]["live"] for rank in sending)


KINDS = {kind.__name__: kind for kind in (Checkpointed, Reading, ByHand)}
OFTEN = {"gpipe", "zbv"}
MORE_KINDS = {"Reading", "ByHand"}
SHARES = [*((name, True) for name in CASES), ("gpipe", 0.5)]
OFFLOADED = [pytest.param(*case, marks=[pytest.mark.slow] * (case[0] not in OFTEN)) for case in SHARES]


def run_cases(names: list[str], kinds: list[str]) -> dict[tuple[str, float], dict[str, Any]]:
    shares = [*((name, share) for name in names for share in (False, True)), ("gpipe", 0.5)]
    found = {(name, share): run(name, share) for name, share in shares}
    return found | {(name, share): run("gpipe", share, KINDS[name]) for name in kinds for share in (False, True)}


@pytest.fixture(scope="module")
def ranks(wanted: Any) -> list[dict[tuple[str, float], dict[str, Any]]]:
    names, kinds = wanted(CASES, CASES.keys() - OFTEN, "name"), wanted(KINDS, MORE_KINDS, "kind")
    return launch(run_cases, names, kinds, world=WORLD)


def schedule_of(name: str) -> Schedule:
    schedule, cut = CASES[name]
    if callable(schedule):
        return schedule(WORLD, NUM_MICROBATCHES)
    return fuse(build(schedule, WORLD, NUM_MICROBATCHES, (len(cut) + 1) // WORLD))


@pytest.mark.parametrize(("name", "share"), OFFLOADED)
def test_bits_are_those_without(name: str, share: float, ranks: Any) -> None:
    assert not differing(ranks[0][name, share]["weights"], ranks[0][name, False]["weights"])


@pytest.mark.parametrize("kind", [pytest.param(k, marks=[pytest.mark.slow] * (k in MORE_KINDS)) for k in KINDS])
def test_bits_of_other_steps_too(kind: str, ranks: Any) -> None:
    assert not differing(ranks[0][kind, True]["weights"], ranks[0][kind, False]["weights"])
    assert all(rank[kind, True]["sent"] for rank in ranks)
    if kind == "Checkpointed":  # the inputs of the checkpointed functions go as well
        assert all(
            sum(rank[kind, True]["sent"].values()) > 0.99 * sum(rank[kind, True]["kept"].values()) for rank in ranks
        )
        assert ranks[0][kind, True]["peak"] < 0.7 * ranks[0]["gpipe", True]["peak"]


@pytest.mark.parametrize(("name", "share"), OFFLOADED)
def test_live_activations_and_bytes_are_those_of_the_simulator(name: str, share: float, ranks: Any) -> None:
    schedule = schedule_of(name)
    kept, sent = ([0.0] * schedule.num_stages for _ in range(2))
    for rank in ranks:
        for stage, size in rank[name, share]["kept"].items():
            kept[stage], sent[stage] = size, rank[name, share]["sent"].get(stage, 0)
    simulated = peak_bytes(schedule, kept, sent=sent)
    measured = [rank[name, share]["peak"] for rank in ranks]
    assert [rank[name, share]["live"] for rank in ranks] == simulate(schedule, offload=share).peak_live
    assert [rank[name, False]["live"] for rank in ranks] == simulate(schedule).peak_live
    if any(action.kind == "W" for order in schedule.orders for action in order):  # I frees a part, and W the rest
        assert all(half <= whole for half, whole in zip(measured, simulated, strict=True))
    else:
        assert measured == simulated
    least = 0.99 if share is True else 0.45  # of what is saved; dropout's mask and the norm's statistics are small
    assert all(least * kept[stage] <= sent[stage] <= share * kept[stage] for stage in range(len(kept)) if sent[stage])


@pytest.mark.parametrize(
    "name",
    [
        *("gpipe", "zbv"),
        *(pytest.param(n, marks=pytest.mark.slow) for n in ("interleaved_1f1b", "interleaved_zero_bubble", "split")),
    ],
)
def test_less_is_on_the_device(name: str, ranks: Any) -> None:
    schedule = schedule_of(name)
    for rank, plain in zip(ranks, simulate(schedule).peak_live, strict=True):
        kept = max(rank[name, True]["kept"].values())
        assert rank[name, True]["sent"]
        assert rank[name, True]["peak"] < 0.85 * plain * kept


@pytest.mark.parametrize("value", [-0.1, 1.5, 2, float("nan"), "half", None])
def test_other_shares_are_refused(value: Any) -> None:
    with pytest.raises(ValueError, match=r"a number from 0 to 1; got " + re.escape(repr(value))):
        PipelineStrategy(offload_activations=value)


def test_says_where_it_sends_nothing() -> None:
    with pytest.warns(
        UserWarning, match=r"sends nothing to host memory under '1f1b' on 2 devices with 8 micro-batches"
    ):
        warn_of_idle_offload(True, build("1f1b", 2, 8), "1f1b")
    with pytest.warns(UserWarning, match="sends nothing to host memory under one device"):
        warn_of_idle_offload(0.5, build("1f1b", 1, 8), "1f1b")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warn_of_idle_offload(True, build("gpipe", 2, 8), "gpipe")
        warn_of_idle_offload(False, build("1f1b", 2, 8), "1f1b")


def test_metrics_of_the_timeline() -> None:
    simulation = simulate(build("gpipe", 2, 8), offload=1)
    recorded = [
        RecordedStep(
            *(rank, list(row)), peak_live=3, offload=1, live_bytes=29, kept={rank: 10 + rank}, away={rank: 10 + rank}
        )
        for rank, row in enumerate(simulation.spans)
    ]
    metrics = timeline_metrics([recorded], (0, 1))
    for rank in range(2):
        assert metrics[f"pipeline/live_activations_simulated/rank{rank}"] == 3
        assert metrics[f"pipeline/live_bytes/rank{rank}"] == 29
        assert metrics[f"pipeline/live_bytes_simulated/rank{rank}"] == 3 * (10 + rank)
        assert metrics[f"pipeline/host_bytes/rank{rank}"] == 6 * (10 + rank)
