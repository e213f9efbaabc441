"""A module set up in stages: its cut, its connections, and its steps."""

from __future__ import annotations

import json
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from pathlib import Path
from traceback import walk_tb
from typing import TYPE_CHECKING, Any, TypeGuard, TypeVar

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_pipeline import _torch
from lightning_pipeline.engine.executor import Span
from lightning_pipeline.engine.pipeline import Pipeline
from lightning_pipeline.hooks.first_rank import Lending
from lightning_pipeline.partition.batches import OneBatch, refuse_list_of_samples
from lightning_pipeline.partition.ownership import Ownership
from lightning_pipeline.partition.stage_config import Stage, read_stage_config
from lightning_pipeline.partition.users_code import in_hook
from lightning_pipeline.runtime.errors import PeerFailedError
from lightning_pipeline.runtime.host_memory import available_bytes, keep_freed_memory
from lightning_pipeline.runtime.log import is_logging, logger
from lightning_pipeline.runtime.replicas import Replicas
from lightning_pipeline.runtime.topology import Topology
from lightning_pipeline.runtime.transport import Transport
from lightning_pipeline.schedules.optimizing import OPTIMIZED

from .._lightning import LightningModule, TrainerFn
from ..accelerators.rank_table_environment import warn_of_placement
from ..checkpoint.optimizer_layout import OptimizerLayout
from ..checkpoint.state import copies_of
from . import validation
from .advisor import Advice, Advisor, observed
from .dataloading import AnnouncedLoader, FollowingLoader, SharedLoader, samples_at_once, stacks_samples
from .graph_logging import log_graphs
from .hooks import has_batch_hooks, is_plain_optimizer, replaces_batches
from .installed import installed
from .left_states import used_in_parts
from .lightning_private import SKIPPED, loader_of
from .local_module import take_initial_values
from .local_stages import LocalStages
from .manual_step import ManualStep
from .partitioner import Cut, Partitioner, num_stages_for
from .patches import convert_batch_norms
from .peers import parts_of
from .signals import Signals
from .stage_optimizers import StageOptimizers, inner
from .stage_runner import StageRunner
from .whole_batch import WholeBatch

if TYPE_CHECKING:
    from .pipeline import PipelineStrategy

R = TypeVar("R")


class Session:
    """A module set up in stages, on this rank. It is made in set-up, and kept for later runs on the same module.

    All ranks make it at the same point.

    Args:
        config: the keys of stage_config; empty to find the cut automatically.

    Attributes:
        topology: the ranks of the run, and this rank's place.
        replicas: the ranks that run the same stages on other samples; None if there are none.
        tensor_group: the ranks among which this stage's tensors are split; None if they are whole.
        context_group: those among which its sequences are cut; None if they are whole.
        optimizers: those of the last fit, if any.
        advisor: chooses the schedule; None unless schedule="auto".
        is_over: a run has failed, so the next one needs new connections.
        ended_by: an error of a hook, at which all ranks have come alike (`ends_alike`).
        is_left_whole: the last run is over, and has left every rank the whole module.
    """

    topology: Topology
    transport: Transport | None
    replicas: Replicas | None
    stages: LocalStages
    runner: StageRunner
    advisor: Advisor | None

    def __init__(
        self, strategy: PipelineStrategy, module: LightningModule, config: Mapping[str, Stage], num_stages: int
    ) -> None:
        trainer, replicas = module.trainer, strategy.topology_of(num_stages).data_parallel_size
        validation.check_slices(
            module, trainer, fsdp=strategy.data_parallel == "fsdp", tensor_parallel=strategy.tensor_parallel_size > 1
        )
        if strategy.world_size > 1:  # each rank has built the module by itself
            take_initial_values(module, copies_of(module, trainer), strategy.broadcast)
        if trainer.state.fn == TrainerFn.FITTING:
            convert_batch_norms(module, strategy._layer_sync, strategy.root_device, num_replicas=replicas)
        self.module = module
        self.num_stages = num_stages
        self.is_over = False
        self.ended_by: BaseException | None = None
        self.is_left_whole = False
        self.signals = Signals(module, has_replicas=replicas > 1)
        self.strategy = strategy
        self.device = strategy.root_device
        self.tensor_group, self.context_group = strategy.tensor_group, strategy.context_group
        self.is_single_process = strategy.world_size == 1
        self._full_batches: set[Any] = set()  # their kinds, where they are lists
        self._shares_batches = False  # every rank gets the batches, not only the first stage
        self._installed = ExitStack()
        self._whole_batch: WholeBatch | None = None  # the last training step, if Lightning runs it itself
        self.partitioner: Partitioner = Partitioner(strategy, module, config, num_stages, replicas)
        cut = self.partitioner.at_start()
        is_fit = trainer.state.fn == TrainerFn.FITTING and not self.is_single_process
        self.has_logged_graphs = is_fit and cut.is_final and log_graphs(module, self.device, strategy.broadcast)
        self._seed = strategy.broadcast(torch.initial_seed())
        self._apply(cut)
        self.optimizers = StageOptimizers((), self.ownership, self.transport)
        self.stages.local.make(strategy.weights, self._seed)

    @property
    def pipeline(self) -> Pipeline:
        return self.stages.pipeline

    @property
    def ownership(self) -> Ownership:
        return self.stages.local.ownership

    @property
    def advice(self) -> Advice | None:
        return None if self.advisor is None else self.advisor.advice

    # -- the cut ----------------------------------------------------------------------------------------------------

    def _apply(self, cut: Cut) -> None:
        """Cut the module, and connect the ranks accordingly."""
        strategy = self.strategy
        sizes: dict[str, Any] = {
            "num_stages": self.num_stages,
            "num_virtual_stages": cut.stages.num_stages // self.num_stages,
            "num_microbatches": cut.num_microbatches,
            "ranks": cut.stages.ranks,
        }
        # First the schedule: it places the virtual stages, and the routes of the transport follow from that.
        self.advisor = None
        if strategy.schedule_choice.is_auto:
            trainer = self.module.trainer
            self.advisor = Advisor(
                **sizes,
                max_live_microbatches=strategy.max_live_microbatches,
                max_live_bytes=strategy.max_live_bytes,
                offload=strategy.offload_activations,
                optimizes=strategy.schedule_choice.optimizes,
                csv=Path(trainer.default_root_dir) / f"{OPTIMIZED}.csv" if trainer.is_global_zero else None,
            )
        schedules = self.advisor.first if self.advisor is not None else strategy.schedule_choice.bind(**sizes)
        self.topology = strategy.topology_of(self.num_stages).along(schedules.placement)
        if not self.advisor:
            label = strategy.schedule_choice.label
            validation.warn_of_idle_offload(strategy.offload_activations, schedules.full, label)
        if not self.is_single_process:
            warn_of_placement(self.num_stages)
        if self.device.type == "cpu":
            keep_freed_memory()
        # Connections belong to the process: an earlier session with the same topology has left them open.
        self.transport = None
        if self.num_stages > 1:
            store = _torch.default_store()
            self.transport = Transport.shared(
                self.topology, self.device, strategy.timeout, store, strategy.peers.notice
            )
        self.replicas = Replicas.shared(self.topology, strategy.timeout)
        self.stages = LocalStages(self, cut, schedules)
        self.runner = StageRunner(self, self._seed)
        if is_logging():
            strategy.observers.add(_log_action)
            self._log(cut)

    def _log(self, cut: Cut) -> None:
        topology = self.topology
        logger.debug("stages begin with %s", dict(cut.stages.exact) or "the step; there is one, or they are found next")
        logger.debug(
            "is %s of replica %d, on %s; %d micro-batches by schedule %s, virtual stages on ranks %s",
            topology.describe(topology.rank),
            topology.replica,
            self.device,
            cut.num_microbatches,
            self.strategy.schedule_choice.label,
            topology.placement,
        )

    def _cut_before_step(self, name: str, arguments: tuple[Any, ...]) -> None:
        """Find the cut of a module without a stage_config, before its first step. All ranks must call it."""
        if type(arguments[0]) is list and self._splits:
            trainer = self.module.trainer
            loader = loader_of(trainer, arguments)
            if not stacks_samples(loader) or replaces_batches(self.module, trainer):
                refuse_list_of_samples(arguments[0], samples_at_once(loader), self._full_batches)
        is_whole = self.partitioner.is_whole
        with self.optimizers.refused_in(name):
            cut = self.partitioner.before_step(name, arguments, self.transport)
        if cut is None:
            return
        module, before = self.module, self.stages
        if is_whole:  # the loader's code, which only the first rank runs, may have changed the module
            take_initial_values(module, copies_of(module, module.trainer), self.strategy.broadcast)
        self._apply(cut)
        self.stages.take_over(before)
        self.optimizers.settle(self.ownership)
        self.install()  # anew, as what was installed refers to the stages before

    @property
    def _splits(self) -> bool:
        """Whether batches are split by their tensors' first dimension."""
        count = self.strategy.num_microbatches
        is_whole = count == 1 or (self.is_single_process and count is None)
        return not is_whole and not hasattr(self.module, "split_batch")

    def cut_before_training(self, arguments: tuple[Any, ...]) -> None:
        """Before a training step and the update around it."""
        self.optimizers.follow(self.strategy.optimizers, self.module)
        self._cut_before_step("training_step", arguments)

    # -- a run ------------------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """At the start of a run, before loaders are set up."""
        self.signals.reset()
        # Hooks run on all ranks as in one process, so if any of them sees a batch, every rank must have its data.
        self._shares_batches = not self.is_single_process and has_batch_hooks(self.module, self.module.trainer)

    def take_optimizers(self) -> None:
        """Take over the optimizers of a fit, which were made over the whole module."""
        self.optimizers = StageOptimizers(
            [OptimizerLayout(optimizer, self.module) for optimizer in self.strategy.optimizers],
            self.ownership,
            self.transport,
            shards_over=self.replicas if self.strategy.data_parallel == "zero1" else None,
            has_slices=self.stages.has_slices,
        )

    def install(self) -> None:
        """Change what Lightning, the precision plugin and the module do, until the run ends (`installed`)."""
        self._installed.close()
        self._installed = installed(self)

    def uninstall(self) -> None:
        """At the end of a run."""
        self._installed.close()
        self.optimizers.leave()

    def leave_module(self, num_processes: int) -> None:
        """At the end of a run: make the module and the states of optimizers whole on every rank, if they fit."""
        self.is_left_whole = self.stages.make_whole(num_processes)
        if self.is_left_whole and self.optimizers.optimizers:  # the strategy may have those of another module
            self.optimizers.follow(self.strategy.optimizers, self.module)
            self.optimizers.make_whole(available_bytes() // (2 * num_processes))

    def ends_alike(self, error: BaseException) -> bool:
        """Whether an error of a hook's ends all ranks at the same line, so that they can still work together. Ranks
        wait some seconds for one another. In a step they may be anywhere.
        """
        outside = self.stages.owner_computes
        if outside is None or outside.ended_by is not error or isinstance(error, PeerFailedError):
            return False
        frames = [(frame.f_code.co_filename, line) for frame, line in walk_tb(error.__traceback__)]
        if any(path == __file__ for path, _ in frames):
            return False
        trainer = self.module.trainer
        counters = trainer.global_step, trainer.current_epoch, trainer.state.fn, trainer.state.stage
        if self.strategy.peers.end_alike(repr((frames, error, counters, outside.num_exchanges))):
            self.ended_by = error
        return self.ended_by is error

    # -- data -------------------------------------------------------------------------------------------------------

    @property
    def gets_batches(self) -> bool:
        """Whether this rank has the data of batches, not only their specs."""
        return self.topology.is_first_stage or self._shares_batches

    def shared_loader(self, loader: object) -> SharedLoader:
        """A loader through which the stages share batches: the first stage reads them, the others follow."""
        if isinstance(loader, SharedLoader):  # as a CombinedLoader keeps it that is set up again
            loader = loader.shared
        # Replicas wait for one another only in training.
        replicas = self.replicas if self.module.trainer.training else None
        options: dict[str, Any] = {"whole": self._shares_batches, "lending": self._lending}
        if self.transport is None or self.topology.is_first_stage:
            return AnnouncedLoader(loader, lambda: self.transport, replicas, **options)
        return FollowingLoader(loader, lambda: self.transport, **options)

    def _lending(self) -> Lending | None:
        owner_computes = self.stages.owner_computes
        return None if owner_computes is None or self.transport is None else owner_computes.lending

    def _with_batch(self, batch: Any, *others: Any) -> tuple[Any, ...]:
        """The arguments of a step; a dataloader_iter is replaced by its next batch."""
        is_whole = self.is_single_process and self.strategy.num_microbatches in (None, 1)
        if not isinstance(batch, Iterator) or is_whole:
            return batch, *others
        taken, *OneBatch.place = next(batch)
        return OneBatch(self.strategy.batch_to_device(taken, self.device)), *others

    # -- steps ------------------------------------------------------------------------------------------------------

    def train(self, plain: Callable[..., Any], arguments: tuple[Any, ...], *, is_last: bool) -> Any:
        """Run a training step.

        Args:
            plain: Lightning's own, for a single process with the whole batch.
            is_last: the batch ends an accumulation window.
        """
        arguments = self._with_batch(*arguments)
        self.cut_before_training(arguments)  # again, as a dataloader_iter has only now given the batch
        microbatches = self.runner.split(arguments[0])
        self._whole_batch = None
        self.stages.gradients.observe_buckets = self.strategy.observe_buckets
        with observed(self.pipeline, *self.strategy.observers):
            if self._is_whole(microbatches):
                # Backward is Lightning's own then, which `run_backward` has to know.
                self._whole_batch = self.runner.whole_training_batch()
                with self._whole_batch.running():
                    return plain(*microbatches, *arguments[1:])
            if not self.module.automatic_optimization:
                validation.check_by_hand(self.module, self.strategy.max_live_bytes)
                result = ManualStep(self, arguments[1:]).run(microbatches)
                self._share_batch(arguments[0])
                return result
            advising: AbstractContextManager[None] = nullcontext()
            if self.advisor is not None:
                neighbours = self.tensor_group or self.context_group
                advising = self.advisor.watching(self.pipeline, self.transport, neighbours)
            with advising:
                result = self.runner.train(arguments[1:], microbatches, is_last=is_last)
        self._share_batch(arguments[0])
        return SKIPPED if result is None else result

    def _is_whole(self, microbatches: list[Any] | None) -> TypeGuard[list[Any]]:
        """Whether Lightning runs the step itself, as neither the module nor the batch is cut."""
        return self.is_single_process and microbatches is not None and len(microbatches) == 1

    def evaluate(self, name: str, plain: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
        """Run the validation, test or predict step of this name. `plain`: as for `train`."""
        arguments = self._with_batch(*arguments)
        self._cut_before_step(name, arguments)
        microbatches = self.runner.split(arguments[0])
        if self._is_whole(microbatches):
            with self.runner.whole_evaluation_batch(name, arguments[1:]).running():
                return plain(*microbatches, *arguments[1:])
        result = self.runner.evaluate(name, arguments[1:], microbatches)
        self._share_batch(arguments[0])
        return result

    def _share_batch(self, batch: Any) -> None:
        """After a step: hooks on all ranks see what it has written into its batch."""
        if self._shares_batches and not isinstance(batch, Iterator):
            self.pipeline.share_batch(batch)

    def run_backward(self, backward: Callable[..., Any], loss: Tensor, *args: Any, **kwargs: Any) -> None:
        """In place of a precision plugin's backward: the schedule has run it, so its gradients only have to appear."""
        if self._whole_batch is not None:
            with self._whole_batch.running_backward():
                backward(loss, *args, **kwargs)
            return
        with self.stages.aside():
            self.stages.publish_gradients()
            self.optimizers.replace(self.stages.shard())

    def before_update(self, optimizer: Optimizer) -> None:
        """Called when an optimizer's gradients are final and clipped, and hooks before the update have run."""
        self.runner.settings.make_whole(inner(optimizer))
        self.optimizers.before_update(optimizer)

    @contextmanager
    def updating(self, optimizer: Optimizer, closure: Callable[[], R]) -> Generator[Callable[[], R], None, None]:
        """Around an optimizer's update. Gives the closure that it is to call."""
        # An optimizer that is not torch's own may use all parameters at once, as for a norm.
        is_plain = is_plain_optimizer(inner(optimizer))
        entered = self.stages.aside() if is_plain else self.stages.entered(shows_states=False)
        if is_plain and in_hook.on and self.stages.owner_computes is not None:
            closure = self.stages.owner_computes.resumed()(closure)

        def run_closure() -> R:
            with self.stages.aside():
                self.optimizers.before_closure(optimizer)
            return closure()

        with used_in_parts(inner(optimizer)), entered:
            yield closure if is_plain else run_closure
        with self.stages.aside():
            self.optimizers.after_update(optimizer)
            self.runner.settings.note_update(inner(optimizer))


def session_for(strategy: PipelineStrategy, module: LightningModule, before: Session | None) -> Session:
    """The session for a run: the one before if it is for the same module and stages, or a new one."""
    config = read_stage_config(module, strategy.stage_config)
    num_stages = strategy.num_stages or num_stages_for(config, strategy.schedule_choice, strategy.world_size)
    # Ranks that cut the module differently would differ in all that follows.
    cut = {"stage_config": json.dumps(config, sort_keys=True, default=str), "num_stages": str(num_stages)}
    strategy.peers.agree("the set-up of the pipeline", {**parts_of(module), **cut})
    if before is not None and not before.is_over and before.module is module and before.num_stages == num_stages:
        before.stages.release_remote()
        before.optimizers.release()
        before.is_left_whole = False
        return before
    told, replicas = strategy.told_replicas, strategy.topology_of(num_stages).data_parallel_size
    if told not in (None, replicas):
        raise ValueError(
            f"a hook that sets up data was told of {told} replicas (trainer.world_size), but the stage_config that was "
            f"made later results in {replicas}: give PipelineStrategy num_stages={num_stages}"
        )
    return Session(strategy, module, config, num_stages)


def _log_action(span: Span) -> None:
    action, start, end = span
    logger.debug("ran %s in %.2f ms", action, 1e3 * (end - start))
