"""Where in the user's code the running call stands."""

from __future__ import annotations

import sys
import traceback

_OWN = ("/torch/", "/lightning/", "/lightning_pipeline/", "/pytorch_lightning/", "/torchmetrics/")


def users_line() -> str:
    """The innermost line of the user's (or a model library's) code: ``"model.py:12: x = x + 1"``."""
    for frame in reversed(traceback.extract_stack(sys._getframe(1))):
        path = frame.filename.replace("\\", "/")
        if not any(part in path for part in _OWN) and not path.startswith("<"):
            return f"{frame.filename}:{frame.lineno}: {frame.line}"
    return "an unknown line"
