"""Whose code a frame runs."""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path
from types import FrameType

import lightning
import pytest
import torch

import lightning_pipeline
from lightning_pipeline.partition.users_code import is_users


def frame_in(path: str) -> FrameType:
    scope: dict[str, FrameType] = {}
    exec(compile("import sys; frame = sys._getframe()", path, "exec"), scope)
    return scope["frame"]


@pytest.mark.parametrize("folder", ["lightning", "torch", "lightning_pipeline", "torchmetrics"])
def test_a_project_may_have_the_name_of_a_package(folder: str) -> None:
    assert is_users(frame_in(f"/home/somebody/{folder}/train.py"))


def test_code_of_packages_is_not_the_users() -> None:
    for module in (torch, lightning, lightning_pipeline):
        assert module.__file__ is not None
        assert not is_users(frame_in(str(Path(module.__file__).parent / "some" / "module.py")))
    assert not is_users(frame_in(contextlib.__file__))
    assert not is_users(frame_in("<string>"))
    assert is_users(sys._getframe())
