"""Batches as loaders give them to a module's steps, and the micro-batches that its steps are given."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from typing import Any, ClassVar

from torch import Tensor, nn

from lightning_pipeline import _torch
from lightning_pipeline.partition import tree
from lightning_pipeline.partition.microbatch import WAY_OUT, batch_size, kind_of, split_batch
from lightning_pipeline.partition.users_code import users_line


class ListsOfSamples(list[Any]):
    """Micro-batches that are lists of samples."""


class OneBatch:
    """The iterator over one batch or micro-batch that a step gets as its ``dataloader_iter``.

    Attributes:
        place: the indices of the batch and of the dataloader, which it yields with the batch.
    """

    # Of the class, as an attribute of the instance would count as a part of the batch, which changes each time.
    place: ClassVar[tuple[int, int]] = (0, 0)

    def __init__(self, batch: Any) -> None:
        self.batch = batch

    def __iter__(self) -> Iterator[tuple[Any, int, int]]:
        return self

    def __next__(self) -> tuple[Any, int, int]:
        if not hasattr(self, "batch"):
            raise NotImplementedError(
                f"{users_line()} takes a second batch from the dataloader_iter within one step, and stages have one "
                f"for each: let the loader give both together, or train with num_stages=1"
            )
        batch = self.__dict__.pop("batch")
        return batch, *self.place


def microbatches_of(batch: Any, num_microbatches: int, module: nn.Module) -> list[Any]:
    """Split a batch by the module's ``split_batch`` if it has one, else by the function of this name.

    A batch norm in training has no statistics of a single sample. If the module has one, a batch is split into fewer
    micro-batches rather than into some with a single sample. A batch of several loaders, of which each has another
    number of samples, is split loader by loader.

    Raises:
        ValueError: the module's ``split_batch`` did not return a list of micro-batches; or as `split_batch`.
    """
    if isinstance(batch, OneBatch):
        return [OneBatch(part) for part in microbatches_of(batch.batch, num_microbatches, module)]
    split = getattr(module, "split_batch", None)
    if split is None:
        if parts := _by_loaders(batch, num_microbatches, module):
            return parts
        parts = split_batch(batch, num_microbatches)
        if len(parts) > 1 and batch_size(parts[-1]) == 1 and _trains_batch_norm(module):
            size = batch_size(batch)
            assert size is not None
            parts = split_batch(batch, size // 2)
        return parts
    found = split(batch, num_microbatches)
    if not isinstance(found, (list, tuple)) or not found:
        what = f"an empty {type(found).__name__}" if isinstance(found, (list, tuple)) else f"a {type(found).__name__}"
        raise ValueError(
            f"{type(module).__name__}.split_batch returned {what}; it has to return a list of micro-batches"
        )
    are_lists = isinstance(batch, list) and all(isinstance(part, list) for part in found)
    return ListsOfSamples(found) if are_lists and sum(map(len, found)) == len(batch) else list(found)


def _by_loaders(batch: Any, num_microbatches: int, module: nn.Module) -> list[Any]:
    """Split a batch of several loaders that differ in their number of samples, as of labelled and unlabelled ones, each
    into equally many parts; [] for other batches.
    """
    loaders = _loaders_at_once(module)
    if not isinstance(loaders, (dict, list, tuple)):
        return []
    nesting = _torch.tree_structure(loaders)
    try:
        entries = nesting.flatten_up_to(batch)
    except ValueError:  # the batch is not nested like them
        return []
    sizes = {batch_size(entry) or 0 for entry in entries if entry is not None}  # one that has run out gives None
    if len(sizes) < 2 or 0 in sizes:
        return []
    count = min(num_microbatches, *sizes)
    if _trains_batch_norm(module):
        count = max(1, min(count, min(sizes) // 2))
    parts = [[entry] * count if entry is None else split_batch(entry, count) for entry in entries]
    return [_torch.tree_unflatten(each, nesting) for each in zip(*parts, strict=True)]


def _loaders_at_once(module: nn.Module) -> Any:
    """The loaders, nested, that the Trainer's running loop takes each batch from; None where one follows another."""
    with suppress(RuntimeError, AttributeError):  # of a LightningModule without a Trainer, and of another module
        trainer: Any = module.trainer
        combined = trainer._active_loop._combined_loader  # what is public does not tell whether one follows another
        return None if combined._mode == "sequential" else combined.iterables
    return None


def _trains_batch_norm(module: nn.Module) -> bool:
    return any(isinstance(part, _torch.BatchNorm) and part.training for part in module.modules())


def refuse_list_of_samples(batch: Any, first_size: int | None, accepted: set[Any]) -> None:
    """Raise for a batch that is a list of samples, which would be split within each of them.

    Args:
        first_size: the number of samples in the loader's first batch; None if that is not known.
        accepted: the kinds of full batches so far. A last batch has fewer rows than the first one, and may have as many
            fields as that has rows.

    Raises:
        ValueError: the list has as many items, all alike, and their tensors have another length, or are nested.
    """
    if type(batch) is not list or first_size is None or not len(batch) == first_size > 1:
        return
    size, layouts = batch_size(batch), [tree.flatten(item)[1] for item in batch]
    is_nested = not isinstance(batch[0], Tensor) and first_size > 2
    if any(type(one) is not type(layouts[0]) for one in layouts) or (size == first_size and not is_nested):
        accepted.add((first_size, kind_of(batch)))
        return
    if size is not None and size < first_size and (first_size, kind_of(batch)) in accepted:
        return
    raise ValueError(
        f"the batch is a list of {first_size} items, as many as it has samples, so each of them seems to be a sample, "
        f"and to split their tensors would cut every sample into pieces: stack the samples in collate_fn, or {WAY_OUT}"
    )
