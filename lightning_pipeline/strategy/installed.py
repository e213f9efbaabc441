"""Changes to Lightning, the precision plugin, the module and its metrics for the time of a run."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from lightning_pipeline import _torch
from lightning_pipeline.engine.draws import GeneratorInSteps, forget_states
from lightning_pipeline.partition.overrides import InPlaceOf, Override, overridden
from lightning_pipeline.partition.users_code import in_hook
from lightning_pipeline.recording.patched_layers import fast_paths_open
from lightning_pipeline.runtime.replicas import Replicas

from .._lightning import Trainer, TrainerFn, is_overridden
from .graph_logging import skip_graphs
from .hooks import follow_hooks, hooks_end_batches, refuse_states_in_hooks
from .lightning_loops import call_before_stopping, validate_by_first_clock
from .lightning_private import (
    call_before_update,
    compare_parameters_by_sums,
    let_steps_be_skipped,
    measure_replicas,
    silence_sync_warning,
    skip_before_transfer,
)
from .manual import backwards_met
from .patches import agree_on_overflow, leave_synced_over, share_statistics, silence_writers, sync_over
from .rank_zero import follow_first_rank

if TYPE_CHECKING:
    from .session import Session


def installed(session: Session) -> ExitStack:
    """Make the changes, until the returned stack is closed."""
    module, trainer, strategy = session.module, session.module.trainer, session.strategy
    pipeline, owner_computes = session.pipeline, session.stages.owner_computes
    if session.replicas is None:
        silence_sync_warning()
    with ExitStack() as stack:
        if not session.is_single_process:
            stack.callback(leave_synced_over, None if session.replicas is None else session.replicas.group)
        override: Override = stack.enter_context(overridden())
        # Lightning gets a step's result when its backward has already run, so backward only publishes gradients.
        backwards_met(strategy.precision_plugin, session.run_backward, override)
        let_steps_be_skipped(trainer, override)
        stack.enter_context(fast_paths_open(partial(_replaces_inference_mode, trainer)))
        override(torch, "is_inference_mode_enabled", partial(_is_in_inference, trainer))
        if owner_computes is not None:
            # Hooks and callbacks see a module of which this rank holds a part.
            compare_parameters_by_sums(override)
            in_parts = strategy.save_distributed_checkpoint
            follow_hooks(module, owner_computes, override, replicas=session.replicas, gathers_nothing=in_parts)
            owner_computes.states.optimizers = session.optimizers.optimizers
            owner_computes.states.notes_of = session.optimizers.notes_of
            owner_computes.states.are_shared_out = session.optimizers.are_shared_out
            stack.enter_context(pipeline.recorder.patched())
            stack.enter_context(owner_computes.patched())
            follow_first_rank(module, override)
            skip_graphs(module, override, are_logged=session.has_logged_graphs)
        elif session.optimizers.are_shared_out:
            refuse_states_in_hooks(module, session.optimizers.refused_in, override)
        override(torch.random, "default_generator", GeneratorInSteps())
        stack.callback(forget_states)
        if not session.is_single_process:
            _let_many_agree(session, override)
            share_statistics(module, session.replicas, override)
        if not session.gets_batches:  # their tensors are on the meta device
            skip_before_transfer(module, override)
        if not strategy.output_broadcast and pipeline.rank != pipeline.last_rank:
            silence_writers(trainer, override)
        return stack.pop_all()


def _let_many_agree(session: Session, override: Override) -> None:
    """Changes for several processes, which have to act alike."""
    trainer, strategy, optimizers = session.module.trainer, session.strategy, session.optimizers
    plugin, replicas = strategy.precision_plugin, session.replicas

    def aside(function: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        with session.stages.aside():
            function(*args, **kwargs)

    # A norm over all stages takes all ranks, while Lightning would clip this rank's parameters by their own norm.
    by_norm, by_value = partial(aside, optimizers.clip_by_norm), partial(aside, optimizers.clip_by_value)
    override(plugin, "clip_grad_by_norm", InPlaceOf(plugin.clip_grad_by_norm, by_norm))
    override(plugin, "clip_grad_by_value", InPlaceOf(plugin.clip_grad_by_value, by_value))
    call_before_update(plugin, partial(aside, session.before_update), override)
    measure_replicas(trainer, session.topology.data_parallel_size)
    validate_by_first_clock(trainer, strategy.broadcast, override)
    session.signals.install(override)
    if (scaler := getattr(plugin, "scaler", None)) is not None:
        agree_on_overflow(scaler, session.device, override)
    sync_over(None if replicas is None else replicas.group, override)
    if is_overridden("on_train_batch_start", session.module):
        _skip_together(session, override)
    if replicas is not None:
        agree, after_batches = partial(_agree_on_stopping, trainer, replicas), hooks_end_batches(session.module)
        call_before_stopping(trainer, agree, override, after_batches=after_batches)


def _skip_together(session: Session, override: Override) -> None:
    """Let all ranks leave out the rest of an epoch, where the hook of one replica says so or that of the first rank."""
    hook = session.module.on_train_batch_start

    def run(*args: Any) -> Any:
        response = hook(*args)
        if session.replicas is None and not in_hook.is_rank_known:
            return response
        return -1 if session.strategy.reduce_boolean_decision(response == -1, all=False) else None

    override(session.module, "on_train_batch_start", InPlaceOf(hook, run))


def _agree_on_stopping(trainer: Trainer, replicas: Replicas) -> None:
    """Stop all replicas where the code of one asks for it, as by its samples, or as the first rank."""
    trainer.should_stop = any(stops for (stops,) in replicas.gather_numbers(float(trainer.should_stop)))


def _is_in_inference(trainer: Trainer) -> bool:
    """Whether the user's code would be in inference mode in one process. Torch's own, such as the compiler, is told
    whether it is."""
    is_torchs = str(sys._getframe(1).f_globals.get("__name__")).startswith("torch.")
    return _torch.is_inference_mode_enabled() or (not is_torchs and _replaces_inference_mode(trainer))


def _replaces_inference_mode(trainer: Trainer) -> bool:
    """Whether Lightning has disabled gradients where it would enter inference mode, were it not for Gloo."""
    loops: dict[Any, Any] = {
        TrainerFn.VALIDATING: trainer.validate_loop,
        TrainerFn.TESTING: trainer.test_loop,
        TrainerFn.PREDICTING: trainer.predict_loop,
    }
    loop = loops.get(trainer.state.fn)
    is_on = torch.is_grad_enabled() or _torch.is_inference_mode_enabled()
    return loop is not None and loop.inference_mode and not is_on
