"""The command-line application."""

from __future__ import annotations

from importlib.metadata import version
from typing import Annotated

import typer

from lightning_pipeline.cli import checkpoint, demo, plan, rank_table, report, schedules, watch

app = typer.Typer(
    name="lightning-pipeline",
    help="Before a run: what schedules cost and look like, where to cut a model, rank tables. After it: its report, "
    "checkpoints.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _print_version(is_given: bool) -> None:
    if is_given:
        typer.echo(f"lightning-pipeline {version('lightning-pipeline')}")
        raise typer.Exit


@app.callback()
def options(
    print_version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Options before a command."""


app.command()(demo.demo)
app.command()(schedules.simulate)
app.command()(schedules.draw)
app.command()(plan.plan)
app.command()(report.report)
app.command()(watch.watch)
app.add_typer(checkpoint.app, name="checkpoint")
app.add_typer(rank_table.app, name="rank-table")
