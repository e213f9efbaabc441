"""The stages of a rank: their part of the module, their pipeline and their gradients."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from lightning_pipeline.engine.context import ContextRanks
from lightning_pipeline.engine.fully_sharded import FullySharded
from lightning_pipeline.engine.gradients import Gradients
from lightning_pipeline.engine.microbatch import Microbatch
from lightning_pipeline.engine.offloading import Offload
from lightning_pipeline.engine.pipeline import Pipeline
from lightning_pipeline.engine.rank_resources import RankResources
from lightning_pipeline.engine.replica_collectives import World
from lightning_pipeline.engine.slices import place_gradients
from lightning_pipeline.hooks.owner_computes import OwnerComputes
from lightning_pipeline.hooks.slices import leave_behind, leave_views
from lightning_pipeline.runtime.direct import DirectTransport
from lightning_pipeline.runtime.topology import stage_term

from .._lightning import rank_zero_warn
from .local_module import LocalModule
from .partitioner import Cut
from .schedule_choice import Schedules

if TYPE_CHECKING:
    from .session import Session


class LocalStages:
    """This rank's stages under one cut. All ranks make it at the same point.

    Attributes:
        gradients: a step's, held back until Lightning expects them.
        owner_computes: lets hooks use tensors that not every rank holds as a whole; None where all do.
    """

    def __init__(self, session: Session, cut: Cut, schedules: Schedules) -> None:
        module, strategy = session.module, session.strategy
        device, transport, replicas = session.device, session.transport, session.replicas
        self._module = module
        self._cut = cut
        self._tensor_group, context = session.tensor_group, session.context_group
        self._is_single_process = session.is_single_process
        self._on_moved = lambda: session.optimizers.rename(self.local.placement.names_now())
        self._on_released = lambda: session.optimizers.settle(self.local.ownership)
        self._is_settled = False
        # Before the local module, which hands over to it what an earlier run has sharded.
        self._sharded: FullySharded | None = None
        if strategy.data_parallel == "fsdp" and replicas is not None:
            mesh = DeviceMesh.from_group(replicas.group, device.type, mesh_dim_names=("data",))
            if session.tensor_group is not None:  # replicas are to be a dimension of the mesh that splits tensors
                mesh = session.tensor_group.mesh["data_parallel"]
            self._sharded = FullySharded(replicas, mesh, gradients_mean=strategy.gradients_mean)
            self._sharded.leave_views = leave_views
        self.local: LocalModule = LocalModule(session, cut, schedules.placement, self._sharded)
        counts_bytes = strategy.offload_activations or strategy.max_live_bytes is not None
        shared = RankResources(
            session.topology.stage_rank,
            schedules.placement,
            device,
            transport,
            self.local.tensors,
            self.local.calls,
            self.local.holders,
            Offload(strategy.offload_activations, device) if counts_bytes else None,
            None if context is None else ContextRanks(context.group, context.control_group),
        )
        self.pipeline = Pipeline(
            shared,
            schedule=schedules,
            num_microbatches=cut.num_microbatches,
            on_module_changed=self._note_new_tensors,
            world=World(session.topology, replicas),
        )
        self.pipeline.recorder.tensors.are_in_slices = bool(self._sharded)  # from an earlier run
        self.owner_computes: OwnerComputes | None = None
        if transport is not None or self._sharded is not None:
            direct = DirectTransport(transport, device)
            self.owner_computes = OwnerComputes(module, self.pipeline.recorder, direct)
        self.gradients: Gradients = Gradients(
            module,
            self.local.placement,
            self.pipeline.stages,
            [leaf.name for leaf in self.local.leaves],
            transport=transport,
            group=context.stage_group if context is not None else replicas.group if replicas is not None else None,
            parts=session.topology.context_parallel_size,
            gradients_mean=strategy.gradients_mean,
            sharded=self._sharded,
        )
        self.release_remote()

    def take_over(self, other: LocalStages) -> None:
        """Go on from the stages of an earlier cut, whose hooks may be running."""
        self.pipeline.observe = other.pipeline.observe
        # A hook around this keeps the object that it has entered, so that one lives on with the new state.
        if self.owner_computes is not None and other.owner_computes is not None:
            other.owner_computes.take_over(self.owner_computes)
            self.owner_computes = other.owner_computes

    @property
    def has_slices(self) -> bool:
        """Whether parameters may be DTensors, of which each rank has a slice."""
        return self._sharded is not None or self._tensor_group is not None

    # -- hooks ------------------------------------------------------------------------------------------------------

    def entered(self, *, shows_states: bool = True) -> AbstractContextManager[None]:
        """While entered, the user's code runs between steps (`OwnerComputes.entered`)."""
        return nullcontext() if self.owner_computes is None else self.owner_computes.entered(shows_states=shows_states)

    def aside(self, together: str | None = None) -> AbstractContextManager[None]:
        """While entered, within a hook, the package works on this rank's tensors (`OwnerComputes.aside`)."""
        return nullcontext() if self.owner_computes is None else self.owner_computes.aside(together)

    def follow_module(self) -> None:
        """Before a step, let what the last one has kept follow the module (`OwnerComputes.follow_module`)."""
        if self.owner_computes is not None:
            self.owner_computes.follow_module()

    # -- gradients and slices ---------------------------------------------------------------------------------------

    def after_backward(self, stage: int, microbatch: Microbatch) -> None:
        """After a micro-batch's backward on a virtual stage."""
        is_last = microbatch.index == microbatch.num_microbatches - 1
        self.gradients.after_backward(stage, microbatch.index, last=is_last)

    def publish_gradients(self) -> None:
        """Let the gradients of the steps appear in `.grad`."""
        self.gradients.publish()
        if self._tensor_group is not None:
            place_gradients(self._module.parameters())

    def shard(self) -> dict[nn.Parameter, nn.Parameter]:
        """Keep slices of parameters from now on, once it is known which can be. Returns those that are new, by the one
        that the user's code may have kept, which has no data any more."""
        new = self.gradients.shard()
        if new and self._sharded is not None:
            self.pipeline.recorder.tensors.are_in_slices = True
            self._sharded.kept.update(leave_behind(new))
        return new

    def gather_parameters(self) -> None:
        """Gather sharded parameters for a whole loop: with unequally many batches replicas must not wait in steps."""
        if self._sharded is not None:
            self._sharded.gather()

    def release_parameters(self) -> None:
        """After the loop, go back to the shards."""
        self.pipeline.check()
        if self._sharded is not None:
            self._sharded.release()

    # -- who holds what ---------------------------------------------------------------------------------------------

    def release_remote(self) -> None:
        """Release what only other stages hold, as far as known."""
        self.local.release_remote()
        self.pipeline.note_release()
        self.gradients.settle(self.local.ownership)

    def make_whole(self, num_processes: int) -> bool:
        """Give every rank the whole module at the end of a run, and what hooks keep of it, if that fits
        (`LocalModule.make_whole`)."""
        self.pipeline.take_in()
        is_whole = self.local.make_whole(num_processes)
        if self.owner_computes is not None:
            self.owner_computes.make_whole(num_processes)
        return is_whole

    def note_uses(self, *, training: bool) -> None:
        """After a step, which has shown who uses what: release what this rank turned out not to need."""
        # Until a training step has run, nobody knows which rank uses which tensor, and ranks hold more than they need.
        # Evaluation may use less than training does, so it only adds.
        uses = self.pipeline.take_uses()
        is_new = self.local.placement.add(uses) if uses else False
        if self._is_single_process or not training:
            return
        if is_new or not self._is_settled:
            self._warn_of_unreached()
            self._is_settled = True
            self.local.placement.settle()
            self.local.agree()  # replicas with other samples may have used other modules
            self.release_remote()
            self._on_released()

    def _note_new_tensors(self, lost: list[Tensor]) -> None:
        is_new = self.local.note_new_tensors()
        given = self.local.take_given()
        if not self._is_settled:
            given = []
        if given:
            self.release_remote()
        else:
            self.gradients.settle(self.local.ownership)
        if self.owner_computes is not None and not self.has_slices:
            self.owner_computes.keys.note_changed([*lost, *given])
        if is_new or given or not self._sharded:  # slices, and what steps gather them into, are no new parameters
            self._on_moved()
            self._on_released()

    def _warn_of_unreached(self) -> None:
        """Warn of stages without work: a mistake in the stage_config, or modules that are called in later steps."""
        placement = self.pipeline.placement
        if self.pipeline.num_ranks == 1:  # one rank records nothing
            return
        for stage in range(len(placement)):
            if stage not in self.pipeline.reached:
                names = [repr(name) for name, own in self._cut.stages.exact.items() if own == stage]
                rank_zero_warn(
                    f"{stage_term(placement)} {stage} is never reached by the first training step: nothing ran on it, "
                    f"and stage_config gives it {', '.join(names) or 'no module'}. Unless later steps reach it, name "
                    f"the first module there that the step calls"
                )
