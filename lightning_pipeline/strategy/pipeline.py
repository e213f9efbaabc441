"""PipelineStrategy: trains an unmodified LightningModule with one stage per device."""

from __future__ import annotations

import json
from collections.abc import Callable, Generator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.distributed.constants import default_pg_timeout
from torch.optim import Optimizer
from typing_extensions import override

from lightning_pipeline._registration import adopted_by, is_pipeline, refuse_fabric
from lightning_pipeline.engine.pipeline import Pipeline
from lightning_pipeline.engine.shared_parameters import spread_from_owner
from lightning_pipeline.engine.suspended import end_idle_threads
from lightning_pipeline.partition.ownership import Ownership
from lightning_pipeline.partition.stage_config import StageConfig, read_stage_config
from lightning_pipeline.planning.plan import StagePlan
from lightning_pipeline.runtime import backends
from lightning_pipeline.runtime.failure import waiting_for
from lightning_pipeline.runtime.replicas import Replicas, all_gather
from lightning_pipeline.runtime.topology import Topology
from lightning_pipeline.runtime.transport import Transport

from .._lightning import (
    Accelerator,
    CheckpointIO,
    ClusterEnvironment,
    LightningModule,
    Precision,
    ReduceOp,
    Trainer,
    TrainerFn,
    TrainerStatus,
)
from ..checkpoint.files import AtomicCheckpointIO
from ..checkpoint.weights import Weights
from . import validation
from .checkpointing import Checkpoints
from .copying import GIVEN_BY_TRAINER, reduced, remembering
from .dataloading import has_length
from .hooks import apart
from .lightning_private import checkpoint_io_or, leave_module_uncompiled, leave_modules_unnamed, note_mesh
from .measure import after_batch
from .partitioner import num_stages_for
from .peers import EVEN, evaluation_of, parts_of, training_of
from .processes import ProcessStrategy
from .schedule_choice import Advice, Observer, ScheduleArgument, ScheduleChoice
from .session import Session
from .tensor_parallel import TensorGroup
from .validation import options_in_environment


class PipelineStrategy(ProcessStrategy):
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

    @remembering
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
        self.stage_config = stage_config
        self.num_stages = num_stages
        self.num_microbatches = num_microbatches
        self.schedule = schedule
        self.schedule_choice = ScheduleChoice(schedule)
        self.max_live_microbatches = max_live_microbatches
        self.gradients_mean = gradients_mean
        self.data_parallel = validation.data_parallel_of(data_parallel, opt_shard=opt_shard)
        self.tensor_parallel_size = tensor_parallel_size
        self.weights = weights
        self.loss_reduction = loss_reduction
        self.output_broadcast = output_broadcast
        self.save_distributed_checkpoint = save_distributed_checkpoint
        validation.check_arguments(self, self.schedule_choice)
        self.weights_only: bool | None = None
        """What the Trainer's function was given, which Lightning passes on only where it restores before set-up."""
        self.observers: set[Observer] = set()
        """Each gets every action of training steps with its start and end."""
        self.observe_buckets: Callable[[int, float, float], None] | None = None
        """Gets what `PipelineGradReducer.observe` does, in every step that sums gradients over replicas."""
        self.tensor_group: TensorGroup | None = None
        self._session: Session | None = None
        self._checkpoints = Checkpoints(self)
        self._accumulating = False
        self._told_replicas: int | None = None  # in this run, before set-up
        self._restores_late: bool | None = None  # in this run, once somebody has asked

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "__init__" in vars(cls):
            cls.__init__ = remembering(cls.__init__)  # type: ignore[method-assign]

    def __reduce__(self) -> tuple[Any, ...]:
        return reduced(self)

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

    # -- what set-up makes ------------------------------------------------------------------------------------------

    @property
    def session(self) -> Session:
        """The module in stages, from set-up on."""
        assert self._session is not None
        return self._session

    @property
    def topology(self) -> Topology | None:
        """Which rank holds which stage of which replica; None before set-up."""
        return self._session.connections.topology if self._session is not None else None

    @property
    def transport(self) -> Transport | None:
        """The connection between the stages; None with one stage, or before set-up."""
        return self._session.connections.transport if self._session is not None else None

    @property
    def replicas(self) -> Replicas | None:
        """The ranks that run this rank's stages on other samples; None if there are none, or before set-up."""
        return self._session.connections.replicas if self._session is not None else None

    @property
    def ownership(self) -> Ownership | None:
        """Which stages hold each parameter and buffer; None before set-up."""
        return self._session.ownership if self._session is not None else None

    @property
    def pipeline(self) -> Pipeline | None:
        """What runs this rank's stages; None before set-up."""
        return self._session.pipeline if self._session is not None else None

    @property
    def plan(self) -> StagePlan | None:
        """Where the module was cut automatically, and what is expected of it; None where it was not."""
        return self._session.partitioner.plan if self._session is not None else None

    @property
    def peak_live(self) -> int:
        """The most activations of virtual stages that were live on this rank at once in a training step so far."""
        return self._session.runner.peak_live if self._session is not None else 0

    @property
    def advice(self) -> Advice | None:
        """What schedule="auto" chose; None until it has."""
        advisor = self._session.advisor if self._session is not None else None
        return advisor.advice if advisor is not None else None

    def topology_of(self, num_stages: int) -> Topology:
        """That of so many stages on these processes."""
        return Topology(
            num_ranks_per_pipeline=num_stages,
            world_size=self.world_size,
            rank=self.global_rank,
            tensor_parallel_size=self.tensor_parallel_size,
        )

    # -- set-up -----------------------------------------------------------------------------------------------------

    @override
    def setup_environment(self) -> None:
        super().setup_environment()
        self._restores_late = self._told_replicas = None
        self._checkpoints.begin()
        if self.tensor_parallel_size > 1:
            assert self.num_stages is not None  # or `check_arguments` has refused it
            mesh = validation.check_one_replica(self.topology_of(self.num_stages)).mesh(self.root_device.type)
            note_mesh(self.module, mesh)
            self.tensor_group = TensorGroup(mesh["tensor_parallel"].get_group())

    @override
    def settings(self) -> dict[str, str]:
        asked = {name: str(getattr(self, name)) for name in validation.ALIKE}
        return {**super().settings(), **asked, "schedule": self.schedule_choice.label}

    @override
    def _num_replicas(self, world_size: int) -> int:
        if self.topology is not None:
            return self.topology.data_parallel_size
        config = read_stage_config(self.module, self.stage_config)
        num_stages = self.num_stages or num_stages_for(config, self.schedule_choice, world_size)
        self._told_replicas = max(1, world_size // (num_stages * self.tensor_parallel_size))
        return self._told_replicas

    @property
    @override
    def restore_checkpoint_after_setup(self) -> bool:
        # Before, hooks and callbacks find what they do without a pipeline; after, where set-up is what gives the module
        # its memory, each rank reads what it holds. Set-up may take memory away, too, and Lightning asks on both sides.
        if self._restores_late is None:
            is_empty = any(parameter.is_meta for parameter in self.module.parameters())
            self._restores_late = is_empty or self.weights is not None
            self.peers.agree("the set-up of the pipeline", {"parameters without memory": str(is_empty)})
        return self._restores_late

    @override
    def setup(self, trainer: Trainer) -> None:
        assert self.accelerator is not None
        self.accelerator.setup(trainer)
        module = self.module
        validation.check_module(module, trainer)
        validation.check_precision(self.precision_plugin, is_alone=self.is_single_process)
        if not self.is_single_process:
            leave_modules_unnamed(trainer)
            leave_module_uncompiled(module)
        self.precision_plugin.convert_module(module)
        self._set_up_session(module)
        self._checkpoints.load_put_off()
        self.model_to_device()
        self.session.begin()
        if trainer.state.fn == TrainerFn.FITTING:
            self.setup_optimizers(trainer)
            self.session.take_optimizers()
        self.setup_precision_plugin()
        self.session.install()

    def _set_up_session(self, module: LightningModule) -> None:
        config = read_stage_config(module, self.stage_config)
        num_stages = self.num_stages or num_stages_for(config, self.schedule_choice, self.world_size)
        # Before whatever ranks do otherwise that cut the model otherwise.
        cut = {"stage_config": json.dumps(config, sort_keys=True, default=str), "num_stages": str(num_stages)}
        self.peers.agree("the set-up of the pipeline", {**parts_of(module), **cut})
        session = self._session
        if session is not None and not session.is_over and (session.module, session.num_stages) == (module, num_stages):
            session.stages.release_remote()
            return
        replicas = self.topology_of(num_stages).data_parallel_size
        if self._told_replicas not in (None, replicas):
            raise ValueError(
                f"a hook that sets data up was told of {self._told_replicas} replicas (trainer.world_size), and "
                f"stage_config, which came after it, makes {replicas}: give PipelineStrategy num_stages={num_stages}"
            )
        self._session = Session(self, module, config, num_stages)

    @override
    def model_to_device(self) -> None:
        self.session.stages.local.to_device()

    @contextmanager
    @override
    def tensor_init_context(self, empty_init: bool | None = None) -> Generator[None, None, None]:
        # On the CPU: the whole model on the device is what does not fit. Empty ones get their data in set-up.
        with torch.device("meta") if empty_init else nullcontext(), self.precision_plugin.tensor_init_context():
            yield

    # -- data and replicas ------------------------------------------------------------------------------------------

    @override
    @apart
    def process_dataloader(self, dataloader: object) -> object:
        if self.is_single_process:
            return dataloader
        stage = self.module.trainer.state.stage
        assert stage is not None  # during a run
        length = "known" if has_length(dataloader) else "unknown"
        self.peers.agree(f"the {stage.dataloader_prefix}_dataloader", {"length of the data": length})
        return self.session.shared_loader(dataloader)

    @override
    @apart
    def batch_to_device(self, batch: Any, device: torch.device | None = None, dataloader_idx: int = 0) -> Any:
        if self._session is not None and not self._session.gets_batches:
            return batch
        return super().batch_to_device(batch, device, dataloader_idx)

    @property
    def is_distributed(self) -> bool:
        """Whether several replicas see different data, so that Lightning shares it out and reduces over them."""
        return self.replicas is not None

    @property
    @override
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        topology = self.session.connections.topology
        return {"num_replicas": topology.data_parallel_size, "rank": topology.replica}

    @override
    def reduce(self, tensor: Any, group: Any | None = None, reduce_op: ReduceOp | str | None = "mean") -> Any:
        """Over replicas: within a pipeline every rank has the same value."""
        if self.replicas is None or not isinstance(tensor, Tensor):
            return tensor
        with waiting_for("a reduction over replicas"):
            return backends.reduce(tensor, reduce_op, self.replicas.group)

    @override
    def all_gather(self, tensor: Tensor, group: Any | None = None, sync_grads: bool = False) -> Tensor:
        """Over replicas: [num_replicas, ...], or the tensor as it is where there is one."""
        if self.replicas is None:
            return tensor
        return all_gather(tensor, self.replicas.group, sync_grads=sync_grads)

    # -- steps ------------------------------------------------------------------------------------------------------

    def aside(self) -> AbstractContextManager[None]:
        """While entered, within a hook, the strategy works on this rank's tensors as they are."""
        return nullcontext() if self._session is None else self._session.stages.aside()

    @override
    def on_train_start(self) -> None:
        self.peers.agree_once("training", training_of(self.module.trainer), way_out=EVEN)

    @override
    @apart
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """Cut before the step, which an optimizer's update may be around."""
        if batch is not None:  # else the step takes it from a dataloader_iter
            self.session.cut_before_training((batch, *after_batch(self.module, batch_idx)))

    @override
    @apart
    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        return self.session.train(super().training_step, (*args, *kwargs.values()), is_last=not self._accumulating)

    @override
    @apart
    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        return self.session.evaluate("validation_step", super().validation_step, (*args, *kwargs.values()))

    @override
    @apart
    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        return self.session.evaluate("test_step", super().test_step, (*args, *kwargs.values()))

    @override
    @apart
    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        return self.session.evaluate("predict_step", super().predict_step, (*args, *kwargs.values()))

    @override
    @apart
    def on_validation_start(self) -> None:
        self._begin_evaluation("validation", self.module.trainer.num_val_batches)

    @override
    @apart
    def on_test_start(self) -> None:
        self._begin_evaluation("test", self.module.trainer.num_test_batches)

    @override
    @apart
    def on_predict_start(self) -> None:
        self._begin_evaluation("prediction", self.module.trainer.num_predict_batches)

    def _begin_evaluation(self, kind: str, num_batches: list[int | float]) -> None:
        session = self.session
        self.peers.agree_once(kind, evaluation_of(kind, num_batches, session.connections.topology.replica))
        session.signals.pause(True)
        session.stages.gather_parameters()

    @override
    @apart
    def on_validation_end(self) -> None:
        self.session.stages.release_parameters()
        self.session.signals.pause(False)

    on_test_end = on_predict_end = on_validation_end

    @override
    def optimizer_step(
        self,
        optimizer: Optimizer,
        closure: Callable[[], Any],
        model: LightningModule | nn.Module | None = None,
        **kwargs: Any,
    ) -> Any:
        with self.session.updating(optimizer):
            return super().optimizer_step(optimizer, closure, model, **kwargs)

    @contextmanager
    @override
    def block_backward_sync(self) -> Generator[None, None, None]:
        self._accumulating = True
        try:
            yield
        finally:
            self._accumulating = False

    @apart
    def grad_norm(self, norm_type: float = 2.0) -> Tensor:
        """The norm of the whole model's gradients, over stages and replicas; each shared parameter counts once.

        For a hook such as `on_before_optimizer_step`, to log it. All ranks must call it.
        """
        return self.session.optimizers.grad_norm(norm_type)

    # -- checkpoints ------------------------------------------------------------------------------------------------

    @apart
    def gather_module(self) -> LightningModule | None:
        """On rank 0 a copy of the module with all weights, on the CPU, to save or export; None elsewhere.

        All ranks must call it, in a hook or after fit, validate, test or predict.
        """
        return self._checkpoints.gather_module()

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
    def lightning_module_state_dict(self) -> dict[str, Any]:
        return self._checkpoints.module_state(super().lightning_module_state_dict)

    @override
    @apart
    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        return self._checkpoints.optimizer_state(super().optimizer_state, optimizer)

    @override
    @apart
    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: str | Path, storage_options: Any | None = None
    ) -> None:
        self._checkpoints.save(super().save_checkpoint, checkpoint, filepath, storage_options)

    @override
    @apart
    def remove_checkpoint(self, filepath: str | Path) -> None:
        self._checkpoints.background.wait()  # it may be this one
        super().remove_checkpoint(filepath)

    @override
    @apart
    def load_checkpoint(self, checkpoint_path: str | Path, weights_only: bool | None = None) -> dict[str, Any]:
        return self._checkpoints.load(super().load_checkpoint, checkpoint_path, weights_only)

    @override
    @apart
    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        self._checkpoints.load_module(super().load_model_state_dict, checkpoint, strict=strict)

    @override
    @apart
    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        self._checkpoints.load_optimizers(super().load_optimizer_state_dict, checkpoint)

    # -- end --------------------------------------------------------------------------------------------------------

    def ends_all_ranks(self, error: BaseException) -> bool:
        """Whether `error` ends all ranks after the same batch, so that they can still work together."""
        return self._session is not None and self._session.signals.ends_all(error)

    @override
    @apart
    def on_exception(self, exception: BaseException) -> None:
        if not self.peers.has_failed and not self.ends_all_ranks(exception):
            self.peers.fail(exception, disconnect=self._session.close if self._session is not None else lambda: None)

    @override
    def teardown(self) -> None:
        session, has_failed = self._session, self.peers.has_failed
        if session is not None:
            session.uninstall()
        end_idle_threads()
        if has_failed:
            self._checkpoints.background.abandon()
        self._checkpoints.background.wait()
        self.let_processes_end()
        if session is not None:
            session.stages.local.to_cpu()
            if self.module.trainer.state.status != TrainerStatus.INTERRUPTED:  # which has no time
                session.leave_module(self.num_processes)
        if self.transport is not None and not has_failed:
            # A process may end after this, and one that ends with messages unread breaks its peers' connections.
            self.transport.flush()
            self.transport.barrier("the end of the run")
        self.precision_plugin.teardown()
        assert self.accelerator is not None
        self.accelerator.teardown()
        self.checkpoint_io.teardown()
        self.environment.teardown()


def made_by_name(**options: Any) -> PipelineStrategy:
    """What ``Trainer(strategy="pipeline")`` uses.

    Args:
        options: that the name stands for; others come from the environment.
    """
    return PipelineStrategy(**{**options_in_environment(PipelineStrategy, GIVEN_BY_TRAINER), **options})


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
