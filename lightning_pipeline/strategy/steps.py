"""The user's steps under a pipeline: one call of Lightning's, many micro-batches, one result."""

from __future__ import annotations

import inspect
import zlib
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.plugins import Precision
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor
from torchmetrics import Metric

from lightning_pipeline.partition import tree
from lightning_pipeline.partition.engine import backward_from_loss
from lightning_pipeline.partition.microbatch import microbatches_of
from lightning_pipeline.partition.random import mix
from lightning_pipeline.runtime.microbatch import Microbatch
from lightning_pipeline.runtime.pipeline import Pipeline
from lightning_pipeline.runtime.replicas import Replicas
from lightning_pipeline.runtime.work import Work
from lightning_pipeline.strategy.logged_values import LoggedValues
from lightning_pipeline.strategy.outputs import combine, mean_loss
from lightning_pipeline.strategy.signals import Signals, merge
from lightning_pipeline.strategy.summed_losses import is_sum_over_samples
from lightning_pipeline.strategy.tensor_parallel import TensorGroup

_LOG_SIGNATURE = inspect.signature(LightningModule.log)
_LOG_OPTIONS = frozenset(_LOG_SIGNATURE.parameters) - {"self", "name", "value"}
_SINGLE_SAMPLE = "more than 1 value per channel"
"""In the error of torch's batch norms."""


@dataclass(slots=True)
class Logged:
    """A call of `self.log` on a micro-batch.

    Attributes:
        token: what the value was then.
        is_share: it is the micro-batch's share of a loss that is a sum.
    """

    name: str
    value: Any
    options: Mapping[str, Any]
    token: Any = None
    is_share: bool = False


class Steps:
    """Runs the user's steps on the pipeline and brings their losses, logged values and outputs to every stage.

    Args:
        module: the LightningModule.
        seed: from which every step's random numbers derive.
        mean: the step's loss is the mean over micro-batches, weighted by samples; else their sum.
        output_broadcast: outputs of evaluation steps reach every stage; else they stay on the last.
        replicas: the ranks that run these stages on other samples; None if there are none.
        tensor_group: the ranks among which tensors are split; they see the first one's batches.
        signals: what has arrived here; all ranks come to know it after each step.
    """

    def __init__(
        self,
        module: LightningModule,
        pipeline: Pipeline,
        *,
        seed: int,
        mean: bool,
        output_broadcast: bool,
        replicas: Replicas | None = None,
        tensor_group: TensorGroup | None = None,
        signals: Signals,
    ) -> None:
        self.peak_live = 0
        self._module = module
        self._pipeline = pipeline
        self._seed = mix(seed, replicas.topology.replica) if replicas is not None else seed
        self._replicas = replicas
        self._tensor_group = tensor_group
        self._mean = mean
        self._output_broadcast = output_broadcast
        self._signals = signals
        self._logged = LoggedValues(module)
        self._last = pipeline.last_rank
        self._has_looked_at_loss = not mean

    def train(
        self,
        args: tuple[Any, ...],
        *,
        number: int,
        accumulate: int,
        context: Callable[[], AbstractContextManager[Any]],
        after_backward: Callable[[int, Microbatch], None],
        scale: Callable[[Tensor], Tensor] | None = None,
    ) -> Any:
        """One training step, its backward included. Returns the loss, or the step's dictionary with it.

        Args:
            args: as the user's training_step takes them, the batch first.
            number: number of the batch since training began.
            accumulate: number of batches over which gradients are accumulated.
            context: the precision's context around a step.
            after_backward: called after each micro-batch's backward on a virtual stage, with the stage.
            scale: scales what backward starts from, for fp16.

        Raises:
            ValueError: the step returned no loss.
        """
        is_sum = False

        def loss_of(state: Microbatch, loss: Tensor) -> Tensor:
            nonlocal is_sum
            if not self._has_looked_at_loss and state.num_microbatches > 1:
                self._has_looked_at_loss = True
                is_sum = is_sum_over_samples(loss, state.num_samples)
            weighted = self._weighted(loss, state, accumulate)
            return weighted if scale is None else scale(weighted)

        run_backward, is_plain = backward_of(self._module)
        work = Work(
            kind=("train", self._module.training),
            step=self._step_function(self._module.training_step, args[1:], context, has_loss=True),
            loss_of=loss_of,
            run_backward=run_backward,
            after_backward=after_backward,
            can_split=is_plain,
            seed=mix(self._seed, 0, number),
        )
        states, numbers = self._run(work, args[0], lambda: [self._signals.noted, float(is_sum)])
        self.peak_live = max(self.peak_live, self._pipeline.peak_live)
        self._heed(numbers, training=True)
        if any(is_sum for _, is_sum in numbers):
            self._warn_of_sum()
        self._log(states)
        losses = [(state.loss.detach(), state.num_samples) for state in states if state.loss is not None]
        if not losses:
            return None
        loss = self._reported(*map(list, zip(*losses, strict=True))).to(torch.float32)
        extra = _without_loss([state.result for state in states], [state.num_samples for state in states])
        return {"loss": loss, **extra} if extra else loss

    def evaluate(
        self,
        stage: str,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        *,
        context: Callable[[], AbstractContextManager[Any]],
    ) -> Any:
        """One validation, test or predict step. Returns its output, put together over micro-batches."""
        numbers = [arg for arg in args[1:] if isinstance(arg, int)]
        work = Work(
            kind=(stage, self._module.training, *numbers[1:]),
            step=self._step_function(function, args[1:], context),
            results_on=None if self._output_broadcast else self._last,
            waits=stage != "predict_step",  # the first stages go on with the next batch
            seed=mix(self._seed, zlib.crc32(stage.encode()), *numbers),
        )
        states, numbers_of_all = self._run(work, args[0], lambda: [self._signals.noted, 0.0])
        if numbers_of_all:
            self._heed(numbers_of_all, training=False)
        self._log(states)
        if not self._output_broadcast and self._pipeline.rank != self._last:
            return None
        return _detached(combine([state.result for state in states], [state.num_samples for state in states]))

    # -- details ----------------------------------------------------------------------------------------------------

    def _run(
        self, work: Work, batch: Any, extra: Callable[[], list[float]]
    ) -> tuple[list[Microbatch], list[list[float]]]:
        microbatches = None
        if self._pipeline.rank == 0:
            if self._tensor_group is not None:
                batch = self._tensor_group.same(batch)
            microbatches = microbatches_of(batch, self._pipeline.num_microbatches, self._module)
        return self._pipeline.run(work, microbatches, extra)

    def _step_function(
        self,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        context: Callable[[], AbstractContextManager[Any]],
        *,
        has_loss: bool = False,
    ) -> Callable[[Microbatch, Any], tuple[Any, Any]]:
        attributes = vars(self._module)
        plain = _does_nothing(context)
        name = type(self._module).__name__
        needs_gradients = has_loss and backward_of(self._module)[1]
        sums = has_loss and not self._mean

        def run(state: Microbatch, batch: Any) -> tuple[Any, Any]:
            before = attributes.get("log")
            attributes["log"] = lambda *a, **k: self._note(state, *a, **k)
            try:
                if plain:
                    result = function(batch, *args)
                else:
                    with context():
                        result = function(batch, *args)
            except ValueError as error:
                if state.num_samples == 1 and _SINGLE_SAMPLE in str(error):
                    raise ValueError(
                        f"micro-batch {state.index} has one sample, of which a batch norm has no statistics: give "
                        f"batches two samples or more, as with DataLoader(drop_last=True) ({error})"
                    ) from error
                raise
            finally:
                if before is None:
                    attributes.pop("log", None)
                else:
                    attributes["log"] = before
            if not has_loss:
                return result, None
            loss = loss_in(result, name)
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
        if len(args) == 2 and kwargs.keys() <= _LOG_OPTIONS:  # as it is written, nearly always
            name, value = args
            options = kwargs
        else:
            options = _LOG_SIGNATURE.bind(self._module, *args, **kwargs).arguments
            options.pop("self")
            name, value = options.pop("name"), options.pop("value")
        if isinstance(value, Mapping):
            raise ValueError(f"`self.log({name}, {value})` was called, but `dict` values cannot be logged")
        if isinstance(value, Metric):
            value = value, value._forward_cache
            state.logged.append(Logged(name, value, options))
            return
        token = None
        if isinstance(value, Tensor):
            if value.numel() != 1:
                raise ValueError(
                    f"`self.log({name}, ...)` was called with a tensor of shape {list(value.shape)}, but the tensor "
                    f"must have a single element. You can try doing `self.log({name}, value.mean())`"
                )
            if not self._mean:
                token = _token(value, state)
            value = value.detach().clone()  # the user may go on writing to it
        state.logged.append(Logged(name, value, options, token))

    def _log(self, states: list[Microbatch]) -> None:
        """Log what the micro-batches have logged, as one process does for its whole batch."""
        self._logged.clear()
        for state in states:
            for logged in state.logged:
                captured = self._logged.capture(logged.name, logged.value, logged.options, state.num_samples)
                captured.num_summed += logged.is_share
        self._logged.replay(self._module.log, self._logged.reduced())
        self._logged.clear()

    def _heed(self, numbers: list[list[float]], *, training: bool) -> None:
        """Take in what has arrived at some rank."""
        signals = merge(noted for noted, _ in numbers)
        all_ranks = self._replicas is None
        if self._replicas is not None and training:  # in evaluation replicas may have unequally many batches
            gathered = self._replicas.gather_numbers(0.0, signals)
            signals = merge(noted for _, noted in gathered)
            all_ranks = True
        self._signals.heed(signals, by_all=all_ranks)

    def _weighted(self, loss: Tensor, state: Microbatch, accumulate: int) -> Tensor:
        """The micro-batch's share of the loss that is minimised."""
        if not self._mean:
            return loss / accumulate
        if state.even:
            return loss / (state.num_microbatches * accumulate)
        return loss * (state.weight / accumulate)

    def _warn_of_sum(self) -> None:
        rank_zero_warn(
            f"the loss of {type(self._module).__name__}.training_step is a sum over samples, and of the micro-batches' "
            f"losses the mean is taken: it and its gradients are those of the whole batch divided by the number of "
            f'micro-batches. Use PipelineStrategy(loss_reduction="sum"), or a loss that is a mean over samples'
        )

    def _reported(self, losses: list[Tensor], sizes: list[int]) -> Tensor:
        return mean_loss(losses, sizes) if self._mean else torch.stack(losses).sum()


def backward_of(module: LightningModule) -> tuple[Callable[[Tensor], None], bool]:
    """What runs a backward from a loss, and whether it is Lightning's own and not the user's."""
    is_plain = type(module).backward is LightningModule.backward and "backward" not in vars(module)
    return (backward_from_loss if is_plain else module.backward), is_plain


def _does_nothing(context: Callable[[], AbstractContextManager[Any]]) -> bool:
    """Whether a precision's context around a step is Lightning's own for full precision, and need not be entered."""
    precision, name = getattr(context, "__self__", None), getattr(context, "__name__", "")
    if not isinstance(precision, Precision) or getattr(type(precision), name, None) is not getattr(Precision, name):
        return False
    return type(precision.forward_context()) is nullcontext


def loss_in(result: Any, module: str) -> Tensor | None:
    """The loss in what a training step has returned; None where it returned None, to skip the batch.

    Args:
        module: its class's name, for the error.

    Raises:
        ValueError: there is none in it.
    """
    if result is None:
        return None
    loss = result
    if not isinstance(result, Tensor) and isinstance(result, Mapping):
        loss = result.get("loss")
    if isinstance(loss, Tensor) and loss.numel() == 1:
        return loss.reshape(()) if loss.dim() else loss
    what = type(result).__name__
    if isinstance(result, Mapping):
        what = f"{what} {list(result)}"
    elif isinstance(result, Tensor):
        what = f"a tensor of shape {list(result.shape)}"
    raise ValueError(
        f"{module}.training_step returned {what}, and a pipeline needs the loss of every micro-batch: return a "
        f"tensor with one element, or a dictionary with one under 'loss'; to skip a batch, return None"
    )


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
    return _map(value, lambda tensor: tensor.detach())


def _map(value: Any, function: Callable[[Tensor], Tensor]) -> Any:
    return tree.replace(value, function)
