"""SIGTERM, SLURM's requeue signal and `trainer.should_stop`: all ranks act on them after the same batch."""

from __future__ import annotations

import signal
from collections.abc import Iterable
from functools import reduce
from operator import or_
from typing import Any

from lightning_pipeline.partition.overrides import Override

from .._lightning import LightningModule, SIGTERMException, TrainerFn, rank_zero_info
from .lightning_loops import call_before_each_batch
from .lightning_private import replace_signal_handlers, requeue_slurm_job, set_received_sigterm

TERMINATE = 1
REQUEUE = 2
STOP = 4


def merge(noted: Iterable[float]) -> float:
    """What arrived on any of several ranks."""
    return float(reduce(or_, map(int, noted)))


class Signals:
    """The signals that this rank has received, until all ranks act on them together.

    Lightning's handlers communicate with the other ranks from wherever the signal interrupts this one. That deadlocks
    in a pipeline: a rank that waits for its neighbour's activations does not reach its handler, and the neighbour waits
    in its own. Here a handler only takes a note, and notes travel with what the ranks exchange after each step. On
    SIGTERM Lightning's loops then raise `SIGTERMException` after the same batch on all ranks, and callbacks save; on
    the requeue signal the job is saved and requeued before the next batch. A signal to one rank is enough.

    Args:
        has_replicas: these may have unequally many validation batches, so a fit stops after a training batch only.
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

    def reset(self) -> None:
        """At the start of a run: drop what arrived in an earlier one."""
        self._noted, self._all_stop, self._requeue_next = 0, False, False

    @property
    def noted(self) -> float:
        """What has arrived on this rank, or its code has asked for, for the exchange after a step."""
        return float(self._noted | (STOP if self._module.trainer.should_stop else 0))

    def act_on(self, noted: float, *, by_all: bool) -> None:
        """After a step: act on what the ranks that ran it have received.

        Args:
            by_all: they are all ranks, not those of one replica only.
        """
        wanted = int(noted)
        if not wanted:
            return
        trainer = self._module.trainer
        if wanted & STOP:  # it may be one rank's code that asks for it
            trainer.should_stop = True
        fitting = trainer.state.fn == TrainerFn.FITTING
        if fitting and not by_all:
            return
        if wanted & REQUEUE and fitting:
            self._requeue_next = True
            self._noted = wanted & TERMINATE  # acted on after that, if the process still runs
        elif wanted & TERMINATE:
            self._all_stop = by_all
            set_received_sigterm(trainer, True)
            rank_zero_info("SIGTERM was received: all ranks stop after this batch")

    def pause(self, paused: bool) -> None:
        """Around evaluation: keep Lightning from stopping a replica in a batch that another one does not have."""
        if self._all_stop and self._has_replicas:
            set_received_sigterm(self._module.trainer, not paused)

    def ends_all(self, error: BaseException) -> bool:
        """Whether `error` ends all ranks after the same batch, so that they can still work together."""
        return self._all_stop and isinstance(error, SIGTERMException)

    def _note_termination(self, signum: int, frame: Any) -> None:
        # Once: the launcher passes the signal on to the processes that it has started.
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
