"""Profiles a LightningModule's steps on all ranks together, without side effects."""

from __future__ import annotations

import copy
import io
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, redirect_stdout
from dataclasses import astuple
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import numpy
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_pipeline.engine.collectives import over_replicas
from lightning_pipeline.engine.replica_collectives import World
from lightning_pipeline.partition import tree
from lightning_pipeline.partition.overrides import Override, overridden
from lightning_pipeline.partition.rng import generators, generators_kept
from lightning_pipeline.planning.observing import called_names
from lightning_pipeline.planning.planner import ALIKE
from lightning_pipeline.planning.profile import Profile
from lightning_pipeline.planning.restoring import left_as_it_was
from lightning_pipeline.planning.timing import measured_speed, time_step
from lightning_pipeline.planning.tracing import DeviceSpeed, estimate_step, trace_step
from lightning_pipeline.runtime.replicas import Replicas
from lightning_pipeline.runtime.transport import Transport

from .._lightning import DummyLogger, LightningModule, Logger, is_param_in_hook_signature, rank_zero_only
from .manual import losses_noted
from .outputs import loss_in
from .patches import keep_statistics
from .stage_optimizers import inner

if TYPE_CHECKING:
    from .pipeline import PipelineStrategy

SeededStep = Callable[..., Tensor | None]
"""A `Step` that also takes a `seed`."""

Described = tuple[tree.Layout, list[Tensor], list[bool]]
T = TypeVar("T")

_OTHER_SEEDS = (1, 2, 3)
_USUAL_STATE = 2.0
"""Numbers that AdamW keeps per parameter, assumed of optimizers that cannot be tried out."""


def reached_by_trainer(module: LightningModule) -> list[object]:
    """The optimizers, and what the user keeps on the data module and callbacks. A step reaches them through the Trainer
    or by hooks of theirs."""
    trainer: Any = module._trainer
    if trainer is None:
        return []
    others = [vars(one) for one in (getattr(trainer, "datamodule", None), *trainer.callbacks) if one is not None]
    return [*map(inner, trainer.optimizers), *others]


_NOT_FIRST = 1
"""A rank on which functions under `rank_zero_only` do nothing."""


class _NoLogger(DummyLogger):
    """Stands for a logger, and takes itself for one of its kind, as steps may look."""

    def __init__(self, logger: Logger) -> None:
        super().__init__()
        self._kind = type(logger)

    @property  # type: ignore[misc]
    def __class__(self) -> type[Logger]:  # type: ignore[override]
        return self._kind


@contextmanager
def without_side_effects(module: LightningModule, device: torch.device) -> Iterator[None]:
    """While entered, steps leave no trace on the module, its loggers, random numbers or other ranks, which may run them
    more or less often. Collectives over replicas give what they would if all replicas were like this one, and functions
    under `rank_zero_only` are not called."""
    trainer = module.trainer
    loggers, strategy = trainer.loggers, trainer.strategy
    replicas: Replicas | None = strategy.replicas  # type: ignore[attr-defined]

    def all_gather(tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return tensor if replicas is None else torch.stack([tensor] * replicas.num_replicas)

    with (
        left_as_it_was(module, reached_by_trainer(module)),
        redirect_stdout(io.StringIO()),
        generators_kept(device),
        overridden() as set_for_now,
    ):
        override: Override = set_for_now
        keep_statistics(module, replicas, override)
        override(strategy, "all_gather", all_gather)
        override(strategy, "reduce", lambda tensor, *args, **kwargs: tensor)
        override(strategy, "barrier", lambda *args: None)
        override(module, "log", lambda *args, **kwargs: None)
        override(rank_zero_only, "rank", _NOT_FIRST)
        for config in trainer.lr_scheduler_configs:
            override(config.scheduler, "step", lambda *args, **kwargs: None)
        trainer.loggers = [_NoLogger(logger) for logger in loggers]
        try:
            yield
        finally:
            trainer.loggers = loggers


def loss_step(
    module: LightningModule,
    name: str,
    others: tuple[Any, ...],
    device: torch.device,
) -> SeededStep:
    """One of the user's steps as a function from a micro-batch to the loss that backward starts from, or None.

    The same seed gives the same random numbers, so that the same layers are dropped at random.
    """
    function, context = getattr(module, name), step_context(module, name)
    drawn_from = generators(device)

    def step(microbatch: Any, seed: int = 0) -> Tensor | None:
        _plant_seeds(drawn_from, seed)
        with _over_replicas(module):
            return run(microbatch)

    def run(microbatch: Any) -> Tensor | None:
        if name == "training_step" and not module.automatic_optimization:
            with context(), losses_noted(module) as losses:
                function(microbatch, *others)
            return sum(losses[1:], losses[0]) if losses else None
        with context():
            result = function(microbatch, *others)
        is_trained = name == "training_step" and result is not None
        return loss_in(result, type(module).__name__) if is_trained else None

    return step


def measure_step(module: LightningModule, step: SeededStep, microbatch: Any, device: torch.device) -> Profile:
    """Profile the step by running it a few times, on the device where the whole module is."""
    with _over_replicas(module):  # backward has collectives, too
        traced = trace_step(module, step, tree.replace(microbatch, Tensor.clone))
        names = {call.name for call in traced.calls}
        for seed in _OTHER_SEEDS:
            others = called_names(module, partial(step, seed=seed), tree.replace(microbatch, Tensor.clone))
            traced.optional |= names ^ others
        return time_step(step, microbatch, traced, device)


def estimate_training_step(
    module: LightningModule, microbatch: Any, device: torch.device, speed: DeviceSpeed | None = None
) -> Profile:
    """Profile the training step without running it: parts of the module may be on the meta device.

    Args:
        speed: of the device that is to run it; None for this one.
    """
    step = loss_step(module, "training_step", after_batch(module, 0), device)
    return estimate_step(module, step, microbatch, speed or measured_speed(device, dtype_of(module)))


def estimate_on_ranks(
    estimate: Callable[[DeviceSpeed], Profile], devices: Sequence[DeviceSpeed]
) -> tuple[Profile, tuple[float, ...]]:
    """The profile on the first rank's device, and the speed of each rank relative to it; empty if all are alike."""
    first = devices[0]
    profile = estimate(first)

    def speed_of(device: DeviceSpeed) -> float:
        ratios = [one / other for one, other in zip(astuple(device), astuple(first), strict=True)]
        return 1.0 if max(ratios) <= ALIKE * min(1.0, *ratios) else profile.seconds / estimate(device).seconds

    speeds = tuple(map(speed_of, devices))
    return profile, speeds if max(speeds) > ALIKE * min(speeds) else ()


def _over_replicas(module: LightningModule) -> AbstractContextManager[None]:
    transport: Transport | None = getattr(module.trainer.strategy, "transport", None)
    return over_replicas(None if transport is None else World(transport.topology))


def step_context(module: LightningModule, name: str) -> Callable[[], AbstractContextManager[Any]]:
    """The precision's context around the user's step of this name."""
    plugin = module.trainer.precision_plugin
    contexts = {
        "training_step": plugin.train_step_context,
        "validation_step": plugin.val_step_context,
        "test_step": plugin.test_step_context,
        "predict_step": plugin.predict_step_context,
    }
    return contexts[name]


def after_batch(module: LightningModule, batch_idx: int) -> tuple[Any, ...]:
    """The arguments that Lightning gives a training step after the batch."""
    return (batch_idx,) if is_param_in_hook_signature(module.training_step, "batch_idx", min_args=2) else ()


def dtype_of(module: nn.Module) -> torch.dtype:
    """The dtype of the module's first floating-point parameter."""
    return next((p.dtype for p in module.parameters() if p.is_floating_point()), torch.float32)


def _plant_seeds(drawn_from: list[torch.Generator], seed: int) -> None:
    for generator in drawn_from:  # torch.manual_seed asks every kind of device, which takes longer than a small layer
        generator.manual_seed(seed)
    random.seed(seed)
    numpy.random.seed(seed)


# -- together ----------------------------------------------------------------------------------------------------------


def on_all_ranks(decide: Callable[[], T], broadcast: Callable[[Any], Any], *, decides: bool) -> T:
    """What the first rank decides, on all ranks. All must call it, and all fail if the first one does.

    Raises:
        ValueError: on the other ranks, with the first one's error, which the first one itself re-raises.
    """
    outcome, failure = None, None
    if decides:
        try:
            outcome = decide()
        except Exception as error:
            failure = error
    message = None if failure is None else f"the first rank failed: {type(failure).__name__}: {failure}"
    outcome, message = broadcast((outcome, message))
    if failure is not None:
        raise failure
    if message is not None:
        raise ValueError(message)
    return outcome


def described(microbatches: Mapping[int, Any]) -> Described:
    """Micro-batches in a form to broadcast: layout, tensors on the CPU, and which of these were on a device."""
    tensors, layout = tree.flatten(microbatches)
    from_device = [tensor.device.type != "cpu" for tensor in tensors]
    return layout, [tensor.detach().to("cpu", copy=True) for tensor in tensors], from_device


def restored(microbatches: Described, device: torch.device) -> dict[int, Any]:
    """The micro-batches of `described`, on another rank."""
    layout, tensors, from_device = microbatches
    moved = [tensor.to(device) if moves else tensor for tensor, moves in zip(tensors, from_device, strict=True)]
    return tree.rebuild(layout, moved)


def speeds_of(seconds: float, transport: Transport, replicas: Replicas | None = None) -> tuple[float, ...]:
    """The speed of each rank of a pipeline relative to the first; empty if all are alike. All must call it.

    Args:
        seconds: this rank's time for the same work; NaN if it could not measure, which counts as the first's speed.
        replicas: those of this rank's stage, of which the slowest counts.
    """
    if replicas is not None:
        seconds = max(took for [took] in replicas.gather_numbers(seconds))
    own = torch.tensor([seconds], dtype=torch.float64)
    [took] = transport.all_gather_vector(own, "how long a step takes").T
    speeds = (took[0] / took).nan_to_num(1.0, 1.0, 1.0).tolist()
    return tuple(speeds) if max(speeds) > ALIKE * min(speeds) else ()


# -- memory ------------------------------------------------------------------------------------------------------------


def state_per_parameter(optimizer: Optimizer) -> float:
    """Numbers of optimizer state per number of a parameter: 2 for AdamW, 1 for SGD with momentum, 0 without.

    Found by trying: the same kind of optimizer updates a small matrix once.
    """
    matrix = nn.Parameter(torch.zeros(16, 16))
    matrix.grad = torch.zeros_like(matrix)
    try:
        options = {key: copy.copy(value) for key, value in optimizer.defaults.items()}
        tried = type(optimizer)([matrix], **options)
        tried.step()
        state = tried.state[matrix]
    except Exception:  # an optimizer's constructor may need other arguments, and this is an estimate
        return _USUAL_STATE
    return sum(value.numel() for value in state.values() if isinstance(value, Tensor) and value.dim()) / matrix.numel()


def bytes_with_state(module: nn.Module, optimizers: Sequence[Optimizer]) -> Callable[[str], float]:
    """A function from a parameter's name to its bytes with gradient and optimizer state; AdamW's without optimizers."""
    parameters = dict(module.named_parameters(remove_duplicate=False))
    shares: dict[int, float] = {}
    for optimizer in optimizers:
        share = state_per_parameter(optimizer)
        for group in optimizer.param_groups:
            shares.update((id(parameter), share) for parameter in group["params"])

    def state_bytes(name: str) -> float:
        parameter = parameters[name]
        share = shares.get(id(parameter), 0.0 if optimizers else _USUAL_STATE)
        return parameter.numel() * parameter.element_size() * (1.0 + parameter.requires_grad * (1.0 + share))

    return state_bytes


_USABLE = 0.9
"""The share of a device's memory for parameters and activations; allocators and libraries need the rest."""


def memory_of_ranks(device: torch.device, strategy: PipelineStrategy, num_stages: int) -> list[float] | None:
    """Bytes that stages may use on each rank of a pipeline, by the replica that has the least; None where unknown.

    All ranks must call it.
    """
    own = _memory_of(device)
    if own is None:  # and so it is on the others, which have devices of the same kind
        return None
    of_all = [strategy.broadcast(own, rank) for rank in range(strategy.world_size)]
    each = strategy.world_size // num_stages
    return [min(of_all[rank * each : (rank + 1) * each]) for rank in range(num_stages)]


def _memory_of(device: torch.device) -> float | None:
    """Bytes that a stage may use on a device; None where unknown."""
    info = None if device.type == "cpu" else getattr(torch.get_device_module(device), "mem_get_info", None)
    return _USABLE * info(device)[1] if info is not None else None
