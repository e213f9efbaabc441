"""``Trainer(accelerator="npu", strategy="pipeline")`` on the real torch_npu; `stand_in` says what is simulated."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import lightning as L
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.utils.data import DataLoader, TensorDataset

from lightning_pipeline import PipelineStrategy
from lightning_pipeline.partition.placeholder import TensorSpec
from tests.launching import PATIENCE_S, launch
from tests.npu.ranks import connect
from tests.training import test_host_reads as host_reads
from tests.training.runs import QUIET, Losses, differing, weights

NUM_BLOCKS = 8
SCHEDULES = {"gpipe": 1, "1f1b": 1, "interleaved_1f1b": 2}  # with the virtual stages of a rank
PRECISIONS = ["32-true", "bf16-mixed", "16-mixed"]


class LitBlocks(L.LightningModule):
    """A classifier of blocks, with a parameter that the first and the last one share."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        middle = (
            nn.Sequential(nn.Linear(16, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(dropout))
            for _ in range(NUM_BLOCKS - 2)
        )
        self.blocks = nn.ModuleList([nn.Linear(8, 16), *middle, nn.Linear(16, 3)])
        self.scale = nn.Parameter(torch.ones(16))

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks[0](x) * self.scale
        for block in self.blocks[1:-1]:
            x = block(x)
        return self.blocks[-1](x * self.scale)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = F.cross_entropy(self(batch[0]), batch[1])
        self.log("train_loss", loss, on_epoch=True, on_step=False)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", F.cross_entropy(self(batch[0]), batch[1]), sync_dist=True)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


class Outcome(NamedTuple):
    """What a fit came to: each batch's loss, the last validation's, and the whole model's weights (on rank 0)."""

    losses: list[float]
    val_loss: float
    weights: dict[str, Tensor]


def loader() -> DataLoader:
    """Three batches, or two for each of two replicas; the last one is ragged."""
    generator = torch.Generator().manual_seed(5)
    x, y = torch.randn(80, 8, generator=generator), torch.randint(0, 3, (80,), generator=generator)
    return DataLoader(TensorDataset(x, y), batch_size=32)


def fit(
    accelerator: str,
    world: int,
    *,
    num_stages: int | None = None,
    schedule: str = "1f1b",
    dropout: float = 0.2,
    ckpt_path: str | None = None,
    strategy: dict[str, Any] | None = None,
    **options: Any,
) -> Outcome:
    """One epoch on `world` devices, unless `options` for the Trainer say otherwise; a stage on each if not told."""
    L.seed_everything(3)
    num_stages = num_stages or world
    cuts = num_stages * SCHEDULES[schedule]
    losses = Losses()
    pipeline = PipelineStrategy(
        stage_config={f"blocks.{stage * NUM_BLOCKS // cuts}": stage for stage in range(1, cuts)},
        num_stages=num_stages,
        num_microbatches=4,
        schedule=schedule,
        timeout=PATIENCE_S,
        **(strategy or {}),
    )
    callbacks = [losses, *options.pop("callbacks", [])]
    settings = {**QUIET, "max_epochs": 1, "limit_val_batches": 1, "num_sanity_val_steps": 0, **options}
    settings.update(accelerator=accelerator, callbacks=callbacks)
    trainer = L.Trainer(devices=world, strategy=pipeline, **settings)
    trainer.fit(LitBlocks(dropout), loader(), loader(), ckpt_path=ckpt_path)
    if accelerator == "npu":
        assert pipeline.root_device == torch.device("npu", trainer.local_rank)
        assert world == 1 or pipeline.process_group_backend == "cpu:gloo,npu:hccl"
    return Outcome(losses.values, float(trainer.callback_metrics["val_loss"]), weights(trainer))


def check_equal(one: Outcome, other: Outcome, what: object) -> None:
    """Bit for bit."""
    assert one.losses == other.losses, what
    assert one.val_loss == other.val_loss, what
    assert not differing(one.weights, other.weights), what


def one_process() -> dict[str, Outcome]:
    """The run of each precision on one device: on the CPU in float32, without dropout, which no NPU draws alike."""
    reference = {precision: fit("npu", 1, precision=precision) for precision in PRECISIONS[1:]}
    return {"32-true": fit("cpu", 1, dropout=0.0), **reference}


def every_schedule(world: int) -> dict[tuple[str, str], Outcome]:
    return {
        (precision, schedule): fit(
            "npu", world, schedule=schedule, precision=precision, dropout=0.0 if precision == "32-true" else 0.2
        )
        for precision in PRECISIONS
        for schedule in SCHEDULES
    }


@pytest.fixture(scope="module")
def reference() -> dict[str, Outcome]:
    return launch(one_process, world=1)[0]


@pytest.mark.parametrize("world", [2, 4])
def test_schedules_give_the_bits_of_one_process(world: int, reference: dict[str, Outcome]) -> None:
    ranks = launch(every_schedule, world, world=world)
    for (precision, schedule), outcome in ranks[0].items():
        check_equal(outcome, reference[precision], (precision, schedule))
    # The loss scale begins too high, so that steps are skipped; not all of them.
    L.seed_everything(3)
    assert not torch.equal(reference["16-mixed"].weights["scale"], LitBlocks(0.2).scale.data)
    for rank in ranks[1:]:
        assert [outcome.losses for outcome in rank.values()] == [outcome.losses for outcome in ranks[0].values()]


def replicas_on(world: int) -> None:
    """Two replicas of two stages give the bits of the same run on the CPU, whatever of them is sharded."""
    for strategy in ({}, {"data_parallel": "zero1"}, {"data_parallel": "fsdp"}):
        options: Any = {"num_stages": world // 2, "dropout": 0.0, "strategy": strategy, "gradient_clip_val": 0.1}
        npu, cpu = fit("npu", world, **options), fit("cpu", world, **options)
        check_equal(npu, cpu, strategy)


def test_replicas() -> None:
    launch(replicas_on, 4, world=4)


FILE, FOLDER = {"save_distributed_checkpoint": False}, {"save_distributed_checkpoint": True}


def interrupted(folder: Path) -> Outcome:
    """Two epochs at once; then one, saved to a file and to a folder."""
    for name, strategy in {"file": FILE, "folder": FOLDER}.items():
        keep = ModelCheckpoint(folder, filename=name, save_top_k=-1)
        fit("npu", 2, callbacks=[keep], enable_checkpointing=True, strategy=strategy)
    return fit("npu", 2, max_epochs=2)


def resumed(folder: Path, world: int) -> dict[str, Outcome]:
    """The second epoch, from either."""
    options: Any = {"schedule": "gpipe", "max_epochs": 2}
    return {name: fit("npu", world, ckpt_path=str(folder / f"{name}.ckpt"), **options) for name in ("file", "folder")}


def test_checkpoints(tmp_path: Path) -> None:
    """A run that goes on from a checkpoint, on as many stages or more, ends as one that was not interrupted."""
    whole = launch(interrupted, tmp_path, world=2)[0]
    for world in (2, 4):
        for name, rest in launch(resumed, tmp_path, world, world=world)[0].items():
            check_equal(rest, whole._replace(losses=whole.losses[3:]), (name, world))
    saved = torch.load(tmp_path / "file.ckpt", weights_only=True)
    assert {tensor.device.type for tensor in saved["state_dict"].values()} == {"cpu"}
    LitBlocks(0.2).load_state_dict(saved["state_dict"])  # without this package, torch_npu or a device


@pytest.mark.parametrize("schedule", host_reads.SCHEDULES)
def test_steps_do_not_wait_for_the_device(schedule: str) -> None:
    launch(host_reads.forbidden_reads, 2, schedule, "npu", world=2)


def device_of_split_tensor() -> str:
    _, device = connect()
    mesh = init_device_mesh("npu", (2,))
    split = DTensor.from_local(torch.ones(2, 2, device=device), mesh, [Shard(0)], run_check=False)
    dist.destroy_process_group()
    return str(TensorSpec.of(split).device)


def test_split_tensors_are_on_a_device_with_its_index() -> None:
    """As stand-ins of theirs are, or each call of a split module would seem to move its weights."""
    assert launch(device_of_split_tensor, world=2) == ["npu:0", "npu:1"]
