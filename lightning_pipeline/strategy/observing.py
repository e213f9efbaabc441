"""Watching what a pipeline does: several may, and come and go as they like."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from lightning_pipeline.runtime.executor import Span
from lightning_pipeline.runtime.pipeline import Pipeline
from lightning_pipeline.schedules import Kind

Observer = Callable[[Span], None]
"""Gets an action with its start and end, in seconds."""


@contextmanager
def observed(pipeline: Pipeline, *observers: Observer) -> Iterator[None]:
    """While entered, `observers` get every action, beside whoever gets them already."""
    before = pipeline.observe
    everybody = (*observers, before) if before is not None else observers

    def observe(span: Span) -> None:
        for observer in everybody:
            observer(span)

    pipeline.observe = observe if everybody else None
    try:
        yield
    finally:
        pipeline.observe = before


def is_usual(spans: Sequence[Span], pipeline: Pipeline) -> bool:
    """Whether these are of a full batch, and of a known structure: of others there is little to learn about times."""
    num_forwards = sum(action.kind is Kind.F for action, _, _ in spans)
    return num_forwards == pipeline.num_microbatches * pipeline.num_virtual_stages and not pipeline.learning
