"""What is wrong with a cut: forwards of all its stages on one rank, before any other rank hears of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn

from lightning_pipeline.partition import tree
from lightning_pipeline.partition.interception import Interception
from lightning_pipeline.partition.leaves import certain_stages
from lightning_pipeline.partition.observed_run import Step
from lightning_pipeline.partition.outcome import Outcome
from lightning_pipeline.partition.ownership import Ownership
from lightning_pipeline.partition.plan import StagePlan
from lightning_pipeline.partition.random import Streams
from lightning_pipeline.partition.replay import Replay
from lightning_pipeline.partition.stage_config import StageMap, resolve
from lightning_pipeline.runtime.pipeline import Pipeline
from lightning_pipeline.runtime.placement import Placement
from lightning_pipeline.runtime.work import Work
from lightning_pipeline.schedules import Action, Kind, Schedule


def fault_of_cut(module: LightningModule, plan: StagePlan, step: Step, microbatch: object) -> str:
    """What goes wrong when the step runs in the plan's stages, the first time and again; empty if nothing does.

    Forwards only: what stages can fall out over is the order of calls and the code between modules.
    """
    num_stages = len(plan.stages)
    try:
        stages = resolve(module, plan.stage_config, num_stages)
        interception = _OnRanksOfTheirOwn(module, stages, Streams(module.device))
        certain = certain_stages(interception.leaves, num_stages)
        holders = [Placement(module, range(num_stages), stage, certain) for stage in range(num_stages)]
        interception.held = [placement.ownership() for placement in holders]
        pipeline = Pipeline(
            rank=0,
            placement=[0] * num_stages,
            device=module.device,
            transport=None,
            interception=interception,
            schedule=lambda count: _one_after_the_other(num_stages),
            num_microbatches=1,
        )
        work = Work(kind=("trial", module.training), step=lambda state, batch: step(batch), seed=0)
        for _ in range(2):
            with torch.set_grad_enabled(module.training):
                report = pipeline.run(work, [tree.replace(microbatch, Tensor.clone)])
            if not pipeline.is_new(report):
                continue
            reports = pipeline.all_reports(report)
            pipeline.settle(report, reports)
            ordered = [next(iter(reports[stage].values())) for stage in range(num_stages)]
            empty = [str(stage) for stage, found in enumerate(ordered) if not found.leaves]
            if empty:
                return f"no module runs on stage {empty[0]}"
            for placement in holders:
                placement.add(ordered)
            interception.held = [placement.ownership() for placement in holders]
    except Exception as error:  # whatever a user's code makes of tensors that are not there
        return f"{type(error).__name__}: {error}"
    return ""


def _one_after_the_other(num_stages: int) -> Schedule:
    order = tuple(Action(Kind.F, stage, 0) for stage in range(num_stages))
    return Schedule("trial", (order,), 1, (0,) * num_stages)


class _OnRanksOfTheirOwn(Interception):
    """Shows each stage only the tensors that its rank would hold: the others are on the meta device."""

    held: list[Ownership]

    def __init__(self, root: nn.Module, stages: StageMap, streams: Streams) -> None:
        super().__init__(root, stages, streams)
        self._meta: dict[int, Tensor] = {}
        self._real: list[Tensor] = []  # so that no id is given out again

    def tensor_names(self) -> dict[int, str]:
        names = super().tensor_names()
        names.update({id(meta): names[key] for key, meta in self._meta.items() if key in names})
        return names

    def run(self, replay: Replay, step: Callable[..., Any], *args: Any) -> Outcome:
        def with_its_tensors(*inner: Any) -> Any:  # within what keeps the stages' attributes apart
            with self._only(self.held[replay.stage]):
                return step(*inner)

        return super().run(replay, with_its_tensors, *args)

    @contextmanager
    def _only(self, held: Ownership) -> Iterator[None]:
        with torch._C.DisableTorchFunction():  # or the replay would take this for the step's
            swapped = [
                (slots, key, tensor, self._meta_of(tensor))
                for prefix, module in self.root.named_modules(remove_duplicate=False)
                for slots in (module._parameters, module._buffers)
                for key, tensor in slots.items()
                if tensor is not None and _is_elsewhere(held, f"{prefix}.{key}" if prefix else key)
            ]
        for slots, key, _, meta in swapped:
            slots[key] = meta
        try:
            yield
        finally:
            for slots, key, tensor, meta in swapped:
                if slots.get(key) is meta:
                    slots[key] = tensor

    def _meta_of(self, tensor: Tensor) -> Tensor:
        if id(tensor) not in self._meta:
            self._real.append(tensor)
            meta = torch.empty_like(tensor.detach(), device="meta")
            is_parameter = isinstance(tensor, nn.Parameter)
            self._meta[id(tensor)] = nn.Parameter(meta, tensor.requires_grad) if is_parameter else meta
        return self._meta[id(tensor)]


def _is_elsewhere(held: Ownership, name: str) -> bool:
    return name in held and not held.is_local(name)
