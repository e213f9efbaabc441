"""The optimizers of a run, of whose parameters each rank holds a part."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from lightning_pipeline.partition.ownership import Ownership
from lightning_pipeline.runtime.fully_sharded import plain, whole
from lightning_pipeline.runtime.replicas import Replicas
from lightning_pipeline.runtime.transport import Transport
from lightning_pipeline.runtime.trees import map_tensors, to_cpu
from lightning_pipeline.strategy.clipping import global_grad_norm
from lightning_pipeline.strategy.optimizers import OptimizerLayout
from lightning_pipeline.strategy.shared_updates import OptimizerShards, WholeUpdates


class StageOptimizers:
    """Clips, updates, saves and loads what optimizers have on this rank as one process does.

    Args:
        layouts: of the optimizers as ``configure_optimizers`` made them, over the whole model.
        shards_over: replicas that share out the optimizer state; None keeps it whole on each.
        has_slices: parameters may be DTensors, of which each rank has a slice.
    """

    def __init__(
        self,
        layouts: Sequence[OptimizerLayout],
        transport: Transport | None = None,
        *,
        shards_over: Replicas | None = None,
        has_slices: bool = False,
    ) -> None:
        self._layouts = {layout.optimizer: layout for layout in layouts}
        self._transport = transport
        self._ownership: Ownership | None = None
        self._updates: dict[Optimizer, OptimizerShards | WholeUpdates] = {}
        for optimizer, layout in self._layouts.items():
            if shards_over is not None:
                self._updates[optimizer] = OptimizerShards(layout, shards_over)
            elif has_slices and not layout.is_elementwise:
                self._updates[optimizer] = WholeUpdates(layout)

    def __iter__(self) -> Iterator[OptimizerLayout]:
        return iter(self._layouts.values())

    def layout_of(self, optimizer: Optimizer) -> OptimizerLayout:
        """Of one of the optimizers, or Lightning's wrapper around it."""
        return self._layouts[inner(optimizer)]

    @property
    def ownership(self) -> Ownership:
        assert self._ownership is not None
        return self._ownership

    def settle(self, ownership: Ownership) -> None:
        """Take in who holds what, and let go of the state of what other stages turned out to hold."""
        self._ownership = ownership
        for layout in self:
            layout.forget_remote()

    def note_new_groups(self, module: LightningModule) -> None:
        """Take in groups that callbacks have added to an optimizer, as those for finetuning do."""
        for layout in self:
            if len(layout.optimizer.param_groups) > len(layout.groups):
                layout.note_new_groups(module)

    def replace(self, new: Mapping[nn.Parameter, nn.Parameter]) -> None:
        """Go on with sharded parameters in the places of whole ones."""
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
        torch.nn.utils.clip_grad_value_(parameters, float(clip_val))

    def before_update(self, optimizer: Optimizer) -> None:
        """When the gradients are final and clipped."""
        if (update := self._updates.get(inner(optimizer))) is not None:
            update.before_update()

    def after_update(self, optimizer: Optimizer) -> None:
        """When the optimizer has updated, or skipped the update."""
        if (update := self._updates.get(inner(optimizer))) is not None:
            update.after_update()

    # -- checkpoints ------------------------------------------------------------------------------------------------

    def gather_state(self, optimizer: Optimizer, *, is_writer: bool) -> dict[str, Any]:
        """The state dict of one process on rank 0, {} elsewhere. All ranks must call it.

        Args:
            is_writer: this rank's pipeline is the one that writes checkpoints.
        """
        layout = self._layouts[inner(optimizer)]
        collect = self._collector(inner(optimizer))
        return layout.gather_state(self.ownership, self._transport, collect, is_writer=is_writer)

    def load_state(self, states: Sequence[dict[str, Any]]) -> None:
        """Load this rank's parts of full state dicts, one of each optimizer."""
        for layout, state in zip(self, states, strict=False):
            update = self._updates.get(layout.optimizer)
            layout.load_state(state, update.is_kept if isinstance(update, OptimizerShards) else lambda name: True)

    def _collector(self, optimizer: Optimizer) -> Callable[[dict[str, Any]], dict[str, Any]]:
        """What makes of a parameter's state on a rank that of its stage, on the writer."""
        update = self._updates.get(optimizer)
        return update.collect if isinstance(update, OptimizerShards) else _whole


def _whole(state: dict[str, Any]) -> dict[str, Any]:
    """The state with sharded tensors made whole, on the CPU. All replicas must call it."""
    return map_tensors(state, lambda tensor: to_cpu(whole(tensor)) if isinstance(tensor, DTensor) else tensor)


def inner(optimizer: Any) -> Optimizer:
    """What Lightning's wrapper is around."""
    return optimizer.optimizer if isinstance(optimizer, LightningOptimizer) else optimizer


def zeroed_unseen(module: LightningModule, optimizers: Sequence[Optimizer]) -> set[nn.Parameter]:
    """Parameters whose last gradients Lightning sets to None after `training_step`, with nobody to see them before.

    None of them where a hook of the module or of a callback, or an optimizer of the user's own, could tell.
    """
    callbacks = module.trainer.callbacks  # type: ignore[attr-defined]
    if (
        is_overridden("optimizer_zero_grad", module)
        or is_overridden("on_before_zero_grad", module)
        or any(is_overridden("on_before_zero_grad", callback, Callback) for callback in callbacks)
        or any(type(optimizer).zero_grad is not Optimizer.zero_grad for optimizer in optimizers)
    ):
        return set()
    return {parameter for optimizer in optimizers for group in optimizer.param_groups for parameter in group["params"]}
