"""One full, plain state dict out of the parts that the stages hold, and back."""

from __future__ import annotations

import warnings
from collections import OrderedDict
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from lightning_pipeline.partition.guards import absent_state_expected
from lightning_pipeline.partition.ownership import Ownership, names_of_tensors
from lightning_pipeline.partition.placeholder import skips_writes
from lightning_pipeline.runtime.fully_sharded import slice_like, whole
from lightning_pipeline.runtime.trees import recv_tree, send_tree, to_cpu

from .stored_tensors import StoredTensor

if TYPE_CHECKING:
    from lightning_pipeline.runtime.transport import Transport


def gather_module_state(module: nn.Module, ownership: Ownership, transport: Transport | None) -> dict[str, Any]:
    """``module.state_dict()`` of the whole model on stage 0. Every stage must call it.

    Keys, order, shapes, dtypes and ties are those of one process, and all tensors are on the CPU. What stage 0
    holds is not sent; the rest comes from its owners, one tensor at a time.

    Returns:
        The state dict on stage 0, {} on the others. What is neither a parameter nor a buffer, such as ``_extra_state``
        and persistent states of metrics, is stage 0's.

    Raises:
        RuntimeError: if an entry is on the meta device on every stage.
    """
    with absent_state_expected():
        state = module.state_dict()
    if transport is None:
        return _localised(state, module, {})
    received: dict[str, Any] = {}
    for key, source in _requests(state, module, ownership, transport):
        if ownership.stage == 0:
            received[key] = recv_tree(transport, source, f"checkpoint entry {key!r}")
        elif ownership.stage == source:
            send_tree(whole(state[key]), transport, 0)
    return _localised(state, module, received) if ownership.stage == 0 else {}


def help_to_gather(module: nn.Module) -> None:
    """On the other replicas, while one gathers the state: give it the slices of what is sharded over replicas."""
    tied = _tied_names(module)
    given: set[Any] = set()
    with absent_state_expected():
        state = module.state_dict()
    for key, value in state.items():
        if isinstance(value, DTensor) and tied.get(key, key) not in given:
            given.add(tied.get(key, key))
            whole(value)


def load_module_state(module: nn.Module, state_dict: Mapping[str, Any], *, strict: bool = True) -> Any:
    """Load this stage's part of a full state dict; entries whose tensors are on the meta device here are skipped.

    Keys and shapes are checked for skipped entries as well. What is in a folder's files is read straight into place.

    Returns:
        What ``module.load_state_dict`` returns: missing and unexpected keys.

    Raises:
        RuntimeError: torch's own, if ``strict`` and keys differ, or if shapes differ.
    """
    with warnings.catch_warnings():
        # Copying into a meta tensor is just what skips it.
        warnings.filterwarnings("ignore", message=".*copying from a non-meta parameter.*")
        token = skips_writes.set(True)
        try:
            return module.load_state_dict(_sliced(state_dict, module), strict=strict)
        finally:
            skips_writes.reset(token)


def _sliced(state_dict: Mapping[str, Any], module: nn.Module) -> Mapping[str, Any]:
    """The state dict with this rank's slices of what is sharded and whole in memory."""
    slices = {
        name: slice_like(parameter, value)
        for name, parameter in module.named_parameters(remove_duplicate=False)
        if isinstance(parameter, DTensor)
        and isinstance(value := state_dict.get(name), torch.Tensor)
        and not isinstance(value, (StoredTensor, DTensor))
        and value.shape == parameter.shape  # torch tells what is wrong with others
    }
    return {**state_dict, **slices} if slices else state_dict


def _requests(
    state: Mapping[str, Any], module: nn.Module, ownership: Ownership, transport: Transport
) -> list[tuple[str, int]]:
    """The entries that stage 0 lacks with the stage that sends each, the same list on every stage.

    Stage 0 asks, a tied tensor by one of its names only. The sender is the owner; for a key that is no parameter's
    name (a module may rename what it saves) it is the first stage that has the data.
    """
    wanted: dict[Any, tuple[str, int | None]] = {}
    if ownership.stage == 0:
        tied = _tied_names(module)
        for key, value in state.items():
            source = ownership.owner(key) if key in ownership else None if is_meta(value) else 0
            if source != 0:
                wanted.setdefault(tied.get(key, key), (key, source))
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


def is_meta(value: Any) -> bool:
    """Whether a checkpoint's entry is a tensor without data here."""
    return isinstance(value, torch.Tensor) and value.is_meta


def _tied_names(module: nn.Module) -> dict[str, tuple[str, ...]]:
    """Each name of a parameter or buffer that has several, with all of them."""
    return {name: tuple(names) for names in names_of_tensors(module) if len(names) > 1 for name in names}


def _localised(state: Mapping[str, Any], module: nn.Module, received: Mapping[str, Any]) -> dict[str, Any]:
    """The state dict with what was received and all tensors on the CPU: same order and metadata, ties still tied."""
    tied = _tied_names(module)
    twins: dict[tuple[str, ...], Any] = {}
    result: dict[str, Any] = OrderedDict()
    for key, value in state.items():
        if key in tied and tied[key] in twins:
            result[key] = twins[tied[key]]
        else:
            result[key] = received[key] if key in received else to_cpu(whole(value))
            if key in tied:
                twins[tied[key]] = result[key]
    if hasattr(state, "_metadata"):
        result._metadata = state._metadata  # type: ignore[attr-defined]
    return result
