"""Checkpoints: plain files written by rank 0, or folders written by all ranks."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from lightning_pipeline import _torch
from lightning_pipeline.hooks.saved_states import OnFirstRank
from lightning_pipeline.partition.memory import memory_of
from lightning_pipeline.partition.ownership import named_tensors
from lightning_pipeline.partition.rng import add_random_state, free_memory, restore_random_state
from lightning_pipeline.runtime.failure import PeerFailedError
from lightning_pipeline.runtime.log import logger

from .._lightning import (
    AsyncCheckpointIO,
    DoublePrecision,
    HalfPrecision,
    LightningModule,
    TrainerFn,
    TrainerStatus,
)
from ..checkpoint.check import check_checkpoint, check_format, check_optimizers, with_one_outcome
from ..checkpoint.folder import is_folder, read_folder
from ..checkpoint.sharded import (
    BackgroundSave,
    FolderWriter,
    host_group,
    module_state_in_parts,
    optimizer_state_in_parts,
)
from ..checkpoint.state import filled_from_owners, gather_module, gather_module_state, help_to_gather, load_module_state
from .hooks import has_hook
from .left_states import used_in_parts
from .lightning_private import innermost

if TYPE_CHECKING:
    from .session import Session
    from .session_strategy import SessionStrategy

log = logging.getLogger(__name__)


class _Gathered(NamedTuple):
    """A module's state that hooks have been shown before it is saved.

    Attributes:
        entries: on the first stage, the tensors as they were gathered, with their versions.
        held: the tensors that this rank holds, with their versions.
    """

    entries: dict[str, tuple[Tensor, int]]
    held: list[tuple[Tensor, int]]

    def is_entry(self, name: str, value: Any) -> bool:
        """Whether a value is what was gathered, or a view of it, and nobody has changed it."""
        tensor, version = self.entries.get(name, (None, 0))
        is_same = tensor is not None and isinstance(value, Tensor) and memory_of(value) == memory_of(tensor)
        return is_same and value._version == version


class Checkpoints:
    """Saves and loads what the stages hold together.

    Arguments named `plain` are Lightning's own methods, which do for a single process.
    """

    def __init__(self, strategy: SessionStrategy) -> None:
        self.background = BackgroundSave()
        self._strategy = strategy
        self._put_off: Callable[[], Any] | None = None
        self._awaits_setup = False
        self._is_in_parts = False  # the checkpoint that was read last
        self._gathered: _Gathered | None = None

    def begin(self) -> None:
        """At the start of a run."""
        self._awaits_setup, self._put_off = True, None  # an earlier run may have failed before its set-up

    @property
    def _session(self) -> Session:
        return self._strategy.session

    @property
    def _saves_plainly(self) -> bool:
        """Whether Lightning saves checkpoints by itself."""
        return self._strategy.is_single_process and not self._strategy.save_distributed_checkpoint

    @property
    def _loads_plainly(self) -> bool:
        """Whether Lightning loads the checkpoint that was read last by itself."""
        return self._strategy.is_single_process and not self._is_in_parts

    @property
    def _is_writer(self) -> bool:
        """Whether this rank's pipeline writes checkpoints, which would be the same on all."""
        return self._session.topology.pipeline == 0

    @property
    def _is_seen(self) -> bool:
        """Whether hooks see the checkpoints that are saved, on every rank."""
        return has_hook("on_save_checkpoint", self._strategy.module)

    # -- saving -----------------------------------------------------------------------------------------------------

    def module_state(self, plain: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """The module's state dict, on the rank that writes it, and wherever hooks see it. All ranks must call it."""
        if self._saves_plainly:
            return plain()
        self.check_alive()
        module = self._strategy.module
        session, is_seen = self._session, self._is_seen
        if not session.is_left_whole:
            session.stages.pipeline.take_in()
        if self._strategy.save_distributed_checkpoint:
            return module_state_in_parts(module)
        if session.is_left_whole:
            return plain()
        if not self._is_writer and not is_seen:
            help_to_gather(module, session.ownership)
            return OnFirstRank()
        state = gather_module_state(module, session.ownership, session.transport)
        tensors = [tensor for _, tensor in named_tensors(module)]
        if is_seen and not any(isinstance(tensor, DTensor) for tensor in tensors):
            entries = {name: (one, one._version) for name, one in state.items() if isinstance(one, Tensor)}
            self._gathered = _Gathered(entries, [(one, one._version) for one in tensors if not one.is_meta])
        return state or OnFirstRank(is_seen=is_seen)

    def _take_late_changes(self, checkpoint: dict[str, Any]) -> None:
        """Put into a checkpoint what `on_save_checkpoint` has changed of the module since its state was gathered: one
        process saves tensors as they are when the file is written.
        """
        gathered, self._gathered, session = self._gathered, None, self._session
        if gathered is None or session.transport is None:
            return
        changed = any(tensor._version != version for tensor, version in gathered.held)
        here = torch.tensor([float(changed)], dtype=torch.float64)
        if not session.transport.all_gather_vector(here, "whether a hook has changed the module").any():
            return
        saved = checkpoint["state_dict"]
        now = gather_module_state(self._strategy.module, session.ownership, session.transport)
        saved.update({name: now[name] for name in now if gathered.is_entry(name, saved.get(name))})

    def gather_module(self) -> LightningModule | None:
        """`PipelineStrategy.gather_module`."""
        self.check_alive()
        module, ownership = self._strategy.lightning_module, self._strategy.ownership
        if module is None or ownership is None:
            raise RuntimeError("there is no module to gather yet: call gather_module in a hook, or after trainer.fit")
        return gather_module(module, ownership, self._strategy.transport, is_writer=self._is_writer)

    def save(
        self, plain: Callable[..., None], checkpoint: dict[str, Any], path: str | Path, storage_options: Any | None
    ) -> None:
        """Write a checkpoint. All ranks must call it."""
        strategy = self._strategy
        logger.debug("saves checkpoint %s", path)
        add_random_state(checkpoint, strategy.root_device)
        if strategy.plan is not None:  # for information: nothing reads it
            checkpoint["pipeline_plan"] = strategy.plan.as_dict()
        if self._saves_plainly:
            plain(checkpoint, path, storage_options=storage_options)
            return
        self.check_alive()
        if strategy.save_distributed_checkpoint:
            self._save_folder(checkpoint, path, storage_options)
        elif self._is_writer:
            session = self._session
            self._take_late_changes(checkpoint)
            checkpoint = filled_from_owners(checkpoint, session.ownership, session.transport)
            plain(checkpoint, path, storage_options=storage_options)

    def _save_folder(self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any | None) -> None:
        if storage_options is not None:
            raise TypeError(f"storage_options={storage_options!r} is for one plain file: leave it out")
        strategy, session = self._strategy, self._session
        self.background.wait()
        if not dist.is_initialized():
            strategy.connect_processes()
        in_background = isinstance(strategy.checkpoint_io, AsyncCheckpointIO)
        writer = FolderWriter(
            module=strategy.module,
            ownership=session.ownership,
            parameter_names=[layout.names for layout in session.optimizers],
            is_writer=self._is_writer,
            group=host_group(_torch.default_group(), strategy.timeout, own=in_background),
            background=self.background if in_background else None,
        )
        writer.save(checkpoint, path)

    def optimizer_state(self, plain: Callable[[Optimizer], dict[str, Any]], optimizer: Optimizer) -> dict[str, Any]:
        """An optimizer's state dict, on the rank that writes it, and wherever hooks see it. All ranks must call it."""
        if self._saves_plainly or not optimizer.param_groups:  # as Lightning's, where configure_optimizers gives None
            return plain(optimizer)
        self.check_alive()
        strategy, optimizers = self._strategy, self._session.optimizers
        optimizers.follow(strategy.optimizers, strategy.module)
        if strategy.save_distributed_checkpoint:
            layout = optimizers.layout_of(optimizer)
            with used_in_parts(layout.optimizer):
                return optimizer_state_in_parts(layout, optimizers.ownership)
        if optimizers.are_whole:
            return plain(optimizer)
        is_seen = self._is_seen
        # Where replicas share the states out, the first one alone puts them together.
        is_writer = self._is_writer or (is_seen and not optimizers.are_shared_out)
        return optimizers.gather_state(optimizer, is_writer=is_writer) or OnFirstRank(is_seen=is_seen)

    def check_alive(self) -> None:
        """Before gathering from all stages, raise if others would not take part.

        Lightning calls callbacks that save on an exception before it tells the strategy of it. An exception on this
        rank alone does not make the other ranks save.
        """
        strategy, error = self._strategy, sys.exc_info()[1]
        if strategy.peers.has_failed:
            raise RuntimeError("the run has failed, so its stages cannot be gathered into a checkpoint any more")
        if strategy.lightning_module is None or error is None or strategy.world_size == 1:
            return
        if strategy.ends_all_ranks(error):
            return
        if strategy.module.trainer.state.status == TrainerStatus.INTERRUPTED:
            if self._session.ends_alike(error):
                return
            strategy.on_exception(error)
            if not isinstance(error, PeerFailedError):
                log.warning(
                    f"No checkpoint is saved: {type(error).__name__} ended rank {strategy.global_rank} alone, and the "
                    f"other stages' weights are not available. Resume from the last checkpoint that training saved."
                )
            if isinstance(error, KeyboardInterrupt):
                raise SystemExit(1) from error  # as a Trainer ends with it
            raise error

    # -- loading ----------------------------------------------------------------------------------------------------

    def load(self, plain: Callable[..., dict[str, Any]], path: str | Path, weights_only: bool | None) -> dict[str, Any]:
        """Read a checkpoint. All ranks must call it."""
        strategy = self._strategy
        logger.debug("loads checkpoint %s", path)
        self.background.wait()
        strategy.peers.agree("the loading of a checkpoint", {})
        free_memory(strategy.root_device)
        weights_only = strategy.weights_only if weights_only is None else weights_only
        self._is_in_parts = is_folder(path)
        if self._loads_plainly:
            return plain(path, weights_only)
        usual = getattr(innermost(strategy.checkpoint_io), "weights_only", None)

        def read() -> dict[str, Any]:
            if self._is_in_parts:
                checkpoint = read_folder(path, usual if weights_only is None else weights_only)
            else:
                checkpoint = plain(path, weights_only)
            check_format(checkpoint, path)
            return checkpoint

        return with_one_outcome(read)

    def load_module(self, plain: Callable[..., None], checkpoint: Mapping[str, Any], *, strict: bool) -> None:
        """Load the weights; into a module in parts, if set-up is still to come, only then, when each rank knows what it
        holds. Callbacks may load others after these.
        """
        strategy, module = self._strategy, self._strategy.module
        if isinstance(strategy.precision_plugin, (DoublePrecision, HalfPrecision)):
            strategy.precision_plugin.convert_module(module)  # or values would be rounded to the module's old dtype
        if self._loads_plainly:
            plain(checkpoint, strict=strict)
            return
        # Before anything is changed, and after the user's on_load_checkpoint.
        goes_on = module.trainer.state.fn == TrainerFn.FITTING
        path = module.trainer.ckpt_path
        with_one_outcome(lambda: check_checkpoint(checkpoint, module, strict=strict, goes_on=goes_on, path=path))
        self._put_off = partial(load_module_state, module, checkpoint["state_dict"], strict=strict)
        is_whole = not any(tensor.is_meta for _, tensor in named_tensors(module))
        if strategy.is_single_process or not self._awaits_setup or is_whole:
            self.load_put_off()

    def load_put_off(self) -> None:
        """At set-up: load the weights of a checkpoint that was restored before."""
        self._awaits_setup = False
        load, self._put_off = self._put_off, None
        if load is not None:
            load()

    def load_optimizers(self, plain: Callable[[Mapping[str, Any]], None], checkpoint: Mapping[str, Any]) -> None:
        """Load the states of the optimizers, and the state of the random number generators."""
        strategy = self._strategy
        if self._loads_plainly:
            plain(checkpoint)
        else:
            module, optimizers = strategy.module, self._session.optimizers
            optimizers.follow(strategy.optimizers, module)
            path = module.trainer.ckpt_path
            with_one_outcome(lambda: check_optimizers(checkpoint, module, list(optimizers), path=path))
            optimizers.load_state(checkpoint["optimizer_states"])
        restore_random_state(checkpoint, strategy.root_device)
