"""What the commands share: errors without a traceback, options and tables."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated

import typer

from lightning_pipeline.schedules import SCHEDULE_NAMES, ScheduleError

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table


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


NAMES_HELP = f"{', '.join(SCHEDULE_NAMES)}; or a CSV file, which brings its own counts."

Ranks = Annotated[int, typer.Option("--ranks", "-p", min=1, help="Ranks that hold one copy of the model.")]
Microbatches = Annotated[int, typer.Option("--microbatches", "-m", min=1, help="Micro-batches in one step.")]
VirtualStages = Annotated[
    int | None,
    typer.Option(
        "--virtual-stages",
        "-v",
        min=1,
        show_default="2 for schedules made for several, else 1",
        help="Virtual stages on each rank, where a schedule takes several.",
    ),
]
Forward = Annotated[
    str,
    typer.Option(
        metavar="TIME",
        help="Time of a micro-batch's forward on a rank. Each of v virtual stages takes a v-th of it, which keeps "
        "schedules comparable. Or a list such as 1,1,2: one for each of RANKS equal parts of the model.",
    ),
]
InputGrad = Annotated[str, typer.Option(metavar="TIME", help="Likewise, of the gradients of the inputs.")]
WeightGrad = Annotated[str, typer.Option(metavar="TIME", help="Likewise, of the gradients of the weights.")]
Transfer = Annotated[float, typer.Option(min=0, metavar="TIME", help="Time until a value is on another rank.")]


def bare_table() -> Table:
    """A table without columns yet, and without lines but the one under its head."""
    from rich import box
    from rich.table import Table

    return Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False, show_edge=False)


def wide_console() -> Console:
    """Standard output. Where it is no terminal there is no width at which anything has to be wrapped."""
    from rich.console import Console

    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = 1000
    return console
