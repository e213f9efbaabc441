"""Writes checkpoint folders from all ranks at once, each rank its own part."""

from __future__ import annotations

import atexit
import copy
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.tensor import DTensor

from lightning_pipeline import _torch
from lightning_pipeline.engine.fully_sharded import whole
from lightning_pipeline.partition.ownership import Ownership, absent_state_expected, named_tensors
from lightning_pipeline.runtime.backends import new_group
from lightning_pipeline.runtime.direct import to_cpu
from lightning_pipeline.runtime.failure import waiting_for

from .files import publish, remove, system_error, unfinished
from .folder import like_meta, read_folder, replace_tensors, tensor_places, write_meta
from .optimizer_layout import OptimizerLayout
from .state import is_meta

# -- what a rank holds ------------------------------------------------------------------------------------------------


def module_state_in_parts(module: nn.Module) -> dict[str, Any]:
    """``module.state_dict()`` with all keys on every rank, where tensors of other stages are on the meta device.

    Tied entries are one tensor.
    """
    with absent_state_expected():
        state: dict[str, Any] = module.state_dict()
    first: dict[int, str] = {}
    for name, tensor in named_tensors(module):
        if name in state and first.setdefault(id(tensor), name) != name:
            state[name] = state[first[id(tensor)]]
    return state


def optimizer_state_in_parts(layout: OptimizerLayout, ownership: Ownership) -> dict[str, Any]:
    """The state dict of one process, as far as this rank has it: "state" by positional id, of what its stage owns.

    Everything else in it is complete on stage 0.
    """
    held: dict[str, Any] = {}

    def collect(state: dict[str, Any]) -> dict[str, Any] | None:
        held.update(state)
        return {} if ownership.stage == 0 else None

    complete = layout.gather_state(ownership, None, collect)
    ids = {name: index for index, name in reversed(list(enumerate(layout.names)))}
    of_no_parameter = complete.get("state", {})
    return {**complete, "state": {**{ids[name]: dict(state) for name, state in held.items()}, **of_no_parameter}}


# -- saving -----------------------------------------------------------------------------------------------------------


class BackgroundSave:
    """The save that is underway, in a thread. There is one at a time."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._errors: list[BaseException] = []

    def start(self, save: Callable[[], None]) -> None:
        """Call `save` in a thread. The one before must have been waited for."""
        assert self._thread is None
        errors: list[BaseException] = []  # of this save: one that was abandoned may still end

        def run() -> None:
            try:
                save()
            except BaseException as error:
                errors.append(error)

        # A daemon, as a save whose other ranks are gone would keep this process until its timeout; one that has not
        # been abandoned is waited for.
        self._errors = errors
        self._thread = threading.Thread(target=run, name="pipeline-save", daemon=True)
        self._thread.start()
        atexit.register(self.wait)

    def wait(self) -> None:
        """Until it has ended; raises what it raised, once."""
        if self._thread is None:
            return
        self._thread.join()
        errors = self._errors
        self.abandon()
        if errors:
            raise errors[0]

    def abandon(self) -> None:
        """Forget it, as after a failure of the run, whose error counts more than that of a save."""
        atexit.unregister(self.wait)
        self._thread, self._errors = None, []


@dataclass(frozen=True, kw_only=True)
class FolderWriter:
    """Writes checkpoints in parts. Every rank of the world has one.

    Parameters and optimizer state are the same on all replicas that hold them, which share the writing out; buffers are
    those of the first replica.

    Args:
        parameter_names: of each optimizer, by positional id.
        is_writer: this rank's pipeline is the first.
        group: all ranks, over a backend for host memory.
        background: where to write the shards while the caller goes on, with a group that nobody else uses; None to
            return when all is written.
    """

    module: nn.Module
    ownership: Ownership
    parameter_names: Sequence[Sequence[str]]
    is_writer: bool
    group: dist.ProcessGroup
    background: BackgroundSave | None = None

    def save(self, checkpoint: dict[str, Any], path: str | Path) -> None:
        """Write `checkpoint`, which has this rank's parts of its state dicts and optimizer states. All ranks call it.

        What had the path before stays until the new folder is complete. Everything else in the checkpoint is rank 0's.

        Raises:
            ValueError: the path is not on a local or mounted file system.
            RuntimeError: it could not be written, with the reason, on all ranks.
        """
        if "://" in str(path):
            raise ValueError(
                f"save_distributed_checkpoint=True writes to file systems that all ranks mount, got {path}: choose "
                f"such a path, or leave it out for one plain file"
            )
        path = Path(path).absolute()
        sections: list[str] = self._from_rank_0(path, _sections(checkpoint))
        tensors, values = self._given(path, checkpoint, sections)
        states = [_descriptions(optimizer["state"]) for optimizer in checkpoint.get("optimizer_states", [])]
        parts = self._on_rank_0_of_all(path, (values, states))
        begin = partial(self._begin, path, checkpoint, sections, parts)
        if self.background is None:
            self._write(path, begin, tensors)
            return
        self._do_on_rank_0(path, begin)  # what is not in shards may change too
        tensors = {name: tensor.detach().clone() for name, tensor in tensors.items()}
        self.background.start(partial(self._write, path, lambda: None, tensors))

    def _write(self, path: Path, begin: Callable[[], None], tensors: dict[str, Tensor]) -> None:
        try:
            self._do_on_rank_0(path, begin)
            self._write_shards(path, tensors)
            self._do_on_rank_0(path, lambda: _finish(path))
        except BaseException:
            if dist.get_rank() == 0:
                with suppress(OSError):  # others may write to it still; what stays, the next save removes
                    remove(unfinished(path))
            raise

    def _given(
        self, path: Path, checkpoint: Mapping[str, Any], sections: Sequence[str]
    ) -> tuple[dict[str, Tensor], dict[tuple[str, str], Any]]:
        """What this rank gives: tensors by name, a tied one by its first, and entries that are no tensors by place."""
        holders = self._holders_of_others(path, checkpoint, sections)
        parameters = {name for name, _ in self.module.named_parameters(remove_duplicate=False)}
        tensors: dict[str, Tensor] = {}
        values: dict[tuple[str, str], Any] = {}
        first: dict[int, str] = {}
        for section in sections:
            for key, value in checkpoint.get(section, {}).items():
                name = first.setdefault(id(value), f"{section}.{key}") if isinstance(value, Tensor) else ""
                owner = self.ownership.owner(key) if key in self.ownership else holders.get((section, key))
                is_same_on_replicas = key in parameters or isinstance(value, DTensor)
                if owner != self.ownership.stage or not (self.is_writer or is_same_on_replicas):
                    continue
                if not isinstance(value, Tensor):
                    values[section, key] = to_cpu(_torch.tree_map_only(Tensor, whole, value))
                elif not value.is_meta:
                    tensors[name] = value
        if "optimizer_states" in checkpoint:
            places = tensor_places({"optimizer_states": checkpoint["optimizer_states"]}, [], self.parameter_names)
            tensors.update((name, state[key]) for state, key, name in places)
        return tensors, values

    def _holders_of_others(
        self, path: Path, checkpoint: Mapping[str, Any], sections: Sequence[str]
    ) -> dict[tuple[str, str], int]:
        """The first stage that has each entry that is neither a parameter nor a buffer, the same on every rank."""
        is_here = {
            (section, key): not is_meta(value)
            for section in sections
            for key, value in checkpoint.get(section, {}).items()
            if key not in self.ownership
        }
        ranks: list[Any] = [None] * dist.get_world_size()
        with waiting_for(f"all ranks to say what they hold of the checkpoint {path}"):
            dist.all_gather_object(ranks, (self.is_writer, self.ownership.stage, is_here), group=self.group)
        holders = {
            place: [stage for is_writer, stage, is_there in ranks if is_writer and is_there.get(place)]
            for place in ranks[0][2]
        }
        return {place: min(stages) for place, stages in holders.items() if stages}

    def _begin(self, path: Path, checkpoint: dict[str, Any], sections: Sequence[str], parts: list[Any]) -> None:
        """On rank 0: an empty folder with all that is not in shards."""
        complete = dict(checkpoint)
        for section in sections:
            complete[section] = copy.copy(checkpoint[section])
        for values, _ in parts:
            for (section, key), value in values.items():
                complete[section][key] = value
        if "optimizer_states" in checkpoint:
            complete["optimizer_states"] = [
                {**optimizer, "state": _merged(optimizer["state"], [states[index] for _, states in parts])}
                for index, optimizer in enumerate(checkpoint["optimizer_states"])
            ]
        names = self.parameter_names if "optimizer_states" in checkpoint else []
        replace_tensors(tensor_places(complete, sections, names), like_meta)
        folder = unfinished(path)
        remove(folder)
        folder.mkdir(parents=True)
        write_meta(folder, complete, sections, names)

    def _write_shards(self, path: Path, tensors: dict[str, Tensor]) -> None:
        writer = _Writer(unfinished(path))
        try:
            with waiting_for(f"all ranks to write the checkpoint {path}"):
                dcp.save(tensors, storage_writer=writer, process_group=self.group)
        except CheckpointException as error:
            reasons = "; ".join(f"rank {rank}: {reason!r}" for rank, (reason, _) in sorted(error.failures.items()))
            raise RuntimeError(f"could not write the checkpoint {path}: {reasons}") from error

    # -- between the ranks --------------------------------------------------------------------------------------------

    def _from_rank_0(self, path: Path, value: Any) -> Any:
        values = [value]
        with waiting_for(f"what rank 0 says of the checkpoint {path}"):
            dist.broadcast_object_list(values, 0, group=self.group)
        return values[0]

    def _on_rank_0_of_all(self, path: Path, value: Any) -> list[Any]:
        """Every rank's value on rank 0, [] elsewhere."""
        values: list[Any] | None = [None] * dist.get_world_size() if dist.get_rank() == 0 else None
        with waiting_for(f"all ranks' parts of the checkpoint {path}"):
            dist.gather_object(value, values, 0, group=self.group)
        return values or []

    def _do_on_rank_0(self, path: Path, function: Callable[[], None]) -> None:
        """Call it there, and raise everywhere what it raises."""
        error: Exception | None = None
        if dist.get_rank() == 0:
            try:
                function()
            except Exception as raised:
                error = system_error(raised) or raised
        reason = self._from_rank_0(path, repr(error) if error is not None else None)
        if reason is not None:
            raise RuntimeError(f"could not write the checkpoint {path}: {reason}") from error


class _Writer(dcp.FileSystemWriter):
    """Tells the other ranks why the system did not let it write."""

    def write_data(self, plan: Any, planner: Any) -> Any:
        try:
            return super().write_data(plan, planner)
        except RuntimeError as error:
            if (reason := system_error(error)) is None:
                raise
            raise OSError(*reason.args) from error


def _finish(path: Path) -> None:
    """Check that all is there, as files of other machines may not be, and give the folder its name."""
    read_folder(unfinished(path), weights_only=False)
    publish(path)


@lru_cache(maxsize=2)
def host_group(world: dist.ProcessGroup, timeout: timedelta, *, own: bool = False) -> dist.ProcessGroup:
    """All ranks of `world`, the default group, over a backend for host memory. All ranks must call it.

    Args:
        own: a group that is used for nothing else.
    """
    if not own and dist.get_backend(world) == "gloo":
        return world
    return new_group(None, timeout, "gloo")


def _sections(checkpoint: Mapping[str, Any]) -> list[str]:
    """The keys of state dicts that ranks have in parts: the module's, and what callbacks keep beside it."""
    return [
        key
        for key, value in checkpoint.items()
        if isinstance(value, dict)
        and (key == "state_dict" or any(is_meta(item) or isinstance(item, DTensor) for item in value.values()))
    ]


def _descriptions(states: Mapping[Any, Any]) -> dict[int, dict[str, Any]]:
    """Parameters' states with shapes for tensors. All ranks that hold slices of the same ones must call it."""
    return {
        position: {
            key: like_meta(value) if isinstance(value, Tensor) else to_cpu(_torch.tree_map_only(Tensor, whole, value))
            for key, value in state.items()
        }
        for position, state in states.items()
        if isinstance(position, int)
    }


def _merged(own: dict[Any, Any], states: Sequence[dict[int, Any]]) -> dict[Any, Any]:
    """The states of all ranks by positional id, followed by what belongs to no parameter, which is rank 0's."""
    found = {position: state for held in reversed(states) for position, state in held.items()}
    others = {key: value for key, value in own.items() if not isinstance(key, int)}
    return {**{position: found[position] for position in sorted(found)}, **others}
