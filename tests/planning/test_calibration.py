"""What a stage's action takes beside the model's work."""

from __future__ import annotations

import time
from unittest import mock

import torch

from lightning_pipeline.engine.visit import Visit
from lightning_pipeline.planning.calibration import measure_overhead
from lightning_pipeline.runtime.transport import Transport
from tests.runtime.test_transport import run


def test_it_is_that_of_visits_and_messages() -> None:
    run(_visits_take_longer, stages=2)


def _visits_take_longer(transport: Transport) -> None:
    with torch.inference_mode():  # as in a validation step before training
        plain = measure_overhead(transport, transport.device, message=0.0)
    assert 0 < plain < 0.2

    forward = Visit.forward

    def slower(visit: Visit, microbatch: int) -> None:  # 16 ms more of a forward are 8 ms more of either direction
        began = time.thread_time()
        while time.thread_time() - began < 16e-3:
            pass
        forward(visit, microbatch)

    with mock.patch.object(Visit, "forward", slower):
        slow = measure_overhead(transport, transport.device, message=0.0)
        assert 6e-3 < slow - plain < 0.2
        # A rank of two sends or receives two values of each micro-batch.
        without_messages = measure_overhead(transport, transport.device, message=4e-3)
        assert 1e-3 < slow - without_messages < 7e-3
