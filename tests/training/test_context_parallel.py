"""Two stages, of which two ranks share each sequence, train as one process does."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_pipeline import PipelineStrategy
from lightning_pipeline.engine.context import ContextRanks
from tests.launching import PATIENCE_S, launch
from tests.training.runs import QUIET, Losses

pytestmark = pytest.mark.multiprocess

VOCABULARY, LENGTH, WIDTH, HEADS = 29, 16, 16, 4
TOLERANCE = 1e-5


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = (
            part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in self.qkv(self.norms[0](x)).chunk(3, dim=-1)
        )
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.dropout(self.out(mixed.transpose(1, 2).flatten(-2)))
        return x + self.dropout(self.mlp(self.norms[1](x)))


class GPT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.layers = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids) + self.positions(torch.arange(ids.shape[1], device=ids.device))
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


class LitGPT(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.model = self.make()

    def make(self) -> nn.Module:
        return GPT()

    def loss(self, batch: list[Tensor]) -> Tensor:
        logits = self.model(batch[0])
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), batch[0][:, 1:].flatten())

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch))

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-2, eps=1e-4)


class LitLlama(LitGPT):
    def make(self) -> nn.Module:
        import transformers

        config = transformers.LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=WIDTH,
            intermediate_size=2 * WIDTH,
            num_hidden_layers=2,
            num_attention_heads=HEADS,
            num_key_value_heads=2,
            max_position_embeddings=2 * LENGTH,
        )
        return transformers.LlamaForCausalLM(config)

    def loss(self, batch: list[Tensor]) -> Tensor:
        return self.model(input_ids=batch[0], labels=batch[0]).loss


MODULES = {"gpt": LitGPT, "llama": LitLlama}
CUTS = {"gpt": "model.layers.1", "llama": "model.model.layers.1"}


def ids(num_samples: int, seed: int = 0) -> TensorDataset:
    return TensorDataset(
        torch.randint(0, VOCABULARY, (num_samples, LENGTH), generator=torch.Generator().manual_seed(seed))
    )


def strategy_of(world: int, cut: str, **options: Any) -> PipelineStrategy:
    if world == 1:
        return PipelineStrategy(num_stages=1, num_microbatches=4)
    return PipelineStrategy(
        stage_config={cut: 1},
        num_stages=2,
        context_parallel_size=2,
        num_microbatches=4,
        timeout=PATIENCE_S,
        **options,
    )


def train(world: int, model: str, folder: Path, **options: Any) -> dict[str, Any]:
    torch.manual_seed(0)
    losses = Losses()
    calls = _count_calls()
    trainer = L.Trainer(
        strategy=strategy_of(world, CUTS[model], **options),
        devices=world,
        max_epochs=2,
        gradient_clip_val=0.5,
        limit_val_batches=1,
        accumulate_grad_batches=2,
        callbacks=[losses],
        **QUIET,
    )
    L.seed_everything(1, verbose=False)
    module = MODULES[model]()
    # Data that differs from rank to rank: those of a stage's first rank count.
    first = os.environ["LOCAL_RANK"] in ("0",)
    loader = DataLoader(ids(24, seed=0 if first else 9), batch_size=8)
    trainer.fit(module, loader, loader)
    trainer.save_checkpoint(folder / f"{model}.ckpt")
    return {"losses": losses.values, "val_loss": float(trainer.callback_metrics["val_loss"]), "calls": calls}


def _count_calls() -> dict[str, list[int]]:
    """The shapes along the sequence of what attention is called with from now on."""
    lengths: dict[str, list[int]] = {"attention": []}
    plain = ContextRanks.attention

    def attention(self: ContextRanks, query: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        lengths["attention"].append(query.shape[2])
        return plain(self, query, *args, **kwargs)

    ContextRanks.attention = attention  # type: ignore[method-assign]
    return lengths


def train_all(world: int, folder: Path) -> dict[str, Any]:
    return {model: train(world, model, folder) for model in MODULES}


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[Any, Any]:
    found: dict[Any, Any] = {}
    for world in (1, 4):
        folder = tmp_path_factory.mktemp(f"world{world}")
        found[world] = launch(train_all, world, folder, world=world)
        for model in MODULES:
            found[world, model] = torch.load(folder / f"{model}.ckpt", weights_only=True)
    return found


@pytest.mark.parametrize("model", MODULES)
def test_losses_are_those_of_one_process(model: str, results: Any) -> None:
    [alone] = results[1]
    for rank in results[4]:
        assert rank[model]["losses"] == pytest.approx(alone[model]["losses"], abs=TOLERANCE)
        assert rank[model]["val_loss"] == pytest.approx(alone[model]["val_loss"], abs=TOLERANCE)


@pytest.mark.parametrize("model", MODULES)
def test_checkpoints_are_those_of_one_process(model: str, results: Any) -> None:
    expected, found = results[1, model], results[4, model]
    assert list(found["state_dict"]) == list(expected["state_dict"])
    for key, value in expected["state_dict"].items():
        torch.testing.assert_close(found["state_dict"][key], value, rtol=TOLERANCE, atol=TOLERANCE)


@pytest.mark.parametrize("model", MODULES)
def test_each_rank_attends_from_its_part(model: str, results: Any) -> None:
    for rank in results[4]:
        assert set(rank[model]["calls"]["attention"]) == {LENGTH // 2}
