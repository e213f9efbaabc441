"""Parameters that replicas keep in slices are whole to the user's code: what it reads and writes is as without."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor
from torch.nn.utils import clip_grad_norm_

from lightning_pipeline import PipelineStrategy
from tests.habits.modules import Layers
from tests.launching import PATIENCE_S, launch
from tests.training.runs import QUIET

pytestmark = pytest.mark.multiprocess

LIMIT = 0.2


class Validated(Layers):
    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val", self(batch[0]).mean())


class ClipsByItself(Validated):
    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.log("norm", clip_grad_norm_(self.parameters(), 0.1))


class SumsNorms(Validated):
    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.log("gradients", sum(p.grad.norm() for p in self.parameters() if p.grad is not None))
        self.log("weights", torch.cat([p.detach().flatten() for p in self.parameters()]).norm())


class ClampsAfterUpdates(Validated):
    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.clamp_(-LIMIT, LIMIT)
            torch._foreach_mul_([layer.linear.bias for layer in self.layers], 0.5)


class ClampsInSteps(Validated):
    """Through .data, which leaves no version."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.layers[0].linear.weight.data.clamp_(-LIMIT, LIMIT)
        with torch.no_grad():
            self.layers[3].linear.weight.clamp_(-LIMIT, LIMIT)
        return super().training_step(batch, batch_idx)


class ClampsAfterValidation(Validated):
    def on_validation_epoch_end(self) -> None:
        self.log("weights", torch.stack([p.norm() for p in self.parameters()]).sum())
        with torch.no_grad():
            self.layers[1].linear.weight.clamp_(-LIMIT, LIMIT)


class ReadsStateInHook(Validated):
    """The hook saves a checkpoint as well, which uses the states."""

    def on_train_batch_end(self, *_: Any) -> None:
        self.trainer.save_checkpoint(Path(self.trainer.default_root_dir) / "hook.ckpt")
        self.log("known", float(len(self.trainer.optimizers[0].state)))


class ReadsStateInStep(Validated):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.log("known", float(len(self.trainer.optimizers[0].state)))
        return super().training_step(batch, batch_idx)


OFTEN = (ClipsByItself, ClampsAfterUpdates, ClampsInSteps)
MORE = (SumsNorms, ClampsAfterValidation)


class WritesThroughData(Validated):
    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.layers[0].linear.weight.data.clamp_(-LIMIT, LIMIT)


class ByLBFGS(Validated):
    def configure_optimizers(self) -> Any:
        return torch.optim.LBFGS(self.parameters())


class SignDescent(torch.optim.Optimizer):
    """A user's own."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.01})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        with torch.enable_grad():
            loss = closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.sub_(parameter.grad.sign(), alpha=group["lr"])
        return loss


class ByOwnOptimizer(Validated):
    def configure_optimizers(self) -> Any:
        return SignDescent(self.parameters())


def fitted(module: type[Layers], folder: Path, world: int, **options: Any) -> dict[str, Any]:
    """The weights at the end, and what was logged, on the first rank; the error of a run that has failed."""
    L.seed_everything(1, verbose=False)
    made = module()
    generator = torch.Generator().manual_seed(2)
    loader = torch.utils.data.DataLoader([made.batch(generator) for _ in range(4)], batch_size=None)
    strategy = PipelineStrategy(
        num_stages=world // 2,
        num_microbatches=2,
        stage_config={"layers.2": 1} if world == 4 else {},
        timeout=PATIENCE_S,
        **options,
    )
    trainer = L.Trainer(strategy=strategy, devices=world, max_epochs=2, default_root_dir=folder, **QUIET)
    trainer.fit(made, loader, loader)
    trainer.save_checkpoint(folder / "end.ckpt")
    if trainer.global_rank:
        return {}
    return {
        "weights": torch.load(folder / "end.ckpt", weights_only=True)["state_dict"],
        "logged": dict(trainer.callback_metrics),
    }


def all_fitted(modules: tuple[type[Layers], ...], folder: Path, world: int) -> dict[str, list[dict[str, Any]]]:
    layouts: tuple[dict[str, Any], ...] = ({}, {"data_parallel": "fsdp"})
    return {module.__name__: [fitted(module, folder, world, **options) for options in layouts] for module in modules}


@pytest.mark.parametrize(
    ("world", "modules"),
    [
        pytest.param(4, OFTEN, id="4"),
        pytest.param(4, MORE, id="4, more", marks=pytest.mark.slow),
        pytest.param(2, (*OFTEN, *MORE), id="2", marks=pytest.mark.slow),
    ],
)
def test_hooks_and_steps_do_what_they_do_with_whole_parameters(
    world: int, modules: tuple[type[Layers], ...], tmp_path: Path
) -> None:
    for module, (expected, found) in launch(all_fitted, modules, tmp_path, world, world=world)[0].items():
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-7, msg=lambda text, at=module: f"{at}: {text}")


def failed(module: type[Layers], folder: Path, world: int, options: dict[str, Any]) -> str:
    try:
        fitted(module, folder, world, **options)
    except (NotImplementedError, RuntimeError, ValueError) as error:
        return str(error)
    return ""


@pytest.mark.parametrize("kind", ["fsdp", pytest.param("zero1", marks=pytest.mark.slow)])
def test_what_updates_all_parameters_as_one_is_refused(kind: str, tmp_path: Path) -> None:
    for message in launch(failed, ByLBFGS, tmp_path, 2, {"data_parallel": kind}, world=2):
        assert "LBFGS updates all parameters as one vector" in message and "leave" in message


def warned(folder: Path) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fitted(ByOwnOptimizer, folder, 2, data_parallel="zero1")
    return [str(one.message) for one in caught]


def test_an_own_optimizer_is_told_that_it_finds_no_gradients_at_others(tmp_path: Path) -> None:
    messages = launch(warned, tmp_path, world=2)[0]
    assert any("SignDescent" in message and 'leave data_parallel="zero1" out' in message for message in messages)


@pytest.mark.parametrize("module", [ReadsStateInHook, pytest.param(ReadsStateInStep, marks=pytest.mark.slow)])
def test_states_that_replicas_share_out_are_refused(module: type[Layers], tmp_path: Path) -> None:
    for message in launch(failed, module, tmp_path, 2, {"data_parallel": "zero1"}, world=2):
        assert "SGD.state is used in" in message and "data_parallel='zero1'" in message and __file__ in message


def test_a_write_that_would_be_lost_is_refused(tmp_path: Path) -> None:
    for message in launch(failed, WritesThroughData, tmp_path, 4, {"data_parallel": "fsdp"}, world=4):
        assert "clamp_ writes into a view, such as .data" in message
