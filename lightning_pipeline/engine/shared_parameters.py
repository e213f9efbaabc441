"""Parameters used by several stages: one initial value, one summed gradient per step."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_pipeline.engine.slices import as_slice, local_gradient, local_part
from lightning_pipeline.partition.memory import laid_out
from lightning_pipeline.partition.ownership import Ownership
from lightning_pipeline.recording.repeated_uses import EXACT_BYTES
from lightning_pipeline.runtime.tensor_meta import TensorMeta
from lightning_pipeline.runtime.topology import Channel
from lightning_pipeline.runtime.transport import Transport

Stages = tuple[int, ...]


class SharedGradients:
    """Gradients of the parameters that several stages hold, summed over these stages.

    One process adds, for each micro-batch, the gradients of a parameter's uses, from the last use to the first, and
    then adds that to the sum so far. The parameter's owner, the first stage that holds it, does the same with what the
    others send, so that the bits are the same. That takes a message a micro-batch; parameters above `EXACT_BYTES` are
    added up on each stage first and sent once a step, or window of accumulation, where no hook looks at them before.

    The first step shows which parameters are shared; until then, every parameter that may be is watched.
    """

    def __init__(self, transport: Transport | None, stage: int) -> None:
        self._transport = transport
        self._stage = stage
        self._watched: dict[str, nn.Parameter] = {}
        self._before: dict[str, Tensor | None] = {}
        self._parts: dict[str, list[Tensor | None]] = {}
        self._are_seen = False

    def begin(self, candidates: Mapping[str, nn.Parameter], *, are_seen: bool = False) -> None:
        """Called before the schedule.

        Args:
            candidates: parameters that several virtual stages use or may use. The same on all ranks, including those
                that do not hold the data.
            are_seen: hooks see the gradients after each batch that adds to them.
        """
        self._are_seen = are_seen
        self._watched = {}
        if self._transport is not None:
            self._watched = {name: one for name, one in candidates.items() if are_seen or _is_small(one)}
        self._before = {name: local_gradient(parameter) for name, parameter in self._watched.items()}
        self._parts = {name: [] for name in self._watched}
        for parameter in self._watched.values():
            parameter.grad = None

    def after_backward(self, microbatch: int) -> None:
        """Called after a micro-batch's backward on one virtual stage: put its gradients aside."""
        for name, parameter in self._watched.items():
            parts = self._parts[name]
            parts.extend([None] * (microbatch + 1 - len(parts)))
            parts[microbatch] = _add_up(parts[microbatch], [local_gradient(parameter)])
            parameter.grad = None

    def finish(self, shared: Mapping[str, tuple[nn.Parameter, Stages]], *, complete: bool) -> None:
        """Called after the schedule: sum the gradients. All stages must call it.

        Args:
            shared: the parameters that several stages hold, with these stages.
            complete: no further batch adds to these gradients, so every holder needs the sum.
        """
        exact = {name: held for name, held in shared.items() if name in self._watched}
        for name, parameter in self._watched.items():
            if name not in exact:
                _set_gradient(parameter, _add_up(self._before[name], self._parts[name]))
        if complete:  # those that were not watched have one part
            rest = {name: held for name, held in shared.items() if name not in exact}
            self._before.update(dict.fromkeys(rest))
            self._parts.update((name, [local_gradient(parameter)]) for name, (parameter, _) in rest.items())
            exact.update(rest)
        if exact and self._transport is not None:
            self._add_up_over_holders(exact, self._transport, complete or self._are_seen)
        self._watched, self._before, self._parts = {}, {}, {}

    def _add_up_over_holders(
        self, exact: Mapping[str, tuple[nn.Parameter, Stages]], transport: Transport, spreads: bool
    ) -> None:
        width = 1 + max(len(self._parts[name]) for name in exact)
        here = torch.zeros(len(exact), width, dtype=torch.float64)
        for row, name in enumerate(exact):
            here[row, 0] = self._before[name] is not None
            for column, part in enumerate(self._parts[name], start=1):
                here[row, column] = part is not None
        table = transport.all_gather_vector(here.flatten(), "presence of shared gradients")
        present = table.bool().reshape(-1, len(exact), width).tolist()
        # All parts are sent before any sum, in the same order everywhere: blocking sends cannot deadlock in a cycle.
        for row, (name, (parameter, stages)) in enumerate(exact.items()):
            if self._stage == stages[0]:
                totals = []
                for column in range(1, width):
                    givers = [giver for giver in reversed(stages) if present[giver][row][column]]
                    totals.append(self._total(parameter, self._parts[name][column - 1 :][:1], givers, transport))
                _set_gradient(parameter, _add_up(self._before[name], totals))
            elif self._stage in stages:
                for part in self._parts[name]:
                    if part is not None:
                        transport.send(part.contiguous(), stages[0], Channel.SHARED)
            self._parts[name].clear()
        if spreads:
            for row, (parameter, stages) in enumerate(exact.values()):
                if present[stages[0]][row][0] or any(any(present[giver][row][1:]) for giver in stages):
                    _spread_gradient(parameter, stages, transport, self._stage)
        transport.flush()

    def _total(
        self, parameter: nn.Parameter, own: Sequence[Tensor | None], givers: Iterable[int], transport: Transport
    ) -> Tensor | None:
        """One micro-batch's gradient over all holders, the last stage's first.

        Args:
            own: this stage's, if it has one.
        """
        total: Tensor | None = None
        for giver in givers:
            if giver == self._stage:
                [part] = own
            else:
                part = transport.recv(_meta(parameter), giver, Channel.SHARED).wait("a shared parameter's gradient")
            assert part is not None
            total = part if total is None else total + part
        return total


def shared_parameters(
    parameters: Mapping[str, nn.Parameter], ownership: Ownership
) -> dict[str, tuple[nn.Parameter, Stages]]:
    """Each parameter that several stages use, once, with these stages; in the same order everywhere."""
    shared = set(ownership.shared_names())
    found: dict[str, tuple[nn.Parameter, Stages]] = {}
    seen: set[int] = set()
    for name, parameter in parameters.items():
        if name in shared and id(parameter) not in seen:
            seen.add(id(parameter))
            found[name] = (parameter, ownership.holders[name])
    return found


def spread_from_owner(tensors: Sequence[tuple[Tensor, Sequence[int]]], transport: Transport | None, stage: int) -> None:
    """Give every holder of a tensor its owner's value (the first holder is the owner)."""
    if transport is None:
        return
    with torch.no_grad():
        for tensor, stages in tensors:
            tensor = local_part(tensor)
            is_sparse = tensor.layout is not torch.strided
            if stage == stages[0]:
                for holder in stages[1:]:
                    if is_sparse:
                        transport.send_object(tensor.detach().cpu(), holder)
                    else:
                        transport.send(tensor.detach().contiguous(), holder, Channel.SHARED)
            elif stage in stages and not tensor.is_meta:
                what = "a shared tensor's value"
                if is_sparse:
                    tensor.copy_(transport.recv_object(stages[0], what))
                else:
                    tensor.copy_(transport.recv(_meta(tensor), stages[0], Channel.SHARED).wait(what))
    transport.flush()


def _spread_gradient(parameter: nn.Parameter, stages: Stages, transport: Transport, stage: int) -> None:
    if stage == stages[0]:
        total = local_gradient(parameter)
        assert total is not None
        for holder in stages[1:]:
            transport.send(total.contiguous(), holder, Channel.SHARED)
    elif stage in stages:
        what = "the sum of a shared parameter's gradients"
        _set_gradient(parameter, transport.recv(_meta(parameter), stages[0], Channel.SHARED).wait(what))


def _set_gradient(parameter: nn.Parameter, part: Tensor | None) -> None:
    if part is not None and part.layout is torch.strided and not isinstance(parameter, DTensor):
        part = laid_out(part, parameter.stride())  # as autograd does, and so on all holders alike
    parameter.grad = None if part is None else as_slice(parameter, part)


def _add_up(total: Tensor | None, parts: Iterable[Tensor | None]) -> Tensor | None:
    """As autograd accumulates: the first is taken as it is, the others are added in place."""
    for part in parts:
        if part is not None:
            total = part if total is None else total.add_(part)
    return total


def _is_small(tensor: Tensor) -> bool:
    return tensor.numel() * tensor.element_size() <= EXACT_BYTES


def _meta(tensor: Tensor) -> TensorMeta:
    """The metadata of a contiguous tensor of this rank's shape of it, as which it is sent."""
    shape = tuple(local_part(tensor).shape)
    return TensorMeta(shape, tuple(torch.empty(shape, device="meta").stride()), tensor.dtype)
