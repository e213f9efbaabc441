"""Data loaders: the first stage reads batches, and the other stages follow its iteration."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, default_collate

from lightning_pipeline.hooks import loader_changes
from lightning_pipeline.hooks.first_rank import Asked, Lending
from lightning_pipeline.hooks.loader_state import LoaderState
from lightning_pipeline.partition import tree
from lightning_pipeline.partition.placeholder import TensorSpec
from lightning_pipeline.partition.rng import random_states, set_random_states
from lightning_pipeline.partition.tree import Layout
from lightning_pipeline.partition.users_code import in_hook
from lightning_pipeline.recording.patched_torch import running_recording
from lightning_pipeline.runtime.direct import DirectTransport
from lightning_pipeline.runtime.replicas import Replicas
from lightning_pipeline.runtime.tensor_meta import conform
from lightning_pipeline.runtime.transport import Transport

from .._lightning import sized_len
from .lightning_private import is_loader_check, sample_indices, set_sample_indices

_END = None

_CPU = torch.device("cpu")

Description = tuple[Layout, list[TensorSpec]]
"""A batch without data: its nesting with everything that is no tensor, and the specs of its tensors."""


class _Left(NamedTuple):
    """What the code of a loader leaves behind: the states of the generators, or None if nothing was drawn, and changes
    of objects that it refers to."""

    drawn: tuple[Any, ...] | None
    changes: list[bytes]


class _Before:
    """Before the code of a loader runs."""

    def __init__(self, loader: Any, device: torch.device) -> None:
        self._device = device
        self._drawn = random_states(device)
        self._state = LoaderState(loader)

    def left(self) -> _Left | None:
        """What it has left behind; None if nothing."""
        states = random_states(self._device)
        drawn, changes = states if states != self._drawn else None, self._state.changes()
        return None if drawn is None and not changes else _Left(drawn, changes)


class SharedLoader:
    """A loader whose batches the stages share. All but its iteration is that of the loader that it wraps, and copies
    and pickles are of that loader alone, without connections. A hook or step that iterates it does so on every rank, as
    it does all else: the ranks' generators and samplers are in the same states.

    Args:
        transport: gives that to the other stages, which a cut in mid-run may replace; None with one stage.
        whole: every stage gets the batches, not only their specs.
        lending: gives what lends the module's tensors to the first stage; None while every stage has them.
    """

    def __init__(
        self,
        loader: Any,
        transport: Callable[[], Transport | None],
        *,
        whole: bool,
        lending: Callable[[], Lending | None],
    ) -> None:
        self._loader = loader
        self._current_transport = transport
        self._whole = whole
        self._lending = lending
        # Lightning finds stateful loaders by `isinstance` with a protocol, which skips `__getattr__` since Python 3.12.
        for name in ("state_dict", "load_state_dict"):
            if hasattr(loader, name):
                setattr(self, name, getattr(loader, name))

    def __iter__(self) -> Iterator[Any]:
        if is_loader_check(sys._getframe(1)):
            return iter(())
        is_users_code = in_hook.is_here() or running_recording() is not None
        return iter(self._loader) if is_users_code else self._shared()

    def _shared(self) -> Iterator[Any]:
        raise NotImplementedError

    @property
    def shared(self) -> Any:
        """The loader that this one wraps."""
        return self._loader

    def __reduce__(self) -> tuple[Any, ...]:
        return _itself, (self._loader,)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def __len__(self) -> int:
        return len(self._loader)  # raises TypeError where the loader does


class AnnouncedLoader(SharedLoader):
    """The first stage's loader: yields the batches as they are, and announces each to the other stages.

    Args:
        replicas: of a training loader, those whose loaders must give equally many batches; None checks nothing.
    """

    def __init__(
        self,
        loader: Any,
        transport: Callable[[], Transport | None],
        replicas: Replicas | None,
        **options: Any,
    ) -> None:
        super().__init__(loader, transport, **options)
        self._replicas = replicas

    def _shared(self) -> Iterator[Any]:
        # Not in the generator: a loader's iterator draws the seed of its workers when it is made, before later hooks.
        before = self._before()
        with self._borrowing():
            iterator = iter(self._loader)
        self._tell(before and before.left())
        return self._batches(iterator)

    def _batches(self, iterator: Iterator[Any]) -> Iterator[Any]:
        told: dict[Any, int] = {}
        for number in itertools.count():
            before = self._before()
            with self._borrowing():
                batch = next(iterator, _END)
            left = before and before.left()
            if self._replicas is not None:
                _check_even(self._replicas, number, has_more=batch is not _END)
            if batch is _END:
                break
            indices = sample_indices(self._loader)
            tensors, description = _describe(batch, told)
            self._tell(((description, indices and indices[number]), left), tensors if self._whole else ())
            yield batch
        self._tell((_END, left))

    def _before(self) -> _Before | None:
        transport = self._current_transport()
        return None if transport is None else _Before(self._loader, transport.device)

    def _borrowing(self) -> AbstractContextManager[None]:
        lending = self._lending()
        return nullcontext() if lending is None else lending.borrowing()

    def _tell(self, message: Any, tensors: Sequence[Tensor] = ()) -> None:
        transport = self._current_transport()
        if transport is not None:
            direct = DirectTransport(transport, _CPU)
            for peer in range(1, len(transport.pipeline_ranks)):
                transport.send_object(message, peer)
                for tensor in tensors:
                    direct.send(conform(tensor, TensorSpec.of(tensor)), peer)

    @property
    def worker_init_fn(self) -> Any:
        """The loader's own. Lightning sets it on this wrapper, to seed the workers."""
        return self._loader.worker_init_fn

    @worker_init_fn.setter
    def worker_init_fn(self, function: Any) -> None:
        self._loader.worker_init_fn = function


class FollowingLoader(SharedLoader):
    """Another stage's loader, which reads no data: yields batches on the meta device, or the first stage's batches."""

    @property
    def _transport(self) -> Transport:
        transport = self._current_transport()
        assert transport is not None  # there is a stage to follow
        return transport

    def _shared(self) -> Iterator[Any]:
        self._follow(self._hear("the first stage's iterator"))
        return self._batches()

    def _batches(self) -> Iterator[Any]:
        known: list[Any] = []
        seen: list[list[int]] = []
        set_sample_indices(self._loader, seen)
        while True:
            message, left = self._hear("the first stage's next batch")
            self._follow(left)
            if message is _END:
                return
            description, indices = message
            seen.append(indices)
            if isinstance(description, int):
                description = known[description]
            else:
                known.append(description)
            layout, looks = description
            if self._whole:
                direct = DirectTransport(self._transport, _CPU)
                tensors = [direct.receive(look, 0, "the first stage's next batch") for look in looks]
            else:
                tensors = [torch.empty(look.shape, dtype=look.dtype, device="meta") for look in looks]
            yield tree.rebuild(layout, tensors)

    def _follow(self, left: _Left | None) -> None:
        """What the first stage's loader has drawn and changed there counts as drawn and changed here, too."""
        if left is not None:
            if left.drawn is not None:
                set_random_states(left.drawn, self._transport.device)
            loader_changes.apply(left.changes, self._loader)

    def _hear(self, what: str) -> Any:
        """The first stage's next message. Before that it may ask for tensors of the module."""
        while type(message := self._transport.recv_object(0, what)) is Asked:
            lending = self._lending()
            assert lending is not None  # or the first stage would have the tensors
            lending.lend(message)
        return message


def _itself(loader: Any) -> Any:
    return loader


def sample_batch(loader: Any) -> Any:
    """A batch of a loader's first samples, read without its sampler, whose state stays as it is.

    Raises:
        ValueError: the loader is no DataLoader over a map-style dataset.
    """
    dataset: Any = getattr(loader, "dataset", None)
    if not isinstance(loader, DataLoader) or isinstance(dataset, IterableDataset):
        raise ValueError(
            f"the module is cut before its first batch, as it does not fit on one rank, but {type(loader).__name__} "
            f"cannot give a sample of the data: name the first module of each later stage in stage_config "
            f"(lightning-pipeline plan finds it), or train from a DataLoader with a map-style dataset"
        )
    if loader.batch_sampler is None:
        return loader.collate_fn(dataset[0])
    size: Any = loader.batch_size or getattr(loader.batch_sampler, "batch_size", 1)
    return loader.collate_fn([dataset[index] for index in range(min(size, len(dataset)))])


def has_length(loader: Any) -> bool:
    """Whether Lightning's loops can tell how many batches a loader has."""
    return sized_len(loader) is not None


def stacks_samples(loader: Any) -> bool:
    """Whether a loader makes batches by torch's own function, whose lists have an item for each field."""
    return getattr(loader, "collate_fn", None) is default_collate


def samples_at_once(loader: Any) -> int | None:
    """The number of samples in the first batch of a DataLoader; None if that is not known."""
    batches = getattr(loader, "batch_sampler", None)
    size = getattr(loader, "batch_size", None) or getattr(batches, "batch_size", None)
    if not isinstance(size, int):
        return None
    with suppress(TypeError, NotImplementedError):  # of a sampler without a length
        return min(size, len(batches.sampler))  # type: ignore[union-attr]
    return size


def _check_even(replicas: Replicas, number: int, *, has_more: bool) -> None:
    """Raise on all replicas if one runs out of batches before the others, which would wait for its gradients."""
    more = [bool(flag) for (flag,) in replicas.gather_numbers(float(has_more))]
    if len(set(more)) > 1:
        ended = [str(replica) for replica, flag in enumerate(more) if not flag]
        raise RuntimeError(
            f"the data of replica{'s' * (len(ended) > 1)} {' and '.join(ended)} ended after {number} batches, and "
            f"others have more; give all replicas equally many: with a DistributedSampler (Lightning adds one to a "
            f"map-style dataset), an iterable dataset that is split evenly, or limit_train_batches={number}"
        )


def _describe(batch: Any, told: dict[Any, int]) -> tuple[list[Tensor], int | Description]:
    """A batch's tensors, and its description, or the number of an earlier batch with the same one."""
    tensors, layout = tree.flatten(batch)
    looks = list(map(TensorSpec.of, tensors))
    key: Any = (layout, tuple(looks))
    try:
        number = told.get(key)
    except TypeError:  # plain values that are not hashable: described again each time
        key, number = object(), None
    if number is None:
        told[key] = len(told)
        return tensors, (layout, looks)
    return tensors, number
