"""Steps that read what stages compute: the bits of one stage, and stages that work at the same time all the same."""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from typing import Any
from unittest import mock

import lightning as L
import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from lightning_pipeline.engine.ahead import EarlyForwards
from tests.launching import launch
from tests.training.runs import differing, pipeline_trainer, weights

pytestmark = pytest.mark.multiprocess

WIDTH, NUM_LAYERS, NUM_STEPS = 6, 4, 8
SIZES = (8,) * (NUM_STEPS - 1) + (6,)  # the last batch is smaller


class Block(nn.Module):
    """Draws random numbers, and writes into its buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(self.norm(torch.tanh(self.linear(x))), 0.1, self.training)


class LitReads(L.LightningModule):
    """Each `kind` reads something else, or does something else with it."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.layers = nn.ModuleList(Block() for _ in range(NUM_LAYERS))
        self.head, self.scale = nn.Linear(WIDTH, 3), nn.Parameter(torch.tensor(1.0))
        self.classes = nn.Embedding(3, WIDTH)
        self.read: list[Any] = []
        self.average = 0.0

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
            if self.kind == "everything":  # on every virtual stage
                self.read.append(x.sum().item())
        return self.head(x)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        getattr(self, f"before_{self.kind}", lambda: None)()
        x, y, w = batch
        if self.kind == "noisy":  # which every rank makes of what every rank has
            x = x[:, :WIDTH] + 0.1 * torch.randn_like(x[:, :WIDTH])
        if self.kind == "guarding":
            y = y.clamp(max=2) if y.max() > 2 else y  # what forwards would fail with that run as in the step before
            x = x + self.classes(y)
        logits = self(x)
        if self.kind == "overwriting":  # what was read
            self.read.append(logits[0, 0].item())
            logits.mul_(0.5)
        loss = F.cross_entropy(logits, y)
        self.read.append(loss.item())
        self.average = 0.5 * self.average + 0.5 * self.read[-1]
        return getattr(self, f"after_{self.kind}", lambda loss, *_: loss)(loss, logits, y, w)

    def before_counting(self) -> None:
        """One micro-batch's Python is over before the next one's begins."""
        self.read.append(f"{self.average:.6f}")

    def after_everything(self, loss: Tensor, logits: Tensor, y: Tensor, w: Tensor) -> Tensor:
        found = logits.argmax(1).cpu().numpy()
        self.read += [float(np.mean(found == y.cpu().numpy())), self.scale.item(), logits.detach().numpy().tolist()]
        return loss * self.scale

    def after_branching(self, loss: Tensor, *_: Tensor) -> Tensor:
        return loss * self.scale if loss.item() > 1.35 else loss

    def after_rarely(self, loss: Tensor, *_: Tensor) -> Tensor:
        """What is written into the module by forwards that were not to be is taken back."""
        return loss * self.scale if self.global_step == 5 and len(self.read) % 4 == 3 else loss

    def after_writing(self, loss: Tensor, logits: Tensor, y: Tensor, w: Tensor) -> Tensor:
        found = loss + 0.1 * w.sum() * self.scale
        w.mul_(0.5)  # every rank's own, which stages may have yet to compute with
        return found + 0.1 * w[0] * self.scale

    def after_printing(self, loss: Tensor, *_: Tensor) -> Tensor:
        self.read.append(repr(loss))
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        loss = F.cross_entropy(self(batch[0]), batch[1])
        self.read.append(loss.item())
        self.log("val_loss", loss)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.3)


AHEAD = ("counting", "everything", "noisy", "rarely")
"""Kinds that nearly always do the same."""
KINDS = (*AHEAD, "guarding", "branching", "writing", "printing", "overwriting")


def batches() -> list[Any]:
    generator = torch.Generator().manual_seed(0)
    return [
        [
            torch.randn(size, WIDTH, generator=generator),
            torch.randint(0, 3, (size,), generator=generator),
            torch.ones(size),
        ]
        for size in SIZES
    ]


def run(kind: str, world: int, schedule: str, parts: int) -> dict[str, Any]:
    L.seed_everything(2, verbose=False)
    module = LitReads(kind)
    cut = {f"layers.{part * NUM_LAYERS // parts}": part for part in range(1, parts)}
    trainer = pipeline_trainer(cut, world=world, strategy={"schedule": schedule}, max_epochs=2)
    ends = {True: 0, False: 0}
    own = EarlyForwards.has_ended

    def has_ended(self: Any, state: Any, *args: Any) -> bool:
        was_open = state.is_open
        found = own(self, state, *args)
        if was_open:
            ends[found] += 1
        return found

    loader = DataLoader(Listed(kind), batch_size=None)
    with mock.patch.object(EarlyForwards, "has_ended", has_ended), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.fit(module, loader, DataLoader(Listed(""), batch_size=None))
    told = [str(warning.message) for warning in caught if "reads what a stage computes" in str(warning.message)]
    return {
        "weights": weights(trainer),
        "read": module.read,
        "average": module.average,
        "metrics": {name: float(value) for name, value in trainer.callback_metrics.items()},
        "ends": ends,
        "told": told,
    }


class Listed(TensorDataset):
    """Whole batches; new ones each time, as steps may write into them."""

    def __init__(self, kind: str) -> None:
        self.batches = batches()
        if kind == "guarding":
            self.batches[4][1][-1] = 7  # is no class

    def __len__(self) -> int:
        return len(self.batches)

    def __getitem__(self, index: int) -> Any:
        return [tensor.clone() for tensor in self.batches[index]]


RUNS = (
    *((kind, "1f1b", 1) for kind in KINDS),
    *(("everything", schedule, parts) for schedule, parts in (("interleaved_1f1b", 2), ("zero_bubble", 1))),
    *(("rarely", schedule, parts) for schedule, parts in (("zbv", 2), ("gpipe", 1))),
)
OFTEN = {(kind, "1f1b", 1) for kind in ("counting", "rarely", "guarding", "branching")}
MORE = [case for case in RUNS if case not in OFTEN]


def often(cases: Iterable[Any]) -> list[Any]:
    """Cases; those that are not run often are slow."""
    return [pytest.param(case, id=str(case), marks=[pytest.mark.slow] * (case in MORE)) for case in cases]


def run_all(world: int, cases: list[Any]) -> dict[Any, Any]:
    return {case: run(case[0], world, case[1], world * case[2]) for case in cases}


@pytest.fixture(scope="module")
def cases(wanted: Any) -> list[Any]:
    return wanted(RUNS, MORE, "case")


@pytest.fixture(scope="module")
def one(cases: list[Any]) -> Any:
    return launch(run_all, 1, sorted({(kind, "1f1b", 1) for kind, _, _ in cases}), world=1)[0]


@pytest.fixture(scope="module")
def two(cases: list[Any]) -> Any:
    return launch(run_all, 2, cases, world=2)


@pytest.mark.parametrize("case", often(RUNS))
def test_steps_that_read_get_what_one_stage_gets(one: Any, two: Any, case: Any) -> None:
    expected = one[case[0], "1f1b", 1]
    for rank, found in enumerate(two):
        assert found[case]["read"] == expected["read"]
        assert found[case]["average"] == expected["average"]
        assert found[case]["metrics"] == expected["metrics"]
        if rank == 0:
            assert not differing(found[case]["weights"], expected["weights"])


@pytest.mark.parametrize("case", often(case for case in RUNS if case[0] in AHEAD))
def test_stages_do_not_wait_for_the_python_of_such_steps(two: Any, case: Any) -> None:
    for found in two:
        came, differed = found[case]["ends"][True], found[case]["ends"][False]
        assert differed == (case[0] == "rarely")  # as soon as one has, the others run in order
        assert came > 2 * differed
        assert not found[case]["told"]


@pytest.mark.parametrize("case", often((kind, "1f1b", 1) for kind in ("branching", "writing", "printing")))
def test_what_stages_wait_for_is_told_once(two: Any, case: Any) -> None:
    told, elsewhere = (found[case]["told"] for found in two)
    assert len(told) == 1 and not elsewhere
    assert "test_reads.py" in told[0] and "on_train_batch_end" in told[0]
