"""Trains the models of the zoo, one after the other, in the processes of one launch, and tells what came of it.

A layout is a number of stages, or 2x2: two virtual stages on each of two ranks, under one schedule after the other, or
plain: Lightning without this package.
"""

from __future__ import annotations

import itertools
import logging
import traceback
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any

import lightning as L
import psutil
import torch
from lightning.pytorch.strategies import Strategy
from torch import Tensor
from torch.autograd.variable import Variable

from lightning_pipeline import PipelineStrategy
from tests.launching import PATIENCE_S
from tests.models.habits import EarlyFeatures
from tests.models.zoo import CASES, NUM_MICROBATCHES, Case, blocks, vectors
from tests.poison import Poison, is_here

EARLY = "early_features"
VIRTUAL_SCHEDULES = ("zbv", "interleaved_zero_bubble", "interleaved_1f1b")


@dataclass
class Result:
    """What a run came to on one rank.

    Attributes:
        gradients: of each optimizer step, by name of the parameter; those that this rank has.
        losses: of each batch.
        state: the module's state dictionary.
        held: names of the parameters and buffers that this rank holds in the end.
        backwards: how often autograd ran backward on this rank.
        poisoned: names of what was spoilt before the first step.
        faults: what `Poison` found wrong.
        num_threads: threads of this process after the run.
    """

    gradients: list[dict[str, Tensor]] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    state: dict[str, Tensor] = field(default_factory=dict)
    held: list[str] = field(default_factory=list)
    backwards: int = 0
    poisoned: list[str] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)
    num_threads: int = 0


class Recorder(L.Callback):
    """Notes gradients and losses."""

    def __init__(self) -> None:
        self.result = Result()

    def on_before_optimizer_step(self, trainer: L.Trainer, pl_module: L.LightningModule, optimizer: Any) -> None:
        found = {name: p.grad for name, p in pl_module.named_parameters() if p.grad is not None}
        self.result.gradients.append({name: own.clone() for name, own in found.items() if is_here(own)})

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, *_: Any) -> None:
        self.result.losses.append(float(outputs["loss"]))


def fit(
    case: Case,
    strategy: Strategy | str,
    batches: list[Any],
    *,
    accumulate: int = 1,
    callbacks: Sequence[L.Callback] = (),
) -> Result:
    """Train a fresh module on `batches`."""
    L.seed_everything(1, verbose=False)
    module = case.build()
    devices = strategy.num_stages if isinstance(strategy, PipelineStrategy) else 1
    if devices > 1:
        module.stage_config = case.cuts[devices if strategy.schedule == "1f1b" else 2 * devices]
    recorder = Recorder()
    trainer = quiet_trainer(strategy, devices, accumulate_grad_batches=accumulate, callbacks=[recorder, *callbacks])
    result = recorder.result
    with counted_backwards(result):
        trainer.fit(module, torch.utils.data.DataLoader(batches, batch_size=None))
    result.state = {name: t.clone() for name, t in trainer.strategy.lightning_module_state_dict().items()}
    if isinstance(strategy, PipelineStrategy):
        result.held = list(filter(strategy.ownership.is_local, strategy.ownership.holders))
    result.num_threads = psutil.Process().num_threads()
    return result


@contextmanager
def counted_backwards(result: Result) -> Iterator[None]:
    plain = Variable._execution_engine  # which every backward comes to

    class Counting:
        def __getattr__(self, name: str) -> Any:
            return getattr(plain, name)

        def run_backward(self, *args: Any, **kwargs: Any) -> Any:
            result.backwards += 1
            return plain.run_backward(*args, **kwargs)

    Variable._execution_engine = Counting()
    try:
        yield
    finally:
        Variable._execution_engine = plain


def quiet_trainer(strategy: Strategy | str, devices: int, **options: Any) -> L.Trainer:
    """A Trainer on the CPU, for one epoch, that writes nothing."""
    return L.Trainer(
        strategy=strategy,
        devices=devices,
        accelerator="cpu",
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **options,
    )


def pipeline(num_stages: int, schedule: str = "1f1b") -> PipelineStrategy:
    return PipelineStrategy(
        num_stages=num_stages, num_microbatches=NUM_MICROBATCHES, schedule=schedule, timeout=PATIENCE_S
    )


def run_on_stages(case: Case, num_stages: int, schedule: str, poisons: bool) -> dict[str, Result]:
    """The run on stages; where poison is asked for, after a run of one step that shows who holds what."""
    batches = case.batches()
    if not poisons:
        return {"stages": fit(case, pipeline(num_stages, schedule), batches)}
    first = pipeline(num_stages, schedule)
    fit(case, first, batches[:1])
    poison = Poison(first.ownership.holders, first.global_rank)
    result = fit(case, pipeline(num_stages, schedule), batches, callbacks=[poison])
    result.poisoned, result.faults = poison.poisoned, poison.faults
    return {"stages": result}


def run_plain(case: Case) -> dict[str, Result]:
    """Plain Lightning over the micro-batches."""
    microbatches = [part for batch in case.batches() for part in split(batch)]
    return {"plain": fit(case, "auto", microbatches, accumulate=NUM_MICROBATCHES)}


def early_features(num_stages: int, schedule: str) -> dict[str, Any]:
    """What validation and prediction give that end on an early stage, before and after training."""
    L.seed_everything(1, verbose=False)
    module = EarlyFeatures()
    if num_stages > 1:
        module.stage_config = blocks("blocks.{}")[num_stages if schedule == "1f1b" else 2 * num_stages]
    loader = torch.utils.data.DataLoader(vectors(), batch_size=None)
    trainer = quiet_trainer(pipeline(num_stages, schedule), num_stages)
    before = trainer.predict(module, loader)
    trainer.fit(module, loader, loader)
    early = trainer.callback_metrics["early"].clone()
    return {"before": before, "after": trainer.predict(module, loader), "early": early}


def split(batch: Any) -> list[Any]:
    """The micro-batches of a dictionary or tuple of tensors."""
    if isinstance(batch, dict):
        return [dict(zip(batch, parts, strict=True)) for parts in split(tuple(batch.values()))]
    return list(zip(*(tensor.chunk(NUM_MICROBATCHES) for tensor in batch), strict=True))


def train(layout: str, names: list[str], early: bool) -> dict[str, Any]:
    """For each model this rank's `Result`s as dictionaries, or the traceback where it failed.

    Args:
        early: of `early_features` as well.
    """
    num_stages = 0 if layout == "plain" else int(layout[0])
    schedules = VIRTUAL_SCHEDULES if layout == "2x2" else ("1f1b",)
    warnings.filterwarnings("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    results: dict[str, Any] = {}
    for name, schedule in zip(names, itertools.cycle(schedules), strict=False):
        case = CASES[name]
        try:
            if num_stages == 0:
                run = run_plain(case)
            elif num_stages == 1:
                run = {"one": fit(case, pipeline(1), case.batches())}
            else:
                run = run_on_stages(case, num_stages, schedule, layout in map(str, case.poison))
            results[name] = {kind: asdict(result) for kind, result in run.items()}
        except Exception:
            results[name] = traceback.format_exc()
            if num_stages > 1:
                return results  # the stages may not be in step any more
    if early and not any(isinstance(found, str) for found in results.values()):
        results[EARLY] = early_features(num_stages, schedules[0])
    return results
