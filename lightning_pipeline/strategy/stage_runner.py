"""Runs the user's steps on this rank's stages: one call from Lightning, many micro-batches, one result."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import Tensor

from lightning_pipeline import _torch
from lightning_pipeline.engine.draws import Draws
from lightning_pipeline.engine.microbatch import Microbatch
from lightning_pipeline.engine.work import StepTask
from lightning_pipeline.partition import tree
from lightning_pipeline.partition.batches import OneBatch, microbatches_of
from lightning_pipeline.partition.rng import mix
from lightning_pipeline.recording.step_gradients import StepGradients, refuse_read

from .._lightning import rank_zero_info, rank_zero_warn
from .group_settings import GroupSettings
from .hooks import hooks_see_gradients
from .lightning_private import skips_backward, total_batches
from .logged_values import LoggedValues, digest_of_numbers, numbers_in, take_numbers
from .measure import step_context
from .outputs import combine, is_sum_over_samples, loss_in, mean_loss
from .own_backward import backward_of
from .signals import merge
from .stage_optimizers import zeroed_unseen
from .summary import batch_norms_of, summary_of
from .whole_batch import WholeBatch

if TYPE_CHECKING:
    from .session import Session

_SINGLE_SAMPLE = "more than 1 value per channel"
"""In the error of torch's batch norms."""


class StageRunner:
    """Splits batches, runs the steps of their micro-batches, and puts the results together.

    Attributes:
        peak_live: the most activations of virtual stages that were live on this rank at once in a training step so far.
        settings: those of optimizers, which are compared in training steps.
    """

    def __init__(self, session: Session, seed: int) -> None:
        strategy = session.strategy
        self.peak_live: float = 0
        self._module = session.module
        self._stages = session.stages
        self._session = session
        self._signals = session.signals
        self._mean = strategy.loss_reduction == "mean"
        self._output_broadcast = strategy.output_broadcast
        # A single process takes a batch whole that does not tell how to split it, unless it was asked to.
        self._must_split = not session.is_single_process or strategy.num_microbatches is not None
        # Replicas see other samples, and draw other random numbers for them.
        self._seed = mix(seed, session.topology.replica) if session.replicas is not None else seed
        self._logged = LoggedValues(session.module)
        self._draws = Draws(session.device)
        self.settings = GroupSettings(session)
        self._has_looked_at_loss = not self._mean
        self._has_shown_summary = False

    def split(self, batch: Any) -> list[Any] | None:
        """The micro-batches of a batch on the first rank; None on the others."""
        if self._stages.pipeline.rank != 0:
            return None
        if isinstance(batch, Iterator) and not isinstance(batch, OneBatch):  # the step takes batches itself
            if self._session.context_group is not None:
                raise NotImplementedError(
                    "the step takes its batches from dataloader_iter, and with context_parallel_size each rank would "
                    "take its own: have the step take a batch instead"
                )
            return [batch]
        group = self._session.tensor_group or self._session.context_group
        if group is not None:
            batch = group.same(batch)
        try:
            return microbatches_of(batch, self._stages.pipeline.num_microbatches, self._module)
        except ValueError:
            if self._must_split:
                raise
            return [batch]

    def whole_training_batch(self) -> WholeBatch:
        """For a training step of a single process with one micro-batch, which Lightning runs."""
        self.show_summary(None, self._module.trainer.accumulate_grad_batches)
        self.peak_live = max(self.peak_live, 1)
        pipeline = self._stages.pipeline
        actions = pipeline.program(training=True, num_microbatches=1).actions
        return WholeBatch(self._draws, self.training_seed(), actions, pipeline.observe)

    def whole_evaluation_batch(self, name: str, args: tuple[Any, ...]) -> WholeBatch:
        """Likewise for the evaluation step of this name; `args`: its arguments after the batch."""
        return WholeBatch(self._draws, self._evaluation_seed(name, _integers(args)), (), None)

    def train(self, args: tuple[Any, ...], microbatches: list[Any] | None, *, is_last: bool) -> Any:
        """One training step with its backward, whose gradients are held back until `LocalStages.publish_gradients`.

        Returns the loss, or the step's dictionary with it; None if all replicas skip the batch.

        Args:
            args: the arguments of the user's training_step after the batch.
            microbatches: as `split` gives them.
            is_last: the batch ends an accumulation window, so gradients are summed over replicas.

        Raises:
            ValueError: the step returned no loss.
        """
        trainer = self._module.trainer
        if skips_backward(trainer):
            return self._train_without_backward(args, microbatches)
        accumulate = trainer.accumulate_grad_batches
        is_first = trainer.fit_loop.batch_idx % accumulate == 0
        gradients = self._stages.gradients
        self._stages.pipeline.take_in()  # first, as gradients are held of what this rank has then
        gradients.begin(
            first=is_first,
            complete=is_last,
            unseen=zeroed_unseen(self._module) if is_first else (),
            are_seen=accumulate > 1 and hooks_see_gradients(self._module),
        )
        is_sum = False

        def loss_of(state: Microbatch, loss: Tensor) -> Tensor:
            nonlocal is_sum
            # Once, as looking through the graph takes time, and on the rank that has the loss.
            if not self._has_looked_at_loss and state.num_microbatches > 1:
                self._has_looked_at_loss = True
                is_sum = is_sum_over_samples(loss, state.num_samples)
            return self.scaled_share(loss, state, accumulate)

        run_backward, is_plain = backward_of(self._module)
        cleared: dict[str, int] = {}
        work = StepTask(
            kind=("train", self._module.training),
            step=self._step_function("training_step", args, has_loss=True),
            loss_of=loss_of,
            run_backward=run_backward,
            after_backward=self._stages.after_backward,
            can_split=is_plain,
            seed=self.training_seed(),
            gradients=StepGradients(cleared.__setitem__, lambda _, name: refuse_read(name), accumulates=not is_first),
        )
        with self._session.optimizers.refused_in("training_step"):
            states, numbers = self.run(work, microbatches, lambda: [float(is_sum), self.settings.digest()])
        sizes = [state.num_samples for state in states]
        self.peak_live = max(self.peak_live, self._stages.pipeline.peak_live)
        self.show_summary(sizes, accumulate)
        losses = [(state.loss.detach(), state.num_samples) for state in states if state.loss is not None]
        # A replica whose step has no loss still takes part in the sums of gradients, and updates as the others do.
        is_skipped_by_all = not self._act_on_signals(numbers, training=True, has_loss=bool(losses))
        if any(is_sum for is_sum, *_ in numbers):
            self._warn_of_sum()
        self._log(states, numbers)
        self._stages.note_uses(training=True)
        gradients.finish()
        if cleared:  # which Lightning does after the step, but for modules that do it by themselves
            tensors = self._stages.pipeline.recorder.tensors
            gradients.clear([tensors.in_place(number) for number in cleared.values()])
        return None if is_skipped_by_all else self._training_result(states, losses)

    def _training_result(self, states: list[Microbatch], losses: list[tuple[Tensor, int]]) -> Any:
        """What a training step gives: the loss, or a dictionary with it.

        Args:
            losses: of micro-batches, with their numbers of samples.
        """
        if not losses:  # other replicas have some, with whose gradients this one updates, too
            return torch.zeros((), device=self._session.device)
        loss = self.loss_of_batch(*map(list, zip(*losses, strict=True)))
        extra = _without_loss([state.result for state in states], [state.num_samples for state in states])
        return {"loss": loss, **extra} if extra else loss

    def _train_without_backward(self, args: tuple[Any, ...], microbatches: list[Any] | None) -> Any:
        """As `train` for a step that leaves all gradients as they are, whose forwards alone are run."""
        function = self._step_function("training_step", args, has_loss=True)
        work = StepTask(
            kind=("train without backward", self._module.training),
            step=lambda state, batch: (function(state, batch)[0], None),
            seed=self.training_seed(),
        )
        with self._session.optimizers.refused_in("training_step"):
            states, numbers = self.run(work, microbatches, lambda: [self.settings.digest()])
        name = type(self._module).__name__
        losses = [(loss_in(one.result, name).detach(), one.num_samples) for one in states if one.result is not None]
        has_loss = self._act_on_signals(numbers, training=True, has_loss=bool(losses)) if numbers else bool(losses)
        self._log(states, numbers)
        self._stages.note_uses(training=True)
        return self._training_result(states, losses) if has_loss else None

    def evaluate(self, name: str, args: tuple[Any, ...], microbatches: list[Any] | None) -> Any:
        """The validation, test or predict step of this name. Returns its outputs, combined over micro-batches.

        Args:
            args, microbatches: as for `train`.
        """
        pipeline, numbers = self._stages.pipeline, _integers(args)
        tensors, gradients = pipeline.recorder.tensors, self._stages.gradients
        work = StepTask(
            kind=(name, self._module.training, *numbers[1:]),
            step=self._step_function(name, args),
            results_on=None if self._output_broadcast else pipeline.last_rank,
            waits=name != "predict_step",  # the first stages may go on with the next batch
            seed=self._evaluation_seed(name, numbers),
            gradients=StepGradients(lambda _, number: gradients.clear([tensors.tensors[number]])),
        )
        with self._session.optimizers.refused_in(name):
            states, numbers_of_all = self.run(work, microbatches)
        self.finish(states, numbers_of_all, training=False)
        if not self._output_broadcast and pipeline.rank != pipeline.last_rank:
            return None
        return result_of(states)

    # -- a step --------------------------------------------------------------------------------------------------------

    def training_seed(self) -> int:
        """Of the next training step."""
        return mix(self._seed, 0, total_batches(self._module.trainer))

    def _evaluation_seed(self, name: str, numbers: Sequence[int]) -> int:
        return mix(self._seed, zlib.crc32(name.encode()), *numbers)

    def run(
        self, work: StepTask, microbatches: list[Any] | None, extra: Callable[[], list[float]] = list
    ) -> tuple[list[Microbatch], list[list[float]]]:
        """Run a step. Returns its micro-batches, and every rank's `extra`, digest of logged numbers, and signals.

        The `extra` of a training step ends with the digest of settings.
        """
        self._stages.follow_module()
        return self._stages.pipeline.run(
            work,
            microbatches,
            lambda states: [*extra(), digest_of_numbers(state.logged for state in states), self._signals.noted],
        )

    def finish(self, states: list[Microbatch], numbers: list[list[float]], *, training: bool) -> None:
        """After `run`: act on signals, log, and release what only other stages use."""
        if numbers:
            self._act_on_signals(numbers, training=training)
        self._log(states, numbers)
        self._stages.note_uses(training=training)

    def _step_function(
        self, name: str, args: tuple[Any, ...], *, has_loss: bool = False
    ) -> Callable[[Microbatch, Any], tuple[Any, Any]]:
        """The user's step of this name, for a `StepTask`."""
        function, context = getattr(self._module, name), step_context(self._module, name)
        attributes = vars(self._module)
        module_name = type(self._module).__name__
        needs_gradients = has_loss and backward_of(self._module)[1]

        def run(state: Microbatch, batch: Any) -> tuple[Any, Any]:
            # Not by `overridden`, which takes longer: this runs for each micro-batch.
            before = attributes.get("log")
            attributes["log"] = lambda *args, **kwargs: self.note(state, *args, **kwargs)
            try:
                with context():
                    result = function(batch, *args)
            except ValueError as error:
                explain_single_sample(state, error)
                raise
            finally:
                if before is None:
                    attributes.pop("log", None)
                else:
                    attributes["log"] = before
            if not has_loss:
                return result, None
            loss = None if result is None else loss_in(result, module_name)
            if loss is not None and needs_gradients and not loss.requires_grad:
                raise RuntimeError(
                    f"the loss that {module_name}.training_step returned has no gradients to give: nothing that it was "
                    f"computed from requires them, or they were off; to skip a batch, return None"
                )
            if not self._mean:
                for logged in state.logged:
                    logged.is_share = loss is not None and _is_same(logged.token, _token(loss, state), state)
            return result, loss

        return run

    def note(self, state: Microbatch, *args: Any, **kwargs: Any) -> None:
        """Keep a call of `self.log` in the user's step until the step ends."""
        logged = self._logged.note(state.num_samples, *args, **kwargs)
        value = args[1] if len(args) > 1 else kwargs["value"]
        if not self._mean and isinstance(value, Tensor):
            logged.token = _token(value, state)
        state.logged.append(logged)

    def _log(self, states: list[Microbatch], numbers: list[list[float]]) -> None:
        """Log the micro-batches' values, as one process does for its whole batch."""
        logged = [state.logged for state in states]
        if len({digest for *_, digest, _ in numbers}) > 1:  # as of times: the first rank's numbers count
            assert self._session.transport is not None  # there are several stages
            take_numbers(logged, self._session.transport.broadcast_object(numbers_in(logged), 0, "logged numbers"))
        self._logged.log(logged, self._module.log)

    def _act_on_signals(self, numbers: list[list[float]], *, training: bool, has_loss: bool = True) -> bool:
        """Act on the signals of all ranks. Returns whether the training step of any replica has a loss."""
        signals = merge(noted for *_, noted in numbers)
        replicas = self._session.replicas
        if training:
            self.settings.check_stages(settings for *_, settings, _, _ in numbers)
        if replicas is not None and training:  # in evaluation they may have unequally many batches, and do not meet
            outside = self._stages.owner_computes
            first_rank = None if outside is None else outside.first_rank
            history, drawn = (0, 0.0) if first_rank is None else (first_rank.history, first_rank.draws.digest())
            *_, settings, _, _ = numbers[0]
            gathered = replicas.gather_numbers(float(has_loss), signals, settings, float(history), drawn)
            has_loss = any(found for found, *_ in gathered)
            signals = merge(noted for _, noted, *_ in gathered)
            self.settings.check_replicas(settings for _, _, settings, *_ in gathered)
            if first_rank is not None:
                if len({history for *_, history, _ in gathered}) > 1:
                    _refuse_parted(first_rank.last_changed)
                draws = first_rank.draws
                if len({drawn for *_, drawn in gathered}) > 1:
                    draws.follow(replicas.gather_objects(draws.drawn()))
                draws.have_met()
        self._signals.act_on(signals, by_all=training or replicas is None)
        return has_loss

    def scaled_share(self, loss: Tensor, state: Microbatch, accumulate: int) -> Tensor:
        """The micro-batch's share of the batch's loss, from which backward starts; scaled for fp16."""
        if not self._mean:
            share = loss / accumulate
        elif state.even:
            share = loss / (state.num_microbatches * accumulate)
        else:
            share = loss * (state.weight / accumulate)
        scaler = getattr(self._module.trainer.precision_plugin, "scaler", None)
        return share if scaler is None else scaler.scale(share)

    def loss_of_batch(self, losses: list[Tensor], sizes: list[int]) -> Tensor:
        """The batch's loss from those of micro-batches; `sizes`: their numbers of samples."""
        return mean_loss(losses, sizes) if self._mean else torch.stack(losses).sum()

    def show_summary(self, sizes: list[int] | None, accumulate: int) -> None:
        """Tell the user once how batches are split (`summary_of`)."""
        if self._has_shown_summary:
            return
        self._has_shown_summary = True
        rank_zero_info(summary_of(self._session.topology, sizes, accumulate))
        if sizes is not None and (batch_norms := batch_norms_of(self._module, sizes)):
            rank_zero_info(batch_norms)

    def _warn_of_sum(self) -> None:
        rank_zero_warn(
            f"the loss of {type(self._module).__name__}.training_step is a sum over samples, and of the micro-batches' "
            f"losses the mean is taken: it and its gradients are those of the whole batch divided by the number of "
            f'micro-batches. Use PipelineStrategy(loss_reduction="sum"), or a loss that is a mean over samples'
        )


def result_of(states: list[Microbatch]) -> Any:
    """The result of a step, combined over micro-batches and detached."""
    sizes = [state.num_samples if state.is_counted else 0 for state in states]
    return _detached(combine([state.result for state in states], sizes))


def explain_single_sample(state: Microbatch, error: ValueError) -> None:
    """Raise with the way out, if the error is torch's for a batch norm of one sample."""
    if state.num_samples == 1 and _SINGLE_SAMPLE in str(error):
        raise ValueError(
            f"micro-batch {state.index} has one sample, of which a batch norm has no statistics: give batches two "
            f"samples or more, as with DataLoader(drop_last=True) ({error})"
        ) from error


def _refuse_parted(changed: str) -> NoReturn:
    raise RuntimeError(
        f"a hook has changed {changed or 'parameters or buffers'} on one replica alone, as it asks for the rank "
        f"(rank_zero_only, global_rank, trainer.is_global_zero): replicas would go on with different values. Let every "
        f"rank run the lines that change the module"
    )


def _integers(args: Sequence[Any]) -> list[int]:
    """The indices of the batch and its loader among a step's arguments."""
    return [arg for arg in args if isinstance(arg, int)]


def _token(value: Any, state: Microbatch) -> Any:
    """Identifies a tensor's present value: equal for tensors that share it in memory, as `detach` makes them."""
    number = state.recording.value_of(value) if state.recording is not None else None
    if number is not None:
        return number
    with _torch.DisableTorchFunction():
        return value.data_ptr(), value.dtype, value._version


def _is_same(token: Any, other: Any, state: Microbatch) -> bool:
    if isinstance(token, int) and isinstance(other, int):
        assert state.recording is not None
        return state.recording.event.origin(token) == state.recording.event.origin(other)
    return bool(token == other)


def _without_loss(results: list[Any], sizes: list[int]) -> dict[str, Any] | None:
    first = next(result for result in results if result is not None)
    if not isinstance(first, Mapping):
        return None
    extras: list[Any] = [
        None if result is None else {key: value for key, value in result.items() if key != "loss"} for result in results
    ]
    return _detached(combine(extras, sizes)) if len(first) > 1 else None


def _detached(value: Any) -> Any:
    return tree.replace(value, Tensor.detach)
