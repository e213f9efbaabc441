"""What is wrong with a cut: a step in all of its stages on one rank, before any other rank hears of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from lightning.pytorch import LightningModule
from torch import Tensor

from lightning_pipeline.partition import tree
from lightning_pipeline.partition.keyed_calls import KeyedCalls
from lightning_pipeline.partition.module_tensors import ModuleTensors
from lightning_pipeline.partition.observed_run import Step
from lightning_pipeline.partition.plan import StagePlan
from lightning_pipeline.partition.program import Program
from lightning_pipeline.partition.recorder import Recorder
from lightning_pipeline.partition.recording import Recording
from lightning_pipeline.partition.stage_config import resolve
from lightning_pipeline.runtime.draws import Draws
from lightning_pipeline.runtime.in_order import InOrder
from lightning_pipeline.runtime.microbatch import Microbatch
from lightning_pipeline.runtime.user_state import set_aside

_SEEDS = (0, 1, 2, 3)
"""A step that leaves out layers at random may pass over a stage once, and seldom every time."""


def fault_of_cut(module: LightningModule, plan: StagePlan, step: Step, microbatch: object) -> str:
    """What goes wrong when the step is recorded in the plan's stages; empty if nothing does."""
    num_stages = len(plan.stages)
    used: set[int] = set()
    try:
        for seed in _SEEDS:
            program = _recorded(module, plan, step, microbatch, seed)
            if len(program.visits) > num_stages:
                line = next(event.line for event in program.events if event.visit >= num_stages)
                return f"the data goes back to an earlier stage ({line})"
            used.update(event.visit for event in program.events if any(type(v) is int and v < 0 for v in event.inputs))
            if len(used) == num_stages:
                return ""
    except Exception as error:  # whatever a user's code makes of tensors that are not there
        return f"{type(error).__name__}: {error}"
    return f"no module runs on stage {min(set(range(num_stages)) - used)}"


def _recorded(module: LightningModule, plan: StagePlan, step: Step, microbatch: object, seed: int) -> Program:
    num_stages = len(plan.stages)
    stages = resolve(module, plan.stage_config, num_stages)
    tensors = ModuleTensors(module, stages)
    draws = Draws(module.device)
    recorder = Recorder(tensors, KeyedCalls(module, stages), range(num_stages))
    given, layout = tree.flatten(microbatch)
    state = Microbatch(0, 0, layout, 1, 1.0, 1, True, 0)
    data = _OnOneRank(state, tensors, num_stages, draws)
    with torch.set_grad_enabled(module.training), draws.kept():
        recording = Recording(recorder, recorder.beginning("trial", 0), data, lambda number: draws.seed(seed, number))
        state.recording = recording
        with recorder.patched(), recorder.installed(), recording.running():
            step(tree.rebuild(layout, [tensor.clone() for tensor in given]))
    return Program(recording.event)


class _OnOneRank:
    """Gives a recording data of a module that is whole here."""

    def __init__(self, state: Microbatch, tensors: ModuleTensors, num_stages: int, draws: Draws) -> None:
        self._tensors = tensors
        self._run = InOrder(
            state,
            (),
            [0] * num_stages,
            0,
            tensors,
            None,
            holders=lambda number: (0,),
            seed_draw=draws.seed,
            training=False,
            earlier=_nothing_is_earlier,
        )

    def read(self, recording: Recording, values: Sequence[int]) -> list[Tensor]:
        with set_aside():
            self._run.run_up_to(recording.event)
            return self._run.data_of(values)

    def read_held(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        return [tensor.detach() for tensor in tensors]

    def finish_before(self, recording: Recording, *, with_own: bool) -> None:
        with set_aside():
            self._run.run_up_to(recording.event)

    def shown(self, recording: Recording, value: int, show: Callable[[Tensor], str]) -> str:
        [tensor] = self.read_held([self._tensors.tensors[-1 - value]]) if value < 0 else self.read(recording, [value])
        return show(tensor)


def _nothing_is_earlier(recording: object, value: int) -> Tensor:
    raise AssertionError("a trial has one micro-batch")
