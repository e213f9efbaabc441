"""What a user got wrong, told on standard error without a traceback."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import typer

from lightning_pipeline.schedules import ScheduleError


class CommandError(Exception):
    """A request that cannot be met; the message names what was received and the way out."""


@contextmanager
def told_to_the_user(*others: type[Exception]) -> Iterator[None]:
    """Print faults in schedules, files and requests, and those of the other kinds given, and end with exit code 2."""
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
