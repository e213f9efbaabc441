"""A module's parameters and buffers, by number, and which stages hold them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from operator import is_

import torch
from torch import Tensor, nn

from lightning_pipeline import _torch
from lightning_pipeline.partition.memory import memory_of
from lightning_pipeline.partition.ownership import holders_of, named_tensors
from lightning_pipeline.partition.placeholder import Placeholder
from lightning_pipeline.partition.stage_map import StageMap
from lightning_pipeline.recording.split_modules import SplitCall, split_calls


class ModuleTensors:
    """The parameters and buffers that steps may use.

    Attributes:
        tensors: what is in the module now, on this rank: data, or a placeholder.
        names: all names of each; tied ones have several.
        homes: the virtual stage that a key gives each; None where none does, or several do.
        lowest: the first virtual stage that those without may be used on, from a key before them in their list.
        holders: the virtual stages that have used each.
        written: the buffers that a stage has written into in a step.
        split_calls: of the modules of which each rank of a stage has a piece.
        are_in_slices: whether replicas keep slices of parameters between steps.
    """

    def __init__(self, module: nn.Module, stages: StageMap) -> None:
        self._module = module
        self._stages = stages
        self.tensors: list[Tensor] = []
        self.names: list[list[str]] = []
        self.homes: list[int | None] = []
        self.lowest: list[int] = []
        self.holders: list[set[int]] = []
        self.is_buffer: list[bool] = []
        self.written: set[int] = set()
        self.split_calls: list[SplitCall] = []
        self.are_in_slices = False
        self._partly_held: frozenset[str] = frozenset()
        self._numbers: dict[int, int] = {}
        self._slots: list[tuple[dict[str, Tensor | None], str, int]] = []
        self._num_slots = 0
        self._modules: list[nn.Module] = []
        self._read()

    def refresh(self) -> list[Tensor] | None:
        """Take in what the module has been given since.

        Returns:
            Those that are not in it any more; None if nothing has changed.

        Raises:
            NotImplementedError: a tensor has another name than before, and replicas keep slices.
        """
        modules = _modules_in(self._module)
        if (
            len(modules) == len(self._modules)
            and all(map(is_, modules, self._modules))
            and all(slots.get(key) is self.tensors[number] for slots, key, number in self._slots)
            and sum([len(module._parameters) + len(module._buffers) for module in modules]) == self._num_slots
        ):
            return None
        tensors, names_before = [*self.tensors], [*self.names]
        homes, lowest, holders, written = [*self.homes], [*self.lowest], [*self.holders], {*self.written}
        self._read()
        now = {name: number for number, names in enumerate(self.names) for name in names}
        ids = set(map(id, tensors))
        self.written = set()
        for before, (tensor, known) in enumerate(zip(tensors, names_before, strict=True)):
            number = self.number_of(tensor)
            if number is not None and self.names[number][0] not in known:
                self._check_may_move(known[0], number)
                self.homes[number], self.lowest[number] = homes[before], lowest[before]
                heirs = {number}
            else:
                moved = (place for name in known if (place := now.get(name)) is not None)
                # Not those that have come from another place.
                heirs = {place for place in moved if place == number or id(self.tensors[place]) not in ids}
            if len(heirs) == 1:  # or it was tied, and nobody knows which of those a stage used
                self.holders[min(heirs)] |= holders[before]
            self.written |= heirs if before in written else set()
        return [tensor for tensor in tensors if self.number_of(tensor) is None]

    def _check_may_move(self, before: str, number: int) -> None:
        if self.are_in_slices and holders_of(self.tensors[number]) is not None:
            raise NotImplementedError(
                f"{before} has become {self.names[number][0]} during the run, and with data_parallel='fsdp' slices are "
                f"known by their names: prune or rename before the run; in it, put nn.Identity() in the place of a "
                f"module that is to go, and add others at the end"
            )

    def number_of(self, tensor: Tensor) -> int | None:
        """None for tensors that are not the module's."""
        number = self._numbers.get(id(tensor))
        return number if number is not None and self.tensors[number] is tensor else None

    def number_of_slice(self, part: Tensor) -> int | None:
        """The number of the parameter that a slice of it takes the place of between steps."""
        return next((number for slots, key, number in self._slots if slots.get(key) is part), None)

    def in_place(self, number: int) -> Tensor:
        """What the module has in the place of a tensor: itself, or its slice."""
        places = (slots.get(key) for slots, key, each in self._slots if each == number)
        return next((found for found in places if found is not None), self.tensors[number])

    def is_replicated(self, number: int) -> bool:
        """Whether every rank computes with it: a buffer that all have, and no stage has written into."""
        return self.is_buffer[number] and number not in self.written and self.names[number][0] not in self._partly_held

    def replicated_at(self, memory: int) -> int | None:
        """The number of a buffer in this memory that every rank computes with."""
        numbers = (number for number, tensor in enumerate(self.tensors) if self.is_replicated(number))
        return next((number for number in numbers if memory_of(self.tensors[number]) == memory), None)

    def versions_of_replicated(self) -> dict[str, int]:
        """How often buffers that every rank has were written into, by name."""
        return {
            self.names[number][0]: tensor._version
            for number, tensor in enumerate(self.tensors)
            if self.is_buffer[number] and not tensor.is_inference() and self.is_replicated(number)
        }

    def note_partly_held(self, names: Iterable[str]) -> None:
        """Take in what not every rank has."""
        self._partly_held = frozenset(names)

    def _read(self) -> None:
        tensors: list[Tensor] = []
        names: list[list[str]] = []
        self._numbers, self._slots, self.is_buffer = {}, [], []
        for prefix, module in self._module.named_modules(remove_duplicate=False):
            if isinstance(module, torch.jit.ScriptModule):
                self._check_scripted(prefix, module)
                continue
            for slots in (module._parameters, module._buffers):
                for key, tensor in slots.items():
                    if tensor is None:
                        continue
                    number = self._numbers.setdefault(id(tensor), len(tensors))
                    if number == len(tensors):
                        tensors.append(tensor)
                        names.append([])
                        self.is_buffer.append(slots is module._buffers)
                    names[number].append(f"{prefix}.{key}" if prefix else key)
                    self._slots.append((slots, key, number))
        self.split_calls = split_calls(self._module)
        self._modules = _modules_in(self._module)
        self._num_slots = sum(len(module._parameters) + len(module._buffers) for module in self._modules)
        # In place: matchers know these lists.
        self.tensors[:], self.names[:] = tensors, names
        self.homes[:] = [self._home(own) for own in names]
        self.lowest[:] = [self._lowest(own) for own in names]
        self.holders[:] = [set() for _ in names]

    def _check_scripted(self, name: str, module: nn.Module) -> None:
        """A scripted module's tensors are torch's own: nothing can be put in their place."""
        if self._stages.num_stages > 1 and any(True for _ in named_tensors(module)):
            raise NotImplementedError(
                f"{name} is a scripted or traced module with parameters or buffers, of which a pipeline cannot hold "
                f"some stages' alone: give the LightningModule the module that it was made from, and script it to "
                f"export it"
            )

    def _home(self, names: list[str]) -> int | None:
        found = {self._stages.covering(name.rpartition(".")[0]) for name in names}
        return found.pop() if len(found) == 1 else None

    def _lowest(self, names: list[str]) -> int:
        return min(self._stages.at_least(name.rpartition(".")[0]) or 0 for name in names)


def set_requires_grad(tensor: Tensor, value: bool) -> None:
    """Have a tensor of the module require gradients or not, whether this rank holds it or has a placeholder."""
    if type(tensor) is Placeholder:
        tensor._pl_spec = tensor._pl_spec.but(requires_grad=value)
    else:
        with _torch.DisableTorchFunction():
            tensor.requires_grad_(value)


@contextmanager
def as_required(tensors: ModuleTensors, switched: Mapping[int, bool]) -> Iterator[None]:
    """While entered, some tensors of the module require gradients or not, as given by number."""
    now = {number: tensors.tensors[number].requires_grad for number in switched}
    for number, value in switched.items():
        set_requires_grad(tensors.tensors[number], value)
    try:
        yield
    finally:
        for number, value in now.items():
            set_requires_grad(tensors.tensors[number], value)


def _modules_in(root: nn.Module) -> list[nn.Module]:
    """All places of modules in `root`, as `named_modules` finds them, and several times as fast."""
    found = [root]
    for module in found:
        found += [child for child in module._modules.values() if child is not None]
    return found
