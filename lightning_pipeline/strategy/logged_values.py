"""What a step logs on its micro-batches, reduced, exchanged and logged once on every rank."""

from __future__ import annotations

import numbers
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torchmetrics import Metric

if TYPE_CHECKING:
    from lightning_pipeline.runtime.transport import Transport


_REDUCTIONS: dict[Any, str] = {
    **{name: name for name in ("mean", "min", "max", "sum")},
    "avg": "mean",
    torch.mean: "mean",
    **dict.fromkeys((torch.min, min), "min"),
    **dict.fromkeys((torch.max, max), "max"),
    **dict.fromkeys((torch.sum, sum), "sum"),
}
_NEW_PLAN = -1
_HEADER = 2  # plan number and count of values


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


# What stays the same from step to step: name, keyword arguments, metric name and the value's dtype.
_PlanItem = tuple[str, tuple[tuple[str, Any], ...], "str | None", "torch.dtype | None"]
_Plan = tuple[_PlanItem, ...]


class LoggedValues:
    """Collects the ``self.log`` calls of a step on the stage that has the value, and shares them with all stages.

    An exchange is one vector of fixed size from each stage: the number of a plan that the others know (names and
    arguments), its values and batch sizes, and some numbers of the caller. A plan is sent once, when it is new;
    values beyond ``capacity`` are sent as objects in every step.

    Args:
        module: the LightningModule, to find logged metric objects by name.
        capacity: number of values in the vector.
        num_extra: room for numbers that the caller exchanges along with the values.
    """

    def __init__(self, module: nn.Module, *, capacity: int = 64, num_extra: int = 4) -> None:
        self.module = module
        self.capacity = capacity
        self.num_extra = num_extra
        self._captured: dict[Hashable, Captured] = {}
        self._plans: dict[_Plan, int] = {}  # numbered from 1 as they arrive, which is alike on all stages
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

    def exchange(
        self, transport: Transport | None, *, extra: Sequence[float] = (), device: torch.device | str = "cpu"
    ) -> tuple[list[LoggedItem], list[list[float]]]:
        """Share what was captured, and forget it. Every stage must call it, once a step.

        Args:
            transport: the connection to the other stages, or None with one stage.
            extra: up to ``num_extra`` numbers of the caller.
            device: where the values are to be.

        Returns:
            The items of all stages, by stage and then by call, the same on every stage. What several stages logged
            in the same way, as they do with plain numbers, is the first one's. And each stage's extra numbers,
            padded with zeros to ``num_extra``.
        """
        if len(extra) > self.num_extra:
            raise ValueError(f"there is room for {self.num_extra} extra numbers, got {len(extra)}")
        items = self.reduced()
        self.clear()
        padded = [float(number) for number in extra] + [0.0] * (self.num_extra - len(extra))
        if transport is None:
            return _on_device(items, device), [padded]
        plan, payload = _pack(items)
        rows = transport.all_gather_vector(self._vector(plan, payload, padded), "logged values").tolist()
        merged: dict[Hashable, LoggedItem] = {}
        for stage, row in enumerate(rows):
            number, count = int(row[0]), int(row[1])
            if number == _NEW_PLAN:
                new_plan = transport.broadcast_object(plan, stage, "names of logged values")
                number = self._plans.setdefault(new_plan, len(self._plans) + 1)
            values = row[_HEADER : _HEADER + 2 * min(count, self.capacity)]
            if count > self.capacity:
                surplus = payload[2 * self.capacity :]
                values = values + transport.broadcast_object(surplus, stage, "logged values beyond the vector")
            if count:
                for key, item in _unpack(list(self._plans)[number - 1], values):
                    merged.setdefault(key, item)
        return _on_device(merged.values(), device), [row[len(row) - self.num_extra :] for row in rows]

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

    def _vector(self, plan: _Plan, payload: list[float], extra: list[float]) -> torch.Tensor:
        """Plan number, count, ``capacity`` pairs of value and batch size, and the caller's numbers."""
        inline = payload[: 2 * self.capacity]
        inline = inline + [0.0] * (2 * self.capacity - len(inline))
        number = self._plans.get(plan, _NEW_PLAN) if plan else 0
        return torch.tensor([number, len(plan), *inline, *extra], dtype=torch.float64)

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


def _pack(items: list[LoggedItem]) -> tuple[_Plan, list[float]]:
    """The items' plan, and a value and a batch size for each, brought to the host in one go."""
    plan = tuple(
        (item.name, tuple(item.kwargs.items()), item.metric, None if item.value is None else item.value.dtype)
        for item in items
    )
    tensors = [item.value for item in items if item.value is not None]
    device = next((tensor.device for tensor in tensors if tensor.device.type != "cpu"), torch.device("cpu"))
    # float64 holds every float32 exactly
    stacked = torch.stack([tensor.to(device, torch.float64) for tensor in tensors]).tolist() if tensors else []
    values = iter(stacked)
    packed: list[float] = []
    for item in items:
        packed += [0.0 if item.value is None else next(values), float(item.batch_size)]
    return plan, packed


def _unpack(plan: _Plan, packed: Sequence[float]) -> Iterable[tuple[Hashable, LoggedItem]]:
    """The items of a plan, each with the key by which equal calls of several stages are known."""
    for (name, kwargs, metric, dtype), value, batch_size in zip(plan, packed[::2], packed[1::2], strict=True):
        tensor = None if dtype is None else torch.tensor(value, dtype=dtype)
        yield (name, kwargs, metric), LoggedItem(name, tensor, dict(kwargs), int(batch_size), metric)


def _on_device(items: Iterable[LoggedItem], device: torch.device | str) -> list[LoggedItem]:
    items = list(items)
    for item in items:
        item.value = None if item.value is None else item.value.to(device)
    return items
