"""Which ranks hold which parameters, as steps bring it to light."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import nn

from lightning_pipeline.partition.ownership import Ownership
from lightning_pipeline.runtime.structure import Report
from lightning_pipeline.runtime.transport import Transport


class Placement:
    """Collects who used what and says who holds what.

    Args:
        module: the LightningModule.
        placement: the rank of each virtual stage.
        rank: this rank.
        certain: virtual stages of leaves that are known from the start.
    """

    def __init__(self, module: nn.Module, placement: Sequence[int], rank: int, certain: Mapping[str, int]) -> None:
        self.placement = tuple(placement)
        self.num_ranks = max(placement) + 1
        self.rank = rank
        self.leaf_stages: dict[str, set[int]] = {}
        self._certain = dict(certain)
        self._users: dict[str, set[int]] = {}
        self._present: dict[str, tuple[int, ...]] = {}
        tied: dict[int, list[str]] = {}
        for name, tensor in (
            *module.named_parameters(remove_duplicate=False),
            *module.named_buffers(remove_duplicate=False),
        ):
            tied.setdefault(id(tensor), []).append(name)
        self._names = list(tied.values())

    def find_present(self, module: nn.Module, transport: Transport | None) -> None:
        """Take in which ranks have which tensors, where an earlier run has left a module with a stage on each rank.

        What none has is new, and is made where it is held.
        """
        if transport is None:
            return
        tensors = {
            **dict(module.named_parameters(remove_duplicate=False)),
            **dict(module.named_buffers(remove_duplicate=False)),
        }
        here = [0.0 if tensors[names[0]].is_meta else 1.0 for names in self._names]
        if not here:
            return
        table = transport.all_gather_vector(torch.tensor(here, dtype=torch.float64), "presence of parameters").tolist()
        for column, names in enumerate(self._names):
            ranks = tuple(rank for rank, row in enumerate(table) if row[column])
            if 0 < len(ranks) < self.num_ranks:
                self._present.update(dict.fromkeys(names, ranks))

    def add(self, reports: Iterable[Report]) -> None:
        """Take in the reports of one structure, one from each virtual stage."""
        for stage, report in enumerate(reports):
            for leaf in report.leaves:
                self.leaf_stages.setdefault(leaf.removesuffix(".update"), set()).add(stage)
            for name in report.usage.parameters:
                self._users.setdefault(name, set()).add(stage)

    def state(self) -> tuple[dict[str, set[int]], dict[str, set[int]]]:
        """Which virtual stages ran which leaves and used which tensors, for another replica's `merge`."""
        return self.leaf_stages, self._users

    def merge(self, state: tuple[dict[str, set[int]], dict[str, set[int]]]) -> None:
        """Take in what another replica has seen."""
        for own, others in zip(self.state(), state, strict=True):
            for name, stages in others.items():
                own.setdefault(name, set()).update(stages)

    def ownership(self) -> Ownership:
        """Who holds what, as far as it is known. What nobody has used yet is everybody's."""
        everybody = tuple(range(self.num_ranks))
        holders: dict[str, tuple[int, ...]] = {}
        unseen: list[str] = []
        for names in self._names:
            stages, is_open = self._stages_of(names)
            ranks = tuple(sorted({self.placement[stage] for stage in stages}))
            if is_open and (not self.leaf_stages or not stages):
                ranks = self._present.get(names[0], everybody)
                if names[0] not in self._present:
                    unseen += names
            holders.update(dict.fromkeys(names, ranks))
        return Ownership(self.num_ranks, self.rank, holders, unseen=unseen)

    def used_repeatedly(self) -> set[str]:
        """Names of parameters and buffers that several virtual stages use, on whichever ranks."""
        return {name for names in self._names if len(self._stages_of(names)[0]) > 1 for name in names}

    def used_by(self, stage: int) -> set[str]:
        """Names of parameters and buffers that this virtual stage uses, and no other."""
        return {name for names in self._names if self._stages_of(names)[0] == {stage} for name in names}

    def used_in_one_leaf(self) -> dict[str, set[str]]:
        """This rank's leaves, each with the names of parameters and buffers that nothing else uses."""
        found: dict[str, set[str]] = {}
        for names in self._names:
            leaves = {self._leaf_of(name, self.leaf_stages) for name in names}
            leaf = leaves.pop()
            if leaf is None or leaves or not self._users.keys().isdisjoint(names):
                continue
            if [self.placement[stage] for stage in self.leaf_stages[leaf]] == [self.rank]:
                found.setdefault(leaf, set()).update(names)
        return found

    def rank_of_module(self, name: str) -> int | None:
        """The rank that runs the module of this name; that of the last virtual stage, where several do."""
        leaf = self._leaf_of(f"{name}.", self.leaf_stages)
        return self.placement[max(self.leaf_stages[leaf])] if leaf is not None else None

    def _stages_of(self, names: Iterable[str]) -> tuple[set[int], bool]:
        """The virtual stages that use a tensor, and whether others may turn out to."""
        stages: set[int] = set()
        is_open = False
        for name in names:
            stages |= self._users.get(name, set())
            leaf = self._leaf_of(name, self.leaf_stages)
            if leaf is not None:
                stages |= self.leaf_stages[leaf]
                continue
            certain = self._leaf_of(name, self._certain)
            if certain is not None:
                stages.add(self._certain[certain])
            else:
                is_open = True
        return stages, is_open

    @staticmethod
    def _leaf_of(name: str, leaves: Mapping[str, object]) -> str | None:
        """The leaf that holds the parameter (or module, with a dot after it) of this name."""
        while name:
            name = name.rpartition(".")[0]
            if name in leaves:
                return name
        return None
