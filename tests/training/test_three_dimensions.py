"""Two stages of two replicas of two tensor-parallel ranks, in eight processes, train as one process does."""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.utils.data import DataLoader, DistributedSampler

from lightning_pipeline import PipelineStrategy
from lightning_pipeline.checkpoint.folder import read_folder, replace_stored
from lightning_pipeline.engine.slices import local_part
from lightning_pipeline.partition.placeholder import is_absent
from tests.launching import PATIENCE_S, launch
from tests.training.models import VOCABULARY, WIDTH, LitTokens, tokens
from tests.training.runs import QUIET, Losses

pytestmark = pytest.mark.multiprocess

NUM_BLOCKS = 4
BATCH = 8
LIMIT = 0.5


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.up(self.norm(x)).relu())


class Net(nn.Module):
    def __init__(self, *, tied: bool) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(NUM_BLOCKS))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        if tied:
            self.head.weight = self.tokens.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class LitSplit(LitTokens):
    """Splits the tensors of its blocks and of both ends, but not the norms'. Those in the outer blocks are replicated,
    and get halves of the sequence, so that the gradients of their parameters are partial sums."""

    def __init__(self, *, tied: bool, optimizer: str) -> None:
        super().__init__()
        self.tied = tied
        self.optimizer = optimizer
        self.net = Net(tied=tied)  # type: ignore[assignment]

    def configure_model(self) -> None:
        if self.device_mesh is None or isinstance(self.net.tokens.weight, DTensor):
            return
        mesh = self.device_mesh["tensor_parallel"]
        halves = PrepareModuleInput(input_layouts=Replicate(), desired_input_layouts=Shard(1), use_local_output=True)
        for block in self.net.blocks:
            plan: dict[str, Any] = {"up": ColwiseParallel(), "down": RowwiseParallel()}
            if block in (self.net.blocks[0], self.net.blocks[-1]):
                parallelize_module(block.norm, mesh, halves)
                plan |= {"norm": SequenceParallel(use_local_output=True), "up": ColwiseParallel(input_layouts=Shard(1))}
            parallelize_module(block, mesh, plan)
        ends = {
            "tokens": RowwiseParallel(input_layouts=Replicate()),
            "head": ColwiseParallel(output_layouts=Replicate()),
        }
        parallelize_module(self.net, mesh, ends)
        if self.tied:
            self.net.head.weight = self.net.tokens.weight

    def configure_optimizers(self) -> Any:
        if self.optimizer == "adafactor":
            return torch.optim.Adafactor(self.parameters(), lr=1e-2, eps=(1e-4, 1e-2))
        return torch.optim.AdamW(self.parameters(), lr=1e-2, eps=1e-4)


class Norms(L.Callback):
    """Keeps the norm of each update's gradients."""

    def __init__(self) -> None:
        self.values: list[float] = []

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        self.values.append(float(trainer.strategy.grad_norm()))


class Looks(L.Callback):
    """Reads gradients and writes parameters, whichever rank holds them and however they are split."""

    def __init__(self) -> None:
        self.values: list[float] = []

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        self.values.append(float(sum(parameter.grad.norm() for parameter in pl_module.parameters())))

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        with torch.no_grad():
            for parameter in pl_module.parameters():
                parameter.clamp_(-LIMIT, LIMIT)


class Held(L.Callback):
    """Counts the numbers that this rank holds when training ends, of parameters and of the optimizer's state."""

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        with trainer.strategy._session.stages.aside():
            state = [tensor for states in trainer.optimizers[0].state.values() for tensor in states.values()]
            held = [parameter for parameter in pl_module.parameters() if not is_absent(parameter)]
            self.counts = [sum(local_part(tensor).numel() for tensor in tensors) for tensors in (held, state)]


def fitted(
    world: int,
    *,
    stages: int = 2,
    split: int = 2,
    mode: str = "replicate",
    schedule: str = "1f1b",
    tied: bool = True,
    optimizer: str = "adamw",
    is_same_data: bool = False,
    looking: bool = False,
    resume: Path | None = None,
    save: Path | None = None,
    **options: Any,
) -> dict[str, Any]:
    """Train for two steps; with `resume` for two more."""
    replicas = world // (stages * split)
    parts = stages if schedule in ("1f1b", "gpipe", "zero_bubble") else 2 * stages
    strategy = PipelineStrategy(
        stage_config={f"net.blocks.{stage * NUM_BLOCKS // parts}": stage for stage in range(1, parts)},
        num_stages=stages,
        tensor_parallel_size=split,
        data_parallel=mode,
        num_microbatches=max(2, stages),
        schedule=schedule,
        timeout=PATIENCE_S,
    )
    losses, norms, held, looks = Losses(), Norms(), Held(), Looks()
    trainer = L.Trainer(
        strategy=strategy,
        devices=world,
        max_epochs=1 if resume is None else 2,
        num_sanity_val_steps=0,
        callbacks=[losses, norms, held, *([looks] if looking else [])],
        use_distributed_sampler=False,
        **{**QUIET, "limit_val_batches": 1, **options},
    )
    L.seed_everything(1 if resume is None else 2, verbose=False)
    data, replica = tokens(2 * BATCH), int(os.environ["LOCAL_RANK"]) % (replicas * split) // split
    loader = DataLoader(data, batch_size=BATCH)
    if not is_same_data:  # Lightning's own sampler shuffles; this one gives each replica every n-th sample, in order
        sampler = DistributedSampler(data, replicas, replica, shuffle=False)
        loader = DataLoader(data, batch_size=BATCH // replicas, sampler=sampler)
    trainer.fit(LitSplit(tied=tied, optimizer=optimizer), loader, loader, ckpt_path=resume)
    if save is not None:
        trainer.save_checkpoint(save)
        strategy.save_distributed_checkpoint = True
        trainer.save_checkpoint(save.with_suffix(".folder"))
        strategy.save_distributed_checkpoint = False
    return {
        "losses": losses.values,
        "norms": norms.values + looks.values,
        "val_loss": float(trainer.callback_metrics.get("val_loss", math.nan)),
        "held": held.counts,
        "weights": {name: tensor.clone() for name, tensor in strategy.lightning_module_state_dict().items()},
    }


Cases = dict[str, dict[str, Any]]

MODES = {"replicate": "interleaved_1f1b", "zero1": "zero_bubble", "fsdp": "1f1b"}
"""Each way of data parallelism, with the schedule under which it is compared with one process."""
SCHEDULES = (
    *("gpipe", "1f1b", "zero_bubble", "looped_bfs", "interleaved_1f1b", "interleaved_1f1b_low_memory"),
    *("interleaved_zero_bubble", "zbv"),
)
PAIRS = [("zbv", "fsdp")]
MORE_PAIRS = [pair for pair in itertools.product(SCHEDULES, MODES) if pair not in PAIRS]

PLAIN: dict[str, Any] = {"stages": 1, "split": 1}
CLIPPED: dict[str, Any] = {"gradient_clip_val": 0.2, "looking": True}
SAME: dict[str, Any] = {"tied": False, "is_same_data": True, "limit_val_batches": 0}


def train_all(world: int, cases: Cases) -> dict[str, Any]:
    return {name: fitted(world, **case) for name, case in cases.items()}


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory, wanted: Any, with_slow: bool) -> dict[str, list[dict[str, Any]]]:
    """What each rank has to say of each case; without slow tests, of those of OFTEN and what they are compared with."""
    folder = tmp_path_factory.mktemp("checkpoints")
    pairs = [*PAIRS, *wanted(MORE_PAIRS, MORE_PAIRS, "schedule", "mode")] if with_slow else []
    modes = [mode for mode in MODES if with_slow or mode in OFTEN]
    one: Cases = {
        "one": {**PLAIN, **CLIPPED, "save": folder / "one.ckpt"},
        **({"one resumed": {**PLAIN, **CLIPPED, "resume": folder / "one.ckpt"}} if with_slow else {}),
    }
    eight: Cases = {
        **{
            mode: {"mode": mode, "schedule": schedule, **CLIPPED, "save": folder / f"{mode}.ckpt"}
            for mode, schedule in MODES.items()
            if mode in modes
        },
        "from one's folder": {"mode": "fsdp", **CLIPPED, "resume": folder / "one.folder"},
        **{f"{schedule} {mode}": {"schedule": schedule, "mode": mode, **SAME} for schedule, mode in pairs},
    }
    four: Cases = {
        "pairs": SAME,
        "without replicas": {**CLIPPED, "resume": folder / "fsdp.folder"},
        "without tensor parallelism": {"split": 1, "mode": "fsdp", **CLIPPED, "resume": folder / "zero1.folder"},
        "four stages": {"stages": 4, "split": 1, **CLIPPED, "resume": folder / "fsdp.ckpt"},
    }
    if not with_slow:
        eight, four = ({name: case for name, case in cases.items() if name in OFTEN} for cases in (eight, four))
    found: dict[str, list[dict[str, Any]]] = {}
    for world, cases in ((1, one), (8, eight), *([(4, four)] if four else ())):
        ranks = launch(train_all, world, cases, world=world)
        found |= {name: [rank[name] for rank in ranks] for name in cases}
    files = {name: torch.load(folder / f"{name}.ckpt", weights_only=True) for name in ("one", *modes)}
    folders = {name: read_folder(folder / f"{name}.folder") for name in modes}
    for content in folders.values():
        replace_stored(content)
    return {**found, "files": files, "folders": folders}  # type: ignore[dict-item]


RESUMED = ("from one's folder", "without replicas", "without tensor parallelism", "four stages")
OFTEN = {"fsdp"}


def often(cases: Iterable[str]) -> list[Any]:
    """Cases; all but those of OFTEN are slow."""
    return [pytest.param(case, marks=[pytest.mark.slow] * (case not in OFTEN)) for case in cases]


@pytest.mark.parametrize("case", often([*MODES, *RESUMED]))
def test_training_is_that_of_one_process(case: str, results: Any) -> None:
    [alone], ranks = results["one" if case in MODES else "one resumed"], results[case]
    for key in ("losses", "val_loss"):  # those of a replica are the mean over its samples
        mean = torch.tensor([rank[key] for rank in ranks]).mean(0)
        torch.testing.assert_close(mean, torch.tensor(alone[key]), rtol=1e-5, atol=0)
    for rank in ranks:
        torch.testing.assert_close(rank["norms"], alone["norms"], rtol=1e-5, atol=0)
    assert alone["norms"][0] > CLIPPED["gradient_clip_val"]
    torch.testing.assert_close(ranks[0]["weights"], alone["weights"], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("mode", often(MODES))
def test_checkpoints_are_those_of_one_process(mode: str, results: Any) -> None:
    expected, found, folder = results["files"]["one"], results["files"][mode], results["folders"][mode]
    assert list(found["state_dict"]) == list(expected["state_dict"])
    [state], [found_state], [folder_state] = (each["optimizer_states"] for each in (expected, found, folder))
    assert found_state["param_groups"] == state["param_groups"] == folder_state["param_groups"]
    torch.testing.assert_close(found_state["state"], state["state"], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(dict(folder["state_dict"]), dict(found["state_dict"]), rtol=0, atol=0)
    torch.testing.assert_close(folder_state["state"], found_state["state"], rtol=0, atol=0)


@pytest.mark.slow
@pytest.mark.parametrize(("schedule", "mode"), [*PAIRS, *MORE_PAIRS])
def test_replicas_with_equal_data_have_the_bits_of_pairs_without_replicas(
    schedule: str, mode: str, results: Any
) -> None:
    expected, ranks = results["pairs"][0], results[f"{schedule} {mode}"]
    for rank in ranks:
        assert rank["losses"] == expected["losses"]
    torch.testing.assert_close(ranks[0]["weights"], expected["weights"], rtol=0, atol=0)


@pytest.mark.slow
def test_replicas_share_out_what_they_hold(results: Any) -> None:
    def held(case: str) -> list[int]:
        """Numbers of all ranks together: parameters, and state."""
        return torch.tensor([rank["held"] for rank in results[case]]).sum(0).tolist()

    parameters, state = held("without replicas")
    assert held("replicate") == [2 * parameters, 2 * state]
    assert held("zero1") == [2 * parameters, state]
    parameters, state = held("pairs")
    counts = 8 * 28  # of steps, which each rank keeps for each parameter
    assert held("zbv fsdp")[0] == parameters
    assert state <= held("zbv fsdp")[1] <= state + counts
