"""What the commands share: errors without a traceback, and tables."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import typer

from lightning_pipeline.schedules import ScheduleError

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table


class CommandError(Exception):
    """A request that cannot be met; the message names what was given and the way out."""


@contextmanager
def errors_without_traceback(*others: type[Exception]) -> Iterator[None]:
    """Print errors in schedules, files and requests, and `others`, without a traceback, and end with exit code 2."""
    kinds: tuple[type[Exception], ...] = (CommandError, ScheduleError, ModuleNotFoundError, *others)
    try:
        yield
    except kinds as error:
        message = str(error)
    except OSError as error:
        message = f"{error.filename}: {error.strerror}" if error.filename and error.strerror else str(error)
    else:
        return
    typer.echo(f"Error: {message}", err=True)
    raise typer.Exit(2)


def bare_table(*headers: str, right: Sequence[str] = ()) -> Table:
    """A table whose only line is the one under its head.

    Args:
        right: headers of the columns after these, which are aligned to the right.
    """
    from rich import box
    from rich.table import Table

    table = Table(*headers, box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False, show_edge=False)
    for header in right:
        table.add_column(header, justify="right")
    return table


def wide_console() -> Console:
    """Standard output, so wide that nothing is wrapped where it is no terminal."""
    from rich.console import Console

    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = 1000
    return console
