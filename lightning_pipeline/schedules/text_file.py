"""Text files that somebody gives: read up to a size, and told from what is no text."""

from __future__ import annotations

from os import PathLike
from pathlib import Path


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
