"""Logged values are reduced as one batch would give them."""

from __future__ import annotations

from functools import partial
from typing import Any

import lightning as L
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import MeanMetric, MetricCollection, SumMetric
from torchmetrics.classification import MulticlassAccuracy

from lightning_pipeline.strategy.logged_values import Logged, LoggedValues


class Recorder:
    """Stands for ``L.LightningModule.log``."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, Any, dict[str, Any]]] = []

    def __call__(self, name: str, value: Any, **kwargs: Any) -> None:
        self.calls.append((name, value, kwargs))


class Step:
    """Logs on micro-batches, and then for all of them."""

    def __init__(self, module: L.LightningModule | None = None) -> None:
        self.logged = LoggedValues(module or L.LightningModule())
        self.calls: list[Logged] = []

    def note(self, num_samples: int, *args: Any, **kwargs: Any) -> Logged:
        self.calls.append(self.logged.note(num_samples, *args, **kwargs))
        return self.calls[-1]

    def values(self) -> dict[str, tuple[torch.Tensor, int]]:
        recorder = Recorder()
        self.logged.log([[call] for call in self.calls], recorder)
        return {name: (value, kwargs["batch_size"]) for name, value, kwargs in recorder.calls}


def test_what_is_logged_twice_in_a_step_is_logged_twice():
    logged, recorder = LoggedValues(L.LightningModule()), Recorder()
    logged.log([[logged.note(2, "loss", value) for value in values] for values in ((1.0, 5.0), (3.0, 9.0))], recorder)
    assert [(name, value) for name, value, _ in recorder.calls] == [("loss", 2.0), ("loss", 7.0)]


def test_means_count_samples_and_other_reductions_do_not():
    step = Step()
    for value, num_samples in ((1.0, 3), (2.0, 3), (5.0, 2)):
        step.note(num_samples, "loss", torch.tensor(value), prog_bar=True)
        step.note(num_samples, "tokens", torch.tensor([value]), batch_size=int(value))
        step.note(num_samples, "lowest", value, reduce_fx=torch.min)
        step.note(num_samples, "highest", value, reduce_fx="MAX")
        step.note(num_samples, name="count", value=torch.tensor(int(value)), reduce_fx="sum")
    assert step.values() == {
        "loss": ((1.0 * 3 + 2.0 * 3 + 5.0 * 2) / 8, 8),
        "tokens": ((1.0 + 4.0 + 25.0) / 8, 8),
        "lowest": (1.0, 8),
        "highest": (5.0, 8),
        "count": (8.0, 8),
    }


def test_shares_of_a_sum_are_added_up_where_all_values_are_such() -> None:
    step = Step()
    for value, num_samples in ((1.0, 3), (2.0, 3), (5.0, 2)):
        for name, kwargs in {"loss": {}, "mean": {"reduce_fx": "mean"}, "largest": {"reduce_fx": "max"}}.items():
            step.note(num_samples, name, torch.tensor(value), **kwargs).is_share = True
        step.note(num_samples, "now and then", torch.tensor(value)).is_share = value > 1
    mean = (1.0 * 3 + 2.0 * 3 + 5.0 * 2) / 8
    assert step.values() == {"loss": (8.0, 8), "mean": (8.0, 8), "largest": (5.0, 8), "now and then": (mean, 8)}


def test_equal_weights_give_the_plain_mean_in_the_dtype_of_the_values():
    values = torch.rand(7, generator=torch.Generator().manual_seed(0))
    for dtype, expected in (
        (torch.float32, torch.float32),
        (torch.float64, torch.float64),
        (torch.bfloat16, torch.float32),
    ):
        step = Step()
        for value in values.to(dtype):
            step.note(4, "loss", value)
        found, _ = step.values()["loss"]
        assert found.dtype == expected
        assert torch.equal(found, values.to(dtype).to(expected).sum() / 7)


def test_a_captured_value_is_not_changed_afterwards():
    step = Step()
    value = torch.ones((), requires_grad=True) * 2
    step.note(1, "loss", value)
    value.detach().zero_()
    found, _ = step.values()["loss"]
    assert float(found) == 2.0 and not found.requires_grad


@pytest.mark.parametrize(
    ("value", "kwargs", "message"),
    [
        (torch.ones(3), {}, "must have a single element"),
        ({"a": 1.0}, {}, "`dict` values cannot be logged"),
        ("text", {}, "`str` values cannot be logged"),
        (MeanMetric(), {}, "MeanMetric that is not an attribute of the LightningModule"),
        (1.0, {"sync_dist_group": object()}, "leave sync_dist_group out"),
    ],
)
def test_what_cannot_be_logged_is_refused(value, kwargs, message):
    with pytest.raises(ValueError, match=message):
        LoggedValues(L.LightningModule()).note(1, "x", value, **kwargs)


def test_values_are_logged_in_order_and_metrics_as_themselves():
    module = L.LightningModule()
    module.metric = MeanMetric()
    step, recorder = Step(module), Recorder()
    third = torch.tensor(1.0, dtype=torch.float64) / 3
    for _ in range(2):
        step.note(3, "everywhere", 0.5)
        step.note(3, "loss", third, on_step=True, reduce_fx=torch.max)
        module.metric(torch.tensor([1.0, 2.0]))
        step.note(3, "metric", module.metric)
    step.logged.log([[call] for call in step.calls], recorder)
    assert [(name, kwargs) for name, _, kwargs in recorder.calls] == [
        ("everywhere", {"batch_size": 6}),
        ("loss", {"on_step": True, "reduce_fx": "max", "batch_size": 6}),
        ("metric", {"metric_attribute": "metric", "batch_size": 6}),
    ]
    values = [value for _, value, _ in recorder.calls]
    assert torch.equal(values[1], third) and values[1].dtype == torch.float64
    assert values[2] is module.metric and float(module.metric._forward_cache) == 1.5


class Plain(L.LightningModule):
    """Logs what a whole batch gives."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)
        self.accuracy = MulticlassAccuracy(3, average="micro")
        self.several = MetricCollection({"acc": MulticlassAccuracy(3), "top2": MulticlassAccuracy(3, top_k=2)})
        self.total = SumMetric()
        self.steps: list[dict[str, float]] = []

    def training_step(self, batch: Any) -> torch.Tensor:
        x, y = batch
        logits = self.layer(x)
        loss = nn.functional.cross_entropy(logits, y)
        self.log("loss", loss, on_step=True, on_epoch=True, prog_bar=True)
        self.log_dict({"largest": logits.max(), "count": float(len(x))}, on_epoch=True, reduce_fx="max")
        self.accuracy(logits, y)
        self.log("accuracy", self.accuracy, on_step=True, on_epoch=True)
        self.several.update(logits, y)
        self.log_dict(self.several, on_step=False, on_epoch=True)
        return loss

    def on_train_batch_end(self, *args: Any) -> None:
        self.steps.append({name: float(value) for name, value in self.trainer.callback_metrics.items()})

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.0)


class InMicrobatches(Plain):
    """Takes each batch in micro-batches of 3, the last one smaller, and logs through ``LoggedValues``."""

    def training_step(self, batch: Any) -> torch.Tensor:
        original, step = self.log, Step(self)
        x, y = batch
        losses = []
        for start in range(0, len(x), 3):
            num_samples = len(x[start : start + 3])
            self.log = partial(step.note, num_samples)
            losses.append(super().training_step((x[start : start + 3], y[start : start + 3])) * num_samples / len(x))
        del self.log
        step.logged.log([[call] for call in step.calls], original)
        return sum(losses)


def test_lightning_shows_what_it_shows_for_the_whole_batch(tmp_path):
    shown = {}
    for kind in (Plain, InMicrobatches):
        L.seed_everything(0, verbose=False)
        module = kind()
        data = TensorDataset(torch.randn(18, 4), torch.randint(3, (18,)))
        trainer = L.Trainer(
            max_epochs=1,
            accelerator="cpu",
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            default_root_dir=tmp_path,
        )
        trainer.fit(module, DataLoader(data, batch_size=8))
        shown[kind] = [*module.steps, {name: float(value) for name, value in trainer.callback_metrics.items()}]
    for plain, ours in zip(shown[Plain], shown[InMicrobatches], strict=True):
        assert list(plain) == list(ours) and len(plain) >= 6
        for name in plain:
            if not name.startswith("count"):  # each micro-batch logs its own size
                assert ours[name] == pytest.approx(plain[name], rel=1e-6), name
