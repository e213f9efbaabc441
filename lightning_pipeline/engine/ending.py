"""The end of a step: ranks verify that they ran the same code, and receive the values that the user kept."""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_pipeline.engine.microbatch import Microbatch, digests
from lightning_pipeline.partition.kept_parameters import KeptParameter
from lightning_pipeline.partition.memory import begun_at, copied
from lightning_pipeline.partition.placeholder import Placeholder, TensorSpec, become
from lightning_pipeline.partition.users_code import users_line
from lightning_pipeline.recording.kept_views import ViewOfModule, share_memory_again, view_of_module
from lightning_pipeline.recording.recording import Recording
from lightning_pipeline.runtime.direct import DirectTransport
from lightning_pipeline.runtime.failure import waiting_for
from lightning_pipeline.runtime.tensor_meta import as_bytes, from_bytes, num_bytes, places
from lightning_pipeline.runtime.transport import Transport

CAPACITY = 1024
"""Number of bytes of values in the first message of the exchange."""
_SMALL = 256
"""Largest size in bytes of a value that is packed with others."""
_ROOM = 256
"""Largest number of values that a rank at the end of its step sends beyond those of `check_on_the_way`."""


@dataclass(slots=True)
class Wanted:
    """A value to which the user's code still refers when the step ends.

    Attributes:
        begin: where one process has it in memory (`memory.beginning`).
    """

    place: Placeholder
    spec: TensorSpec
    owner: int
    data: Tensor | None
    begin: int


def wanted_values(
    microbatches: Sequence[Microbatch], owner_of: dict[int, dict[int, int]], first_stage: int
) -> list[Wanted]:
    """The values to which the user's code still refers.

    Args:
        owner_of: for each micro-batch, the rank that computed each value.
        first_stage: that stage's rank.
    """
    found = []
    for state in microbatches:
        for value in list(state.places):
            place = state.places[value]
            if type(place) is not Placeholder or place._pl_recording is not state.recording:
                continue  # a later micro-batch has modified it in place
            # Three references are our own: the table's, this variable's, and that of the call to getrefcount.
            # One more is that of `written`: the first rank needs what it has not written into the loader's own tensors,
            # as it does if it has the first stage, too.
            in_place = owner_of[state.index][value] == first_stage == 0
            own = 3 + (in_place and any(place is one for one in state.written.values()))
            if sys.getrefcount(place) > own:
                found.append(_wanted(place, state, value, owner_of))
        twins = [] if state.recording is None else state.recording.twins
        for number in range(len(twins)):
            place = twins[number]
            if type(place) is Placeholder and place._pl_recording is state.recording and sys.getrefcount(place) > 3:
                found.append(_wanted(place, state, place._pl_value, owner_of))
    return found


def views_of_module(wanted: Sequence[Wanted]) -> list[ViewOfModule]:
    """Those of the values that are views of the module's tensors. Slices of parameters have none that last."""
    found = [view_of_module(one.place._pl_recording, one.place) for one in wanted]
    return [one for one in found if one is not None and not isinstance(one.of, DTensor | KeptParameter)]


def _wanted(place: Placeholder, state: Microbatch, value: int, owner_of: dict[int, dict[int, int]]) -> Wanted:
    owner, data = owner_of[state.index][value], state.kept.get(value)
    return Wanted(place, place._pl_spec, owner, data, state.beginning_of(value))


def end_step(
    microbatches: Sequence[Microbatch],
    wanted: list[Wanted],
    transport: Transport | None,
    direct: DirectTransport | None,
    rank: int,
    extra: Sequence[float],
) -> list[list[float]]:
    """Compare what ran, send wanted values to every rank, and gather `extra`. All ranks must call it.

    Returns:
        Every rank's `extra`.

    Raises:
        RuntimeError: the ranks did not run the same; the message names the first call that differs.
    """
    if transport is None or direct is None:
        return [list(extra)]
    by_host: list[Wanted] = []
    by_device: list[Wanted] = []
    for one in wanted:
        (by_device if transport.can_share_on_device and _is_on_device(one.spec) else by_host).append(one)
    small = [one for one in by_host if _is_small(one.spec)]
    specs = [one.spec for one in small]
    packed = torch.zeros(num_bytes(specs), dtype=torch.uint8)
    for one, place in zip(small, places(specs), strict=True):
        if one.owner == rank:
            assert one.data is not None
            packed[place] = as_bytes(one.data, one.spec)
    first, rest = packed[:CAPACITY], packed[CAPACITY:]
    row = torch.zeros(CAPACITY // 8 + 1 + len(extra), dtype=torch.float64)
    row.view(torch.uint8)[: len(first)] = first
    row[CAPACITY // 8] = digest_of(microbatches, wanted)
    if extra:
        row[CAPACITY // 8 + 1 :] = torch.tensor(list(extra), dtype=torch.float64)
    rows = transport.all_gather_vector(row, "the end of the step")
    digests = rows[:, CAPACITY // 8].tolist()
    if len(set(digests)) > 1:
        _compare(_what_ran(microbatches), transport)
    parts = [rows.view(torch.uint8)[:, :CAPACITY][:, : len(first)]]
    if len(rest):
        more = transport.all_gather_vector(rest.view(torch.float64), "values of the step")
        parts.append(more.view(torch.uint8))
    table = torch.cat(parts, 1)
    for one, place in zip(small, places(specs), strict=True):
        if one.owner != rank:
            one.data = from_bytes(table[one.owner, place].clone(), one.spec).to(one.spec.device)
    for one in by_host:
        if not _is_small(one.spec):
            one.data = direct.spread(one.data, one.spec, one.owner)
    _share_on_device(by_device, transport, rank)
    for one in wanted:
        assert one.data is not None
        with torch.no_grad():
            # A copy, as the stage's graph may have saved the tensor that it computed.
            data = copied(one.data) if one.owner == rank else begun_at(one.data.detach(), one.begin)
            asks = one.spec.requires_grad and one.spec.is_leaf
            become(one.place, nn.Parameter(data, asks) if one.spec.is_parameter else data.requires_grad_(asks))
    for state in microbatches:
        if state.recording is not None and state.recording.kept_views:
            share_memory_again(state.recording)
    return rows[:, CAPACITY // 8 + 1 :].tolist()


def _share_on_device(wanted: Sequence[Wanted], transport: Transport, rank: int) -> None:
    """Send values to every rank without a wait for the device that computes them."""
    small = [one for one in wanted if _is_small(one.spec)]
    specs = [one.spec for one in small]
    if small:
        packed = torch.zeros(num_bytes(specs), dtype=torch.uint8, device=transport.device)
        for one, place in zip(small, places(specs), strict=True):
            if one.owner == rank:
                assert one.data is not None
                packed[place] = as_bytes(one.data, one.spec)
        table = transport.all_gather_on_device(packed, "values of the step")
        for one, place in zip(small, places(specs), strict=True):
            if one.owner != rank:
                one.data = from_bytes(table[one.owner, place].clone(), one.spec)
    for one in wanted:
        if not _is_small(one.spec):
            one.data = transport.spread_on_device(one.data, one.spec, one.owner)


def check_on_the_way(
    microbatches: Sequence[Microbatch], current: Recording, transport: Transport | None, then: str
) -> None:
    """Compare the calls so far, before values of them are sent, which a rank that ran others would take for its own.

    All ranks must call it. A rank that has come to the end of its step instead is told as well.

    Args:
        current: of the micro-batch that ranks are at.
        then: what comes next, for errors.

    Raises:
        RuntimeError: the ranks did not run the same; the message names the first call that differs.
    """
    if transport is None:
        return
    made = hashlib.blake2b(current.event.digest + then.encode(), digest_size=6)
    row = torch.zeros(CAPACITY // 8 + 1, dtype=torch.float64)
    row[CAPACITY // 8] = float(int.from_bytes(made.digest(), "little"))
    rows = transport.all_gather_vector(row, f"what ranks ran (this one {then}: {users_line()})", room=_ROOM)
    if len(set(rows[:, CAPACITY // 8].tolist())) > 1:
        own = _what_ran([state for state in microbatches if state.recording is not None])
        place = next(place for place, state in enumerate(microbatches) if state.recording is current)
        own[place][0].append((made.digest(), then, users_line(), current.event.num_captured))
        _compare(own, transport)


def _compare(own: list[Any], transport: Transport) -> NoReturn:
    told = [transport.broadcast_object(own, rank, "what a rank ran") for rank in range(transport.num_stages)]
    _tell_difference(told, transport.name_of)


def _is_on_device(spec: TensorSpec) -> bool:
    return spec.device.type not in ("cpu", "meta") and spec.stride is not None


def _is_small(spec: TensorSpec) -> bool:
    return spec.num_bytes <= _SMALL and spec.stride is not None


def digest_of(microbatches: Sequence[Microbatch], wanted: Sequence[Wanted], before: float | None = None) -> float:
    """Digest of the events that ran and of the wanted values; a float, as it is gathered with other numbers.

    Args:
        before: digest of earlier unchecked steps, to be included.
    """
    made = hashlib.blake2b(repr(before).encode(), digest_size=6)
    for state in microbatches:
        assert state.recording is not None
        made.update(state.recording.event.digest)
        made.update(repr(digests(state.contents)).encode())
    for one in wanted:
        made.update(repr((one.place._pl_value, one.spec)).encode())
    return float(int.from_bytes(made.digest(), "little"))


_WAY_OUT = (
    "Every rank runs the whole step, and has to come to the same: draw random numbers from global generators, or from "
    "own ones seeded alike, sort what comes from sets, whose order is another in each process, and let nothing depend "
    "on the rank or on the clock"
)


def check_alike(microbatches: Sequence[Microbatch], wanted: Sequence[Wanted], group: dist.ProcessGroup) -> None:
    """Compare what ran with the ranks of a group that share sequences. All of them must call it.

    Args:
        group: carries tensors on the CPU.

    Raises:
        RuntimeError: they did not run the same; the message names the first call that differs.
    """
    size = dist.get_world_size(group)
    own = torch.tensor([digest_of(microbatches, wanted)], dtype=torch.float64)
    digests = [torch.empty_like(own) for _ in range(size)]
    with waiting_for("the end of the step of ranks that share its sequences"):
        dist.all_gather(digests, own, group=group)
        if len({float(digest) for digest in digests}) > 1:
            told: list[Any] = [None] * size
            dist.all_gather_object(told, _what_ran(microbatches), group=group)
            _tell_difference(told, "context-parallel rank {}".format)


def _what_ran(microbatches: Sequence[Microbatch]) -> list[Any]:
    """The events of each micro-batch, and digests of what they captured."""
    own = []
    for state in microbatches:
        assert state.recording is not None
        events = [(event.digest, event.name, event.line, event.num_captured) for event in state.recording.event.path()]
        own.append((events, digests(state.contents)))
    return own


def _tell_difference(told: Sequence[list[Any]], name_of: Callable[[int], str]) -> NoReturn:
    """Find the first difference between what ranks ran, and raise an error that names it, and them by `name_of`."""
    for index, ran in enumerate(zip(*told, strict=False)):
        paths = [path for path, _ in ran]
        for number in range(max(map(len, paths))):
            found = [path[number] if number < len(path) else (b"", "nothing more", "its end", 0) for path in paths]
            if len({digest for digest, *_ in found}) > 1:
                shown = "; ".join(
                    f"{name_of(rank)} ran {name} at {line}" for rank, (_, name, line, _) in enumerate(found)
                )
                raise RuntimeError(f"the ranks did not run the same code in micro-batch {index}: {shown}. {_WAY_OUT}")
        for place, taken in enumerate(zip(*(taken for _, taken in ran), strict=False)):
            if len(set(taken)) > 1:
                users = (f"{name} at {line}" for _, name, line, end in paths[0] if place < end)
                user = next(users, "a generator of its own, with a seed that is another one on each,")
                raise RuntimeError(
                    f"the ranks did not compute with the same numbers in micro-batch {index}: the first call that was "
                    f"given others is {user}. {_WAY_OUT}"
                )
    raise RuntimeError("the ranks keep different values of a step: something in it depends on the rank")
