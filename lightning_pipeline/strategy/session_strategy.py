"""Lightning's calls during a run, handed on to the session of the module."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Generator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from typing_extensions import override

from lightning_pipeline.engine.pipeline import Pipeline
from lightning_pipeline.engine.suspended import end_idle_threads
from lightning_pipeline.partition.ownership import Ownership
from lightning_pipeline.partition.users_code import in_hook
from lightning_pipeline.planning.plan import StagePlan
from lightning_pipeline.recording.one_rank import is_first_alone
from lightning_pipeline.recording.patched_torch import running_recording
from lightning_pipeline.runtime.replicas import Replicas
from lightning_pipeline.runtime.topology import Topology
from lightning_pipeline.runtime.transport import Transport

from .._lightning import CheckpointIO, LightningModule, Trainer, TrainerFn, TrainerStatus
from ..checkpoint.files import AtomicCheckpointIO
from . import validation
from .advisor import Advice, Observer
from .checkpointing import Checkpoints
from .dataloading import has_length
from .hooks import on_local_tensors, with_all_ranks
from .lightning_private import checkpoint_io_or, leave_module_uncompiled, leave_modules_unnamed
from .measure import after_batch
from .peers import EVEN, evaluation_of, training_of
from .processes import ProcessStrategy
from .session import Session

T = TypeVar("T")


class _FromSession(Generic[T]):
    """An attribute of the strategy that its session has; `default` before set-up."""

    def __init__(self, get: Callable[[Session], T], default: T) -> None:
        self._get, self._default = get, default

    def __get__(self, strategy: Any, owner: type) -> T:
        session = strategy._session if strategy is not None else None
        return self._default if session is None else self._get(session)


class SessionStrategy(ProcessStrategy):
    """Adapts the methods that Lightning calls on a strategy to `Session`, `Checkpoints` and `Peers`."""

    topology = _FromSession[Topology | None](lambda session: session.topology, None)
    """Which rank holds which stage of which replica. Like most of the following it is None before set-up."""
    transport = _FromSession[Transport | None](lambda session: session.transport, None)
    """The connection between the stages; None with one stage."""
    replicas = _FromSession[Replicas | None](lambda session: session.replicas, None)
    """The ranks that run this rank's stages on other samples; None if there are none."""
    ownership = _FromSession[Ownership | None](lambda session: session.ownership, None)
    """Which stages hold each parameter and buffer."""
    pipeline = _FromSession[Pipeline | None](lambda session: session.pipeline, None)
    """Runs this rank's stages."""
    plan = _FromSession[StagePlan | None](lambda session: session.partitioner.plan, None)
    """The automatic cut, with its expected costs; None if the module is cut by stage_config."""
    advice = _FromSession[Advice | None](lambda session: session.advice, None)
    """The choice of schedule="auto"; None until it is made."""
    peak_live = _FromSession[float](lambda session: session.runner.peak_live, 0)
    """The most activations of virtual stages that were live on this rank at once in a training step so far."""

    def __init__(self, *args: Any, save_distributed_checkpoint: bool, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.save_distributed_checkpoint = save_distributed_checkpoint
        self.weights_only: bool | None = None
        """The argument of the Trainer's function, which Lightning passes on only if it restores before set-up."""
        self.observers: set[Observer] = set()
        """Each is called with every action of training steps, with its start and end."""
        self.observe_buckets: Callable[[int, float, float], None] | None = None
        """Is called as `PipelineGradReducer.observe`, in every step that sums gradients over replicas."""
        self._session: Session | None = None
        self._checkpoints = Checkpoints(self)
        self._accumulating = False

    @abstractmethod
    def open_session(self, module: LightningModule) -> Session:
        """The session of a module in a run, which may be that of the run before."""

    @property
    def session(self) -> Session:
        """The module in stages, from set-up on."""
        assert self._session is not None
        return self._session

    # -- set-up -----------------------------------------------------------------------------------------------------

    @override
    def setup_environment(self) -> None:
        super().setup_environment()
        self._checkpoints.begin()

    @override
    def setup(self, trainer: Trainer) -> None:
        assert self.accelerator is not None
        self.accelerator.setup(trainer)
        module = self.module
        validation.check_trainer(trainer)
        validation.check_precision(self.precision_plugin, is_single_process=self.is_single_process)
        if not self.is_single_process:
            leave_modules_unnamed(trainer)
            leave_module_uncompiled(module)
        self.precision_plugin.convert_module(module)
        self._session = session = self.open_session(module)
        self._checkpoints.load_put_off()
        self.model_to_device()
        session.begin()
        if trainer.state.fn == TrainerFn.FITTING:
            with session.stages.entered(shows_states=False):  # optimizers may take copies of parameters
                self.setup_optimizers(trainer)
            session.take_optimizers()
        self.setup_precision_plugin()
        session.install()
        in_hook.is_rank_kept = self.broadcast(in_hook.has_kept_rank)  # in setup, before there are stages

    @override
    def model_to_device(self) -> None:
        self.session.stages.local.to_device()

    @contextmanager
    @override
    def tensor_init_context(self, empty_init: bool | None = None) -> Generator[None, None, None]:
        # On the CPU, as the whole model may not fit on the device. Empty modules get their data in set-up.
        with torch.device("meta") if empty_init else nullcontext(), self.precision_plugin.tensor_init_context():
            yield

    # -- data -----------------------------------------------------------------------------------------------------

    @override
    @on_local_tensors
    def process_dataloader(self, dataloader: object) -> object:
        if self.is_single_process:
            return dataloader
        stage = self.module.trainer.state.stage
        assert stage is not None  # during a run
        length = "known" if has_length(dataloader) else "unknown"
        self.peers.agree(f"the {stage.dataloader_prefix}_dataloader", {"length of the data": length})
        return self.session.shared_loader(dataloader)

    @override
    @on_local_tensors
    def batch_to_device(self, batch: Any, device: torch.device | None = None, dataloader_idx: int = 0) -> Any:
        if self._session is not None and not self._session.gets_batches:
            return batch
        return super().batch_to_device(batch, device, dataloader_idx)

    @property
    @override
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        topology = self.session.topology
        return {"num_replicas": topology.data_parallel_size, "rank": topology.replica}

    # -- collectives ------------------------------------------------------------------------------------------------

    @override
    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        return decision if self._is_first_alone("a decision") else super().reduce_boolean_decision(decision, all)

    @override
    def barrier(self, name: str | None = None) -> None:
        if not self._is_first_alone(f"barrier({name!r})"):
            super().barrier(name)

    @override
    def broadcast(self, obj: Any, src: int = 0) -> Any:
        return obj if self._is_first_alone(f"broadcast(..., {src})") else super().broadcast(obj, src)

    def _is_first_alone(self, call: str) -> bool:
        """Whether only the first rank comes to this call for all ranks, such as ``trainer.log_dir``: others do not
        wait for it there."""
        if (recording := running_recording()) is not None:
            return is_first_alone(recording, call, is_first=self.session.topology.rank == 0)
        outside = None if self._session is None else self._session.stages.owner_computes
        return outside is not None and outside.is_first_alone(call)

    # -- steps ------------------------------------------------------------------------------------------------------

    def aside(self, together: str | None = None) -> AbstractContextManager[None]:
        """While entered, within a hook, the strategy works on this rank's tensors (`OwnerComputes.aside`)."""
        return nullcontext() if self._session is None else self._session.stages.aside(together)

    @override
    @on_local_tensors
    def on_train_start(self) -> None:
        self.peers.agree_once("training", training_of(self.module.trainer), way_out=EVEN)

    @override
    @on_local_tensors
    def on_train_end(self) -> None:
        self.session.runner.settings.check_last()

    @override
    @on_local_tensors
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """Cut the module before the step, as an optimizer's update may run around it."""
        if batch is not None:  # or the step takes it from a dataloader_iter
            self.session.cut_before_training((batch, *after_batch(self.module, batch_idx)))

    @override
    @on_local_tensors
    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        return self.session.train(super().training_step, (*args, *kwargs.values()), is_last=not self._accumulating)

    @override
    @on_local_tensors
    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        return self.session.evaluate("validation_step", super().validation_step, (*args, *kwargs.values()))

    @override
    @on_local_tensors
    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        return self.session.evaluate("test_step", super().test_step, (*args, *kwargs.values()))

    @override
    @on_local_tensors
    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        return self.session.evaluate("predict_step", super().predict_step, (*args, *kwargs.values()))

    @override
    @on_local_tensors
    def on_validation_start(self) -> None:
        self._begin_evaluation("validation", self.module.trainer.num_val_batches)

    @override
    @on_local_tensors
    def on_test_start(self) -> None:
        self._begin_evaluation("test", self.module.trainer.num_test_batches)

    @override
    @on_local_tensors
    def on_predict_start(self) -> None:
        self._begin_evaluation("prediction", self.module.trainer.num_predict_batches)

    def _begin_evaluation(self, kind: str, num_batches: list[int | float]) -> None:
        session = self.session
        self.peers.agree_once(kind, evaluation_of(kind, num_batches, session.topology.replica))
        session.signals.pause(True)
        session.stages.gather_parameters()

    @override
    @on_local_tensors
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
        with self.session.updating(optimizer, closure) as closure:
            return super().optimizer_step(optimizer, closure, model, **kwargs)

    @contextmanager
    @override
    def block_backward_sync(self) -> Generator[None, None, None]:
        self._accumulating = True
        try:
            yield
        finally:
            self._accumulating = False

    @with_all_ranks
    def grad_norm(self, norm_type: float = 2.0) -> Tensor:
        """The norm of the whole model's gradients, over stages and replicas; each shared parameter counts once.

        For a hook such as `on_before_optimizer_step`, to log it. All ranks must call it.
        """
        return self.session.optimizers.grad_norm(norm_type)

    # -- checkpoints ------------------------------------------------------------------------------------------------

    @with_all_ranks
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
    @with_all_ranks
    def lightning_module_state_dict(self) -> dict[str, Any]:
        return self._checkpoints.module_state(super().lightning_module_state_dict)

    @override
    @with_all_ranks
    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        return self._checkpoints.optimizer_state(super().optimizer_state, optimizer)

    @override
    @with_all_ranks
    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: str | Path, storage_options: Any | None = None
    ) -> None:
        self._checkpoints.save(super().save_checkpoint, checkpoint, filepath, storage_options)

    @override
    @on_local_tensors
    def remove_checkpoint(self, filepath: str | Path) -> None:
        self._checkpoints.background.wait()  # it may still be written
        super().remove_checkpoint(filepath)

    @override
    @with_all_ranks
    def load_checkpoint(self, checkpoint_path: str | Path, weights_only: bool | None = None) -> dict[str, Any]:
        return self._checkpoints.load(super().load_checkpoint, checkpoint_path, weights_only)

    @override
    @with_all_ranks
    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        self._checkpoints.load_module(super().load_model_state_dict, checkpoint, strict=strict)

    @override
    @with_all_ranks
    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        self._checkpoints.load_optimizers(super().load_optimizer_state_dict, checkpoint)

    # -- end --------------------------------------------------------------------------------------------------------

    def ends_all_ranks(self, error: BaseException) -> bool:
        """Whether `error` ends all ranks after the same batch, so that they can still work together."""
        return self._session is not None and (self._session.signals.ends_all(error) or self._session.ended_by is error)

    @override
    @on_local_tensors
    def on_exception(self, exception: BaseException) -> None:
        session = self._session
        if self.peers.has_failed or (session is not None and session.signals.ends_all(exception)):
            return
        if session is not None:
            session.is_over = True
        if not self.ends_all_ranks(exception):
            self.peers.fail(exception)

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
            if self.module.trainer.state.status != TrainerStatus.INTERRUPTED:  # or the process is to end soon
                session.leave_module(self.num_processes)
        if self.transport is not None and not has_failed:
            # A process may end after this. If it ends with unread messages, it breaks its peers' connections.
            self.transport.flush()
            self.transport.barrier("the end of the run")
        self.precision_plugin.teardown()
        assert self.accelerator is not None
        self.accelerator.teardown()
        self.checkpoint_io.teardown()
        self.environment.teardown()
