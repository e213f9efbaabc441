"""Splitting a batch into micro-batches."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import suppress
from typing import Any, TypeGuard

import torch
from torch import Tensor

from lightning_pipeline.partition import tree
from lightning_pipeline.partition.memory import extent, memory_of
from lightning_pipeline.partition.tree import Constant, Dictionary, Layout, Object, Pickled, Sequence, Slot

WAY_OUT = "define split_batch(batch, num_microbatches) on the LightningModule, which returns a list of micro-batches"
_SHOWN = 6
"""How many parts of a batch an error lists."""


def batch_size(batch: Any) -> int | None:
    """The number of samples: that of a batch's lists of samples, or else the length that all tensors, arrays and lists
    of plain values in the batch have.

    None if they differ, or there are none.
    """
    tensors, layout = tree.flatten(batch)
    if (listed := _listed_samples(tensors, layout)) is not None:
        return listed
    sizes = {size for _, size in _lengths(tensors, layout)}
    return sizes.pop() if len(sizes) == 1 else None


def num_rows(tensors: list[Tensor]) -> int | None:
    """The size of the first dimension, if it is the same for all tensors that have one; else None."""
    sizes = {tensor.shape[0] for tensor in tensors if tensor.ndim}
    return sizes.pop() if len(sizes) == 1 else None


def num_samples(microbatch: Any, tensors: list[Tensor], layout: Layout) -> int | None:
    """The number of samples of a micro-batch with these tensors; None if it is unknown."""
    with suppress(Exception):  # of any kind, as those of a dictionary whose items are its attributes
        graphs = microbatch.num_graphs  # of PyTorch Geometric, whose tensors have rows for nodes
        if isinstance(graphs, int):
            return graphs
    return _listed_samples(tensors, layout) or num_rows(tensors) or batch_size(microbatch)


def split_batch(batch: Any, num_microbatches: int) -> list[Any]:
    """Split `batch` along its first dimension into micro-batches of almost equal size, the larger ones first.

    All of its tensors, arrays and lists of plain values must have the same length: nothing in a batch tells samples
    from time steps, nodes or classes. Or each field has an item or a row for each sample, and one of them is a list of
    dictionaries, as for the detection of objects. Tensors without dimensions and plain values go into every
    micro-batch. A batch of fewer samples than `num_microbatches` makes one micro-batch of each sample. Tensors of
    micro-batches are views.

    Raises:
        ValueError: lengths differ or there are none, or the batch holds a sparse tensor or an object of a class that
            nothing is known about.
    """
    if num_microbatches == 1 or isinstance(batch, (str, bytes)):
        return [batch]
    tensors, layout = tree.flatten(batch)
    if unknown := _unknown_class(layout):
        raise ValueError(f"cannot split an object of type {unknown} in the batch; {WAY_OUT}")
    if any(tensor.layout is not torch.strided for tensor in tensors):
        raise ValueError(f"cannot split a sparse tensor in the batch, whose rows need not be samples; {WAY_OUT}")
    first: dict[int, str] = {}  # part of each length
    for what, length in _lengths(tensors, layout):
        first.setdefault(length, what)
    if (listed := _listed_samples(tensors, layout)) is not None:
        if len(first) == 1 and listed > 1:
            raise ValueError(
                f"cannot split the batch into {num_microbatches} micro-batches: its lists have {listed} items, and all "
                f"its tensors {first.popitem()[0]} rows, so either could be samples; {WAY_OUT}"
            )
        pairs = itertools.pairwise(_bounds(listed, num_microbatches))
        return [_items(tensors, layout, start, stop) for start, stop in pairs]
    if len(first) > 1:
        shown = ", ".join([*itertools.islice(first.values(), _SHOWN), *["..."] * (len(first) > _SHOWN)])
        raise ValueError(
            f"cannot split the batch into {num_microbatches} micro-batches: its parts differ in length, so it does not "
            f"say how many samples it has ({shown}); {WAY_OUT}"
        )
    if not first or 0 in first:
        raise ValueError(
            f"cannot split a batch of type {type(batch).__name__} into {num_microbatches} micro-batches: no tensor or "
            f"list in it says how many samples it has; {WAY_OUT}"
        )
    [size] = first
    points = _points(tensors)
    holds_lists = _cut(layout, points, 0, 1) is not layout
    microbatches = []
    for start, stop in itertools.pairwise(_bounds(size, num_microbatches)):
        rows = [tensor[start:stop] if tensor.ndim else tensor for tensor in tensors]
        own = _cut(layout, points, start, stop) if holds_lists else layout
        microbatches.append(tree.rebuild(own, rows))
    return microbatches


def _bounds(size: int, num_microbatches: int) -> list[int]:
    """Where micro-batches begin and the last one ends."""
    parts = min(num_microbatches, size)
    return [0, *itertools.accumulate(size // parts + (part < size % parts) for part in range(parts))]


def _listed_samples(tensors: list[Tensor], layout: Layout) -> int | None:
    """The number of samples of a batch with a list of dictionaries, one for each sample, as of the boxes in an image,
    beside fields of as many rows or items, such as stacked images, or a list of those that differ in size; None for
    other batches.
    """
    if not (isinstance(layout, Dictionary) or _is_list(layout)):
        return None
    fields: tuple[Layout, ...] = layout.items
    lists = [field for field in fields if _is_list(field)]
    sizes = {len(field.items) for field in lists if _has_dictionaries(field)}
    if len(sizes) != 1 or sizes == {0}:
        return None
    [size] = sizes
    points = _points(tensors)
    stacked = any(isinstance(field, Slot) and field.number not in points for field in fields)
    if not stacked and len(lists) == 1:
        return None
    for field in fields:
        if isinstance(field, Slot):
            matches = tensors[field.number].shape[:1] in ((), (size,))
        elif isinstance(field, Constant):
            matches = getattr(field.value, "shape", ())[:1] in ((), (size,))
        else:
            matches = _is_list(field) and len(field.items) == size
            if _is_list(field) and stacked and size > 1:
                is_stacked = {length for _, length in _lengths(tensors, field)} == {size}
                # a list of stacked tensors has an item for each field
                matches &= _has_dictionaries(field) or _holds_samples(field, points) or not is_stacked
        if not matches:
            return None
    return size


def _is_list(layout: Layout) -> TypeGuard[Sequence]:
    return isinstance(layout, Sequence) and layout.type in (list, tuple)


def _has_dictionaries(layout: Sequence) -> bool:
    return all(isinstance(item, Dictionary) for item in layout.items)


def _items(tensors: list[Tensor], layout: Layout, start: int, stop: int) -> Any:
    """A part of the samples of a batch with lists of them."""
    assert isinstance(layout, (Dictionary, Sequence))
    rows, items = list(tensors), []
    for field in layout.items:
        if isinstance(field, Slot) and tensors[field.number].ndim:
            rows[field.number] = tensors[field.number][start:stop]
        is_cut = isinstance(field, Sequence)
        items.append(field._replace(items=field.items[start:stop]) if is_cut else _cut(field, frozenset(), start, stop))
    return tree.rebuild(layout._replace(items=tuple(items)), rows)


def _lengths(tensors: list[Tensor], layout: Layout, path: str = "") -> Iterator[tuple[str, int]]:
    """Each part of a value whose length could be the number of samples: what errors call it, and its length."""
    if isinstance(layout, Slot):
        shape = tuple(tensors[layout.number].shape)
        if shape:
            yield f"{path or 'a tensor'} {list(shape)}", shape[0]
    elif isinstance(layout, Constant):
        shape = getattr(layout.value, "shape", ()) if _is_array(layout.value) else ()
        if shape:
            yield f"{path or 'an array'} {list(shape)}", shape[0]
    elif isinstance(layout, Sequence) and _holds_samples(layout, _points(tensors)):
        if layout.items:
            yield f"{path or 'a list'} with {len(layout.items)} entries", len(layout.items)
    else:
        for name, item in _parts(layout):
            yield from _lengths(tensors, item, path + name)


def _parts(layout: Layout) -> Iterator[tuple[str, Layout]]:
    """The items of a container, with how an error writes them after the container's name."""
    if isinstance(layout, Dictionary):
        names = [f"[{key!r}]" for key in layout.keys]
    elif isinstance(layout, Object):
        names = [f".{name}" for name in layout.keys]
    else:
        names = [f"[{index}]" for index in range(len(layout.items))]  # type: ignore[union-attr]
    return zip(names, layout.items, strict=True)  # type: ignore[union-attr]


def _cut(layout: Layout, points: frozenset[int], start: int, stop: int) -> Layout:
    """The layout of a part of the samples. It is `layout` itself if that has no lists or arrays to cut."""
    if isinstance(layout, (Slot, Pickled)):
        return layout
    if isinstance(layout, Constant):
        return Constant(layout.value[start:stop]) if _is_array(layout.value) and layout.value.shape else layout
    if isinstance(layout, Sequence) and _holds_samples(layout, points):
        return Sequence(layout.type, layout.items[start:stop])
    items = tuple(_cut(item, points, start, stop) for item in layout.items)
    is_same = all(new is old for new, old in zip(items, layout.items, strict=True))
    return layout if is_same else layout._replace(items=items)


def _points(tensors: list[Tensor]) -> frozenset[int]:
    """The numbers of tensors without dimensions."""
    return frozenset(number for number, tensor in enumerate(tensors) if not tensor.ndim)


def _holds_samples(layout: Sequence, points: frozenset[int]) -> bool:
    """Whether a list or tuple has an item for each sample: plain values, or tensors without dimensions.

    One of other tensors or arrays has an item for each field, as torch's default_collate makes it.
    """
    if layout.type not in (list, tuple):
        return False
    if all(isinstance(item, Constant) and item.value is None for item in layout.items):  # fields without a value
        return False
    if _are_fields(layout):
        return False
    if all(isinstance(item, Slot) for item in layout.items):
        return all(item.number in points for item in layout.items)
    return all(map(_is_plain, layout.items))


def _are_fields(layout: Sequence) -> bool:
    """Whether a list or tuple has several lists of one length, such as texts and labels. A list of lists may be of
    samples, such as their tokens, but not one of tuples, as torch's default_collate makes them.
    """
    lists = [item for item in layout.items if _is_list(item)]
    if len(lists) < max(2, len(layout.items)) or len({len(item.items) for item in lists}) > 1:
        return False
    return layout.type is tuple or all(item.type is tuple for item in lists)


def _is_plain(layout: Layout) -> bool:
    """Whether a value holds neither tensors nor arrays."""
    if isinstance(layout, Slot):
        return False
    return not _is_array(layout.value) if isinstance(layout, Constant) else all(map(_is_plain, layout.items))


def _is_array(value: Any) -> bool:
    """Whether a value without tensors is a NumPy array."""
    return type(value).__module__ == "numpy" and hasattr(value, "shape")


def _unknown_class(layout: Layout) -> str:
    """The name of a class about which nothing is known, so that its objects cannot be split; "" if there is none."""
    if isinstance(layout, (Slot, Constant)):
        return ""
    if isinstance(layout, Pickled):
        return layout.name
    if isinstance(layout, Object) and not hasattr(layout.type, "__dataclass_fields__"):
        return layout.type.__name__
    return next(filter(None, map(_unknown_class, layout.items)), "")


def signature(microbatch: Any) -> tuple[list[Tensor], Layout, tuple[Any, ...]]:
    """The tensors of a micro-batch, its layout, and a key. Micro-batches with equal keys may run the same program."""
    tensors, layout = tree.flatten(microbatch)
    strides = [t.stride() if t.layout is torch.strided else t.layout for t in tensors]
    shapes = tuple([(tuple(t.shape), s, t.dtype, t.requires_grad) for t, s in zip(tensors, strides, strict=True)])
    return tensors, layout, (_structure(layout), shapes, overlaps(tensors))


def kind_of(batch: Any) -> Any:
    """A key that batches of one loader share, whatever their number of samples."""
    tensors, layout = tree.flatten(batch)
    return _structure(layout), tuple([(tuple(t.shape[1:]), t.dtype) for t in tensors])


Overlaps = tuple[tuple[tuple[int, int], ...], ...]
"""Groups of tensors that overlap in memory: the number of each, and where it begins, in elements from the first one."""


def overlaps(tensors: list[Tensor]) -> Overlaps:
    """The groups of tensors of one dtype that overlap in memory."""
    by_memory: dict[tuple[int, torch.dtype], list[tuple[int, int]]] = {}
    for number, tensor in enumerate(tensors):
        if tensor.layout is torch.strided and tensor.numel():
            by_memory.setdefault((memory_of(tensor), tensor.dtype), []).append((int(tensor.storage_offset()), number))
    groups = []
    for members in by_memory.values():
        group: list[tuple[int, int]] = []
        first = end = 0
        for offset, number in sorted(members) if len(members) > 1 else ():
            if not group or offset >= end:
                groups.append(group)
                group, first = [], offset
            group.append((number, offset - first))
            end = max(end, offset + extent(tensors[number].shape, tensors[number].stride()))
        groups.append(group)
    return tuple(tuple(group) for group in groups if len(group) > 1)


def _structure(layout: Layout) -> Any:
    """The part of a layout that may decide how a step runs: containers, and constants other than text and floats."""
    if isinstance(layout, Slot):
        return layout.number
    if isinstance(layout, Pickled):
        return layout.name, layout.content
    if isinstance(layout, Constant):
        value = layout.value
        return ("c", value) if isinstance(value, (bool, int, type(None), torch.dtype)) else ("c", type(value).__name__)
    if isinstance(layout, Sequence) and all(isinstance(item, Constant) for item in layout.items):
        return (layout.type.__qualname__, "constants")
    keys = () if isinstance(layout, Sequence) else layout.keys
    items = tuple([item.number if type(item) is Slot else _structure(item) for item in layout.items])
    return (layout.type.__qualname__, tuple(map(str, keys)), items)
