"""Two stages, of which two ranks share each sequence, train as one process does."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

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


class LitReading(LitGPT):
    """Reads its loss, and computes its blocks again in backward."""

    def loss(self, batch: list[Tensor]) -> Tensor:
        ids = batch[0]
        x = self.model.tokens(ids) + self.model.positions(torch.arange(LENGTH, device=ids.device))
        for layer in self.model.layers:
            x = checkpoint(layer, x, use_reentrant=False)
        return F.cross_entropy(self.model.head(x).flatten(0, 1), ids.flatten())

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.largest = max(getattr(self, "largest", 0.0), loss.item())
        return loss

    def predict_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return self.model(batch[0])


class LitUneven(LitGPT):
    """Does something else on the second of the ranks that share a sequence."""

    def loss(self, batch: list[Tensor]) -> Tensor:
        return super().loss(batch) * (1 + int(os.environ["LOCAL_RANK"]) % 2)


MODULES = {"gpt": LitGPT, "llama": LitLlama, "reading": LitReading}
CUTS = {"gpt": "model.layers.1", "llama": "model.model.layers.1", "reading": "model.layers.1"}
SCHEDULES = {"reading": "zero_bubble"}
MORE = {"llama", "reading"}
NAMES = [pytest.param(name, marks=[pytest.mark.slow] * (name in MORE)) for name in MODULES]


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


def train(world: int, model: str, folder: Path) -> dict[str, Any]:
    torch.manual_seed(0)
    losses = Losses()
    lengths = _attended_lengths()
    trainer = L.Trainer(
        strategy=strategy_of(world, CUTS[model], schedule=SCHEDULES.get(model, "1f1b")),
        devices=world,
        max_epochs=1,
        gradient_clip_val=0.5,
        limit_val_batches=1,
        accumulate_grad_batches=2,
        callbacks=[losses],
        **QUIET,
    )
    L.seed_everything(1, verbose=False)
    module = MODULES[model]()
    # Data that differs from rank to rank: those of a stage's first rank count.
    loader = DataLoader(ids(24, seed=0 if os.environ["LOCAL_RANK"] == "0" else 9), batch_size=8)
    trainer.fit(module, loader, loader)
    trainer.save_checkpoint(folder / f"{model}.ckpt")
    found = {"losses": losses.values, "val_loss": float(trainer.callback_metrics["val_loss"]), "lengths": lengths}
    if model == "reading":
        found["predicted"] = torch.cat(trainer.predict(module, loader))
    return found


def _attended_lengths() -> list[int]:
    """Gets the number of queries of each call of attention on parts of sequences from now on."""
    lengths: list[int] = []
    plain = getattr(ContextRanks.attention, "plain", ContextRanks.attention)

    def attention(self: ContextRanks, query: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        lengths.append(query.shape[2])
        return plain(self, query, *args, **kwargs)

    attention.plain = plain  # type: ignore[attr-defined]
    ContextRanks.attention = attention  # type: ignore[method-assign]
    return lengths


def train_uneven() -> str:
    trainer = L.Trainer(strategy=strategy_of(4, CUTS["gpt"]), devices=4, max_steps=1, **QUIET)
    with pytest.raises(RuntimeError) as error:
        trainer.fit(LitUneven(), DataLoader(ids(8), batch_size=8))
    return str(error.value)


def train_all(world: int, folder: Path, models: list[str]) -> dict[str, Any]:
    found: dict[str, Any] = {model: train(world, model, folder) for model in models}
    if world == 4:
        found["uneven"] = train_uneven()
    return found


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory, wanted: Any) -> dict[Any, Any]:
    found: dict[Any, Any] = {}
    models = wanted(MODULES, MORE, "model")
    for world in (1, 4):
        folder = tmp_path_factory.mktemp(f"world{world}")
        found[world] = launch(train_all, world, folder, models, world=world)
        for model in models:
            found[world, model] = torch.load(folder / f"{model}.ckpt", weights_only=True)
    return found


@pytest.mark.parametrize("model", NAMES)
def test_losses_are_those_of_one_process(model: str, results: Any) -> None:
    [alone] = results[1]
    for rank in results[4]:
        assert rank[model]["losses"] == pytest.approx(alone[model]["losses"], abs=TOLERANCE)
        assert rank[model]["val_loss"] == pytest.approx(alone[model]["val_loss"], abs=TOLERANCE)


@pytest.mark.parametrize("model", NAMES)
def test_checkpoints_are_those_of_one_process(model: str, results: Any) -> None:
    expected, found = results[1, model], results[4, model]
    assert list(found["state_dict"]) == list(expected["state_dict"])
    for key, value in expected["state_dict"].items():
        torch.testing.assert_close(found["state_dict"][key], value, rtol=TOLERANCE, atol=TOLERANCE)


@pytest.mark.parametrize("model", NAMES)
def test_each_rank_attends_from_its_part(model: str, results: Any) -> None:
    for rank in results[4]:
        assert set(rank[model]["lengths"]) == {LENGTH // 2}


@pytest.mark.slow
@pytest.mark.parametrize("model", ["reading"])
def test_predictions_are_of_whole_sequences(model: str, results: Any) -> None:
    [alone] = results[1]
    for rank in results[4]:
        torch.testing.assert_close(rank[model]["predicted"], alone[model]["predicted"], rtol=1e-4, atol=1e-4)


def test_ranks_that_share_a_sequence_run_the_same(results: Any) -> None:
    assert any("the ranks did not compute with the same numbers" in rank["uneven"] for rank in results[4])


def train_replicas(world: int, *, gradients_mean: bool) -> dict[str, Any]:
    """Trains with two replicas, of ranks that share sequences where there are eight."""
    data = ids(24)
    # The order of ranks is stage, replica, rank of the sequence.
    replica = int(os.environ["LOCAL_RANK"]) % (world // 2) // (world // 4)
    loader = DataLoader(data, batch_size=4, sampler=DistributedSampler(data, 2, replica, shuffle=False))
    strategy = PipelineStrategy(
        stage_config={CUTS["gpt"]: 1},
        num_stages=2,
        context_parallel_size=world // 4,
        num_microbatches=2,
        data_parallel="zero1" if world == 8 else "replicate",
        gradients_mean=gradients_mean,
        timeout=PATIENCE_S,
    )
    L.seed_everything(1, verbose=False)
    module = LitGPT()
    losses = Losses()
    trainer = L.Trainer(
        strategy=strategy, devices=world, max_epochs=1, gradient_clip_val=0.5, callbacks=[losses], **QUIET
    )
    trainer.fit(module, loader)
    return {"replica": replica, "losses": losses.values, "weights": dict(module.state_dict())}


@pytest.mark.slow
@pytest.mark.parametrize("gradients_mean", [True, False])
def test_replicas_equal_those_with_whole_sequences(gradients_mean: bool) -> None:
    whole, *_, last = launch(partial(train_replicas, gradients_mean=gradients_mean), 4, world=4)
    for rank in launch(partial(train_replicas, gradients_mean=gradients_mean), 8, world=8):
        expected = (whole, last)[rank["replica"]]
        assert expected["replica"] == rank["replica"]
        assert rank["losses"] == pytest.approx(expected["losses"], abs=TOLERANCE)
        for name, value in expected["weights"].items():
            torch.testing.assert_close(rank["weights"][name], value, rtol=TOLERANCE, atol=TOLERANCE)


def test_options_that_do_not_go_together() -> None:
    with pytest.raises(ValueError, match="context_parallel_size=2 needs num_stages as well"):
        PipelineStrategy(context_parallel_size=2)
    with pytest.raises(ValueError, match="context_parallel_size=2 does not go with tensor_parallel_size=2"):
        PipelineStrategy(context_parallel_size=2, tensor_parallel_size=2, num_stages=2)
    with pytest.raises(ValueError, match='context_parallel_size=2 does not go with data_parallel="fsdp"'):
        PipelineStrategy(context_parallel_size=2, data_parallel="fsdp", num_stages=2)
