"""What a step returned for its micro-batches, put together as one value for the batch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor


def combine(results: list[Any], sizes: list[int]) -> Any:
    """One result out of those of the micro-batches.

    Tensors whose first dimension is the number of samples are concatenated, other tensors and fractions are averaged
    by samples, lists of that length are joined; containers are gone through; other values are the first one's.

    Args:
        results: what the step returned for each micro-batch.
        sizes: number of samples of each.
    """
    first = results[0]
    if len(results) == 1 or first is None:
        return first
    if isinstance(first, Tensor):
        return _combine_tensors(results, sizes)
    if isinstance(first, float):
        return sum(result * size for result, size in zip(results, sizes, strict=True)) / sum(sizes)
    if isinstance(first, Mapping):
        values = {key: combine([result[key] for result in results], sizes) for key in first}
        return values if type(first) is dict else _like(first, values)
    if isinstance(first, tuple) and hasattr(first, "_fields"):
        return type(first)(*(combine(list(parts), sizes) for parts in zip(*results, strict=True)))
    if isinstance(first, (list, tuple)):
        one_a_sample = all(len(result) == size for result, size in zip(results, sizes, strict=True))
        same_length = all(len(result) == len(first) for result in results)
        if (one_a_sample and not _are_batched(first, sizes[0])) or not same_length:
            return type(first)(item for result in results for item in result)
        return type(first)(combine(list(parts), sizes) for parts in zip(*results, strict=True))
    return first


def mean_loss(losses: list[Tensor], sizes: list[int]) -> Tensor:
    """The mean of the micro-batches' losses, weighted by their samples (a 0-d tensor)."""
    stacked = torch.stack([loss.detach().reshape(()) for loss in losses])
    if len(set(sizes)) == 1:
        return stacked.sum() / len(losses)
    return (stacked * torch.tensor(sizes, dtype=stacked.dtype, device=stacked.device)).sum() / sum(sizes)


def _combine_tensors(tensors: list[Tensor], sizes: list[int]) -> Tensor:
    if all(t.ndim and t.shape[0] == size for t, size in zip(tensors, sizes, strict=True)):
        try:
            return torch.cat(tensors)
        except RuntimeError:  # samples of different lengths
            raise _unequal(tensors) from None
    if all(t.shape == tensors[0].shape for t in tensors) and tensors[0].is_floating_point():
        weights = torch.tensor(sizes, dtype=tensors[0].dtype, device=tensors[0].device)
        stacked = torch.stack(tensors)
        return (stacked * weights.reshape(-1, *[1] * tensors[0].ndim)).sum(0) / sum(sizes)
    return torch.cat(tensors) if tensors[0].ndim else tensors[0]


def _unequal(tensors: list[Tensor]) -> ValueError:
    return ValueError(
        f"the micro-batches' outputs have shapes {[tuple(t.shape) for t in tensors]} and cannot be concatenated; pad "
        f"them in the step to one length, or return a list with one entry a sample"
    )


def _are_batched(items: Any, size: int) -> bool:
    """Whether the items are tensors over the samples, rather than one item a sample."""
    return all(isinstance(item, Tensor) and item.ndim and item.shape[0] == size for item in items)


def _like(first: Mapping[Any, Any], values: dict[Any, Any]) -> Any:
    try:
        make: Callable[..., Any] = type(first)
        return make(**values) if all(isinstance(key, str) for key in values) else make(values)
    except TypeError:
        return values
