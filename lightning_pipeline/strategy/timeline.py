"""PipelineTimeline: what each stage did when, as a picture and as a trace."""

from __future__ import annotations

from lightning.pytorch import Callback


class PipelineTimeline(Callback):
    """Placeholder until drawn."""
