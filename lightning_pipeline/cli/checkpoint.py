"""`lightning-pipeline checkpoint`: checkpoint folders and plain files."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from lightning_pipeline.cli.common import CommandError, errors_without_traceback

app = typer.Typer(no_args_is_help=True)


@app.callback(help="Checkpoints: folders into plain files, and back.")
def checkpoint() -> None:
    """Makes a group of the one command, which otherwise would be `lightning-pipeline checkpoint` itself."""


@app.command()
def convert(
    source: Annotated[
        Path,
        typer.Argument(
            metavar="SOURCE", help="A folder that save_distributed_checkpoint=True has written, or a .ckpt file."
        ),
    ],
    destination: Annotated[Path, typer.Argument(metavar="DESTINATION", help="Where to write the other kind.")],
    force: Annotated[bool, typer.Option("--force", help="Replace what is at DESTINATION.")] = False,
    weights_only: Annotated[
        bool,
        typer.Option(help="Refuse objects other than tensors and builtins. Otherwise SOURCE can run code of its own."),
    ] = True,
) -> None:
    """Turn a checkpoint folder into one plain Lightning file, or a file into a folder. One process does it."""
    with errors_without_traceback():
        if os.path.lexists(destination) and not force:
            raise CommandError(f"{destination} exists: choose another DESTINATION, or replace it with --force")
        if source.resolve() == destination.resolve():
            raise CommandError(f"SOURCE and DESTINATION are both {source}")
        from lightning_pipeline.checkpoint.folder import convert_checkpoint  # which takes torch
        from lightning_pipeline.checkpoint.torch_files import CheckpointError

        with errors_without_traceback(CheckpointError):
            tensors = convert_checkpoint(source, destination, weights_only=weights_only)
    from rich.filesize import decimal

    kind = "folder" if destination.is_dir() else "file"
    amount = f"{len(tensors)} tensors, {decimal(sum(tensor.nbytes for tensor in tensors))}"
    typer.echo(f"Wrote the {kind} {destination} from {source}: {amount}.")
