"""A step's gradients, held from the schedule, which computes them, until Lightning expects them in `.grad`."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Mapping, Sequence

import torch.distributed as dist
from torch import Tensor, nn

from lightning_pipeline.engine.fully_sharded import FullySharded
from lightning_pipeline.engine.parameter_map import ParameterMap
from lightning_pipeline.engine.reducer import PipelineGradReducer
from lightning_pipeline.engine.shared_parameters import SharedGradients, Stages, shared_parameters
from lightning_pipeline.engine.slices import local_part
from lightning_pipeline.partition.ownership import Ownership
from lightning_pipeline.partition.placeholder import is_absent
from lightning_pipeline.runtime.transport import Transport


class GradientHold:
    """Keeps a step's gradients out of reach of the `zero_grad` that Lightning calls after `training_step`.

    On the first batch of an accumulation window the gradients found are those of the last window; they are put aside
    and come back for Lightning to zero, and `publish` adds the new ones. Those that nobody would see are let go of
    instead, or a step would take the memory of two. On later batches autograd goes on adding to what is there, in the
    order in which one process would.
    """

    def __init__(self) -> None:
        self._parameters: list[nn.Parameter] = []
        self._aside: list[Tensor | None] | None = None
        self._held: list[Tensor | None] = []

    def begin(self, parameters: Iterable[nn.Parameter], *, first: bool, unseen: Container[nn.Parameter] = ()) -> None:
        """Called before the schedule.

        Args:
            first: whether this batch begins an accumulation window.
            unseen: parameters whose gradients of the last window nobody needs.
        """
        self._parameters = list(parameters)  # those too that are frozen so far: the step may train them
        self._held = []
        self._aside = None
        if first:
            self._aside = [None if parameter in unseen else parameter.grad for parameter in self._parameters]
            for parameter in self._parameters:
                parameter.grad = None

    def end(self) -> None:
        """Called after the schedule."""
        if self._aside is None:
            return
        self._held = [parameter.grad for parameter in self._parameters]
        for parameter, gradient in zip(self._parameters, self._aside, strict=True):
            if not is_absent(parameter):  # one that the step has made, which another stage holds now
                parameter.grad = gradient
        self._aside = None

    def publish(self) -> None:
        """When Lightning asks for backward: the gradients appear in `.grad`."""
        for parameter, gradient in zip(self._parameters, self._held, strict=False):
            if gradient is not None:
                parameter.grad = gradient if parameter.grad is None else parameter.grad.add_(gradient)
        self._held = []


class Gradients:
    """Sums a step's gradients over the stages that share a parameter and over replicas, and keeps them until asked.

    Args:
        leaves: names of the modules that are sharded one by one.
        group: the ranks that hold the same as this one, over which gradients are reduced; None if there are none.
        parts: how many of them share the sequences of a replica (`context`).
        sharded: shards parameters over replicas; None keeps them whole.
    """

    def __init__(
        self,
        module: nn.Module,
        placement: ParameterMap,
        stages: Sequence[int],
        leaves: Sequence[str] = (),
        *,
        transport: Transport | None,
        group: dist.ProcessGroup | None,
        parts: int = 1,
        gradients_mean: bool,
        sharded: FullySharded | None = None,
    ) -> None:
        self.sharded = sharded
        self.observe_buckets: Callable[[int, float, float], None] | None = None
        """Gets what `PipelineGradReducer.observe` does, from the next `begin` on."""
        self._module = module
        self._placement = placement
        self._stages = stages
        self._leaves = leaves
        self._group, self._parts = group, parts
        self._gradients_mean = gradients_mean
        self._hold = GradientHold()
        self._over_stages = SharedGradients(transport, placement.rank)
        self._shared: dict[str, tuple[nn.Parameter, Stages]] = {}
        self._maybe_shared: frozenset[str] = frozenset()
        self._reducer: PipelineGradReducer | None = None
        self._final: dict[int, list[nn.Parameter]] = {}
        self._reducing: PipelineGradReducer | None = None  # this step's, even if `settle` drops the other
        self._complete = self._reduces_slices = True
        self._slices: list[nn.Parameter] = []

    def settle(self, ownership: Ownership) -> None:
        """Update which ranks hold which parameters."""
        self._shared = shared_parameters(dict(self._module.named_parameters(remove_duplicate=False)), ownership)
        self._maybe_shared = ownership.unseen | self._placement.used_repeatedly()
        self._reducer = None

    def shard(self) -> dict[nn.Parameter, nn.Parameter]:
        """Shard over replicas what steps have shown to be used in one leaf only, once.

        To be called when `.grad` is complete. Returns the new parameter for each that is replaced.
        """
        if self.sharded is None or self.sharded or not self._complete:
            return {}
        named = dict(self._module.named_parameters(remove_duplicate=False))
        leaves = self._placement.used_in_one_leaf(self._leaves)
        inside = set().union(*leaves.values())
        # FSDP2 shards contiguous parameters alone, as those of `module.to(memory_format=...)` are not.
        whole = {p for name, p in named.items() if name not in inside or not local_part(p).is_contiguous()}
        self._reducer = None
        return self.sharded.shard([self._module.get_submodule(name) for name in leaves], whole)

    def gather(self) -> None:
        """Gather sharded parameters for code that runs before `begin`; `finish` or `release` shards them again."""
        if self.sharded is not None and not self._slices:
            self._slices = self._parameters()
            self.sharded.gather()

    def release(self) -> None:
        """Shard parameters again after `gather` if no schedule runs."""
        if self.sharded is not None:
            self.sharded.release()
            self._slices = []

    def clear(self, parameters: Iterable[Tensor], set_to_none: bool = True) -> None:
        """Clear the gradients of parameters. Those of gathered ones are kept with their slices."""
        parameters = list(parameters)
        slices = [] if self.sharded is None else self.sharded.slices_of(parameters)
        for one in (*parameters, *slices):
            if set_to_none:
                one.grad = None
            elif one.grad is not None:
                one.grad = one.grad.detach().zero_()

    def begin(
        self, *, first: bool, complete: bool, unseen: Container[nn.Parameter] = (), are_seen: bool = False
    ) -> None:
        """Before the schedule.

        Args:
            first: the batch begins an accumulation window.
            complete: the batch ends it, so the gradients are summed over replicas.
            are_seen: hooks see gradients within a window.
        """
        self._complete = complete
        self._reduces_slices = complete or are_seen  # else `.grad` of slices is None until the window ends
        self._hold.begin(self._slices or self._parameters(), first=first, unseen=unseen)
        self.gather()
        maybe_shared = self._named(self._maybe_shared)
        self._over_stages.begin(maybe_shared, are_seen=are_seen)
        self._reducing = self._begin_reducing(maybe_shared) if complete and self._group is not None else None

    def after_backward(self, stage: int, microbatch: int, *, last: bool) -> None:
        """After a micro-batch's backward on a virtual stage. `last`: it is the step's last one there."""
        self._over_stages.after_backward(microbatch)
        if self._reducing is not None and last:
            self._reducing.ready(self._final[stage])

    def finish(self) -> None:
        """After the schedule. All ranks must call it."""
        self._over_stages.finish(self._shared, complete=self._complete)
        if self._reducing is not None:
            self._reducing.finish()
            self._reducing = None
        if self.sharded is not None:
            if self._reduces_slices:
                self.sharded.reduce()
            self.release()
        self._hold.end()

    def publish(self) -> None:
        """When Lightning asks for backward: the gradients appear in `.grad`."""
        self._hold.publish()

    # -- details ----------------------------------------------------------------------------------------------------

    def _parameters(self) -> list[nn.Parameter]:
        return [parameter for parameter in self._module.parameters() if not parameter.is_meta]

    def _begin_reducing(self, maybe_shared: Mapping[str, nn.Parameter]) -> PipelineGradReducer:
        if self._reducer is None:
            sharded = set(self.sharded.parameters()) if self.sharded is not None else set()
            parameters = self._module.named_parameters()
            named = {name: p for name, p in parameters if not p.is_meta and p not in sharded}
            self._reducer = PipelineGradReducer(
                named.values(),
                1.0 if self._gradients_mean else self._parts,
                group=self._group,
                gradients_mean=self._gradients_mean,
                names=list(named),
            )
            self._final = self._groups(maybe_shared)
        self._reducer.observe = self.observe_buckets
        self._reducer.begin(list(self._final.values()))
        return self._reducer

    def _groups(self, maybe_shared: Mapping[str, nn.Parameter]) -> dict[int, list[nn.Parameter]]:
        """By virtual stage, the parameters that it alone uses; the last stage first, as its backward ends first."""
        groups = {}
        for stage in reversed(self._stages):
            names = self._placement.used_by(stage) - maybe_shared.keys()
            groups[stage] = list(self._named(names).values())
        return groups

    def _named(self, names: Iterable[str]) -> dict[str, nn.Parameter]:
        """The parameters of these names, by their first name."""
        wanted = frozenset(names)
        return {name: p for name, p in self._module.named_parameters() if name in wanted} if wanted else {}
