"""fp16: an overflow on one stage skips the step on all, and the scale stays the same everywhere."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.plugins import MixedPrecision
from torch.amp import GradScaler
from torch.utils.data import DataLoader, TensorDataset

from lightning_pipeline import PipelineStrategy
from tests.launching import PATIENCE_S, launch
from tests.training import gan_script
from tests.training.models import LitTokens, gpt_stages, token_loader
from tests.training.runs import QUIET, Losses, pipeline_trainer, weights

pytestmark = pytest.mark.multiprocess


class Scales(Callback):
    """The scale after each step."""

    def __init__(self) -> None:
        self.values: list[float] = []

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        self.values.append(trainer.precision_plugin.scaler.get_scale())


class LitOverflow(LitTokens):
    """In batch 3 the gradient of one parameter of the first stage overflows, and of no other."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.batch_idx = 0
        self.net.blocks[0].mlp[0].weight.register_hook(self.spoil)

    def spoil(self, gradient: torch.Tensor) -> torch.Tensor:
        return gradient * float("inf") if self.batch_idx == 3 else gradient

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.batch_idx = batch_idx
        return super().training_step(batch, batch_idx)


class GANWithOverflow(gan_script.GAN):
    """Of two optimizers, one gets a gradient that overflows in batch 1."""

    batch_idx = 0

    def __init__(self) -> None:
        super().__init__()
        self.generator.body[0].weight.register_hook(self.spoil)

    def spoil(self, gradient: torch.Tensor) -> torch.Tensor:
        return gradient * float("inf") if self.batch_idx == 1 else gradient

    def training_step(self, batch: Any, batch_idx: int) -> None:
        self.batch_idx = batch_idx
        super().training_step(batch, batch_idx)


def by_hand(world: int) -> dict[str, Any]:
    scales = Scales()
    L.seed_everything(1, verbose=False)
    plugin = MixedPrecision("16-mixed", "cpu", scaler=GradScaler("cpu", init_scale=2.0**10, growth_interval=4))
    strategy = PipelineStrategy(
        num_stages=world,
        num_microbatches=4,
        stage_config=gan_script.CUTS["in the generator" if world > 1 else "one"],
        timeout=PATIENCE_S,
    )
    trainer = L.Trainer(strategy=strategy, devices=world, plugins=[plugin], max_epochs=2, callbacks=[scales], **QUIET)
    images = torch.rand(48, 1, 8, 8, generator=torch.Generator().manual_seed(2)) * 2 - 1
    module = GANWithOverflow()
    trainer.fit(module, DataLoader(TensorDataset(images), batch_size=16))
    parameters = {name: parameter.detach() for name, parameter in module.named_parameters()}
    return {"scales": scales.values, "weights": parameters, "losses": dict(trainer.callback_metrics)}


def trainer_of(world: int, **options: Any) -> L.Trainer:
    # Lightning itself turns "16-mixed" into bf16 on the CPU.
    scaler = GradScaler("cpu", init_scale=2.0**10, growth_interval=3)
    plugin = MixedPrecision("16-mixed", "cpu", scaler=scaler)
    return pipeline_trainer(gpt_stages(world), world=world, plugins=[plugin], **options)


def run(world: int, folder: str, with_slow: bool) -> dict[str, Any]:
    scales, losses = Scales(), Losses()
    L.seed_everything(1, verbose=False)
    trainer = trainer_of(world, max_epochs=1, gradient_clip_val=0.5, callbacks=[scales, losses])
    trainer.fit(LitOverflow(), token_loader(48, 8))
    found: dict[str, Any] = {"scales": scales.values, "losses": losses.values, "weights": weights(trainer)}
    path = f"{folder}/{world}.ckpt"
    trainer.save_checkpoint(path)
    if not with_slow:
        return found
    found["by hand"] = by_hand(world)
    resumed = Scales()
    trainer = trainer_of(world, max_epochs=2, callbacks=[resumed])
    trainer.fit(LitOverflow(), token_loader(48, 8), ckpt_path=path)
    accumulated = Scales()
    trainer = trainer_of(world, max_epochs=1, callbacks=[accumulated], accumulate_grad_batches=2)
    trainer.fit(LitOverflow(), token_loader(48, 8))
    return {**found, "resumed": resumed.values, "accumulated": accumulated.values}


REPLICAS: dict[str, dict[str, Any]] = {"zero1": {"data_parallel": "zero1"}, "fsdp": {"data_parallel": "fsdp"}}


def overflow(world: int, names: list[str]) -> dict[str, Any]:
    """A scale that is far too large at first."""
    found = {}
    for name in names:
        options = REPLICAS[name]
        scales = Scales()
        L.seed_everything(1, verbose=False)
        plugin = MixedPrecision("16-mixed", "cpu", scaler=GradScaler("cpu", init_scale=2.0**24, growth_interval=3))
        strategy = PipelineStrategy(stage_config=gpt_stages(2), num_microbatches=4, timeout=PATIENCE_S, **options)
        trainer = L.Trainer(
            strategy=strategy, devices=world, plugins=[plugin], max_epochs=2, callbacks=[scales], **QUIET
        )
        trainer.fit(LitTokens(), token_loader(48, 8))
        found[name] = {"scales": scales.values, "weights": weights(trainer)}
    return found


@pytest.fixture(scope="module")
def overflown(wanted: Any) -> list[dict[str, Any]]:
    return launch(overflow, 4, wanted(REPLICAS, ["zero1"], "name"), world=4)


@pytest.mark.parametrize("name", [pytest.param("zero1", marks=pytest.mark.slow), "fsdp"])
def test_replicas_agree_on_an_overflow(name: str, overflown: Any) -> None:
    # Where the gradients fit depends on the share of a micro-batch in a replica's loss, so not on one process.
    scales = overflown[0][name]["scales"]
    assert scales[0] == 2.0**23 and max(scales[4:]) <= 2.0**20 and len(scales) == 6
    assert [rank[name]["scales"] for rank in overflown] == [scales] * 4
    assert all(torch.isfinite(value).all() for value in overflown[0][name]["weights"].values())


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory, with_slow: bool) -> dict[int, list[dict[str, Any]]]:
    folder = str(tmp_path_factory.mktemp("scaled"))
    found = {world: launch(run, world, folder, with_slow, world=world) for world in (1, 2)}
    for world in found:
        state = torch.load(Path(folder) / f"{world}.ckpt", weights_only=True)["MixedPrecision"]
        assert state["scale"] == found[world][0]["scales"][-1]
    return found


def test_the_scale_is_the_same_everywhere(results: Any) -> None:
    [alone] = results[1]
    # It grows after three good steps in a row, and is halved by batch 3 of each epoch.
    assert alone["scales"][:4] == [2.0**10, 2.0**10, 2.0**11, 2.0**10]
    assert all(rank["scales"] == alone["scales"] for rank in results[2])


@pytest.mark.slow
def test_the_scale_is_the_same_everywhere_in_other_runs(results: Any) -> None:
    [alone] = results[1]
    for name in ("resumed", "accumulated"):
        assert all(rank[name] == alone[name] for rank in results[2]), name
    assert alone["resumed"][0] >= alone["scales"][-1]


def test_the_run_is_that_of_one_process(results: Any) -> None:
    [alone], (found, other) = results[1], results[2]
    assert found["losses"] == other["losses"] == pytest.approx(alone["losses"], abs=2e-3)
    assert all(torch.isfinite(value).all() for value in found["weights"].values())
    for name, value in alone["weights"].items():
        torch.testing.assert_close(found["weights"][name], value, atol=3e-3, rtol=0)


@pytest.mark.slow
def test_each_optimizer_that_is_stepped_by_hand_heeds_it(results: Any) -> None:
    [alone] = results[1]
    # Two steps a batch, of which one is skipped in batch 1 of each epoch: it halves the scale.
    assert alone["by hand"]["scales"][:3] == [2.0**10, 2.0**9, 2.0**9]
    for rank in results[2]:
        assert rank["by hand"]["scales"] == alone["by hand"]["scales"]
        torch.testing.assert_close(rank["by hand"]["losses"], alone["by hand"]["losses"], atol=2e-3, rtol=0)
        torch.testing.assert_close(rank["by hand"]["weights"], alone["by hand"]["weights"], atol=3e-3, rtol=0)
