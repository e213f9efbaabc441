"""Losses and outputs of micro-batches, combined into those of the batch.

Whether a loss is a sum over samples is read from its autograd graph, on the stage that has the loss. Numbers would not
tell: halves of a micro-batch would have to run through all stages again, and contrastive losses grow with the number of
samples although they are means. The graph shows the usual sums: loss functions with ``reduction="sum"``, and ``.sum()``
of elementwise losses, squares or absolute values, alone or added up. Division or weights may turn them into a mean, so
such losses count as unknown.
"""

from __future__ import annotations

import copy
import dataclasses
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.autograd.graph import Node

from lightning_pipeline.partition import tree

from .._lightning import MisconfigurationException


def combine(results: list[Any], sizes: list[int]) -> Any:
    """Combine the results of micro-batches into that of the batch.

    Tensors and arrays are concatenated along the dimension of the samples, the first one that is as long as there are
    samples; others, and floats, are averaged, weighted by samples. Lists with one entry per sample, or of unequal
    lengths, are joined. Dictionaries, dataclasses and other lists or tuples are combined entry by entry, and
    dictionaries without common keys are merged. Values that are equal for all micro-batches stay as they are; of other
    values the first one is taken, with a warning.

    A list of tensors that all have as many rows as the list has entries counts as outputs over the samples, not as one
    entry per sample, and so does a tuple of different kinds of entries, such as ``loss, logits``.

    Args:
        sizes: number of samples of each; zeros if it is unknown, and then tensors are concatenated along the first
            dimension, lists are joined, and floats have equal weights.

    Raises:
        ValueError: tensors do not fit together, dictionaries share only some keys, or an object cannot be combined,
            such as a generator; the message tells what to return instead.
    """
    if len(results) == 1:
        return results[0]
    kept = [(result, size) for result, size in zip(results, sizes, strict=True) if result is not None]
    if not kept:
        return None
    results, sizes = [result for result, _ in kept], [size for _, size in kept]
    first = results[0]
    if isinstance(first, Tensor):
        return _combine_tensors(results, sizes)
    if isinstance(first, np.ndarray):
        return _combine_arrays(results, sizes)
    if isinstance(first, (float, np.floating)):
        return _mean(results, sizes)
    if isinstance(first, Mapping):
        return _combine_mappings(results, sizes)
    if dataclasses.is_dataclass(first):
        return _combine_dataclasses(results, sizes)
    if isinstance(first, (list, tuple)):
        return _combine_sequences(results, sizes)
    return _first(results)


def _combine_tensors(tensors: list[Tensor], sizes: list[int]) -> Tensor:
    first = tensors[0]
    if _are_along(0, tensors, sizes):
        return _concatenated(tensors)
    if all(t.shape == first.shape and torch.equal(t, first) for t in tensors):
        return first
    if first.ndim and not any(sizes):
        return _concatenated(tensors)
    along = [
        dimension
        for dimension in range(1, first.ndim)
        if _are_along(dimension, tensors, sizes) and len({_without(dimension, t.shape) for t in tensors}) == 1
    ]
    if along and (max(sizes) > 1 or len(along) == 1):  # not every column is a sample
        return torch.cat(tensors, along[0])
    if all(t.shape == first.shape for t in tensors) and first.is_floating_point():
        weights = torch.tensor(_weights(sizes), dtype=first.dtype, device=first.device)
        return (torch.stack(tensors) * weights.reshape(-1, *[1] * first.ndim)).sum(0) / sum(_weights(sizes))
    return _concatenated(tensors) if first.ndim else _first(tensors)


def _combine_arrays(arrays: list[Any], sizes: list[int]) -> Any:
    if arrays[0].dtype.kind not in "biufc":  # torch has no text and no objects
        return np.concatenate(arrays) if arrays[0].ndim else arrays[0]
    return _combine_tensors([torch.from_numpy(np.ascontiguousarray(array)) for array in arrays], sizes).numpy()


def _combine_mappings(results: list[Mapping[Any, Any]], sizes: list[int]) -> Any:
    first = results[0]
    keys = dict.fromkeys(key for result in results for key in result)
    if all(result.keys() == first.keys() for result in results):
        values = {key: combine([result[key] for result in results], sizes) for key in first}
    elif len(keys) == sum(map(len, results)):  # such as one entry per sample
        values = {key: value for result in results for key, value in result.items()}
    else:
        raise ValueError(
            f"the step returned dictionaries with the keys {[list(result) for result in results]} for its "
            f"micro-batches: return the same keys for each, or keys that no two of them share"
        )
    return values if type(first) is dict else _like(first, values)


def _combine_dataclasses(results: list[Any], sizes: list[int]) -> Any:
    made = copy.copy(results[0])
    for name in tree.attributes(made) or ():
        object.__setattr__(made, name, combine([getattr(result, name) for result in results], sizes))
    return made


def _combine_sequences(results: list[Any], sizes: list[int]) -> Any:
    first = results[0]
    if hasattr(first, "_fields"):
        return type(first)(*(combine(list(parts), sizes) for parts in zip(*results, strict=True)))
    if not any(sizes):
        one_a_sample = isinstance(first, list)
    else:
        one_a_sample = all(len(result) == size for result, size in zip(results, sizes, strict=True))
    one_a_sample = one_a_sample and all(map(_are_alike, results))
    are_batched = all(_are_batched(result, size) for result, size in zip(results, sizes, strict=True))
    same_length = all(len(result) == len(first) for result in results)
    if (one_a_sample and not are_batched) or not same_length:
        return type(first)(item for result in results for item in result)
    return type(first)(combine(list(parts), sizes) for parts in zip(*results, strict=True))


def _are_along(dimension: int, tensors: list[Tensor], sizes: list[int]) -> bool:
    """Whether this dimension of the tensors is as long as there are samples."""
    return all(t.ndim > dimension and t.shape[dimension] == size for t, size in zip(tensors, sizes, strict=True))


def _are_batched(items: Any, size: int) -> bool:
    """Whether the items are tensors over the samples, rather than one item per sample."""
    return all(isinstance(item, Tensor) and item.ndim and item.shape[0] == size for item in items)


def _are_alike(items: Any) -> bool:
    """Whether the entries of a list or tuple may be of one kind, as those of samples are; lists may have None."""
    kinds = {_kind_of(item) for item in items if item is not None or isinstance(items, tuple)}
    return len(kinds) <= 1


def _kind_of(item: Any) -> Any:
    if isinstance(item, (Tensor, np.ndarray)):
        return Tensor if isinstance(item, Tensor) else np.ndarray, item.ndim
    return float if isinstance(item, (int, float, np.number)) else type(item)


def _without(dimension: int, shape: torch.Size) -> tuple[int, ...]:
    return (*shape[:dimension], *shape[dimension + 1 :])


def _concatenated(tensors: list[Tensor]) -> Tensor:
    try:
        return torch.cat(tensors)
    except RuntimeError:
        raise ValueError(
            f"the micro-batches' outputs have shapes {[tuple(t.shape) for t in tensors]} and cannot be concatenated; "
            f"pad them in the step to one length, or return a list with one entry per sample"
        ) from None


def _mean(values: list[Any], sizes: list[int]) -> Any:
    if all(value == values[0] for value in values):
        return values[0]
    weights = _weights(sizes)
    return sum(value * weight for value, weight in zip(values, weights, strict=True)) / sum(weights)


def _weights(sizes: list[int]) -> list[int]:
    """Of micro-batches with these numbers of samples; equal ones if they are unknown."""
    return sizes if any(sizes) else [1] * len(sizes)


def _first(values: list[Any]) -> Any:
    """The first of values that cannot be combined; with a warning if they differ."""
    first = values[0]
    has_tensors = not isinstance(first, Tensor) and bool(tree.leaves(first))
    if has_tensors or isinstance(first, Iterator):
        raise ValueError(
            f"the step returned a {type(first).__name__} for each of its {len(values)} micro-batches, and these cannot "
            f"be combined: return tensors, or lists with one entry per sample, alone or in dictionaries, tuples or "
            f"dataclasses"
        )
    if not all(_is_equal(value, first) for value in values):
        warnings.warn(
            f"the step returned a {type(first).__name__} that differs from micro-batch to micro-batch; the first one's "
            f"is used. Return a tensor, a list with one entry per sample, or a float, which is averaged",
            stacklevel=2,
        )
    return first


def _is_equal(value: Any, other: Any) -> bool:
    try:
        return value is other or bool(value == other)
    except (RuntimeError, TypeError, ValueError):  # compares elementwise, or not at all
        return False


def _like(first: Mapping[Any, Any], values: dict[Any, Any]) -> Any:
    try:
        make: Callable[..., Any] = type(first)
        return make(**values) if all(isinstance(key, str) for key in values) else make(values)
    except TypeError:
        return values


_SUM = "sum"
_SCALED = "scaled"  # a sum times a constant, which may make it a mean
_NONE, _TOTAL = 0, 2  # reductions, as autograd's nodes store them

# Kinds of nodes by name, without "Backward" and its number.
_TERMS = {"Add", "Sub"}
_SAME = {"View", "UnsafeView", "ReshapeAlias", "Squeeze", "Unsqueeze", "ToCopy", "Clone", "Alias"}
_ELEMENTWISE = {"Pow", "Abs", "CtcLoss"}


class LossValueError(MisconfigurationException, ValueError):
    """A training step returned something without a loss. It is Lightning's own error for that, too."""


def loss_in(result: Any, module: str) -> Tensor:
    """The loss in the result of a training step.

    Raises:
        LossValueError: the result has none.
    """
    loss = result
    if not isinstance(result, Tensor) and isinstance(result, Mapping):
        loss = result.get("loss")
    if isinstance(loss, Tensor) and loss.numel() == 1:
        return loss.reshape(()) if loss.dim() else loss
    what = type(result).__name__
    rule = "In automatic optimization, `training_step` must return a Tensor, a dict, or None"
    if isinstance(result, Mapping):
        what = f"{what} {list(result)}"
        rule = "In automatic_optimization, when `training_step` returns a dict, the 'loss' key needs to be present"
    elif isinstance(result, Tensor):
        what = f"a tensor of shape {list(result.shape)}"
    raise LossValueError(
        f"{rule}: {module}.training_step returned {what}, and a pipeline needs the loss of every micro-batch: return a "
        f"tensor with one element, or a dictionary with one under 'loss', or None to skip the batch"
    )


def mean_loss(losses: list[Tensor], sizes: list[int]) -> Tensor:
    """The mean of the micro-batches' losses, weighted by their samples (a 0-d tensor)."""
    stacked = torch.stack([loss.detach().reshape(()) for loss in losses])
    if len(set(sizes)) == 1:
        return stacked.sum() / len(losses)
    return (stacked * torch.tensor(sizes, dtype=stacked.dtype, device=stacked.device)).sum() / sum(sizes)


def is_sum_over_samples(loss: Tensor, num_samples: int) -> bool:
    """Whether the loss of a micro-batch is known to be a sum over its samples."""
    if loss.grad_fn is None:
        return False
    kinds = {_kind(term, num_samples) for term in _terms(loss.grad_fn)}
    return _SUM in kinds and kinds <= {_SUM, _SCALED}


def _terms(node: Node) -> Iterator[Node]:
    """The terms of a sum; autograd does not record constants."""
    node = _without_views(node)
    if _name(node) not in _TERMS or getattr(node, "_saved_alpha", 1) != 1:
        yield node
        return
    for term in _inputs(node):
        yield from _terms(term)


def _kind(node: Node, num_samples: int) -> str | None:
    """`_SUM` or `_SCALED`; None if it is a mean or unknown."""
    node = _without_views(node)
    name, inputs = _name(node), _inputs(node)
    if hasattr(node, "_saved_reduction"):
        return _SUM if _is_over_samples(node, _TOTAL, num_samples) else None
    if name == "Sum":
        return _SUM if _is_sum_of_losses(node, num_samples) else _SCALED
    if name in ("Mul", "Neg") and len(inputs) == 1:
        kind = _kind(inputs[0], num_samples)
        # MulBackward1 multiplies by a number of torch's own, as in label smoothing; the user's makes another node.
        return kind if node.name() == "MulBackward1" or kind is None else _SCALED
    return None


def _is_sum_of_losses(node: Node, num_samples: int) -> bool:
    """Whether a sum's operands are losses per sample, or squares or absolute values."""
    while _name(node) == "Sum":
        node = _without_views(_inputs(node)[0])
    if hasattr(node, "_saved_reduction"):
        return _is_over_samples(node, _NONE, num_samples)
    return _name(node) in _ELEMENTWISE and _has_samples(node._input_metadata[0].shape, num_samples)


def _is_over_samples(node: Node, reduction: int, num_samples: int) -> bool:
    """Whether a loss function's node has this reduction, no weights, and samples as rows."""
    function, number = node.next_functions[0]
    if node._saved_reduction != reduction or function is None or _has_weight(node):  # type: ignore[attr-defined]
        return False
    shape = function._input_metadata[number].shape
    if _name(node).startswith("NllLoss"):  # rows may be the tokens of samples, and columns are classes
        return len(shape) > 1 and shape[0] % num_samples == 0
    return _has_samples(shape, num_samples)


def _has_samples(shape: Sequence[int], num_samples: int) -> bool:
    """Whether the first dimension is that of the samples, unlike that of weights or statistics."""
    return len(shape) > 0 and shape[0] == num_samples > 1


def _has_weight(node: Node) -> bool:
    """Whether a loss has class weights. Does not unpack them: under activation checkpointing that would recompute."""
    saved = getattr(node, "_raw_saved_weight", None)
    return saved is not None and saved.data is not None


def _without_views(node: Node) -> Node:
    while _name(node) in _SAME and len(_inputs(node)) == 1:
        node = _inputs(node)[0]
    return node


def _inputs(node: Node) -> list[Node]:
    return [function for function, _ in node.next_functions if function is not None]


def _name(node: Node) -> str:
    return node.name().partition("Backward")[0]
