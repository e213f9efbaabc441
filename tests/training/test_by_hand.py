"""Manual optimization: what comes of it is what plain Lightning makes of the whole batches, but for rounding."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor

from lightning_pipeline import PipelineStrategy
from tests.habits import by_hand
from tests.habits.modules import Layers
from tests.launching import launch
from tests.training.runs import QUIET

pytestmark = pytest.mark.multiprocess


def flipped(module: by_hand.Adversarial, x: Tensor) -> Tensor:
    """No random numbers, which a whole batch draws otherwise."""
    return x.flip(1)


TOGGLING = type("Toggling", (by_hand.GANWithToggles,), {"noise": flipped})
ONE_FORWARD = type("OneForward", (by_hand.GANWithOneForward,), {"noise": flipped})


MODULES = (
    by_hand.ReturnsItsLoss,
    by_hand.AccumulatesByHand,
    by_hand.StepsItsScheduler,
    by_hand.StepsWithAClosure,
    by_hand.StepsTorchsOptimizer,
    by_hand.TwiceABatch,
    by_hand.RetainsTheGraph,
    by_hand.KeepsDetachedValues,
    TOGGLING,
    ONE_FORWARD,
)


def trained(module: type[Layers], strategy: Any, folder: Path) -> tuple[dict[str, Tensor], dict[str, Tensor], int]:
    """The weights after training, what was logged, and how many optimizer steps Lightning has counted."""
    L.seed_everything(1, verbose=False)
    generator = torch.Generator().manual_seed(2)
    loader = torch.utils.data.DataLoader([module.batch(generator) for _ in range(4)], batch_size=None)
    trainer = L.Trainer(strategy=strategy, devices=1, max_epochs=2, default_root_dir=folder, **QUIET)
    made = module()
    trainer.fit(made, loader)
    return dict(made.state_dict()), dict(trainer.callback_metrics), trainer.global_step


def all_trained(folder: Path) -> dict[str, list[Any]]:
    """By module, with one stage and by plain Lightning."""
    return {
        module.__name__: [
            trained(module, strategy, folder) for strategy in (PipelineStrategy(num_stages=1, num_microbatches=4), "auto")
        ]
        for module in MODULES
    }


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Any]]:
    return launch(all_trained, tmp_path_factory.mktemp("run"), world=1)[0]


@pytest.mark.parametrize("module", MODULES, ids=lambda module: module.__name__)
def test_micro_batches_come_to_what_the_batch_does(module: type[Layers], found: dict[str, list[Any]]) -> None:
    (weights, logged, steps), (expected, expected_logged, expected_steps) = found[module.__name__]
    assert steps == expected_steps
    assert logged.keys() == expected_logged.keys()
    torch.testing.assert_close(weights, expected)
    torch.testing.assert_close(logged, expected_logged)
