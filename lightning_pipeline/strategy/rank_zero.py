"""What Lightning does on the first rank alone in a step: `self.print`, loggers' experiments, `rank_zero_only`.

Every rank comes to these calls, so all of them read the tensors among the arguments, and the first goes on with data.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from functools import partial
from types import FrameType
from typing import Any

from lightning_pipeline import _torch
from lightning_pipeline._names import PACKAGES
from lightning_pipeline.partition.overrides import Override
from lightning_pipeline.partition.users_code import in_hook, is_in_run
from lightning_pipeline.recording.one_rank import note_kept, note_rank_asked, note_rank_zero_only, with_data
from lightning_pipeline.recording.patched_torch import running_recording

from .._lightning import LightningModule, ProgressBar, Trainer


def begin_run(trainer: Trainer) -> None:
    """Called before any hook of a run: nothing has asked for the rank yet.

    Bars are shown by the first rank alone, and what one computes to show it computes there, without asking again.
    """
    bars = [one for one in trainer.callbacks if isinstance(one, ProgressBar)]  # type: ignore[attr-defined]
    in_hook.has_kept_rank, in_hook.is_rank_kept = any(_is_users(type(bar).get_metrics) for bar in bars), False


def _is_users(function: Callable[..., Any]) -> bool:
    return not function.__module__.startswith(PACKAGES)


def note_rank(frame: FrameType | None = None) -> None:
    """The user's code may ask for its rank, and act differently on each.

    Args:
        frame: of the user's, which asks in a run.
    """
    note_kept(frame)
    in_hook.note_rank()
    if (recording := running_recording()) is not None:
        note_rank_asked(recording)


class NotedRank(int):
    """The rank that `rank_zero_only` has, which notes when it is compared."""

    def __eq__(self, other: object) -> bool:
        return self._asked(int.__eq__(self, other) is True, sys._getframe(1))

    def __ne__(self, other: object) -> bool:
        return not self._asked(int.__eq__(self, other) is True, sys._getframe(1))

    def __bool__(self) -> bool:
        return not self._asked(int.__eq__(self, 0) is True, sys._getframe(1))

    def __gt__(self, other: int) -> bool:
        self._asked(False, sys._getframe(1))
        return int.__gt__(self, other)

    def __lt__(self, other: int) -> bool:
        self._asked(False, sys._getframe(1))
        return int.__lt__(self, other)

    def _asked(self, is_equal: bool, frame: FrameType) -> bool:
        """Take note that a frame compares the rank. Returns what it is told."""
        is_wrapper = frame.f_code.co_name == "wrapped_fn" and "fn" in frame.f_locals
        if not is_wrapper:
            note_rank(frame if is_in_run(frame) else None)
            return is_equal
        args, kwargs = frame.f_locals["args"], frame.f_locals["kwargs"]
        if in_hook.is_here() and in_hook.at_rank_zero_only is not None:
            in_hook.at_rank_zero_only(args, kwargs)
        in_hook.note_rank()
        recording = running_recording()
        if recording is None:
            return is_equal
        read, named = with_data(recording, args, kwargs)
        note_rank_zero_only(recording, frame.f_code)
        if read is args:
            return is_equal
        # The function is given data here, for its wrapper would give it placeholders.
        if is_equal:
            function = frame.f_locals["fn"]
            with _torch.function_modes_taken_off():
                if function(*read, **named) is not None:
                    raise NotImplementedError(
                        f"{function.__qualname__} gives something on the first rank alone, of what a stage computes: "
                        f"let every rank call it"
                    )
        return False

    __hash__ = int.__hash__


def read_before(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, which gets data in place of what stages compute, when a step calls it on all ranks."""

    def run(*args: Any, **kwargs: Any) -> Any:
        recording = running_recording()
        if recording is None:
            return function(*args, **kwargs)
        args, kwargs = with_data(recording, args, kwargs)
        with _torch.function_modes_taken_off():
            return function(*args, **kwargs)

    return run


class _Experiment:
    """A logger's experiment, all of whose calls in a step are made with data."""

    def __init__(self, real: Any) -> None:
        self.__dict__["_real"] = real

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        return type(self._real)

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._real, name)
        return read_before(found) if inspect.isroutine(found) else found

    def __getitem__(self, key: Any) -> Any:
        return _Experiment(self._real[key])

    def __setattr__(self, name: str, value: Any) -> None:
        read_before(setattr)(self._real, name, value)

    def __setitem__(self, key: Any, value: Any) -> None:
        read_before(self._real.__setitem__)(key, value)


def follow_first_rank(module: LightningModule, override: Override) -> None:
    """Let what the first rank prints and logs in steps be read by all ranks."""
    plain = module.print

    def show(*args: Any, **kwargs: Any) -> None:
        plain(*map(str, args), **kwargs)  # on all ranks, of which each may hold some of it

    override(module, "print", show)
    for cls in {type(logger) for logger in module.trainer.loggers}:
        found = inspect.getattr_static(cls, "experiment", None)
        if isinstance(found, property) and found.fget is not None:
            override(cls, "experiment", property(partial(_experiment, found.fget)))


def _experiment(get: Callable[[Any], Any], logger: Any) -> Any:
    """A logger's experiment, which is followed in steps."""
    if running_recording() is not None:
        return _Experiment(get(logger))
    in_hook.note_rank()  # what other ranks get does nothing
    return get(logger)
