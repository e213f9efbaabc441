"""Which contexts around a step are left out."""

from __future__ import annotations

from contextlib import contextmanager, nullcontext

import torch
from lightning.pytorch.plugins import DoublePrecision, HalfPrecision, MixedPrecision, Precision

from lightning_pipeline.strategy.stage_runner import _does_nothing


class OwnForwardContext(Precision):
    def forward_context(self):
        return torch.autograd.set_detect_anomaly(False)


class OwnStepContext(Precision):
    @contextmanager
    def train_step_context(self):
        yield


def test_only_lightnings_own_for_full_precision() -> None:
    plain = Precision()
    assert _does_nothing(plain.train_step_context) and _does_nothing(plain.predict_step_context)
    half = (MixedPrecision("bf16-mixed", "cpu"), HalfPrecision("bf16-true"), DoublePrecision())
    for precision in (*half, OwnForwardContext(), OwnStepContext()):
        assert not _does_nothing(precision.train_step_context), precision
    assert _does_nothing(OwnStepContext().val_step_context)
    assert not _does_nothing(nullcontext)
