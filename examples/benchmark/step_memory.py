"""The memory that a training step takes at its peak, by the allocator's own record."""

import gc
from typing import Any

import lightning as L
from torch import Tensor
from torch.profiler import ProfilerActivity, profile


class StepMemory(L.Callback):
    """Measures one step.

    Args:
        batch_idx: the step's batch.

    Attributes:
        peak_bytes: of this process's parameters, gradients, optimizer state and what the step allocates.
    """

    def __init__(self, batch_idx: int) -> None:
        self.batch_idx = batch_idx
        self.peak_bytes = 0
        self._before = 0
        self._profile: profile | None = None

    def on_train_batch_start(self, trainer: L.Trainer, module: L.LightningModule, batch: Any, batch_idx: int) -> None:
        if batch_idx == self.batch_idx:
            states = [state for optimizer in trainer.optimizers for state in optimizer.state.values()]
            # The last step's gradients go first, which the record does not tell.
            tensors = [*module.parameters(), *module.buffers(), *(value for s in states for value in s.values())]
            self._before = sum(t.nbytes for t in tensors if isinstance(t, Tensor) and not t.is_meta)
            self._profile = profile(activities=[ProfilerActivity.CPU], profile_memory=True)
            self._profile.start()

    def on_train_batch_end(
        self, trainer: L.Trainer, module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if self._profile is None:
            return
        self._profile.stop()
        now = self._before
        record: Any = self._profile.profiler
        for event in record.kineto_results.events():
            if event.name() == "[memory]":
                now += event.nbytes()
                self.peak_bytes = max(self.peak_bytes, now)
        self._profile = None
        gc.collect()  # its record, which is in a cycle, must not live until the interpreter ends
