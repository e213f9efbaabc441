"""Models that are built on the meta device: each rank makes, or reads, its own part only."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed import checkpoint as dcp
from torch.utils.data import DataLoader, TensorDataset
from transformers import GPT2Config, GPT2LMHeadModel

from lightning_pipeline import PipelineStrategy
from tests.launching import PATIENCE_S, launch
from tests.training.models import LitGPT, gpt_stages, tokens
from tests.training.runs import QUIET, Losses, differing, weights

pytestmark = pytest.mark.multiprocess

CONFIG = {"vocab_size": 17, "n_positions": 8, "n_embd": 16, "n_layer": 4, "n_head": 2}
WIDTH = 1000  # of a layer of 4 MB: some freed gradients are not used again, by chance, so layers are to be small
NUM_LAYERS = 24


class LitMeta(LitGPT):
    """A GPT that exists nowhere as a whole."""

    def __init__(self, **options: Any) -> None:
        with torch.device("meta"):
            super().__init__(**options)


class LitHuggingFace(L.LightningModule):
    """A Hugging Face model with tied embeddings, built in `configure_model`."""

    def configure_model(self) -> None:
        with torch.device("meta"):
            self.model = GPT2LMHeadModel(GPT2Config(**CONFIG))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.model(input_ids=batch[0], labels=batch[0]).loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class LitWide(L.LightningModule):
    """Layers that make up nearly all of the memory."""

    def __init__(self, width: int) -> None:
        super().__init__()
        with torch.device("meta"):
            self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(NUM_LAYERS))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x = batch[0]
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x.square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Scale(nn.Module):
    """Nothing sets its parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.value = nn.Parameter(torch.ones(3))
        self.register_buffer("mask", torch.ones(3, dtype=torch.bool), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return F.softmax(x * self.value.where(self.mask, 0), -1)


def trainer_of(module: Any, stage_config: Any, world: int, **options: Any) -> Any:
    """Fits, and gives the losses and the Trainer, or the error."""
    L.seed_everything(1, verbose=False)
    losses = Losses()
    strategy = PipelineStrategy(
        stage_config=stage_config, num_stages=world, num_microbatches=4, timeout=PATIENCE_S, **options
    )
    trainer = L.Trainer(strategy=strategy, devices=world, max_epochs=1, callbacks=[losses], **QUIET)
    trainer.fit(module, DataLoader(tokens(16), batch_size=8))
    return losses.values, trainer


def hf_stages(world: int) -> dict[str, int]:
    return {f"model.transformer.h.{4 * stage // world}": stage for stage in range(1, world)}


def peak() -> float:
    """The most memory that this process had since `forget_peak`, in MB."""
    [line] = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM")]
    return int(line.split()[1]) / 1e3


def measure(world: int, width: int) -> float:
    """MB that a rank needs at most to set up the wide model and run a step, beyond what it had."""
    module = LitWide(width)
    stages = {f"layers.{NUM_LAYERS * stage // world}": stage for stage in range(1, world)}
    strategy = PipelineStrategy(stage_config=stages, num_stages=world, num_microbatches=2, timeout=PATIENCE_S)
    trainer = L.Trainer(strategy=strategy, devices=world, max_steps=1, **QUIET)
    loader = DataLoader(TensorDataset(torch.zeros(2, width)), batch_size=2)
    Path("/proc/self/clear_refs").write_text("5")
    before = peak()
    trainer.fit(module, loader)
    return peak() - before


def error_of(module: Any, **options: Any) -> str:
    try:
        trainer_of(module, None, 1, **options)
    except Exception as error:
        return str(error)
    return "nothing"


FILES = ("model.ckpt", "model.safetensors", "sharded", "distributed")
MORE = {"gpt", "model.ckpt", "model.safetensors", "distributed"}


def often(names: Iterable[str]) -> list[Any]:
    """Names; those of `MORE` are slow."""
    return [pytest.param(name, marks=[pytest.mark.slow] * (name in MORE)) for name in names]


def run(world: int, folder: Path, names: list[str]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, module, stages in (
        ("gpt", LitMeta(tied=True), gpt_stages(world)),
        ("hugging face", LitHuggingFace(), hf_stages(world)),
    ):
        if name in names:
            losses, trainer = trainer_of(module, stages, world)
            found[name] = {"losses": losses, "weights": weights(trainer)}
    for name in (file for file in FILES if file in names):
        options = {"weights": folder / name if name == "model.ckpt" else {"model": folder / name}}
        found[name] = trainer_of(LitHuggingFace(), hf_stages(world), world, **options)[0]
    measure(world, 4)  # what is imported or connected once is no model's
    found["peak"] = measure(world, WIDTH)
    return found


def write_weights(folder: Path) -> GPT2LMHeadModel:
    torch.manual_seed(7)
    model = GPT2LMHeadModel(GPT2Config(**CONFIG))
    state = model.state_dict()
    torch.save({"state_dict": {f"model.{name}": value for name, value in state.items()}}, folder / "model.ckpt")
    untied = {name: value for name, value in state.items() if name != "lm_head.weight"}
    save_file(untied, folder / "model.safetensors")
    model.save_pretrained(folder / "sharded", max_shard_size="10KB")
    assert (folder / "sharded" / "model.safetensors.index.json").is_file()
    dcp.save(dict(state), checkpoint_id=folder / "distributed", no_dist=True)
    return model


def run_whole(model: GPT2LMHeadModel, folder: Path) -> tuple[list[float], list[str]]:
    """Losses of a model that was loaded by its own means, and the errors of others."""
    loaded = LitHuggingFace()
    loaded.configure_model = lambda: None  # type: ignore[method-assign]
    loaded.model = model
    losses = trainer_of(loaded, None, 1)[0]
    with torch.device("meta"):
        scaled = LitHuggingFace()
        scaled.scale = Scale()
    torch.save({"wte.weight": torch.zeros(18, 16)}, folder / "other.pt")
    return losses, [
        error_of(scaled),
        error_of(LitHuggingFace(), weights=folder / "model.safetensors"),
        error_of(LitHuggingFace(), weights={"model": folder / "nothing.pt"}),
        error_of(LitHuggingFace(), weights={"model.transformer": folder / "other.pt"}),
    ]


@pytest.fixture(scope="module")
def results(folder: Path, wanted: Any) -> dict[Any, Any]:
    model = write_weights(folder)
    [(loaded, errors)] = launch(run_whole, model, folder, world=1)
    names = wanted(["gpt", "hugging face", *FILES], MORE, "name")
    by_world = {world: launch(run, world, folder, names, world=world) for world in (1, 2)}
    return {"loaded": loaded, "errors": errors, **by_world}


@pytest.mark.parametrize("name", often(["gpt", "hugging face"]))
def test_initial_values_are_the_same_on_any_number_of_stages(name: str, results: Any) -> None:
    [alone], (first, second) = results[1], results[2]
    assert first[name]["losses"] == second[name]["losses"] == alone[name]["losses"]
    assert differing(alone[name]["weights"], first[name]["weights"]) == {}
    # The layers are not alike, and as spread as their modules make them.
    again = [value for key, value in alone[name]["weights"].items() if key.endswith(("qkv.weight", "c_attn.weight"))]
    assert len(again) == 4 and float((again[0] - again[1]).std()) > float(again[0].std())
    spreads = {key: float(value.std()) for key, value in alone[name]["weights"].items() if value.dim() > 1}
    assert all(0.004 < spread < 1.1 for spread in spreads.values()) and len(set(spreads.values())) > 10


@pytest.mark.parametrize("name", often(FILES))
def test_weights_come_from_files(name: str, results: Any) -> None:
    for rank in (*results[1], *results[2]):
        assert rank[name] == results["loaded"]


def test_a_rank_never_needs_more_than_its_stage(results: Any) -> None:
    whole = NUM_LAYERS * WIDTH * (WIDTH + 1) * 4 / 1e6
    [alone] = results[1]
    assert alone["peak"] > 1.8 * whole  # weights and gradients
    for rank in results[2]:
        assert rank["peak"] < 0.65 * alone["peak"]


def test_what_cannot_be_made_is_named(folder: Path, results: Any) -> None:
    unset, whole, missing, shape = results["errors"]
    assert "scale.value was built on the meta device, and nothing sets its values: give Scale a" in unset
    assert f"weights={{'model': '{folder / 'model.safetensors'}'}}" in whole
    assert "nothing.pt does not exist" in missing
    assert "model.transformer.wte.weight has shape [17, 16] and" in shape and "has [18, 16]" in shape
