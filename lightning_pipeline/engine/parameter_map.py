"""Which ranks hold which parameters, as steps reveal it."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from lightning_pipeline.partition.ownership import Ownership, named_tensors, tensors_with_names
from lightning_pipeline.runtime.transport import Transport


@dataclass(eq=False)
class _Known:
    """A parameter or buffer.

    Attributes:
        tensor: this rank's, for what is known as an object; None where nobody else has it any more. No weak reference,
            as torch exchanges no tensors that have some.
        certain: the virtual stages of its leaves, where they are known from the start.
        has_gone: it was in the module once, and no name of the module's is its own.
    """

    names: list[str]
    tensor: Tensor | None
    certain: frozenset[int]
    users: set[int]
    has_gone: bool = False

    @property
    def stages(self) -> set[int]:
        return self.users | self.certain


class ParameterMap:
    """Records which virtual stages use which tensors, and derives which ranks hold them.

    A tensor that gets another name, as by pruning or where layers are wrapped, stays where it is; one that takes the
    place of another goes where that was.

    Args:
        certain: virtual stages of leaves that are known from the start.
        are_in_slices: tensors are known by their names alone, as slices take the place of parameters and back.

    Attributes:
        present: the ranks that have each tensor which an earlier run has left on some only, by name.
        has_moved: whether a tensor has got other names than it had.
    """

    def __init__(
        self,
        module: nn.Module,
        placement: Sequence[int],
        rank: int,
        certain: Mapping[str, int],
        *,
        are_in_slices: bool = False,
    ) -> None:
        self.placement = tuple(placement)
        self.num_ranks = max(placement) + 1
        self.rank = rank
        self.has_moved = False
        self._is_settled = False
        self._certain = dict(certain)
        self._are_in_slices = are_in_slices
        self._num_gone = 0
        self.present: dict[str, tuple[int, ...]] = {}
        self._tensors = [self._new(names, tensor) for names, tensor in tensors_with_names(module)]

    def find_present(self, module: nn.Module, transport: Transport | None) -> None:
        """Take in which ranks have which tensors, where an earlier run has left a module with a stage on each rank.

        What none has is new, and is made where it is held.
        """
        if transport is None:
            return
        tensors = dict(named_tensors(module))
        here = [0.0 if tensors[known.names[0]].is_meta else 1.0 for known in self._tensors]
        if not here:
            return
        table = transport.all_gather_vector(torch.tensor(here, dtype=torch.float64), "presence of parameters").tolist()
        for column, known in enumerate(self._tensors):
            ranks = tuple(rank for rank, row in enumerate(table) if row[column])
            if 0 < len(ranks) < self.num_ranks:
                self.present.update(dict.fromkeys(known.names, ranks))

    def take_in(self, module: nn.Module) -> bool:
        """Take in the tensors that the module has now; all ranks hold new ones until a step uses them.

        So are tensors of which one was tied to another before, as nobody knows which of the two a rank used.

        Returns:
            Whether any are new, or have other names, or gave them to others.
        """
        now = tensors_with_names(module)
        places = {name: place for place, (names, _) in enumerate(now) for name in names}
        themselves: list[_Known | None] = [None] * len(now)
        if not self._are_in_slices:
            by_id = {id(known.tensor): known for known in self._tensors}
            themselves = [by_id.get(id(tensor)) for _, tensor in now]
        place_of = {known: place for place, known in enumerate(themselves) if known is not None}
        found, gone = [*themselves], []
        num_gone = self._num_gone
        for known in self._tensors:
            at_its_names = {places[name] for name in known.names if name in places}
            new_there = [place for place in at_its_names if themselves[place] is None]
            if known in place_of:
                if new_there and place_of[known] in at_its_names:  # it was tied
                    found[place_of[known]] = None
                continue
            if at_its_names and not self._are_in_slices:  # its names are others'; an optimizer may have it still
                gone.append(self._nameless(known))
            if len(new_there) == 1:  # which take its place
                found[new_there[0]] = known
            elif not at_its_names:
                gone.append(known)
        is_new = self._num_gone > num_gone
        for place, (names, tensor) in enumerate(now):
            one = found[place]
            if one is None:
                found[place] = self._new(names, tensor)
                is_new = True
                for name in names:
                    self.present.pop(name, None)
            elif one.names != names or one.tensor is not tensor:
                if one.names[0] in self.present:
                    self.present.update(dict.fromkeys(names, self.present[one.names[0]]))
                has_moved = one.names[0] not in names
                self.has_moved |= has_moved
                is_new |= has_moved
                one.names, one.tensor, one.has_gone = names, None if self._are_in_slices else tensor, False
        for one in gone:
            if sys.getrefcount(one.tensor) <= 2:  # of its own attribute, and of this call
                one.tensor = None
        gone = [one for one in gone if one.tensor is not None or not one.has_gone]
        self._tensors = [one for one in found if one is not None] + gone
        return is_new

    def names_now(self) -> dict[int, str]:
        """The first name of each tensor, by its id; of those that have left the module a name of their own."""
        if self._are_in_slices:
            return {}
        return {id(known.tensor): known.names[0] for known in self._tensors if known.tensor is not None}

    def add(self, uses: Mapping[str, Iterable[int]]) -> bool:
        """Take in which virtual stages have used which tensors. Returns whether that was new.

        What a rank no longer holds when it is used for the first time stays where it is.
        """
        is_new = False
        for known in self._tensors:
            holders = self._holders_of(known)  # of before: several stages may be the first to use it
            for name in known.names:
                for stage in uses.get(name, ()):
                    if stage not in known.users and self.placement[stage] in holders:
                        known.users.add(stage)
                        is_new = True
        return is_new

    def state(self) -> dict[str, set[int]]:
        """Which virtual stages used which tensors, for another replica's `merge`."""
        return {known.names[0]: known.users for known in self._tensors}

    def merge(self, state: dict[str, set[int]]) -> None:
        """Take in what another replica has seen."""
        for known in self._tensors:
            known.users |= state.get(known.names[0], set())

    def settle(self) -> None:
        """Called after a training step has shown which ranks use which tensors: the other ranks free them."""
        self._is_settled = True

    def ownership(self) -> Ownership:
        """Which ranks hold which tensors, as far as is known; all ranks hold those that nobody has used yet."""
        holders: dict[str, tuple[int, ...]] = {}
        unseen: list[str] = []
        for known in self._tensors:
            if not known.stages and known.names[0] not in self.present:
                unseen += known.names
            holders.update(dict.fromkeys(known.names, self._holders_of(known)))
        return Ownership(self.num_ranks, self.rank, holders, frozenset(unseen))

    def used_repeatedly(self) -> set[str]:
        """Names of parameters and buffers that several virtual stages use, or may, on whichever ranks.

        Until a training step has run, all ranks have what evaluation has used on one of them, and may use it.
        """
        repeated = [one for one in self._tensors if len(one.stages) > 1 or not (self._is_settled or one.certain)]
        return {name for known in repeated for name in known.names}

    def used_by(self, stage: int) -> set[str]:
        """Names of parameters and buffers that this virtual stage uses, and no other."""
        return {name for known in self._tensors if known.stages == {stage} for name in known.names}

    def used_in_one_leaf(self, leaves: Iterable[str]) -> dict[str, set[str]]:
        """Of these modules, those that this rank alone runs: each with the names of its parameters and buffers."""
        found: dict[str, set[str]] = {}
        for known in self._tensors:
            around = {next((leaf for leaf in leaves if name.startswith(f"{leaf}.")), None) for name in known.names}
            leaf = around.pop()
            if leaf is not None and not around and self._holders_of(known) == (self.rank,):
                found.setdefault(leaf, set()).update(known.names)
        return found

    def _holders_of(self, known: _Known) -> tuple[int, ...]:
        if known.stages and (self._is_settled or known.certain):
            return tuple(sorted({self.placement[stage] for stage in known.stages}))
        return self.present.get(known.names[0], tuple(range(self.num_ranks)))

    def _new(self, names: list[str], tensor: Tensor) -> _Known:
        leaves = (self._leaf_of(name, self._certain) for name in names)
        certain = frozenset(self._certain[leaf] for leaf in leaves if leaf is not None)
        return _Known(names, None if self._are_in_slices else tensor, certain, set())

    def _nameless(self, known: _Known) -> _Known:
        """A tensor whose names are now others'."""
        self._num_gone += 1
        return replace(known, names=[f"{known.names[0]} ({self._num_gone}, gone)"], users={*known.users}, has_gone=True)

    @staticmethod
    def _leaf_of(name: str, leaves: Mapping[str, object]) -> str | None:
        """The leaf that holds the parameter (or module, with a dot after it) of this name."""
        while name:
            name = name.rpartition(".")[0]
            if name in leaves:
                return name
        return None
