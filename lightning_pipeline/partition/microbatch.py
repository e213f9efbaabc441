"""Splitting a batch into micro-batches."""

from __future__ import annotations

import itertools
from collections import Counter
from typing import Any

import torch
from torch import Tensor, nn

from lightning_pipeline.partition import tree
from lightning_pipeline.partition.tree import Constant, Dictionary, Layout, Object, Sequence, Slot


def batch_size(batch: Any) -> int | None:
    """The number of samples: the most frequent size of the first dimension (the first of several); None without."""
    rows = num_rows(tree.leaves(batch))
    if rows is not None:
        return rows
    lists = [len(item) for item in tree.containers(batch) if isinstance(item, list)]
    return lists[0] if lists else None


def num_rows(tensors: list[Tensor]) -> int | None:
    """The most frequent size of the tensors' first dimension (the first of several); None if none has one."""
    sizes = [tensor.shape[0] for tensor in tensors if tensor.ndim]
    if len(set(sizes)) > 1:
        return Counter(sizes).most_common(1)[0][0]
    return sizes[0] if sizes else None


def split_batch(batch: Any, num_microbatches: int) -> list[Any]:
    """Cut `batch` along its first dimension into micro-batches as even as possible, the larger ones first.

    Tensors of another first dimension, tensors without dimensions and plain values are shared by all micro-batches;
    lists of batch length without tensors are cut as well. A batch of fewer samples than `num_microbatches` makes one
    micro-batch a sample. Micro-batches are views.

    Raises:
        ValueError: nothing in the batch says how many samples it has, or it holds an object of an unknown class.
    """
    size = batch_size(batch)
    if size is None or size == 0:
        if num_microbatches == 1:
            return [batch]
        raise ValueError(
            f"cannot split a batch of type {type(batch).__name__} into {num_microbatches} micro-batches: no tensor or "
            f"list in it says how many samples it has; define split_batch(batch, num_microbatches) on the module"
        )
    tensors, layout = tree.flatten(batch)
    if isinstance(layout, Constant) and isinstance(batch, (str, bytes)):
        return [batch]
    parts = min(num_microbatches, size)
    bounds = [0]
    for part in range(parts):
        bounds.append(bounds[-1] + size // parts + (part < size % parts))
    is_cut = [bool(tensor.ndim) and tensor.shape[0] == size for tensor in tensors]
    holds_lists = _cut(layout, size, 0, 1) is not layout
    microbatches = []
    for start, stop in itertools.pairwise(bounds):
        rows = [tensor[start:stop] if cut else tensor for tensor, cut in zip(tensors, is_cut, strict=True)]
        microbatches.append(tree.rebuild(_cut(layout, size, start, stop) if holds_lists else layout, rows))
    return microbatches


def microbatches_of(batch: Any, num_microbatches: int, module: nn.Module) -> list[Any]:
    """A batch's micro-batches, by the ``split_batch`` of the module where it has one, else by the one here.

    Raises:
        ValueError: the module's returned no list of them, or as `split_batch`.
    """
    split = getattr(module, "split_batch", None)
    if split is None:
        return split_batch(batch, num_microbatches)
    found = split(batch, num_microbatches)
    if not isinstance(found, (list, tuple)) or not found:
        what = f"an empty {type(found).__name__}" if isinstance(found, (list, tuple)) else f"a {type(found).__name__}"
        raise ValueError(
            f"{type(module).__name__}.split_batch returned {what}; it has to return a list of micro-batches"
        )
    return list(found)


def _cut(layout: Layout, size: int, start: int, stop: int) -> Layout:
    """`layout` with its lists cut; the same object if there are none."""
    if isinstance(layout, Slot):
        return layout
    if isinstance(layout, Constant):
        if isinstance(layout.value, (list, tuple)) and len(layout.value) == size:
            return Constant(layout.value[start:stop])
        return layout
    if isinstance(layout, Sequence):
        plain = layout.type in (list, tuple) and all(_without_tensors(item) for item in layout.items)
        if plain and len(layout.items) == size:
            return Sequence(layout.type, layout.items[start:stop])
    if isinstance(layout, Object) and not hasattr(layout.type, "__dataclass_fields__"):
        raise ValueError(
            f"cannot split an object of type {layout.type.__name__} in the batch; define "
            f"split_batch(batch, num_microbatches) on the LightningModule"
        )
    assert isinstance(layout, (Sequence, Dictionary, Object))
    items = tuple(_cut(item, size, start, stop) for item in layout.items)
    is_same = all(new is old for new, old in zip(items, layout.items, strict=True))
    return layout if is_same else layout._replace(items=items)


def _without_tensors(layout: Layout) -> bool:
    if isinstance(layout, Slot):
        return False
    return isinstance(layout, Constant) or all(_without_tensors(item) for item in layout.items)


def signature(microbatch: Any) -> tuple[list[Tensor], Layout, tuple[Any, ...]]:
    """The tensors of a micro-batch, its layout, and a key that is equal for micro-batches of one structure."""
    tensors, layout = tree.flatten(microbatch)
    shapes = tuple([(tuple(t.shape), t.stride(), t.dtype, t.requires_grad) for t in tensors])
    return tensors, layout, (_structure(layout), shapes)


def _structure(layout: Layout) -> Any:
    """What of a layout can decide how a step runs: its containers, and constants other than text and fractions."""
    if isinstance(layout, Slot):
        return layout.number
    if isinstance(layout, Constant):
        value = layout.value
        return ("c", value) if isinstance(value, (bool, int, type(None), torch.dtype)) else ("c", type(value).__name__)
    keys = getattr(layout, "keys", ()) if isinstance(layout, Dictionary) else getattr(layout, "names", ())
    if isinstance(layout, Sequence) and all(isinstance(item, Constant) for item in layout.items):
        return (layout.type.__qualname__, "constants")
    items = tuple([item.number if type(item) is Slot else _structure(item) for item in layout.items])
    return (layout.type.__qualname__, tuple(map(str, keys)), items)
