"""What ranks give one another for calls outside of steps.

A rank that gives something does not wait. It puts it by, and sends it together with what follows once it has to wait
for others itself, so that a loop over the norms of a hundred gradients takes few messages. Each item says which call it
is for, and the receiver checks that it has come to the same one.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import Any

from lightning_pipeline.runtime.messages import Asked, Told
from lightning_pipeline.runtime.transport import Transport

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
        self._out: dict[int, Told] = {peer: Told() for peer in others}
        self._in: dict[int, deque[Asked]] = {peer: deque() for peer in others}

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
        own = Asked(self.number, call, line)
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
                self._out[peer] = Told()

    def _next(self, peer: int, own: Asked) -> Any:
        self.send()
        if not self._in[peer]:
            told = self._transport.recv_object(peer, Told.__name__)
            if type(told) is not Told:
                raise RuntimeError(own.of(self._transport.stage, f"and stage {peer} is elsewhere"))
            self._in[peer].extend(told)
        found = self._in[peer].popleft()
        if (found.number, found.call) != (own.number, own.call):
            raise RuntimeError(own.of(self._transport.stage, f"where stage {peer} runs {found.call} ({found.line})"))
        return found.given
