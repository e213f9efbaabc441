"""Replicas of a pipeline train as one process does on all their samples."""

from __future__ import annotations

import copy
import os
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import Callback, EMAWeightAveraging
from lightning.pytorch.tuner import Tuner
from torch import Tensor
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, TensorDataset

from lightning_pipeline import PipelineStrategy, sync_pipeline_shared_parameters
from lightning_pipeline.engine import buckets
from tests.launching import PATIENCE_S, launch
from tests.training.measured import LitLayers, LitMeasured, measured_stages, point_loader
from tests.training.models import NUM_BLOCKS, LitTokens, gpt_stages, token_loader, tokens
from tests.training.runs import QUIET, Losses, Present, measured_shortly

pytestmark = pytest.mark.multiprocess

WORLD = 4
BATCH_SIZE, NUM_MICROBATCHES = 8, 4  # of one process
SAMPLES = {"sgd": 20}  # whose last batch has 4 samples and steps alone; else 12, whose last one is in a window
LAYOUTS: dict[str, dict[str, Any]] = {
    "4 stages": {"num_stages": 4},
    "2 stages, 2 replicas": {"num_stages": 2},
    "4 replicas": {"num_stages": 1},
    "2 x 2, opt_shard": {"num_stages": 2, "opt_shard": True},
    "2 x 2, fsdp": {"num_stages": 2, "data_parallel": "fsdp"},
}
VIRTUAL = ("interleaved_1f1b", "zbv")
OPTIMIZERS = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9),
    # The bias of attention's keys has a gradient of nothing but rounding, which the default eps blows up.
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=1e-3, eps=1e-4),
    "adafactor": lambda parameters: torch.optim.Adafactor(parameters, lr=1e-2, eps=(1e-4, 1e-2)),
}


class Norms(Callback):
    """The norm of all gradients before each step, of orders 2 and infinity, before and after clipping alike."""

    def __init__(self) -> None:
        self.values: list[list[float]] = []

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        self.values.append([float(trainer.strategy.grad_norm(order)) for order in (2.0, float("inf"))])


class Sums(Callback):
    """How many all-reduces of gradients each batch made."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.values: list[int] = []
        self.count = 0
        all_reduce = buckets.all_reduce

        def counted(*args: Any, **kwargs: Any) -> Any:
            self.count += 1
            return all_reduce(*args, **kwargs)

        monkeypatch.setattr(buckets, "all_reduce", counted)  # a run has functions of its own in torch.distributed

    def on_train_batch_start(self, *_: Any) -> None:
        self.count = 0

    def on_train_batch_end(self, *_: Any) -> None:
        self.values.append(self.count)


class Freeze(Callback):
    """Freezes a block of the first stage and one of the last, half-way."""

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        if trainer.current_epoch == 1:
            pl_module.net.blocks[0].requires_grad_(False)
            pl_module.net.blocks[3].requires_grad_(False)


class LitAny(LitTokens):
    """`LitTokens` with another optimizer, a layer that is never used, and a block that is added before the run."""

    def __init__(self, optimizer: str, **options: Any) -> None:
        super().__init__(**options)
        self.optimizer = optimizer
        self.unused = torch.nn.Linear(2, 2)

    def configure_model(self) -> None:
        if len(self.net.blocks) == NUM_BLOCKS:
            self.net.blocks.append(copy.deepcopy(self.net.blocks[-1]))

    def configure_optimizers(self) -> Any:
        return OPTIMIZERS[self.optimizer](self.parameters())


def train(
    world: int, layout: dict[str, Any], folder: Path, samples: int, optimizer: str, precision: str, **model: Any
) -> dict[str, Any]:
    """Losses of every step on every rank, and a checkpoint that rank 0 wrote."""
    num_stages = layout["num_stages"]
    num_replicas = world // num_stages
    L.seed_everything(1, verbose=False)
    losses, norms, present = Losses(), Norms(), Present()
    monkeypatch = pytest.MonkeyPatch()
    sums = Sums(monkeypatch)
    strategy = PipelineStrategy(
        stage_config=gpt_stages(4 if layout.get("schedule") in VIRTUAL else num_stages),
        num_microbatches=NUM_MICROBATCHES // num_replicas,
        timeout=PATIENCE_S,
        **layout,
    )
    trainer = L.Trainer(
        strategy=strategy,
        devices=world,
        **QUIET,
        callbacks=[losses, norms, present, Freeze(), sums],
        precision=precision,
        max_epochs=2,
        accumulate_grad_batches=2,
        gradient_clip_val=0.5,
        use_distributed_sampler=False,
    )
    # Lightning's own sampler shuffles; this one gives each replica every num_replicas-th sample, in order.
    data = tokens(samples)
    sampler = DistributedSampler(data, num_replicas, int(os.environ["LOCAL_RANK"]) % num_replicas, shuffle=False)
    module = LitAny(optimizer, **model)
    trainer.fit(module, DataLoader(data, batch_size=BATCH_SIZE // num_replicas, sampler=sampler))
    monkeypatch.undo()
    found = {
        "sums": sums.values,
        "losses": losses.values,
        "norms": norms.values,
        "world": trainer.world_size,
        "state": present.numel_of_states,
        "held": present.numel,
    }
    trainer.save_checkpoint(folder / "run.ckpt")
    if trainer.global_rank == 0:
        found["checkpoint"] = torch.load(folder / "run.ckpt", weights_only=True)
    tied = module.net.head.weight
    is_held = trainer.strategy.ownership.is_local("net.head.weight")
    if is_held:
        with torch.no_grad():
            tied.fill_(trainer.global_rank)
    sync_pipeline_shared_parameters(module)
    return {**found, "synced": float(tied.max()) if is_held else None}


CASES: dict[str, dict[str, Any]] = {
    "sgd": {"optimizer": "sgd", "precision": "32-true"},
    "adamw tied in double": {"optimizer": "adamw", "precision": "64-true", "tied": True},
    "adafactor in double": {"optimizer": "adafactor", "precision": "64-true"},
}
LAYOUTS_OF = {  # in which each case can be run, and in OTHERS
    "sgd": ["4 stages", "2 stages, 2 replicas", "4 replicas", "2 x 2, fsdp"],
    "adamw tied in double": ["2 stages, 2 replicas", "2 x 2, opt_shard", "2 x 2, fsdp"],
    "adafactor in double": ["2 stages, 2 replicas", "2 x 2, opt_shard", "2 x 2, fsdp"],
}
RUNS = [(name, layout) for name, layouts in LAYOUTS_OF.items() for layout in layouts]
HALVES: dict[str, dict[str, Any]] = {
    "sgd in float16": {"optimizer": "sgd", "precision": "16-true"},
    "adamw in bfloat16": {"optimizer": "adamw", "precision": "bf16-true", "tied": True},
    "sgd in mixed bfloat16": {"optimizer": "sgd", "precision": "bf16-mixed"},
}
OTHERS: list[tuple[str, str, dict[str, Any]]] = [
    ("adamw tied in double", "zbv, fsdp", {"num_stages": 2, "data_parallel": "fsdp", "schedule": "zbv"}),
    ("sgd", "interleaved, opt_shard", {"num_stages": 2, "opt_shard": True, "schedule": "interleaved_1f1b"}),
    ("sgd in float16", "2 x 2, fsdp", LAYOUTS["2 x 2, fsdp"]),
    ("adamw in bfloat16", "2 x 2, opt_shard", LAYOUTS["2 x 2, opt_shard"]),
    ("sgd in mixed bfloat16", "2 x 2, fsdp", LAYOUTS["2 x 2, fsdp"]),
]


# What the others show as well.
MORE = {
    *(("sgd", layout) for layout in ("4 stages", "4 replicas")),
    ("adamw tied in double", "2 x 2, fsdp"),
    *(("adafactor in double", layout) for layout in LAYOUTS_OF["adafactor in double"]),
    ("sgd", "interleaved, opt_shard"),
    ("sgd in float16", "2 x 2, fsdp"),
    ("adamw in bfloat16", "2 x 2, opt_shard"),
    ("adamw tied in double", "zbv, fsdp"),
    ("sgd in mixed bfloat16", "2 x 2, fsdp"),
}


def often(runs: list[tuple[str, str]]) -> list[Any]:
    """Runs; those of `MORE` are slow."""
    return [pytest.param(*run, marks=[pytest.mark.slow] * (run in MORE)) for run in runs]


def train_all(world: int, folder: Path, wanted: list[tuple[str, str]]) -> dict[tuple[str, str], Any]:
    options_of = {(name, layout): LAYOUTS[layout] for name, layout in RUNS}
    options_of |= {(name, layout): options for name, layout, options in OTHERS}
    runs = [(name, layout, options_of[name, layout]) for name, layout in wanted]
    if world == 1:
        runs = [(name, "alone", {"num_stages": 1}) for name in {name for name, _ in wanted}]
    return {
        (name, layout): train(world, options, folder, SAMPLES.get(name, 12), **(CASES | HALVES)[name])
        for name, layout, options in runs
    }


def sharded_twice(world: int, folder: Path) -> dict[str, Any]:
    """A module that one run has sharded, in other runs: on from its checkpoint, as a new module is, and refused."""

    def fit(module: Any, max_epochs: int, path: Path | None = None, callback: Any = None, **options: Any) -> Any:
        losses = Losses()
        strategy = PipelineStrategy(stage_config=gpt_stages(2), num_microbatches=2, timeout=PATIENCE_S, **options)
        callbacks = [losses] if callback is None else [losses, callback]
        trainer = L.Trainer(strategy=strategy, devices=world, max_epochs=max_epochs, callbacks=callbacks, **QUIET)
        try:
            trainer.fit(module, DataLoader(tokens(8), batch_size=4), ckpt_path=path)
        except ValueError as error:
            return str(error)
        if path is None:
            trainer.save_checkpoint(folder / "sharded.ckpt")
        return losses.values

    module = LitTokens()
    fit(module, 1, data_parallel="fsdp")
    return {
        "again": fit(module, 2, folder / "sharded.ckpt", data_parallel="fsdp"),
        "new": fit(LitTokens(), 2, folder / "sharded.ckpt"),
        "whole": fit(module, 1),
        "averaged": fit(LitTokens(), 1, None, EMAWeightAveraging(), data_parallel="fsdp"),
    }


class Stream(IterableDataset):
    """Vectors of ones; one more of them on rank 1."""

    def __iter__(self) -> Any:
        uneven = torch.distributed.get_rank() == 1
        yield from torch.ones(8 + 4 * uneven, 8)


def measure(world: int) -> dict[str, Any]:
    """Logged values, metrics and collectives, on a validation set that the replicas share."""
    trainer = L.Trainer(
        strategy=PipelineStrategy(
            stage_config=measured_stages(2), num_stages=2, num_microbatches=2, timeout=PATIENCE_S
        ),
        devices=world,
        **QUIET,
    )
    L.seed_everything(1, verbose=False)
    module = LitMeasured()
    found = trainer.validate(module, point_loader(32, 16 // (world // 2)), verbose=False)[0]
    gathered = module.all_gather(torch.tensor(float(trainer.global_rank)))
    reduced = trainer.strategy.reduce(torch.tensor(float(trainer.global_rank)), reduce_op="sum")
    return {"values": found, "gathered": gathered, "reduced": float(reduced)}


class LitSeen(LitLayers):
    """Keeps the first number of every sample."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[int] = []

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.seen += batch[0][:, 0].int().tolist()


def samples_seen(world: int) -> list[int]:
    strategy = PipelineStrategy(stage_config=measured_stages(2), num_stages=2, num_microbatches=2, timeout=PATIENCE_S)
    trainer = L.Trainer(strategy=strategy, devices=world, **{**QUIET, "max_epochs": 1})
    module = LitSeen()
    numbered = torch.arange(24.0)[:, None].expand(24, 8)
    trainer.fit(module, DataLoader(TensorDataset(numbered, torch.zeros(24, dtype=torch.int64)), batch_size=4))
    return module.seen


def uneven(world: int) -> str:
    class Lit(LitLayers):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return self(batch).square().mean()

    trainer = L.Trainer(
        strategy=PipelineStrategy(
            stage_config=measured_stages(2), num_stages=2, num_microbatches=2, timeout=PATIENCE_S
        ),
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
    strategy = PipelineStrategy(stage_config={f"layers.{1 + rank // 3}": 1}, num_microbatches=2, timeout=PATIENCE_S)
    trainer = L.Trainer(strategy=strategy, devices=world, **{**QUIET, "max_epochs": 1})
    try:
        trainer.fit(LitLayers(), point_loader(32, 8))
    except Exception as error:
        return str(error)
    return "nothing"


class LitContrastive(LitTokens):
    """Compares each sample with those of all replicas; gradients come back from all of them."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        hidden = self(batch[0]).mean(1)
        everyone = self.all_gather(hidden, sync_grads=True).reshape(-1, hidden.shape[-1])
        own = self.trainer.distributed_sampler_kwargs["rank"] * len(hidden)
        return F.cross_entropy(hidden @ everyone.T, own + torch.arange(len(hidden)))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def contrasted(world: int, stage_config: Any) -> dict[str, Tensor]:
    """Weights of stages that are given, or found by measuring, where other ranks must not be waited for."""
    L.seed_everything(1, verbose=False)
    strategy = PipelineStrategy(stage_config=stage_config, num_stages=2, num_microbatches=2, timeout=PATIENCE_S)
    trainer = L.Trainer(strategy=strategy, devices=world, **{**QUIET, "max_epochs": 1})
    module = LitContrastive()
    trainer.fit(module, DataLoader(tokens(16), batch_size=8))
    return local_weights(module)


def contrasted_by_ddp() -> dict[str, Tensor]:
    L.seed_everything(1, verbose=False)
    trainer = L.Trainer(strategy="ddp", devices=2, accumulate_grad_batches=2, **{**QUIET, "max_epochs": 1})
    module = LitContrastive()
    trainer.fit(module, DataLoader(tokens(16), batch_size=4))
    return local_weights(module)


def local_weights(module: L.LightningModule) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in module.named_parameters() if not p.is_meta}


CUTS: dict[str, Any] = {"given": {"net.blocks.2": 1}, "auto": "auto"}


def run_all(world: int, folder: Path, wanted: list[tuple[str, str]], cuts: list[str]) -> dict[str, Any]:
    found: dict[str, Any] = {"trained": train_all(world, folder, wanted), "measured": measure(world)}
    with measured_shortly():
        found["contrasted"] = {cut: contrasted(world, CUTS[cut]) for cut in cuts}
    found["seen"] = samples_seen(world)
    found["sharded"] = sharded_twice(world, folder)
    found["disagree"] = disagree(world)
    found["uneven"] = uneven(world)
    return found


@pytest.fixture(scope="module")
def runs(wanted: Any) -> list[tuple[str, str]]:
    return wanted([*RUNS, *((name, layout) for name, layout, _ in OTHERS)], MORE, "name", "layout")


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory, runs: Any, wanted: Any) -> list[dict[str, Any]]:
    cuts = wanted(CUTS, ["auto"], "cut")
    return launch(run_all, WORLD, tmp_path_factory.mktemp("replicas"), runs, cuts, world=WORLD)


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory, runs: Any) -> dict[str, Any]:
    trained = launch(train_all, 1, tmp_path_factory.mktemp("alone"), runs, world=1)[0]
    return {name: found for (name, _), found in trained.items()}


def largest_difference(found: Tensor, expected: Tensor) -> float:
    """Relative to the tensor's largest value."""
    assert found.dtype == expected.dtype
    return float((found - expected).abs().max() / max(float(expected.abs().max()), 1e-2))


@pytest.mark.parametrize(("name", "layout"), often(RUNS + [(name, layout) for name, layout, _ in OTHERS]))
def test_weights_and_optimizer_state_are_those_of_one_process(name: str, layout: str, alone: Any, ranks: Any) -> None:
    expected, found = alone[name]["checkpoint"], ranks[0]["trained"][name, layout]["checkpoint"]
    tolerance = 1e-12 if "double" in name else 2e-2 if name in HALVES else 1e-6
    assert list(found["state_dict"]) == list(expected["state_dict"])
    for key, value in expected["state_dict"].items():
        assert largest_difference(found["state_dict"][key], value) <= tolerance, key
    (found_state,), (state,) = found["optimizer_states"], expected["optimizer_states"]
    assert found_state["param_groups"] == state["param_groups"]
    assert list(found_state["state"]) == list(state["state"])
    for index, values in state["state"].items():
        assert values.keys() == found_state["state"][index].keys()
        for key, value in values.items():  # moments add up more rounding than weights, which are larger
            assert largest_difference(found_state["state"][index][key], value) <= 100 * tolerance, (index, key)
    assert ranks[0]["trained"][name, layout]["world"] == WORLD


@pytest.mark.parametrize(("name", "layout"), often(RUNS))
def test_losses_are_the_means_over_replicas(name: str, layout: str, alone: Any, ranks: Any) -> None:
    num_replicas = WORLD // LAYOUTS[layout]["num_stages"]
    by_replica = [ranks[replica]["trained"][name, layout]["losses"] for replica in range(num_replicas)]
    means = torch.tensor(by_replica, dtype=torch.float64).mean(0).tolist()
    assert means == pytest.approx(alone[name]["losses"], rel=1e-5)
    for rank in range(WORLD):  # every stage of a replica has its losses
        assert ranks[rank]["trained"][name, layout]["losses"] == by_replica[rank % num_replicas]
    assert num_replicas == 1 or by_replica[0] != by_replica[1]


@pytest.mark.parametrize(("name", "layout"), often(RUNS))
def test_the_norm_of_all_gradients_is_the_same_everywhere(name: str, layout: str, alone: Any, ranks: Any) -> None:
    expected = alone[name]["norms"]
    assert len(expected) == (4 if name == "sgd" else 2)
    for rank in ranks:
        for found, one in zip(rank["trained"][name, layout]["norms"], expected, strict=True):
            assert found == pytest.approx(one, rel=1e-5)


@pytest.mark.parametrize(
    ("name", "layout"), often([run for run in RUNS if run[1] in ("2 x 2, opt_shard", "2 x 2, fsdp")])
)
def test_replicas_share_out_what_they_hold(name: str, layout: str, ranks: Any) -> None:
    whole = [rank["trained"][name, "2 stages, 2 replicas"] for rank in ranks]
    shares = [rank["trained"][name, layout] for rank in ranks]
    for one, other in ((0, 1), (2, 3)):  # the replicas of a stage
        assert whole[one]["state"] == whole[other]["state"] > 0
        if layout == "2 x 2, fsdp":
            assert max(shares[one]["held"], shares[other]["held"]) <= 0.65 * whole[one]["held"]
        if layout == "2 x 2, opt_shard" or "adafactor" not in name:  # whose state is whole, and small
            assert max(shares[one]["state"], shares[other]["state"]) <= 0.65 * whole[one]["state"]


def test_batches_that_accumulate_exchange_no_gradients(ranks: Any) -> None:
    for rank in ranks:
        first, second, last = rank["trained"]["sgd", "2 stages, 2 replicas"]["sums"][:3]
        assert first == 0 < second == last


@pytest.mark.slow
@pytest.mark.parametrize(("name", "layout"), [("sgd", "4 stages")])
def test_stages_without_replicas_exchange_no_gradients(name: str, layout: str, ranks: Any) -> None:
    for rank in ranks:
        assert set(rank["trained"][name, layout]["sums"]) == {0}


def test_shared_parameters_take_the_value_of_their_owner(ranks: Any) -> None:
    for layout in ("2 stages, 2 replicas", "2 x 2, opt_shard"):
        found = [rank["trained"]["adamw tied in double", layout]["synced"] for rank in ranks]
        assert found == [0.0, 1.0, 0.0, 1.0]  # of the first stage in each replica
    untied = [rank["trained"]["sgd", "2 stages, 2 replicas"]["synced"] for rank in ranks]
    assert untied == [None, None, 2.0, 3.0]


def test_a_sharded_module_goes_on_in_another_run(ranks: Any) -> None:
    for found in (rank["sharded"] for rank in ranks):
        assert found["again"] == found["new"] and len(found["again"]) == 1
        assert "is a DTensor" in found["whole"]
        assert "leaves no whole weights to average" in found["averaged"]


def test_metrics_and_collectives_act_on_replicas(ranks: Any) -> None:
    expected = launch(measure, 2, world=2)[0]["values"]
    for rank, found in enumerate(item["measured"] for item in ranks):
        assert found["values"]["val_accuracy"] == pytest.approx(expected["val_accuracy"])
        assert found["values"]["mean_loss"] == pytest.approx(expected["mean_loss"])
        first = rank - rank % 2
        assert found["gathered"].tolist() == [first, first + 1]
        assert found["reduced"] == 2 * first + 1


@pytest.mark.parametrize("cut", ["given", pytest.param("auto", marks=pytest.mark.slow)])
def test_gradients_come_back_from_what_all_replicas_gather(cut: str, ranks: Any) -> None:
    expected = launch(contrasted_by_ddp, world=2)[0]
    assert set().union(*(rank["contrasted"][cut] for rank in ranks)) == expected.keys()
    for rank in ranks:
        for name, found in rank["contrasted"][cut].items():
            assert largest_difference(found, expected[name]) < 1e-6, name


def test_every_sample_is_seen_once(ranks: Any) -> None:
    assert len(ranks[0]["seen"]) == len(ranks[1]["seen"]) == 12
    assert sorted(ranks[0]["seen"] + ranks[1]["seen"]) == list(range(24))
    assert [rank["seen"] for rank in ranks[2:]] == [rank["seen"] for rank in ranks[:2]]


def test_ranks_that_disagree_are_named(ranks: Any) -> None:
    for found in ranks:
        assert 'stage_config: {"layers.1": 1} on ranks 0 1 2, {"layers.2": 1} on rank 3' in found["disagree"]


def test_replicas_with_unequal_data_are_told(ranks: Any) -> None:
    assert "the data of replica 0 ended after 2 batches, and others have more" in ranks[0]["uneven"]
    assert all(rank["uneven"] != "nothing" for rank in ranks)


class LitPassesOver(LitTokens):
    """Has no use for micro-batches that begin with the first token."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        return None if int(batch[0][0, 0]) == 0 else loss


def passed_over(world: int) -> dict[str, Tensor]:
    """The weights, with a replica on each process, of which the second has nothing to train on in the second batch."""
    L.seed_everything(1, verbose=False)
    ids, targets = tokens(24).tensors
    ids = ids.clone()
    ids[:, 0] = 1
    ids[9:16:2, 0] = 0
    # One process gets the first replica's samples of a batch, and then the second's.
    order = [8 * batch + index for batch in range(3) for index in (0, 2, 4, 6, 1, 3, 5, 7)]
    if world == 2:
        order = list(range(int(os.environ["LOCAL_RANK"]), 24, 2))
    strategy = PipelineStrategy(num_stages=1, num_microbatches=4 // world, timeout=PATIENCE_S)
    trainer = L.Trainer(strategy=strategy, devices=world, max_epochs=2, use_distributed_sampler=False, **QUIET)
    module = LitPassesOver()
    trainer.fit(module, DataLoader(TensorDataset(ids, targets), batch_size=8 // world, sampler=order))
    return {name: value.clone() for name, value in module.state_dict().items()}


def test_a_replica_may_have_nothing_to_train_on() -> None:
    [expected] = launch(passed_over, 1, world=1)
    for rank in launch(passed_over, 2, world=2):
        torch.testing.assert_close(rank, expected)


def searched(folder: Path, data_parallel: str, world: int) -> dict[str, Tensor]:
    """Weights after a search for a learning rate, whose steps run within a hook that asks for the rank."""
    L.seed_everything(1, verbose=False)
    layout: dict[str, Any] = {"num_stages": 1}
    if world > 1:
        layout = {"num_stages": 2, "stage_config": gpt_stages(2), "data_parallel": data_parallel}
    strategy = PipelineStrategy(num_microbatches=4, timeout=PATIENCE_S, **layout)
    options = {**QUIET, "default_root_dir": folder, "devices": world, "max_epochs": 1, "use_distributed_sampler": False}
    trainer, module, data = L.Trainer(strategy=strategy, **options), LitTokens(), token_loader(32, 8)
    Tuner(trainer).lr_find(module, data, num_training=4, update_attr=False)
    trainer.fit(module, data)
    whole = trainer.strategy.gather_module() if world > 1 else module  # type: ignore[attr-defined]
    return {} if whole is None else whole.state_dict()


@pytest.mark.parametrize("data_parallel", [pytest.param("zero1", marks=pytest.mark.slow), "fsdp"])
def test_a_search_for_a_learning_rate_leaves_replicas_alike(tmp_path: Path, data_parallel: str) -> None:
    [expected] = launch(searched, tmp_path, "", 1, world=1)
    found = launch(searched, tmp_path, data_parallel, WORLD, world=WORLD)[0]
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-5, atol=1e-6)
