"""Training steps with manual optimization: the user's step runs the backwards and the optimizers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from lightning_pipeline.engine.microbatch import Microbatch
from lightning_pipeline.engine.suspended import Suspended, running_step
from lightning_pipeline.engine.work import StepTask
from lightning_pipeline.partition.overrides import overridden

from .._lightning import LightningModule
from .hooks import has_hook
from .measure import step_context
from .outputs import backward_of
from .stage_runner import StageRunner, explain_single_sample, result_of


class ManualStep:
    """One such step, and what its batch does where its micro-batches have met (the engine's `BatchWork`).

    Args:
        args: what the user's training_step takes beside the batch.
        on_gradients: called when the gradients of a backward are complete, with the loss if it `needs_losses`.

    Attributes:
        needs_losses: a hook is given the losses that backward is called on.
    """

    def __init__(
        self,
        module: LightningModule,
        runner: StageRunner,
        args: tuple[Any, ...],
        on_gradients: Callable[[Tensor | None], None],
    ) -> None:
        self.needs_losses = has_hook("on_before_backward", module)
        self._module = module
        self._runner = runner
        self._gradients = runner.stages.gradients
        self._args = args
        self._on_gradients = on_gradients
        # Micro-batches take turns in threads of their own, so what is logged goes to that of the thread.
        self._states: dict[Suspended | None, Microbatch] = {}

    def run(self, microbatches: list[Any] | None) -> Any:
        """Run it. Returns what the user's step does, put together over micro-batches."""
        run_backward, _ = backward_of(self._module)
        work = StepTask(
            kind=("train", self._module.training),
            step=self._run_microbatch,
            loss_of=lambda state, loss: self._runner.scaled_share(loss, state, 1),
            run_backward=run_backward,
            after_backward=self._runner.stages.after_backward,
            seed=self._runner.training_seed(),
            batch=self,
        )
        with overridden() as override:
            override(self._module, "log", self._log)
            self._gradients.gather()
            states, numbers = self._runner.run(work, microbatches)
        self._runner.show_summary([state.num_samples for state in states], 1)
        self._runner.finish(states, numbers, training=True)
        return result_of(states)

    def _run_microbatch(self, state: Microbatch, batch: Any) -> tuple[Any, None]:
        self._states[running_step()] = state
        try:
            with step_context(self._module, "training_step")():
                return self._module.training_step(batch, *self._args), None
        except ValueError as error:
            explain_single_sample(state, error)
            raise

    def _log(self, *logged: Any, **options: Any) -> None:
        state = self._states.get(running_step())
        if state is None:  # in a hook
            type(self._module).log(self._module, *logged, **options)
        else:
            self._runner.note(state, *logged, **options)

    # -- BatchWork --------------------------------------------------------------------------------------------------

    def before_part(self) -> None:
        self._gradients.gather()

    def after_part(self) -> None:
        self._gradients.release()

    def before_backward(self) -> None:
        # As on the first batch of an accumulation window: what is summed over stages and replicas is this backward's.
        self._gradients.begin(first=True, complete=True)

    def after_backward(self, losses: Sequence[Tensor | None]) -> None:
        self._runner.stages.take_in_uses(training=True)
        self._gradients.finish()
        self._on_gradients(self.closure_value(losses) if self.needs_losses else None)

    def closure_value(self, values: Sequence[Tensor | None]) -> Tensor | None:
        found = [value for value in values if value is not None]
        if len(found) < len(values):
            return None
        return self._runner.loss_of_batch(found, [state.num_samples for state in self._states.values()])
