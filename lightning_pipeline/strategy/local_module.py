"""The part of the module that a rank holds."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_pipeline.engine.fully_sharded import FullySharded, is_sharded
from lightning_pipeline.engine.parameter_map import ParameterMap
from lightning_pipeline.engine.shared_parameters import spread_from_owner
from lightning_pipeline.engine.slices import local_part
from lightning_pipeline.partition.leaves import certain_stages, find_leaves
from lightning_pipeline.partition.materialize import check_set, initialise, make_local
from lightning_pipeline.partition.ownership import (
    guard_state_dict,
    holders_of,
    lift_guards,
    named_tensors,
    note_holders,
    release,
    unguard,
)
from lightning_pipeline.partition.placeholder import Placeholder, TensorSpec, become, is_absent, placeholder
from lightning_pipeline.partition.shared_memory import refuse_apart, tensors_that_share_memory, warn_of_aliases
from lightning_pipeline.recording.keyed_calls import KeyedCalls
from lightning_pipeline.recording.module_tensors import ModuleTensors
from lightning_pipeline.runtime import backends
from lightning_pipeline.runtime.direct import recv_tree, send_tree
from lightning_pipeline.runtime.failure import waiting_for
from lightning_pipeline.runtime.host_memory import available_bytes
from lightning_pipeline.runtime.tensor_meta import conform

from .._lightning import rank_zero_warn
from ..checkpoint.state import copies_of
from ..checkpoint.weights import Weights, load_weights
from .lightning_private import note_device
from .partitioner import Cut

if TYPE_CHECKING:
    from .session import Session

_CRC_BYTES = 4096
_NONE, _META, _MEMORY, _SLICES = range(4)
_OBSTACLES = {
    _META: "it was built without data, as on the meta device",
    _MEMORY: "the whole module does not fit into the memory of every rank",
    _SLICES: "FSDP or tensor parallelism has split its tensors",
}
"""Why the module stays in parts after a run."""
_FROM_META: WeakSet[nn.Module] = WeakSet()
"""The modules that were built on the meta device."""


class LocalModule:
    """A rank's part of a module: creates or reads its tensors, moves them, and releases those that only others use.

    Args:
        session: its module is whole, or in parts where an earlier run has left it so.

    Attributes:
        calls: tells the stage of the module that is running.
        ownership: the same, as seen from this rank.
    """

    def __init__(
        self,
        session: Session,
        cut: Cut,
        placement: Sequence[int],
        sharded: FullySharded | None,
    ) -> None:
        self._module = module = session.module
        self._device = session.device
        self._transport = session.transport
        self._replicas = session.replicas
        self._replica_group = session.tensor_group or session.context_group
        if any(tensor.is_meta and not is_absent(tensor) for _, tensor in named_tensors(module)):
            _FROM_META.add(module)
        self._sharing = tensors_that_share_memory(module)
        if sharded is not None:
            sharded.adopt(module)
        self.leaves = find_leaves(module, cut.stages)
        self.calls = KeyedCalls(module, cut.stages)
        self.tensors = ModuleTensors(module, cut.stages)
        certain = certain_stages(self.leaves, cut.stages.num_stages) if cut.is_final else {}
        are_in_slices = sharded is not None
        rank = session.topology.stage_rank
        self.placement = ParameterMap(module, placement, rank, certain, are_in_slices=are_in_slices)
        self.placement.find_present(module, self._transport)
        if self.placement.present:
            self._gather_left(session.strategy.num_processes)
        self._update_ownership()

    def release_remote(self) -> None:
        """Release what only other stages hold, also in the copies that callbacks keep."""
        self._update_ownership()
        refuse_apart(self._sharing, self.ownership)
        warn_of_aliases(self._module, self.ownership)
        release(self._module, self.ownership)
        if not self.placement.has_moved:  # or their tensors have the names that the module's had
            for copied in copies_of(self._module, self._module.trainer):
                release(copied, self.ownership)
        for module in self._module.modules():  # an earlier run may have cut the module elsewhere
            unguard(module)
        guard_state_dict(self._module)

    def note_new_tensors(self) -> bool:
        """Note tensors that the module has been given during the run. Returns whether there are any."""
        is_new = self.placement.take_in(self._module)
        if is_new:
            self._sharing = tensors_that_share_memory(self._module)
            self._update_ownership()
        return is_new

    def take_given(self) -> list[Tensor]:
        """Give ranks what the module has been given in the places of tensors that only some of them hold, as copies of
        other stages' layers. All ranks must call it, and then release what they do not hold.

        Returns:
            The tensors.
        """
        if self._transport is None:
            return []
        given: dict[int, tuple[str, Tensor]] = {}
        names: dict[int, str] = {}
        for name, tensor in named_tensors(self._module):
            if name not in self.ownership or isinstance(tensor, DTensor):
                continue
            holders = self.ownership.holders[name]
            first = names.setdefault(id(tensor), name)
            if self.ownership.holders[first] != holders:
                raise NotImplementedError(
                    f"{first} and {name} have become the same tensor during the run, and different stages hold them: "
                    f"give each a clone() of its own, or share it before the run"
                )
            if holders_of(tensor) != (holders if len(holders) < self.ownership.num_stages else None):
                given[id(tensor)] = name, tensor
        if given:  # before they are sent, which parts them
            self._sharing = tensors_that_share_memory(self._module)
        elsewhere = {id(tensor): held for _, tensor in given.values() if (held := holders_of(tensor)) is not None}
        self._spread([(name, tensor, elsewhere[key][0]) for key, (name, tensor) in given.items() if key in elsewhere])
        return [tensor for _, tensor in given.values()]

    def _update_ownership(self) -> None:
        self.ownership = self.placement.ownership()
        num_ranks = self.ownership.num_stages
        self.tensors.note_partly_held(name for name, held in self.ownership.holders.items() if len(held) < num_ranks)

    def holders(self, number: int) -> tuple[int, ...]:
        """The ranks that hold a tensor, which is given by its number."""
        return self.ownership.holders[self.tensors.names[number][0]]

    def agree(self) -> None:
        """Hold what any replica of this stage holds. All of them must call it."""
        if self._replicas is not None:
            for state in self._replicas.gather_objects(self.placement.state()):
                self.placement.merge(state)

    def make(self, weights: Weights | None, seed: int) -> None:
        """Create what was built on the meta device, and read the files of weights."""
        made = make_local(self._module, self.ownership)
        initialise(self._module, made.values(), seed)
        found: set[str] = set()
        if weights is not None:
            names = [name for name, _ in (*self._module.named_parameters(), *self._module.named_buffers())]
            found = load_weights(self._module, weights, list(filter(self.ownership.is_local, names)))
        check_set(self._module, [name for name in made if name not in found])
        lift_guards(self._module)

    def to_device(self) -> None:
        """Move the module to this rank's device, and give stages and replicas equal values of what they share."""
        self._move(self._device)
        held = {id(t): (t, self.ownership.holders[n]) for n, t in named_tensors(self._module) if n in self.ownership}
        spread_from_owner([item for item in held.values() if len(item[1]) > 1], self._transport, self.ownership.stage)
        here = [tensor for tensor, _ in held.values() if not tensor.is_meta]
        if self._replicas is not None:  # which have the same slices of what tensor parallelism alone has split
            self._replicas.spread(local_part(tensor) for tensor in here if not is_sharded(tensor))
        if self._replica_group is not None:
            self._replica_group.spread(tensor for tensor in here if not isinstance(tensor, DTensor))

    def to_cpu(self) -> None:
        """Move the module back to the CPU at the end of a run."""
        if self._device.type != "cpu":
            self._move(torch.device("cpu"))

    def make_whole(self, num_processes: int) -> bool:
        """Give every rank the whole module, and callbacks' copies of it, on the CPU, if that fits into memory.

        All ranks must call it; `release_remote` undoes it.

        Args:
            num_processes: that share this machine's memory.

        Returns:
            Whether every rank has it.
        """
        partial: dict[int, tuple[str, Tensor, int]] = {}
        for module in (self._module, *copies_of(self._module, self._module.trainer)):
            for name, tensor in named_tensors(module):
                if (held := holders_of(tensor)) is not None:
                    partial.setdefault(id(tensor), (name, tensor, held[0]))
        found = self._most(self._obstacle(partial.values(), num_processes))
        if found[0] != _NONE:
            rank_zero_warn(
                f"the module stays in parts after this run, as {_OBSTACLES[int(found[0])]}: "
                f"trainer.strategy.gather_module(), called on all ranks, gives rank 0 a copy with all weights"
            )
        elif found[1]:
            self._spread([*partial.values()])
            lift_guards(self._module)
        return found[0] == _NONE

    def _gather_left(self, num_processes: int) -> None:
        """Give every rank what an earlier run has left on some of them, as an error ended it, if that fits: the module
        may be cut elsewhere now.
        """
        left: dict[int, tuple[str, Tensor, int]] = {}
        for name, tensor in named_tensors(self._module):
            if name in self.placement.present:
                left.setdefault(id(tensor), (name, tensor, self.placement.present[name][0]))
        assert self._transport is not None  # or nothing would be left in parts
        numbers = self._obstacle(left.values(), num_processes)
        # The stages of one replica alone: an error may have left others whole.
        if self._transport.all_gather_vector(numbers, "what an earlier run has left").amax(0)[0] == _NONE:
            self._spread([*left.values()])
            self.placement.present.clear()

    def _obstacle(self, partial: Iterable[tuple[str, Tensor, int]], num_processes: int) -> Tensor:
        """Why this rank cannot have those of these tensors that it lacks, and how many they are."""
        absent = [tensor for _, tensor, _ in partial if is_absent(tensor)]
        obstacle = _NONE
        if any(isinstance(parameter, DTensor) for parameter in self._module.parameters()):
            obstacle = _SLICES
        elif self._module in _FROM_META:  # because it fits nowhere
            obstacle = _META
        elif sum(TensorSpec.of(tensor).num_bytes for tensor in absent) * num_processes > available_bytes() // 2:
            obstacle = _MEMORY
        return torch.tensor([obstacle, len(absent)], dtype=torch.float64)

    def _most(self, numbers: Tensor) -> list[float]:
        """The maximum of each over all stages and replicas."""
        if self._transport is not None:
            numbers = self._transport.all_gather_vector(numbers, "what they hold of the module").amax(0)
        if self._replicas is not None:
            numbers = torch.stack(self._replicas.gather_objects(numbers)).amax(0)
        return numbers.tolist()

    def _spread(self, partial: Sequence[tuple[str, Tensor, int]]) -> None:
        """Send tensors from their owners to all stages, one after the other."""
        assert self._transport is not None  # or nothing would be partial
        own = self.placement.rank
        for name, tensor, owner in partial:
            for stage in range(self.placement.num_ranks) if owner == own else ():
                if stage != own:
                    send_tree(tensor.detach(), self._transport, stage)
            if owner != own:
                spec, data = TensorSpec.of(tensor), recv_tree(self._transport, owner, f"{name} of the whole module")
                data = data.to(spec.device)
                if (spec.shape, spec.dtype) == (data.shape, data.dtype):
                    data = conform(data, spec)  # with the strides that it has on its owner
                if is_absent(tensor):
                    become(tensor, nn.Parameter(data, spec.requires_grad) if spec.is_parameter else data)
            note_holders(tensor, None)

    def _move(self, device: torch.device) -> None:
        for _, tensor in named_tensors(self._module):
            if type(tensor) is Placeholder and tensor.device != device:  # which shows the device that it stands for
                become(tensor, placeholder(tensor._pl_spec.but(device=device), tensor._pl_what))
        tensors = [tensor for _, tensor in named_tensors(self._module)]
        if device.type == "cpu" and all(tensor.is_meta or tensor.is_cpu for tensor in tensors):
            note_device(self._module, device)
            return  # torch would move DTensors into new ones, which it refuses where something refers to them
        held = list(map(holders_of, tensors))
        self._module._apply(lambda tensor: tensor if tensor.is_meta or tensor.device == device else tensor.to(device))
        for (_, tensor), stages in zip(named_tensors(self._module), held, strict=True):
            note_holders(tensor, stages)  # again, as torch gives DTensors new attributes
        note_device(self._module, device)


def take_initial_values(module: nn.Module, copies: Iterable[nn.Module], broadcast: Callable[[Any], Any]) -> None:
    """Give every rank rank 0's values of parameters and buffers that both have. All ranks must call it.

    Each rank has built the module by itself: with random numbers of its own if there was no common seed, or if ranks
    have drawn unequally many. Weights may also have been loaded on rank 0 alone, as DDP allows. With each stage's own
    values the model would be that of no seed; with rank 0's it is that of one process with rank 0's seed. Ranks with
    equal values only exchange checksums. What is on the meta device is created or read later, alike on all ranks.

    Args:
        copies: modules that callbacks have made of this one; copies with equal values stay equal.
    """
    own = dict(_plain_tensors(module))
    copied = [dict(_plain_tensors(copy)) for copy in copies]
    sums = {name: _checksum(tensor) for name, tensor in own.items()}
    first: dict[str, Any] = broadcast(sums)
    differing = torch.tensor([name in own and sums[name] != first[name] for name in first], dtype=torch.uint8)
    if not len(differing):
        return
    with waiting_for("rank 0's initial values"), torch.no_grad():
        dist.all_reduce(differing, dist.ReduceOp.MAX)
        for name, is_sent in zip(first, differing.tolist(), strict=True):
            if not is_sent:
                continue
            shape, dtype, device, _ = first[name]
            tensor = own.get(name)
            if tensor is None or (tuple(tensor.shape), tensor.dtype) != (shape, dtype):  # a buffer that differs here
                tensor = torch.empty(shape, dtype=dtype, device=device)
            following = [copy[name] for copy in copied if name in copy and torch.equal(copy[name], tensor)]
            backends.broadcast(tensor, 0)
            for copy in following:
                copy.copy_(tensor)


def _plain_tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Parameters and buffers with dense data, whole and with a shape."""
    for name, tensor in chain(module.named_parameters(), module.named_buffers()):
        is_plain = type(tensor) in (Tensor, nn.Parameter) and tensor.layout == torch.strided
        if is_plain and not tensor.is_meta and not tensor.is_quantized:
            yield name, tensor


def _checksum(tensor: Tensor) -> tuple[tuple[int, ...], torch.dtype, str, tuple[int, int]]:
    """Shape, dtype, kind of device, and sums over the bits."""
    data = backends.bytes_of(tensor.detach().cpu().contiguous().resolve_conj().resolve_neg())
    if data.storage_offset() % 8:  # an unaligned view, which cannot be read as int64
        data = data.clone()
    words = data[: data.numel() // 8 * 8]
    ends = torch.cat([data[:_CRC_BYTES], data[len(words) :]])
    sums = int(words.view(torch.int64).sum()), zlib.crc32(ends.numpy().tobytes())
    return tuple(tensor.shape), tensor.dtype, tensor.device.type, sums
