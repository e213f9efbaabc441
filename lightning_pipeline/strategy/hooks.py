"""Runs the user's hooks and callbacks on every rank as if it held the whole module."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, ParamSpec, TypeVar

from torch import Tensor, nn
from torch.optim import LBFGS, Optimizer
from torch.optim.lr_scheduler import LambdaLR, MultiplicativeLR

from lightning_pipeline import _torch
from lightning_pipeline.hooks.first_rank import Logged
from lightning_pipeline.hooks.owner_computes import OwnerComputes
from lightning_pipeline.partition.overrides import Override, overridden
from lightning_pipeline.partition.ownership import holders_of
from lightning_pipeline.partition.placeholder import Placeholder
from lightning_pipeline.runtime.replicas import Replicas

from .._lightning import NAMES, BasePredictionWriter, Callback, LightningModule, Trainer, is_overridden
from .lightning_loops import call_after_epochs
from .lightning_private import call_before_checkpoints, call_hooks_within, current_hook, within_hook

P = ParamSpec("P")
R = TypeVar("R")

_HARMLESS = tuple(
    f"{NAMES.pytorch}.callbacks.{name}"
    for name in (
        *("progress", "checkpoint", "model_checkpoint", "model_summary", "rich_model_summary", "early_stopping"),
        *("lr_monitor", "timer", "device_stats_monitor", "throughput_monitor", "gradient_accumulation_scheduler"),
    )
)
"""Lightning's callbacks that touch no parameters, or leave it to the strategy."""


def on_local_tensors(method: Callable[P, R], together: str | None = None) -> Callable[P, R]:
    """Decorates a method of the strategy that hooks may call: it works on this rank's tensors as they are."""

    @functools.wraps(method)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        with args[0].aside(together):  # type: ignore[attr-defined]
            return method(*args, **kwargs)

    return run


def with_all_ranks(method: Callable[P, R]) -> Callable[P, R]:
    """`on_local_tensors` for a method in which all ranks take part: one alone would wait for the others."""
    return on_local_tensors(method, method.__name__)


def follow_hooks(
    module: LightningModule,
    outside: OwnerComputes,
    override: Override,
    *,
    replicas: Replicas | None = None,
    gathers_nothing: bool = False,
) -> None:
    """Run the hooks of a module and of its Trainer's callbacks on all ranks together (`OwnerComputes`).

    Args:
        gathers_nothing: each rank saves its own part of a checkpoint.
    """
    trainer: Trainer = module.trainer
    outside.trainer = trainer
    shared: list[Logged] = []

    def within(hook: str | None) -> Any:
        return _running(module, outside, shared) if hook is None or _is_users(hook, module, trainer) else nullcontext()

    call_hooks_within(trainer, within, outside.saved.show, override)
    share = shared.clear if replicas is None else functools.partial(_share_with_replicas, module, shared, replicas)
    call_after_epochs(trainer, share, override)
    if _is_users("on_save_checkpoint", module, trainer) and not gathers_nothing:
        call_before_checkpoints(trainer, outside.saved.begin, override)


def refuse_states_in_hooks(
    module: LightningModule, refused: Callable[[str], AbstractContextManager[None]], override: Override
) -> None:
    """Where a rank holds the whole module but shares of the optimizers' states: hooks must not use those.

    Args:
        refused: entered around a hook of this name.
    """
    trainer: Trainer = module.trainer

    def within(hook: str | None) -> Any:
        return refused(hook) if hook is not None and _is_users(hook, module, trainer) else nullcontext()

    call_hooks_within(trainer, within, lambda checkpoint: None, override)


_TRANSFERS = ("on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer")
_LOADERS = tuple(f"{kind}_dataloader" for kind in ("train", "val", "test", "predict"))
_OF_DATA = (*_TRANSFERS, *_LOADERS, "state_dict", "load_state_dict")
"""Hooks of a LightningDataModule that every rank runs."""
_WITH_BATCHES = tuple(
    f"on_{kind}_batch_{when}" for kind in ("train", "validation", "test", "predict") for when in ("start", "end")
)
_PASSING_ON = (f"{NAMES.pytorch}.", "lightning_pipeline.")
"""Packages whose callbacks do not look at batches, prediction writers excepted."""


def replaces_batches(module: LightningModule, trainer: Trainer) -> bool:
    """Whether any of the user's hooks may put another batch in the place of the loader's."""
    data: Any = getattr(trainer, "datamodule", None)
    holders = [module] if data is None else [module, data]
    return any(is_overridden(hook, holder) for holder in holders for hook in _TRANSFERS)


def has_batch_hooks(module: LightningModule, trainer: Trainer) -> bool:
    """Whether any of the user's hooks gets batches, so that every rank needs their data."""
    if replaces_batches(module, trainer) or any(is_overridden(hook, module) for hook in _WITH_BATCHES):
        return True
    return any(
        isinstance(callback, BasePredictionWriter)
        or any(not _defining(type(callback), hook).__module__.startswith(_PASSING_ON) for hook in _WITH_BATCHES)
        for callback in trainer.callbacks  # type: ignore[attr-defined]
    )


def _defining(cls: type, name: str) -> type:
    """The class in the inheritance of another that defines a method."""
    return next(base for base in cls.__mro__ if name in vars(base))


def has_hook(name: str, module: LightningModule) -> bool:
    """Whether the module or one of its Trainer's callbacks overrides this hook."""
    callbacks = module.trainer.callbacks  # type: ignore[attr-defined]
    return is_overridden(name, module) or any(is_overridden(name, callback, Callback) for callback in callbacks)


def is_plain_optimizer(optimizer: Optimizer) -> bool:
    """Whether an optimizer is torch's own, which skips parameters without gradients, and has no hooks."""
    cls = type(optimizer)
    if isinstance(optimizer, LBFGS):  # which takes them all for one vector
        return False
    if not cls.step.__module__.startswith("torch.optim") and not cls.__module__.startswith("torch."):
        return False  # it may not even have called Optimizer.__init__
    return not optimizer._optimizer_step_pre_hooks and not optimizer._optimizer_step_post_hooks


def hooks_see_gradients(module: LightningModule) -> bool:
    """Whether hooks of the user's run while gradients accumulate over batches."""
    trainer: Trainer = module.trainer
    hooks = ("on_after_backward", "on_train_batch_end", "on_train_batch_start", "on_before_backward")
    return any(_is_users(hook, module, trainer) for hook in hooks)


_AFTER_STEPS = (
    *("on_before_backward", "on_after_backward", "on_before_optimizer_step", "configure_gradient_clipping"),
    *("optimizer_step", "on_before_zero_grad", "optimizer_zero_grad", "lr_scheduler_step", "on_train_batch_end"),
)


def hooks_end_batches(module: LightningModule) -> bool:
    """Whether hooks of the user's run between a training step and the next batch."""
    return any(_is_users(hook, module, module.trainer) for hook in _AFTER_STEPS)


def _is_users(hook: str, module: LightningModule, trainer: Trainer) -> bool:
    if hasattr(LightningModule, hook) and is_overridden(hook, module):
        return True
    # Lightning's own version of these hooks calls a method that may be the user's.
    if hook == "configure_gradient_clipping" and is_overridden("clip_gradients", module):
        return True
    if hook == "lr_scheduler_step" and any(_is_users_rate(one.scheduler) for one in trainer.lr_scheduler_configs):
        return True
    if hook.endswith(("_model_eval", "_model_train")) and any(_changes_mode(sub) for sub in module.modules()):
        return True
    # The summary of the model then runs it.
    if hook == "on_fit_start" and module.example_input_array is not None:
        return True
    data: Any = getattr(trainer, "datamodule", None)
    if data is not None and hook in _OF_DATA and is_overridden(hook, data):
        return True
    return hasattr(Callback, hook) and any(
        not type(callback).__module__.startswith(_HARMLESS) and is_overridden(hook, callback, Callback)
        for callback in trainer.callbacks  # type: ignore[attr-defined]
    )


def _is_users_rate(scheduler: Any) -> bool:
    """Whether learning rates come from a function or class of the user's, which may look at weights."""
    is_torchs = type(scheduler).__module__.startswith("torch.")
    return not is_torchs or isinstance(scheduler, LambdaLR | MultiplicativeLR)


def _changes_mode(module: nn.Module) -> bool:
    """Whether a module does more than note whether it trains, such as merging weights for evaluation (LoRA)."""
    return type(module).train is not nn.Module.train or type(module).eval is not nn.Module.eval


@contextmanager
def _running(module: LightningModule, outside: OwnerComputes, shared: list[Logged]) -> Iterator[None]:
    """Around a hook. Values that it logs are made whole on every rank, as they are read when no hook runs.

    Args:
        shared: gets what the first rank alone has logged of an epoch.
    """

    def log(name: str, value: Any, *args: Any, **kwargs: Any) -> None:
        # Lightning adds logged values up later, outside of hooks, where nothing fetches what other ranks hold.
        if isinstance(value, Tensor) and (type(value) is Placeholder or holders_of(value) is not None):
            [value] = outside.whole([value.detach()], f"log({name!r})")
            value = value.clone()
        logged = outside.log(Logged(current_hook(module), name, value, args, kwargs))
        if logged is not None:
            _log(module, logged)

    with overridden() as override:
        override(module, "log", log)
        with outside.entered():
            yield
    alone, outside.first_rank.alone = outside.first_rank.alone, []
    shared += (one for one in alone if one.hook is not None and "epoch" in one.hook)
    if not outside.first_rank.is_first:  # callbacks that go by it, such as those that stop or save, do on all ranks
        _log_again(module, alone)


def _log_again(module: LightningModule, alone: Iterable[Logged]) -> None:
    """Log what another rank alone has logged, when the hooks in which it did are over."""
    for one in alone:
        with within_hook(module, one.hook):
            _log(module, one)


def _log(module: LightningModule, logged: Logged) -> None:
    """Call the module's own `log`, with tensors of this rank's device."""
    value = _torch.tree_map_only(Tensor, lambda tensor: tensor.to(module.device), logged.value)
    type(module).log(module, logged.name, value, *logged.args, **logged.options)


def _share_with_replicas(module: LightningModule, shared: list[Logged], replicas: Replicas) -> None:
    """Let all replicas log what the first rank alone has logged of an epoch, which callbacks may monitor."""
    if any(number for (number,) in replicas.gather_numbers(len(shared))):
        first, *_ = replicas.gather_objects(shared)
        if replicas.topology.replica:
            _log_again(module, first)
    shared.clear()
