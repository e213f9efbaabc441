"""torchmetrics objects, whose states every stage has, and replicas put together."""

from __future__ import annotations

from collections.abc import Callable

from torch import nn
from torch.distributed import ProcessGroup
from torchmetrics import Metric

_PATCHED = ("process_group", "distributed_available_fn")


def sync_over(module: nn.Module, replicas: ProcessGroup | None) -> Callable[[], None]:
    """Make the metrics in a module synchronise their states over the replicas of a stage, as all stages have the same.

    Args:
        module: the module whose submodules are searched for metrics, those in a ``MetricCollection`` included.
        replicas: the ranks that run this stage on other samples; None if there are none.

    Returns:
        A function that undoes it.
    """
    metrics = [child for child in module.modules() if isinstance(child, Metric) and child.process_group is None]
    saved = [{name: metric.__dict__[name] for name in _PATCHED} for metric in metrics]
    for metric in metrics:
        metric.process_group = replicas
        metric.distributed_available_fn = lambda: replicas is not None

    def undo() -> None:
        for metric, attributes in zip(metrics, saved, strict=True):
            for name, value in attributes.items():
                setattr(metric, name, value)

    return undo
