"""Modules with one thing wrong each, for the tests of errors."""

from __future__ import annotations

import os
import signal
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import ModelPruning
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_pipeline import PipelineStrategy
from tests.launching import PATIENCE_S


class Plain(L.LightningModule):
    """Three layers and nothing wrong."""

    stage_config: dict[str, int] = {"second": 1}

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.second = nn.Linear(4, 4)
        self.head = nn.Linear(4, 1)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.head(self.between(self.first(batch[0]), batch_idx)).square().mean()

    def between(self, x: Tensor, batch_idx: int) -> Tensor:
        return self.second(x)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class OneLayer(Plain):
    """There is nothing to cut."""

    stage_config = {}

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.head(batch[0]).square().mean()


class ReadsItsLoss(Plain):
    """The step's Python waits for what the last stage computes."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        return loss if loss.item() > 0 else 2 * loss


class OutOfOrder(Plain):
    stage_config = {"first": 1, "second": 0, "head": 1}


class SharedActivation(Plain):
    """Two blocks share an activation, whose stage is that of the first."""

    stage_config = {"first": 0, "act": 0, "second": 1}

    def __init__(self) -> None:
        super().__init__()
        self.act = nn.ReLU()

    def between(self, x: Tensor, batch_idx: int) -> Tensor:
        return self.act(self.second(self.act(x)))


class SharedActivationTooSoon(SharedActivation):
    """Its stage is that of the second, so that the data goes there too soon; set as MindSpore's cells are."""

    stage_config = None

    def __init__(self) -> None:
        super().__init__()
        for name, stage in {"first": 0, "act": 1, "second": 0, "head": 1}.items():
            getattr(self, name).pipeline_stage = stage


class NeverReached(Plain):
    stage_config = {"unused": 1}

    def __init__(self) -> None:
        super().__init__()
        self.unused = nn.Linear(4, 4)


class SkippedStage(Plain):
    """Of three stages the middle one's module is not called."""

    stage_config = {"unused": 1, "second": 2}

    def __init__(self) -> None:
        super().__init__()
        self.unused = nn.Linear(4, 4)


class _Calls(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, module: nn.Module) -> Tensor:
        return module(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient, None


class BoundaryInFunction(Plain):
    def between(self, x: Tensor, batch_idx: int) -> Tensor:
        return _Calls.apply(x, self.second)


class Changing(Plain):
    def between(self, x: Tensor, batch_idx: int) -> Tensor:
        if batch_idx == 2:
            x = x * 2
        return self.second(x)


class RankDependent(Plain):
    def between(self, x: Tensor, batch_idx: int) -> Tensor:
        if batch_idx == 2 and self.global_rank == 1:
            x = x * 3
        return self.second(x)


class RankFromEnvironment(Plain):
    def between(self, x: Tensor, batch_idx: int) -> Tensor:
        if batch_idx == 2 and os.environ.get("LOCAL_RANK") == "1":
            x = x + 3
        return self.second(x)


class DrawsWeights(Plain):
    def between(self, x: Tensor, batch_idx: int) -> Tensor:
        nn.init.normal_(self.second.weight)
        return self.second(x)


class CallsItself(Plain):
    """Outside of a step, where no rank has all of it."""

    def on_train_end(self) -> None:
        self.head(self.second(self.first(torch.ones(1, 4))))


class Prunes(Plain):
    def configure_callbacks(self) -> ModelPruning:
        return ModelPruning("l1_unstructured", amount=0.5)


class LossInNoKey(Plain):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return {"error": super().training_step(batch, batch_idx)}


class Raises(Plain):
    """Raises on the first stage at the third batch, in a leaf."""

    def __init__(self, at: str) -> None:
        super().__init__()
        getattr(self, at).register_forward_pre_hook(self.fail)
        self.calls = 0

    def fail(self, module: nn.Module, args: Any) -> None:
        self.calls += 1
        if self.calls > 6:
            raise FloatingPointError("the user's own error")


class Killed(Plain):
    def __init__(self, rank: int) -> None:
        super().__init__()
        self.rank = rank

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if batch_idx == 2 and self.global_rank == self.rank:
            os.kill(os.getpid(), signal.SIGKILL)


class LoopsBack(Plain):
    stage_config = {"first": 0, "second": 1}

    def between(self, x: Tensor, batch_idx: int) -> Tensor:
        return self.first(self.second(x))


class GradientAcrossStages(Plain):
    def between(self, x: Tensor, batch_idx: int) -> Tensor:
        y = self.second(x)
        (gradient,) = torch.autograd.grad(y.sum(), self.first.bias, create_graph=True)
        return y + gradient


class StepsAtTimes(Plain):
    """Steps where it likes what it sees of a micro-batch."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()
        loss = self.second(self.first(batch[0])).square().mean()
        self.manual_backward(loss)
        if batch[0][0, 0] > 0:
            optimizer.step()


class CreatesAGraph(StepsAtTimes):
    def training_step(self, batch: Any, batch_idx: int) -> None:
        self.manual_backward(self.second(self.first(batch[0])).square().mean(), create_graph=True)


class StepsWithoutALoss(StepsAtTimes):
    def training_step(self, batch: Any, batch_idx: int) -> None:
        self.manual_backward(self.second(self.first(batch[0])).square().mean().detach())


class GoesBackTwice(StepsAtTimes):
    def training_step(self, batch: Any, batch_idx: int) -> None:
        loss = self.second(self.first(batch[0])).square().mean()
        self.manual_backward(loss)
        self.manual_backward(loss * 2)


def fit(module: type[Plain], *args: Any, world: int = 2, **strategy: Any) -> dict[str, Tensor]:
    """Train `module` for a few batches of 8 samples in 4 micro-batches. Rank 0 returns its weights."""
    L.seed_everything(1, verbose=False)
    strategy = {"num_microbatches": 4, "timeout": PATIENCE_S, **strategy}
    trainer = L.Trainer(
        strategy=PipelineStrategy(**strategy),
        accelerator="cpu",
        devices=world,
        max_steps=4,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module(*args), DataLoader(TensorDataset(torch.randn(40, 4)), batch_size=8))
    found = trainer.strategy.lightning_module_state_dict()
    return found if trainer.global_rank == 0 else {}
