"""Two stages, each split over two ranks by `parallelize_module` in `configure_model`, train as one process does."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any
from unittest import mock

import lightning as L
import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.data import DataLoader

from lightning_pipeline import PipelineStrategy
from lightning_pipeline.checkpoint.folder import read_folder, replace_stored
from lightning_pipeline.schedules import Costs
from lightning_pipeline.strategy import advisor
from tests.launching import PATIENCE_S, launch
from tests.training.models import LENGTH, NUM_BLOCKS, VOCABULARY, WIDTH, LitTokens, tokens
from tests.training.runs import QUIET, Losses

pytestmark = pytest.mark.multiprocess


class Block(nn.Module):
    """Means over earlier tokens and a feed-forward part, each with a residual."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        mean = x.cumsum(1) / torch.arange(1, LENGTH + 1, device=x.device)[:, None]
        return x + self.dropout(self.down(self.up(self.norm(mean)).relu()))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(NUM_BLOCKS))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class LitSplit(LitTokens):
    """Splits its blocks where there is a mesh for it, as a module for ModelParallelStrategy does."""

    def __init__(self, optimizer: str) -> None:
        super().__init__()
        self.optimizer = optimizer
        self.net = Net()  # type: ignore[assignment]

    def configure_model(self) -> None:
        if self.device_mesh is not None:
            plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
            for block in self.net.blocks:
                parallelize_module(block, self.device_mesh["tensor_parallel"], plan)
            ends = {
                "tokens": RowwiseParallel(input_layouts=Replicate()),
                "head": ColwiseParallel(output_layouts=Replicate()),
            }
            parallelize_module(self.net, self.device_mesh["tensor_parallel"], ends)

    def configure_optimizers(self) -> Any:
        if self.optimizer == "adafactor":
            return torch.optim.Adafactor(self.parameters(), lr=1e-2, eps=(1e-4, 1e-2))
        return torch.optim.AdamW(self.parameters(), lr=1e-2, eps=1e-4)


def train(world: int, optimizer: str, schedule: str, folder: Path, resume: bool = False) -> dict[str, Any]:
    torch.manual_seed(1 if resume else 0)
    losses = Losses()
    size = min(world, 2)
    parts = 4 if schedule != "1f1b" and size == 2 else size
    strategy = PipelineStrategy(
        stage_config={f"net.blocks.{stage * NUM_BLOCKS // parts}": stage for stage in range(1, parts)},
        num_stages=size,
        tensor_parallel_size=size,
        num_microbatches=4,
        schedule=schedule,
        timeout=PATIENCE_S,
    )
    trainer = L.Trainer(
        strategy=strategy,
        devices=world,
        precision="64-true",
        max_epochs=2 if resume else 1,
        gradient_clip_val=0.2,
        limit_val_batches=1,
        accumulate_grad_batches=2,
        callbacks=[losses],
        **QUIET,
    )
    L.seed_everything(1, verbose=False)
    module = LitSplit(optimizer)
    # Data that differs from rank to rank: those of a stage's first rank count.
    data = tokens(24, seed=0 if os.environ["LOCAL_RANK"] == "0" else 9)
    path = folder / f"{optimizer}.ckpt"
    loader = DataLoader(data, batch_size=8)
    trainer.fit(module, loader, loader, ckpt_path=path if resume else None)
    blocks = module.net.blocks.parameters()
    held = sum(p.to_local().numel() for p in blocks if isinstance(p, DTensor) and not p.is_meta)
    if not resume:
        trainer.save_checkpoint(path)
        trainer.strategy.save_distributed_checkpoint = True
        trainer.save_checkpoint(path.with_suffix(".folder"))
    val_loss = float(trainer.callback_metrics["val_loss"])
    return {"losses": losses.values, "val_loss": val_loss, "held": held}


CASES = {"adamw": "1f1b", "adafactor": "zbv"}
ADAFACTOR = pytest.param("adafactor", marks=pytest.mark.slow)


class LitOpen(LitSplit):
    """Takes what the head gives as a DTensor."""

    def __init__(self) -> None:
        super().__init__("adamw")

    def configure_model(self) -> None:
        super().configure_model()
        plan = {"head": ColwiseParallel(output_layouts=Replicate(), use_local_output=False)}
        self.net.head = nn.Linear(WIDTH, VOCABULARY)
        parallelize_module(self.net, self.device_mesh["tensor_parallel"], plan)


class LitSharded(LitSplit):
    """Shards a block by itself."""

    def __init__(self) -> None:
        super().__init__("adamw")

    def configure_model(self) -> None:
        super().configure_model()
        fully_shard(self.net.blocks[1], mesh=self.device_mesh["data_parallel"])


def train_refused(module: LitSplit, world: int) -> str:
    strategy = PipelineStrategy(
        stage_config={"net.blocks.2": 1}, num_stages=2, tensor_parallel_size=2, num_microbatches=4, timeout=PATIENCE_S
    )
    trainer = L.Trainer(strategy=strategy, devices=world, max_steps=1, **QUIET)
    try:
        trainer.fit(module, DataLoader(tokens(8), batch_size=8))
    except Exception as error:
        return str(error)
    return "nothing"


def train_measured_apart(world: int, folder: Path) -> dict[str, Any]:
    """The ranks of a stage measure other times, by which each would order its actions in another way."""
    losses = Losses()
    size = min(world, 2)
    strategy = PipelineStrategy(
        stage_config={"net.blocks.2": 1} if size == 2 else {},
        num_stages=size,
        tensor_parallel_size=size,
        num_microbatches=4,
        schedule="optimized",
        max_live_bytes=1 << 20,
        timeout=PATIENCE_S,
    )
    options: dict[str, Any] = {"precision": "64-true", "max_epochs": 1, "callbacks": [losses], **QUIET}
    trainer = L.Trainer(strategy=strategy, devices=world, default_root_dir=folder, **options)
    L.seed_everything(1, verbose=False)
    ones = [1.0] * size
    # One's order begins with a backward after each forward of the last stage, the other's with all forwards.
    is_odd = int(os.environ["LOCAL_RANK"]) % 2
    times = Costs(ones, ones, ones, 9.0, ones) if is_odd else Costs(ones, ones, ones, 0.1, [2.0] * size)
    patched = {"RECORDED": 1, "SKIPPED": 0, "measured_costs": lambda *_: times}
    with mock.patch.multiple(advisor, **patched):
        trainer.fit(LitSplit("adamw"), DataLoader(tokens(48), batch_size=8))
    advice = trainer.strategy.advice
    return {"losses": losses.values, "order": advice and [[str(one) for one in order] for order in advice.order]}


def train_uncut(world: int) -> str:
    strategy = PipelineStrategy(num_stages=2, tensor_parallel_size=2, num_microbatches=4, timeout=PATIENCE_S)
    trainer = L.Trainer(strategy=strategy, devices=world, max_steps=1, **QUIET)
    with pytest.raises(ValueError) as error:
        trainer.fit(LitSplit("adamw"), DataLoader(tokens(8), batch_size=8))
    return str(error.value)


def train_all(world: int, folder: Path, optimizers: list[str], with_slow: bool) -> dict[str, Any]:
    found = {optimizer: train(world, optimizer, CASES[optimizer], folder) for optimizer in optimizers}
    if with_slow:
        found["measured apart"] = train_measured_apart(world, folder)
    found["resumed"] = train(world, "adamw", "1f1b", folder, resume=True)
    if world == 4:
        found["uncut"] = train_uncut(world)
        found["sharded"] = train_refused(LitSharded(), world)
        found["open"] = train_refused(LitOpen(), world)
    return found


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory, wanted: Any, with_slow: bool) -> dict[Any, Any]:
    found: dict[Any, Any] = {}
    optimizers = wanted(CASES, ["adafactor"], "optimizer")
    for world in (1, 4):
        folder = tmp_path_factory.mktemp(f"world{world}")
        found[world] = launch(train_all, world, folder, optimizers, with_slow, world=world)
        for optimizer in optimizers:
            path = folder / f"{optimizer}.ckpt"
            found[world, optimizer] = torch.load(path, weights_only=True)
    return {**found, "folder": folder}


@pytest.mark.parametrize("optimizer", ["adamw", ADAFACTOR, "resumed"])
def test_losses_are_those_of_one_process(optimizer: str, results: Any) -> None:
    [alone] = results[1]
    assert len(alone[optimizer]["losses"]) == 3  # two accumulate, and the last steps alone
    for rank in results[4]:
        assert rank[optimizer]["losses"] == pytest.approx(alone[optimizer]["losses"], rel=1e-6)
        assert rank[optimizer]["val_loss"] == pytest.approx(alone[optimizer]["val_loss"], rel=1e-6)


@pytest.mark.slow
def test_ranks_of_a_stage_choose_one_order(results: Any) -> None:
    [alone] = results[1]
    assert len({str(rank["measured apart"]["order"]) for rank in results[4]}) == 1
    for rank in results[4]:
        assert rank["measured apart"]["losses"] == pytest.approx(alone["measured apart"]["losses"], rel=1e-6)


@pytest.mark.parametrize("optimizer", ["adamw", ADAFACTOR])
def test_checkpoints_are_those_of_one_process(optimizer: str, results: Any) -> None:
    expected, found = results[1, optimizer], results[4, optimizer]
    assert list(found["state_dict"]) == list(expected["state_dict"])
    for key, value in expected["state_dict"].items():
        torch.testing.assert_close(found["state_dict"][key], value, rtol=1e-10, atol=1e-12)
    (state,), (found_state,) = expected["optimizer_states"], found["optimizer_states"]
    assert found_state["param_groups"] == state["param_groups"]
    for index, values in state["state"].items():
        for key, value in values.items():
            torch.testing.assert_close(found_state["state"][index][key], value, rtol=1e-8, atol=1e-12)


@pytest.mark.parametrize("optimizer", ["adamw", ADAFACTOR])
def test_a_folder_holds_what_the_file_does(optimizer: str, results: Any) -> None:
    found = read_folder(results["folder"] / f"{optimizer}.folder")
    replace_stored(found)
    expected = results[4, optimizer]
    torch.testing.assert_close(dict(found["state_dict"]), dict(expected["state_dict"]), rtol=0, atol=0)
    assert found["optimizer_states"][0]["state"].keys() == expected["optimizer_states"][0]["state"].keys()
    for index, values in expected["optimizer_states"][0]["state"].items():
        torch.testing.assert_close(found["optimizer_states"][0]["state"][index], values, rtol=0, atol=0)


def test_each_rank_holds_half_of_the_split_parameters(results: Any) -> None:
    whole = NUM_BLOCKS * (8 * WIDTH * WIDTH + 4 * WIDTH)  # weights and the bias of `up`; that of `down` is replicated
    for rank in results[4]:
        assert rank["adamw"]["held"] == whole // 4 + NUM_BLOCKS // 2 * WIDTH


def test_what_leaves_a_split_module_is_not_split(results: Any) -> None:
    for rank in results[4]:
        assert "the call of net.head gives a DTensor" in rank["open"] or "failed" in rank["open"]
    assert any("use_local_output=True" in rank["open"] for rank in results[4])


def test_modules_that_shard_themselves_are_refused(results: Any) -> None:
    for rank in results[4]:
        assert "net.blocks.1 of LitSharded is sharded by fully_shard" in rank["sharded"]
        assert 'set data_parallel="fsdp"' in rank["sharded"]


def test_split_tensors_are_not_cut_automatically(results: Any) -> None:
    for rank in results[4]:
        assert "with tensor_parallel_size=2 no rank can run a step by itself" in rank["uncut"]


def test_options_that_do_not_go_together() -> None:
    with pytest.raises(ValueError, match="tensor_parallel_size=2 needs num_stages as well"):
        PipelineStrategy(tensor_parallel_size=2)
    with pytest.raises(ValueError, match='data_parallel="fsdp" shards the optimizer state already'):
        PipelineStrategy(data_parallel="fsdp", opt_shard=True)
    with pytest.raises(ValueError, match='data_parallel is "replicate", "zero1" or "fsdp", got \'zero2\''):
        PipelineStrategy(data_parallel="zero2")


def test_opt_shard_is_another_name() -> None:
    assert PipelineStrategy(opt_shard=True).data_parallel == PipelineStrategy(data_parallel="zero1").data_parallel
