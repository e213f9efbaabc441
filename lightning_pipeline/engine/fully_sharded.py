"""Parameters sharded over replicas by torch's FSDP2, gathered and reduced once per step."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from operator import attrgetter
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor

from lightning_pipeline import _torch
from lightning_pipeline.engine.slices import GatheredMemory, local_part, own_rows, sliced_further
from lightning_pipeline.partition.kept_parameters import gathered_from, note_gathered, note_of_fsdp2
from lightning_pipeline.partition.ownership import holders_of, note_holders
from lightning_pipeline.partition.placeholder import is_absent
from lightning_pipeline.partition.users_code import in_hook, users_line
from lightning_pipeline.runtime.failure import waiting_for
from lightning_pipeline.runtime.replicas import Replicas

_NAMES = {"data", "data_parallel"}
"""Of the dimension of a mesh that is replicas (`Topology.mesh`)."""
_made: weakref.WeakSet[nn.Module] = weakref.WeakSet()
"""The modules that `FullySharded` has given to FSDP2."""


class FullySharded:
    """A stage's leaves whose parameters, gradients and optimizer state are sharded over its replicas.

    Outside of a step each replica holds a slice of every parameter, as a DTensor. A training step gathers the
    parameters and reduces their gradients once, as all micro-batches use them. FSDP2's own hooks, which do both around
    every call of a module, are removed: they would be recorded as part of the user's step, and replicas may have
    different numbers of micro-batches.

    What tensor parallelism splits is sharded further: a slice is then one of a mesh of two dimensions, replicas and
    tensor-parallel ranks, and a gathered parameter is still the slice of its tensor-parallel rank.

    Args:
        replicas: the ranks that hold the same stages.
        mesh: these ranks, as the dimension "data", or "data_parallel" of the mesh that tensor parallelism uses.

    Attributes:
        kept: memory of whole parameters that the user's code has kept.
        leave_views: gives views of gathered parameters, by their slices, memory of their own.
    """

    def __init__(self, replicas: Replicas, mesh: DeviceMesh, *, gradients_mean: bool) -> None:
        self._replicas = replicas
        self._mesh = mesh
        self._gradients_mean = gradients_mean
        self._leaves: list[tuple[FSDPModule, list[str]]] = []  # with the names of their sharded parameters
        self._slices: list[nn.Parameter] = []
        self._versions: list[int] = []
        self._references: list[int] = []
        self.kept: weakref.WeakSet[GatheredMemory] = weakref.WeakSet()
        self.leave_views: Callable[[Mapping[Any, Tensor]], Iterable[GatheredMemory]] = lambda gathered: ()

    def __bool__(self) -> bool:
        return bool(self._leaves)

    def parameters(self) -> list[nn.Parameter]:
        """The sharded parameters; while they are gathered, the whole ones in their places."""
        leaves = ((cast(nn.Module, leaf), names) for leaf, names in self._leaves)
        return list(dict.fromkeys(leaf.get_parameter(name) for leaf, names in leaves for name in names))

    def slices_of(self, parameters: Iterable[Tensor]) -> list[Tensor]:
        """The slices of those of `parameters` that are gathered now."""
        slices = dict(zip(self.parameters(), self._slices, strict=False)) if self._slices else {}
        return [part for one in parameters if (part := slices.get(one)) is not None]  # type: ignore[call-overload]

    def adopt(self, module: nn.Module) -> None:
        """Take over parameters that an earlier run in this process sharded over the same replicas.

        Raises:
            ValueError: they were sharded over other ranks.
        """
        for name, leaf in module.named_modules():
            if isinstance(leaf, FSDPModule):
                parameters = cast(nn.Module, leaf).named_parameters(remove_duplicate=False)
                found = {name: parameter for name, parameter in parameters if is_sharded(parameter)}
                meshes = {cast(DTensor, parameter).device_mesh for parameter in found.values()}
                if any(mesh.get_group(0) is not self._mesh.get_group() for mesh in meshes):
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
                sharded.grad = sliced_further(sharded, parameter.grad)
                parameter.grad = None
        return replaced

    def gather(self) -> None:
        """Give every replica the whole parameters. All of them must call it."""
        self._check_present()
        slices = self.parameters()
        if not any(map(is_sharded, slices)):
            return
        before, self._versions, self._slices = self._versions, list(map(_version, slices)), slices
        with waiting_for("other replicas' slices of parameters"):
            for leaf, _ in self._leaves:
                leaf.unshard()
        for index, (parameter, part) in enumerate(zip(self.parameters(), slices, strict=True)):
            parameter.requires_grad_(part.requires_grad)  # FSDP2 remembers what it was at first
            note_holders(parameter, holders_of(part))
            note_gathered(part, parameter)
            if before and before[index] != self._versions[index]:
                increment_version(parameter)  # or a backward from before an update takes the new data without a word
        for memory in self.kept:
            memory.begin_step()
        if not before:
            for leaf, _ in self._leaves:
                self._note_memory(leaf)
        self._references = [_num_references(parameter) for parameter in self.parameters()]

    def release(self) -> None:
        """Go back to a slice on each replica. Gradients that are not reduced yet stay."""
        if self._slices:
            self._check_present()
            for memory in self.kept:
                memory.end_step()
        for part, version, parameter in zip(self._slices, self._versions, self.parameters(), strict=False):
            note_gathered(part, None)
            if not is_sharded(parameter):
                part.requires_grad_(parameter.requires_grad)
                if _version(part) == version:
                    self._take_back(part, parameter)
        self._leave_views()
        self._slices = []
        for leaf, _ in self._leaves:
            leaf.reshard()

    def reduce(self) -> None:
        """Sum the whole parameters' gradients over replicas into those of the slices. All replicas must call it.

        A gradient that some replicas lack counts as zeros there; one that all lack stays absent.
        """
        self._check_present()
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

    def _check_present(self) -> None:
        """Raise a NotImplementedError where a layer has been given another parameter than the one that is sharded."""
        for leaf, names in self._leaves:
            module = cast(nn.Module, leaf)
            for name in names:
                found = _found(module, name)
                is_ours = isinstance(found, Tensor) and (is_sharded(found) or gathered_from(found) is not None)
                if not is_ours or is_absent(found):  # another stage may hold it now
                    raise NotImplementedError(
                        f"{name} of {type(module).__name__.removeprefix('FSDP')} has been replaced, or taken away, "
                        f"during the run, and with data_parallel='fsdp' replicas keep slices of it: write into it, as "
                        f"by `weight.data.copy_(...)`, replace the layer as a whole, or use data_parallel='zero1'"
                    )

    def _leave_views(self) -> None:
        """Keep views of gathered parameters from showing memory that is freed."""
        gathered = zip(self._slices, self.parameters(), self._references, strict=False)
        if seen := {part: whole for part, whole, before in gathered if _num_references(whole) > before}:
            self.kept.update(self.leave_views(seen))

    def _note_memory(self, leaf: FSDPModule) -> None:
        for parameter in fully_shard.state(leaf)._fsdp_param_group.fsdp_params:  # type: ignore[attr-defined]
            for tensor in parameter.all_gather_outputs:
                note_of_fsdp2(tensor)

    def _take_back(self, part: Tensor, parameter: Tensor) -> None:
        """Copy in-place changes of a gathered parameter back to this rank's slice.

        It copies even if nothing changed: writes through ``.data`` do not bump the version, and comparing the data
        would synchronize with the device.
        """
        own = local_part(part)
        with _torch.preserve_version_counter(own):
            own.copy_(own_rows(part, parameter))

    def _shard(self, leaf: nn.Module, whole: set[nn.Parameter]) -> FSDPModule:
        sharded = fully_shard(leaf, mesh=self._mesh, reshard_after_forward=False, ignored_params=whole)
        state = fully_shard.state(sharded)  # type: ignore[attr-defined]
        state._pre_forward_hook_handle.remove()
        state._post_forward_hook_handle.remove()
        state._lazy_init()
        _leave_whole_in_steps(leaf)
        sharded.set_requires_gradient_sync(False)
        sharded.set_reshard_after_backward(False)
        if not self._gradients_mean:
            sharded.set_gradient_divide_factor(1.0)
        _made.add(leaf)
        type(leaf).__deepcopy__ = _copied  # type: ignore[attr-defined]
        return sharded


def _copied(leaf: nn.Module, memo: dict[int, Any]) -> nn.Module:
    """A deep copy of a leaf, in a step or hook: a module of its own class, which FSDP2 knows nothing of.

    Raises:
        NotImplementedError: elsewhere a copy would have slices.
    """
    is_whole = not any(map(is_sharded, leaf.parameters()))
    if leaf not in _made or not (is_whole or in_hook.is_here()):
        raise NotImplementedError(
            f"copy.deepcopy takes {type(leaf).__name__}, whose parameters replicas keep in slices ({users_line()}): "
            f"copy it in a hook or step, or load a checkpoint into a new module"
        )
    its_class = next(one for one in type(leaf).__mro__ if not issubclass(one, FSDPModule))
    if hasattr(its_class, "__deepcopy__"):
        return its_class.__deepcopy__(leaf, memo)
    state: Any = leaf.__reduce_ex__(4)[2]
    memo[id(leaf)] = made = cast(nn.Module, its_class.__new__(its_class))
    made.__setstate__(copy.deepcopy({key: value for key, value in state.items() if key not in _torch.FSDP_KEYS}, memo))
    return made


def _leave_whole_in_steps(module: nn.Module) -> None:
    """Let `state_dict` and `load_state_dict` in a step take the whole parameters, which its layers use: FSDP2's hooks
    would go back to slices, and free them."""
    for sub in module.modules():
        for hooks in (sub._state_dict_pre_hooks, sub._load_state_dict_pre_hooks):
            for key, hook in list(hooks.items()):
                if _is_of_fsdp2(getattr(hook, "hook", hook)):  # which torch may wrap
                    del hooks[key]
        for key, hook in sub._load_state_dict_post_hooks.items():
            if _is_of_fsdp2(hook):
                sub._load_state_dict_post_hooks[key] = _for_slices(hook)


def _is_of_fsdp2(hook: Any) -> bool:
    return bool(getattr(hook, "__module__", "").startswith("torch.distributed.fsdp"))


def _for_slices(hook: Callable[..., None]) -> Callable[..., None]:
    def run(module: nn.Module, *args: Any) -> None:
        if any(map(is_sharded, module.parameters(recurse=False))):
            hook(module, *args)

    return run


def sharded_elsewhere(module: nn.Module) -> Iterator[str]:
    """Names of the modules in `module` that other code has given to FSDP2."""
    return (name for name, sub in module.named_modules() if isinstance(sub, FSDPModule) and sub not in _made)


def is_sharded(tensor: Tensor) -> bool:
    """Whether replicas have slices of a tensor."""
    return isinstance(tensor, DTensor) and not _NAMES.isdisjoint(tensor.device_mesh.mesh_dim_names or ())


def _found(module: nn.Module, name: str) -> Any:
    """What a module has by a name with dots; None if nothing."""
    try:
        return attrgetter(name)(module)
    except AttributeError:
        return None


def _num_references(gathered: Tensor) -> int:
    """How many tensors have the memory of a gathered parameter; always 0 for a slice of tensor parallelism."""
    return 0 if isinstance(gathered, DTensor) else _torch.num_storage_references(gathered)


def _version(parameter: Tensor) -> int:
    """A number that grows whenever a slice is modified in place."""
    return parameter._version + (parameter._local_tensor._version if isinstance(parameter, DTensor) else 0)
