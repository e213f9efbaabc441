"""SIGTERM and requeue signals, on which all ranks act after the same batch."""

from __future__ import annotations

import signal
from collections.abc import Iterable
from functools import reduce
from operator import or_
from typing import Any

from .._lightning import LightningModule, SIGTERMException, TrainerFn, rank_zero_info
from .lightning_private import (
    Override,
    call_before_each_batch,
    replace_signal_handlers,
    requeue_slurm_job,
    set_received_sigterm,
)

TERMINATE = 1
REQUEUE = 2


def merge(noted: Iterable[float]) -> float:
    """What arrived on any of several ranks."""
    return float(reduce(or_, map(int, noted)))


class Signals:
    """What SIGTERM and SLURM's requeue signal ask of this rank, until all ranks have agreed to do it.

    Lightning's own handlers talk to the other ranks from wherever the signal finds this one. A rank that waits for
    its neighbour's activations does not come to its handler, and the neighbour that is in its own waits for it. Here
    a handler takes a note, notes travel with what the ranks exchange after each step, and all ranks act at once: on
    SIGTERM Lightning's loops raise `SIGTERMException` after that batch, and callbacks save on it; on the requeue
    signal the job is saved and requeued before the next one. A signal to one rank is enough.

    Args:
        has_replicas: these may have unequally many validation batches, so in a fit they stop after training ones.
    """

    def __init__(self, module: LightningModule, *, has_replicas: bool) -> None:
        self._module = module
        self._has_replicas = has_replicas
        self._noted = 0
        self._all_stop = False
        self._requeue_next = False

    def install(self, override: Override) -> None:
        """Take the place of Lightning's handlers, before it registers them."""
        trainer = self._module.trainer
        replace_signal_handlers(trainer, override, terminate=self._note_termination, requeue=self._note_requeue)
        call_before_each_batch(trainer, self._before_batch, override)

    def forget(self) -> None:
        """Before a run: what arrived in an earlier one was for that."""
        self._noted, self._all_stop, self._requeue_next = 0, False, False

    @property
    def noted(self) -> float:
        """What has arrived here, to be exchanged."""
        return float(self._noted)

    def heed(self, noted: float, *, by_all: bool) -> None:
        """After a step: act on what arrived on any of the ranks that ran it.

        Args:
            noted: their notes, merged.
            by_all: these are all ranks, and not only one replica's.
        """
        wanted = int(noted)
        if not wanted:
            return
        trainer = self._module.trainer
        fitting = trainer.state.fn == TrainerFn.FITTING
        if fitting and not by_all:
            return
        if wanted & REQUEUE and fitting:
            self._requeue_next = True
            self._noted = wanted & TERMINATE  # first things first
        elif wanted & TERMINATE:
            self._all_stop = by_all
            set_received_sigterm(trainer, True)
            rank_zero_info("SIGTERM was received: all ranks stop after this batch")

    def pause(self, paused: bool) -> None:
        """Around validation: Lightning is not to stop one replica in a batch that another does not have."""
        if self._all_stop and self._has_replicas:
            set_received_sigterm(self._module.trainer, not paused)

    def ends_all(self, error: BaseException) -> bool:
        """Whether `error` ends all ranks after the same batch, so that they can still work together."""
        return self._all_stop and isinstance(error, SIGTERMException)

    def _note_termination(self, signum: int, frame: Any) -> None:
        launcher = self._module.trainer.strategy.launcher
        if launcher is not None and not self._noted & TERMINATE:
            launcher.kill(signum)
        self._noted |= TERMINATE

    def _note_requeue(self, signum: int, frame: Any) -> None:
        self._noted |= REQUEUE

    def _before_batch(self) -> None:
        if self._requeue_next:
            self._requeue_next = False
            requeue_slurm_job(self._module.trainer, signal.SIGUSR1)
