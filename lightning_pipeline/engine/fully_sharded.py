"""Parameters sharded over replicas by torch's FSDP2, gathered and reduced once per step."""

from __future__ import annotations

from collections.abc import Iterable
from typing import cast

import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from lightning_pipeline import _torch
from lightning_pipeline.partition.ownership import holders_of, note_holders
from lightning_pipeline.runtime.failure import waiting_for
from lightning_pipeline.runtime.replicas import Replicas


class FullySharded:
    """A stage's leaves whose parameters, gradients and optimizer state are sharded over its replicas.

    Outside of a step each replica holds a slice of every parameter, as a DTensor. A training step gathers the
    parameters and reduces their gradients once, as all micro-batches use them. FSDP2's own hooks, which do both around
    every call of a module, are removed: they would be recorded as part of the user's step, and replicas may have
    different numbers of micro-batches.

    Args:
        replicas: the ranks that hold the same stages.
        device_type: of the parameters.
        gradients_mean: gradients are averaged over replicas; else summed.
    """

    def __init__(self, replicas: Replicas, device_type: str, *, gradients_mean: bool) -> None:
        self._replicas = replicas
        self._mesh = DeviceMesh.from_group(replicas.group, device_type, mesh_dim_names=("data",))
        self._gradients_mean = gradients_mean
        self._leaves: list[tuple[FSDPModule, list[str]]] = []  # with the names of their sharded parameters
        self._slices: list[nn.Parameter] = []
        self._versions: list[int] = []

    def __bool__(self) -> bool:
        return bool(self._leaves)

    def parameters(self) -> list[nn.Parameter]:
        """The sharded parameters; while they are gathered, the whole ones in their places."""
        leaves = ((cast(nn.Module, leaf), names) for leaf, names in self._leaves)
        return list(dict.fromkeys(leaf.get_parameter(name) for leaf, names in leaves for name in names))

    def adopt(self, module: nn.Module) -> None:
        """Take over parameters that an earlier run in this process sharded over the same replicas.

        Raises:
            ValueError: they were sharded over other ranks.
        """
        for name, leaf in module.named_modules():
            if isinstance(leaf, FSDPModule):
                parameters = cast(nn.Module, leaf).named_parameters(remove_duplicate=False)
                found = {name: parameter for name, parameter in parameters if isinstance(parameter, DTensor)}
                if any(parameter.device_mesh.get_group() is not self._mesh.get_group() for parameter in found.values()):
                    raise ValueError(
                        f"{name} is sharded over other ranks than the {self._replicas.num_replicas} replicas of this "
                        f"run: keep the layout of the run before, or make a new module and load a checkpoint"
                    )
                self._leaves.append((leaf, list(found)))

    def shard(self, leaves: Iterable[nn.Module], whole: set[nn.Parameter]) -> dict[nn.Parameter, nn.Parameter]:
        """Shard the parameters of `leaves`, their gradients too, but not those in `whole`.

        Returns the sharded parameter for each one that is no longer the module's.
        """
        replaced: dict[nn.Parameter, nn.Parameter] = {}
        for leaf in leaves:
            before = dict(leaf.named_parameters(remove_duplicate=False))
            names = [name for name, parameter in before.items() if parameter not in whole]
            if names:
                self._leaves.append((self._shard(leaf, whole.intersection(before.values())), names))
                replaced.update({before[name]: leaf.get_parameter(name) for name in names})
        for parameter, sharded in replaced.items():
            note_holders(sharded, holders_of(parameter))
            if parameter.grad is not None:
                sharded.grad = slice_like(sharded, parameter.grad)
                parameter.grad = None
        return replaced

    def gather(self) -> None:
        """Give every replica the whole parameters. All of them must call it."""
        slices = self.parameters()
        if not any(isinstance(parameter, DTensor) for parameter in slices):
            return
        before, self._versions, self._slices = self._versions, list(map(_version, slices)), slices
        with waiting_for("other replicas' slices of parameters"):
            for leaf, _ in self._leaves:
                leaf.unshard()
        for index, (parameter, part) in enumerate(zip(self.parameters(), slices, strict=True)):
            parameter.requires_grad_(part.requires_grad)  # FSDP2 remembers what it was at first
            note_holders(parameter, holders_of(part))
            if before and before[index] != self._versions[index]:
                increment_version(parameter)  # or a backward from before an update takes the new data without a word

    def release(self) -> None:
        """Go back to a slice on each replica. Gradients that are not reduced yet stay."""
        for part, version, parameter in zip(self._slices, self._versions, self.parameters(), strict=False):
            if not isinstance(parameter, DTensor) and _version(part) == version:
                self._take_back(part, parameter)
        self._slices = []
        for leaf, _ in self._leaves:
            leaf.reshard()

    def reduce(self) -> None:
        """Sum the whole parameters' gradients over replicas into those of the slices. All replicas must call it.

        A gradient that some replicas lack counts as zeros there; one that all lack stays absent.
        """
        parameters = self.parameters()
        here = [float(parameter.grad is not None) for parameter in parameters]
        anywhere = torch.tensor(self._replicas.gather_numbers(*here)).any(0).tolist()
        for parameter, needed in zip(parameters, anywhere, strict=True):
            if needed and parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        for leaf, _ in self._leaves:
            leaf.set_requires_gradient_sync(True)
            leaf.set_is_last_backward(True)
            # FSDP2 queues this in a backward that its hooks see; it reduces what is left to reduce, here everything.
            state = fully_shard.state(leaf)  # type: ignore[attr-defined]
            state._state_ctx.manual_backward_finalization_active = False  # since torch 2.15 it asks whether it is
            with waiting_for("other replicas' gradients"):
                state._root_post_backward_final_callback()
            leaf.set_is_last_backward(False)
            leaf.set_requires_gradient_sync(False)

    def _take_back(self, part: Tensor, parameter: Tensor) -> None:
        """Copy in-place changes of a gathered parameter back to this rank's slice.

        It copies even if nothing changed: writes through ``.data`` do not bump the version, and comparing the data
        would synchronize with the device.
        """
        chunks = parameter.detach().chunk(self._replicas.num_replicas)
        if self._replicas.topology.replica < len(chunks):
            own = local_part(part)
            with _torch.preserve_version_counter(own):
                own.copy_(chunks[self._replicas.topology.replica])

    def _shard(self, leaf: nn.Module, whole: set[nn.Parameter]) -> FSDPModule:
        sharded = fully_shard(leaf, mesh=self._mesh, reshard_after_forward=False, ignored_params=whole)
        state = fully_shard.state(sharded)  # type: ignore[attr-defined]
        state._pre_forward_hook_handle.remove()
        state._post_forward_hook_handle.remove()
        state._lazy_init()
        sharded.set_requires_gradient_sync(False)
        sharded.set_reshard_after_backward(False)
        if not self._gradients_mean:
            sharded.set_gradient_divide_factor(1.0)
        return sharded


def _version(parameter: Tensor) -> int:
    """A number that grows whenever a slice is modified in place."""
    return parameter._version + (parameter._local_tensor._version if isinstance(parameter, DTensor) else 0)


def slice_like(sharded: Tensor, tensor: Tensor) -> Tensor:
    """This rank's slice of `tensor`, which is equal on all ranks, sharded like `sharded`."""
    assert isinstance(sharded, DTensor)
    return distribute_tensor(tensor.detach(), sharded.device_mesh, sharded.placements, src_data_rank=None)


def whole(tensor: Tensor) -> Tensor:
    """The whole of a sharded tensor, or the tensor itself. All ranks that hold its parts must call it."""
    if not isinstance(tensor, DTensor):
        return tensor
    with waiting_for("other replicas' slices of a tensor"):
        return tensor.full_tensor().detach()


def local_part(tensor: Tensor) -> Tensor:
    """This rank's slice of a sharded tensor, in the same memory, or the tensor itself."""
    return tensor.to_local().detach() if isinstance(tensor, DTensor) else tensor


def plain(parameters: Iterable[Tensor]) -> list[Tensor]:
    """The parameters, each sharded one as this rank's slice with that of its gradient, in the same memory.

    For torch's kernels over lists of gradients, which take no mixture of sharded and whole ones.
    """
    return [_plain(parameter) if isinstance(parameter, DTensor) else parameter for parameter in parameters]


def _plain(parameter: DTensor) -> Tensor:
    part = local_part(parameter)
    if parameter.grad is not None:
        part.grad = local_part(parameter.grad)
    return part
