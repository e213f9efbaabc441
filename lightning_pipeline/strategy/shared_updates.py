"""Optimizer updates that replicas shard, or run on whole parameters gathered from slices."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import increment_version
from torch.distributed.tensor import DTensor

from lightning_pipeline import _torch
from lightning_pipeline.engine.slices import local_part, whole, write
from lightning_pipeline.partition.ownership import holders_of, note_holders
from lightning_pipeline.runtime.direct import recv_tree, send_tree
from lightning_pipeline.runtime.replicas import Replicas

from .._lightning import rank_zero_warn
from ..checkpoint.optimizer_layout import OptimizerLayout
from .hooks import is_plain_optimizer

BUCKET_BYTES = 25 << 20


class OptimizerShards:
    """The first stage of ZeRO (Rajbhandari et al., 2020) for the optimizer that the user made.

    Optimizers skip parameters without a gradient, and make state at a parameter's first update. So before the update a
    replica puts aside the gradients of the parameters that other replicas update; afterwards it broadcasts its updated
    parameters. The optimizer, its groups and schedulers stay as they are. (torch's ZeroRedundancyOptimizer would build
    an optimizer of its own from a class. It could neither drop parameters that turn out to belong to another stage nor
    give checkpoints the plain layout.) What tensor parallelism has split is updated by all ranks of one replica, each
    its slice.

    An optimizer of the user's own may take gradients together, as for a norm of all. Such a one, and one with hooks on
    its step, updates all parameters on each replica.

    Attributes:
        is_sharing: whether replicas update a part each; None before the first update, which decides it.
    """

    is_sharing: bool | None = None

    def __init__(self, layout: OptimizerLayout, replicas: Replicas) -> None:
        self.layout = layout
        self._replicas = replicas
        self._own = replicas.topology.replica
        self._updaters: dict[str, int] = {}
        self._loads = [0] * replicas.num_replicas
        self._aside: list[tuple[nn.Parameter, Tensor]] = []

    def before_update(self) -> None:
        """When all gradients are final: keep only those of this replica's parameters."""
        name, is_plain = type(self.layout.optimizer).__name__, is_plain_optimizer(self.layout.optimizer)
        if self.is_sharing is None:
            self.is_sharing = is_plain
            if not is_plain:
                rank_zero_warn(
                    f'with data_parallel="zero1" each replica updates all parameters by {name}, and keeps its whole '
                    f"state: it is not torch's own, or has hooks on its step, and may take gradients of several "
                    f"parameters together, as for a norm of all"
                )
        if not self.is_sharing:
            return
        if not is_plain:
            raise RuntimeError(
                f"a hook on the step of {name} was registered after its first update, and would see the gradients of "
                f"this replica's share of the parameters: register it in configure_optimizers"
            )
        self._assign()
        for key, parameter in self.layout.local_parameters():
            if parameter.grad is not None and self._updaters[key] != self._own:
                self._aside.append((parameter, parameter.grad))
                parameter.grad = None

    def after_update(self) -> None:
        """Broadcast the updated parameters, and put the gradients back."""
        if not self.is_sharing:
            return
        for parameter, gradient in self._aside:
            parameter.grad = gradient
        self._aside = []
        parts: list[list[Tensor]] = [[] for _ in self._loads]
        for name, parameter in self.layout.local_parameters():
            if parameter.grad is not None:
                parts[self._updaters[name]].append(local_part(parameter.detach()))
                increment_version(parameter)  # which that of a slice does not do
        ranks = self._replicas.topology.data_ranks
        for replica, part in enumerate(parts):
            if part:
                source = dist.get_group_rank(self._replicas.group, ranks[replica])
                _torch.broadcast_coalesced(self._replicas.group, part, BUCKET_BYTES, source)

    def rename(self, names: Mapping[str, str]) -> None:
        """Parameters have other names now, given by the ones before."""
        self._updaters = {names.get(name, name): replica for name, replica in self._updaters.items()}

    def is_kept(self, name: str) -> bool:
        """Whether this replica keeps the optimizer state of a parameter."""
        return self._updaters.get(name, self._own) == self._own

    def collect(self, state: dict[str, Any]) -> dict[str, Any]:
        """The state of these parameters, by name, from the replicas that update them: on replica 0, {} on the others.

        All replicas must call it, for the same parameters.
        """
        # Replica after replica, as rank 0 is to hold no more than the state of these parameters.
        own = {name: value for name, value in state.items() if self.is_kept(name)}
        if self._own != 0:
            send_tree(own, self._replicas, 0)
            return {}
        for replica in range(1, self._replicas.num_replicas):
            own.update(recv_tree(self._replicas, replica, "optimizer state"))
        return own

    def _assign(self) -> None:
        """Assign parameters that have no replica yet to the least loaded one, the largest first.

        The others stay where their state is. All replicas hold the same parameters, so they decide alike. This begins
        at the first update, when a training step has shown what the stage holds; a loaded state is shared out then.
        """
        new = [named for named in self.layout.local_parameters() if named[0] not in self._updaters]
        for name, parameter in sorted(new, key=lambda named: -named[1].numel()):
            replica = min(range(len(self._loads)), key=self._loads.__getitem__)
            self._updaters[name] = replica
            self._loads[replica] += parameter.numel()
            if replica != self._own:
                self.layout.optimizer.state.pop(parameter, None)


class WholeUpdates:
    """Lets an optimizer update whole parameters of which each replica keeps a slice.

    Adafactor takes means over rows and columns, and torch's does not run on DTensors; Muon multiplies matrices; others
    are unknown. During the update the optimizer holds gathered parameters and gradients on every replica, so its state
    is whole on each, which for Adafactor is a row and a column of each matrix.
    """

    def __init__(self, layout: OptimizerLayout) -> None:
        self._optimizer = layout.optimizer
        # The same ones in every update, without data between: an optimizer within this one has its state by them.
        self._wholes: dict[nn.Parameter, nn.Parameter] = {}
        self._gathered: dict[nn.Parameter, nn.Parameter] = {}

    @torch.no_grad()
    def before_update(self) -> None:
        """When all gradients are final. All replicas must call it."""
        for group in self._optimizer.param_groups:
            for parameter in group["params"]:
                if isinstance(parameter, DTensor) and parameter.grad is not None:
                    data, gradient = whole(parameter), whole(parameter.grad)
                    gathered = self._wholes.setdefault(parameter, nn.Parameter(data))  # type: ignore[arg-type]
                    gathered.data, gathered.grad = data, gradient
                    for tensor in (gathered, gradient):
                        note_holders(tensor, holders_of(parameter))
                    self._gathered[parameter] = gathered  # type: ignore[index]
        self._exchange(self._gathered)  # in its groups and its state, by which it finds parameters

    def before_closure(self) -> None:
        """After the update, and before the optimizer runs its closure: the slices get what it has done so far."""
        for parameter, gathered in self._gathered.items():
            write(parameter, gathered)
            gathered.data, gathered.grad = gathered.data.new_empty(0), None
        self._exchange({gathered: parameter for parameter, gathered in self._gathered.items()})
        self._gathered = {}

    after_update = before_closure

    def _exchange(self, new: dict[nn.Parameter, nn.Parameter]) -> None:
        for group in self._optimizer.param_groups:
            group["params"][:] = [new.get(parameter, parameter) for parameter in group["params"]]
        state = self._optimizer.state
        for parameter in new.keys() & state.keys():
            state[new[parameter]] = state.pop(parameter)
