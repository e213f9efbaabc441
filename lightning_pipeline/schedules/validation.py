"""The error that every fault in a schedule raises, and the limits that input is checked against.

What a schedule may be at most. Each number that somebody types or that stands in a file is held against these before
anything of its size is made: a slip of the keyboard, or a file that somebody else has written, is then told in a line
and does not fill the memory of the machine.

The largest schedule takes half a minute and 600 MB to build and check; the largest that is known to have been trained
with (some 128 ranks and 1000 micro-batches) is a quarter of it.
"""

from __future__ import annotations

import reprlib
from os import PathLike
from pathlib import Path


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


MAX_RANKS = 4096
"""Ranks that hold one copy of a model."""
MAX_PASSES = 2**18
"""Virtual stages times micro-batches, so also the one or the other; each is a forward and one or two backwards."""
MAX_ACTIONS = 3 * MAX_PASSES
"""Of all ranks together, in a file."""
MAX_CSV_BYTES = 16 * 2**20
"""Of a schedule's file: room for that many actions and as many idle slots again."""
MAX_TRACE_BYTES = 256 * 2**20
"""Of a recorded timeline."""
MAX_PROCESSES = 2**20
"""Ranks of all replicas together."""
MAX_PICTURE_RANKS = 256
"""Rows of a picture; they take 400 MB to draw."""
MAX_TIME = 1e12
"""Of an action, in whatever unit, so that sums stay finite. In a trace's microseconds it is eleven days."""


def require_counts(num_ranks: int, num_microbatches: int, num_virtual_stages: int) -> None:
    """Raise a ScheduleError for a count below one, or a schedule that is larger than any may be."""
    counts = (
        f"num_ranks={shown(num_ranks)}, num_microbatches={shown(num_microbatches)}, "
        f"num_virtual_stages={shown(num_virtual_stages)}"
    )
    if min(num_ranks, num_microbatches, num_virtual_stages) < 1:
        raise ScheduleError(f"a schedule needs at least one rank, micro-batch and virtual stage, got {counts}")
    if num_ranks > MAX_RANKS or num_ranks * num_virtual_stages * num_microbatches > MAX_PASSES:
        raise ScheduleError(
            f"a schedule has at most {MAX_RANKS:,} ranks, and {MAX_PASSES:,} passes of a micro-batch through a virtual "
            f"stage, got {counts}; use fewer"
        )


def read_text(path: str | PathLike[str], *, kind: str, most: int) -> str:
    """The text of a file, in UTF-8; line ends stay as they are, and a byte order mark is left out.

    Args:
        kind: what the file is to be, for messages: "a CSV file".
        most: bytes that it may have.

    Raises:
        ValueError: it is larger, or no text. Names the file.
        OSError: it cannot be read.
    """
    with Path(path).open("rb") as file:
        content = file.read(most + 1)  # and no more, whatever the size that a device or a pipe says it has
    if len(content) > most:
        raise ValueError(f"{path} is too large for {kind}: it has more than {most:,} bytes")
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not {kind}: byte {error.start} is no text in UTF-8") from None
    if "\0" in text:
        raise ValueError(f"{path} is not {kind}: it has a NUL byte at character {text.index(chr(0))}")
    return text
