"""The error that every fault in a schedule raises, and limits that input is checked against.

Numbers that users type or that stand in a file are compared with these limits before anything of that size is
allocated, so that a typo or an untrusted file gives a short error and does not fill the machine's memory.

The largest schedule of actions as objects takes half a minute and 600 MB to build and check; the largest that is known
to have been used for training (some 128 ranks and 1000 micro-batches) is a quarter of it. Larger ones are arrays.
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
    """``repr(value)``, shortened in the middle if it is long: a value from a file may have any size and depth."""
    return _Quotes().repr(value)


MAX_RANKS = 4096
"""Ranks that hold one copy of a model."""
MAX_PASSES = 2**18
"""Virtual stages times micro-batches, so a limit of each as well; a pass is a forward and one or two backwards."""
MAX_LARGE_PASSES = 2**24
"""Likewise, of those that can be built as arrays (``compact``)."""
MAX_ACTIONS = 3 * MAX_PASSES
"""Of all ranks together, in a file."""
MAX_CSV_BYTES = 16 * 2**20
"""Of a schedule's file: room for that many actions and as many idle slots."""
MAX_TRACE_BYTES = 256 * 2**20
"""Of a recorded timeline."""
MAX_PROCESSES = 2**20
"""Ranks of all replicas together."""
MAX_PICTURE_RANKS = 256
"""Rows of a picture; they take 400 MB to draw."""
MAX_TIME = 1e12
"""Of an action, in any unit, so that sums stay finite. In a trace's microseconds it is eleven days."""


def is_large(num_ranks: int, num_microbatches: int, num_virtual_stages: int) -> bool:
    """Whether a schedule has more passes than objects can be made for."""
    return num_ranks * num_microbatches * num_virtual_stages > MAX_PASSES


def require_counts(
    num_ranks: int, num_microbatches: int, num_virtual_stages: int, *, most_passes: int = MAX_PASSES
) -> None:
    """Raise a ScheduleError for a count below one, or a schedule that is too large."""
    counts = (
        f"num_ranks={shown(num_ranks)}, num_microbatches={shown(num_microbatches)}, "
        f"num_virtual_stages={shown(num_virtual_stages)}"
    )
    if min(num_ranks, num_microbatches, num_virtual_stages) < 1:
        raise ScheduleError(f"a schedule needs at least one rank, micro-batch and virtual stage, got {counts}")
    if num_ranks > MAX_RANKS or num_ranks * num_virtual_stages * num_microbatches > most_passes:
        raise ScheduleError(
            f"a schedule has at most {MAX_RANKS:,} ranks, and {most_passes:,} passes of a micro-batch through a "
            f"virtual stage, got {counts}; use fewer"
        )


def read_text(path: str | PathLike[str], *, kind: str, most: int) -> str:
    """The text of a file in UTF-8; line ends are kept, and a byte order mark is removed.

    Args:
        kind: what the file should be, for messages: "a CSV file".
        most: bytes that it may have.

    Raises:
        ValueError: it is larger, or not text. Names the file.
    """
    with Path(path).open("rb") as file:
        content = file.read(most + 1)  # no more than that, as devices and pipes have no size to check first
    if len(content) > most:
        raise ValueError(f"{path} is too large for {kind}: it has more than {most:,} bytes")
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not {kind}: byte {error.start} is no text in UTF-8") from None
    if "\0" in text:
        raise ValueError(f"{path} is not {kind}: it has a NUL byte at character {text.index(chr(0))}")
    return text
