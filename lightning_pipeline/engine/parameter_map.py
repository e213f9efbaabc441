"""Which ranks hold which parameters, as steps reveal it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import nn

from lightning_pipeline.partition.ownership import Ownership, named_tensors, names_of_tensors
from lightning_pipeline.runtime.transport import Transport


class ParameterMap:
    """Records which virtual stages use which tensors, and derives which ranks hold them.

    Args:
        module: the LightningModule.
        placement: the rank of each virtual stage.
        rank: this rank.
        certain: virtual stages of leaves that are known from the start.

    Attributes:
        present: the ranks that have each tensor which an earlier run has left on some only, by name.
    """

    def __init__(self, module: nn.Module, placement: Sequence[int], rank: int, certain: Mapping[str, int]) -> None:
        self.placement = tuple(placement)
        self.num_ranks = max(placement) + 1
        self.rank = rank
        self._is_settled = False
        self._certain = dict(certain)
        self._users: dict[str, set[int]] = {}
        self.present: dict[str, tuple[int, ...]] = {}
        self._names = names_of_tensors(module)

    def find_present(self, module: nn.Module, transport: Transport | None) -> None:
        """Take in which ranks have which tensors, where an earlier run has left a module with a stage on each rank.

        What none has is new, and is made where it is held.
        """
        if transport is None:
            return
        tensors = dict(named_tensors(module))
        here = [0.0 if tensors[names[0]].is_meta else 1.0 for names in self._names]
        if not here:
            return
        table = transport.all_gather_vector(torch.tensor(here, dtype=torch.float64), "presence of parameters").tolist()
        for column, names in enumerate(self._names):
            ranks = tuple(rank for rank, row in enumerate(table) if row[column])
            if 0 < len(ranks) < self.num_ranks:
                self.present.update(dict.fromkeys(names, ranks))

    def take_in(self, module: nn.Module) -> bool:
        """Add the module's new tensors; all ranks hold them until a step uses them. Returns whether any are new.

        So are tensors of which one was tied to another before, as nobody knows which of the two a rank used.
        """
        groups = names_of_tensors(module)
        place = {name: number for number, names in enumerate(groups) for name in names}
        untied = [names for names in self._names if len({place[name] for name in names if name in place}) > 1]
        for names in untied:
            self._names.remove(names)
            for name in names:
                self._users.pop(name, None)
                self.present.pop(name, None)
        known = {name for names in self._names for name in names}
        new = [names for names in groups if known.isdisjoint(names)]
        self._names += new
        return bool(new)

    def add(self, uses: Mapping[str, Iterable[int]]) -> bool:
        """Take in which virtual stages have used which tensors. Returns whether that was new.

        What a rank no longer holds when it is used for the first time stays where it is.
        """
        is_new = False
        for names in self._names:
            for name in names:
                for stage in uses.get(name, ()):
                    known = self._users.setdefault(name, set())
                    if stage not in known and self.placement[stage] in self._holders_of(names):
                        known.add(stage)
                        is_new = True
        return is_new

    def state(self) -> dict[str, set[int]]:
        """Which virtual stages used which tensors, for another replica's `merge`."""
        return self._users

    def merge(self, state: dict[str, set[int]]) -> None:
        """Take in what another replica has seen."""
        for name, stages in state.items():
            self._users.setdefault(name, set()).update(stages)

    def settle(self) -> None:
        """Called after a training step has shown which ranks use which tensors: the other ranks free them."""
        self._is_settled = True

    def ownership(self) -> Ownership:
        """Which ranks hold which tensors, as far as is known; all ranks hold those that nobody has used yet."""
        holders: dict[str, tuple[int, ...]] = {}
        unseen: list[str] = []
        for names in self._names:
            ranks = self._holders_of(names)
            if not self._stages_of(names) and names[0] not in self.present:
                unseen += names
            holders.update(dict.fromkeys(names, ranks))
        return Ownership(self.num_ranks, self.rank, holders, frozenset(unseen))

    def used_repeatedly(self) -> set[str]:
        """Names of parameters and buffers that several virtual stages use, on whichever ranks."""
        return {name for names in self._names if len(self._stages_of(names)) > 1 for name in names}

    def used_by(self, stage: int) -> set[str]:
        """Names of parameters and buffers that this virtual stage uses, and no other."""
        return {name for names in self._names if self._stages_of(names) == {stage} for name in names}

    def used_in_one_leaf(self, leaves: Iterable[str]) -> dict[str, set[str]]:
        """Of these modules, those that this rank alone runs: each with the names of its parameters and buffers."""
        found: dict[str, set[str]] = {}
        for names in self._names:
            around = {next((leaf for leaf in leaves if name.startswith(f"{leaf}.")), None) for name in names}
            leaf = around.pop()
            if leaf is not None and not around and self._holders_of(names) == (self.rank,):
                found.setdefault(leaf, set()).update(names)
        return found

    def _holders_of(self, names: Sequence[str]) -> tuple[int, ...]:
        """The ranks that hold a tensor."""
        stages = self._stages_of(names)
        certain = any(self._leaf_of(name, self._certain) is not None for name in names)
        if stages and (self._is_settled or certain):
            return tuple(sorted({self.placement[stage] for stage in stages}))
        return self.present.get(names[0], tuple(range(self.num_ranks)))

    def _stages_of(self, names: Iterable[str]) -> set[int]:
        """The virtual stages that use a tensor."""
        stages: set[int] = set()
        for name in names:
            stages |= self._users.get(name, set())
            certain = self._leaf_of(name, self._certain)
            if certain is not None:
                stages.add(self._certain[certain])
        return stages

    @staticmethod
    def _leaf_of(name: str, leaves: Mapping[str, object]) -> str | None:
        """The leaf that holds the parameter (or module, with a dot after it) of this name."""
        while name:
            name = name.rpartition(".")[0]
            if name in leaves:
                return name
        return None
