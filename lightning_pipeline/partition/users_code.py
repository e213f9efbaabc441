"""The user's code that runs: whether that is a hook or a step, and at which line."""

from __future__ import annotations

import contextlib
import linecache
import os
import sys
import threading
from collections.abc import Callable
from importlib.util import find_spec
from types import FrameType
from typing import Any

from lightning_pipeline._names import PACKAGES


def _folders_of(*packages: str) -> tuple[str, ...]:
    """Where packages are, as the user's own folders may have their names."""
    found: list[str] = []
    for name in packages:
        with contextlib.suppress(ValueError):  # it stands in for one that is not installed
            spec = find_spec(name)
            found += (spec and spec.submodule_search_locations) or ()
    return tuple(os.path.join(folder, "") for folder in found)


_PACKAGE = os.path.dirname(os.path.dirname(__file__))
_TORCHS = _folders_of("torch", "torch_npu")
_OWN = (*_TORCHS, *_folders_of("torchmetrics", "lightning_pipeline", *PACKAGES), "<", contextlib.__file__)
_LEADING_HERE = (*_TORCHS, _PACKAGE, contextlib.__file__)


class _InHook:
    """Whether the user's code runs between steps, where every tensor looks as it does in one process.

    Attributes:
        is_rank_known: the code has asked which rank it runs on, so it may do something else on each.
        has_kept_rank: this rank's code may have kept what rank it runs on.
        is_rank_kept: the first rank's may have, as all know, so hooks may differ from their start.
        at_rank_zero_only: called with the arguments of a function under `rank_zero_only`, to which every rank comes.
        take: runs a call of the code that torch gives to no mode, given the function and its arguments.
        thread: the thread of the hook; others, such as one that writes a checkpoint, may differ between ranks.
    """

    on = False
    is_rank_known = False
    has_kept_rank = is_rank_kept = False
    when_rank_known: Callable[[], None] | None = None
    at_rank_zero_only: Callable[[Any, dict[str, Any]], None] | None = None
    take: Callable[[Callable[..., Any], Any, Any], Any] | None = None
    thread = 0

    def note_rank(self) -> None:
        """Take note that the rank is asked for."""
        if self.is_here() and not self.is_rank_known:
            self.is_rank_known = True
            if self.when_rank_known is not None:
                self.when_rank_known()

    def is_here(self) -> bool:
        """Whether a hook runs in this thread."""
        return self.on and self.thread == threading.get_ident()


in_hook = _InHook()


def step_runs() -> bool:
    """Whether the user's code of a step runs; replaced where steps are recorded."""
    return False


def users_line() -> str:
    """The innermost line that runs in the user's or a model library's code: ``"model.py:12: x = x + 1"``."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if is_users(frame) and frame.f_code.co_name != "__torch_function__":  # a mode passes on others' calls
            line = linecache.getline(frame.f_code.co_filename, frame.f_lineno, frame.f_globals).strip()
            return f"{frame.f_code.co_filename}:{frame.f_lineno}: {line}"
        frame = frame.f_back
    return "an unknown line"


def is_refusal(error: Exception) -> bool:
    """Whether this package has raised an error, and not torch."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    if trace is None or not trace.tb_frame.f_code.co_filename.startswith(_PACKAGE):
        return False
    return linecache.getline(trace.tb_frame.f_code.co_filename, trace.tb_lineno).lstrip().startswith("raise ")


def note_line(error: Exception, line: str) -> None:
    """Add to an error's message the line of the user's code for which a stage has computed."""
    if error.args and isinstance(error.args[0], str):
        hint = "a stage computes it later, where no `try` of the step catches what it raises"
        error.args = (f"{error.args[0]} (called at {line}; {hint})", *error.args[1:])


def is_users(frame: FrameType) -> bool:
    """Whether a frame runs the user's code, or a model library's."""
    return not frame.f_code.co_filename.startswith(_OWN)


def is_in_package(frame: FrameType) -> bool:
    return frame.f_code.co_filename.startswith(_PACKAGE)


def users_lines() -> tuple[int, ...]:
    """The line numbers at which the functions of the running hook are, the innermost first. Those of torch are left
    out, which takes other ways with placeholders, and so is what leads here from a call or a collective.
    """
    found = []
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith(_LEADING_HERE):
        frame = frame.f_back
    while frame is not None and not frame.f_code.co_filename.startswith(_PACKAGE):
        if is_users(frame):
            found.append(frame.f_lineno)
        frame = frame.f_back
    return tuple(found)


_LOADERS = tuple(f"{kind}_dataloader" for kind in ("train", "val", "test", "predict"))
_SETTING_UP = frozenset(("prepare_data", "setup", "configure_optimizers", *_LOADERS))


def is_asked_in_run(*ways: str) -> bool:
    """Whether the user's code asks for a property of the strategy in a step or hook, or in one that sets data up.

    Args:
        ways: the Trainer's properties that lead to the strategy's, innermost first; the name of the strategy's own
            where it may be asked for directly, or through properties of that name.
    """
    frame: FrameType | None = sys._getframe(2)
    if len(ways) == 1:
        while frame is not None and _is_own(frame) and frame.f_code.co_name == ways[0]:
            frame = frame.f_back
    else:
        for way in ways:
            if frame is None or not _is_own(frame) or frame.f_code.co_name != way:
                return False
            frame = frame.f_back
    return frame is not None and is_in_run(frame)


_RANKS = ("global_rank", "local_rank", "is_global_zero")


def asks_for_rank() -> FrameType | None:
    """The frame of the user's code in a run that asks for the rank, through properties of the Trainer and others."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and _is_own(frame) and frame.f_code.co_name in _RANKS:
        frame = frame.f_back
    return frame if is_in_run(frame) else None


def is_in_run(frame: FrameType | None) -> bool:
    """Whether a frame runs the user's code in a step or hook of a run, or in one that sets data up."""
    if frame is None or _is_own(frame):
        return False
    while frame is not None:
        if _is_own(frame):
            if frame.f_code.co_name == "_run":  # the Trainer's
                return True
        elif frame.f_code.co_name in _SETTING_UP:
            return True
        frame = frame.f_back
    return False


def _is_own(frame: FrameType) -> bool:
    return str(frame.f_globals.get("__name__")).partition(".")[0] in (*PACKAGES, "lightning_pipeline")
