"""Writes checkpoint folders from all ranks at once, each rank its own part.

all ranks    tell what they hold, so that one of them writes each entry
rank 0       makes a draft folder with meta.pt, which has all that is not in shards
all ranks    write their shards; with AsyncCheckpointIO from copies, in a thread, while training goes on
rank 0       checks that all files are there, and gives the folder its name
"""

from __future__ import annotations

import atexit
import copy
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import timedelta
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, TypeVar

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_pipeline import _torch
from lightning_pipeline.engine.slices import whole
from lightning_pipeline.partition.ownership import Ownership, absent_state_expected, names_of_tensors
from lightning_pipeline.runtime.backends import new_group
from lightning_pipeline.runtime.direct import to_cpu
from lightning_pipeline.runtime.failure import waiting_for

from .files import replacing, system_error
from .folder import like_meta, read_folder, replace_tensors, tensor_places, write_meta
from .optimizer_layout import OptimizerLayout
from .state import is_meta

T = TypeVar("T")

# -- what a rank holds ------------------------------------------------------------------------------------------------


def module_state_in_parts(module: nn.Module) -> dict[str, Any]:
    """``module.state_dict()`` with all keys on every rank; tensors of other stages are on the meta device.

    Tied entries are one tensor.
    """
    with absent_state_expected():
        state: dict[str, Any] = module.state_dict()
    for names in names_of_tensors(module):
        saved = [name for name in names if name in state]
        state.update((name, state[saved[0]]) for name in saved[1:])
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
    """The save that is under way, in a thread. There is one at a time."""

    def __init__(self) -> None:
        self._outcome: Future[None] | None = None

    def start(self, save: Callable[[], None]) -> None:
        """Call `save` in a thread. The one before must have been waited for."""
        assert self._outcome is None
        outcome: Future[None] = Future()
        self._outcome = outcome

        def run() -> None:
            try:
                save()
                outcome.set_result(None)
            except BaseException as error:
                outcome.set_exception(error)

        # A daemon, as a save whose other ranks are gone would keep this process until its timeout; one that has not
        # been abandoned is waited for at exit.
        threading.Thread(target=run, name="pipeline-save", daemon=True).start()
        atexit.register(self.wait)

    def wait(self) -> None:
        """Wait until it has ended; raises what it raised, once."""
        outcome = self._outcome
        if outcome is not None:
            try:
                outcome.result()
            finally:
                self.abandon()

    def abandon(self) -> None:
        """Forget it, as after a failure of the run, whose error counts more than that of a save."""
        atexit.unregister(self.wait)
        self._outcome = None


@dataclass(frozen=True, kw_only=True)
class FolderWriter:
    """Writes checkpoint folders. Every rank of the world has one.

    Parameters and optimizer state are the same on all replicas that hold them, which divide the writing; buffers are
    those of the first replica.

    Args:
        parameter_names: of each optimizer, by positional id.
        is_writer: this rank's pipeline is the first.
        group: all ranks, over a backend for host memory.
        background: writes the shards while the caller goes on, with a group that nobody else uses; None to return when
            all is written.
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
            RuntimeError: on all ranks, if it could not be written; the message gives the reason.
        """
        if "://" in str(path):
            raise ValueError(
                f"save_distributed_checkpoint=True writes to file systems that all ranks mount, got {path}: choose "
                f"such a path, or leave it out for one plain file"
            )
        path = Path(path).absolute()
        sections: list[str] = self._from_rank_0(path, _sections(checkpoint))
        tensors, values = self._given(path, checkpoint, sections)
        states = [_descriptions(optimizer.get("state", {})) for optimizer in checkpoint.get("optimizer_states", [])]
        parts = self._gathered_on_rank_0(path, (values, states))
        with ExitStack() as draft:  # of rank 0
            folder = self._on_rank_0(path, lambda: self._begin(draft, path, checkpoint, sections, parts))
            if self.background is not None:  # meanwhile the tensors may change
                tensors = {name: tensor.detach().clone() for name, tensor in tensors.items()}
            finish = partial(self._finish, draft.pop_all(), path, folder, tensors)
        if self.background is None:
            finish()
        else:
            self.background.start(finish)

    def _given(
        self, path: Path, checkpoint: Mapping[str, Any], sections: Sequence[str]
    ) -> tuple[dict[str, Tensor], dict[tuple[str, str], Any]]:
        """What this rank writes: tensors by name, tied ones by their first, and other entries by their place."""
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

    def _begin(
        self, draft: ExitStack, path: Path, checkpoint: dict[str, Any], sections: Sequence[str], parts: list[Any]
    ) -> Path:
        """On rank 0: make a new folder, with all that is not in shards."""
        complete = dict(checkpoint)
        for section in sections:
            complete[section] = copy.copy(checkpoint[section])
        for values, _ in parts:
            for (section, key), value in values.items():
                complete[section][key] = value
        if "optimizer_states" in checkpoint:
            complete["optimizer_states"] = [
                {**optimizer, "state": _merged(optimizer["state"], [states[index] for _, states in parts])}
                if optimizer
                else optimizer
                for index, optimizer in enumerate(checkpoint["optimizer_states"])
            ]
        names = self.parameter_names if "optimizer_states" in checkpoint else []
        replace_tensors(tensor_places(complete, sections, names), like_meta)
        folder = draft.enter_context(replacing(path))
        folder.mkdir()
        write_meta(folder, complete, sections, names)
        return folder

    def _finish(self, draft: ExitStack, path: Path, folder: Path, tensors: dict[str, Tensor]) -> None:
        """Write the shards, and give the folder its name."""
        from .shards import write_together

        def publish() -> None:
            read_folder(folder, weights_only=False)  # files that other machines have written may not be there
            draft.close()

        with draft:
            with waiting_for(f"all ranks to write the checkpoint {path}"):
                write_together(path, folder, tensors, self.group)
            self._on_rank_0(path, publish)

    # -- between the ranks --------------------------------------------------------------------------------------------

    def _from_rank_0(self, path: Path, value: Any) -> Any:
        values = [value]
        with waiting_for(f"what rank 0 says of the checkpoint {path}"):
            dist.broadcast_object_list(values, 0, group=self.group)
        return values[0]

    def _gathered_on_rank_0(self, path: Path, value: Any) -> list[Any]:
        """Every rank's value on rank 0, [] elsewhere."""
        values: list[Any] | None = [None] * dist.get_world_size() if dist.get_rank() == 0 else None
        with waiting_for(f"all ranks' parts of the checkpoint {path}"):
            dist.gather_object(value, values, 0, group=self.group)
        return values or []

    def _on_rank_0(self, path: Path, function: Callable[[], T]) -> T:
        """What the function returns on rank 0, on all ranks; if it raises there, all ranks raise."""
        result, error = None, None
        if dist.get_rank() == 0:
            try:
                result = function()
            except Exception as raised:
                error = system_error(raised) or raised
        result, reason = self._from_rank_0(path, (result, repr(error) if error is not None else None))
        if reason is not None:
            raise RuntimeError(f"could not write the checkpoint {path}: {reason}") from error
        return result


@lru_cache(maxsize=2)
def host_group(world: dist.ProcessGroup, timeout: timedelta, *, own: bool = False) -> dist.ProcessGroup:
    """All ranks of `world`, the default group, over a backend for host memory. All ranks must call it."""
    if not own and dist.get_backend(world) == "gloo":
        return world
    return new_group(None, timeout, "gloo")


def _sections(checkpoint: Mapping[str, Any]) -> list[str]:
    """The keys of state dicts of which ranks have parts: the module's, and those of callbacks' copies."""
    return [
        key
        for key, value in checkpoint.items()
        if isinstance(value, dict)
        and (key == "state_dict" or any(is_meta(item) or isinstance(item, DTensor) for item in value.values()))
    ]


def _descriptions(states: Mapping[Any, Any]) -> dict[int, dict[str, Any]]:
    """Parameters' states with meta tensors. All ranks that hold slices of the same ones must call it."""
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
