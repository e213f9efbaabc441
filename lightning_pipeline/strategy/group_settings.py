"""Settings of optimizers, such as learning rates, which have to be the same on all ranks at a step."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Sequence
from numbers import Real
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_pipeline.partition.ownership import holders_of
from lightning_pipeline.partition.placeholder import Placeholder

if TYPE_CHECKING:
    from .session import Session

Settings = dict[str, object]
_KERNELS = ("foreach", "fused")
"""Options that choose how an optimizer computes the same; a stage whose parameters are of two kinds turns them off."""


class GroupSettings:
    """Compares what the code of each rank and replica sets, with the numbers that a training step exchanges anyway.

    The settings are compared that there are, and those with which optimizers have updated since, as code may set them
    in a hook right before an update, and back after it.
    """

    def __init__(self, session: Session) -> None:
        self._session = session
        self._at_updates: list[tuple[str, list[Settings]]] = []
        self._compared: list[tuple[str, list[Settings]]] = []

    def make_whole(self, optimizer: Optimizer) -> None:
        """Before an update, give all ranks what the user's code has computed of one stage's tensors and set. All ranks
        must call it."""
        outside = self._session.stages.owner_computes
        if outside is not None:
            for group in optimizer.param_groups:
                partial = {name: value for name, value in group.items() if _is_partial(value)}
                if partial:
                    group.update(zip(partial, outside.whole(list(partial.values()), "a setting"), strict=True))

    def note_update(self, optimizer: Optimizer) -> None:
        """An optimizer has updated."""
        self._at_updates.append(_settings_of(optimizer))

    def digest(self) -> float:
        """A number that is the same on ranks that have the same settings."""
        now = [_settings_of(optimizer) for optimizer in self._session.optimizers.optimizers]
        self._compared, self._at_updates = self._at_updates + now, []
        return float(zlib.crc32(repr(self._compared).encode()))

    def check_stages(self, digests: Iterable[float]) -> None:
        """Compare with other stages. All ranks of the pipeline must call it with the same."""
        if len(set(digests)) > 1:
            transport = self._session.transport
            assert transport is not None  # there are several stages
            ranks = range(transport.num_stages)
            told = [transport.broadcast_object(self._compared, rank, "optimizers' settings") for rank in ranks]
            _refuse(told, [transport.name_of(rank) for rank in ranks])

    def check_replicas(self, digests: Iterable[float]) -> None:
        """Compare with the other replicas. All ranks of a stage must call it with the same."""
        if len(set(digests)) > 1:
            replicas = self._session.replicas
            assert replicas is not None
            told = replicas.gather_objects(self._compared)
            _refuse(told, [f"replica {replica}" for replica in range(len(told))])

    def check_last(self) -> None:
        """After the last update, which no step follows. All ranks must call it."""
        transport, replicas, digest = self._session.transport, self._session.replicas, self.digest()
        if transport is not None:
            found = transport.all_gather_vector(torch.tensor([digest], dtype=torch.float64), "optimizers' settings")
            self.check_stages(found.flatten().tolist())
        if replicas is not None:
            self.check_replicas(number for (number,) in replicas.gather_numbers(digest))


def _settings_of(optimizer: Optimizer) -> tuple[str, list[Settings]]:
    """An optimizer's class, and the numbers in its groups of parameters."""
    groups = [
        {name: _plain(value) for name, value in group.items() if name not in _KERNELS and _is_setting(value)}
        for group in optimizer.param_groups
    ]
    return type(optimizer).__name__, groups


def _is_setting(value: object) -> bool:
    if isinstance(value, tuple):
        return all(map(_is_setting, value))
    if isinstance(value, Tensor):  # on a device it would have to be waited for
        return value.is_cpu and value.numel() == 1 and not _is_partial(value)
    return isinstance(value, Real)


def _is_partial(value: object) -> bool:
    return isinstance(value, Tensor) and (type(value) is Placeholder or holders_of(value) is not None)


def _plain(value: Any) -> object:
    """As a Python number, since one rank may have one of NumPy's, or a tensor, of the same value."""
    return tuple(map(_plain, value)) if isinstance(value, tuple) else float(value)


def _refuse(told: Sequence[Sequence[tuple[str, list[Settings]]]], names: Sequence[str]) -> NoReturn:
    """Raise an error that names a setting that some differ in."""
    for (optimizer, *_), *of_all in zip(told[0], *([groups for _, groups in each] for each in told), strict=False):
        for place, groups in enumerate(zip(*of_all, strict=False)):
            for name in dict.fromkeys(name for group in groups for name in group):
                values = [group.get(name, "no plain number") for group in groups]
                if len(set(map(repr, values))) > 1:
                    shown = ", ".join(f"{value} on {each}" for value, each in zip(values, names, strict=True))
                    raise RuntimeError(
                        f"param_groups[{place}][{name!r}] of {optimizer} is {shown}: each of them would update its "
                        f"weights by another one. Let every rank set it to the same, as to a number that all ranks "
                        f"count, and not the first rank alone under trainer.is_global_zero, or that comes from "
                        f"trainer.strategy.broadcast; log what a scheduler monitors with sync_dist=True"
                    )
    raise RuntimeError("the ranks' optimizers have different groups of parameters: let every rank add the same ones")
