"""Operands of calls outside of steps, on their way to the ranks that compute."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_pipeline.partition.ownership import holders_of
from lightning_pipeline.partition.placeholder import Look, Placeholder
from lightning_pipeline.partition.users_line import users_line
from lightning_pipeline.runtime.direct import Direct
from lightning_pipeline.runtime.exchanges import Exchanges
from lightning_pipeline.runtime.packing import as_bytes
from lightning_pipeline.runtime.tensor_keys import Holders
from lightning_pipeline.runtime.tensor_meta import conform


class Operands:
    """Brings operands to the ranks that need them.

    Args:
        direct: to the other ranks.
        num_ranks: of the pipeline.
    """

    def __init__(self, direct: Direct, num_ranks: int, exchanges: Exchanges) -> None:
        self._direct = direct
        self._num_ranks = num_ranks
        self._exchanges = exchanges

    def gather(self, tensors: Sequence[Tensor], needed: Sequence[Holders], what: str) -> list[Any]:
        """The data of tensors on the ranks that need each, None elsewhere. All ranks must call it.

        Args:
            needed: the ranks that need each; of what none needs, all get a tensor of the same looks.
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
                [(Look.of(tensors[index]), *move) for index, *move in moves],
                [tensors[index].detach() if source == rank else None for index, source, _ in moves],
            )
            if moves
            else {}
        )
        for place, (index, source, targets) in enumerate(moves):
            look = Look.of(tensors[index])
            if source == rank:
                if not _is_number(look):
                    dense = conform(tensors[index].detach(), look)
                    for target in targets:
                        self._direct.send(dense, target)
            elif rank in targets:
                is_told = _is_number(look)
                data = _number_of(numbers[source][place], look) if is_told else self._direct.receive(look, source)
                if look.requires_grad:
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
            moves: the look, the source and the targets of each.
            own: each where it is given from here.
        """
        digest = hashlib.blake2b(repr(moves).encode(), digest_size=4).hexdigest()
        give: dict[int, dict[int, bytes]] = {}
        hear: dict[int, None] = {}
        for place, ((look, source, targets), tensor) in enumerate(zip(moves, own, strict=True)):
            if tensor is not None:
                for target in targets:
                    given = give.setdefault(target, {})
                    if _is_number(look):
                        given[place] = as_bytes(tensor, look).numpy().tobytes()
            elif self._direct.rank in targets:
                hear[source] = None
        found = self._exchanges.exchange(f"{what} [{digest}]", users_line(), give, hear)
        if not all(_is_number(look) for look, _, _ in moves):
            self._exchanges.send()  # before what follows it
        return found


def empty_like(place: Tensor) -> Tensor:
    """A tensor of the same looks, with whatever data."""
    look = Look.of(place)
    assert look.stride is not None
    made = torch.empty_strided(look.shape, look.stride, dtype=look.dtype, device=look.device)
    return made.requires_grad_(look.requires_grad)


def _is_number(look: Look) -> bool:
    """Whether it fits into the message that its receivers get anyway."""
    return look.shape.numel() == 1 and look.stride is not None


def _number_of(content: bytes, look: Look) -> Tensor:
    return torch.frombuffer(bytearray(content), dtype=look.dtype).reshape(look.shape).to(look.device)


def _refuse_gradient(line: str) -> Callable[[Tensor], None]:
    def refuse(gradient: Tensor) -> None:
        raise NotImplementedError(f"gradients do not go back to another stage outside of steps ({line})")

    return refuse
