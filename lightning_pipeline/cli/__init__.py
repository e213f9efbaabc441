"""The console command `lightning-pipeline`.

A command is a function in a file of its own, added in `app`; a group of commands is a Typer application there. A module
here imports what needs torch or Lightning inside its functions, so that the other commands start at once.
"""

from lightning_pipeline.cli.app import app

__all__ = ["app"]
