"""torchmetrics objects that are updated on one stage and computed for all."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from lightning_utilities import apply_to_collection
from torch import nn
from torch.distributed import ProcessGroup
from torchmetrics import Metric, MetricCollection
from torchmetrics.metric import CompositionalMetric

if TYPE_CHECKING:
    from lightning_pipeline.runtime.transport import Transport


_PATCHED = ("compute", "process_group", "distributed_available_fn")


def share_metrics(
    module: nn.Module,
    stage_of: Callable[[Metric], int | None],
    transport: Transport | None,
    *,
    stage: int = 0,
    data_parallel_group: ProcessGroup | None = None,
) -> Callable[[], None]:
    """Make ``compute`` of every metric in the module give all stages the same result.

    The stage that updates a metric computes it and broadcasts the result, so ``compute`` becomes a collective over
    the stages, which every rank reaches in the same order: in Lightning's own logging, and in hooks such as
    ``on_validation_epoch_end``. Metrics synchronise their states over the replicas of their stage only. Copies of
    a metric (``clone``, pickling) are not patched.

    Args:
        module: the module whose submodules are searched for metrics, those in a ``MetricCollection`` included.
        stage_of: the stage that updates a metric. None if no step does, and while a step runs, as only one stage
            gets to a ``compute`` in it: then this stage computes by itself. For a metric in a collection it suffices
            that the stage of one of its members is known.
        transport: the connection to the other stages, or None with one stage.
        stage: the stage of this process.
        data_parallel_group: the ranks that run this stage on other samples; None if there are none.

    Returns:
        A function that undoes it.
    """
    metrics = [child for child in module.modules() if isinstance(child, Metric)]
    siblings = {
        id(member): [child for child in collection.values(copy_state=False) if isinstance(child, Metric)]
        for collection in module.modules()
        if isinstance(collection, MetricCollection)
        for member in collection.values(copy_state=False)
    }
    saved = [{name: metric.__dict__[name] for name in _PATCHED} for metric in metrics]
    nesting = _Nesting()

    def find_stage(metric: Metric) -> int | None:
        known = (stage_of(member) for member in [metric, *siblings.get(id(metric), [])])
        return next((found for found in known if found is not None), None)

    for metric in metrics:
        if metric.process_group is None:
            metric.process_group = data_parallel_group
            metric.distributed_available_fn = lambda: data_parallel_group is not None
        # A composition computes its operands, which are metrics of their own.
        if transport is not None and not isinstance(metric, CompositionalMetric):
            metric.compute = _shared_compute(metric, find_stage, transport, stage, nesting)  # type: ignore[method-assign]

    def undo() -> None:
        for metric, attributes in zip(metrics, saved, strict=True):
            for name, value in attributes.items():
                setattr(metric, name, value)

    return undo


class _Nesting:
    """Whether a metric is being computed: those that it computes in turn (wrappers do) are not shared again."""

    depth = 0

    @property
    def inside(self) -> bool:
        return self.depth > 0

    def __enter__(self) -> None:
        self.depth += 1

    def __exit__(self, *error: object) -> None:
        self.depth -= 1


def _shared_compute(
    metric: Metric,
    find_stage: Callable[[Metric], int | None],
    transport: Transport,
    stage: int,
    nesting: _Nesting,
) -> Callable[..., Any]:
    native = metric.compute

    @functools.wraps(native)
    def compute(*args: Any, **kwargs: Any) -> Any:
        # torchmetrics clears this flag while `forward` computes the value of its batch, which only one stage does.
        if nesting.inside or not metric._should_unsync:
            with nesting:
                return native(*args, **kwargs)
        source = find_stage(metric)
        if source is None:
            return native(*args, **kwargs)
        what = f"result of {type(metric).__name__}"
        if stage != source:
            outcome = transport.broadcast_object(None, source, what)
            if isinstance(outcome, _Failure):
                raise RuntimeError(f"{type(metric).__name__}.compute failed on stage {source}: {outcome.message}")
            return _to(outcome, metric.device)
        try:
            with nesting:
                result = native(*args, **kwargs)
        except Exception as error:
            transport.broadcast_object(_Failure(f"{type(error).__name__}: {error}"), source, what)
            raise
        transport.broadcast_object(_to(result, torch.device("cpu")), source, what)
        return result

    return compute


class _Failure:
    """Goes out in place of a result, so that the other stages do not wait for one."""

    def __init__(self, message: str) -> None:
        self.message = message


def _to(result: Any, device: torch.device) -> Any:
    return apply_to_collection(result, torch.Tensor, lambda tensor: tensor.detach().to(device))
