"""PipelineStrategy: trains an unmodified LightningModule with one stage per device."""

from __future__ import annotations

import copy
import functools
import json
from collections.abc import Callable, Generator, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from datetime import timedelta
from typing import Any, NoReturn, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.constants import default_pg_timeout
from torch.optim import Optimizer
from typing_extensions import override

from lightning_pipeline._registration import adopted_by, is_pipeline, refuse_fabric
from lightning_pipeline.engine.executor import Span
from lightning_pipeline.engine.pipeline import Pipeline
from lightning_pipeline.engine.shared_parameters import spread_from_owner
from lightning_pipeline.engine.suspended import end_idle_threads
from lightning_pipeline.hooks.first_rank import Lending
from lightning_pipeline.partition.microbatch import OneBatch
from lightning_pipeline.partition.overrides import InPlaceOf, overridden
from lightning_pipeline.partition.stage_config import StageConfig, read_stage_config
from lightning_pipeline.recording.patched_torch import fast_paths_open
from lightning_pipeline.runtime.host_memory import keep_freed_memory
from lightning_pipeline.runtime.log import is_logging, logger
from lightning_pipeline.runtime.replicas import Replicas
from lightning_pipeline.runtime.topology import Topology
from lightning_pipeline.runtime.transport import Transport

from .._lightning import (
    Accelerator,
    CheckpointIO,
    ClusterEnvironment,
    LightningModule,
    Precision,
    Trainer,
    TrainerFn,
    TrainerStatus,
)
from ..accelerators.rank_table_environment import warn_of_placement
from ..checkpoint.optimizer_layout import OptimizerLayout
from ..checkpoint.state import copies_of
from ..checkpoint.weights import Weights
from . import validation
from .checkpointing import CheckpointingStrategy
from .dataloading import AnnouncedLoader, FollowingLoader
from .hooks import apart, follow_hooks, has_hook, knows_no_others, look_at_batches
from .lightning_private import (
    SKIPPED,
    Override,
    call_before_update,
    compare_parameters_by_identity,
    leave_module_uncompiled,
    leave_modules_unnamed,
    let_steps_be_skipped,
    measure_replicas,
    note_mesh,
    silence_sync_warning,
    skip_before_transfer,
    total_batches,
    validate_by_first_clock,
)
from .local_module import take_initial_values
from .manual import Closure, backwards_met, batch_calls_met
from .measure import after_batch
from .partitioner import Cut, Partitioner, num_stages_for
from .patches import agree_on_overflow, convert_batch_norms, shared_statistics, silence_writers, sync_over
from .processes import parts_of
from .schedule_choice import Advice, Advisor, Observer, ScheduleArgument, ScheduleChoice, observed
from .stage_optimizers import StageOptimizers, inner, zeroed_unseen
from .stage_runner import StageRunner
from .tensor_parallel import TensorGroup
from .validation import options_in_environment
from .whole_batch import WholeBatch

_GIVEN_BY_TRAINER = ("accelerator", "parallel_devices", "cluster_environment", "checkpoint_io", "precision_plugin")
"""What a Trainer gives a strategy that was made without."""


_Init = TypeVar("_Init", bound=Callable[..., None])


def _remembering(init: _Init) -> _Init:
    """An `__init__` that keeps what it is given, for copies. (`__new__` would hide from Lightning's CLI what it is.)"""

    @functools.wraps(init)
    def remembering(self: PipelineStrategy, *args: Any, **kwargs: Any) -> None:
        if "_arguments" not in vars(self):  # of a class derived from the one whose `__init__` this is
            self._arguments = args, kwargs
        init(self, *args, **kwargs)

    return cast(_Init, remembering)


class PipelineStrategy(CheckpointingStrategy):
    """Trains a LightningModule over several devices, each holding one stage of it.

    Args:
        stage_config: names of modules and their stages; a module without a key takes the stage where the data is when
            it is called, so the first module of each later stage is enough: ``{"layer3": 1}``. None takes the
            module's own ``stage_config``, else the ``pipeline_stage`` attributes of its submodules, else "auto". For a
            schedule of virtual stages it numbers these along the data, or names the device that holds them
            (``resolve``). "auto" measures the first step, tries the best cuts and takes the fastest (see
            ``Partitioner`` and `plan`). A path is that of a plan that `StagePlan.save` has written.
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
        data_parallel: "replicate" keeps a stage's parameters and optimizer state whole on each of its replicas; "zero1"
            shards the optimizer state and the update (see ``OptimizerShards``); "fsdp" shards parameters and gradients
            as well, from the first training step on (see ``FullySharded``). Checkpoints are the same files.
        opt_shard: True is MindSpore's name for ``data_parallel="zero1"``.
        tensor_parallel_size: ranks among which `configure_model` splits each stage's tensors, by
            ``parallelize_module(..., self.device_mesh["tensor_parallel"], ...)``; needs ``num_stages``.
        weights: files of weights to start from, of which each rank reads what it holds (see ``load_weights``).
        loss_reduction: the step's loss is the "mean" over micro-batches, weighted by samples, or their "sum", which is
            for losses that are sums over samples (see ``is_sum_over_samples``). Logged, it is shown as that.
        output_broadcast: outputs of validation, test and predict steps reach every rank; else they stay on the last
            stage.
        save_distributed_checkpoint: checkpoints are folders in torch.distributed.checkpoint's format, which all ranks
            write at once, each what it holds. Both kinds load whatever this is.
        process_group_backend: default: what the device has, hccl for npu, nccl for cuda and gloo for cpu.
        start_method: "popen" starts the machine's other processes by running the script again; "fork" forks this one,
            for notebooks: after fit the module here has the trained weights.
        timeout: the longest that a stage waits for another.

    Raises:
        ValueError: arguments that do not go together; each message names the value and the way out.
    """

    strategy_name = "pipeline"
    _arguments: tuple[tuple[Any, ...], dict[str, Any]]

    @_remembering
    def __init__(
        self,
        *,
        stage_config: StageConfig | None = None,
        num_stages: int | None = None,
        num_microbatches: int | str | None = None,
        schedule: ScheduleArgument = "1f1b",
        max_live_microbatches: float | None = None,
        gradients_mean: bool = True,
        data_parallel: str = "replicate",
        opt_shard: bool = False,
        tensor_parallel_size: int = 1,
        weights: Weights | None = None,
        loss_reduction: str = "mean",
        output_broadcast: bool = True,
        save_distributed_checkpoint: bool = False,
        process_group_backend: str | None = None,
        start_method: str = "popen",
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
            start_method=start_method,
            timeout=timeout,
        )
        self._choice = ScheduleChoice(schedule)
        self.max_live_microbatches = max_live_microbatches
        self.stage_config = stage_config
        self.num_stages = num_stages
        self.num_microbatches = num_microbatches
        self.schedule = schedule
        self.gradients_mean = gradients_mean
        self.data_parallel = validation.data_parallel_of(data_parallel, opt_shard=opt_shard)
        self.tensor_parallel_size = tensor_parallel_size
        self.weights = weights
        self.loss_reduction = loss_reduction
        self.output_broadcast = output_broadcast
        self.save_distributed_checkpoint = save_distributed_checkpoint
        validation.check_arguments(self, self._choice)
        self.pipeline: Pipeline | None = None
        self.observers: set[Observer] = set()
        """Each gets every action of training steps with its start and end."""
        self.observe_buckets: Callable[[int, float, float], None] | None = None
        """Gets what `PipelineGradReducer.observe` does, in every step that sums gradients over replicas."""
        self._advisor: Advisor | None = None
        self._tensor_group: TensorGroup | None = None
        self._accumulating = False
        self._installed = ExitStack()
        self._shares_batches = False
        self._cutting: Partitioner | None = None
        self._seed = 0
        self._set_up_for: tuple[LightningModule, int] | None = None
        self._told_replicas: int | None = None  # before the topology was known
        self._restores_late: bool | None = None  # in this run, once somebody has asked
        self._whole_batch: WholeBatch | None = None
        """The training step that runs, or ran last, if it was Lightning's own."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "__init__" in vars(cls):
            cls.__init__ = _remembering(cls.__init__)  # type: ignore[method-assign]

    def __reduce__(self) -> tuple[Any, ...]:
        """A copy, and what comes out of a pickle, was asked for the same and has not been set up: connections belong to
        this process, and its stages to this module."""
        # What a Trainer has not given yet is not its properties' default: the next Trainer may give it.
        own = {name: vars(self).get(f"_{name}", vars(self).get(name)) for name in _GIVEN_BY_TRAINER}
        given = {name: _without_overrides(getattr(self, name)) for name, value in own.items() if value is not None}
        return _asked_for, (type(self), self._arguments, given)

    @property
    @override
    def accelerator(self) -> Accelerator | None:
        return self._accelerator

    @accelerator.setter
    @override
    def accelerator(self, accelerator: Accelerator) -> None:
        # The first that a Trainer gives: one of Lightning's other name makes this a strategy of its own.
        adopted = adopted_by(type(self), accelerator)
        if adopted is not None:
            args, kwargs = self._arguments
            self.__class__ = adopted
            self.__init__(*args, **kwargs)  # type: ignore[misc]
        self._accelerator = accelerator

    @property
    def _precision(self) -> NoReturn:
        refuse_fabric()  # which alone asks for it

    @property
    def peak_live(self) -> int:
        """The most activations of virtual stages that were live on this rank at once in a training step so far."""
        return self._runner.peak_live if self._runner is not None else 0

    @property
    def advice(self) -> Advice | None:
        """What schedule="auto" chose; None until it has."""
        return self._advisor.advice if self._advisor is not None else None

    @property
    @override
    def restore_checkpoint_after_setup(self) -> bool:
        # Before, hooks and callbacks find what they do without a pipeline; after, where set-up is what gives the module
        # its memory, each rank reads what it holds. Set-up may take memory away, too, and Lightning asks on both sides.
        if self._restores_late is None:
            is_empty = any(parameter.is_meta for parameter in self._module.parameters())
            self._restores_late = is_empty or self.weights is not None
            self.agree("the set-up of the pipeline", {"parameters without memory": str(is_empty)})
        return self._restores_late

    @override
    def setup_environment(self) -> None:
        super().setup_environment()
        self._restores_late = None
        self._awaits_setup, self._put_off = True, None  # of a run that failed before its set-up
        if self.tensor_parallel_size > 1:
            assert self.num_stages is not None
            mesh = validation.check_one_replica(self._topology(self.num_stages)).mesh(self.root_device.type)
            note_mesh(self._module, mesh)
            self._tensor_group = TensorGroup(mesh["tensor_parallel"].get_group())

    @override
    def settings(self) -> dict[str, str]:
        asked = {name: str(getattr(self, name)) for name in validation.ALIKE}
        return {**super().settings(), **asked, "schedule": self._choice.label}

    @override
    def _num_replicas(self, world_size: int) -> int:
        if self.topology is not None:
            return self.topology.data_parallel_size
        config = read_stage_config(self._module, self.stage_config)
        num_stages = self.num_stages or num_stages_for(config, self._choice, world_size)
        self._told_replicas = max(1, world_size // (num_stages * self.tensor_parallel_size))
        return self._told_replicas

    def _topology(self, num_stages: int) -> Topology:
        return Topology(
            num_ranks_per_pipeline=num_stages,
            world_size=self.world_size,
            rank=self.global_rank,
            tensor_parallel_size=self.tensor_parallel_size,
        )

    # -- setup ------------------------------------------------------------------------------------------------------

    @override
    def setup(self, trainer: Trainer) -> None:
        assert self.accelerator is not None
        self.accelerator.setup(trainer)
        module = self._module
        validation.check_module(module, trainer)
        validation.check_precision(self.precision_plugin, is_alone=self._is_alone)
        if not self._is_alone:
            leave_modules_unnamed(trainer)
            leave_module_uncompiled(module)
        self.precision_plugin.convert_module(module)
        self._set_up_pipeline(module)
        self._load_put_off()
        self.model_to_device()
        # Before schedulers ask for the loaders' length.
        self._shares_batches = not self._is_alone and look_at_batches(module, trainer)
        if trainer.state.fn == TrainerFn.FITTING:
            self.setup_optimizers(trainer)
            self._stage_optimizers = StageOptimizers(
                [OptimizerLayout(optimizer, module) for optimizer in self.optimizers],
                self.transport,
                shards_over=self.replicas if self.data_parallel == "zero1" else None,
                has_slices=self._running.has_slices,
            )
            self._stage_optimizers.settle(self._running.held.ownership)
        self.setup_precision_plugin()
        self._signals.forget()
        self._install(module)

    def _set_up_pipeline(self, module: LightningModule) -> None:
        """Topology, transport and partition; kept from one trainer function to the next on the same module."""
        config = read_stage_config(module, self.stage_config)
        num_stages = self.num_stages or num_stages_for(config, self._choice, self.world_size)
        # Before whatever ranks do otherwise that cut the model otherwise.
        cut = {"stage_config": json.dumps(config, sort_keys=True, default=str), "num_stages": str(num_stages)}
        self.agree("the set-up of the pipeline", {**parts_of(module), **cut})
        if self._set_up_for == (module, num_stages):
            self._running.release_remote()
            return
        validation.check_slices(
            module,
            module.trainer,
            fsdp=self.data_parallel == "fsdp",
            tensor_parallel=self.tensor_parallel_size > 1,
        )
        if self.world_size > 1:
            take_initial_values(module, copies_of(module, module.trainer), self.broadcast)
        replicas = self._topology(num_stages).data_parallel_size
        if module.trainer.state.fn == TrainerFn.FITTING:
            convert_batch_norms(module, self._layer_sync, self.root_device, num_replicas=replicas)
        self._cutting = Partitioner(
            module,
            config,
            self._choice,
            num_stages=num_stages,
            num_microbatches=self.num_microbatches,
            replicas=replicas,
            tensor_parallel_size=self.tensor_parallel_size,
            device=self.root_device,
            broadcast=self.broadcast,
            is_first=self.global_rank == 0,
        )
        first = self._cutting.at_start()
        self.plan = self._cutting.plan
        self._seed = self.broadcast(torch.initial_seed())
        self._cut(module, first, num_stages)
        self._running.held.make(self.weights, self._seed)
        self._set_up_for = (module, num_stages)

    def _cut(self, module: LightningModule, cut: Cut, num_stages: int) -> None:
        """Topology, transport and partition for these stages."""
        sizes = {
            "num_stages": num_stages,
            "num_virtual_stages": cut.stages.num_stages // num_stages,
            "num_microbatches": cut.num_microbatches,
        }
        self._advisor = None
        if self._choice.is_auto:
            self._advisor = Advisor(**sizes, max_live_microbatches=self.max_live_microbatches)
        schedules = self._advisor.first if self._advisor is not None else self._choice.bind(**sizes)
        self.topology = topology = self._topology(num_stages).along(schedules.placement)
        told, self._told_replicas = self._told_replicas, None
        if told is not None and told != topology.data_parallel_size:
            raise ValueError(
                f"a hook that sets data up was told of {told} replicas (trainer.world_size), and stage_config, which "
                f"came after it, makes {topology.data_parallel_size}: give PipelineStrategy num_stages={num_stages}"
            )
        if self.world_size > 1:
            warn_of_placement(num_stages)
        if self.root_device.type == "cpu":
            keep_freed_memory()
        self.transport = None
        if num_stages > 1:
            store = dist.distributed_c10d._get_default_store()
            self.transport = Transport.shared(topology, self.root_device, self.timeout, store, self._notice)
        self.replicas = Replicas.shared(topology, self.timeout)
        self._runner = StageRunner(
            module,
            cut,
            schedules,
            topology,
            self.root_device,
            transport=self.transport,
            replicas=self.replicas,
            tensor_group=self._tensor_group,
            signals=self._signals,
            seed=self._seed,
            gradients_mean=self.gradients_mean,
            is_fully_sharded=self.data_parallel == "fsdp",
            loss_mean=self.loss_reduction == "mean",
            output_broadcast=self.output_broadcast,
            must_split=self.num_microbatches is not None,
            on_released=lambda ownership: self._stage_optimizers.settle(ownership),
        )
        self.pipeline = self._runner.pipeline
        self._log_cut(cut, topology)

    def _log_cut(self, cut: Cut, topology: Topology) -> None:
        if not is_logging():
            return
        self.observers.add(_log_action)
        logger.debug("stages begin with %s", dict(cut.stages.exact) or "the step; there is one, or they are found next")
        logger.debug(
            "is stage %d of replica %d, on %s; %d micro-batches by schedule %s, virtual stages on ranks %s",
            topology.stage_rank,
            topology.replica,
            self.root_device,
            cut.num_microbatches,
            self._choice.label,
            topology.placement,
        )

    def _cut_before_step(self, name: str, arguments: tuple[Any, ...], context: Callable[[], Any]) -> None:
        """Cut a module that nobody said where to cut, before the first step that comes. All ranks must call it."""
        assert self._cutting is not None and self.pipeline is not None
        optimizers, transport, is_whole = self.optimizers, self.transport, self._cutting.is_whole
        cut = self._cutting.before_step(name, arguments, context, optimizers=optimizers, transport=transport)
        if cut is None:
            return
        if is_whole:  # code of the loader, which the first rank alone runs, may have written into it
            take_initial_values(self._module, copies_of(self._module, self._module.trainer), self.broadcast)
        self.plan = self._cutting.plan
        observe, outside = self.pipeline.observe, self._outside
        self._cut(self._module, cut, self.pipeline.num_ranks)
        self._running.take_over(outside)
        self.pipeline.observe = observe
        self._stage_optimizers.settle(self._running.held.ownership)
        self._install(self._module)

    @override
    def model_to_device(self) -> None:
        self._running.held.to_device()

    def _install(self, module: LightningModule) -> None:
        """Let the user's precision plugin, module, metrics and Trainer do what one stage of several has to, until this
        is called again or the run ends."""
        self._installed.close()
        assert self.topology is not None and self.pipeline is not None
        plugin, outside = self.precision_plugin, self._outside
        silence_sync_warning()
        with ExitStack() as installed:
            override: Override = installed.enter_context(overridden())
            let_steps_be_skipped(module.trainer, override)
            installed.enter_context(fast_paths_open())
            if outside is not None:
                installed.enter_context(compare_parameters_by_identity())
                follow_hooks(module, outside, override)
                outside.states.optimizers = self._stage_optimizers.optimizers
                outside.states.are_shared_out = self._stage_optimizers.are_shared_out
                installed.enter_context(self.pipeline.recorder.patched())
            backwards_met(plugin, self._go_back, override)
            if not self._is_alone:
                by_norm = functools.partial(self._clip, self._stage_optimizers.clip_by_norm)
                by_value = functools.partial(self._clip, self._stage_optimizers.clip_by_value)
                override(plugin, "clip_grad_by_norm", InPlaceOf(plugin.clip_grad_by_norm, by_norm))
                override(plugin, "clip_grad_by_value", InPlaceOf(plugin.clip_grad_by_value, by_value))
                call_before_update(plugin, self._stage_optimizers.before_update, override)
                installed.enter_context(shared_statistics(module, self.replicas))
                measure_replicas(module.trainer, self.topology.data_parallel_size)
                validate_by_first_clock(module.trainer, self.broadcast, override)
                self._signals.install(module.trainer, override, has_replicas=self.replicas is not None)
                if (scaler := getattr(plugin, "scaler", None)) is not None:
                    agree_on_overflow(scaler, self.root_device, override)
                sync_over(module, self.replicas.group if self.replicas is not None else None)
            if not (self.topology.is_first_stage or self._shares_batches):
                skip_before_transfer(module, override)
            if not self.output_broadcast and self.pipeline.rank != self.pipeline.last_rank:
                silence_writers(module.trainer, override)
            self._installed = installed.pop_all()

    @apart
    def _clip(self, clip: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        clip(*args, **kwargs)

    @contextmanager
    @override
    def tensor_init_context(self, empty_init: bool | None = None) -> Generator[None, None, None]:
        # On the CPU: the whole model on the device is what does not fit. Empty ones get their data in setup.
        with torch.device("meta") if empty_init else nullcontext(), self.precision_plugin.tensor_init_context():
            yield

    # -- data -------------------------------------------------------------------------------------------------------

    @override
    @apart
    def process_dataloader(self, dataloader: object) -> object:
        if self._is_alone:
            return dataloader
        assert self.topology is not None
        self.agree_on_loader(dataloader)
        # Only in training do replicas wait for one another.
        replicas = self.replicas if self._module.trainer.training else None
        whole = self._shares_batches
        if self.topology.is_first_stage:
            return AnnouncedLoader(dataloader, self.transport, replicas, whole=whole, lending=self._lending)
        return FollowingLoader(dataloader, self.transport, whole=whole, lending=self._lending)

    def _lending(self) -> Lending | None:
        return None if self._outside is None else self._outside.lending

    @override
    @apart
    def batch_to_device(self, batch: Any, device: torch.device | None = None, dataloader_idx: int = 0) -> Any:
        if self.topology is not None and not (self.topology.is_first_stage or self._shares_batches):
            return batch
        return super().batch_to_device(batch, device, dataloader_idx)

    # -- steps ------------------------------------------------------------------------------------------------------

    @override
    @apart
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """Cut before the step, which an optimizer's update may be around."""
        if batch is not None:  # else the step takes it from a dataloader_iter
            self._cut_before_training((batch, *after_batch(self._module, batch_idx)))

    def _cut_before_training(self, arguments: tuple[Any, ...]) -> None:
        self._stage_optimizers.follow(self.optimizers, self._module)
        self._cut_before_step("training_step", arguments, self.precision_plugin.train_step_context)

    @override
    @apart
    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        trainer = self._module.trainer
        arguments = self._with_batch(*args, *kwargs.values())
        self._cut_before_training(arguments)
        microbatches = self._running.split(arguments[0])
        self._whole_batch = None
        if self._is_alone and microbatches is not None and len(microbatches) == 1:
            with observed(self._running.pipeline, *self.observers):
                observe = self._running.pipeline.observe
            self._whole_batch = self._running.whole_training_batch(
                number=total_batches(trainer), accumulate=trainer.accumulate_grad_batches, observe=observe
            )
            with self._whole_batch.running():
                return super().training_step(*microbatches, *arguments[1:])
        if not self._module.automatic_optimization:
            return self._train_by_hand(arguments, microbatches)
        assert self.pipeline is not None
        is_first = trainer.fit_loop.batch_idx % trainer.accumulate_grad_batches == 0
        scaler = getattr(self.precision_plugin, "scaler", None)
        advising = nullcontext() if self._advisor is None else self._advisor.watching(self.pipeline, self.transport)
        with observed(self.pipeline, *self.observers), advising:
            result = self._running.train(
                arguments[1:],
                microbatches,
                number=total_batches(trainer),
                accumulate=trainer.accumulate_grad_batches,
                is_first=is_first,
                is_last=not self._accumulating,
                unseen=zeroed_unseen(self._module, self.optimizers) if is_first else (),
                context=self.precision_plugin.train_step_context,
                scale=scaler.scale if scaler is not None else None,
                observe_buckets=self.observe_buckets,
            )
        return SKIPPED if result is None else result

    def _train_by_hand(self, arguments: tuple[Any, ...], microbatches: list[Any] | None) -> Any:
        module, plugin = self._module, self.precision_plugin
        assert self.pipeline is not None
        scaler = getattr(plugin, "scaler", None)
        if scaler is not None:
            scaler.scale(torch.zeros((), device=self.root_device))  # where it makes its scale, on ranks without a loss
        outside = self._outside

        def published(loss: Tensor | None) -> None:
            if loss is not None:
                plugin.pre_backward(loss, module)
            self._running.publish_gradients()
            plugin.post_backward(torch.zeros(()), module)  # of which it calls hooks

        def update(optimizer: Optimizer, do: Callable[[Closure | None], Any], closure: Closure | None) -> Any:
            def closed() -> Any:
                loss = None if closure is None else closure()
                self._stage_optimizers.before_update(optimizer)
                return loss

            with self._updating(optimizer):
                if closure is not None:
                    return do(closed)
                closed()
                return do(None)

        calls = batch_calls_met(
            module,
            update,
            inside=nullcontext if outside is None else outside.entered,
            aside=nullcontext if outside is None else outside.aside,
        )
        with observed(self.pipeline, *self.observers), calls:
            result = self._running.train_by_hand(
                arguments[1:],
                microbatches,
                number=total_batches(module.trainer),
                context=plugin.train_step_context,
                scale=scaler.scale if scaler is not None else None,
                published=published,
                needs_losses=has_hook("on_before_backward", module),
                observe_buckets=self.observe_buckets,
            )
        self._stage_optimizers.replace(self._running.shard())
        return result

    @override
    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        context = self.precision_plugin.val_step_context
        return self._evaluate("validation_step", super().validation_step, context, (*args, *kwargs.values()))

    @override
    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        context = self.precision_plugin.test_step_context
        return self._evaluate("test_step", super().test_step, context, (*args, *kwargs.values()))

    @override
    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        context = self.precision_plugin.predict_step_context
        return self._evaluate("predict_step", super().predict_step, context, (*args, *kwargs.values()))

    @override
    @apart
    def on_validation_start(self) -> None:
        self.agree_on_evaluation("validation", self._module.trainer.num_val_batches)
        self._signals.pause(True)
        self._running.gather_parameters()

    @override
    @apart
    def on_validation_end(self) -> None:
        self._running.release_parameters()
        self._signals.pause(False)

    @override
    @apart
    def on_test_start(self) -> None:
        self.agree_on_evaluation("test", self._module.trainer.num_test_batches)
        self._running.gather_parameters()

    @override
    @apart
    def on_predict_start(self) -> None:
        self.agree_on_evaluation("prediction", self._module.trainer.num_predict_batches)
        self._running.gather_parameters()

    @override
    @apart
    def on_predict_end(self) -> None:
        self._running.release_parameters()

    on_test_end = on_predict_end

    def _with_batch(self, batch: Any, *others: Any) -> tuple[Any, ...]:
        """Arguments of a step that begin with a batch: where that is a dataloader_iter, the one that it gives."""
        is_whole = self._is_alone and self.num_microbatches in (None, 1)
        if not isinstance(batch, Iterator) or is_whole:
            return batch, *others
        taken, *OneBatch.place = next(batch)
        return OneBatch(self.batch_to_device(taken, self.root_device)), *others

    @apart
    def _evaluate(
        self, name: str, plain: Callable[..., Any], context: Callable[[], Any], arguments: tuple[Any, ...]
    ) -> Any:
        """Run an evaluation step. `plain`: Lightning's own, of one process with the whole batch."""
        arguments = self._with_batch(*arguments)
        self._cut_before_step(name, arguments, context)
        microbatches = self._running.split(arguments[0])
        if self._is_alone and microbatches is not None and len(microbatches) == 1:
            with self._running.whole_evaluation_batch(name, arguments[1:]).running():
                return plain(*microbatches, *arguments[1:])
        return self._running.evaluate(name, arguments[1:], microbatches, context)

    def _go_back(self, backward: Callable[..., Any], loss: Tensor, *args: Any, **kwargs: Any) -> None:
        """Where a precision plugin runs a backward: the schedule has run it, and its gradients appear."""
        if self._whole_batch is not None:
            with self._whole_batch.going_back():
                backward(loss, *args, **kwargs)
            return
        with nullcontext() if self._outside is None else self._outside.aside():
            self._running.publish_gradients()
            self._stage_optimizers.replace(self._running.shard())

    @override
    def optimizer_step(
        self,
        optimizer: Optimizer,
        closure: Callable[[], Any],
        model: LightningModule | nn.Module | None = None,
        **kwargs: Any,
    ) -> Any:
        with self._updating(optimizer):
            return super().optimizer_step(optimizer, closure, model, **kwargs)

    @contextmanager
    def _updating(self, optimizer: Optimizer) -> Generator[None, None, None]:
        """Around an update."""
        # An optimizer of the user's may look at all parameters at once, as for a norm.
        is_plain = self._outside is None or knows_no_others(inner(optimizer))
        outside = self._outside
        with nullcontext() if outside is None else outside.aside() if is_plain else outside.entered(shows_states=False):
            yield
        self._stage_optimizers.after_update(optimizer)

    @contextmanager
    @override
    def block_backward_sync(self) -> Generator[None, None, None]:
        self._accumulating = True
        try:
            yield
        finally:
            self._accumulating = False

    # -- clipping ---------------------------------------------------------------------------------------------------

    @apart
    def grad_norm(self, norm_type: float = 2.0) -> Tensor:
        """The norm of the whole model's gradients, over stages and replicas; each shared parameter counts once.

        For a hook such as `on_before_optimizer_step`, to log it. All ranks must call it.
        """
        return self._stage_optimizers.grad_norm(norm_type)

    # -- end --------------------------------------------------------------------------------------------------------

    @override
    @apart
    def on_exception(self, exception: BaseException) -> None:
        if self._failed or self._signals.ends_all(exception):
            return
        self._failed = True
        self._set_up_for = None  # another run needs connections of its own
        if self._notice is not None:
            self._notice.publish(exception)  # before connections close and wake others up
        if self.replicas is not None:
            self.replicas.close()
        if self._notice is not None:
            self._notice.fail(exception)
        super().on_exception(exception)

    @override
    def teardown(self) -> None:
        self._installed.close()
        end_idle_threads()
        if self._failed:
            self._background.abandon()
        self._background.wait()
        self._let_processes_end()
        self.agree("the end of the run", {}, is_last=True)
        if self._runner is not None:
            self._runner.held.to_cpu()
            if self._module.trainer.state.status != TrainerStatus.INTERRUPTED:  # which has no time
                self._runner.held.make_whole(self.num_processes)
                if self._outside is not None:
                    self._outside.make_whole(self.num_processes)
        if self.transport is not None and not self._failed:
            # A process may end after this, and one that ends with messages unread breaks its peers' connections.
            self.transport.flush()
            self.transport.barrier("the end of the run")
        self.precision_plugin.teardown()
        assert self.accelerator is not None and self.cluster_environment is not None
        self.accelerator.teardown()
        self.checkpoint_io.teardown()
        self.cluster_environment.teardown()


def _log_action(span: Span) -> None:
    action, start, end = span
    logger.debug("ran %s in %.2f ms", action, 1e3 * (end - start))


def _without_overrides(given: Any) -> Any:
    """What a Trainer gave, without what stands for its methods in a run."""
    overridden = [name for name in getattr(given, "__dict__", ()) if callable(getattr(type(given), name, None))]
    if not overridden:
        return given
    plain = copy.copy(given)
    for name in overridden:
        del vars(plain)[name]
    return plain


def _asked_for(cls: type[PipelineStrategy], arguments: Any, given_later: dict[str, Any]) -> PipelineStrategy:
    args, kwargs = arguments
    made = cls(*args, **kwargs)
    for name, value in given_later.items():
        setattr(made, name, value)
    return made


def made_by_name(**options: Any) -> PipelineStrategy:
    """What ``Trainer(strategy="pipeline")`` uses.

    Args:
        options: that the name stands for; others come from the environment.
    """
    return PipelineStrategy(**{**options_in_environment(PipelineStrategy, _GIVEN_BY_TRAINER), **options})


def pipeline_of(trainer: Trainer) -> PipelineStrategy | None:
    """The Trainer's strategy, where it is this one; also where the Trainer is of Lightning's other name."""
    strategy: Any = trainer.strategy
    return strategy if is_pipeline(strategy) else None


def sync_pipeline_shared_parameters(module: LightningModule) -> None:
    """Give every stage that holds a shared parameter its owner's value: the first stage that uses it.

    Training keeps them equal by itself, and so does loading a checkpoint through the Trainer. This is for weights that
    were changed by hand on one stage. All ranks must call it; with one stage it does nothing. After MindSpore's
    function of this name.

    Args:
        module: a module that a Trainer with the pipeline strategy has set up.

    Raises:
        ValueError: the module is attached to no such Trainer.
    """
    strategy = pipeline_of(module._trainer) if module._trainer is not None else None
    if strategy is None or strategy.ownership is None:
        raise ValueError(
            f"{type(module).__name__} is not set up by a pipeline; call sync_pipeline_shared_parameters in a hook, or "
            f"after trainer.fit, validate, test or predict with PipelineStrategy"
        )
    holders = strategy.ownership.holders
    shared = {
        id(parameter): (parameter, holders[name])
        for name, parameter in module.named_parameters(remove_duplicate=False)
        if len(holders[name]) > 1
    }
    spread_from_owner(list(shared.values()), strategy.transport, strategy.ownership.stage)
