"""Metrics updated on one stage give their result on every stage."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
from torch import nn
from torchmetrics import MeanMetric, MetricCollection, MinMaxMetric
from torchmetrics.classification import MulticlassAccuracy, MulticlassF1Score, MulticlassPrecision

from lightning_pipeline.strategy.metrics import share_metrics

LOGITS = torch.randn(20, 3, generator=torch.Generator().manual_seed(0))
TARGETS = torch.arange(20) % 3


class Broken(MeanMetric):
    def compute(self) -> torch.Tensor:
        raise ZeroDivisionError("no samples")


class Metrics(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.accuracy = MulticlassAccuracy(3)
        self.several = MetricCollection(
            {"precision": MulticlassPrecision(3), "f1": MulticlassF1Score(3)}, prefix="val_", compute_groups=True
        )
        self.ranged = MinMaxMetric(MulticlassAccuracy(3))
        self.gap = 1 - self.accuracy
        self.everywhere = MeanMetric()
        self.broken = Broken()

    def update(self, logits: torch.Tensor, targets: torch.Tensor) -> None:
        self.accuracy(logits, targets)
        self.several.update(logits, targets)
        self.ranged.update(logits, targets)
        self.broken.update(1.0)

    def reset(self) -> None:
        for metric in (self.accuracy, self.several, self.ranged, self.everywhere, self.broken):
            metric.reset()

    def results(self) -> dict[str, torch.Tensor]:
        collected = {"accuracy": self.accuracy.compute(), "gap": self.gap.compute()}
        return {**collected, **self.several.compute(), **self.ranged.compute()}


def parts_of(epoch: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    return [(LOGITS[4 * k : 4 * k + 8], TARGETS[4 * k : 4 * k + 8]) for k in range(epoch + 2)]


def expected_results() -> list[dict[str, float]]:
    """By epoch, without any processes."""
    metrics = Metrics()
    expected = []
    for epoch in range(2):
        for part in parts_of(epoch):
            metrics.update(*part)
        expected.append({name: float(value) for name, value in metrics.results().items()})
        metrics.reset()
    return expected


@pytest.mark.multiprocess
def test_every_stage_computes_what_the_updating_stage_has(run_stages):
    source = 1
    expected = expected_results()
    expected_of_all = float(MulticlassAccuracy(3)(LOGITS, TARGETS))

    def body(stage, transport):
        warnings.simplefilter("error")
        module = Metrics()
        # Of a collection only the first member needs to be known: others share its state.
        first_of_several = next(iter(module.several.values(copy_state=False)))
        known = {id(m) for m in (module.accuracy, first_of_several, module.ranged, module.broken)}
        undo = share_metrics(module, lambda m: source if id(m) in known else None, transport, stage=stage)

        for epoch in range(2):
            if stage == source:
                for part in parts_of(epoch):
                    module.update(*part)
            for _ in range(2):  # the second comes from the updating stage's cache
                results = module.results()
                assert {name: float(value) for name, value in results.items()} == expected[epoch]
            module.everywhere.update(3.0 + stage)
            assert float(module.everywhere.compute()) == 3.0 + stage
            with pytest.raises(
                ZeroDivisionError if stage == source else RuntimeError,
                match="no samples" if stage == source else "Broken.compute failed on stage 1: ZeroDivisionError",
            ):
                module.broken.compute()
            module.reset()

        # A copy is a metric of its own.
        before = transport.num_calls
        twin = module.accuracy.clone()
        twin.update(LOGITS, TARGETS)
        assert float(twin.compute()) == expected_of_all
        undo()
        module.accuracy.update(LOGITS, TARGETS)
        module.accuracy._to_sync = False
        assert torch.equal(module.accuracy.compute(), twin.compute())
        assert transport.num_calls == before

    run_stages(body, 3)


def test_one_stage_computes_by_itself_and_undo_restores():
    module = Metrics()
    before = {name: copy.copy(metric.__dict__) for name, metric in module.named_modules() if name}
    undo = share_metrics(module, lambda metric: 0, None)
    for part in parts_of(0):
        module.update(*part)
    assert {name: float(value) for name, value in module.results().items()} == expected_results()[0]
    undo()
    for name, metric in module.named_modules():
        if name and not isinstance(metric, MetricCollection):
            for attribute in ("compute", "process_group", "distributed_available_fn"):
                assert getattr(metric, attribute) is before[name][attribute]
