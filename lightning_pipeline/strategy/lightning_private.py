"""The private parts of Lightning that the strategy needs, in one place.

As of Lightning 2.6. Each function says why the public interface does not do.
"""

from __future__ import annotations

import atexit
import functools
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from datetime import timedelta
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer

from lightning_pipeline._names import LIGHTNING, PYTORCH_LIGHTNING
from lightning_pipeline._registration import is_pipeline
from lightning_pipeline.partition.overrides import InPlaceOf, Override, overridden
from lightning_pipeline.runtime.backends import HOST, backend_for, warm_up

from .._lightning import (
    NAMES,
    BaseFinetuning,
    CheckpointIO,
    ClosureResult,
    ClusterEnvironment,
    LightningModule,
    LightningOptimizer,
    Precision,
    PyTorchProfiler,
    ThroughputMonitor,
    Trainer,
    _configure_optimizers,
    _destroy_dist_connection,
    _DeviceDtypeModuleMixin,
    _IndexBatchSamplerWrapper,
    _InfiniteBarrier,
    _init_dist_connection,
    _set_num_threads_if_needed,
    _WrappingCheckpointIO,
    call,
    compile_of,
    data_connector,
    rank_zero_warn,
    trainer_of,
)


def connect_processes(
    environment: ClusterEnvironment,
    device: torch.device,
    backend: str | None,
    timeout: timedelta,
    store: dist.Store | None = None,
) -> str:
    """Make the default process group, and return its backend (see `backend_for`). No public function does it.

    Unlike DDP's, this leaves the random state alone, so that samples are shuffled as on one device.

    Args:
        store: where the ranks find each other; default: a new one. A single process uses one in memory, as torch would
            listen on all of the machine's addresses.
    """
    backend = backend_for(device, backend)
    if store is None and environment.world_size() == 1:
        store = dist.HashStore()
    if not dist.is_initialized() and backend != HOST:
        atexit.register(_destroy_dist_connection)  # device backends complain of groups that outlive the process
    _init_dist_connection(environment, backend, timeout=timeout, store=store)
    warm_up()
    return backend


def data_sources(trainer: Trainer) -> list[Any]:
    """The data modules, modules or loaders that a Trainer takes batches from. It uses them only after set-up."""
    loops: Any = (trainer.fit_loop, trainer.fit_loop.epoch_loop.val_loop, trainer.validate_loop)
    return [loop._data_source.instance for loop in (*loops, trainer.test_loop, trainer.predict_loop)]


def check_name(instance: object) -> None:
    """Raise a TypeError for an instance of a class of Lightning's other name, with the import to change."""
    own = NAMES.pytorch
    other = (PYTORCH_LIGHTNING if own == LIGHTNING.pytorch else LIGHTNING).pytorch
    bases = [base for base in type(instance).__mro__ if base.__module__.startswith((f"{own}.", f"{other}."))]
    if bases and not any(base.__module__.startswith(f"{own}.") for base in bases):
        name = bases[0].__qualname__
        raise TypeError(
            f"You passed a `{other}` object ({type(instance).__qualname__}) to a `{own}` Trainer. Take both from one "
            f"of them: change the import of {name}, from which it derives, to `from {own} import {name}`, or take the "
            f"Trainer from {other}"
        )


def say_which_import() -> None:
    """Where a Trainer gets a module of Lightning's other name, say which import to change. For users' modules Lightning
    only says that they are no LightningModules, before it asks the strategy anything.
    """
    compile_of._check_mixed_imports = check_name


def let_modules_be_compiled() -> None:
    """Let a Trainer with this strategy take a compiled LightningModule; Lightning has a fixed list of strategies."""
    verify = trainer_of._verify_strategy_supports_compile

    def verify_others(model: LightningModule, strategy: Any) -> None:
        if not is_pipeline(strategy):
            verify(model, strategy)

    trainer_of._verify_strategy_supports_compile = verify_others


def leave_module_uncompiled(module: LightningModule) -> None:
    """Run a LightningModule uncompiled if it is compiled as a whole, as it lies on several stages."""
    if getattr(module, "_compiler_ctx", None) is not None:
        compile_of.to_uncompiled(module)
        rank_zero_warn(
            f"{type(module).__name__} is compiled as a whole, and lies on several stages: it runs as it was written, "
            f"not compiled; compile parts of it that lie on one stage each, as with layer.compile()"
        )


def share_threads(num_processes: int) -> None:
    """Give each of several processes on a machine its share of the cores, as Lightning's launchers do."""
    _set_num_threads_if_needed(num_processes=num_processes)


def checkpoint_io_or(given: CheckpointIO | None, default: Callable[[], CheckpointIO]) -> CheckpointIO:
    """The user's CheckpointIO, or `default`; also inside a wrapper such as `AsyncCheckpointIO`.

    Wrappers have no public base class, and Lightning's default is not ours.
    """
    if given is None:
        return default()
    if isinstance(given, _WrappingCheckpointIO):
        given.checkpoint_io = default()  # has no effect where it wraps one already
    return given


def innermost(io: CheckpointIO) -> CheckpointIO:
    """The CheckpointIO inside of wrappers such as `AsyncCheckpointIO`, if any."""
    while isinstance(io, _WrappingCheckpointIO) and io.checkpoint_io is not None:
        io = io.checkpoint_io
    return io


def note_device(module: LightningModule, device: torch.device) -> None:
    """Set `module.device`; the public way is `module.to`, which refuses tensors on the meta device."""
    for sub in module.modules():
        if isinstance(sub, _DeviceDtypeModuleMixin):
            sub._device = device


def note_mesh(module: LightningModule, mesh: DeviceMesh) -> None:
    """Set `module.device_mesh`, as Lightning's ModelParallelStrategy does."""
    module._device_mesh = mesh


def skip_before_transfer(module: LightningModule, override: Override) -> None:
    """Keep `on_before_batch_transfer` from running on ranks without data. The loops call it without the strategy."""
    override(module, "_on_before_batch_transfer", lambda batch, dataloader_idx=0: batch)


def call_before_update(plugin: Precision, function: Callable[[Any], None], override: Override) -> None:
    """Call `function(optimizer)` when its gradients are final and clipped. Public hooks run before clipping, or replace
    it."""
    clip = plugin._after_closure

    def clip_and_call(model: LightningModule, optimizer: Any) -> None:
        clip(model, optimizer)
        function(optimizer)

    override(plugin, "_after_closure", InPlaceOf(clip, clip_and_call))


def compare_parameters_by_sums(override: Override) -> None:
    """Let finetuning callbacks, which leave out parameters that have the values of others in the optimizer, compare
    only those whose sums are alike: to compare each with each, stages would send the whole module many times.
    """

    def new_to(optimizer: Optimizer, params: Iterable[Tensor]) -> list[Tensor]:
        alike: dict[Any, list[Tensor]] = {}
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                alike.setdefault(_sum_of(parameter), []).append(parameter)
        params = list(params)
        found = [one for one in params if not any(torch.equal(one, other) for other in alike.get(_sum_of(one), ()))]
        if len(found) < len(params):
            rank_zero_warn(
                f"{len(params) - len(found)} of the parameters that a finetuning callback adds to {type(optimizer)} "
                f"are left out, as it has parameters of the same values: give it those that require gradients first"
            )
        return found

    override(BaseFinetuning, "filter_on_optimizer", staticmethod(new_to))


def _sum_of(parameter: Tensor) -> tuple[torch.Size, float]:
    return parameter.shape, parameter.detach().double().sum().item()


def silence_sync_warning() -> None:
    """Silence Lightning's advice to pass `sync_dist=True`: every stage logs the same value already."""
    warnings.filterwarnings("ignore", message=r"It is recommended to use `self\.log\(.*sync_dist=True\)`")


def leave_modules_unnamed(trainer: Trainer) -> None:
    """Keep Lightning's PyTorchProfiler from naming modules. It opens a range before a module's forward; where a step
    stops within a module, the range would stay open, which crashes the process."""
    profiler = trainer.profiler  # type: ignore[attr-defined]
    if isinstance(profiler, PyTorchProfiler) and profiler._record_module_names:
        rank_zero_warn("PyTorchProfiler(record_module_names=False) is set: a pipeline's profile does not name modules")
        profiler._record_module_names = False
        if profiler._register is not None:
            profiler._register.__exit__(None, None, None)
            profiler._register = None


def total_batches(trainer: Trainer) -> int:
    """Training batches so far, across epochs and resumptions. The public `global_step` counts optimizer steps."""
    return trainer.fit_loop.epoch_loop.total_batch_idx


def skips_backward(trainer: Trainer) -> bool:
    """Whether training steps have no backward for now, as `StochasticWeightAveraging` says it for an epoch."""
    return trainer.fit_loop._skip_backward


def is_loader_check(frame: FrameType) -> bool:
    """Whether Lightning only tries to iterate a loader, as it does with all but those of torch's class."""
    return frame.f_code.co_name == "_check_dataloader_iterable"


def loader_of(trainer: Trainer, arguments: Sequence[Any]) -> Any:
    """The loader that the batch of a step with these arguments is of; None for batches of several loaders at once.

    `trainer.val_dataloaders` has those of the fit before, where others are validated on.
    """
    loaders = trainer._active_loop._combined_loader  # type: ignore[union-attr]
    if loaders is None or (loaders._mode != "sequential" and len(loaders.flattened) > 1):
        return None
    number = arguments[2] if len(arguments) > 2 else 0
    return loaders.flattened[number] if isinstance(number, int) and number < len(loaders.flattened) else None


def sample_indices(loader: Any) -> list[list[int]] | None:
    """The sample indices of each batch so far, which prediction writers get; None where Lightning does not note them.

    It notes them in the sampler of a predict loader, on ranks that iterate over it.
    """
    sampler = getattr(loader, "batch_sampler", None)
    return sampler.seen_batch_indices if isinstance(sampler, _IndexBatchSamplerWrapper) else None


def set_sample_indices(loader: Any, seen: list[list[int]]) -> None:
    """Let Lightning find `seen` where it notes sample indices, if it does."""
    sampler = getattr(loader, "batch_sampler", None)
    if isinstance(sampler, _IndexBatchSamplerWrapper):
        sampler.seen_batch_indices = seen


def replace_signal_handlers(
    trainer: Trainer, override: Override, *, terminate: Callable[[int, Any], None], requeue: Callable[[int, Any], None]
) -> None:
    """Replace Lightning's handlers of SIGTERM and SLURM's requeue signal.

    To be called before Lightning registers them, after which no hook runs.
    """
    override(trainer._signal_connector, "_sigterm_notifier_fn", terminate)
    override(trainer._signal_connector, "_slurm_sigusr_handler_fn", requeue)


def requeue_slurm_job(trainer: Trainer, signum: int) -> None:
    """What Lightning does on SLURM's requeue signal: save, and `scontrol requeue`. All ranks must call it."""
    connector = trainer._signal_connector
    type(connector)._slurm_sigusr_handler_fn(connector, signum, None)  # type: ignore[arg-type]


def set_received_sigterm(trainer: Trainer, received: bool) -> None:
    """Set `trainer.received_sigterm`, on which the loops raise."""
    trainer._signal_connector.received_sigterm = received


def wait_for_data_within(
    trainer: Trainer,
    within: Callable[[], AbstractContextManager[Any]],
    preparing: Callable[[], AbstractContextManager[Any]],
) -> None:
    """Enter `within()` where the ranks wait for the one that prepares data, the next time that they do, and
    `preparing()` while they do that.

    Lightning makes a process group for this wait without the strategy, so torch's own errors would come out of it.
    """

    class Barrier(_InfiniteBarrier):
        def __enter__(self) -> Any:
            with within():
                return super().__enter__()

        def __exit__(self, *error: Any) -> None:
            with within():
                super().__exit__(*error)

    connector = trainer._data_connector

    def prepare_data() -> None:
        del connector.prepare_data
        with overridden() as override, preparing():
            override(data_connector, "_InfiniteBarrier", Barrier)
            connector.prepare_data()

    connector.prepare_data = prepare_data  # type: ignore[method-assign]


def is_before_setup(barrier: str | None) -> bool:
    """Whether this names Lightning's barrier after it has made loggers, and before hooks set data and modules up."""
    return barrier == "pre_setup"


def asks_for_log_dir() -> bool:
    """Whether `trainer.log_dir`, which has no function of its own in a strategy, calls `broadcast`."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_name == "broadcast":
        frame = frame.f_back
    return frame is not None and frame.f_code is vars(Trainer)["log_dir"].fget.__code__


def measure_replicas(trainer: Trainer, num_replicas: int) -> None:
    """Let Lightning's ThroughputMonitor, which multiplies by the number of devices, count a replica as one device: its
    ranks share one batch, and their FLOPs add up."""
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        if isinstance(callback, ThroughputMonitor):
            for throughput in callback._throughputs.values():
                throughput.world_size = num_replicas
                if callback.available_flops is not None:
                    throughput.available_flops = callback.available_flops * (trainer.world_size // num_replicas)


def call_hooks_within(
    trainer: Trainer,
    within: Callable[[str | None], AbstractContextManager[Any]],
    before_saving: Callable[[dict[str, Any]], None],
    override: Override,
) -> None:
    """Enter `within(name)` around each hook of a Trainer's module, data and callbacks; `within(None)` if it saves or
    loads.

    All hooks are called through functions of one of Lightning's modules, which have no public equivalent.

    Args:
        before_saving: is given the checkpoint before each `on_save_checkpoint`, inside of `within`.
    """
    named = ("_call_lightning_module_hook", "_call_lightning_datamodule_hook", "_call_callback_hooks")
    of_callbacks = "_call_callbacks_on_save_checkpoint"
    unnamed = ("_call_callbacks_state_dict", of_callbacks)

    def wrapped(name: str) -> Callable[..., Any]:
        function = getattr(call, name)

        @functools.wraps(function)
        def run(of: Trainer, *args: Any, **kwargs: Any) -> Any:
            if of is not trainer:
                return function(of, *args, **kwargs)
            with within(args[0] if name in named else None):
                if name == of_callbacks or args[:1] == ("on_save_checkpoint",):
                    before_saving(args[-1])
                return function(of, *args, **kwargs)

        return run

    for name in (*named, *unnamed):
        override(call, name, wrapped(name))


def current_hook(module: LightningModule) -> str | None:
    """The name of the hook that runs, by which Lightning keeps what it logs."""
    return module._current_fx_name


@contextmanager
def within_hook(module: LightningModule, name: str | None) -> Iterator[None]:
    """While entered, what the module logs is taken for what this hook logs."""
    before, module._current_fx_name = module._current_fx_name, name
    try:
        yield
    finally:
        module._current_fx_name = before


def call_before_checkpoints(trainer: Trainer, function: Callable[[], None], override: Override) -> None:
    """Call a function whenever a Trainer begins to put a checkpoint together."""
    connector = trainer._checkpoint_connector
    state = connector._get_lightning_module_state_dict

    def run() -> dict[str, Any]:
        function()
        return state()

    override(connector, "_get_lightning_module_state_dict", InPlaceOf(state, run))


def training_loader(trainer: Trainer) -> Any:
    """The loader of training batches before the loop sets it up; `trainer.train_dataloader` has it only afterwards."""
    return trainer.fit_loop._data_source.dataloader()


def lightning_optimizers(trainer: Trainer) -> list[LightningOptimizer]:
    """The optimizers that `self.optimizers()` gives, in order."""
    return trainer.strategy._lightning_optimizers


SKIPPED = object()
"""The result of a strategy's training_step for None, which Lightning refuses with several processes."""


class _Result(ClosureResult):
    @classmethod
    def from_training_step_output(cls, training_step_output: Any, normalize: int = 1) -> ClosureResult:
        given = None if training_step_output is SKIPPED else training_step_output
        return super().from_training_step_output(given, normalize)


def let_steps_be_skipped(trainer: Trainer, override: Override) -> None:
    """Let Lightning take `SKIPPED` for None: all ranks have skipped the step."""
    override(trainer.fit_loop.epoch_loop.automatic_optimization, "output_result_cls", _Result)


def configured_optimizers(module: LightningModule) -> list[Optimizer]:
    """The optimizers that `configure_optimizers` returns, in any form; the public way needs a strategy."""
    returned: Any = module.configure_optimizers()
    return _configure_optimizers(returned)[0] if returned is not None else []
