"""Saving while training goes on."""

from __future__ import annotations

import atexit
import threading
from collections.abc import Callable


class BackgroundSave:
    """The save that is underway, in a thread. There is one at a time."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._errors: list[BaseException] = []

    def start(self, save: Callable[[], None]) -> None:
        """Call `save` in a thread. The one before must have been waited for."""
        assert self._thread is None
        errors: list[BaseException] = []  # of this save: one that was abandoned may still end

        def run() -> None:
            try:
                save()
            except BaseException as error:
                errors.append(error)

        # A daemon, as a save whose other ranks are gone would keep this process until its timeout; one that has not
        # been abandoned is waited for.
        self._errors = errors
        self._thread = threading.Thread(target=run, name="pipeline-save", daemon=True)
        self._thread.start()
        atexit.register(self.wait)

    def wait(self) -> None:
        """Until it has ended; raises what it raised, once."""
        if self._thread is None:
            return
        self._thread.join()
        errors = self._errors
        self.abandon()
        if errors:
            raise errors[0]

    def abandon(self) -> None:
        """Forget it, as after a failure of the run, whose error counts more than that of a save."""
        atexit.unregister(self.wait)
        self._thread, self._errors = None, []
