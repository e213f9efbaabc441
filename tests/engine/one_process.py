"""Steps on several virtual stages of one rank, compared with the same steps as they are.

Everything is as on several ranks, recordings, visits and micro-batches in order, but for the connections.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from lightning_pipeline.engine.microbatch import Microbatch
from lightning_pipeline.engine.one_rank import OneRankStep
from lightning_pipeline.engine.pipeline import Pipeline
from lightning_pipeline.engine.rank_resources import RankResources
from lightning_pipeline.engine.step import PipelineStep
from lightning_pipeline.engine.work import LiveCount, StepTask
from lightning_pipeline.partition.placeholder import Placeholder
from lightning_pipeline.partition.stage_map import resolve
from lightning_pipeline.recording.keyed_calls import KeyedCalls
from lightning_pipeline.recording.module_tensors import ModuleTensors
from lightning_pipeline.schedules import Action, Kind, Schedule

Step = Callable[[nn.Module, Any], Tensor]


@dataclass
class Came:
    """What came of some steps.

    Attributes:
        losses: of each micro-batch.
        gradients: of each parameter, after all steps.
        buffers: after all steps.
        in_order: whether each micro-batch of the last step ran event by event.
    """

    losses: list[Tensor] = field(default_factory=list)
    gradients: dict[str, Tensor | None] = field(default_factory=dict)
    buffers: dict[str, Tensor] = field(default_factory=dict)
    in_order: list[bool] = field(default_factory=list)
    pipeline: Pipeline | None = None


class _OnOneRank(Pipeline):
    def _run_alone(self, step: OneRankStep, work: StepTask, states: list[Microbatch], extra: Any) -> list[list[float]]:
        stages = PipelineStep(self._shared, work, states, LiveCount(), None)
        program = self.program(training=True, num_microbatches=len(states))
        with self._around(), self.recorder.patched(), self.recorder.installed():
            stages.run_micro_batches(program)
        return []


def _as_they_are(tensors: Sequence[Tensor]) -> list[Tensor]:
    return [tensor.detach() for tensor in tensors]


def one_after_the_other(num_stages: int, num_microbatches: int, *, splits: bool = False, ahead: int = 2) -> Schedule:
    """Forwards run ahead of backwards by so many micro-batches."""
    back = [Kind.I, Kind.W] if splits else [Kind.B]
    actions: list[Action] = []

    def backward(microbatch: int) -> None:
        for kind in back:
            actions.extend(Action(kind, stage, microbatch) for stage in reversed(range(num_stages)))

    for microbatch in range(num_microbatches):
        actions.extend(Action(Kind.F, stage, microbatch) for stage in range(num_stages))
        if microbatch >= ahead:
            backward(microbatch - ahead)
    for microbatch in range(max(num_microbatches - ahead, 0), num_microbatches):
        backward(microbatch)
    return Schedule("one rank", (tuple(actions),), num_microbatches, (0,) * num_stages)


def on_stages(
    module: nn.Module,
    stages: Mapping[str, int],
    step: Step,
    batches: Sequence[Any],
    *,
    steps: int = 2,
    splits: bool = False,
    seed: int = 3,
    alone: bool = False,
) -> Came:
    """Run steps of some micro-batches on virtual stages; with `alone`, as they are."""
    num_stages = 1 if alone else max(stages.values()) + 1
    found = resolve(module, {} if alone else dict(stages), num_stages)
    calls = KeyedCalls(module, found)
    tensors = ModuleTensors(module, found)
    shared = RankResources(0, [0] * num_stages, torch.device("cpu"), None, tensors, calls, lambda number: [0])
    shared.spread_module_tensors = _as_they_are  # type: ignore[method-assign]
    pipeline = (Pipeline if alone else _OnOneRank)(
        shared,
        schedule=lambda count: one_after_the_other(num_stages, count, splits=splits),
        num_microbatches=len(batches),
    )
    came = Came(pipeline=pipeline)

    def run(state: Microbatch, batch: Any) -> tuple[Any, Any]:
        loss = step(module, batch)
        return None, loss

    def loss_of(state: Microbatch, loss: Tensor) -> Tensor:
        came.losses.append(loss.detach().clone())
        return loss / len(batches)

    for number in range(steps):
        work = StepTask(kind="train", step=run, loss_of=loss_of, seed=seed + number)
        states, _ = pipeline.run(work, [copy.deepcopy(batch) for batch in batches])
        came.in_order = [state.is_done for state in states]
    came.gradients = {name: None if p.grad is None else p.grad.clone() for name, p in module.named_parameters()}
    came.buffers = {name: buffer.clone() for name, buffer in module.named_buffers()}
    return came


def assert_equal(
    make: Callable[[], nn.Module],
    stages: Mapping[str, int],
    step: Step,
    batches: Sequence[Any],
    *,
    in_order: bool | None = None,
    splits: Sequence[bool] = (False, True),
    steps: int = 2,
    tolerance: float = 0.0,
) -> Came:
    """Assert that losses, gradients and buffers are those of one process. Returns what came of it on stages."""
    torch.manual_seed(0)
    module = make()
    expected = on_stages(copy.deepcopy(module), stages, step, batches, alone=True, steps=steps)
    for split in splits:
        found = on_stages(copy.deepcopy(module), stages, step, batches, splits=split, steps=steps)
        differences = []
        for index, (one, other) in enumerate(zip(found.losses, expected.losses, strict=True)):
            if not _same(one, other, tolerance):
                differences.append(f"loss {index}: {one.item()} instead of {other.item()}")
        for name, gradient in expected.gradients.items():
            own = found.gradients[name]
            if (own is None) != (gradient is None) or (own is not None and not _same(own, gradient, tolerance)):
                off = None if own is None or gradient is None else float((own - gradient).abs().max())
                differences.append(f"gradient of {name}: {'none' if own is None else ''} off by {off}")
        for name, buffer in expected.buffers.items():
            if not _same(found.buffers[name], buffer, tolerance):
                differences.append(f"buffer {name}")
        assert not differences, (split, differences)
        if in_order is not None:
            assert any(found.in_order) == in_order, found.in_order
    return found


def _same(one: Tensor, other: Any, tolerance: float) -> bool:
    assert type(one) is not Placeholder
    if tolerance:
        return torch.allclose(one, other, rtol=tolerance, atol=tolerance)
    return torch.equal(one, other) or bool((one.isnan() & other.isnan()).all())
