"""`lightning-pipeline report`: the report of a run, from what it wrote as it went."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from lightning_pipeline.cli.common import CommandError, errors_without_traceback
from lightning_pipeline.schedules.chrome_trace import load_chrome_trace
from lightning_pipeline.schedules.records import read_records
from lightning_pipeline.schedules.report import report_of_records, report_of_trace


def report(
    run: Annotated[
        Path, typer.Argument(metavar="RUN", help="A folder of PipelineTimeline's files, or its .jsonl or .json.")
    ],
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", metavar="FILE", help="The page.", show_default="report.html beside the file"),
    ] = None,
) -> None:
    """Write the report of a run as a page for the browser, even if the run goes on or was killed."""
    with errors_without_traceback():
        source = file_of(run)
        if source.suffix == ".jsonl":
            found = report_of_records(read_records(source))
        else:
            found = report_of_trace(load_chrome_trace(source), source.name)
        typer.echo(f"{len(found.steps)} steps: {found.save(output or source.with_name('report.html'))}")


def file_of(run: Path) -> Path:
    """The file of records in a folder or below it, the latest of several; else the trace."""
    if run.is_file():
        return run
    if not run.exists():
        raise CommandError(f"{run} does not exist")
    records = [path for path in run.rglob("*.jsonl") if ".earlier" not in path.suffixes]
    found = records or list(run.rglob("timeline.json"))
    if not found:
        raise CommandError(f"{run} has no timeline.jsonl, which the callback PipelineTimeline writes as a run goes")
    return max(found, key=lambda path: path.stat().st_mtime)
