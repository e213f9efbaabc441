"""Saving while training goes on."""

from __future__ import annotations

import atexit
import threading
from collections.abc import Callable


class BackgroundSave:
    """The save that is underway, in a thread. There is one at a time."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    def start(self, save: Callable[[], None]) -> None:
        """Call `save` in a thread. The one before must have been waited for."""
        assert self._thread is None

        def run() -> None:
            try:
                save()
            except BaseException as error:
                self._error = error

        # A daemon, as a save whose other ranks are gone would keep this process until its timeout; one that has not
        # been abandoned is waited for.
        self._thread = threading.Thread(target=run, name="pipeline-save", daemon=True)
        self._thread.start()
        atexit.register(self.wait)

    def wait(self) -> None:
        """Until it has ended; raises what it raised, once."""
        if self._thread is None:
            return
        self._thread.join()
        error = self._error
        self.abandon()
        if error is not None:
            raise error

    def abandon(self) -> None:
        """Forget it, as after a failure of the run, whose error counts more than that of a save."""
        atexit.unregister(self.wait)
        self._thread = self._error = None
