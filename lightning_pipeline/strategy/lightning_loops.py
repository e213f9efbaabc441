"""The private parts of Lightning's loops that the strategy needs. Each function says why; see `lightning_private`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from lightning_pipeline.partition.overrides import Override

from .._lightning import Trainer, call


def call_before_each_batch(trainer: Trainer, function: Callable[[], None], override: Override) -> None:
    """Call `function` before each training batch is fetched, where there is no hook.

    Lightning broadcasts there whether the first rank has to stop, and ignores a failed broadcast; this disables it.
    """
    loop = trainer.fit_loop.epoch_loop
    advance = loop.advance

    def advance_after(data_fetcher: Any) -> None:
        function()
        advance(data_fetcher)

    override(loop, "advance", advance_after)
    override(loop, "_broadcast_sigterm_tensor", lambda: None)


def call_before_stopping(
    trainer: Trainer, function: Callable[[], None], override: Override, *, after_batches: bool
) -> None:
    """Call `function` where a fit goes on to look at `trainer.should_stop`, after hooks that may have set it.

    Args:
        after_batches: also after each training batch, and not only after the hooks around epochs and validations.
    """
    fit = trainer.fit_loop

    def call_around(owner: Any, name: str, *, before: bool) -> None:
        plain = getattr(owner, name)

        def run(*args: Any) -> Any:
            if before:
                function()
            result = plain(*args)
            if not before:
                function()
            return result

        override(owner, name, run)

    call_around(fit, "run", before=True)
    if after_batches:
        call_around(trainer._logger_connector, "update_train_step_metrics", before=True)
    call_around(fit.epoch_loop.val_loop, "run", before=False)
    for name in ("on_run_start", "on_advance_start", "on_advance_end"):
        call_around(fit, name, before=False)


def call_after_epochs(trainer: Trainer, function: Callable[[], None], override: Override) -> None:
    """Call `function` after the last hook of an epoch in which the user's code logs, and before callbacks that monitor
    it, and loggers, look at it. There is no hook in between."""
    plain = call._call_lightning_module_hook

    def run(of: Trainer, name: str, *args: Any, **kwargs: Any) -> Any:
        result = plain(of, name, *args, **kwargs)
        if of is trainer and name in ("on_train_epoch_end", "on_validation_epoch_end", "on_test_epoch_end"):
            function()
        return result

    override(call, "_call_lightning_module_hook", run)


def validate_by_first_clock(trainer: Trainer, agree: Callable[[bool], bool], override: Override) -> None:
    """Where validation is due by the clock, let all ranks follow the first one's clock.

    Args:
        agree: gives every rank the first one's value.
    """
    if getattr(trainer, "_val_check_time_interval", None) is None:
        return
    loop = trainer.fit_loop.epoch_loop
    is_due = loop._should_check_val_fx
    override(loop, "_should_check_val_fx", lambda data_fetcher: agree(is_due(data_fetcher)))
