"""Operands of calls outside of steps: their names, and how they get to the ranks that compute.

A rank that gives something to another one does not wait. Requests are collected, and sent together once the rank has to
wait itself, so that a loop over the norms of a hundred gradients takes few messages. Each request tells for which call
it is, and the receiver checks that it has come to the same call.
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_pipeline.partition.kept_parameters import KeptParameter
from lightning_pipeline.partition.ownership import holders_of, note_holders
from lightning_pipeline.partition.placeholder import COPY, Placeholder, TensorSpec, become, placeholder
from lightning_pipeline.partition.users_code import users_line
from lightning_pipeline.recording.module_tensors import ModuleTensors
from lightning_pipeline.runtime.direct import DirectTransport
from lightning_pipeline.runtime.tensor_meta import EVERYWHERE_BYTES, as_bytes, conform
from lightning_pipeline.runtime.transport import ExchangeRequest, ExchangeRequests

NEEDS_ONLY_SPECS = frozenset(
    (
        *("zeros_like", "ones_like", "empty_like", "full_like", "rand_like", "randn_like", "randint_like"),
        *("new_zeros", "new_ones", "new_empty", "new_full", "new_empty_strided", "new_tensor", "view_as", "expand_as"),
        *("reshape_as", "type_as", "resize_as_", "normal_", "uniform_", "random_", "exponential_", "geometric_"),
        *("cauchy_", "log_normal_", "kaiming_uniform_", "kaiming_normal_", "xavier_uniform_", "xavier_normal_"),
        *("trunc_normal_", "orthogonal_", "sparse_", "zero_", "fill_"),
    )
)
"""Functions that use only the specs of their tensors after the first one; if they draw or fill, of that one as well."""

AT_ONCE = 64
"""The number of requests to one rank that are sent without waiting for more."""


class Exchanges:
    """This rank's exchanges with the others of its pipeline.

    Attributes:
        number: of exchanges so far, the same on all ranks.
    """

    def __init__(self, direct: DirectTransport) -> None:
        self.number = 0
        self._direct = direct
        others = [rank for rank in range(direct.num_ranks) if rank != direct.rank]
        self._out: dict[int, ExchangeRequests] = {peer: ExchangeRequests() for peer in others}
        self._in: dict[int, deque[ExchangeRequest]] = {peer: deque() for peer in others}

    def share(self, call: str, own: Any = None) -> list[Any]:
        """Wait until all ranks have come to this call. Returns what each of them gives, by rank."""
        found = self.exchange(call, dict.fromkeys(self._out, own), self._in)
        return [found.get(rank, own) for rank in range(self._direct.num_ranks)]

    def from_first(self, call: str, own: Any) -> Any:
        """What the first rank gives. It does not wait, and the next exchange is numbered as this one."""
        request = ExchangeRequest(self.number, call, users_line(), own)
        if self._direct.rank:
            return self._next(0, request)
        for requests in self._out.values():
            requests.append(request)
        return own

    def exchange(self, call: str, give: dict[int, Any], hear: Iterable[int]) -> dict[int, Any]:
        """Give something to some ranks, and get something from some. All ranks must call it.

        Args:
            call: what it is for, the same on all ranks.
        """
        self.number += 1
        own = ExchangeRequest(self.number, call, users_line())
        for peer, given in give.items():
            self._out[peer].append(own._replace(given=given))
            if len(self._out[peer]) >= AT_ONCE:
                self.send()
        return {peer: self._next(peer, own) for peer in hear}

    def send(self) -> None:
        """Send the requests that were collected. It must be called before any wait for other ranks."""
        for peer, requests in self._out.items():
            if requests:
                self._direct.tell_one(peer, requests)
                self._out[peer] = ExchangeRequests()

    def _next(self, peer: int, own: ExchangeRequest) -> Any:
        self.send()
        if not self._in[peer]:
            requests = self._direct.hear_requests(peer, f"{own.call}, which every rank has to run ({own.line})")
            if type(requests) is not ExchangeRequests:
                raise own.error(
                    self._direct.name_of(self._direct.rank), f"and {self._direct.name_of(peer)} is elsewhere"
                )
            self._in[peer].extend(requests)
        found = self._in[peer].popleft()
        if (found.number, found.call) != (own.number, own.call):
            elsewhere = f"where {self._direct.name_of(peer)} runs {found.call} ({found.line})"
            raise own.error(self._direct.name_of(self._direct.rank), elsewhere)
        return found.given


Holders = tuple[int, ...] | None
"""The ranks that hold a tensor; None for all."""

_KEY = "_key"
"""The attribute of a tensor that was made in a hook."""
WINDOW_OF = "_window_of"
"""The attribute of a tensor that shares its memory with what was gathered from slices (`hooks.slices`)."""


class TensorKeys:
    """Numbers of tensors, the same on all ranks: from 0 on for those that hooks make, below 0 for the module's.

    Attributes:
        number: the key of the next tensor that is made.
    """

    def __init__(self, tensors: ModuleTensors) -> None:
        self._tensors = tensors
        self._made: WeakValueDictionary[int, Tensor] = WeakValueDictionary()
        self._held: list[Tensor] | None = None
        self.number = 0

    @property
    def are_in_slices(self) -> bool:
        """Whether replicas keep slices of parameters."""
        return self._tensors.are_in_slices

    def note(self, tensor: Tensor, holders: Holders) -> Tensor:
        """Give a key to a tensor, or placeholder, that was made just now. All ranks must call it."""
        note_holders(tensor, holders)
        if holders is not None:
            tensor.__dict__[_KEY] = self.number
            self._made[self.number] = tensor
            self.number += 1
            if self._held is not None:
                self._held.append(tensor)
        return tensor

    def note_changed(self, tensors: Iterable[Tensor]) -> None:
        """Give keys to what the module was given or has lost in mid-run, as the user may keep it. All ranks must call
        it."""
        for tensor in tensors:
            if _KEY not in tensor.__dict__:
                self.note(tensor, holders_of(tensor))

    def hold(self) -> None:
        """Keep what hooks have made until `let_go`, as another rank may still need what this one is done with."""
        self._held = list(self._made.values())

    def let_go(self) -> None:
        """Undo `hold`."""
        self._held = None

    def forget(self, tensor: Tensor) -> None:
        """Take a key back, so that no pickle of the module has it."""
        tensor.__dict__.pop(_KEY, None)

    def kept(self) -> dict[int, Tensor]:
        """What hooks have made, but for slices, that the user has kept and not all ranks hold, by its latest key.

        It may have been a part of the module for a while, as a copy of averaged weights that is validated.
        """
        return {
            key: tensor
            for key, tensor in self._made.items()
            if holders_of(tensor) is not None and tensor.__dict__.get(_KEY) == key and not isinstance(tensor, DTensor)
        }

    def copy(self, tensor: Tensor, memo: dict[int, Any]) -> Any:
        """A deep copy of a tensor or placeholder. All ranks must call it."""
        if id(tensor) not in memo:
            if type(tensor) is Placeholder:
                copied: Tensor = placeholder(tensor._pl_spec, tensor._pl_what)
            else:
                copied = copy_of(tensor, memo)
            memo[id(tensor)] = self.note(copied, holders_of(tensor))
        return memo[id(tensor)]

    def is_made(self, tensor: Tensor) -> bool:
        """Whether a hook has made a tensor, which not every rank holds."""
        key = self.key_of(tensor)
        return key is not None and key >= 0 and not isinstance(tensor, DTensor) and WINDOW_OF not in tensor.__dict__

    def versions_everywhere(self) -> dict[str, int]:
        """The versions of the module's tensors that every rank has, by name."""
        return self._tensors.versions_of_replicated()

    def key_of(self, tensor: Tensor) -> int | None:
        """The key of a tensor; None if all ranks hold it, or it has no key."""
        if holders_of(tensor) is None:
            return None
        number = self._tensors.number_of(tensor)
        if number is None and isinstance(tensor, DTensor):
            number = self._tensors.number_of_slice(tensor)
        return tensor.__dict__.get(_KEY) if number is None else -1 - number

    def tensor_of(self, key: int) -> Tensor | None:
        """The tensor of a key; None if it is gone."""
        return self._made.get(key) if key >= 0 else self._tensors.in_place(-1 - key)


def share_kept(keys: TensorKeys, exchanges: Exchanges, direct: DirectTransport, limit: int) -> None:
    """Give every rank what hooks have made and the user has kept, if it fits. All ranks must call it."""
    kept = keys.kept()
    made = {(key, TensorSpec.of(tensor), holders_of(tensor)) for key, tensor in kept.items()}
    shared = exchanges.share("what hooks have made", (limit, made))
    common = sorted(set.intersection(*(made for _, made in shared)), key=lambda one: one[0])
    for key in kept.keys() - {key for key, *_ in common}:
        if (data := kept[key].__dict__.get(COPY)) is not None:  # on the first rank alone
            _become(kept[key], data, TensorSpec.of(kept[key]))
            keys.forget(kept[key])
    if sum(spec.num_bytes for _, spec, _ in common) > min(limit for limit, _ in shared):
        return
    for key, spec, (owner, *_) in common:
        tensor = kept[key]
        data = direct.spread(tensor.detach() if owner == direct.rank else None, spec, owner)
        _become(tensor, data, spec)


def _become(tensor: Tensor, data: Tensor, spec: TensorSpec) -> None:
    """From now on every rank has this data, or none but this one has kept the tensor."""
    if type(tensor) is Placeholder:
        tensor.__dict__.pop(COPY, None)
        become(tensor, nn.Parameter(data, spec.requires_grad) if spec.is_parameter else data)
    note_holders(tensor, None)


def copy_of(tensor: Tensor, memo: dict[int, Any]) -> Any:
    """A deep copy of a tensor with data, which has no key yet."""
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(tensor.detach().clone(), tensor.requires_grad)
    window = tensor.__dict__.pop(WINDOW_OF, None)  # the copy has memory of its own
    try:
        copied = Tensor.__deepcopy__(tensor, memo)
    finally:
        if window is not None:
            tensor.__dict__[WINDOW_OF] = window
    copied.__dict__.pop(_KEY, None)
    return copied


def is_partial(values: Iterable[Any], depth: int = 0) -> bool:
    """Whether there is a tensor among some arguments that not every rank holds, or not as a whole."""
    for value in values:
        kind = type(value)
        if kind is Placeholder:
            return True
        if kind is list or kind is tuple:
            if depth < 3 and is_partial(value, depth + 1):
                return True
        elif kind is dict:
            if depth < 3 and is_partial(value.values(), depth + 1):
                return True
        elif isinstance(value, Tensor) and (
            holders_of(value) is not None or isinstance(value, (DTensor, KeptParameter)) or WINDOW_OF in value.__dict__
        ):
            return True
    return False


def computing_ranks(held: Sequence[Holders], specs: Sequence[TensorSpec], bound: Sequence[int]) -> Holders:
    """The ranks that compute a call.

    Args:
        bound: numbers of operands that are written into, or whose memory the result shares.
    """
    if bound:
        return held[bound[0]]
    partial = [slot for slot, ranks in enumerate(held) if ranks is not None]
    if not partial:
        return None
    common = set.intersection(*(set(held[slot]) for slot in partial))  # type: ignore[arg-type]
    if common:
        return tuple(sorted(common))
    if sum(specs[slot].num_bytes for slot in partial) <= EVERYWHERE_BYTES:
        return None
    return held[max(partial, key=lambda slot: (specs[slot].is_parameter, specs[slot].num_bytes))]


class _Move(NamedTuple):
    """An operand that goes from one rank to others."""

    slot: int
    spec: TensorSpec
    source: int
    targets: tuple[int, ...]

    @property
    def is_number(self) -> bool:
        """Whether it is sent within the request that its receivers get anyway."""
        return self.spec.shape.numel() == 1 and self.spec.stride is not None


class Operands:
    """Brings operands to the ranks that need them."""

    def __init__(self, direct: DirectTransport, exchanges: Exchanges) -> None:
        self._direct = direct
        self._exchanges = exchanges

    def gather(self, tensors: Sequence[Tensor], needed: Sequence[Holders], what: str) -> list[Any]:
        """The data of tensors on the ranks that need each, None elsewhere. All ranks must call it.

        Args:
            needed: the ranks that need each tensor. If there are none, all ranks get some tensor of the same spec.
        """
        moves: list[_Move] = []
        found: list[Any] = []
        for index, (tensor, ranks) in enumerate(zip(tensors, needed, strict=True)):
            held = holders_of(tensor)
            if held is not None:
                asked = range(self._direct.num_ranks) if ranks is None else ranks
                if targets := tuple(one for one in asked if one not in held):
                    moves.append(_Move(index, TensorSpec.of(tensor), held[0], targets))
            elif type(tensor) is Placeholder:
                raise RuntimeError(f"{tensor._pl_what} belongs to a step that has not ended ({users_line()})")
            is_here = type(tensor) is not Placeholder
            found.append(tensor if is_here else empty_like(tensor) if ranks == () else None)
        numbers = self._announce(what, moves, tensors) if moves else {}
        for move in moves:
            if move.source == self._direct.rank:
                if not move.is_number:
                    dense = conform(tensors[move.slot].detach(), move.spec)
                    for target in move.targets:
                        self._direct.send(dense, target)
            elif self._direct.rank in move.targets:
                found[move.slot] = self._receive(move, numbers)
        return found

    def gather_everywhere(self, tensors: Sequence[Tensor], what: str) -> list[Any]:
        """The data of tensors on every rank. All ranks must call it."""
        return self.gather(tensors, [None] * len(tensors), what)

    def _receive(self, move: _Move, numbers: dict[int, dict[int, bytes]]) -> Tensor:
        spec = move.spec
        if move.is_number:
            content = bytearray(numbers[move.source][move.slot])
            data = torch.frombuffer(content, dtype=spec.dtype).reshape(spec.shape).to(spec.device)
        else:
            data = self._direct.receive(spec, move.source)
        if spec.requires_grad:
            data.requires_grad_()  # matmul depends on it, even without autograd
            if torch.is_grad_enabled():
                data.register_hook(_refuse_gradient(users_line()))
                data = data.view_as(data)
        return data

    def _announce(self, what: str, moves: Sequence[_Move], tensors: Sequence[Tensor]) -> dict[int, dict[int, bytes]]:
        """Tell the ranks to which something goes, which check that they are at this call, and give them the numbers.

        Returns what the ranks give from which something comes.
        """
        digest = hashlib.blake2b(repr(moves).encode(), digest_size=4).hexdigest()
        give: dict[int, dict[int, bytes]] = {}
        hear: dict[int, None] = {}
        for move in moves:
            if move.source == self._direct.rank:
                for target in move.targets:
                    given = give.setdefault(target, {})
                    if move.is_number:
                        data = as_bytes(tensors[move.slot], move.spec).cpu()
                        given[move.slot] = data.numpy().tobytes()
            elif self._direct.rank in move.targets:
                hear[move.source] = None
        found = self._exchanges.exchange(f"{what} [{digest}]", give, hear)
        if not all(move.is_number for move in moves):
            self._exchanges.send()  # the tensors follow it
        return found


def empty_like(place: Tensor) -> Tensor:
    """A tensor with the spec of a placeholder, and any data."""
    spec = TensorSpec.of(place)
    assert spec.stride is not None
    made = torch.empty_strided(spec.shape, spec.stride, dtype=spec.dtype, device=spec.device)
    return made.requires_grad_(spec.requires_grad)


def set_spec(place: Tensor, spec: TensorSpec) -> None:
    """A tensor is written into. Let a placeholder have another spec, in place; a tensor with data has its own."""
    place.__dict__.pop(COPY, None)
    if type(place) is Placeholder and place._pl_spec is not spec:
        become(place, placeholder(spec, place._pl_what))


def _refuse_gradient(line: str) -> Callable[[Tensor], None]:
    def refuse(gradient: Tensor) -> None:
        raise NotImplementedError(f"gradients do not go back to another stage outside of steps ({line})")

    return refuse


def learns_everywhere(held: Sequence[Holders], tensors: Sequence[Tensor]) -> bool:
    """Whether a graph begins at tensors that all ranks have, as those of a callback's probe, or an input whose gradient
    shows what a model looks at: it is to be on all ranks, for their gradients. What comes from other ranks has none.
    """
    return any(holders is None and tensor.requires_grad for holders, tensor in zip(held, tensors, strict=True))
