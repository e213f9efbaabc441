"""Operands of operations outside steps, their names, and their way to the rank that computes.

What ranks give one another for calls outside of steps.

A rank that gives something does not wait. It puts it by, and sends it together with what follows once it has to wait
for others itself, so that a loop over the norms of a hundred gradients takes few messages. Each item says which call it
is for, and the receiver checks that it has come to the same one.
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn

from lightning_pipeline.partition.ownership import holders_of, note_holders
from lightning_pipeline.partition.placeholder import Placeholder, TensorSpec
from lightning_pipeline.partition.users_line import users_line
from lightning_pipeline.recording.module_tensors import ModuleTensors
from lightning_pipeline.runtime.direct import DirectTransport
from lightning_pipeline.runtime.tensor_meta import as_bytes, conform
from lightning_pipeline.runtime.transport import ExchangeRequest, ExchangeRequests, Transport

AT_ONCE = 64
"""As many items for one rank are sent without waiting for more."""


class Exchanges:
    """This rank's exchanges with the others of its pipeline.

    Attributes:
        number: of exchanges so far, the same on all ranks.
    """

    def __init__(self, transport: Transport) -> None:
        self.number = 0
        self._transport = transport
        others = [stage for stage in range(transport.num_stages) if stage != transport.stage]
        self._out: dict[int, ExchangeRequests] = {peer: ExchangeRequests() for peer in others}
        self._in: dict[int, deque[ExchangeRequest]] = {peer: deque() for peer in others}

    def meet(self, call: str, line: str) -> None:
        """Wait until all ranks have come to this call."""
        self.exchange(call, line, dict.fromkeys(self._out), self._in)

    def exchange(self, call: str, line: str, give: dict[int, Any], hear: Iterable[int]) -> dict[int, Any]:
        """Give something to some ranks, and get something of some. All ranks must call it.

        Args:
            call: what it is for, alike on all ranks.
            line: of the user's code.
        """
        self.number += 1
        own = ExchangeRequest(self.number, call, line)
        for peer, given in give.items():
            self._out[peer].append(own._replace(given=given))
            if len(self._out[peer]) >= AT_ONCE:
                self.send()
        return {peer: self._next(peer, own) for peer in hear}

    def send(self) -> None:
        """Send what was put by. It must be called before any wait for other ranks."""
        for peer, told in self._out.items():
            if told:
                self._transport.send_object(told, peer)
                self._out[peer] = ExchangeRequests()

    def _next(self, peer: int, own: ExchangeRequest) -> Any:
        self.send()
        if not self._in[peer]:
            told = self._transport.recv_object(peer, ExchangeRequests.__name__)
            if type(told) is not ExchangeRequests:
                raise own.error(self._transport.stage, f"and stage {peer} is elsewhere")
            self._in[peer].extend(told)
        found = self._in[peer].popleft()
        if (found.number, found.call) != (own.number, own.call):
            raise own.error(self._transport.stage, f"where stage {peer} runs {found.call} ({found.line})")
        return found.given


Holders = tuple[int, ...] | None
"""The ranks that hold a tensor; None for all."""

_KEY = "_key"
"""The attribute of a tensor that was made in a hook."""


class TensorKeys:
    """Numbers, alike on all ranks, of tensors that hooks make: from 0 on; and of the module's tensors: below 0.

    Args:
        tensors: the module's.
    """

    def __init__(self, tensors: ModuleTensors) -> None:
        self._tensors = tensors
        self._made: WeakValueDictionary[int, Tensor] = WeakValueDictionary()
        self._held: list[Tensor] | None = None
        self._num_made = 0

    def note(self, tensor: Tensor, holders: Holders) -> Tensor:
        """Take note of a tensor, or its placeholder, that was made just now. All ranks must call it."""
        note_holders(tensor, holders)
        if holders is not None:
            tensor.__dict__[_KEY] = self._num_made
            self._made[self._num_made] = tensor
            self._num_made += 1
            if self._held is not None:
                self._held.append(tensor)
        return tensor

    def hold(self) -> None:
        """Keep what hooks have made until `let_go`: another rank may need what this one is done with."""
        self._held = list(self._made.values())

    def let_go(self) -> None:
        """Keep no more than others do."""
        self._held = None

    def kept(self) -> dict[int, Tensor]:
        """What hooks have made that is still there, and that some ranks hold, by its latest key."""
        return {key: tensor for key, tensor in self._made.items() if self.key_of(tensor) == key}

    def versions_everywhere(self) -> dict[str, int]:
        """The versions of the module's tensors that every rank has, by name."""
        return self._tensors.versions_of_replicated()

    def key_of(self, tensor: Tensor) -> int | None:
        """The key of a tensor; None where all ranks hold it, or it was not noted."""
        if holders_of(tensor) is None:
            return None
        number = self._tensors.number_of(tensor)
        return tensor.__dict__.get(_KEY) if number is None else -1 - number

    def tensor_of(self, key: int) -> Tensor | None:
        """The tensor of a key; None where it is gone."""
        return self._made.get(key) if key >= 0 else self._tensors.tensors[-1 - key]


def copy_of(tensor: Tensor, memo: dict[int, Any]) -> Any:
    """A deep copy of a tensor that is here, which has no key yet."""
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(tensor.detach().clone(), tensor.requires_grad)
    copied = Tensor.__deepcopy__(tensor, memo)
    copied.__dict__.pop(_KEY, None)
    return copied


class Operands:
    """Brings operands to the ranks that need them.

    Args:
        direct: to the other ranks.
        num_ranks: of the pipeline.
    """

    def __init__(self, direct: DirectTransport, num_ranks: int, exchanges: Exchanges) -> None:
        self._direct = direct
        self._num_ranks = num_ranks
        self._exchanges = exchanges

    def gather(self, tensors: Sequence[Tensor], needed: Sequence[Holders], what: str) -> list[Any]:
        """The data of tensors on the ranks that need each, None elsewhere. All ranks must call it.

        Args:
            needed: the ranks that need each; of what none needs, all get a tensor of the same spec.
            what: the call.
        """
        rank = self._direct.rank
        moves = []
        for index, (tensor, ranks) in enumerate(zip(tensors, needed, strict=True)):
            held = holders_of(tensor)
            if type(tensor) is Placeholder and held is None:
                raise RuntimeError(f"{tensor.what} belongs to a step that has not ended ({users_line()})")
            asked = range(self._num_ranks) if ranks is None else ranks
            targets = [one for one in asked if held is not None and one not in held]
            if targets and held is not None:
                moves.append((index, held[0], targets))
        arrived: dict[int, Tensor] = {}
        numbers = (
            self._meet(
                what,
                [(TensorSpec.of(tensors[index]), *move) for index, *move in moves],
                [tensors[index].detach() if source == rank else None for index, source, _ in moves],
            )
            if moves
            else {}
        )
        for place, (index, source, targets) in enumerate(moves):
            spec = TensorSpec.of(tensors[index])
            if source == rank:
                if not _is_number(spec):
                    dense = conform(tensors[index].detach(), spec)
                    for target in targets:
                        self._direct.send(dense, target)
            elif rank in targets:
                is_told = _is_number(spec)
                data = _number_of(numbers[source][place], spec) if is_told else self._direct.receive(spec, source)
                if spec.requires_grad:
                    data.requires_grad_()  # matmul goes by it, even where no gradients are
                    if torch.is_grad_enabled():
                        data.register_hook(_refuse_gradient(users_line()))
                        data = data.view_as(data)
                arrived[index] = data
        found: list[Any] = []
        for index, tensor in enumerate(tensors):
            if index in arrived or type(tensor) is not Placeholder:
                found.append(arrived.get(index, tensor))
            else:
                found.append(empty_like(tensor) if needed[index] == () else None)
        return found

    def _meet(self, what: str, moves: Sequence[Any], own: Sequence[Tensor | None]) -> dict[int, Any]:
        """Tell the ranks to which something goes, which check that they are at this call, and give them numbers.
        Returns what the ranks give from which something comes.

        Args:
            moves: the spec, the source and the targets of each.
            own: each where it is given from here.
        """
        digest = hashlib.blake2b(repr(moves).encode(), digest_size=4).hexdigest()
        give: dict[int, dict[int, bytes]] = {}
        hear: dict[int, None] = {}
        for place, ((spec, source, targets), tensor) in enumerate(zip(moves, own, strict=True)):
            if tensor is not None:
                for target in targets:
                    given = give.setdefault(target, {})
                    if _is_number(spec):
                        given[place] = as_bytes(tensor, spec).numpy().tobytes()
            elif self._direct.rank in targets:
                hear[source] = None
        found = self._exchanges.exchange(f"{what} [{digest}]", users_line(), give, hear)
        if not all(_is_number(spec) for spec, _, _ in moves):
            self._exchanges.send()  # before what follows it
        return found


def empty_like(place: Tensor) -> Tensor:
    """A tensor of the same spec, with whatever data."""
    spec = TensorSpec.of(place)
    assert spec.stride is not None
    made = torch.empty_strided(spec.shape, spec.stride, dtype=spec.dtype, device=spec.device)
    return made.requires_grad_(spec.requires_grad)


def _is_number(spec: TensorSpec) -> bool:
    """Whether it fits into the message that its receivers get anyway."""
    return spec.shape.numel() == 1 and spec.stride is not None


def _number_of(content: bytes, spec: TensorSpec) -> Tensor:
    return torch.frombuffer(bytearray(content), dtype=spec.dtype).reshape(spec.shape).to(spec.device)


def _refuse_gradient(line: str) -> Callable[[Tensor], None]:
    def refuse(gradient: Tensor) -> None:
        raise NotImplementedError(f"gradients do not go back to another stage outside of steps ({line})")

    return refuse
