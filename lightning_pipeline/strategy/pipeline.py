"""PipelineStrategy: a LightningModule that nobody rewrote, one stage of it on each device."""

from __future__ import annotations

import json
from collections.abc import Callable, Generator, Hashable, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from lightning.fabric.plugins import CheckpointIO, ClusterEnvironment
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.accelerators import Accelerator
from lightning.pytorch.plugins import Precision
from lightning.pytorch.strategies import StrategyRegistry
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.distributed.constants import default_pg_timeout
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from typing_extensions import override

from lightning_pipeline.accelerators.rank_table_environment import warn_of_placement
from lightning_pipeline.partition.absent_state import guard_state_dict
from lightning_pipeline.partition.interception import Interception
from lightning_pipeline.partition.leaves import certain_stages
from lightning_pipeline.partition.materialize import check_set, initialise, make_local
from lightning_pipeline.partition.ownership import release
from lightning_pipeline.partition.plan import StagePlan
from lightning_pipeline.partition.random import Streams
from lightning_pipeline.partition.stage_config import (
    AUTO,
    StageConfig,
    StageMap,
    count_stages,
    read_stage_config,
    resolve,
)
from lightning_pipeline.runtime.fully_sharded import FullySharded
from lightning_pipeline.runtime.gradients import Gradients
from lightning_pipeline.runtime.host_memory import keep_freed_memory
from lightning_pipeline.runtime.microbatch import Microbatch
from lightning_pipeline.runtime.pipeline import Pipeline
from lightning_pipeline.runtime.placement import Placement
from lightning_pipeline.runtime.replicas import Replicas
from lightning_pipeline.runtime.shared import spread_from_owner
from lightning_pipeline.runtime.structure import Report
from lightning_pipeline.runtime.topology import Topology
from lightning_pipeline.runtime.transport import Transport
from lightning_pipeline.strategy import refusals
from lightning_pipeline.strategy.advice import Advice, Advisor
from lightning_pipeline.strategy.automatic import AutomaticCut, cut_before, note_cut
from lightning_pipeline.strategy.checkpointing import CheckpointingStrategy
from lightning_pipeline.strategy.copies import copies_of
from lightning_pipeline.strategy.dataloading import share_loader
from lightning_pipeline.strategy.facts import parts_of
from lightning_pipeline.strategy.lightning_private import (
    call_before_update,
    compare_parameters_by_identity,
    note_device,
    note_mesh,
    silence_sync_warning,
    skip_before_transfer,
    total_batches,
)
from lightning_pipeline.strategy.loss_scaling import agree_on_overflow
from lightning_pipeline.strategy.metrics import share_metrics
from lightning_pipeline.strategy.schedule_choice import ScheduleArgument, ScheduleChoice
from lightning_pipeline.strategy.stage_optimizers import StageOptimizers
from lightning_pipeline.strategy.steps import Steps
from lightning_pipeline.strategy.tensor_parallel import TensorGroup, place_gradients
from lightning_pipeline.strategy.weights import Weights, load_weights
from lightning_pipeline.strategy.writers import silence_writers
from lightning_pipeline.strategy.zeroing import zeroed_unseen


class PipelineStrategy(CheckpointingStrategy):
    """Trains a LightningModule over several devices, each holding one stage of it.

    Args:
        stage_config: names of modules and their stages; a module without a key takes the stage where the data is when
            it is called, so the first module of each later stage is enough: ``{"layer3": 1}``. None takes the
            module's own ``stage_config``, else the ``pipeline_stage`` attributes of its submodules, else "auto". For a
            schedule of virtual stages it numbers these along the data, or names the device that holds them
            (``resolve``). "auto" measures the first step and cuts where a step is expected to be fastest (see
            ``AutomaticCut`` and `plan`). A path is that of a plan that `StagePlan.save` has written.
        num_stages: number of stages, each on a device of its own; default: as many as the stage_config uses, with
            virtual stages as many as there are devices. 1 runs the same path on one device.
        num_microbatches: micro-batches a step, at least ``num_stages``; default ``4 * num_stages``, or what a schedule
            from a file is made for. "auto" chooses where the cut is found automatically, and is the default elsewhere.
        schedule: "1f1b", "gpipe", "zero_bubble"; with several virtual stages on a device "interleaved_1f1b",
            "interleaved_1f1b_low_memory", "looped_bfs", "interleaved_zero_bubble", "zbv"; the path of a ``.csv`` file
            in torch.distributed.pipelining's compute-only format; a ``Schedule``; or a function
            ``(num_stages, num_microbatches) -> schedule`` (see ``ScheduleChoice``). "auto" measures the first steps
            and goes on with what would be fastest (see ``Advisor``).
        max_live_microbatches: with "auto", the most micro-batches whose activations a device may hold.
        gradients_mean: gradients are averaged over replicas; else summed.
        opt_shard: replicas share out the optimizer's state and update (see ``OptimizerShards``); checkpoints stay the
            same.
        data_parallel: "replicate" keeps a stage's parameters whole on each of its replicas; "fsdp" shards them, their
            gradients and optimizer state over the replicas from the first training step on (see ``FullySharded``).
        tensor_parallel_size: ranks among which `configure_model` splits each stage's tensors, by
            ``parallelize_module(..., self.device_mesh["tensor_parallel"], ...)``; needs ``num_stages``.
        weights: files of weights to start from, of which each rank reads what it holds (see ``load_weights``).
        loss_reduction: the step's loss is the "mean" over micro-batches, weighted by samples, or their "sum".
        output_broadcast: outputs of validation, test and predict steps reach every rank; else they stay on the last
            stage.
        save_distributed_checkpoint: checkpoints are folders in torch.distributed.checkpoint's format, which all ranks
            write at once, each what it holds. Both kinds load whatever this is.
        process_group_backend: default: what the device has, hccl for npu, nccl for cuda and gloo for cpu.
        timeout: the longest that a stage waits for another.

    Raises:
        ValueError: arguments that do not go together; each message names the value and the way out.
    """

    strategy_name = "pipeline"

    def __init__(
        self,
        *,
        stage_config: StageConfig | None = None,
        num_stages: int | None = None,
        num_microbatches: int | str | None = None,
        schedule: ScheduleArgument = "1f1b",
        max_live_microbatches: float | None = None,
        gradients_mean: bool = True,
        opt_shard: bool = False,
        data_parallel: str = "replicate",
        tensor_parallel_size: int = 1,
        weights: Weights | None = None,
        loss_reduction: str = "mean",
        output_broadcast: bool = True,
        save_distributed_checkpoint: bool = False,
        process_group_backend: str | None = None,
        timeout: timedelta | float = default_pg_timeout,
        accelerator: Accelerator | None = None,
        parallel_devices: list[torch.device] | None = None,
        cluster_environment: ClusterEnvironment | None = None,
        checkpoint_io: CheckpointIO | None = None,
        precision_plugin: Precision | None = None,
    ) -> None:
        super().__init__(
            accelerator,
            parallel_devices,
            cluster_environment,
            checkpoint_io,
            precision_plugin,
            process_group_backend=process_group_backend,
            timeout=timeout,
        )
        self.save_distributed_checkpoint = save_distributed_checkpoint
        if loss_reduction not in ("mean", "sum"):
            raise ValueError(f'loss_reduction is "mean" or "sum", got {loss_reduction!r}')
        if data_parallel not in ("replicate", "fsdp"):
            raise ValueError(f'data_parallel is "replicate" or "fsdp", got {data_parallel!r}')
        if data_parallel == "fsdp" and opt_shard:
            raise ValueError('data_parallel="fsdp" shards the optimizer state already: leave opt_shard=True out')
        _check_count("tensor_parallel_size", tensor_parallel_size)
        if tensor_parallel_size > 1 and num_stages is None:
            raise ValueError(
                f"tensor_parallel_size={tensor_parallel_size} needs num_stages as well, as configure_model gets the "
                f"device mesh before the stages are counted"
            )
        _check_count("num_stages", num_stages)
        if num_microbatches != AUTO:
            _check_count("num_microbatches", num_microbatches)
        self._choice = ScheduleChoice(schedule)
        if max_live_microbatches is not None and not self._choice.is_auto:
            raise ValueError(
                f'max_live_microbatches={max_live_microbatches} goes with schedule="auto", which chooses; '
                f"{schedule!r} holds what it holds"
            )
        self.max_live_microbatches = max_live_microbatches
        self.stage_config = stage_config
        self.num_stages = num_stages
        self.num_microbatches = num_microbatches
        self.schedule = schedule
        self.gradients_mean = gradients_mean
        self.opt_shard = opt_shard
        self.data_parallel = data_parallel
        self.tensor_parallel_size = tensor_parallel_size
        self.weights = weights
        self.loss_reduction = loss_reduction
        self.output_broadcast = output_broadcast
        self.pipeline: Pipeline | None = None
        self.advice: Advice | None = None
        self.observe_buckets: Callable[[int, float, float], None] | None = None
        """Gets what `PipelineGradReducer.observe` does, in every step that sums gradients over replicas."""
        self._steps: Steps | None = None
        self._advisor: Advisor | None = None
        self._gradients: Gradients | None = None
        self._sharded: FullySharded | None = None
        self._tensor_group: TensorGroup | None = None
        self._accumulating = False
        self._in_step = False
        self._undo: list[Callable[[], None]] = []
        self._automatic: AutomaticCut | None = None
        self._seed = 0
        self._set_up_for: tuple[LightningModule, int] | None = None

    @property
    def transport(self) -> Transport | None:
        """The connection between the stages; None with one stage, or before setup."""
        return self._transport

    @property
    def replicas(self) -> Replicas | None:
        """The ranks that run this rank's stages on other samples; None if there are none, or before setup."""
        return self._replicas

    @property
    def peak_live(self) -> int:
        """The most activations of virtual stages that were live on this rank at once in a training step so far."""
        return self._steps.peak_live if self._steps is not None else 0

    @property
    @override
    def restore_checkpoint_after_setup(self) -> bool:
        return True

    @override
    def setup_environment(self) -> None:
        super().setup_environment()
        if self.tensor_parallel_size == 1:
            return
        assert self.num_stages is not None and self.lightning_module is not None
        topology = self._topology(self.num_stages)
        if topology.data_parallel_size > 1:
            raise ValueError(
                f"tensor_parallel_size={self.tensor_parallel_size} and num_stages={self.num_stages} on "
                f"{self.world_size} devices make {topology.data_parallel_size} replicas, and split tensors go with one "
                f"for now: use devices={self.num_stages * self.tensor_parallel_size}, or tensor_parallel_size=1"
            )
        mesh = topology.mesh(self.root_device.type)
        note_mesh(self.lightning_module, mesh)
        self._tensor_group = TensorGroup(mesh["tensor_parallel"].get_group())

    @override
    def settings(self) -> dict[str, str]:
        names = (
            "num_stages",
            "num_microbatches",
            "max_live_microbatches",
            "gradients_mean",
            "opt_shard",
            "data_parallel",
            "tensor_parallel_size",
            "loss_reduction",
            "output_broadcast",
        )
        asked = {name: str(getattr(self, name)) for name in names}
        return {**super().settings(), **asked, "schedule": self._choice.label}

    def _topology(self, num_stages: int, placement: Sequence[int] = ()) -> Topology:
        return Topology(
            num_ranks_per_pipeline=num_stages,
            world_size=self.world_size,
            rank=self.global_rank,
            placement=tuple(placement) if len(placement) > num_stages else (),
            tensor_parallel_size=self.tensor_parallel_size,
        )

    # -- setup ------------------------------------------------------------------------------------------------------

    @override
    def setup(self, trainer: Trainer) -> None:
        assert self.accelerator is not None and self.lightning_module is not None
        self.accelerator.setup(trainer)
        module = self.lightning_module
        refusals.check_module(module, trainer)
        refusals.check_precision(self.precision_plugin)
        self.precision_plugin.convert_module(module)
        self._set_up_pipeline(module)
        self._transfer(module)
        if trainer.state.fn == TrainerFn.FITTING:
            self.setup_optimizers(trainer)
            refusals.check_optimizers(self.optimizers)
            self._stage_optimizers = StageOptimizers(
                self.optimizers,
                module,
                self._transport,
                shards_over=self._replicas if self.opt_shard else None,
                has_slices=self._sharded is not None or self._tensor_group is not None,
            )
            assert self.ownership is not None
            self._stage_optimizers.drop_remote(self.ownership)
        self.setup_precision_plugin()
        self._install(module)

    def _set_up_pipeline(self, module: LightningModule) -> None:
        """Topology, transport and partition; kept from one trainer function to the next on the same module."""
        config = read_stage_config(module, self.stage_config)
        num_stages = self._count_stages(config)
        # Before whatever ranks do otherwise that cut the model otherwise.
        cut = {"stage_config": json.dumps(config, sort_keys=True, default=str), "num_stages": str(num_stages)}
        self.agree("the set-up of the pipeline", {**parts_of(module), **cut})
        if self._set_up_for == (module, num_stages):
            return
        is_fsdp = self.data_parallel == "fsdp"
        refusals.check_slices(module, module.trainer, fsdp=is_fsdp, tensor_parallel=self.tensor_parallel_size > 1)
        given = self.num_microbatches if isinstance(self.num_microbatches, int) else None
        num_microbatches = given or self._choice.num_microbatches or 4 * num_stages
        if num_microbatches < num_stages:
            raise ValueError(
                f"num_microbatches={num_microbatches} is less than num_stages={num_stages}, so some stage would "
                f"always be idle; use num_microbatches={num_stages} or more, or fewer stages"
            )
        # Told before anything about stages: devices that do not fit.
        self._topology(num_stages)
        # Whatever cannot be cut yet stays whole everywhere until the first step.
        self._automatic = None
        if not config and num_stages > 1:
            config = cut_before(module, num_stages)
        if config or num_stages == 1:
            stages = resolve(module, config, num_stages, has_virtual_stages=self._choice.has_virtual_stages)
        else:
            refusals.check_tensors_are_whole(module, self.tensor_parallel_size)
            self._automatic = AutomaticCut(
                module,
                self._choice,
                num_stages=num_stages,
                num_microbatches=AUTO if self.num_microbatches == AUTO else num_microbatches,
                replicas=self._topology(num_stages).data_parallel_size,
                device=self.root_device,
            )
            stages = StageMap(num_stages * self._automatic.num_virtual_stages)
            self.plan = self._automatic.decide_at_start(self.broadcast, is_first=self.global_rank == 0)
            if self.plan is not None:
                self._automatic = None
                note_cut(module, self.plan)
                stages, num_microbatches = self._planned_stages(module, self.plan), self.plan.num_microbatches
        self._seed = self.broadcast(torch.initial_seed())
        self._cut(module, stages, num_stages, num_microbatches)
        self._make_local(module, self._seed)
        self._set_up_for = (module, num_stages)

    def _cut(self, module: LightningModule, stages: StageMap, num_stages: int, num_microbatches: int) -> None:
        """Topology, transport and partition for these stages."""
        is_fsdp = self.data_parallel == "fsdp"
        sizes = {
            "num_stages": num_stages,
            "num_virtual_stages": stages.num_stages // num_stages,
            "num_microbatches": num_microbatches,
        }
        self._advisor = None
        if self._choice.is_auto:
            self._advisor = Advisor(**sizes, max_live_microbatches=self.max_live_microbatches)
        schedules = self._advisor.first if self._advisor is not None else self._choice.bind(**sizes)
        placement = schedules.placement
        self.topology = topology = self._topology(num_stages, placement)
        if self.world_size > 1:
            warn_of_placement(num_stages)
        rank = topology.stage_rank
        if self.root_device.type == "cpu":
            keep_freed_memory()
        if num_stages > 1 and (self._transport is None or self._transport.topology != topology):
            store = dist.distributed_c10d._get_default_store()
            self._transport = Transport.shared(topology, self.root_device, self.timeout, store, self._notice)
        self._replicas = Replicas.shared(topology, self.timeout)
        self._sharded = None
        if is_fsdp and self._replicas is not None:
            self._sharded = FullySharded(self._replicas, self.root_device.type, gradients_mean=self.gradients_mean)
            self._sharded.adopt(module)
        streams = Streams(self.root_device)
        interception = Interception(module, stages, streams)
        certain = certain_stages(interception.leaves, stages.num_stages) if self._automatic is None else {}
        self._placement = Placement(module, placement, rank, certain)
        self._placement.find_present(module, self._transport)
        self.pipeline = Pipeline(
            rank=rank,
            placement=placement,
            device=self.root_device,
            transport=self._transport,
            interception=interception,
            schedule=schedules,
            num_microbatches=num_microbatches,
        )
        self._gradients = Gradients(
            module,
            self._placement,
            self.pipeline.stages,
            transport=self._transport,
            replicas=self._replicas,
            gradients_mean=self.gradients_mean,
            sharded=self._sharded,
        )
        self._release_remote(module)
        self._steps = Steps(
            module,
            self.pipeline,
            self._transport,
            seed=self._seed,
            mean=self.loss_reduction == "mean",
            output_broadcast=self.output_broadcast,
            replicas=self._replicas,
            tensor_group=self._tensor_group,
            signals=self._signals,
            on_new=self._on_new,
        )

    def _cut_automatically(self, name: str, arguments: tuple[Any, ...], context: Callable[[], Any]) -> None:
        """Before the first step of a module that nobody said where to cut. All ranks must call it."""
        automatic, module = self._automatic, self.lightning_module
        is_training = name == "training_step"
        if automatic is None or (automatic.is_cut and not is_training):
            return
        assert module is not None and self.pipeline is not None and self.topology is not None
        self.plan = automatic.decide(
            name,
            arguments,
            context,
            self.optimizers,
            self.broadcast,
            transport=self._transport,
            is_first=self.global_rank == 0,
        )
        is_final = is_training or module.trainer.state.fn != TrainerFn.FITTING
        observe = self.pipeline.observe
        if is_final:
            self._automatic = None
            note_cut(module, self.plan)
        self._cut(module, self._planned_stages(module, self.plan), self.topology.num_stages, self.plan.num_microbatches)
        self.pipeline.observe = observe
        if self._stage_optimizers is not None:
            assert self.ownership is not None
            self._stage_optimizers.drop_remote(self.ownership)
        self._install(module)

    @staticmethod
    def _planned_stages(module: LightningModule, plan: StagePlan) -> StageMap:
        return resolve(module, plan.stage_config, plan.num_stages, has_virtual_stages=plan.has_virtual_stages)

    def _make_local(self, module: LightningModule, seed: int) -> None:
        """Give what was built on the meta device, and is held here, its values; read the files of weights."""
        assert self.ownership is not None
        made = make_local(module, self.ownership)
        initialise(module, made.values(), seed)
        found: set[str] = set()
        if self.weights is not None:
            names = [name for name, _ in (*module.named_parameters(), *module.named_buffers())]
            found = load_weights(module, self.weights, list(filter(self.ownership.is_local, names)))
        check_set(module, [name for name in made if name not in found])

    def _count_stages(self, config: Mapping[str, int]) -> int:
        """The number of device groups, which share the virtual stages of a schedule that has such."""
        if self.num_stages is not None:
            return self.num_stages
        used = count_stages(config)
        if self._choice.fixed is not None:
            return self._choice.fixed.num_ranks
        if used is not None and self._choice.has_virtual_stages:
            return min(used, self.world_size)
        return used or self.world_size

    def _transfer(self, module: LightningModule) -> None:
        """Move what is held here to the device, and give every stage one value of what several hold."""
        device = self.root_device
        module._apply(lambda tensor: tensor if tensor.is_meta or tensor.device == device else tensor.to(device))
        note_device(module, device)
        assert self.ownership is not None
        held = {id(t): (t, self.ownership.holders[n]) for n, t in _tensors(module) if n in self.ownership}
        spread_from_owner([item for item in held.values() if len(item[1]) > 1], self._transport, self.ownership.stage)
        if self._replicas is not None:
            self._replicas.spread(t for t, _ in held.values() if not t.is_meta and not isinstance(t, DTensor))

        if self._tensor_group is not None:
            self._tensor_group.spread(t for t, _ in held.values() if not t.is_meta)

    @override
    def model_to_device(self) -> None:
        assert self.lightning_module is not None
        self._transfer(self.lightning_module)

    def _install(self, module: LightningModule) -> None:
        """What hangs on the user's objects while a trainer function runs."""
        self._uninstall()
        silence_sync_warning()
        self._undo.append(compare_parameters_by_identity())
        assert self.topology is not None and self._placement is not None and self.pipeline is not None
        plugin = self.precision_plugin
        if self._stage_optimizers is not None:
            vars(plugin)["clip_grad_by_norm"] = self._stage_optimizers.clip_by_norm
            vars(plugin)["clip_grad_by_value"] = self._stage_optimizers.clip_by_value
            self._undo.append(lambda: _forget(plugin, "clip_grad_by_norm", "clip_grad_by_value"))
            self._undo.append(call_before_update(plugin, self._stage_optimizers.before_update))
        if self.world_size > 1:
            self._undo.append(self._signals.install(module.trainer, has_replicas=self._replicas is not None))
        if self.world_size > 1 and self._scaler is not None:
            self._undo.append(agree_on_overflow(self._scaler, self.root_device))
        if self.world_size > 1:
            self._undo.append(
                share_metrics(
                    module,
                    self._stage_of_metric,
                    self._transport,
                    stage=self.topology.stage_rank,
                    data_parallel_group=self._replicas.group if self._replicas is not None else None,
                )
            )
        if not self.topology.is_first_stage:
            self._undo.append(skip_before_transfer(module))
        if not self.output_broadcast and self.pipeline.rank != self.pipeline.last_rank:
            self._undo.append(silence_writers(module.trainer))

    @property
    def _scaler(self) -> GradScaler | None:
        return getattr(self.precision_plugin, "scaler", None)

    def _uninstall(self) -> None:
        while self._undo:
            self._undo.pop()()

    def _stage_of_metric(self, metric: nn.Module) -> int | None:
        if self._in_step:
            return None
        assert self.pipeline is not None and self._placement is not None
        name = self.pipeline.interception.module_names.get(id(metric))
        return self._placement.rank_of_module(name) if name is not None else None

    @contextmanager
    @override
    def tensor_init_context(self, empty_init: bool | None = None) -> Generator[None, None, None]:
        # On the CPU: the whole model on the device is what does not fit. Empty ones get their data in setup.
        with torch.device("meta") if empty_init else nullcontext(), self.precision_plugin.tensor_init_context():
            yield

    # -- data -------------------------------------------------------------------------------------------------------

    @override
    def process_dataloader(self, dataloader: object) -> object:
        assert self.topology is not None and self.lightning_module is not None
        if self.world_size == 1:
            return dataloader
        self.agree_on_loader(dataloader)
        # Only in training do replicas wait for one another.
        replicas = self._replicas if self.lightning_module.trainer.training else None
        return share_loader(dataloader, self._transport, first=self.topology.is_first_stage, replicas=replicas)

    @override
    def batch_to_device(self, batch: Any, device: torch.device | None = None, dataloader_idx: int = 0) -> Any:
        if self.topology is not None and not self.topology.is_first_stage:
            return batch
        return super().batch_to_device(batch, device, dataloader_idx)

    # -- steps ------------------------------------------------------------------------------------------------------

    @override
    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        assert self.lightning_module is not None and self._steps is not None
        assert self._gradients is not None and self._stage_optimizers is not None
        self._stage_optimizers.note_new_groups(self.lightning_module)
        trainer = self.lightning_module.trainer
        arguments = (*args, *kwargs.values())
        self._cut_automatically("training_step", arguments, self.precision_plugin.train_step_context)
        first = trainer.fit_loop.batch_idx % trainer.accumulate_grad_batches == 0
        self._gradients.observe_buckets = self.observe_buckets
        unseen = zeroed_unseen(self.lightning_module, self.optimizers) if first else ()
        self._gradients.begin(first=first, complete=not self._accumulating, unseen=unseen)
        with self._stepping(), self._advising():
            result = self._steps.train(
                arguments,
                number=total_batches(trainer),
                accumulate=trainer.accumulate_grad_batches,
                context=self.precision_plugin.train_step_context,
                after_backward=self._after_backward,
                scale=scaler.scale if (scaler := self._scaler) is not None else None,
            )
        self._gradients.finish()
        return result

    @override
    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        return self._evaluate("validation_step", self.precision_plugin.val_step_context, (*args, *kwargs.values()))

    @override
    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        return self._evaluate("test_step", self.precision_plugin.test_step_context, (*args, *kwargs.values()))

    @override
    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        return self._evaluate("predict_step", self.precision_plugin.predict_step_context, (*args, *kwargs.values()))

    @override
    def on_validation_start(self) -> None:
        super().on_validation_start()
        self._signals.pause(True)
        self._gather_parameters()

    @override
    def on_validation_end(self) -> None:
        self._release_parameters()
        self._signals.pause(False)

    @override
    def on_test_start(self) -> None:
        super().on_test_start()
        self._gather_parameters()

    @override
    def on_test_end(self) -> None:
        self._release_parameters()

    @override
    def on_predict_start(self) -> None:
        super().on_predict_start()
        self._gather_parameters()

    @override
    def on_predict_end(self) -> None:
        self._release_parameters()

    def _gather_parameters(self) -> None:
        """For a whole loop: replicas may have unequally many batches, so steps must not wait for one another."""
        if self._sharded is not None:
            self._sharded.gather()

    def _release_parameters(self) -> None:
        if self._sharded is not None:
            self._sharded.release()

    def _evaluate(self, name: str, context: Callable[[], Any], args: tuple[Any, ...]) -> Any:
        self._cut_automatically(name, args, context)
        assert self._steps is not None and self.lightning_module is not None
        with self._stepping():
            return self._steps.evaluate(name, getattr(self.lightning_module, name), args, context=context)

    @contextmanager
    def _advising(self) -> Generator[None, None, None]:
        """With schedule="auto", around each training step until one is chosen."""
        if self._advisor is None:
            yield
            return
        assert self.pipeline is not None
        with self._advisor.watching(self.pipeline, self._transport):
            self.advice = self._advisor.advice
            if self.advice is not None:
                self._advisor = None
            yield

    @contextmanager
    def _stepping(self) -> Generator[None, None, None]:
        self._in_step = True
        try:
            yield
        finally:
            self._in_step = False

    @override
    def backward(self, closure_loss: Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any) -> Tensor:
        """The schedule has run the backwards; here their gradients appear, between the hooks that expect them."""
        module = self.lightning_module
        assert module is not None and self._gradients is not None and self._stage_optimizers is not None
        closure_loss = self.precision_plugin.pre_backward(closure_loss, module)
        self._gradients.publish()
        if self._tensor_group is not None:
            place_gradients(module.parameters())
        self._stage_optimizers.replace(self._gradients.shard())
        return self.precision_plugin.post_backward(closure_loss, module)

    @override
    def optimizer_step(
        self,
        optimizer: Optimizer,
        closure: Callable[[], Any],
        model: LightningModule | nn.Module | None = None,
        **kwargs: Any,
    ) -> Any:
        result = super().optimizer_step(optimizer, closure, model, **kwargs)
        assert self._stage_optimizers is not None
        self._stage_optimizers.after_update(optimizer)
        return result

    @contextmanager
    @override
    def block_backward_sync(self) -> Generator[None, None, None]:
        self._accumulating = True
        try:
            yield
        finally:
            self._accumulating = False

    def _on_new(self, kind: Hashable, reports: list[list[Report]]) -> None:
        """A step showed who uses what: let go of what this stage turned out not to need."""
        assert self._placement is not None and self.lightning_module is not None
        for stages in reports:
            self._placement.add(stages)
        if self.world_size > 1 and isinstance(kind, tuple) and kind[0] == "train":
            if self._replicas is not None:  # what is held is to be the same on all replicas of a stage
                for state in self._replicas.gather_objects(self._placement.state()):
                    self._placement.merge(state)
            self._release_remote(self.lightning_module)
            assert self._stage_optimizers is not None and self.ownership is not None
            self._stage_optimizers.drop_remote(self.ownership)

    def _release_remote(self, module: LightningModule) -> None:
        assert self._placement is not None and self._gradients is not None
        self.ownership = self._placement.ownership()
        for released in (module, *copies_of(module, module.trainer)):
            release(released, self.ownership)
        guard_state_dict(module)
        self._gradients.settle(self.ownership)

    def _after_backward(self, stage: int, microbatch: Microbatch) -> None:
        assert self._gradients is not None
        is_last = microbatch.index == microbatch.num_microbatches - 1
        self._gradients.after_backward(stage, microbatch.index, last=is_last)

    # -- clipping ---------------------------------------------------------------------------------------------------

    def grad_norm(self, norm_type: float = 2.0) -> Tensor:
        """The norm of the whole model's gradients, over stages and replicas; each shared parameter counts once.

        For a hook such as `on_before_optimizer_step`, to log it. All ranks must call it.
        """
        assert self._stage_optimizers is not None
        return self._stage_optimizers.grad_norm(norm_type)

    # -- end --------------------------------------------------------------------------------------------------------

    @override
    def on_exception(self, exception: BaseException) -> None:
        if self._failed or self._ends_all(exception):
            return
        self._failed = True
        if self._notice is not None:
            self._notice.publish(exception)  # before connections close and wake others up
        if self._replicas is not None:
            self._replicas.close()
        if self._notice is not None:
            self._notice.fail(exception)
        super().on_exception(exception)

    @override
    def teardown(self) -> None:
        self._uninstall()
        if self._failed:
            self._background.abandon()
        self._background.wait()
        self.agree("the end of the run", {}, is_last=True)
        if self._transport is not None and not self._failed:
            # A process may end after this, and one that ends with messages unread breaks its peers' connections.
            self._transport.flush()
            self._transport.barrier("the end of the run")
        module = self.lightning_module
        if module is not None and self.root_device.type != "cpu":
            module._apply(lambda tensor: tensor if tensor.is_meta else tensor.cpu())
            note_device(module, torch.device("cpu"))
        self.precision_plugin.teardown()
        assert self.accelerator is not None and self.cluster_environment is not None
        self.accelerator.teardown()
        self.checkpoint_io.teardown()
        self.cluster_environment.teardown()

    @classmethod
    @override
    def register_strategies(cls, strategy_registry: Any) -> None:
        registered = {
            "pipeline": "1f1b",
            "pipeline_gpipe": "gpipe",
            "pipeline_1f1b": "1f1b",
            "pipeline_interleaved": "interleaved_1f1b",
        }
        for name, schedule in registered.items():
            if name not in strategy_registry:
                strategy_registry.register(
                    name, cls, description=f"Pipeline parallelism, {schedule} schedule", schedule=schedule
                )


def register_strategies() -> None:
    """Make the names known to `Trainer(strategy=...)`."""
    PipelineStrategy.register_strategies(StrategyRegistry)


def _check_count(name: str, value: int | str | None) -> None:
    if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
        raise ValueError(f"{name} is a whole number from 1, got {value!r}")


def _forget(owner: object, *names: str) -> None:
    for name in names:
        vars(owner).pop(name, None)


def _tensors(module: nn.Module) -> list[tuple[str, Tensor]]:
    return [*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)]
