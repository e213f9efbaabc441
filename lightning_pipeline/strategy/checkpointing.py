"""Checkpoints of a module in stages, as Lightning asks a strategy for them."""

from __future__ import annotations

import logging
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.optim import Optimizer
from typing_extensions import override

from lightning_pipeline.accelerators.random_state import add_random_state, restore_random_state
from lightning_pipeline.partition.devices import free_memory
from lightning_pipeline.partition.ownership import Ownership
from lightning_pipeline.partition.plan import StagePlan
from lightning_pipeline.runtime.failure import PeerFailedError
from lightning_pipeline.runtime.outside import Outside
from lightning_pipeline.runtime.transport import Transport

from .._lightning import AsyncCheckpointIO, CheckpointIO, LightningModule, TrainerFn, TrainerStatus
from .checkpoint import gather_module_state, help_to_gather, load_module_state
from .checkpoint_check import check_checkpoint, check_format, with_one_outcome
from .checkpoint_folder import is_folder, read_folder
from .checkpoint_io import AtomicCheckpointIO
from .copies import filled_from_owners, gather_module
from .distributed_checkpoint import (
    BackgroundSave,
    FolderWriter,
    host_group,
    module_state_in_parts,
    optimizer_state_in_parts,
)
from .hooks import apart
from .lightning_private import checkpoint_io_or, innermost
from .processes import ProcessStrategy
from .signals import Signals
from .stage_optimizers import StageOptimizers
from .stage_runner import StageRunner

log = logging.getLogger(__name__)


class CheckpointingStrategy(ProcessStrategy):
    """Saves and loads what the stages hold together: plain files through rank 0, or folders that all write."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.save_distributed_checkpoint = False
        self.plan: StagePlan | None = None
        """Where the module was cut automatically, and what is expected of it."""
        self.transport: Transport | None = None
        """The connection between the stages; None with one stage, or before setup."""
        self.weights_only: bool | None = None
        """What the Trainer's function that runs was told of loading."""
        self._runner: StageRunner | None = None
        self._stage_optimizers = StageOptimizers(())
        self._signals = Signals()
        self._background = BackgroundSave()

    @property
    def ownership(self) -> Ownership | None:
        """Which stages hold each parameter and buffer; None before setup."""
        return self._runner.held.ownership if self._runner is not None else None

    @property
    def _running(self) -> StageRunner:
        """What runs the stages, after setup."""
        assert self._runner is not None
        return self._runner

    @property
    def _outside(self) -> Outside | None:
        return self._runner.outside if self._runner is not None else None

    @override
    @apart
    def lightning_module_state_dict(self) -> dict[str, Any]:
        self._check_alive()
        if self.save_distributed_checkpoint:
            return module_state_in_parts(self._module)
        if self._is_replica:
            help_to_gather(self._module)
            return {}
        return gather_module_state(self._module, self._running.held.ownership, self.transport)

    @apart
    def gather_module(self) -> LightningModule | None:
        """On rank 0 a copy of the module with all weights, on the CPU, to save or export; None elsewhere.

        All ranks must call it, in a hook or after fit, validate, test or predict.
        """
        self._check_alive()
        if self.lightning_module is None or self.ownership is None:
            raise RuntimeError("there is no module to gather yet: call gather_module in a hook, or after trainer.fit")
        return gather_module(self.lightning_module, self.ownership, self.transport, is_writer=not self._is_replica)

    @override
    @apart
    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: str | Path, storage_options: Any | None = None
    ) -> None:
        self._check_alive()
        add_random_state(checkpoint, self.root_device)
        if self.plan is not None:  # for information: nothing reads it
            checkpoint["pipeline_plan"] = self.plan.as_dict()
        if self.save_distributed_checkpoint:
            self._save_folder(checkpoint, filepath, storage_options)
            return
        if self._is_replica:
            return
        checkpoint = filled_from_owners(checkpoint, self._running.held.ownership, self.transport)
        super().save_checkpoint(checkpoint, filepath, storage_options)

    def _save_folder(self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any | None) -> None:
        if storage_options is not None:
            raise TypeError(f"storage_options={storage_options!r} is for one plain file: leave it out")
        self._background.wait()
        in_background = isinstance(self.checkpoint_io, AsyncCheckpointIO)
        writer = FolderWriter(
            module=self._module,
            ownership=self._running.held.ownership,
            parameter_names=[layout.names for layout in self._stage_optimizers],
            is_writer=not self._is_replica,
            group=host_group(dist.distributed_c10d._get_default_group(), self.timeout, own=in_background),
            background=self._background if in_background else None,
        )
        writer.save(checkpoint, path)

    @override
    @apart
    def remove_checkpoint(self, filepath: str | Path) -> None:
        self._background.wait()  # it may be this one
        super().remove_checkpoint(filepath)

    @property
    @override
    def checkpoint_io(self) -> CheckpointIO:
        self._checkpoint_io = checkpoint_io_or(self._checkpoint_io, AtomicCheckpointIO)
        return self._checkpoint_io

    @checkpoint_io.setter
    def checkpoint_io(self, io: CheckpointIO) -> None:
        self._checkpoint_io = io

    @override
    @apart
    def load_checkpoint(self, checkpoint_path: str | Path, weights_only: bool | None = None) -> dict[str, Any]:
        self._background.wait()
        self.agree("the loading of a checkpoint", {})
        free_memory(self.root_device)
        plain = super().load_checkpoint
        weights_only = self.weights_only if weights_only is None else weights_only
        given = {} if weights_only is None else {"weights_only": weights_only}  # which Lightning 2.5 does not know
        usual = getattr(innermost(self.checkpoint_io), "weights_only", None)

        def read() -> dict[str, Any]:
            if is_folder(checkpoint_path):
                checkpoint = read_folder(checkpoint_path, usual if weights_only is None else weights_only)
            else:
                checkpoint = plain(checkpoint_path, **given)
            check_format(checkpoint, checkpoint_path)
            return checkpoint

        return with_one_outcome(read)

    @override
    @apart
    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        module = self._module
        # The first thing that a load changes, and the user's on_load_checkpoint has run.
        layouts = list(self._stage_optimizers) if module.trainer.state.fn == TrainerFn.FITTING else None
        path = module.trainer.ckpt_path
        with_one_outcome(lambda: check_checkpoint(checkpoint, module, layouts, strict=strict, path=path))
        load_module_state(module, checkpoint["state_dict"], strict=strict)

    @override
    @apart
    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        self._check_alive()
        self._stage_optimizers.follow(self.optimizers, self._module)
        if self.save_distributed_checkpoint:
            layout = self._stage_optimizers.layout_of(optimizer)
            return optimizer_state_in_parts(layout, self._stage_optimizers.ownership)
        return self._stage_optimizers.gather_state(optimizer, is_writer=not self._is_replica)

    @override
    @apart
    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        self._stage_optimizers.load_state(checkpoint["optimizer_states"])
        restore_random_state(checkpoint, self.root_device)

    @property
    def _is_replica(self) -> bool:
        """Whether another pipeline writes checkpoints, which are the same on all."""
        return self.topology is not None and self.topology.pipeline > 0

    def _check_alive(self) -> None:
        """Before a checkpoint is gathered, which takes all stages.

        Lightning calls callbacks that save on an exception before it tells the strategy of it. What ended this rank
        has not ended the others, which would not come.
        """
        if self._failed:
            raise RuntimeError("the run has failed, so its stages cannot be gathered into a checkpoint any more")
        error = sys.exc_info()[1]
        if self.lightning_module is None or error is None or self.world_size == 1 or self._signals.ends_all(error):
            return
        if self.lightning_module.trainer.state.status == TrainerStatus.INTERRUPTED:
            self.on_exception(error)
            if not isinstance(error, PeerFailedError):
                log.warning(
                    f"No checkpoint is saved: {type(error).__name__} ended rank {self.global_rank} alone, and the "
                    f"other stages' weights are not at hand. Go on from the last checkpoint that training saved."
                )
            raise error
