"""The error every fault in a schedule raises, and how errors quote what they were given."""

from __future__ import annotations

import reprlib


class ScheduleError(ValueError):
    """A schedule that cannot be built, read or run; the message says why and, where it can, shows the faulty cell."""


class _Quotes(reprlib.Repr):
    def __init__(self) -> None:
        super().__init__()
        self.maxstring = self.maxother = self.maxlong = 120
        self.maxdict = self.maxlist = self.maxtuple = 4
        self.maxlevel = 3

    def repr_int(self, x: int, level: int) -> str:
        # Python refuses to write out a number of more than some thousand digits.
        return super().repr_int(x, level) if x.bit_length() < 10_000 else f"a number of {x.bit_length()} bits"


def shown(value: object) -> str:
    """``repr(value)``, shortened in the middle where it is long: a value from a file may be of any size and depth."""
    return _Quotes().repr(value)
