"""Values that a step logs: reduced over its micro-batches, and logged once on every rank."""

from __future__ import annotations

import inspect
import numbers
import struct
import zlib
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torchmetrics import Metric

from lightning_pipeline.partition.overrides import overridden

from .._lightning import LightningModule

_SIGNATURE = inspect.signature(LightningModule.log)
_OPTIONS = frozenset(_SIGNATURE.parameters) - {"self", "name", "value"}
_PACKED = struct.Struct("d")
_REDUCTIONS: dict[Any, str] = {
    **{name: name for name in ("mean", "min", "max", "sum")},
    "avg": "mean",
    torch.mean: "mean",
    **dict.fromkeys((torch.min, min), "min"),
    **dict.fromkeys((torch.max, max), "max"),
    **dict.fromkeys((torch.sum, sum), "sum"),
}


@dataclass(slots=True)
class Logged:
    """A call of `self.log` on a micro-batch.

    Attributes:
        value: a number or a tensor with one element; for a metric its value for the batch, None if it has none.
        options: the call's other arguments, without ``batch_size``.
        dtype: the default dtype at the call, in which Lightning has numbers, as that of double precision.
        weight: number of samples, or the ``batch_size`` of the call.
        metric: dotted name of the logged metric in the module; None for plain values.
        token: identifies the tensor that was logged, where it may be the loss.
        is_share: the value is the micro-batch's share of a loss that is a sum.
    """

    name: str
    value: Tensor | float | None
    options: Mapping[str, Any]
    dtype: torch.dtype
    weight: int
    has_batch_size: bool = False
    metric: str | None = None
    token: Any = None
    is_share: bool = False


class LoggedValues:
    """Collects the ``self.log`` calls of a step's micro-batches, and logs each once."""

    def __init__(self, module: LightningModule) -> None:
        self._module = module
        self._metric_names: dict[int, str] = {}
        self._is_users = type(module).log is not LightningModule.log

    def note(self, num_samples: int, *args: Any, **kwargs: Any) -> Logged:
        """One ``self.log(*args, **kwargs)`` of a micro-batch of `num_samples`, without waiting for the device."""
        if len(args) == 2 and (self._is_users or kwargs.keys() <= _OPTIONS):  # as usual, without `bind`
            name, value = args
            options = kwargs
        else:
            options = _bound(type(self._module).log, self._module, *args, **kwargs)
            name, value = options.pop("name"), options.pop("value")
        batch_size = options.pop("batch_size", None)
        if options.pop("sync_dist_group", None) is not None:
            raise ValueError(
                f"`self.log({name!r}, sync_dist_group=...)` was called, but under a pipeline `sync_dist=True` always "
                "reduces over the data-parallel group: leave sync_dist_group out"
            )
        if "reduce_fx" in options:  # by name, which is the same on every rank; Lightning refuses unknown ones
            reduce_fx = options["reduce_fx"]
            reduce_fx = reduce_fx.lower() if isinstance(reduce_fx, str) else reduce_fx
            options["reduce_fx"] = _REDUCTIONS.get(reduce_fx, str(reduce_fx))
        weight = num_samples if batch_size is None else int(batch_size)
        dtype = torch.get_default_dtype()
        if not isinstance(value, Metric):
            return Logged(name, _as_loggable(name, value), options, dtype, weight, batch_size is not None)
        metric = self._metric_name(name, value)
        if options.get("metric_attribute") is None:
            options["metric_attribute"] = metric
        cached = value._forward_cache
        has_value = isinstance(cached, Tensor) and cached.numel() == 1
        return Logged(name, cached if has_value else None, options, dtype, weight, batch_size is not None, metric)

    def log(self, calls: Iterable[Iterable[Logged]], log: Callable[..., None]) -> None:
        """Call the module's original ``log`` once for each call that the micro-batches made, in order, as one process
        does for its whole batch.

        Calls with the same name and options belong together: the first one of each micro-batch, then the second ones.
        ``reduce_fx`` says how their values are combined: for "mean" (the default) weighted by samples, or summed if
        all are shares of a sum.
        """
        alike: dict[Hashable, list[Logged]] = {}
        for own in calls:
            times: Counter[Hashable] = Counter()
            for call in own:
                key = (call.name, call.metric, tuple(call.options.items()))
                alike.setdefault((times[key], *key), []).append(call)
                times[key] += 1
        for same in alike.values():
            with default_dtype(same[0].dtype):
                self._log_once(same, log)

    def _log_once(self, same: list[Logged], log: Callable[..., None]) -> None:
        """`log`, for the calls that belong together."""
        first = same[0]
        reduction = first.options.get("reduce_fx", "mean")
        if reduction == "mean" and all(call.is_share for call in same):
            reduction = "sum"
        weights = [call.weight for call in same]
        value: Any = _reduce([call.value for call in same], weights, reduction)
        if first.metric is not None:
            metric = self._module.get_submodule(first.metric)
            if value is not None:
                metric._forward_cache = value  # what Lightning shows for on_step
            value = metric
        if not self._is_users:
            log(first.name, value, **first.options, batch_size=sum(weights))
            return
        of_call = {"batch_size": sum(weights)} if first.has_batch_size else {}
        with _default_batch_size(sum(weights)):
            log(first.name, value, **first.options, **of_call)

    def _metric_name(self, name: str, metric: Metric) -> str:
        if id(metric) not in self._metric_names:
            self._metric_names = {
                id(child): path for path, child in self._module.named_modules() if isinstance(child, Metric)
            }
        if id(metric) not in self._metric_names:
            raise ValueError(
                f"`self.log({name!r}, ...)` got a {type(metric).__name__} that is not an attribute of the "
                "LightningModule: make it one, so that every rank can find it"
            )
        return self._metric_names[id(metric)]


def numbers_in(calls: Iterable[Iterable[Logged]]) -> list[list[tuple[str, float]]]:
    """Logged numbers that are no tensors, in which ranks may differ, such as times."""
    return [[(call.name, call.value) for call in own if type(call.value) is float] for own in calls]


def digest_of_numbers(calls: Iterable[Iterable[Logged]]) -> float:
    """A checksum of `numbers_in`."""
    return float(zlib.crc32(b"".join(_PACKED.pack(value) for own in numbers_in(calls) for _, value in own)))


def take_numbers(calls: Iterable[Iterable[Logged]], numbers: Iterable[Iterable[tuple[str, float]]]) -> None:
    """Replace the numbers by another rank's."""
    for own, others in zip(calls, numbers, strict=True):
        left: dict[str, list[float]] = {}
        for name, value in others:
            left.setdefault(name, []).append(value)
        for call in own:
            if type(call.value) is float and left.get(call.name):
                call.value = left[call.name].pop(0)


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """While entered, `dtype` is torch's default."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def _bound(log: Callable[..., None], module: LightningModule, *args: Any, **kwargs: Any) -> dict[str, Any]:
    """The arguments of a call of `log`, by name: the user's own names if it has any."""
    signature = inspect.signature(log)
    kinds = {parameter.kind: name for name, parameter in signature.parameters.items()}
    if inspect.Parameter.VAR_POSITIONAL in kinds:  # which are Lightning's, passed on
        signature, kinds = _SIGNATURE, {}
    given = dict(signature.bind(module, *args, **kwargs).arguments)
    del given["self"]
    return given | given.pop(kinds.get(inspect.Parameter.VAR_KEYWORD, ""), {})


@contextmanager
def _default_batch_size(size: int) -> Iterator[None]:
    """While entered, Lightning's ``log`` takes this batch size if the user's, which calls it, gives none."""
    original = LightningModule.log

    def log(module: LightningModule, *args: Any, **kwargs: Any) -> None:
        original(module, *args, **{"batch_size": size, **kwargs})

    with overridden() as override:
        override(LightningModule, "log", log)
        yield


def _as_loggable(name: str, value: Any) -> Tensor | float:
    """A number, or a detached copy of a tensor."""
    if isinstance(value, Tensor):
        if value.numel() != 1:
            raise ValueError(
                f"`self.log({name}, ...)` was called with a tensor of shape {list(value.shape)}, but the tensor "
                f"must have a single element. You can try doing `self.log({name}, value.mean())`"
            )
        return value.detach().clone()  # the user may write to it later
    if isinstance(value, numbers.Number):
        return float(value)  # type: ignore[arg-type]
    kind = "dict" if isinstance(value, Mapping) else type(value).__name__
    raise ValueError(f"`self.log({name}, {value})` was called, but `{kind}` values cannot be logged")


def _loggable_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which Lightning accumulates values of this one."""
    return next((d for d in (dtype, torch.get_default_dtype()) if d in (torch.float32, torch.float64)), torch.float32)


def _reduce(values: list[Tensor | float | None], weights: list[int], reduction: str) -> Tensor | None:
    """The micro-batches' values combined; None if one of them has no value."""
    present = [value for value in values if value is not None]
    if len(present) < len(values):
        return None
    first = next((value for value in present if isinstance(value, Tensor)), torch.tensor(0.0))
    device, dtype = first.device, _loggable_dtype(first.dtype)
    scalars = [value.reshape(()) if isinstance(value, Tensor) else value for value in present]
    stacked = torch.stack([torch.as_tensor(value, dtype=dtype, device=device) for value in scalars])
    if reduction == "sum":
        return stacked.sum()
    if reduction == "min":
        return stacked.min()
    if reduction == "max":
        return stacked.max()
    if len(set(weights)) == 1 or sum(weights) == 0:
        return stacked.sum() / len(present)
    return (stacked * torch.tensor(weights, dtype=dtype, device=device)).sum() / sum(weights)
