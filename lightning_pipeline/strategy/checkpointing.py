"""The strategy's checkpoint methods."""

from __future__ import annotations

import functools
import logging
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.optim import Optimizer
from typing_extensions import override

from lightning_pipeline.hooks.owner_computes import OwnerComputes
from lightning_pipeline.partition.ownership import Ownership
from lightning_pipeline.partition.rng import add_random_state, free_memory, restore_random_state
from lightning_pipeline.planning.plan import StagePlan
from lightning_pipeline.runtime.failure import PeerFailedError
from lightning_pipeline.runtime.log import logger
from lightning_pipeline.runtime.transport import Transport

from .._lightning import (
    AsyncCheckpointIO,
    CheckpointIO,
    DoublePrecision,
    HalfPrecision,
    LightningModule,
    TrainerFn,
    TrainerStatus,
)
from ..checkpoint.check import check_checkpoint, check_format, check_optimizers, with_one_outcome
from ..checkpoint.files import AtomicCheckpointIO
from ..checkpoint.folder import is_folder, read_folder
from ..checkpoint.sharded import (
    BackgroundSave,
    FolderWriter,
    host_group,
    module_state_in_parts,
    optimizer_state_in_parts,
)
from ..checkpoint.state import filled_from_owners, gather_module, gather_module_state, help_to_gather, load_module_state
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
        self._runner: StageRunner | None = None
        self._stage_optimizers = StageOptimizers(())
        self._signals = Signals()
        self._background = BackgroundSave()
        self.weights_only: bool | None = None
        """What the Trainer's function was given, which Lightning passes on only where it restores before setup."""
        self._put_off: Callable[[], Any] | None = None
        self._awaits_setup = False  # in a run
        self._is_in_parts = False  # the checkpoint that was read last

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
    def _outside(self) -> OwnerComputes | None:
        return self._runner.outside if self._runner is not None else None

    @property
    def _leaves_files_to_lightning(self) -> bool:
        """Whether a checkpoint is what one process writes, and not in parts."""
        return self._is_alone and not self.save_distributed_checkpoint

    @override
    @apart
    def lightning_module_state_dict(self) -> dict[str, Any]:
        if self._leaves_files_to_lightning:
            return super().lightning_module_state_dict()
        self._check_alive()
        if self.save_distributed_checkpoint:
            return module_state_in_parts(self._module)
        if self._is_replica:
            help_to_gather(self._module, self._running.held.ownership)
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
        logger.debug("saves checkpoint %s", filepath)
        add_random_state(checkpoint, self.root_device)
        if self.plan is not None:  # for information: nothing reads it
            checkpoint["pipeline_plan"] = self.plan.as_dict()
        if self._leaves_files_to_lightning:
            super().save_checkpoint(checkpoint, filepath, storage_options=storage_options)
            return
        self._check_alive()
        if self.save_distributed_checkpoint:
            self._save_folder(checkpoint, filepath, storage_options)
            return
        if self._is_replica:
            return
        checkpoint = filled_from_owners(checkpoint, self._running.held.ownership, self.transport)
        super().save_checkpoint(checkpoint, filepath, storage_options=storage_options)

    def _save_folder(self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any | None) -> None:
        if storage_options is not None:
            raise TypeError(f"storage_options={storage_options!r} is for one plain file: leave it out")
        self._background.wait()
        if not dist.is_initialized():
            self._connect()
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
        logger.debug("loads checkpoint %s", checkpoint_path)
        self._background.wait()
        self.agree("the loading of a checkpoint", {})
        free_memory(self.root_device)
        plain = super().load_checkpoint
        weights_only = self.weights_only if weights_only is None else weights_only
        self._is_in_parts = is_folder(checkpoint_path)
        if self._is_alone and not self._is_in_parts:
            return plain(checkpoint_path, weights_only)
        usual = getattr(innermost(self.checkpoint_io), "weights_only", None)

        def read() -> dict[str, Any]:
            if self._is_in_parts:
                checkpoint = read_folder(checkpoint_path, usual if weights_only is None else weights_only)
            else:
                checkpoint = plain(checkpoint_path, weights_only)
            check_format(checkpoint, checkpoint_path)
            return checkpoint

        return with_one_outcome(read)

    @override
    @apart
    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        if isinstance(self.precision_plugin, (DoublePrecision, HalfPrecision)):
            self.precision_plugin.convert_module(self._module)  # or what is saved would be rounded to what it was
        if self._is_alone and not self._is_in_parts:
            super().load_model_state_dict(checkpoint, strict=strict)
            return
        module = self._module
        # The first thing that a load changes, and the user's on_load_checkpoint has run.
        goes_on = module.trainer.state.fn == TrainerFn.FITTING
        path = module.trainer.ckpt_path
        with_one_outcome(lambda: check_checkpoint(checkpoint, module, strict=strict, goes_on=goes_on, path=path))
        self._put_off = functools.partial(load_module_state, module, checkpoint["state_dict"], strict=strict)
        if self._is_alone or not self._awaits_setup:
            self._load_put_off()

    def _load_put_off(self) -> None:
        """Load the weights of a checkpoint that was restored before set-up: a rank reads what it holds by now."""
        self._awaits_setup = False
        load, self._put_off = self._put_off, None
        if load is not None:
            load()

    @override
    @apart
    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        if self._leaves_files_to_lightning:
            return super().optimizer_state(optimizer)
        self._check_alive()
        self._stage_optimizers.follow(self.optimizers, self._module)
        if self.save_distributed_checkpoint:
            layout = self._stage_optimizers.layout_of(optimizer)
            return optimizer_state_in_parts(layout, self._stage_optimizers.ownership)
        return self._stage_optimizers.gather_state(optimizer, is_writer=not self._is_replica)

    @override
    @apart
    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        if self._is_alone and not self._is_in_parts:
            super().load_optimizer_state_dict(checkpoint)
        else:
            module, layouts = self._module, self._stage_optimizers
            layouts.follow(self.optimizers, module)
            path = module.trainer.ckpt_path
            with_one_outcome(lambda: check_optimizers(checkpoint, module, list(layouts), path=path))
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
