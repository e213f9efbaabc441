"""With loss_reduction="sum" the loss that is logged is that of the step, as one process has it for its whole batch."""

from __future__ import annotations

import warnings
from typing import Any

import lightning as L
import pytest
import torch.nn.functional as F
from torch import Tensor

from tests.launching import launch
from tests.training.measured import LitLayers, measured_stages, point_loader
from tests.training.runs import Losses, differing, pipeline_trainer, plain_trainer, weights

pytestmark = pytest.mark.multiprocess

IS_A_SUM = "is a sum over samples"


class Summed(LitLayers):
    """A sum over samples, logged in several ways, with other values beside it."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        logits = self(x)
        loss = F.cross_entropy(logits, y, reduction="sum")
        self.log("train_loss", loss, on_step=True, on_epoch=True)
        self.log("detached", loss.detach().reshape(1), on_step=True, on_epoch=True, batch_size=1)
        self.log("explicit", loss, on_step=True, reduce_fx="mean")
        self.log("largest", loss, on_step=True, reduce_fx="max")
        self.log("by_sample", loss / len(y), on_step=True, on_epoch=True)
        self.log("equal", loss.clone(), on_step=True)
        return {"loss": loss, "logits": logits} if batch_idx % 2 else loss


class SummedInParts(Summed):
    """The loss is written to after it was logged."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        logits = self(x)
        loss = F.cross_entropy(logits, y, reduction="sum")
        self.log("part", loss, on_step=True)
        loss += logits.square().sum()
        self.log("train_loss", loss, on_step=True)
        return loss


class Logged(Losses):
    """Keeps what was logged with each training batch as well."""

    def __init__(self) -> None:
        super().__init__()
        self.logged: list[dict[str, float]] = []

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        super().on_train_batch_end(trainer, pl_module, outputs, batch, batch_idx)
        self.logged.append({name: float(value) for name, value in trainer.callback_metrics.items()})


def fit(module_of: type[LitLayers], trainer_of: Any) -> dict[str, Any]:
    logged = Logged()
    L.seed_everything(3, verbose=False)
    module = module_of(lr=0.005)
    trainer = trainer_of(callbacks=[logged], max_epochs=1)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for epochs in (1, 2):
            trainer.fit_loop.max_epochs = epochs
            trainer.fit(module, point_loader(21), point_loader(8))
    return {
        "losses": logged.values,
        "logged": logged.logged,
        "epoch": {name: float(value) for name, value in trainer.callback_metrics.items()},
        "weights": weights(trainer),
        "warnings": [str(w.message) for w in caught if IS_A_SUM in str(w.message)],
    }


def fit_all(world: int) -> dict[str, Any]:
    def pipeline(reduction: str) -> Any:
        strategy = {"loss_reduction": reduction}
        return lambda **options: pipeline_trainer(measured_stages(2), world=world, strategy=strategy, **options)

    if world == 1:
        return {"sum": fit(Summed, plain_trainer), "parts": fit(SummedInParts, plain_trainer)}
    return {
        "sum": fit(Summed, pipeline("sum")),
        "parts": fit(SummedInParts, pipeline("sum")),
        "mean of sums": fit(Summed, pipeline("mean")),
        "mean": fit(LitLayers, pipeline("mean")),
    }


@pytest.fixture(scope="module")
def plain() -> dict[str, Any]:
    return launch(fit_all, 1, world=1)[0]


@pytest.fixture(scope="module")
def ranks() -> list[dict[str, Any]]:
    return launch(fit_all, 2, world=2)


def test_the_loss_is_shown_as_plain_lightning_shows_it(plain: Any, ranks: Any) -> None:
    expected = plain["sum"]
    assert len(expected["logged"]) == 6  # two epochs of 8, 8 and 5 samples
    for found in (rank["sum"] for rank in ranks):
        assert found["losses"] == pytest.approx(expected["losses"], rel=1e-4)
        for step, (ours, one) in enumerate(zip(found["logged"], expected["logged"], strict=True)):
            for name in ("train_loss_step", "detached_step", "explicit", "by_sample_step"):
                assert ours[name] == pytest.approx(one[name], rel=1e-4), f"{name} in step {step}"
            assert ours["train_loss_step"] == pytest.approx(found["losses"][step], rel=1e-6)
        for name in ("train_loss_epoch", "detached_epoch", "by_sample_epoch"):
            assert found["epoch"][name] == pytest.approx(expected["epoch"][name], rel=1e-4), name
        assert found["logged"] == ranks[0]["sum"]["logged"]
    names = differing(ranks[0]["sum"]["weights"], expected["weights"])
    assert all(difference < 1e-5 for difference in names.values()), names


def test_other_values_keep_their_reduction(ranks: Any) -> None:
    for found in (rank["sum"]["logged"] for rank in ranks):
        for values in found[:2]:  # of 8 samples in 4 micro-batches
            assert values["equal"] == pytest.approx(values["train_loss_step"] / 4, rel=1e-5)
            assert values["largest"] < values["train_loss_step"]


def test_what_was_logged_before_the_loss_was_complete_is_another_value(plain: Any, ranks: Any) -> None:
    for found in (rank["parts"] for rank in ranks):
        for ours, one in zip(found["logged"][:2], plain["parts"]["logged"], strict=False):
            assert ours["train_loss"] == pytest.approx(one["train_loss"], rel=1e-4)
            assert ours["part"] == pytest.approx(one["part"] / 4, rel=1e-4)


def test_a_sum_that_is_averaged_is_warned_of_once(ranks: Any) -> None:
    first, second = ([len(rank[name]["warnings"]) for name in rank] for rank in ranks)
    names = list(ranks[0])
    assert dict(zip(names, first, strict=True)) == {"sum": 0, "parts": 0, "mean of sums": 1, "mean": 0}
    assert second == [0, 0, 0, 0]
    [message] = ranks[0]["mean of sums"]["warnings"]
    assert message.startswith("the loss of Summed.training_step is a sum over samples, and of the micro-batches' ")
    assert 'PipelineStrategy(loss_reduction="sum")' in message
