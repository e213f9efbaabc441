"""A save in the background is waited for once, and what it raised belongs to it."""

from __future__ import annotations

import threading

import pytest

from lightning_pipeline.checkpoint.sharded import BackgroundSave
from tests.launching import PATIENCE_S


def fail() -> None:
    raise OSError("no space")


def test_the_error_of_a_save_is_raised_once() -> None:
    background = BackgroundSave()
    background.start(fail)
    with pytest.raises(OSError, match="no space"):
        background.wait()
    background.wait()


def test_an_abandoned_save_does_not_fail_the_next_one() -> None:
    background, may_fail, has_failed = BackgroundSave(), threading.Event(), threading.Event()

    def fail_late() -> None:
        may_fail.wait(PATIENCE_S)
        has_failed.set()
        fail()

    def save() -> None:
        may_fail.set()
        assert has_failed.wait(PATIENCE_S)
        abandoned.join(PATIENCE_S)

    background.start(fail_late)
    abandoned = next(thread for thread in threading.enumerate() if thread.name == "pipeline-save")
    background.abandon()
    background.start(save)
    background.wait()
