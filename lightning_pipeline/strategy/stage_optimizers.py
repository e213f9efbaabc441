"""Optimizers whose parameters are spread over stages, and clipping."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from lightning_pipeline import _torch
from lightning_pipeline.engine.slices import plain, whole
from lightning_pipeline.partition.kept_parameters import between_steps
from lightning_pipeline.partition.ownership import Ownership
from lightning_pipeline.runtime.direct import to_cpu
from lightning_pipeline.runtime.replicas import Replicas
from lightning_pipeline.runtime.transport import Transport

from .._lightning import LightningModule, LightningOptimizer, is_overridden
from ..checkpoint.optimizer_layout import OptimizerLayout
from .gradient_norm import global_grad_norm
from .hooks import has_hook
from .left_states import allow_use, make_states_whole, refuse_use, used_in_parts
from .shared_updates import OptimizerShards, WholeUpdates

_AFTER_RUN = (
    "after the run",
    "write a checkpoint with trainer.save_checkpoint(path) on all ranks, which has the whole state in "
    '["optimizer_states"]',
)
_FROM_CHECKPOINT = "with data_parallel='zero1' or 'fsdp', or tensor parallelism, take it from a checkpoint"
_BETWEEN_STEPS = "read it in a hook, such as on_train_batch_start or on_train_batch_end, and keep what the step needs"


class StageOptimizers:
    """Clips, updates, saves and loads this rank's part of the optimizers, with the results of one process.

    Args:
        layouts: of the optimizers as ``configure_optimizers`` made them, over the whole model.
        shards_over: replicas that shard the optimizer state; None keeps it whole on each.
        has_slices: parameters may be DTensors, of which each rank has a slice.

    Attributes:
        are_shared_out: whether a rank may have only a part of the state of a parameter that it holds.
        are_whole: after a run, whether every rank has the states of all parameters.
    """

    def __init__(
        self,
        layouts: Sequence[OptimizerLayout],
        ownership: Ownership,
        transport: Transport | None,
        *,
        shards_over: Replicas | None = None,
        has_slices: bool = False,
    ) -> None:
        self._layouts: dict[Optimizer, OptimizerLayout] = {}
        self.optimizers = self._layouts.keys()
        self.are_shared_out = shards_over is not None or has_slices
        self.are_whole = False
        self._transport = transport
        self._shards_over = shards_over
        self._has_slices = has_slices
        self._updates: dict[Optimizer, list[OptimizerShards | WholeUpdates]] = {}
        self._set_layouts(layouts)
        self.settle(ownership)

    def _set_layouts(self, layouts: Sequence[OptimizerLayout]) -> None:
        self._layouts.clear()
        self._updates.clear()
        for layout in layouts:
            self._layouts[layout.optimizer] = layout
            if self.are_shared_out:
                self._check_can_be_shared_out(layout)
            updates = self._updates.setdefault(layout.optimizer, [])
            if self._shards_over is not None:
                updates.append(OptimizerShards(layout, self._shards_over))
            if self._has_slices and not layout.is_elementwise:
                updates.append(WholeUpdates(layout))

    def _check_can_be_shared_out(self, layout: OptimizerLayout) -> None:
        """Raise a ValueError where an optimizer takes all parameters as one vector."""
        if layout.keeps_all:
            by_slices = 'data_parallel="fsdp" or tensor parallelism'
            asked = by_slices if self._shards_over is None else 'data_parallel="zero1"'
            raise ValueError(
                f"{type(layout.optimizer).__name__} updates all parameters as one vector, of which replicas cannot "
                f"have parts each: leave {asked} out"
            )

    @property
    def are_in_parts(self) -> bool:
        """Whether a rank may have only a part of the states of all parameters."""
        return self._transport is not None or self.are_shared_out

    def __iter__(self) -> Iterator[OptimizerLayout]:
        return iter(self._layouts.values())

    def layout_of(self, optimizer: Optimizer) -> OptimizerLayout:
        """The layout of an optimizer, or of Lightning's wrapper around it."""
        return self._layouts[inner(optimizer)]

    def notes_of(self, optimizer: Optimizer) -> dict[nn.Parameter, dict[Any, Any]]:
        """What an optimizer's constructor has noted in the state of each parameter."""
        return self._layouts[optimizer].notes if optimizer in self._layouts else {}

    def rename(self, names: Mapping[int, str]) -> None:
        """Take in the names that parameters have now, by their ids."""
        for layout in self:
            changed = layout.rename(names)
            for update in self._updates[layout.optimizer]:
                if isinstance(update, OptimizerShards):
                    update.rename(changed)

    def settle(self, ownership: Ownership) -> None:
        """Note who holds what from now on, and drop the state of parameters that only other stages hold."""
        self.ownership = ownership
        for layout in self:
            with used_in_parts(layout.optimizer):  # the module may have changed while a step is refused its use
                layout.forget_remote()

    def follow(self, optimizers: Sequence[Optimizer], module: LightningModule) -> None:
        """Note what hooks have changed: other optimizers or groups of parameters, as finetuning callbacks add them."""
        if list(map(inner, optimizers)) != list(self._layouts):
            self._set_layouts([OptimizerLayout(inner(optimizer), module) for optimizer in optimizers])
        for layout in self:
            for group in layout.optimizer.param_groups:
                if any(one is not between_steps(one) for one in group["params"]):
                    group["params"][:] = map(between_steps, group["params"])
            layout.note_new_groups(module)

    def replace(self, new: Mapping[nn.Parameter, nn.Parameter]) -> None:
        """Replace whole parameters by sharded ones."""
        for layout in self:
            layout.replace(new)

    # -- a step -----------------------------------------------------------------------------------------------------

    def grad_norm(self, norm_type: float) -> Tensor:
        """The norm of all gradients of the model. All ranks must call it."""
        local = {name: parameter for layout in self for name, parameter in layout.local_parameters()}
        dtypes = {name: dtype for layout in self for name, dtype in layout.dtypes.items()}
        return self._norm(local, dtypes, norm_type)

    def _norm(
        self, parameters: Mapping[str, nn.Parameter], dtypes: Mapping[str, torch.dtype], norm_type: float
    ) -> Tensor:
        return global_grad_norm(
            parameters.items(), dtypes, ownership=self.ownership, transport=self._transport, norm_type=norm_type
        )

    def clip_by_norm(self, optimizer: Optimizer, clip_val: int | float, norm_type: float = 2.0) -> Tensor:
        """Scale an optimizer's gradients so that their norm over all stages is at most ``clip_val``, in place.

        As ``torch.nn.utils.clip_grad_norm_`` over the whole model's optimizer in one process. All ranks must call it.
        Returns the norm before clipping, the same on every stage.
        """
        layout = self.layout_of(optimizer)
        norm = self._norm(dict(layout.local_parameters()), layout.dtypes, norm_type)
        torch.nn.utils.clip_grads_with_norm_(plain(p for _, p in layout.local_parameters()), float(clip_val), norm)
        return norm

    def clip_by_value(self, optimizer: Optimizer, clip_val: int | float) -> None:
        """Clamp each gradient of this stage to ``[-clip_val, clip_val]``, in place."""
        parameters = plain(parameter for _, parameter in self.layout_of(optimizer).local_parameters())
        if any(parameter.grad is not None for parameter in parameters):  # none is an error of torch's
            torch.nn.utils.clip_grad_value_(parameters, float(clip_val))

    @contextmanager
    def refused_in(self, method: str) -> Iterator[None]:
        """Around a step or hook of the user's: `optimizer.state` must not be used where this rank may have a part."""
        if not self.are_in_parts or self.are_whole:
            yield
            return
        in_parts = [layout.optimizer for layout in self if not layout.keeps_all]
        refused = refuse_use(in_parts, f"in {method}", _FROM_CHECKPOINT if self.are_shared_out else _BETWEEN_STEPS)
        try:
            yield
        finally:
            allow_use(refused)

    def before_update(self, optimizer: Optimizer) -> None:
        """Called when an optimizer's gradients are final and clipped."""
        for update in self._updates.get(inner(optimizer), ()):
            update.before_update()

    def before_closure(self, optimizer: Optimizer) -> None:
        """Called before the optimizer runs its closure, which it may do several times in an update."""
        for update in self._updates.get(inner(optimizer), ()):
            if isinstance(update, WholeUpdates):
                update.before_closure()

    def after_update(self, optimizer: Optimizer) -> None:
        """Called when the optimizer has updated, or skipped the update."""
        for update in reversed(self._updates.get(inner(optimizer), ())):
            update.after_update()

    # -- between runs -----------------------------------------------------------------------------------------------

    def leave(self) -> None:
        """At the end of a run: what this rank has of the states may be a part, and says so when it is used."""
        if self.are_in_parts and not self.are_whole:
            refuse_use(self.optimizers, *_AFTER_RUN)

    def make_whole(self, limit: int) -> None:
        """Give every rank the states that one process has, where they fit. All ranks must call it."""
        if self._transport is None or self.are_shared_out:
            return
        allow_use(self.optimizers)
        self.are_whole = make_states_whole(list(self), self.ownership, self._transport, limit)
        if not self.are_whole:
            refuse_use(self.optimizers, *_AFTER_RUN)

    def release(self) -> None:
        """Before a further run: go back to the part that this rank has."""
        self.are_whole = False
        allow_use(self.optimizers)
        self.settle(self.ownership)

    # -- checkpoints ------------------------------------------------------------------------------------------------

    def gather_state(self, optimizer: Optimizer, *, is_writer: bool) -> dict[str, Any]:
        """The state dict of one process on rank 0, {} elsewhere. All ranks must call it."""
        layout = self._layouts[inner(optimizer)]
        collect = self._collector(inner(optimizer))
        with used_in_parts(inner(optimizer)):
            return layout.gather_state(self.ownership, self._transport, collect, is_writer=is_writer)

    def load_state(self, states: Sequence[dict[str, Any]]) -> None:
        """Load this rank's parts of full state dicts, one of each optimizer."""
        for layout, state in zip(self, states, strict=False):
            shards = self._shards_of(layout.optimizer)
            layout.load_state(state, shards.is_kept if shards is not None else lambda name: True)

    def _collector(self, optimizer: Optimizer) -> Callable[[dict[str, Any]], dict[str, Any]]:
        """A function from a parameter's state on this rank to that of the whole parameter, on the writer."""
        shards = self._shards_of(optimizer)
        return _whole if shards is None else lambda state: shards.collect(_whole(state))

    def _shards_of(self, optimizer: Optimizer) -> OptimizerShards | None:
        """The shards of an optimizer whose updates replicas share out by now."""
        updates = self._updates[optimizer]
        return next((one for one in updates if isinstance(one, OptimizerShards) and one.is_sharing), None)


def _whole(state: dict[str, Any]) -> dict[str, Any]:
    """The state with sharded tensors made whole, on the CPU. All replicas must call it."""
    return _torch.tree_map_only(DTensor, lambda tensor: to_cpu(whole(tensor)), state)


def inner(optimizer: Any) -> Optimizer:
    """The torch optimizer inside Lightning's wrapper."""
    return optimizer.optimizer if isinstance(optimizer, LightningOptimizer) else optimizer


def zeroed_unseen(module: LightningModule) -> set[nn.Parameter]:
    """Parameters whose last gradients Lightning will set to None after `training_step` before anybody sees them.

    Empty where a hook of the module or a callback, or an optimizer's own `zero_grad`, could see them.
    """
    optimizers = module.trainer.optimizers
    if (
        is_overridden("optimizer_zero_grad", module)
        or has_hook("on_before_zero_grad", module)
        or any(type(optimizer).zero_grad is not Optimizer.zero_grad for optimizer in optimizers)
    ):
        return set()
    return {parameter for optimizer in optimizers for group in optimizer.param_groups for parameter in group["params"]}
