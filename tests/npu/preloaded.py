"""Imported once by the server that the ranks of these tests are forked from."""

from __future__ import annotations

import os
from pathlib import Path

from tests.npu import stand_in

stand_in.load(Path(os.environ["CANN_STAND_IN"]))

import lightning.pytorch  # noqa: E402, F401

import lightning_pipeline.strategy  # noqa: E402, F401
