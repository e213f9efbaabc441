"""A LightningModule that is compiled as a whole trains on two stages as it was written."""

from __future__ import annotations

import warnings
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from tests.launching import launch
from tests.training.runs import differing, pipeline_trainer, weights

pytestmark = pytest.mark.multiprocess


class Lit(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 1)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.second(self.first(batch).tanh()).pow(2).mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.1)


def runs() -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name in ("plain", "compiled"):
        L.seed_everything(1, verbose=False)
        module: Any = Lit()
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            trainer = pipeline_trainer({"second": 1}, world=2, max_epochs=2)
            trainer.fit(torch.compile(module) if name == "compiled" else module, DataLoader(torch.randn(16, 8), 8))
        found[name] = {"weights": weights(trainer), "told": [str(one.message) for one in told]}
    return found


def test_it_runs_as_it_was_written_and_says_so() -> None:
    first, _ = launch(runs, world=2)
    assert not differing(first["compiled"]["weights"], first["plain"]["weights"])
    words = "Lit is compiled as a whole, and lies on several stages"
    assert [any(words in message for message in first[name]["told"]) for name in first] == [False, True]
