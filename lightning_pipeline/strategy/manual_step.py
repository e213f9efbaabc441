"""Training steps with manual optimization: the user's step runs the backwards and the optimizers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torchmetrics import Metric

from lightning_pipeline.engine.microbatch import Microbatch
from lightning_pipeline.engine.suspended import Suspended, SyncPoint, running_step
from lightning_pipeline.engine.work import StepTask
from lightning_pipeline.partition.overrides import overridden
from lightning_pipeline.recording.step_gradients import UNANSWERED, StepGradients, given

from .hooks import has_hook
from .logged_values import default_dtype
from .manual import Closure, batch_calls_met
from .own_attributes import OwnAttributes
from .own_backward import backward_of
from .stage_runner import explain_single_sample, result_of

if TYPE_CHECKING:
    from .session import Session


class ManualStep:
    """One such step, and what the batch does where its micro-batches meet (the engine's `BatchWork`).

    Args:
        args: the arguments of the user's training_step after the batch.

    Attributes:
        needs_losses: a hook gets the losses that backward is called on.
    """

    def __init__(self, session: Session, args: tuple[Any, ...]) -> None:
        self.needs_losses = has_hook("on_before_backward", session.module)
        self._session = session
        self._module = session.module
        self._plugin = session.strategy.precision_plugin
        self.performing = self._plugin.train_step_context
        self._runner = session.runner
        self._gradients = session.stages.gradients
        self._args = args
        self._attributes = OwnAttributes(session.module, Metric, session.optimizers.optimizers)
        self.turn, self.pause, self.end = self._attributes.turn, self._attributes.pause, self._attributes.end
        self._in_part = ExitStack()  # of what is entered while micro-batches run
        # Each micro-batch's step has a thread of its own, by which `self.log` finds the micro-batch.
        self._states: dict[Suspended | None, Microbatch] = {}

    def run(self, microbatches: list[Any] | None) -> Any:
        """Run the step. Returns its result, combined over micro-batches."""
        stages, module = self._session.stages, self._module
        if (scaler := getattr(self._plugin, "scaler", None)) is not None:
            # A scaler creates its scale at the first call, and ranks without a loss would not call it.
            scaler.scale(torch.zeros((), device=self._session.device))
        work = StepTask(
            kind=("train", module.training),
            step=self._run_microbatch,
            loss_of=lambda state, loss: self._runner.scaled_share(loss, state, 1),
            run_backward=backward_of(module)[0],
            after_backward=stages.after_backward,
            seed=self._runner.training_seed(),
            gradients=StepGradients(self._clear_gradient, self._read_gradient),
            batch=self,
        )
        met = batch_calls_met(module, self._update, self._gradients.clear, inside=stages.entered, aside=stages.aside)
        with met:
            is_alone = self._session.topology.num_stages == 1  # several stages keep the flags of micro-batches apart
            dtype = _dtype_within(self._plugin.train_step_context()) if is_alone else nullcontext()
            given.names.clear()
            with dtype, overridden() as override, self._in_part, self._attributes.noted():
                override(module, "log", self._log)
                self._gradients.gather()
                states, numbers = self._runner.run(work, microbatches, lambda: [self._runner.settings.digest()])
            self._runner.show_summary([state.num_samples for state in states], 1)
            self._runner.finish(states, numbers, training=True)
            result = result_of(states)
        self._session.optimizers.replace(stages.shard())
        return result

    def _update(self, optimizer: Optimizer, do: Callable[[Closure | None], Any], closure: Closure | None) -> Any:
        """An update that the user calls on torch's own optimizer, not on Lightning's."""

        # Gradients are final after the closure, which the optimizer calls itself.
        def closed() -> Any:
            loss = None if closure is None else closure()
            with self._session.stages.aside():
                self._session.before_update(optimizer)
            return loss

        with self._session.updating(optimizer, closed) as run:
            if closure is not None:
                return do(run)
            run()
            return do(None)

    def _run_microbatch(self, state: Microbatch, batch: Any) -> tuple[Any, None]:
        self._states[running_step()] = state
        try:
            with self._plugin.train_step_context():
                return self._module.training_step(batch, *self._args), None
        except ValueError as error:
            explain_single_sample(state, error)
            raise

    def _clear_gradient(self, name: str, number: int) -> None:
        """Clear the gradient of a parameter where the micro-batches of a step next meet."""
        clear = partial(self._gradients.clear, [self._session.pipeline.recorder.tensors.tensors[number]])
        step = running_step()
        if step is None:
            clear()
        else:
            step.defer(f"the gradient of {name} set to None", clear)

    def _read_gradient(self, parameter: Tensor, name: str) -> Any:
        """The gradient of a parameter on all ranks, where the micro-batches of a step have come to the call."""
        step, stages = running_step(), self._session.stages
        if step is None or stages.has_slices:
            return UNANSWERED

        def perform(closures: Any) -> Any:
            given.are_read = True
            with stages.entered():
                gradient = parameter.grad
                if gradient is not None and len(self._states) > 1:
                    given.names.add(name)
                if gradient is None or stages.owner_computes is None:
                    return gradient
                if gradient.layout is not torch.strided:
                    return UNANSWERED
                [copy] = stages.owner_computes.whole([gradient.detach().clone()], f"the gradient of {name}")
            given.note(copy)
            return copy

        return step.meet(SyncPoint(f"the gradient of {name}", perform))

    def _log(self, *logged: Any, **options: Any) -> None:
        state = self._states.get(running_step())
        if state is None:  # in a hook
            type(self._module).log(self._module, *logged, **options)
        else:
            self._runner.note(state, *logged, **options)

    # -- BatchWork --------------------------------------------------------------------------------------------------

    def before_part(self) -> None:
        given.go_on()
        self._gradients.gather()
        self._in_part.enter_context(self._session.optimizers.refused_in("training_step"))

    def after_part(self) -> None:
        self._in_part.close()
        self._gradients.release()

    def before_backward(self) -> None:
        # As on the first batch of an accumulation window: what is summed over stages and replicas is this backward's.
        self._gradients.begin(first=True, complete=True)

    def after_backward(self, losses: Sequence[Tensor | None]) -> None:
        self._in_part.close()
        self._session.stages.note_uses(training=True)
        self._gradients.finish()
        if self.needs_losses and (loss := self.closure_value(losses)) is not None:
            with self.performing():
                self._plugin.pre_backward(loss, self._module)
        self._session.stages.publish_gradients()
        # Lightning's own calls of both return at once within a step (`backwards_met`), so their hooks run here.
        with self.performing():
            self._plugin.post_backward(torch.zeros(()), self._module)

    def closure_value(self, values: Sequence[Tensor | None]) -> Tensor | None:
        found = [value for value in values if value is not None]
        if len(found) < len(values):
            return None
        return self._runner.loss_of_batch(found, [state.num_samples for state in self._states.values()])


@contextmanager
def _dtype_within(context: AbstractContextManager[None]) -> Iterator[None]:
    """While entered, the default dtype is that which a context sets. Micro-batches enter and leave such a context by
    turns, and the dtype is the process's."""
    with context:
        within = torch.get_default_dtype()
    with default_dtype(within):
        yield
