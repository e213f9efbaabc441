"""What a rank holds of a module in stages."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities import rank_zero_warn
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_pipeline.partition.guards import guard_state_dict, lift_guards, unguard
from lightning_pipeline.partition.keyed_calls import KeyedCalls
from lightning_pipeline.partition.leaves import certain_stages, find_leaves
from lightning_pipeline.partition.materialize import check_set, initialise, make_local
from lightning_pipeline.partition.module_tensors import ModuleTensors
from lightning_pipeline.partition.ownership import Ownership, note_holders, release
from lightning_pipeline.partition.placeholder import Look, Placeholder, become, placeholder
from lightning_pipeline.runtime.direct import Direct
from lightning_pipeline.runtime.fully_sharded import FullySharded
from lightning_pipeline.runtime.host_memory import free_bytes
from lightning_pipeline.runtime.placement import Placement
from lightning_pipeline.runtime.replicas import Replicas
from lightning_pipeline.runtime.shared import spread_from_owner
from lightning_pipeline.runtime.transport import Transport
from lightning_pipeline.strategy.copies import copies_of
from lightning_pipeline.strategy.cutting import Cut
from lightning_pipeline.strategy.lightning_private import note_device
from lightning_pipeline.strategy.tensor_parallel import TensorGroup
from lightning_pipeline.strategy.weights import Weights, load_weights


class HeldModule:
    """Lets a rank have its stages' tensors: makes or reads them, moves them, and lets go of what steps show others use.

    Args:
        module: whole, or with each rank's part on it where an earlier run has left it so.
        cut: its stages.
        placement: the rank in the pipeline of each virtual stage.
        rank: this rank's place in the pipeline.
        device: where this rank computes.
        sharded: shards parameters over replicas; None keeps them whole.

    Attributes:
        leaves: the modules that a stage runs whole.
        calls: tells the stage of the module that runs.
        tensors: the module's parameters and buffers, by number.
        placement: which ranks hold what, as far as it is known.
        ownership: the same, seen from this rank.
    """

    def __init__(
        self,
        module: LightningModule,
        cut: Cut,
        placement: Sequence[int],
        rank: int,
        device: torch.device,
        *,
        transport: Transport | None,
        replicas: Replicas | None,
        tensor_group: TensorGroup | None,
        sharded: FullySharded | None,
    ) -> None:
        self._module = module
        self._device = device
        self._transport = transport
        self._replicas = replicas
        self._tensor_group = tensor_group
        if sharded is not None:
            sharded.adopt(module)
        self.leaves = find_leaves(module, cut.stages)
        self.calls = KeyedCalls(module, cut.stages)
        self.tensors = ModuleTensors(module, cut.stages)
        certain = certain_stages(self.leaves, cut.stages.num_stages) if cut.is_final else {}
        self.placement = Placement(module, placement, rank, certain)
        self.placement.find_present(module, transport)
        self.ownership: Ownership = self.placement.ownership()
        self._note_partly_held()

    def release_remote(self) -> None:
        """Let go of what other stages turned out to hold alone, in copies that callbacks keep too."""
        self.ownership = self.placement.ownership()
        self._note_partly_held()
        for released in (self._module, *copies_of(self._module, self._module.trainer)):
            release(released, self.ownership)
        for module in self._module.modules():  # an earlier run may have cut it elsewhere
            unguard(module)
        guard_state_dict(self._module)

    def _note_partly_held(self) -> None:
        num_ranks = self.ownership.num_stages
        self.tensors.note_partly_held(name for name, held in self.ownership.holders.items() if len(held) < num_ranks)

    def holders(self, number: int) -> tuple[int, ...]:
        """The ranks that hold a tensor of the module, by its number."""
        return self.ownership.holders[self.tensors.names[number][0]]

    def agree(self) -> None:
        """Come to hold what the other replicas of this stage hold. All of them must call it."""
        if self._replicas is not None:
            for state in self._replicas.gather_objects(self.placement.state()):
                self.placement.merge(state)

    def make(self, weights: Weights | None, seed: int) -> None:
        """Give what was built on the meta device its values; read the files of weights.

        Raises:
            ValueError: nothing gives something its values.
        """
        made = make_local(self._module, self.ownership)
        initialise(self._module, made.values(), seed)
        found: set[str] = set()
        if weights is not None:
            names = [name for name, _ in (*self._module.named_parameters(), *self._module.named_buffers())]
            found = load_weights(self._module, weights, list(filter(self.ownership.is_local, names)))
        check_set(self._module, [name for name in made if name not in found])
        lift_guards(self._module)

    def to_device(self) -> None:
        """Move it there, and give every stage and replica one value of what several hold."""
        self._move(self._device)
        held = {id(t): (t, self.ownership.holders[n]) for n, t in _tensors(self._module) if n in self.ownership}
        spread_from_owner([item for item in held.values() if len(item[1]) > 1], self._transport, self.ownership.stage)
        here = [tensor for tensor, _ in held.values() if not tensor.is_meta and not isinstance(tensor, DTensor)]
        if self._replicas is not None:
            self._replicas.spread(here)
        if self._tensor_group is not None:
            self._tensor_group.spread(here)

    def to_cpu(self) -> None:
        """Move it back, as a run that has ended leaves it."""
        if self._device.type != "cpu":
            self._move(torch.device("cpu"))

    def make_whole(self, num_processes: int) -> None:
        """Give every rank all of the module, on the CPU, as a run that has ended leaves it, where that fits into memory.

        All ranks must call it; `release_remote` takes it back.

        Args:
            num_processes: that share this machine's memory.
        """
        tensors = {id(tensor): (name, tensor) for name, tensor in _tensors(self._module) if name in self.ownership}
        absent = [tensor for _, tensor in tensors.values() if type(tensor) is Placeholder]
        is_sliced = any(isinstance(tensor, DTensor) for _, tensor in tensors.values())
        needed = sum(Look.of(tensor).num_bytes for tensor in absent) * num_processes
        fits = not is_sliced and needed <= free_bytes() // 2
        if self._transport is None:
            return
        rows = self._transport.all_gather_vector(torch.tensor([float(fits), len(absent)]), "the size of the module")
        if not rows[:, 0].all():
            rank_zero_warn(
                "the module is left in stages, as all of it does not fit into the memory of every rank: "
                "trainer.strategy.gather_module(), called on all ranks, gives rank 0 all weights"
            )
            return
        if not rows[:, 1].any():
            return
        direct = Direct(self._transport, torch.device("cpu"))
        for name, tensor in tensors.values():
            holders = self.ownership.holders[name]
            look = Look.of(tensor)
            if len(holders) < self.ownership.num_stages:
                own = tensor.detach() if self.ownership.is_owner(name) else None
                data = direct.spread(own, look.but(device=torch.device("cpu")), holders[0])
                if type(tensor) is Placeholder:
                    become(tensor, nn.Parameter(data, look.requires_grad) if look.is_parameter else data)
                note_holders(tensor, None)
        lift_guards(self._module)

    def _move(self, device: torch.device) -> None:
        for _, tensor in _tensors(self._module):
            if type(tensor) is Placeholder and tensor.device != device:  # it is where it would be if it were here
                become(tensor, placeholder(tensor.look.but(device=device), tensor.what))
        self._module._apply(lambda tensor: tensor if tensor.is_meta or tensor.device == device else tensor.to(device))
        note_device(self._module, device)


def _tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from module.named_parameters(remove_duplicate=False)
    yield from module.named_buffers(remove_duplicate=False)
