"""Parameters that replicas keep in slices are whole to the user's code: what it reads and writes is as without."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
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


class WritesThroughData(Validated):
    """Also through views that are kept while the parameters change, and through views of views."""

    def __init__(self) -> None:
        super().__init__()
        self.views = [layer.linear.weight.data for layer in self.layers]

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.layers[0].linear.weight.data.clamp_(-LIMIT, LIMIT)
        self.layers[3].linear.bias.data[1:3] = 0.1
        rows = self.layers[2].linear.weight.detach()[:2]
        with torch.no_grad():
            self.layers[2].linear.weight.mul_(0.9)
        rows.view(-1).mul_(0.5)
        self.log("rows", rows.sum())
        self.log("kept", sum(view.abs().sum() for view in self.views))


class KeepsParameters(Validated):
    """Lists of parameters from before they were in slices, and from between steps; used in hooks and in steps."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = [layer.linear.weight for layer in self.layers]
        self.averages = [weight.detach().clone() for weight in self.weights]

    def on_train_epoch_start(self) -> None:
        self.biases = [layer.linear.bias for layer in self.layers]

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        penalty = sum(weight.square().sum() for weight in self.weights) + sum(bias.abs().sum() for bias in self.biases)
        return super().training_step(batch, batch_idx) + 0.01 * penalty

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.log("norm", clip_grad_norm_(self.weights, 0.1))

    @torch.no_grad()
    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        for average, weight in zip(self.averages, self.weights, strict=True):
            average.lerp_(weight, 0.1)
        self.weights[3].clamp_(-LIMIT, LIMIT)
        self.log("averages", sum(average.abs().sum() for average in self.averages))


class SetsGradients(Validated):
    def on_before_optimizer_step(self, optimizer: Any) -> None:
        for parameter in self.parameters():
            parameter.grad = torch.nan_to_num(parameter.grad) * 0.5


class UnfreezesInStep(Validated):
    def __init__(self) -> None:
        super().__init__()
        self.layers[0].requires_grad_(False)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.layers[0].requires_grad_(self.global_step > 1)
        return super().training_step(batch, batch_idx)


class NormsAllGradients(torch.optim.Optimizer):
    """As LAMB: scales by the norm of all gradients, and each update by the norms of what it updates."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.01})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        with torch.enable_grad():
            loss = closure()
        trained = [one for group in self.param_groups for one in group["params"] if one.grad is not None]
        norm = torch.zeros(1)
        for parameter in trained:
            norm.add_(parameter.grad.pow(2).sum())
        for parameter in trained:
            average = self.state[parameter].setdefault("average", torch.zeros_like(parameter))
            average.mul_(0.9).add_(parameter.grad / norm.sqrt().clamp(min=1.0))
            parameter.add_(average, alpha=-0.1 * float(parameter.norm() / average.norm()))
        return loss


class ByNormOfAll(Validated):
    def configure_optimizers(self) -> Any:
        return NormsAllGradients(self.parameters())


class SharpnessAware(torch.optim.Optimizer):
    """SAM (Foret et al., 2021): climbs by the normed gradient, and descends from where it was by the gradient there."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})
        self.base = torch.optim.SGD(self.param_groups, lr=0.1, momentum=0.9)
        self.param_groups = self.base.param_groups

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        closure = torch.enable_grad()(closure)
        loss = closure()
        trained = [one for group in self.param_groups for one in group["params"] if one.grad is not None]
        norm = torch.stack([parameter.grad.norm() for parameter in trained]).norm()
        for parameter in trained:
            self.state[parameter]["before"] = parameter.data.clone()
            parameter.add_(parameter.grad * (0.05 / norm))
        closure()
        for parameter in trained:
            parameter.data = self.state[parameter]["before"]
        self.base.step()
        return loss


class BySAM(Validated):
    def configure_optimizers(self) -> Any:
        return SharpnessAware(self.parameters())


class GathersByItself(Validated):
    """As with FSDP2 alone."""

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        gradients = [parameter.grad for parameter in self.parameters()]
        wholes = [one.full_tensor() if isinstance(one, DTensor) else one for one in gradients]
        self.log("norm", torch.stack([one.norm() for one in wholes]).norm())


class WatchesGradients(Validated):
    """Hooks on gradients: from before parameters were in slices, and from between steps."""

    def __init__(self) -> None:
        super().__init__()
        self.norms: list[float] = []

    def note(self, gradient: Tensor) -> None:
        self.norms.append(gradient.norm().item())

    def on_train_start(self) -> None:
        for parameter in self.parameters():
            parameter.register_hook(self.note)

    def on_train_epoch_start(self) -> None:
        if self.current_epoch == 1:
            self.layers[0].linear.bias.register_hook(lambda gradient: 2 * gradient)

    def on_train_epoch_end(self) -> None:
        self.log("norms", sum(self.norms))


class ClearsByHand(Validated):
    """A hand-optimized step clears gradients by the module, a layer and one by one."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        for parameter in self.layers[1:].parameters():
            parameter.grad = None
        self.layers[0].zero_grad()
        self.head.zero_grad(set_to_none=False)
        self.manual_backward(super().training_step(batch, batch_idx))
        self.optimizers().step()


OFTEN = (ClearsByHand, WatchesGradients, ClampsInSteps, WritesThroughData, KeepsParameters, UnfreezesInStep, BySAM)
MORE = (ClipsByItself, ClampsAfterUpdates, SumsNorms, ClampsAfterValidation, SetsGradients, GathersByItself)
OWN = (BySAM, ByNormOfAll)  # optimizers


class ByLBFGS(Validated):
    def configure_optimizers(self) -> Any:
        return torch.optim.LBFGS(self.parameters())


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
    """By module, with whole parameters, with slices and, where it has an optimizer of its own, shares of its state."""
    found = {}
    for module in modules:
        kinds = ("replicate", "fsdp", "zero1") if module in OWN else ("replicate", "fsdp")
        found[module.__name__] = [fitted(module, folder, world, data_parallel=kind) for kind in kinds]
    return found


@pytest.mark.parametrize(
    ("world", "modules"),
    [
        pytest.param(4, OFTEN, id="4"),
        pytest.param(4, (*MORE, ByNormOfAll), id="4, more", marks=pytest.mark.slow),
        pytest.param(2, tuple({*OFTEN, *MORE, *OWN} - {KeepsParameters}), id="2", marks=pytest.mark.slow),
    ],
)
def test_hooks_and_steps_do_what_they_do_with_whole_parameters(
    world: int, modules: tuple[type[Layers], ...], tmp_path: Path
) -> None:
    for module, (expected, *others) in launch(all_fitted, modules, tmp_path, world, world=world)[0].items():
        for found in others:
            torch.testing.assert_close(
                found, expected, rtol=1e-6, atol=1e-7, msg=lambda text, at=module: f"{at}: {text}"
            )


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
        fitted(ByNormOfAll, folder, 2, data_parallel="zero1")
    return [str(one.message) for one in caught]


def test_an_own_optimizer_is_told_to_keep_its_whole_state(tmp_path: Path) -> None:
    messages = launch(warned, tmp_path, world=2)[0]
    assert any("each replica updates all parameters by NormsAllGradients" in message for message in messages)


@pytest.mark.parametrize("module", [ReadsStateInHook, pytest.param(ReadsStateInStep, marks=pytest.mark.slow)])
def test_states_that_replicas_share_out_are_refused(module: type[Layers], tmp_path: Path) -> None:
    for message in launch(failed, module, tmp_path, 2, {"data_parallel": "zero1"}, world=2):
        assert "SGD.state is used in" in message and "data_parallel='zero1'" in message and __file__ in message
