"""One line in place of the traceback of an exception that is a consequence of another rank's."""

from __future__ import annotations

import sys
from types import TracebackType


def show_as_line(error: BaseException, line: str) -> None:
    """If `error` ends this process, print `line` and no traceback. The process still ends with exit code 1."""
    show = sys.excepthook

    def hook(kind: type[BaseException], raised: BaseException, trace: TracebackType | None) -> None:
        if raised is error:
            print(line, file=sys.stderr, flush=True)
        else:
            show(kind, raised, trace)

    sys.excepthook = hook
