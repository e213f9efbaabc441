"""Runs this rank's stages of a module that is cut."""

from __future__ import annotations

from collections.abc import Callable, Container
from contextlib import AbstractContextManager
from typing import Any

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor, nn

from lightning_pipeline.partition.ownership import Ownership
from lightning_pipeline.runtime.direct import Direct
from lightning_pipeline.runtime.fully_sharded import FullySharded
from lightning_pipeline.runtime.gradients import Gradients
from lightning_pipeline.runtime.microbatch import Microbatch
from lightning_pipeline.runtime.outside import Outside
from lightning_pipeline.runtime.pipeline import Pipeline
from lightning_pipeline.runtime.replicas import Replicas
from lightning_pipeline.runtime.site import stage_term
from lightning_pipeline.runtime.topology import Topology
from lightning_pipeline.runtime.transport import Transport
from lightning_pipeline.strategy.cutting import Cut
from lightning_pipeline.strategy.held_module import HeldModule
from lightning_pipeline.strategy.schedule_choice import Schedules
from lightning_pipeline.strategy.signals import Signals
from lightning_pipeline.strategy.steps import Steps
from lightning_pipeline.strategy.tensor_parallel import TensorGroup, place_gradients


class StageRunner:
    """The steps of one cut, their gradients, and what this rank holds as they show who uses what.

    All ranks make it at the same point.

    Args:
        module: the LightningModule.
        cut: its stages.
        schedules: of training steps.
        topology: where this rank is.
        device: where it computes.
        transport: to the other stages; None with one.
        replicas: the ranks that run these stages on other samples; None if there are none.
        tensor_group: the ranks among which tensors are split; None if they are whole.
        signals: what has arrived here; all ranks come to know it after each step.
        seed: from which every step's random numbers derive.
        gradients_mean: over replicas gradients are averaged; else summed.
        is_fully_sharded: parameters are sharded over replicas.
        loss_mean: the step's loss is the mean over micro-batches; else their sum.
        output_broadcast: outputs of evaluation steps reach every stage; else they stay on the last.
        on_released: called when ranks hold other tensors than before.
    """

    def __init__(
        self,
        module: LightningModule,
        cut: Cut,
        schedules: Schedules,
        topology: Topology,
        device: torch.device,
        *,
        transport: Transport | None,
        replicas: Replicas | None,
        tensor_group: TensorGroup | None,
        signals: Signals,
        seed: int,
        gradients_mean: bool,
        is_fully_sharded: bool,
        loss_mean: bool,
        output_broadcast: bool,
        on_released: Callable[[Ownership], None],
    ) -> None:
        self.is_stepping = False
        """Whether a step is running, and not what goes on around it."""
        self._module = module
        self._cut = cut
        self._transport = transport
        self._has_tensor_group = tensor_group is not None
        self._is_alone = topology.world_size == 1
        self._on_released = on_released
        self._sharded: FullySharded | None = None
        self._is_settled = False
        if is_fully_sharded and replicas is not None:
            self._sharded = FullySharded(replicas, device.type, gradients_mean=gradients_mean)
        self.held = HeldModule(
            module,
            cut,
            schedules.placement,
            topology.stage_rank,
            device,
            transport=transport,
            replicas=replicas,
            tensor_group=tensor_group,
            sharded=self._sharded,
        )
        self.pipeline = Pipeline(
            rank=topology.stage_rank,
            placement=schedules.placement,
            device=device,
            transport=transport,
            tensors=self.held.tensors,
            calls=self.held.calls,
            holders=self.held.holders,
            schedule=schedules,
            num_microbatches=cut.num_microbatches,
            on_module_changed=self._take_in_new,
        )
        self.outside: Outside | None = None
        if transport is not None:
            direct = Direct(transport, device)
            self.outside = Outside(module, self.pipeline.recorder, transport, direct)
        self._gradients = Gradients(
            module,
            self.held.placement,
            self.pipeline.stages,
            [leaf.name for leaf in self.held.leaves],
            transport=transport,
            replicas=replicas,
            gradients_mean=gradients_mean,
            sharded=self._sharded,
        )
        self._steps = Steps(
            module,
            self.pipeline,
            seed=seed,
            mean=loss_mean,
            output_broadcast=output_broadcast,
            replicas=replicas,
            tensor_group=tensor_group,
            signals=signals,
        )
        self.release_remote()

    @property
    def has_slices(self) -> bool:
        """Whether parameters may be DTensors, of which each rank has a slice."""
        return self._sharded is not None or self._has_tensor_group

    @property
    def peak_live(self) -> int:
        """The most activations of virtual stages that were live on this rank at once in a training step so far."""
        return self._steps.peak_live

    def train(
        self,
        arguments: tuple[Any, ...],
        *,
        number: int,
        accumulate: int,
        is_first: bool,
        is_last: bool,
        unseen: Container[nn.Parameter],
        context: Callable[[], AbstractContextManager[Any]],
        scale: Callable[[Tensor], Tensor] | None,
        observe_buckets: Callable[[int, float, float], None] | None,
    ) -> Any:
        """One training step with its backward (`Steps.train`), whose gradients are kept for `publish_gradients`.

        Args:
            is_first: the batch begins an accumulation window.
            is_last: the batch ends it, so the gradients are summed over replicas.
            unseen: parameters whose gradients of the last window nobody needs.
            observe_buckets: gets what `PipelineGradReducer.observe` does.
        """
        self._gradients.observe_buckets = observe_buckets
        self._gradients.begin(first=is_first, complete=is_last, unseen=unseen)
        self.is_stepping = True
        try:
            result = self._steps.train(
                arguments,
                number=number,
                accumulate=accumulate,
                context=context,
                after_backward=self._after_backward,
                scale=scale,
            )
        finally:
            self.is_stepping = False
        self._take_in_uses(training=True)
        self._gradients.finish()
        self._end_what_is_profiled()
        return result

    def evaluate(
        self, name: str, arguments: tuple[Any, ...], context: Callable[[], AbstractContextManager[Any]]
    ) -> Any:
        """The validation, test or predict step of this name."""
        self.is_stepping = True
        try:
            result = self._steps.evaluate(name, getattr(self._module, name), arguments, context=context)
        finally:
            self.is_stepping = False
        self._take_in_uses(training=False)
        self._end_what_is_profiled()
        return result

    def publish_gradients(self) -> dict[nn.Parameter, nn.Parameter]:
        """Let the gradients of the steps appear in `.grad`.

        Returns:
            The new parameter for each that is sharded from now on.
        """
        self._gradients.publish()
        if self._has_tensor_group:
            place_gradients(self._module.parameters())
        return self._gradients.shard()

    def gather_parameters(self) -> None:
        """For a whole loop: replicas may have unequally many batches, so steps must not wait for one another."""
        if self._sharded is not None:
            self._sharded.gather()

    def release_parameters(self) -> None:
        """After the loop."""
        self.pipeline.check()
        if self._sharded is not None:
            self._sharded.release()

    def _end_what_is_profiled(self) -> None:
        """Gloo's sends write the end of what a profile notes of them, which may be gone after the step."""
        if self._transport is not None and torch.autograd._profiler_enabled():
            self._transport.flush()

    def _after_backward(self, stage: int, microbatch: Microbatch) -> None:
        is_last = microbatch.index == microbatch.num_microbatches - 1
        self._gradients.after_backward(stage, microbatch.index, last=is_last)

    def _take_in_uses(self, *, training: bool) -> None:
        """A step showed who uses what: let go of what this stage turned out not to need."""
        uses = self.pipeline.take_uses()
        is_new = self.held.placement.add(uses) if uses else False
        if self._is_alone or not training:
            return
        if is_new or not self._is_settled:
            self._warn_of_unreached()
            self._is_settled = True
            self.held.placement.settle()
            self.held.agree()
            self.release_remote()
            self._on_released(self.held.ownership)

    def _take_in_new(self) -> None:
        if self.held.take_in_new():
            self._gradients.settle(self.held.ownership)
            self._on_released(self.held.ownership)

    def release_remote(self) -> None:
        """Let go of what other stages hold, as far as it is known."""
        self.held.release_remote()
        self.pipeline.note_release()
        self._gradients.settle(self.held.ownership)

    def _warn_of_unreached(self) -> None:
        """Say which stages have had nothing to do: a mistake in the stage_config, or modules that are called later."""
        placement = self.pipeline.placement
        if self.pipeline.num_ranks == 1:  # which records nothing
            return
        for stage in range(len(placement)):
            if stage not in self.pipeline.reached:
                names = [repr(name) for name, own in self._cut.stages.exact.items() if own == stage]
                rank_zero_warn(
                    f"{stage_term(placement)} {stage} is never reached by the first training step: nothing ran on it, "
                    f"and stage_config gives it {', '.join(names) or 'no module'}. Where this is not to change later, "
                    f"name the first module there that the step calls"
                )
