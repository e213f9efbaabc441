"""Which stages hold which parameters, as steps bring it to light."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import nn

from lightning_pipeline.partition.ownership import Ownership
from lightning_pipeline.runtime.structure import Report
from lightning_pipeline.runtime.transport import Transport


class Placement:
    """Collects who used what and says who holds what.

    Args:
        module: the LightningModule.
        certain: stages of leaves that are known from the start.
    """

    def __init__(self, module: nn.Module, num_stages: int, stage: int, certain: Mapping[str, int]) -> None:
        self.num_stages = num_stages
        self.stage = stage
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
        """Take in which stages have which tensors, where an earlier run has left a module with a stage on each rank.

        Raises:
            ValueError: a parameter is on the meta device everywhere.
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
            stages = tuple(stage for stage, row in enumerate(table) if row[column])
            if not stages:
                raise ValueError(
                    f"{names[0]!r} is on the meta device on every rank: give it data before training, or build the "
                    f"module without the meta device"
                )
            if len(stages) < self.num_stages:
                self._present.update(dict.fromkeys(names, stages))

    def add(self, reports: Iterable[Report]) -> None:
        """Take in the reports of one structure, one from each stage."""
        for stage, report in enumerate(reports):
            for leaf in report.leaves:
                self.leaf_stages.setdefault(leaf.removesuffix(".update"), set()).add(stage)
            for name in report.usage.parameters:
                self._users.setdefault(name, set()).add(stage)

    def ownership(self) -> Ownership:
        """Who holds what, as far as it is known. What nobody has used yet is everybody's."""
        everybody = tuple(range(self.num_stages))
        holders: dict[str, tuple[int, ...]] = {}
        unseen: list[str] = []
        for names in self._names:
            stages: set[int] = set()
            open_names = False
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
                    open_names = True
            if open_names and (not self.leaf_stages or not stages):
                stages = set(self._present.get(names[0], everybody))
                if names[0] not in self._present:
                    unseen += names
            for name in names:
                holders[name] = tuple(sorted(stages))
        return Ownership(self.num_stages, self.stage, holders, unseen=unseen)

    def stage_of_module(self, name: str) -> int | None:
        """The stage that runs the module of this name; the last one, where several do."""
        leaf = self._leaf_of(f"{name}.", self.leaf_stages)
        return max(self.leaf_stages[leaf]) if leaf is not None else None

    @staticmethod
    def _leaf_of(name: str, leaves: Mapping[str, object]) -> str | None:
        """The leaf that holds the parameter (or module, with a dot after it) of this name."""
        while name:
            name = name.rpartition(".")[0]
            if name in leaves:
                return name
        return None
