"""The other processes of a run: what all have to agree on, and news of failures."""

from __future__ import annotations

import os
import platform
import zlib
from collections.abc import Mapping
from datetime import timedelta
from functools import cache
from importlib.metadata import version

import torch
from torch.optim import Optimizer

from lightning_pipeline.runtime.agreement import SAME, Agreement
from lightning_pipeline.runtime.failure import FailureNotice
from lightning_pipeline.runtime.replicas import Replicas
from lightning_pipeline.runtime.store import GRACE_S, BoundedStore

from .._lightning import NAMES, LightningModule, Trainer

SETTINGS = (
    *("num_nodes", "precision", "max_epochs", "min_epochs", "max_steps", "min_steps", "accumulate_grad_batches"),
    *("gradient_clip_val", "gradient_clip_algorithm", "num_sanity_val_steps", "val_check_interval"),
    *("limit_train_batches", "limit_val_batches", "limit_test_batches", "limit_predict_batches", "overfit_batches"),
    *("check_val_every_n_epoch", "reload_dataloaders_every_n_epochs"),
)
"""Arguments of a Trainer that decide what its loops do, and so which messages ranks wait for."""


@cache  # files of distributions are read for it
def versions() -> dict[str, str]:
    """The versions that all ranks must have."""
    return {
        "lightning_pipeline": version("lightning-pipeline"),
        "lightning": version(NAMES.distribution),
        "torch": torch.__version__,
        "Python": ".".join(platform.python_version_tuple()[:2]),
    }


def settings_of(trainer: Trainer) -> dict[str, str]:
    """What a Trainer was asked to do."""
    assert trainer.state.fn is not None  # during a run
    # These callbacks communicate; others may exist on one rank only.
    together = [callback.state_key for callback in (*trainer.checkpoint_callbacks, *trainer.early_stopping_callbacks)]
    return {
        "the Trainer's function": str(trainer.state.fn.value),
        # With a time interval a Trainer has no val_check_interval.
        **{name: repr(getattr(trainer, name, None)) for name in SETTINGS},
        "callbacks": ", ".join(sorted(together)) or "none",
    }


def parts_of(module: LightningModule) -> dict[str, str]:
    """The module and its parameters, which all ranks must have built alike."""
    # Without buffers: a stage may have added some in an earlier run.
    shapes = [(name, tuple(p.shape), str(p.dtype)) for name, p in module.named_parameters(remove_duplicate=False)]
    checksum = zlib.crc32(repr(shapes).encode())
    numbers = sum(torch.Size(shape).numel() for _, shape, _ in shapes)
    return {
        "LightningModule": type(module).__qualname__,
        "parameters": f"{len(shapes)} of {numbers} numbers (names, shapes and dtypes: {checksum:08x})",
    }


def training_of(trainer: Trainer) -> dict[str, str]:
    """The state in which training starts, a restored checkpoint included."""
    schedulers = [type(config.scheduler).__name__ for config in trainer.lr_scheduler_configs]
    return {
        "training batches": str(trainer.num_training_batches),
        "global step": str(trainer.global_step),
        "epoch": str(trainer.current_epoch),
        "optimizers": ", ".join(map(_describe, trainer.optimizers)) or "none",
        "parameters of the optimizers": _order(trainer),
        "lr schedulers": ", ".join(schedulers) or "none",
        # Lightning's samplers shuffle by this seed, so with unequal ones the result would be that of no seed.
        "seed_everything": os.environ.get("PL_GLOBAL_SEED", "not called"),
    }


def evaluation_of(kind: str, num_batches: list[int | float], replica: int) -> dict[str, str]:
    """The batches of each loader at the start of evaluation. Replicas may have unequally many."""
    return {
        f"{kind} loaders": str(len(num_batches)),
        f"{kind} batches of replica {replica}": ", ".join(map(str, num_batches)),
    }


def _describe(optimizer: Optimizer) -> str:
    numbers = {name: value for name, value in optimizer.defaults.items() if isinstance(value, (int, float, tuple))}
    return f"{type(optimizer).__name__}({', '.join(f'{name}={value}' for name, value in numbers.items())})"


def _order(trainer: Trainer) -> str:
    """The parameters in the optimizers' groups: their states are stored by place."""
    assert trainer.lightning_module is not None  # during a run
    names = {id(parameter): name for name, parameter in trainer.lightning_module.named_parameters()}
    groups = [
        [names.get(id(parameter), "another") for parameter in group["params"]]
        for optimizer in trainer.optimizers
        for group in optimizer.param_groups
    ]
    return f"{sum(map(len, groups))} in {len(groups)} groups (their order: {zlib.crc32(repr(groups).encode()):08x})"


EVEN = (
    "give all ranks the same seed, data, checkpoint and optimizers, and sort what comes from sets, whose order is "
    "another in each process; replicas that read data of their own may need "
    "limit_train_batches"
)


class Peers:
    """The processes of one run. A single process agrees with itself.

    Attributes:
        has_failed: the run has failed on this rank, which no longer waits for the others.
    """

    def __init__(self) -> None:
        self.has_failed = False
        self.notice = FailureNotice(None, rank=0, world_size=1)
        self._agreement: Agreement | None = None
        self._started: set[str] = set()

    def watch(self, store: BoundedStore, rank: int, world_size: int, timeout: timedelta) -> None:
        """From now on, tell the ranks of one another's failures, and let them agree."""
        self.notice = FailureNotice.shared(store.torch, rank=rank, world_size=world_size, timeout=timeout)
        self.notice.is_strict = self.notice.is_watching = True
        self._agreement = Agreement(store, rank, world_size, timeout, self.notice)

    def agree(self, place: str, facts: Mapping[str, str], *, way_out: str = SAME, is_last: bool = False) -> None:
        """Raise on all ranks if they do not come to the same place with the same facts (`Agreement.check`)."""
        if self._agreement is not None and not self.has_failed:
            self._agreement.check(place, facts, way_out=way_out, is_last=is_last)

    def agree_once(self, kind: str, facts: Mapping[str, str], *, way_out: str = SAME) -> None:
        """At the first start of a loop in a run: a fit starts validation many times, on the same data."""
        if kind not in self._started:
            self._started.add(kind)
            self.agree(f"the start of {kind}", facts, way_out=way_out)

    def end_alike(self, place: str) -> bool:
        """Whether an error ends all ranks at the same place, which some of them may take seconds to come to."""
        if self._agreement is None or self.has_failed:
            return False
        return self._agreement.came_alike(place, timedelta(seconds=GRACE_S))

    def fail(self, error: BaseException) -> None:
        """End the run on this rank: tell the others why, and wake up those that wait for it. Never raises."""
        self.has_failed = True
        self.notice.publish(error)  # before connections close and wake others up
        Replicas.close_all()
        self.notice.fail(error)
