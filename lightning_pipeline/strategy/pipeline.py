"""PipelineStrategy: trains an unmodified LightningModule with one stage per device."""

from __future__ import annotations

from datetime import timedelta
from typing import Any, NoReturn

import torch
from torch.distributed.constants import default_pg_timeout
from typing_extensions import override

from lightning_pipeline._registration import adopted_by, is_pipeline, refuse_fabric
from lightning_pipeline.partition.ownership import holders_of
from lightning_pipeline.partition.stage_config import StageConfig, read_stage_config
from lightning_pipeline.runtime.topology import Topology

from .._lightning import (
    Accelerator,
    CheckpointIO,
    ClusterEnvironment,
    LightningModule,
    Precision,
    Trainer,
)
from ..checkpoint.weights import Weights
from . import validation
from .copying import GIVEN_BY_TRAINER, reduced, remembering
from .lightning_private import note_mesh
from .partitioner import num_stages_for
from .schedule_choice import ScheduleArgument, ScheduleChoice
from .session import Session, session_for
from .session_strategy import SessionStrategy
from .tensor_parallel import TensorGroup
from .validation import options_in_environment


class PipelineStrategy(SessionStrategy):
    """Trains a LightningModule over several devices, each holding one stage of it.

    Args:
        stage_config: the stages of modules, by name. A module without an entry runs on the stage where its input is, so
            the first module of each later stage is enough: ``{"layer3": 1}``. ``{"layer3": "1@0"}`` also names the rank
            of the stage, counted within a pipeline. None takes the module's own ``stage_config``, else the
            ``pipeline_stage`` attributes of its submodules, else "auto". For a schedule of virtual stages it numbers
            these along the data, or names the device that holds them (``resolve``). "auto" measures the first step,
            tries the best cuts and keeps the fastest (see ``Partitioner`` and `plan`). A path is that of a plan that
            `StagePlan.save` has written.
        num_stages: number of stages, each on a device of its own; default: as many as the stage_config uses, with
            virtual stages as many as there are devices. 1 runs the same path on one device.
        num_microbatches: micro-batches a step, at least ``num_stages``; default: ``4 * num_stages``, or the number that
            a schedule from a file is made for. "auto" chooses it along with an automatic cut, and is the default
            elsewhere.
        schedule: "1f1b", "gpipe", "zero_bubble", "zero_bubble_h2"; with several virtual stages on a device
            "interleaved_1f1b", "interleaved_1f1b_low_memory", "looped_bfs", "interleaved_zero_bubble", or in a V "zbv",
            "v_half", "v_min", "dualpipe_v"; the path of a ``.csv`` file in torch.distributed.pipelining's compute-only
            format; a ``Schedule``; or a function ``(num_stages, num_microbatches) -> schedule`` (see
            ``ScheduleChoice``). "auto" measures the first steps and then uses the fastest schedule (see
            ``Advisor``); "optimized" searches for a faster order then, and writes it to ``optimized.csv`` in the
            trainer's ``default_root_dir`` (see ``schedules.optimize``).
        max_live_microbatches: with "auto" and "optimized", the most micro-batches whose activations a device may hold.
        max_live_bytes: with "optimized", the most bytes of activations that a device may hold. What each stage saves of
            a micro-batch for its backward is measured in the first steps, which hold one micro-batch at a time.
        offload_activations: True, or a share between 0 and 1 of a stage's bytes: what micro-batches have saved goes to
            pinned host memory while they wait, and comes back while the action before their backward runs. Only those
            go whose absence lowers the most that a device holds (``schedules.offloading``). Results are the same bits.
        gradients_mean: gradients are averaged over replicas; else summed.
        data_parallel: "replicate" keeps a stage's parameters and optimizer state whole on each of its replicas; "zero1"
            shards the optimizer state and the update (see ``OptimizerShards``); "fsdp" also shards parameters and
            gradients, from the first training step on (see ``FullySharded``). Checkpoints are the same files.
        opt_shard: MindSpore's name: True is ``data_parallel="zero1"``.
        tensor_parallel_size: ranks among which `configure_model` splits the tensors of each replica of a stage, by
            ``parallelize_module(..., self.device_mesh["tensor_parallel"], ...)``; needs ``num_stages``.
        context_parallel_size: ranks among which the sequences of each replica of a stage are cut, with ring attention
            for ``scaled_dot_product_attention``; what mixes positions in another way gets the whole sequence. Needs
            ``num_stages`` and a stage_config.
        weights: files of weights to start from, of which each rank reads what it holds (see ``load_weights``).
        loss_reduction: the step's loss is the "mean" over micro-batches, weighted by samples, or their "sum", for
            losses that are sums over samples (see ``is_sum_over_samples``). It is logged accordingly.
        output_broadcast: outputs of validation, test and predict steps reach every rank; else they stay on the last
            stage.
        save_distributed_checkpoint: checkpoints are folders in torch.distributed.checkpoint's format, to which all
            ranks write at once what they hold. Both kinds can be loaded either way.
        process_group_backend: default: that of the device, hccl for npu, nccl for cuda and gloo for cpu.
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
        max_live_bytes: int | None = None,
        offload_activations: bool | float = False,
        gradients_mean: bool = True,
        data_parallel: str = "replicate",
        opt_shard: bool = False,
        tensor_parallel_size: int = 1,
        context_parallel_size: int = 1,
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
            save_distributed_checkpoint=save_distributed_checkpoint,
        )
        self.stage_config = stage_config
        self.num_stages = num_stages
        self.num_microbatches = num_microbatches
        self.schedule = schedule
        self.schedule_choice = ScheduleChoice(schedule)
        self.max_live_microbatches = max_live_microbatches
        self.max_live_bytes = max_live_bytes
        self.offload_activations = offload_activations
        self.gradients_mean = gradients_mean
        self.data_parallel = validation.data_parallel_of(data_parallel, opt_shard=opt_shard)
        self.tensor_parallel_size = tensor_parallel_size
        self.context_parallel_size = context_parallel_size
        self.weights = weights
        self.loss_reduction = loss_reduction
        self.output_broadcast = output_broadcast
        validation.check_arguments(self, self.schedule_choice)
        self.tensor_group: TensorGroup | None = None
        self.context_group: TensorGroup | None = None
        self._restores_late: bool | None = None  # in this run; None until Lightning has asked

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
        # This is the first thing that a Trainer sets. If it is of Lightning's other name, so must the strategy be.
        adopted = adopted_by(type(self), accelerator)
        if adopted is not None:
            args, kwargs = self._arguments
            self.__class__ = adopted
            self.__init__(*args, **kwargs)  # type: ignore[misc]
        self._accelerator = accelerator

    @property
    def _precision(self) -> NoReturn:
        refuse_fabric()  # which alone asks for it

    # -- set-up -----------------------------------------------------------------------------------------------------

    def topology_of(self, num_stages: int) -> Topology:
        """The topology of this run's processes with so many stages."""
        return Topology(
            num_ranks_per_pipeline=num_stages,
            world_size=self.world_size,
            rank=self.global_rank,
            tensor_parallel_size=self.tensor_parallel_size,
            context_parallel_size=self.context_parallel_size,
        )

    @override
    def setup_environment(self) -> None:
        super().setup_environment()
        self._restores_late = self.told_replicas = None
        if self.tensor_parallel_size > 1 or self.context_parallel_size > 1:
            assert self.num_stages is not None  # or `check_arguments` has refused it
            group = TensorGroup.shared(self.topology_of(self.num_stages), self.root_device.type, self.timeout)
            if self.tensor_parallel_size > 1:
                self.tensor_group = group
                note_mesh(self.module, group.mesh)
            else:
                self.context_group = group

    @override
    def settings(self) -> dict[str, str]:
        asked = {name: str(getattr(self, name)) for name in validation.ALIKE}
        return {**super().settings(), **asked, "schedule": self.schedule_choice.label}

    @override
    def topology_in_run(self) -> Topology:
        if self.topology is not None:
            return self.topology
        config = {} if self.lightning_module is None else read_stage_config(self.module, self.stage_config)
        return self.topology_of(self.num_stages or num_stages_for(config, self.schedule_choice, self.world_size))

    @property
    @override
    def restore_checkpoint_after_setup(self) -> bool:
        # Before set-up, hooks and callbacks find the whole module, as without a pipeline. After it, each rank reads
        # what it holds, which is needed where set-up creates the parameters. Lightning asks before and after set-up,
        # which may also release parameters, so the answer is kept.
        if self._restores_late is None:
            # A run that an error has ended may have left some ranks all parameters, and placeholders to others.
            parameters = self.module.parameters()
            is_empty = any(parameter.is_meta or holders_of(parameter) is not None for parameter in parameters)
            self._restores_late = is_empty or self.weights is not None
            self.peers.agree("the set-up of the pipeline", {"parameters without memory": str(is_empty)})
        return self._restores_late

    @override
    def open_session(self, module: LightningModule) -> Session:
        return session_for(self, module, self._session)


def made_by_name(**options: Any) -> PipelineStrategy:
    """The strategy of ``Trainer(strategy="pipeline")`` and the other names.

    Args:
        options: those of the name; others come from the environment.
    """
    return PipelineStrategy(**{**options_in_environment(PipelineStrategy, GIVEN_BY_TRAINER), **options})


def pipeline_of(trainer: Trainer) -> PipelineStrategy | None:
    """The Trainer's strategy if it is a PipelineStrategy of either name of Lightning, else None."""
    strategy: Any = trainer.strategy
    return strategy if is_pipeline(strategy) else None
