"""The user's steps under a pipeline: one call of Lightning's, many micro-batches, one result."""

from __future__ import annotations

import inspect
import pickle
import zlib
from collections.abc import Callable, Hashable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.plugins import Precision
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor

from lightning_pipeline.partition import tree
from lightning_pipeline.partition.engine import backward_from_loss
from lightning_pipeline.partition.microbatch import microbatches_of
from lightning_pipeline.partition.random import mix
from lightning_pipeline.runtime.microbatch import Microbatch
from lightning_pipeline.runtime.pipeline import Pipeline, StepReport
from lightning_pipeline.runtime.replicas import Replicas
from lightning_pipeline.runtime.structure import Report
from lightning_pipeline.runtime.transport import Transport
from lightning_pipeline.runtime.work import Work
from lightning_pipeline.strategy.logged_values import Captured, LoggedValues
from lightning_pipeline.strategy.outputs import combine, mean_loss, sendable
from lightning_pipeline.strategy.signals import Signals, merge
from lightning_pipeline.strategy.summed_losses import is_sum_over_samples
from lightning_pipeline.strategy.tensor_parallel import TensorGroup

_LOG_SIGNATURE = inspect.signature(LightningModule.log)
_LOG_OPTIONS = frozenset(_LOG_SIGNATURE.parameters) - {"self", "name", "value"}
_NUM_EXTRA = 5
_NEW, _LOSS, _OUTPUTS, _SIGNALS, _IS_SUM = range(_NUM_EXTRA)

LoggedTensors = list[tuple[Captured, Tensor, int]]
"""What a micro-batch has logged, with the tensors' versions then."""
_SINGLE_SAMPLE = "more than 1 value per channel"
"""In the error of torch's batch norms."""


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
        on_new: called on all stages after a step that showed something new, with all reports of each structure.
    """

    def __init__(
        self,
        module: LightningModule,
        pipeline: Pipeline,
        transport: Transport | None,
        *,
        seed: int,
        mean: bool,
        output_broadcast: bool,
        replicas: Replicas | None = None,
        tensor_group: TensorGroup | None = None,
        signals: Signals,
        on_new: Callable[[Hashable, list[list[Report]]], None],
    ) -> None:
        self.peak_live = 0
        self._module = module
        self._pipeline = pipeline
        self._transport = transport
        self._seed = mix(seed, replicas.topology.replica) if replicas is not None else seed
        self._replicas = replicas
        self._tensor_group = tensor_group
        self._mean = mean
        self._output_broadcast = output_broadcast
        self._signals = signals
        self._on_new = on_new
        self._logged = LoggedValues(module, num_extra=_NUM_EXTRA)
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
        losses: list[Tensor] = []
        sizes: list[int] = []
        is_sum = False

        def loss_of(state: Microbatch, result: Any) -> Tensor:
            nonlocal is_sum
            loss = loss_in(result, type(self._module).__name__)
            if not self._has_looked_at_loss and state.num_microbatches > 1:
                self._has_looked_at_loss = True
                is_sum = is_sum_over_samples(loss, state.num_samples)
            losses.append(loss.detach())
            sizes.append(state.num_samples)
            weighted = self._weighted(loss, state, accumulate)
            return weighted if scale is None else scale(weighted)

        run_backward, is_plain = backward_of(self._module)
        work = Work(
            kind=("train", self._module.training),
            step=self._step_function(self._module.training_step, args[1:], context, sums_loss=not self._mean),
            loss_of=loss_of,
            run_backward=run_backward,
            after_backward=after_backward,
            can_split=is_plain,
            seed=mix(self._seed, 0, number),
        )
        report = self._run(work, args[0])
        self.peak_live = max(self.peak_live, self._pipeline.peak_live)
        loss = torch.zeros(())
        extra: Any = None
        if losses:
            loss = self._reported(losses, sizes)
            extra = _without_loss([state.result for state in report.microbatches], sizes)
        extras = self._finish(work.kind, report, loss=loss, has_outputs=bool(extra), is_sum=is_sum)
        if extras[self._last][_IS_SUM]:
            self._warn_of_sum()
        if self._transport is not None:
            loss = torch.tensor(extras[self._last][_LOSS], dtype=torch.float32, device=self._module.device)
        if extras[self._last][_OUTPUTS]:
            extra = self._spread(extra)
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
            seed=mix(self._seed, zlib.crc32(stage.encode()), *numbers),
        )
        report = self._run(work, args[0])
        output = None
        if self._pipeline.rank == self._last:
            sizes = [state.num_samples for state in report.microbatches]
            output = _detached(combine([state.result for state in report.microbatches], sizes))
        if stage == "predict_step" and not self._output_broadcast and not self._pipeline.learning:
            return output  # nobody waits for it, so the first stages go on with the next batch
        has_outputs = self._output_broadcast and output is not None
        extras = self._finish(work.kind, report, loss=torch.zeros(()), has_outputs=has_outputs)
        return self._spread(output) if extras[self._last][_OUTPUTS] else output

    # -- details ----------------------------------------------------------------------------------------------------

    def _run(self, work: Work, batch: Any) -> StepReport:
        microbatches = None
        if self._pipeline.rank == 0:
            if self._tensor_group is not None:
                batch = self._tensor_group.same(batch)
            microbatches = microbatches_of(batch, self._pipeline.num_microbatches, self._module)
        self._logged.clear()
        return self._pipeline.run(work, microbatches)

    def _step_function(
        self,
        function: Callable[..., Any],
        args: tuple[Any, ...],
        context: Callable[[], AbstractContextManager[Any]],
        *,
        sums_loss: bool = False,
    ) -> Callable[[Microbatch, Any], Any]:
        attributes = vars(self._module)
        plain = _does_nothing(context)

        def run(state: Microbatch, batch: Any) -> Any:
            tensors: LoggedTensors | None = [] if sums_loss else None
            attributes["log"] = lambda *a, **k: self._capture(state.num_samples, tensors, *a, **k)
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
                attributes.pop("log", None)
            if tensors:
                _note_losses(tensors, result)
            return result

        return run

    def _capture(self, num_samples: int, tensors: LoggedTensors | None, *args: Any, **kwargs: Any) -> None:
        replay = self._pipeline.interception.current
        if replay is None or not replay.own:
            return
        if len(args) == 2 and kwargs.keys() <= _LOG_OPTIONS:  # as it is written, nearly always
            name, value = args
            options = kwargs
        else:
            options = _LOG_SIGNATURE.bind(self._module, *args, **kwargs).arguments
            options.pop("self")
            name, value = options.pop("name"), options.pop("value")
        replay.uses(value)
        with torch._C.DisableTorchFunction():
            captured = self._logged.capture(name, value, options, num_samples)
            if tensors is not None and isinstance(value, Tensor):
                tensors.append((captured, value, value._version))

    def _finish(
        self, kind: Hashable, report: StepReport, *, loss: Tensor, has_outputs: bool, is_sum: bool = False
    ) -> list[list[float]]:
        """Exchange what every stage has to know, settle what was new, log."""
        new = self._pipeline.is_new(report)
        extra = [float(new), float(loss), float(has_outputs), self._signals.noted, float(is_sum)]
        items, extras = self._logged.exchange(self._transport, extra=extra, device=self._module.device)
        is_new = any(stage_extra[_NEW] for stage_extra in extras)
        signals = merge(stage_extra[_SIGNALS] for stage_extra in extras)
        all_ranks = self._replicas is None
        if self._replicas is not None and report.training:  # in evaluation replicas may have unequally many batches
            gathered = self._replicas.gather_numbers(float(is_new), signals)
            is_new = any(new for new, _ in gathered)
            signals = merge(noted for _, noted in gathered)
            all_ranks = True
        if is_new:
            self._settle(kind, report)
        self._logged.replay(self._module.log, items)
        self._signals.heed(signals, by_all=all_ranks)
        return extras

    def _settle(self, kind: Hashable, report: StepReport) -> None:
        reports = self._pipeline.all_reports(report)
        self._pipeline.settle(report, reports)
        numbers = next(iter(reports.values()))
        self._on_new(kind, [[reports[stage][number] for stage in sorted(reports)] for number in numbers])

    def _spread(self, output: Any) -> Any:
        if self._transport is None:
            return output
        try:
            moved = self._transport.broadcast_object(sendable(output), self._last, "the step's outputs")
        except (TypeError, AttributeError, pickle.PicklingError) as error:
            raise ValueError(
                f"the step's output cannot be sent to the other stages ({error}): return tensors and plain values, or "
                f"keep it on the last stage with PipelineStrategy(output_broadcast=False)"
            ) from error
        return output if self._pipeline.rank == self._last else _to(moved, self._module.device)

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


def loss_in(result: Any, module: str) -> Tensor:
    """The loss in what a training step has returned.

    Args:
        module: its class's name, for the error.

    Raises:
        ValueError: there is none.
    """
    loss = result
    if not isinstance(result, Tensor) and isinstance(result, Mapping):
        loss = result.get("loss")
    if isinstance(loss, Tensor) and loss.numel() == 1:
        return loss.reshape(()) if loss.dim() else loss
    what = "None" if result is None else type(result).__name__
    if isinstance(result, Mapping):
        what = f"{what} {list(result)}"
    raise ValueError(
        f"{module}.training_step returned {what}, and a pipeline needs the loss of every micro-batch: return a "
        f"tensor with one element, or a dictionary with one under 'loss'; to skip a batch, return a loss of zero times "
        f"the output"
    )


def _note_losses(tensors: LoggedTensors, result: Any) -> None:
    """Of what a micro-batch has logged, the loss that it returned is its share of a sum.

    It may be another tensor of the same numbers, as `detach` makes it; but what was written to it since is not logged.
    """
    loss: Any = result.get("loss") if isinstance(result, Mapping) else result
    with torch._C.DisableTorchFunction():
        for captured, value, version in tensors:
            are_plain = type(value) is type(loss) is Tensor
            is_same = value is loss or (are_plain and (value.data_ptr(), value.dtype) == (loss.data_ptr(), loss.dtype))
            captured.num_summed += is_same and value._version == version


def _without_loss(results: list[Any], sizes: list[int]) -> dict[str, Any] | None:
    if not isinstance(results[0], Mapping):
        return None
    extras = [{key: value for key, value in result.items() if key != "loss"} for result in results]
    return _detached(combine(extras, sizes)) if extras[0] else None


def _detached(value: Any) -> Any:
    return _map(value, lambda tensor: tensor.detach())


def _to(value: Any, device: torch.device) -> Any:
    return _map(value, lambda tensor: tensor.detach().to(device))


def _map(value: Any, function: Callable[[Tensor], Tensor]) -> Any:
    return tree.replace(value, function)
