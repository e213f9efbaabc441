"""What steps return, as it comes to the ranks that get it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from lightning_pipeline.partition import tree
from lightning_pipeline.partition.placeholder import Look
from lightning_pipeline.partition.recording import Recording
from lightning_pipeline.partition.tree import Layout


@dataclass(slots=True)
class StepResult:
    """What a step has returned, without its placeholders.

    Attributes:
        tensors: data, or the number and the look of a value.
    """

    layout: Layout
    tensors: list[Tensor | tuple[int, Look]]

    @classmethod
    def of(cls, result: Any, recording: Recording) -> StepResult:
        tensors, layout = tree.flatten(result)
        numbers = [recording.value_of(tensor) for tensor in tensors]
        return cls(layout, [t if n is None else (n, Look.of(t)) for t, n in zip(tensors, numbers, strict=True)])

    def values(self) -> dict[int, Look]:
        return dict(item for item in self.tensors if isinstance(item, tuple))

    def on(self, data: dict[int, Tensor]) -> Any:
        tensors = [data[item[0]] if isinstance(item, tuple) else item for item in self.tensors]
        return tree.rebuild(self.layout, tensors)
