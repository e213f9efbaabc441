"""Objects and small vectors between the stages of a pipeline, by way of host memory."""

from __future__ import annotations

import pickle
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_pipeline.partition.own_device import dumps
from lightning_pipeline.runtime.backend_rules import flat
from lightning_pipeline.runtime.endpoint import Endpoint, PendingReceive

FRAME = 1024
"""Bytes of an object's first message, its length included: most need no second one."""
_LENGTH = 8  # bytes
CONTROL_WINDOW = 64  # objects to one peer that may be underway before the oldest is waited for


class Asked(NamedTuple):
    """A stage is about to exchange tensors with all others, for a call of the user's outside of steps."""

    number: int
    call: str
    line: str
    given: Any = None

    def of(self, stage: int, elsewhere: str) -> str:
        return (
            f"stage {stage} runs {self.call} ({self.line}), which takes data of another stage, and this is not run by "
            f"all of them ({elsewhere}): let every rank run the line, as without `if self.global_rank == 0` or "
            f"rank_zero_only"
        )


class Told(list[Asked]):
    """What a stage gives to another one, for each call."""


class Messages:
    """What the stages of a pipeline tell one another beside tensors.

    Args:
        stage: this stage, of `num_stages`.
    """

    def __init__(self, stage: int, num_stages: int) -> None:
        self.stage = stage
        self.num_stages = num_stages
        self._control: dict[int, Endpoint] = {}
        self._reads: dict[int, Endpoint] = {}

    def send_object(self, obj: Any, peer: int) -> None:
        """Pickle `obj` and send it without waiting, in order with the other objects to `peer`."""
        self._send_bytes(dumps(obj), peer)

    def recv_object(self, peer: int, what: str) -> Any:
        """The next object from `peer`. `what` names it in errors."""
        endpoint = self._control[peer]
        frame = endpoint.receive(torch.empty(FRAME, dtype=torch.uint8), what).wait(what).numpy().tobytes()
        size = int.from_bytes(frame[:_LENGTH], "little")
        payload = frame[_LENGTH : _LENGTH + size]
        if size > len(payload):
            rest = endpoint.receive(torch.empty(size - len(payload), dtype=torch.uint8), what).wait(what)
            payload += rest.numpy().tobytes()
        found = pickle.loads(payload)
        if type(found) is Told and what != Told.__name__:
            raise RuntimeError(found[0].of(peer, f"stage {self.stage} waits for {what}"))
        return found

    def broadcast_object(self, obj: Any, source: int, what: str) -> Any:
        """`obj` of the stage `source`, on every stage. What the other stages pass is ignored."""
        if self.stage != source:
            return self.recv_object(source, what)
        payload = dumps(obj)
        for peer in self._control:
            self._send_bytes(payload, peer)
        return obj

    def all_gather_vector(self, values: Tensor, what: str) -> Tensor:
        """Every stage's `values` (float64, [n], the same n everywhere), as [num_stages, n] on the CPU."""
        # Point to point rather than a collective: an error then names the peer, and none is left running at exit.
        values = values.detach().to("cpu", torch.float64, copy=True)
        gathered = values.new_empty(self.num_stages, len(values))
        gathered[self.stage] = values
        pending = [endpoint.receive(gathered[peer], what) for peer, endpoint in self._control.items()]
        for endpoint in self._control.values():
            endpoint.send(values)
        for receive in pending:
            receive.wait(what)
        return gathered

    def send_on_control(self, tensor: Tensor, peer: int) -> None:
        """Send a dense tensor in host memory, in order with objects."""
        self._control[peer].send(flat(tensor))

    def receive_on_control(self, buffer: Tensor, peer: int, what: str) -> Tensor:
        """Receive into a dense tensor in host memory."""
        return self._control[peer].receive(buffer, what).wait(what)

    def send_read(self, message: Tensor, number: int) -> None:
        """Give every other stage what a step reads, as a contiguous tensor in host memory. Never waits."""
        for endpoint in self._reads.values():
            endpoint.send(message, 1 + number)

    def receive_read(self, size: int, number: int, peer: int, what: str) -> PendingReceive:
        """Post the receive of the next such message with this number from `peer`, in any order."""
        return self._reads[peer].receive(torch.empty(size, dtype=torch.uint8), what, 1 + number)

    def barrier(self, what: str) -> None:
        """Return once every stage of this pipeline has called this."""
        self.all_gather_vector(torch.zeros(1, dtype=torch.float64), what)

    def _send_bytes(self, payload: bytes, peer: int) -> None:
        endpoint = self._control[peer]
        frame = len(payload).to_bytes(_LENGTH, "little") + payload[: FRAME - _LENGTH]
        endpoint.send(torch.frombuffer(bytearray(frame.ljust(FRAME, b"\0")), dtype=torch.uint8))
        if rest := payload[FRAME - _LENGTH :]:
            endpoint.send(torch.frombuffer(bytearray(rest), dtype=torch.uint8))
