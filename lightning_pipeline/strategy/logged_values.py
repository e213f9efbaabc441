"""What a step logs on its micro-batches, reduced and logged once, as on every rank."""

from __future__ import annotations

import numbers
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torchmetrics import Metric

_REDUCTIONS: dict[Any, str] = {
    **{name: name for name in ("mean", "min", "max", "sum")},
    "avg": "mean",
    torch.mean: "mean",
    **dict.fromkeys((torch.min, min), "min"),
    **dict.fromkeys((torch.max, max), "max"),
    **dict.fromkeys((torch.sum, sum), "sum"),
}


@dataclass
class LoggedItem:
    """One ``self.log`` call of a whole step.

    Attributes:
        name: the name it was logged under.
        value: a 0-d float tensor, the value over all micro-batches; for a metric object its value on this step's
            samples as far as it was called (not just updated), else None.
        kwargs: further arguments of the ``log`` call, without ``batch_size``.
        batch_size: number of samples (or sum of the explicit ``batch_size`` arguments) behind it.
        metric: dotted name of the logged metric object in the module; None for plain values.
    """

    name: str
    value: torch.Tensor | None
    kwargs: dict[str, Any]
    batch_size: int
    metric: str | None = None


@dataclass
class Captured:
    """The values logged under one name so far, one a micro-batch, with their weights.

    Attributes:
        num_summed: how many of them are the micro-batch's share of a sum.
    """

    name: str
    kwargs: dict[str, Any]
    metric: str | None
    values: list[torch.Tensor | float | None] = field(default_factory=list)
    weights: list[int] = field(default_factory=list)
    num_summed: int = 0

    @property
    def reduction(self) -> str:
        """How they become the step's value: as `reduce_fx` says, but that shares of a sum are no means."""
        reduce_fx = self.kwargs.get("reduce_fx", "mean")
        return "sum" if reduce_fx == "mean" and self.num_summed == len(self.values) else reduce_fx


class LoggedValues:
    """Collects the ``self.log`` calls of a step's micro-batches.

    Args:
        module: the LightningModule, to find logged metric objects by name.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self._captured: dict[Hashable, Captured] = {}
        self._metric_names: dict[int, str] | None = None

    def capture(self, name: str, value: Any, kwargs: dict[str, Any], num_samples: int) -> Captured:
        """Take in one ``self.log(name, value, **kwargs)`` of a micro-batch, without waiting for the device.

        Args:
            name: as in ``LightningModule.log``.
            value: a number, a tensor with one element, or a metric that is an attribute of the module.
            kwargs: the call's further arguments by name, positional ones included.
            num_samples: size of the micro-batch; an explicit ``batch_size`` in ``kwargs`` comes before it.

        Returns:
            What was logged under the name so far, this included.

        Raises:
            ValueError: if the value cannot be logged, as in Lightning.
        """
        kwargs = dict(kwargs)
        batch_size = kwargs.pop("batch_size", None)
        if kwargs.get("sync_dist_group") is not None:
            raise ValueError(
                f"`self.log({name!r}, sync_dist_group=...)` was called, but under a pipeline `sync_dist=True` always "
                "reduces over the data-parallel group: leave sync_dist_group out"
            )
        kwargs.pop("sync_dist_group", None)
        if "reduce_fx" in kwargs:  # by its name, for every rank to have the same; what Lightning refuses, it refuses
            reduce_fx = kwargs["reduce_fx"]
            reduce_fx = reduce_fx.lower() if isinstance(reduce_fx, str) else reduce_fx
            kwargs["reduce_fx"] = _REDUCTIONS.get(reduce_fx, str(reduce_fx))
        metric = None
        if isinstance(value, tuple):  # a metric, and what it gave then
            metric = self._metric_name(name, value[0])
            if kwargs.get("metric_attribute") is None:
                kwargs["metric_attribute"] = metric
            value = value[1] if _has_one_element(value[1]) else None
        key = (name, metric, tuple(kwargs.items()))
        captured = self._captured.get(key)
        if captured is None:
            captured = self._captured[key] = Captured(name, kwargs, metric)
        captured.values.append(None if value is None and metric else _as_loggable(name, value))
        captured.weights.append(num_samples if batch_size is None else int(batch_size))
        return captured

    def reduced(self) -> list[LoggedItem]:
        """What was captured since ``clear``, each name reduced over its micro-batches, in the order of first calls.

        ``reduce_fx`` says how: for "mean" (the default) micro-batches count by their samples, unless their values are
        shares of a sum.
        """
        return [
            LoggedItem(
                captured.name,
                _reduce(captured.values, captured.weights, captured.reduction),
                captured.kwargs,
                sum(captured.weights),
                captured.metric,
            )
            for captured in self._captured.values()
        ]

    def clear(self) -> None:
        """Forget what was captured, also when a step failed half-way."""
        self._captured.clear()

    def replay(self, log: Callable[..., None], items: Iterable[LoggedItem]) -> None:
        """Call the module's original ``log`` for each item, as one process does for its whole batch."""
        for item in items:
            value: Any = item.value
            if item.metric is not None:
                metric = self.module.get_submodule(item.metric)
                if item.value is not None:
                    metric._forward_cache = item.value  # what Lightning shows for on_step
                value = metric
            log(item.name, value, **item.kwargs, batch_size=item.batch_size)

    def _metric_name(self, name: str, metric: Metric) -> str:
        if self._metric_names is None or id(metric) not in self._metric_names:
            self._metric_names = {
                id(child): path for path, child in self.module.named_modules() if isinstance(child, Metric)
            }
        if id(metric) not in self._metric_names:
            raise ValueError(
                f"`self.log({name!r}, ...)` got a {type(metric).__name__} that is not an attribute of the "
                "LightningModule: make it one, so that every rank can find it"
            )
        return self._metric_names[id(metric)]


def _has_one_element(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.numel() == 1


def _as_loggable(name: str, value: Any) -> torch.Tensor | float:
    """A number, or a detached 0-d copy in the dtype that Lightning accumulates in."""
    if not isinstance(value, torch.Tensor):
        if isinstance(value, numbers.Number):
            return float(value)  # type: ignore[arg-type]
        raise ValueError(
            f"`self.log({name}, {value})` was called, but `{type(value).__name__}` values cannot be logged"
        )
    if value.numel() != 1:
        raise ValueError(
            f"`self.log({name}, {value})` was called, but the tensor must have a single element."
            f" You can try doing `self.log({name}, {value}.mean())`"
        )
    value = value.detach().reshape(())
    # A copy, because the user may go on writing to it.
    return value.clone() if value.dtype in (torch.float32, torch.float64) else value.to(_default_dtype())


def _default_dtype() -> torch.dtype:
    dtype = torch.get_default_dtype()
    return dtype if dtype in (torch.float32, torch.float64) else torch.float32


def _reduce(values: list[torch.Tensor | float | None], weights: list[int], reduction: str) -> torch.Tensor | None:
    """One value from those of the micro-batches; None if one of them has no value."""
    present = [value for value in values if value is not None]
    if len(present) < len(values):
        return None
    first = next((value for value in present if isinstance(value, torch.Tensor)), None)
    device = first.device if first is not None else torch.device("cpu")
    dtype = first.dtype if first is not None else _default_dtype()
    stacked = torch.stack([torch.as_tensor(value, dtype=dtype, device=device) for value in present])
    if reduction == "sum":
        return stacked.sum()
    if reduction == "min":
        return stacked.min()
    if reduction == "max":
        return stacked.max()
    if len(set(weights)) == 1 or sum(weights) == 0:
        return stacked.sum() / len(present)
    return (stacked * torch.tensor(weights, dtype=stacked.dtype, device=device)).sum() / sum(weights)
