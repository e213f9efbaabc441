"""`python -m lightning_pipeline` is the console command `lightning-pipeline`."""

from lightning_pipeline.cli import app

app()
