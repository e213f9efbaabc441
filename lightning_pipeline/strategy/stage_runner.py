"""Runs the user's steps on this rank's stages: one call from Lightning, many micro-batches, one result."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from lightning_pipeline.engine.draws import Draws
from lightning_pipeline.engine.executor import Span
from lightning_pipeline.engine.fully_sharded import FullySharded
from lightning_pipeline.engine.gradients import Gradients
from lightning_pipeline.engine.microbatch import Microbatch
from lightning_pipeline.engine.pipeline import Pipeline
from lightning_pipeline.engine.suspended import Suspended, running_step
from lightning_pipeline.engine.work import StepTask
from lightning_pipeline.hooks.owner_computes import OwnerComputes
from lightning_pipeline.partition import tree
from lightning_pipeline.partition.microbatch import OneBatch, microbatches_of
from lightning_pipeline.partition.overrides import overridden
from lightning_pipeline.partition.ownership import Ownership
from lightning_pipeline.partition.rng import mix
from lightning_pipeline.runtime.direct import DirectTransport
from lightning_pipeline.runtime.replicas import Replicas
from lightning_pipeline.runtime.topology import Topology, stage_term
from lightning_pipeline.runtime.transport import Transport

from .._lightning import LightningModule, rank_zero_info, rank_zero_warn
from .local_module import LocalModule
from .logged_values import LoggedValues, digest_of_numbers, numbers_in, take_numbers
from .outputs import backward_of, combine, is_sum_over_samples, loss_in, mean_loss
from .partitioner import Cut
from .schedule_choice import Schedules
from .signals import Signals, merge
from .summary import batch_norms_of, summary_of
from .tensor_parallel import TensorGroup, place_gradients
from .whole_batch import WholeBatch

_SINGLE_SAMPLE = "more than 1 value per channel"
"""In the error of torch's batch norms."""


class StageRunner:
    """The steps of one cut, their gradients, and what this rank holds as they show who uses what.

    All ranks make it at the same point.

    Args:
        schedules: of training steps.
        transport: to the other stages; None with one.
        replicas: the ranks that run these stages on other samples; None if there are none.
        tensor_group: the ranks among which tensors are split; None if they are whole.
        signals: what has arrived here; all ranks come to know it after each step.
        seed: from which every step's random numbers derive.
        gradients_mean: over replicas gradients are averaged; else summed.
        is_fully_sharded: parameters are sharded over replicas.
        loss_mean: the step's loss is the mean over micro-batches; else their sum.
        output_broadcast: outputs of evaluation steps reach every stage; else they stay on the last.
        must_split: one process, too, raises where a batch does not tell how to split it, and does not take it whole.
        on_released: called when ranks hold other tensors than before.
    """

    def __init__(
        self,
        module: LightningModule,
        cut: Cut,
        schedules: Schedules,
        topology: Topology,
        device: torch.device,
        *,
        transport: Transport | None,
        replicas: Replicas | None,
        tensor_group: TensorGroup | None,
        signals: Signals,
        seed: int,
        gradients_mean: bool,
        is_fully_sharded: bool,
        loss_mean: bool,
        output_broadcast: bool,
        must_split: bool,
        on_released: Callable[[Ownership], None],
    ) -> None:
        self.peak_live = 0
        """The most activations of virtual stages that were live on this rank at once in a training step so far."""
        self._module = module
        self._device = device
        self._cut = cut
        self._transport = transport
        self._replicas = replicas
        self._tensor_group = tensor_group
        self._signals = signals
        self._mean = loss_mean
        self._output_broadcast = output_broadcast
        self._must_split = must_split
        self._seed = mix(seed, replicas.topology.replica) if replicas is not None else seed
        self._logged = LoggedValues(module)
        self._has_looked_at_loss = not loss_mean
        self._is_alone = topology.world_size == 1
        self._topology = topology
        self._has_told = False
        self._draws = Draws(device)
        self._on_released = on_released
        self._sharded: FullySharded | None = None
        self._is_settled = False
        if is_fully_sharded and replicas is not None:
            self._sharded = FullySharded(replicas, device.type, gradients_mean=gradients_mean)
        self.held = LocalModule(
            module,
            cut,
            schedules.placement,
            topology.stage_rank,
            device,
            transport=transport,
            replicas=replicas,
            tensor_group=tensor_group,
            sharded=self._sharded,
        )
        self.pipeline = Pipeline(
            rank=topology.stage_rank,
            placement=schedules.placement,
            device=device,
            transport=transport,
            tensors=self.held.tensors,
            calls=self.held.calls,
            holders=self.held.holders,
            schedule=schedules,
            num_microbatches=cut.num_microbatches,
            on_module_changed=self._take_in_new,
        )
        self.outside: OwnerComputes | None = None
        if transport is not None:
            direct = DirectTransport(transport, device)
            self.outside = OwnerComputes(module, self.pipeline.recorder, direct)
        self._gradients = Gradients(
            module,
            self.held.placement,
            self.pipeline.stages,
            [leaf.name for leaf in self.held.leaves],
            transport=transport,
            replicas=replicas,
            gradients_mean=gradients_mean,
            sharded=self._sharded,
        )
        self.release_remote()

    def take_over(self, outside: OwnerComputes | None) -> None:
        """Go on from the runner of an earlier cut, whose hooks may be running."""
        if outside is not None and self.outside is not None:
            outside.take_over(self.outside)
            self.outside = outside

    @property
    def has_slices(self) -> bool:
        """Whether parameters may be DTensors, of which each rank has a slice."""
        return self._sharded is not None or self._tensor_group is not None

    def split(self, batch: Any) -> list[Any] | None:
        """The micro-batches of a batch, on the first rank; None on the others."""
        if self.pipeline.rank != 0:
            return None
        if isinstance(batch, Iterator) and not isinstance(batch, OneBatch):  # of a step that takes batches itself
            return [batch]
        if self._tensor_group is not None:
            batch = self._tensor_group.same(batch)
        try:
            return microbatches_of(batch, self.pipeline.num_microbatches, self._module)
        except ValueError:
            if self._is_alone and not self._must_split:
                return [batch]
            raise

    def whole_training_batch(
        self, *, number: int, accumulate: int, observe: Callable[[Span], None] | None
    ) -> WholeBatch:
        """A training step of one process with one micro-batch, which Lightning runs.

        Args:
            number, accumulate: as for `train`.
            observe: gets its actions.
        """
        self._tell_once(None, accumulate)
        self.peak_live = max(self.peak_live, 1)
        actions = self.pipeline.program(training=True, num_microbatches=1).actions
        return WholeBatch(self._draws, self._training_seed(number), actions, observe)

    def whole_evaluation_batch(self, name: str, args: tuple[Any, ...]) -> WholeBatch:
        """Likewise the evaluation step of this name; `args`: what it takes beside the batch."""
        return WholeBatch(self._draws, self._evaluation_seed(name, _numbers(args)), (), None)

    def train(
        self,
        args: tuple[Any, ...],
        microbatches: list[Any] | None,
        *,
        number: int,
        accumulate: int,
        is_first: bool,
        is_last: bool,
        unseen: Container[nn.Parameter],
        context: Callable[[], AbstractContextManager[Any]],
        scale: Callable[[Tensor], Tensor] | None,
        observe_buckets: Callable[[int, float, float], None] | None,
    ) -> Any:
        """One training step with its backward, whose gradients are kept for `publish_gradients`. Returns the loss, or
        the step's dictionary with it.

        Args:
            args: what the user's training_step takes beside the batch.
            microbatches: as `split` has given them.
            number: number of the batch since training began.
            accumulate: number of batches over which gradients are accumulated.
            is_first: the batch begins an accumulation window.
            is_last: the batch ends it, so the gradients are summed over replicas.
            unseen: parameters whose gradients of the last window nobody needs.
            context: the precision's context around a step.
            scale: scales what backward starts from, for fp16.
            observe_buckets: gets what `PipelineGradReducer.observe` does.

        Raises:
            ValueError: the step returned no loss.
        """
        self._gradients.observe_buckets = observe_buckets
        self._gradients.begin(first=is_first, complete=is_last, unseen=unseen)
        is_sum = False

        def loss_of(state: Microbatch, loss: Tensor) -> Tensor:
            nonlocal is_sum
            if not self._has_looked_at_loss and state.num_microbatches > 1:
                self._has_looked_at_loss = True
                is_sum = is_sum_over_samples(loss, state.num_samples)
            weighted = self._weighted(loss, state, accumulate)
            return weighted if scale is None else scale(weighted)

        run_backward, is_plain = backward_of(self._module)
        work = StepTask(
            kind=("train", self._module.training),
            step=self._step_function(self._module.training_step, args, context, has_loss=True),
            loss_of=loss_of,
            run_backward=run_backward,
            after_backward=self._after_backward,
            can_split=is_plain,
            seed=self._training_seed(number),
        )
        states, numbers = self._run(work, microbatches, lambda: [float(is_sum)])
        self.peak_live = max(self.peak_live, self.pipeline.peak_live)
        self._tell_once([state.num_samples for state in states], accumulate)
        losses = [(state.loss.detach(), state.num_samples) for state in states if state.loss is not None]
        is_skipped_by_all = not self._heed(numbers, training=True, has_loss=bool(losses))
        if any(is_sum for is_sum, *_ in numbers):
            self._warn_of_sum()
        self._log(states, numbers)
        self._take_in_uses(training=True)
        self._gradients.finish()
        if is_skipped_by_all:
            return None
        if not losses:  # but of other replicas, whose gradients this one's optimizers take
            return torch.zeros((), device=self._device)
        loss = self._reported(*map(list, zip(*losses, strict=True))).to(torch.float32)
        extra = _without_loss([state.result for state in states], [state.num_samples for state in states])
        return {"loss": loss, **extra} if extra else loss

    def train_by_hand(
        self,
        args: tuple[Any, ...],
        microbatches: list[Any] | None,
        *,
        number: int,
        context: Callable[[], AbstractContextManager[Any]],
        scale: Callable[[Tensor], Tensor] | None,
        published: Callable[[Tensor | None], None],
        needs_losses: bool,
        observe_buckets: Callable[[int, float, float], None] | None,
    ) -> Any:
        """One training step that optimizes by itself. Returns what it does, put together over micro-batches.

        Args:
            args, microbatches, number, context, scale, observe_buckets: as for `train`.
            published: called when the gradients of a backward have been added to those in ``.grad``.
            needs_losses: with the loss that it was called on.
        """

        def loss_of(state: Microbatch, loss: Tensor) -> Tensor:
            weighted = self._weighted(loss, state, 1)
            return weighted if scale is None else scale(weighted)

        states_of: dict[Suspended | None, Microbatch] = {}

        def step(state: Microbatch, batch: Any) -> tuple[Any, Any]:
            states_of[running_step()] = state
            try:
                with context():
                    return self._module.training_step(batch, *args), None
            except ValueError as error:
                _tell_of_single_sample(state, error)
                raise

        def log(*logged: Any, **options: Any) -> None:
            state = states_of.get(running_step())
            if state is None:  # in a hook
                type(self._module).log(self._module, *logged, **options)
            else:
                self._note(state, *logged, **options)

        def mean(values: Sequence[Tensor | None]) -> Tensor | None:
            found = [value for value in values if value is not None]
            if len(found) < len(values):
                return None
            return self._reported(found, [state.num_samples for state in states_of.values()])

        run_backward, _ = backward_of(self._module)
        self._gradients.observe_buckets = observe_buckets
        work = StepTask(
            kind=("train", self._module.training),
            step=step,
            loss_of=loss_of,
            run_backward=run_backward,
            after_backward=self._after_backward,
            seed=self._training_seed(number),
            batch=_ByHand(
                self._gradients,
                partial(self._take_in_uses, training=True),
                published,
                mean,
                needs_losses=needs_losses,
            ),
        )
        with overridden() as override:
            override(self._module, "log", log)
            self._gradients.gather()
            states, numbers = self._run(work, microbatches)
        self._tell_once([state.num_samples for state in states], 1)
        self._heed(numbers, training=True)
        self._log(states, numbers)
        self._take_in_uses(training=True)
        return _detached(combine([state.result for state in states], [state.num_samples for state in states]))

    def evaluate(
        self,
        name: str,
        args: tuple[Any, ...],
        microbatches: list[Any] | None,
        context: Callable[[], AbstractContextManager[Any]],
    ) -> Any:
        """The validation, test or predict step of this name. Returns its output, put together over micro-batches.

        Args:
            args, microbatches, context: as for `train`.
        """
        numbers = _numbers(args)
        work = StepTask(
            kind=(name, self._module.training, *numbers[1:]),
            step=self._step_function(getattr(self._module, name), args, context),
            results_on=None if self._output_broadcast else self.pipeline.last_rank,
            waits=name != "predict_step",  # the first stages go on with the next batch
            seed=self._evaluation_seed(name, numbers),
        )
        states, numbers_of_all = self._run(work, microbatches)
        if numbers_of_all:
            self._heed(numbers_of_all, training=False)
        self._log(states, numbers_of_all)
        self._take_in_uses(training=False)
        if not self._output_broadcast and self.pipeline.rank != self.pipeline.last_rank:
            return None
        return _detached(combine([state.result for state in states], [state.num_samples for state in states]))

    def publish_gradients(self) -> None:
        """Let the gradients of the steps appear in `.grad`."""
        self._gradients.publish()
        if self._tensor_group is not None:
            place_gradients(self._module.parameters())

    def shard(self) -> dict[nn.Parameter, nn.Parameter]:
        """Shard what is to be sharded over replicas, once it is known. Returns the new parameter for each of them."""
        return self._gradients.shard()

    def gather_parameters(self) -> None:
        """For a whole loop: replicas may have unequally many batches, so steps must not wait for one another."""
        if self._sharded is not None:
            self._sharded.gather()

    def release_parameters(self) -> None:
        """After the loop."""
        self.pipeline.check()
        if self._sharded is not None:
            self._sharded.release()

    def release_remote(self) -> None:
        """Let go of what other stages hold, as far as it is known."""
        self.held.release_remote()
        self.pipeline.note_release()
        self._gradients.settle(self.held.ownership)

    # -- a step --------------------------------------------------------------------------------------------------------

    def _training_seed(self, number: int) -> int:
        return mix(self._seed, 0, number)

    def _evaluation_seed(self, name: str, numbers: Sequence[int]) -> int:
        return mix(self._seed, zlib.crc32(name.encode()), *numbers)

    def _run(
        self, work: StepTask, microbatches: list[Any] | None, extra: Callable[[], list[float]] = list
    ) -> tuple[list[Microbatch], list[list[float]]]:
        """Run a step. Returns its micro-batches, and of every rank `extra`, what is logged, and what has arrived."""
        return self.pipeline.run(
            work,
            microbatches,
            lambda states: [*extra(), digest_of_numbers(state.logged for state in states), self._signals.noted],
        )

    def _step_function(
        self,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        context: Callable[[], AbstractContextManager[Any]],
        *,
        has_loss: bool = False,
    ) -> Callable[[Microbatch, Any], tuple[Any, Any]]:
        attributes = vars(self._module)
        name = type(self._module).__name__
        needs_gradients = has_loss and backward_of(self._module)[1]
        sums = has_loss and not self._mean

        def run(state: Microbatch, batch: Any) -> tuple[Any, Any]:
            before = attributes.get("log")
            attributes["log"] = lambda *args, **kwargs: self._note(state, *args, **kwargs)
            try:
                with context():
                    result = function(batch, *args)
            except ValueError as error:
                _tell_of_single_sample(state, error)
                raise
            finally:
                if before is None:
                    attributes.pop("log", None)
                else:
                    attributes["log"] = before
            if not has_loss:
                return result, None
            loss = None if result is None else loss_in(result, name)
            if loss is not None and needs_gradients and not loss.requires_grad:
                raise RuntimeError(
                    f"the loss that {name}.training_step returned has no gradients to give: nothing that it was "
                    f"computed from requires them, or they were off; to skip a batch, return None"
                )
            if sums:
                for logged in state.logged:
                    logged.is_share = loss is not None and _is_same(logged.token, _token(loss, state), state)
            return result, loss

        return run

    def _note(self, state: Microbatch, *args: Any, **kwargs: Any) -> None:
        """Keep what the user's step logs until the step ends."""
        logged = self._logged.note(state.num_samples, *args, **kwargs)
        value = args[1] if len(args) > 1 else kwargs["value"]
        if not self._mean and isinstance(value, Tensor):
            logged.token = _token(value, state)
        state.logged.append(logged)

    def _log(self, states: list[Microbatch], numbers: list[list[float]]) -> None:
        """Log what the micro-batches have logged, as one process does for its whole batch."""
        logged = [state.logged for state in states]
        if len({digest for *_, digest, _ in numbers}) > 1:  # of a clock, say: what the first rank has found counts
            assert self._transport is not None
            take_numbers(logged, self._transport.broadcast_object(numbers_in(logged), 0, "logged numbers"))
        self._logged.log(logged, self._module.log)

    def _heed(self, numbers: list[list[float]], *, training: bool, has_loss: bool = True) -> bool:
        """Take in what has arrived at some rank. Returns whether some replica's training step has a loss."""
        signals = merge(noted for *_, noted in numbers)
        all_ranks = self._replicas is None
        if self._replicas is not None and training:  # in evaluation replicas may have unequally many batches
            gathered = self._replicas.gather_numbers(float(has_loss), signals)
            has_loss = any(found for found, _ in gathered)
            signals = merge(noted for _, noted in gathered)
            all_ranks = True
        self._signals.heed(signals, by_all=all_ranks)
        return has_loss

    def _weighted(self, loss: Tensor, state: Microbatch, accumulate: int) -> Tensor:
        """The micro-batch's share of the loss that is minimised."""
        if not self._mean:
            return loss / accumulate
        if state.even:
            return loss / (state.num_microbatches * accumulate)
        return loss * (state.weight / accumulate)

    def _tell_once(self, sizes: list[int] | None, accumulate: int) -> None:
        """`sizes`: as for `summary_of`."""
        if not self._has_told:
            self._has_told = True
            rank_zero_info(summary_of(self._topology, sizes, accumulate))
            if sizes is not None and (batch_norms := batch_norms_of(self._module, sizes)):
                rank_zero_info(batch_norms)

    def _warn_of_sum(self) -> None:
        rank_zero_warn(
            f"the loss of {type(self._module).__name__}.training_step is a sum over samples, and of the micro-batches' "
            f"losses the mean is taken: it and its gradients are those of the whole batch divided by the number of "
            f'micro-batches. Use PipelineStrategy(loss_reduction="sum"), or a loss that is a mean over samples'
        )

    def _reported(self, losses: list[Tensor], sizes: list[int]) -> Tensor:
        return mean_loss(losses, sizes) if self._mean else torch.stack(losses).sum()

    def _after_backward(self, stage: int, microbatch: Microbatch) -> None:
        is_last = microbatch.index == microbatch.num_microbatches - 1
        self._gradients.after_backward(stage, microbatch.index, last=is_last)

    def _take_in_uses(self, *, training: bool) -> None:
        """A step showed who uses what: let go of what this stage turned out not to need."""
        uses = self.pipeline.take_uses()
        is_new = self.held.placement.add(uses) if uses else False
        if self._is_alone or not training:
            return
        if is_new or not self._is_settled:
            self._warn_of_unreached()
            self._is_settled = True
            self.held.placement.settle()
            self.held.agree()
            self.release_remote()
            self._on_released(self.held.ownership)

    def _take_in_new(self) -> None:
        if self.held.take_in_new():
            self._gradients.settle(self.held.ownership)
            self._on_released(self.held.ownership)

    def _warn_of_unreached(self) -> None:
        """Say which stages have had nothing to do: a mistake in the stage_config, or modules that are called later."""
        placement = self.pipeline.placement
        if self.pipeline.num_ranks == 1:  # which records nothing
            return
        for stage in range(len(placement)):
            if stage not in self.pipeline.reached:
                names = [repr(name) for name, own in self._cut.stages.exact.items() if own == stage]
                rank_zero_warn(
                    f"{stage_term(placement)} {stage} is never reached by the first training step: nothing ran on it, "
                    f"and stage_config gives it {', '.join(names) or 'no module'}. Where this is not to change later, "
                    f"name the first module there that the step calls"
                )


class _ByHand:
    """What a batch does of which the user's step runs the backwards and the optimizers.

    Args:
        take_in_uses: called when a backward has shown who uses what.
        published: called when its gradients have been added to those in ``.grad``, with the loss if it `needs_losses`.
        mean: of the micro-batches' losses.
    """

    def __init__(
        self,
        gradients: Gradients,
        take_in_uses: Callable[[], None],
        published: Callable[[Tensor | None], None],
        mean: Callable[[Sequence[Tensor | None]], Tensor | None],
        *,
        needs_losses: bool,
    ) -> None:
        self.needs_losses = needs_losses
        self._gradients = gradients
        self._take_in_uses = take_in_uses
        self._published = published
        self._mean = mean

    def before_part(self) -> None:
        self._gradients.gather()

    def after_part(self) -> None:
        self._gradients.release()

    def before_backward(self) -> None:
        # As on the first batch of an accumulation window: what is summed over stages and replicas is this backward's.
        self._gradients.begin(first=True, complete=True)

    def after_backward(self, losses: Sequence[Tensor | None]) -> None:
        self._take_in_uses()
        self._gradients.finish()
        self._published(self._mean(losses) if self.needs_losses else None)

    def closure_value(self, values: Sequence[Tensor | None]) -> Tensor | None:
        return self._mean(values)


def _tell_of_single_sample(state: Microbatch, error: ValueError) -> None:
    """Raise with the way out, if it is torch's error for a batch norm of one sample."""
    if state.num_samples == 1 and _SINGLE_SAMPLE in str(error):
        raise ValueError(
            f"micro-batch {state.index} has one sample, of which a batch norm has no statistics: give batches two "
            f"samples or more, as with DataLoader(drop_last=True) ({error})"
        ) from error


def _numbers(args: Sequence[Any]) -> list[int]:
    """Those of the batch and its loader, in what a step takes beside the batch."""
    return [arg for arg in args if isinstance(arg, int)]


def _token(value: Any, state: Microbatch) -> Any:
    """What a tensor holds now: equal for tensors that show the same number in one memory, as `detach` makes them."""
    number = state.recording.value_of(value) if state.recording is not None else None
    if number is not None:
        return number
    with torch._C.DisableTorchFunction():
        return value.data_ptr(), value.dtype, value._version


def _is_same(token: Any, other: Any, state: Microbatch) -> bool:
    if isinstance(token, int) and isinstance(other, int):
        assert state.recording is not None
        return state.recording.origin(token) == state.recording.origin(other)
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
