"""The whole module again after a run, to save, export and use as any other."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any
from unittest import mock

import lightning as L
import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

from lightning_pipeline import PipelineStrategy
from lightning_pipeline.runtime.errors import PeerFailedError
from lightning_pipeline.strategy import session
from tests.launching import PATIENCE_S, launch
from tests.training.models import LitTokens, gpt_stages, token_loader, tokens
from tests.training.runs import QUIET

pytestmark = pytest.mark.multiprocess


def scaled(module: Any, inputs: Any, output: Any) -> Any:
    return output * module.scale


class LitBuffers(LitTokens):
    """Has buffers on each stage, one of which is not saved. Adds up what it finds in checkpoints."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.sums: list[Any] = []
        for number, block in enumerate(self.net.blocks):
            block.register_buffer("scale", torch.tensor(1.0 + number), persistent=number % 2 == 0)
            block.register_forward_hook(scaled)

    def on_train_end(self) -> None:
        self.trainer.save_checkpoint(Path(self.trainer.default_root_dir) / "own.ckpt")

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        try:
            self.sums.append(sum(value.double().sum().item() for value in checkpoint["state_dict"].values()))
        except RuntimeError as error:
            self.sums.append(str(error))


class LitKeepsArguments(LitTokens):
    """As forecasting packages do: it makes its Trainer, and keeps what it makes it from."""

    def __init__(self, **trainer_arguments: Any) -> None:
        super().__init__()
        self.trainer_arguments = trainer_arguments
        self.made: L.Trainer | None = None

    def make_trainer(self) -> L.Trainer:
        self.made = L.Trainer(**self.trainer_arguments)
        return self.made


class LitHuggingFace(L.LightningModule):
    stage_config = {"model.transformer.h.1": 1}

    def __init__(self) -> None:
        super().__init__()
        self.model = GPT2LMHeadModel(GPT2Config(vocab_size=17, n_positions=8, n_embd=8, n_layer=2, n_head=2))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.model(input_ids=batch[0], labels=batch[0]).loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.model(input_ids=batch[0])

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


class LitOther(LitHuggingFace):
    """Another module for the same Trainer."""


class Stops(L.Callback):
    def on_train_batch_end(self, *args: Any) -> None:
        raise ValueError("stopped")


def refit_elsewhere(world: int, folder: Path) -> dict[str, Any]:
    """A run ends in an error that is caught, and the module goes into another, cut elsewhere."""
    module = LitTokens()
    for callbacks, stages in (([Stops()], gpt_stages(2)), ([], {"net.blocks.1": 1})):
        strategy = PipelineStrategy(stage_config=stages, num_stages=2, num_microbatches=2, timeout=PATIENCE_S)
        trainer = L.Trainer(strategy=strategy, devices=world, max_epochs=1, callbacks=callbacks, **QUIET)
        if callbacks:
            with pytest.raises((ValueError, PeerFailedError), match="stopped"):  # whichever comes first
                trainer.fit(module, token_loader(8, 4))
            with pytest.raises(RuntimeError, match=r"where an error has ended the run, load a checkpoint into a new"):
                module.state_dict()
        else:
            trainer.fit(module, token_loader(8, 4))
    trainer.save_checkpoint(folder / "refitted.ckpt")
    return {key: value.clone() for key, value in module.state_dict().items()}


LAYOUTS: dict[str, dict[str, Any]] = {"replicas": {}, "fsdp": {"data_parallel": "fsdp"}}
NAMES = ["replicas", pytest.param("fsdp", marks=pytest.mark.slow)]


def run(world: int, folder: Path, names: list[str], with_slow: bool) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name in names:
        options = LAYOUTS[name]
        L.seed_everything(1, verbose=False)
        module = LitBuffers(tied=True)
        strategy = PipelineStrategy(
            stage_config=gpt_stages(2), num_stages=2, num_microbatches=2, timeout=PATIENCE_S, **options
        )
        trainer = L.Trainer(strategy=strategy, devices=world, max_epochs=1, default_root_dir=folder, **QUIET)
        trainer.fit(module, token_loader(16, 4))
        trainer.save_checkpoint(folder / f"{name}.ckpt")
        found[f"{name}, sums"] = module.sums
        gathered = strategy.gather_module()
        [optimizer] = trainer.optimizers
        if name == "replicas":
            whole = module.state_dict()
            torch.save(optimizer.state_dict(), folder / f"optimizer.{trainer.global_rank}.pt")
            if gathered is not None:
                assert all(torch.equal(value, whole[key]) for key, value in gathered.state_dict().items())
        else:  # which is not put together
            for what in (module, module.net.blocks):
                with pytest.raises(RuntimeError, match=r"is on another stage.*trainer.strategy.gather_module\(\)"):
                    what.state_dict()
            with pytest.raises(RuntimeError, match=r"state is used after the run \(.*trainer.save_checkpoint\(path\)"):
                optimizer.state_dict()
        assert (gathered is not None) == (trainer.global_rank == 0)
        if gathered is not None:
            torch.save(gathered.state_dict(), folder / f"{name}.pt")
            ids = tokens(4).tensors[0]
            with torch.no_grad():
                found[name] = {"output": gathered.eval()(ids), "buffers": dict(gathered.named_buffers())}
            assert gathered.net.head.weight is gathered.net.tokens.weight
            assert gathered.device.type == "cpu" and not gathered.training
            assert not any("forward" in vars(sub) or sub._state_dict_pre_hooks for sub in gathered.modules())
            exported = torch.export.export(gathered.net, (ids,)).module()
            torch.testing.assert_close(exported(ids), found[name]["output"])
    module = LitHuggingFace()
    strategy = PipelineStrategy(num_stages=2, num_microbatches=2, timeout=PATIENCE_S)
    trainer = L.Trainer(strategy=strategy, devices=world, max_epochs=1, **QUIET)
    with mock.patch.object(session, "available_bytes", return_value=0):  # the module alone fits
        trainer.fit(module, token_loader(8, 4))
    module.state_dict()
    with pytest.raises(RuntimeError, match=r"SGD.state is used after the run.*has only a part"):
        len(trainer.optimizers[0].state)
    trainer.save_checkpoint(folder / "hf.ckpt")
    trainer.validate(LitOther(), token_loader(8, 4), verbose=False)  # whose parameters no optimizer has
    trainer.validate(module, token_loader(8, 4), verbose=False)
    gathered = strategy.gather_module()
    if gathered is not None:
        gathered.model.save_pretrained(folder / "hf")
        pickle.dumps(gathered)
    strategy = PipelineStrategy(stage_config=gpt_stages(2), num_stages=2, num_microbatches=2, timeout=PATIENCE_S)
    keeps = LitKeepsArguments(strategy=strategy, devices=world, max_epochs=1, **QUIET)
    keeps.make_trainer().fit(keeps, token_loader(8, 4))
    gathered = strategy.gather_module()
    found["copies"] = {
        "strategy": copied(strategy),
        "trainer": copied(keeps.trainer),
        "module": gathered is None or copied(gathered),
    }
    if with_slow:
        found["refitted"] = refit_elsewhere(world, folder)
    return found


def copied(value: Any) -> bool:
    """By copying and by pickling: into what was asked for the same, and has not run."""
    for made in (copy.deepcopy(value), pickle.loads(pickle.dumps(value))):
        strategy = made
        if isinstance(made, LitKeepsArguments):
            strategy = made.trainer_arguments["strategy"]
            assert made.made is not None
        elif isinstance(made, L.Trainer):
            strategy = made.strategy
        assert (strategy.stage_config, strategy.num_microbatches) == (gpt_stages(2), 2)
        assert strategy.timeout.total_seconds() == PATIENCE_S
        assert strategy.transport is None and strategy.topology is None
    return True


@pytest.fixture(scope="module")
def found_by_rank(folder: Path, wanted: Any, with_slow: bool) -> list[dict[str, Any]]:
    return launch(run, 4, folder, wanted(LAYOUTS, ["fsdp"], "name"), with_slow, world=4)


@pytest.fixture(scope="module")
def found(found_by_rank: list[dict[str, Any]]) -> dict[str, Any]:
    return found_by_rank[0]


@pytest.mark.parametrize("name", NAMES)
def test_hooks_of_every_rank_find_the_entries_of_a_checkpoint(name: str, found_by_rank: Any) -> None:
    first, *others = [found[f"{name}, sums"] for found in found_by_rank]
    assert len(first) == 2 and first[0] == first[1] != 0
    for sums in others:
        assert sums[0] == first[0]
        assert sums[1] == first[0] or "is_global_zero" in sums[1]
        assert name == "fsdp" or sums == first


@pytest.mark.parametrize("name", NAMES)
def test_the_gathered_module_is_that_of_the_checkpoint(name: str, found: Any, folder: Path) -> None:
    module = LitBuffers(tied=True).eval()
    saved = torch.load(folder / f"{name}.ckpt", weights_only=True)["state_dict"]
    module.load_state_dict(saved)
    state = torch.load(folder / f"{name}.pt", weights_only=True)
    assert list(state) == list(saved)
    assert all(torch.equal(state[key], value) for key, value in saved.items())
    assert {key: value.item() for key, value in found[name]["buffers"].items()} == {
        f"net.blocks.{number}.scale": 1.0 + number for number in range(4)
    }
    with torch.no_grad():
        assert torch.equal(found[name]["output"], module(tokens(4).tensors[0]))


def test_the_optimizer_of_every_rank_has_the_whole_state(found: Any, folder: Path) -> None:
    [saved] = torch.load(folder / "replicas.ckpt", weights_only=True)["optimizer_states"]
    for rank in range(4):
        state = torch.load(folder / f"optimizer.{rank}.pt", weights_only=True)
        assert list(state["state"]) == list(saved["state"]) and saved["state"]
        for index, entries in saved["state"].items():
            assert all(torch.equal(value, state["state"][index][key]) for key, value in entries.items())


def test_a_hugging_face_model_is_saved_by_its_own_method(found: Any, folder: Path) -> None:
    loaded = GPT2LMHeadModel.from_pretrained(folder / "hf")
    saved = torch.load(folder / "hf.ckpt", weights_only=True)["state_dict"]
    for key, value in loaded.state_dict().items():
        assert torch.equal(saved[f"model.{key}"], value), key


@pytest.mark.slow
def test_a_module_that_an_error_left_in_parts_becomes_whole_by_another_run(found_by_rank: Any, folder: Path) -> None:
    saved = torch.load(folder / "refitted.ckpt", weights_only=True)["state_dict"]
    for found in found_by_rank:
        assert found["refitted"].keys() == saved.keys()
        assert all(torch.equal(found["refitted"][key], value) for key, value in saved.items())


def test_what_refers_to_a_strategy_is_copied_and_pickled_after_a_run(found: Any) -> None:
    assert found["copies"] == {"strategy": True, "trainer": True, "module": True}


def test_before_a_run_there_is_nothing_to_gather() -> None:
    with pytest.raises(RuntimeError, match=r"call gather_module in a hook, or after trainer.fit"):
        PipelineStrategy().gather_module()
