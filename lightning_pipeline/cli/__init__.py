"""The console command `lightning-pipeline`.

A command is a function that `app` adds; a group of commands is a Typer application. Modules here import torch and
Lightning inside of functions only, so that commands without them start at once.
"""

from lightning_pipeline.cli.app import app

__all__ = ["app"]
