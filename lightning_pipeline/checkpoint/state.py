"""The module's full state dict, gathered from the stages and loaded onto them; copies of the module.

Copies of the module: those that callbacks keep, such as averaged weights, which are released and saved as the module
itself, and the one with all weights that a user asks for.
"""

from __future__ import annotations

import copy
import functools
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.optim.swa_utils import AveragedModel

from lightning_pipeline.engine.slices import slice_like, whole
from lightning_pipeline.partition.ownership import (
    Ownership,
    absent_state_expected,
    holders_of,
    named_tensors,
    names_of_tensors,
    unguard,
)
from lightning_pipeline.partition.placeholder import Placeholder, skips_writes
from lightning_pipeline.runtime.direct import recv_tree, send_tree, to_cpu
from lightning_pipeline.runtime.transport import Transport

from .._lightning import LightningModule, Trainer
from .files import entry_at, tensors_in
from .stored_tensors import StoredTensor

K = TypeVar("K")

# -- the module's state -----------------------------------------------------------------------------------------------


def gather_module_state(module: nn.Module, ownership: Ownership, transport: Transport | None) -> dict[str, Any]:
    """``module.state_dict()`` of the whole model on stage 0. Every stage must call it.

    Keys, order, shapes, dtypes and ties are those of one process, and all tensors are on the CPU. What stage 0
    holds is not sent; the rest comes from its owners, one tensor at a time.

    Returns:
        The state dict on stage 0, {} on the others. What is neither a parameter nor a buffer, such as ``_extra_state``
        and persistent states of metrics, is stage 0's.

    Raises:
        RuntimeError: an entry is on the meta device on every stage.
    """
    with absent_state_expected():
        state = module.state_dict()
    return _gathered(state, module, ownership, transport)


def help_to_gather(module: nn.Module, ownership: Ownership) -> None:
    """Call it on the other replicas while one gathers the state: gives it the slices of what replicas share out."""
    with absent_state_expected():
        _give_slices(module.state_dict(), module, ownership)


def load_module_state(module: nn.Module, state_dict: Mapping[str, Any], *, strict: bool = True) -> Any:
    """Load this stage's part of a full state dict; entries whose tensors are on the meta device here are skipped.

    Keys and shapes are checked for skipped entries as well. What is in a folder's files is read straight into place.

    Raises:
        RuntimeError: torch's own, if ``strict`` and keys differ, or if shapes differ.
    """
    with warnings.catch_warnings():
        # torch warns of copying into meta tensors, which is how entries are skipped.
        warnings.filterwarnings("ignore", message=".*copying from a non-meta parameter.*")
        token = skips_writes.set(True)
        try:
            return module.load_state_dict(_sliced(state_dict, module), strict=strict)
        finally:
            skips_writes.reset(token)


def _sliced(state_dict: Mapping[str, Any], module: nn.Module) -> Mapping[str, Any]:
    """The state dict with this rank's slices of what is sharded here and whole in memory."""
    slices = {
        name: slice_like(parameter, value)
        for name, parameter in module.named_parameters(remove_duplicate=False)
        if isinstance(parameter, DTensor)
        and isinstance(value := state_dict.get(name), torch.Tensor)
        and not isinstance(value, (StoredTensor, DTensor))
        and value.shape == parameter.shape  # else torch raises, and names the shapes
    }
    return {**state_dict, **slices} if slices else state_dict


def is_meta(value: Any) -> bool:
    """Whether a checkpoint's entry is a tensor without data here."""
    return isinstance(value, torch.Tensor) and value.is_meta


def _gathered(
    state: Mapping[str, Any], module: nn.Module, ownership: Ownership, transport: Transport | None
) -> dict[str, Any]:
    """On stage 0 the state of `module` with all tensors on the CPU: same order and metadata, ties still tied."""
    tied = _tied_names(module)
    received: dict[str, Any] = {}
    if transport is not None:
        requests = _requests(state, tied, ownership, transport)
        received = _fetch(requests, lambda key: whole(state[key]), ownership, transport)
        if ownership.stage != 0:
            return {}
    twins: dict[tuple[str, ...], Any] = {}
    result: dict[str, Any] = OrderedDict()
    for key, value in state.items():
        names = tied.get(key, (key,))
        if names not in twins:
            twins[names] = received[key] if key in received else to_cpu(whole(value))
        result[key] = twins[names]
    if hasattr(state, "_metadata"):
        result._metadata = state._metadata  # type: ignore[attr-defined]
    return result


def _give_slices(state: Mapping[str, Any], module: nn.Module, ownership: Ownership) -> None:
    """Make whole what the replica that gathers `state` makes whole, in the same order."""
    tied = _tied_names(module)
    given: set[tuple[str, ...]] = set()
    for key, value in state.items():
        names = tied.get(key, (key,))
        is_sent = key not in ownership or ownership.is_owner(key)
        if isinstance(value, DTensor) and is_sent and names not in given:
            given.add(names)
            whole(value)


def _requests(
    state: Mapping[str, Any], tied: Mapping[str, tuple[str, ...]], ownership: Ownership, transport: Transport
) -> list[tuple[str, int]]:
    """The entries that stage 0 lacks, each with the stage that sends it: the same list on every stage.

    Stage 0 asks, for a tied tensor by one of its names only. The sender is the owner; for a key that is no parameter's
    name (a module may rename what it saves) it is the first stage that has the data.
    """
    wanted: dict[Any, tuple[str, int | None]] = {}
    if ownership.stage == 0:
        for key, value in state.items():
            source = ownership.owner(key) if key in ownership else None if is_meta(value) else 0
            if source != 0:
                wanted.setdefault(tied.get(key, (key,)), (key, source))
    asked: list[tuple[str, int | None]] = transport.broadcast_object(list(wanted.values()), 0, "checkpoint keys")
    if not asked:
        return []
    has_data = [float(key in state and not is_meta(state[key])) for key, _ in asked]
    table = transport.all_gather_vector(torch.tensor(has_data, dtype=torch.float64), "checkpoint keys").tolist()
    requests = []
    for index, (key, source) in enumerate(asked):
        holders = [stage for stage in range(ownership.num_stages) if table[stage][index]]
        if not holders:
            raise RuntimeError(f"cannot save {key!r}: its data is on the meta device on every stage")
        requests.append((key, source if source in holders else holders[0]))
    return [(key, source) for key, source in requests if source != 0]


def _fetch(
    requests: Iterable[tuple[K, int]], entry: Callable[[K], Any], ownership: Ownership, transport: Transport
) -> dict[K, Any]:
    """On stage 0 the requested entries, each sent by the stage named with it. Every stage has the same requests."""
    found = {}
    for key, source in requests:
        if ownership.stage == 0:
            found[key] = recv_tree(transport, source, f"checkpoint entry {key!r}")
        elif ownership.stage == source:
            send_tree(entry(key), transport, 0)
    return found


def _tied_names(module: nn.Module) -> dict[str, tuple[str, ...]]:
    """All names of each parameter or buffer that has several, by each of them."""
    return {name: tuple(names) for names in names_of_tensors(module) if len(names) > 1 for name in names}


# -- what callbacks and hooks put into a checkpoint --------------------------------------------------------------------


def copies_of(module: LightningModule, trainer: Trainer) -> Iterator[nn.Module]:
    """Every copy of `module` that is an attribute of a callback, by itself or in an `AveragedModel`."""
    for callback in trainer.callbacks:  # type: ignore[attr-defined]
        for value in list(vars(callback).values()):
            candidate = value.module if isinstance(value, AveragedModel) else value
            if type(candidate) is type(module) and candidate is not module:
                # Callbacks move their copy to the device with `to`, which refuses meta tensors.
                vars(candidate)["to"] = functools.partial(_move_what_is_here, candidate)
                yield candidate


def _move_what_is_here(module: nn.Module, device: torch.device) -> nn.Module:
    return module._apply(lambda tensor: tensor if tensor.is_meta else tensor.to(device))


def filled_from_owners(checkpoint: dict[str, Any], ownership: Ownership, transport: Transport | None) -> dict[str, Any]:
    """The checkpoint, on stage 0 with the data of other stages' tensors that callbacks and hooks have put into it.

    All stages must call it, each with the checkpoint as its own callbacks made it.
    """
    if transport is None:
        return checkpoint
    missing = []
    if ownership.stage == 0:
        for path, tensor in tensors_in(checkpoint):
            if type(tensor) is Placeholder:
                stages = holders_of(tensor) or ownership.holders.get(str(path[-1]), (0,))
                missing.append((path, stages[0]))
    requests = transport.broadcast_object(missing, 0, "names of missing checkpoint entries")
    found = _fetch(requests, functools.partial(entry_at, checkpoint), ownership, transport)
    if ownership.stage == 0:
        # A tensor's note of who holds it is of no use in a file: `detach` leaves it out.
        noted = {
            path: tensor.detach() for path, tensor in tensors_in(checkpoint) if path not in found and holders_of(tensor)
        }
        checkpoint = _with(checkpoint, (), {**noted, **found})
    return checkpoint


def _with(content: Any, path: tuple[Any, ...], new: dict[tuple[Any, ...], Tensor]) -> Any:
    """The content with other tensors, in containers of its own: those of a checkpoint may be the user's."""
    if path in new:
        return new[path]
    if not any(key[: len(path)] == path for key in new):
        return content
    if isinstance(content, dict):
        made = copy.copy(content)
        for key, value in content.items():
            made[key] = _with(value, (*path, key), new)
        return made
    values = [_with(value, (*path, index), new) for index, value in enumerate(content)]
    return content._make(values) if hasattr(content, "_make") else type(content)(values)


# -- a whole module ---------------------------------------------------------------------------------------------------


def gather_module(
    module: LightningModule, ownership: Ownership, transport: Transport | None, *, is_writer: bool
) -> LightningModule | None:
    """On rank 0 a copy of the module with all parameters and buffers, on the CPU. All ranks must call it.

    Args:
        is_writer: this rank's pipeline is the one that rank 0 is in. The others give their slices.
    """
    tensors = dict(named_tensors(module))
    if not is_writer:
        _give_slices(tensors, module, ownership)
        return None
    gathered = _gathered(tensors, module, ownership, transport)
    if ownership.stage != 0:
        return None
    copies: dict[int, Any] = {}
    for name, tensor in tensors.items():
        if id(tensor) in copies:
            continue
        value = gathered[name]
        if value.device == tensor.device and not isinstance(tensor, DTensor):
            value = value.clone()  # it is the module's own memory
        is_parameter = isinstance(tensor, nn.Parameter)
        copies[id(tensor)] = nn.Parameter(value, requires_grad=tensor.requires_grad) if is_parameter else value
    with _without_fsdp(module):
        whole_module = copy.deepcopy(module, copies)
    _strip(whole_module)
    return whole_module


@contextmanager
def _without_fsdp(module: nn.Module) -> Iterator[None]:
    """Take FSDP2's class, which refuses copies, and its state, which refers to process groups, off the modules."""
    before = [(sub, type(sub), dict(vars(sub))) for sub in module.modules() if isinstance(sub, FSDPModule)]
    for sub, cls, attributes in before:
        sub.__class__ = next(base for base in cls.__mro__[1:] if base is not FSDPModule)
        for key in attributes:
            if key.startswith("__composable_api"):
                del vars(sub)[key]
    try:
        yield
    finally:
        for sub, cls, attributes in before:
            sub.__class__ = cls
            vars(sub).update(attributes)


def _strip(module: nn.Module) -> None:
    """Remove the hooks of a module that is split into stages or sharded."""
    for sub in module.modules():
        unguard(sub)
        for hooks in (sub._state_dict_pre_hooks, sub._load_state_dict_pre_hooks):
            for key, hook in list(hooks.items()):
                if getattr(hook, "__module__", "").startswith("torch.distributed.fsdp"):
                    del hooks[key]
