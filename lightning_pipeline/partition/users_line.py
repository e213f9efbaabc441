"""Where in the user's code the running call stands."""

from __future__ import annotations

import linecache
import sys
from types import FrameType

_OWN = ("/torch/", "/lightning/", "/lightning_pipeline/", "/pytorch_lightning/", "/torchmetrics/")


def users_line() -> str:
    """The innermost line of the user's (or a model library's) code: ``"model.py:12: x = x + 1"``."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        path = frame.f_code.co_filename.replace("\\", "/")
        if not any(part in path for part in _OWN) and not path.startswith("<"):
            line = linecache.getline(frame.f_code.co_filename, frame.f_lineno, frame.f_globals).strip()
            return f"{frame.f_code.co_filename}:{frame.f_lineno}: {line}"
        frame = frame.f_back
    return "an unknown line"
