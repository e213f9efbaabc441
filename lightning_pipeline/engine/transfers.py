"""Transfers of values between visits, and of their gradients back, for micro-batches that run event by event."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce
from operator import add
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from lightning_pipeline import _torch
from lightning_pipeline.engine.rank_resources import RankResources
from lightning_pipeline.partition.memory import begun_at, copied
from lightning_pipeline.partition.placeholder import TensorSpec
from lightning_pipeline.recording.backward_calls import CaughtGradient
from lightning_pipeline.recording.event import Event
from lightning_pipeline.runtime.tensor_meta import conform


@dataclass(slots=True)
class Transfer:
    """The transfer of a value from the visit that computes it to one use on another visit.

    Attributes:
        num_parts: how often gradients go back to it in its use, as to the weights of a recurrent layer.
        users: the events that use it. Several do that write into it or ask for its gradient, and after the schedule.
        sent: on the sender, the edges at which its gradient enters the graph, one for each part.
        arrived: on the receiver, the leaf; for a use that returns a view, the base of that view.
        operand: on the receiver, what the use is given, until it has given something, if there are several parts.
        caught: collects the gradient of `arrived` in backward.
        is_merged: whether its gradient is sent with that of a later use.
        merged: earlier uses whose gradients are sent with its own, the latest first.
        is_gone: whether a backward has used it and freed the graph.
    """

    value: int
    source: int
    destination: int
    num_parts: int = 1
    sent: Sequence[Any] = ()
    arrived: Tensor | None = None
    operand: Tensor | None = None
    caught: CaughtGradient | None = None
    users: list[Event] = field(default_factory=list)
    is_merged: bool = False
    merged: list[Transfer] = field(default_factory=list)
    is_gone: bool = False

    def catch(self, leaf: Tensor) -> None:
        """Set the leaf on the receiver."""
        self.arrived, self.caught = leaf, CaughtGradient(leaf)

    def arrive(self, leaf: Tensor) -> Tensor:
        """Likewise. Returns what the use is given."""
        self.catch(leaf)
        operand = written_into(leaf)
        self.operand = operand if self.num_parts > 1 else None
        return operand

    def leave(self, own: Tensor) -> None:
        """Set the edges on the sender. The last one is the first that autograd comes to."""
        self.sent = [get_gradient_edge(torch.ops.aten.alias.default(own)) for _ in range(self.num_parts)]

    def gradients(self) -> list[Tensor]:
        """The gradient on the receiver, in parts."""
        assert self.arrived is not None and self.caught is not None
        if 1 < self.num_parts == len(self.caught.parts):
            return [*self.caught.parts]
        total = self.caught.gradient
        return self.padded(torch.zeros_like(self.arrived) if total is None else total)

    def is_used_for(self, wanted: Container[int]) -> bool:
        """Whether some of the wanted values are made of it, in a way that autograd goes back."""
        return self.value in wanted and any(event.gives_gradient_of(self.value, wanted) for event in self.users)

    def end(self, wanted: Container[int]) -> None:
        """A backward from what the wanted values are has gone back by it, and has freed what it went through.

        A parameter may go on to give gradients of other uses.
        """
        if self.value < 0 and not all(event.gives_gradient_of(self.value, wanted) for event in self.users):
            self.begin_again()
        elif self.is_used_for(wanted):
            self.is_gone, self.sent, self.arrived, self.operand, self.caught = True, (), None, None, None

    def begin_again(self) -> None:
        """Forget which gradients have gone back."""
        self.is_merged = False
        self.merged.clear()
        if self.caught is not None:
            self.caught.clear()

    def padded(self, total: Tensor) -> list[Tensor]:
        """A gradient in one piece, as so many parts."""
        return [total, *(torch.zeros_like(total) for _ in range(1, self.num_parts))]


class Use(NamedTuple):
    """One use of a value: its visit, how it came there, None for on the visit that computed it, and the event."""

    visit: int
    transfer: Transfer | None
    user: Event | None

    def is_for(self, value: int, wanted: Container[int]) -> bool:
        """Whether some of the wanted values are made of it, in a way that autograd goes back."""
        if self.transfer is not None:
            return self.transfer.is_used_for(wanted)
        return self.user is not None and self.user.gives_gradient_of(value, wanted)


class Transfers:
    """The transfers of one micro-batch. All ranks must make the same calls, and know of all transfers.

    Args:
        microbatch: its number, for errors.
    """

    def __init__(self, microbatch: int, shared: RankResources, *, training: bool) -> None:
        self._microbatch = microbatch
        self._rank, self._direct, self.rank_of = shared.rank, shared.direct, shared.rank_of
        self._training = training
        self._all: list[Transfer] = []
        self._uses: dict[int, list[Use]] = {}
        """Of values that give gradients, in order."""
        self._first: dict[tuple[int, int], Transfer] = {}
        self.user: Event | None = None
        """The event that runs now."""

    def gives_gradient(self, spec: TensorSpec) -> bool:
        """Whether the gradient of a value is sent back to the visit that computed it."""
        return self._training and spec.requires_grad

    def note_use(self, value: int, visit: int) -> None:
        """Record a use of a value on the visit that computed it, which needs no transfer."""
        self._uses.setdefault(value, []).append(Use(visit, None, self.user))

    def uses(self, value: int, wanted: Container[int]) -> list[Use]:
        """Those of which the wanted values are made, in order."""
        return [use for use in self._uses.get(value, ()) if use.is_for(value, wanted)]

    def move(
        self,
        value: int,
        source: int,
        destination: int,
        spec: TensorSpec,
        own: Tensor | None,
        *,
        num_parts: int = 1,
        begin: int = 0,
    ) -> Tensor | None:
        """Move a value to another visit. Returns it on the receiver, None elsewhere.

        Args:
            own: the value, on the sender.
            num_parts: how often gradients go back to it in its first use there.
            begin: where it begins in memory (`beginning`).
        """
        sender, receiver = self.rank_of(source), self.rank_of(destination)
        transfer = Transfer(value, source, destination, num_parts)
        returns = self.gives_gradient(spec)
        if returns:
            self.add(transfer)
        arrived = None
        if sender == self._rank:
            assert own is not None
            if returns:
                transfer.leave(own)  # in the order of uses
            if receiver == sender:
                arrived = copied(own)
            else:
                assert self._direct is not None
                self._direct.send(conform(own, spec), receiver)
        elif receiver == self._rank:
            assert self._direct is not None
            arrived = self._direct.receive(spec, sender, f"an activation of micro-batch {self._microbatch}")
        if arrived is None:
            return None
        arrived = begun_at(arrived, begin) if begin else arrived
        if returns:
            arrived = transfer.arrive(arrived.requires_grad_())
        elif spec.requires_grad:
            arrived = requiring_gradients(arrived)
        return arrived

    def repeat(
        self,
        value: int,
        source: int,
        destination: int,
        own: Tensor | None,
        there: Tensor | None,
        *,
        is_viewed: bool = False,
        num_parts: int = 1,
    ) -> Tensor | None:
        """Give another use of a value that has come to a visit a leaf of its own, so that uses add up in their order.

        Args:
            own: the value, on the rank that has made it.
            there: the value, on the rank that it has come to.
            is_viewed: the use gives a view, into which may be written: it has to be one of the value itself, and the
                gradient is caught on its way to that.
            num_parts: as for `move`.
        """
        transfer = Transfer(value, source, destination, num_parts)
        self.add(transfer)
        if own is not None:
            transfer.leave(own)
        if there is None:
            return None
        if is_viewed:
            view = torch.ops.aten.alias.default(there)
            transfer.catch(view)
            return view
        return transfer.arrive(there.detach().requires_grad_())

    def note_made(self, operands: Iterable[Tensor], made: Sequence[Tensor]) -> None:
        """Take note that a use has given these tensors, of operands whose gradients come in parts."""
        ids = set(map(id, operands))
        for transfer in self._all:
            if transfer.operand is not None and id(transfer.operand) in ids:
                assert transfer.caught is not None
                transfer.caught.catch_parts(transfer.operand, made)
                transfer.operand = None

    def leaves(self, value: int, destination: int) -> list[Tensor]:
        """What a value is on a visit that it has come to, on the rank of that: a leaf for each use, in order."""
        found = (one.arrived for one in self._all if one.value == value and one.destination == destination)
        return [leaf for leaf in found if leaf is not None and leaf.is_leaf]

    def returning(self, wanted: Container[int]) -> list[Transfer]:
        """Those of which the wanted values are made, in order. Others have no gradients, which are not zeros.

        Raises:
            RuntimeError: a backward has been there.
        """
        found = [one for one in self._all if one.is_used_for(wanted)]
        if any(one.is_gone for one in found):
            raise RuntimeError(
                "a backward goes a second time through a graph that the first one has freed: pass retain_graph=True to "
                "the first one, or run the forward again"
            )
        return found

    def note_another_user(self, value: int, destination: int) -> None:
        """Record that the event that runs now uses what has come to a visit for another one, too."""
        transfer = self._first.get((value, destination))
        if transfer is not None and self.user is not None:
            transfer.users.append(self.user)

    def merge(self, transfers: Sequence[Transfer]) -> None:
        """Let the gradients of a value's last uses travel as one, where they are on one visit: they are the first that
        one process adds up. Those of earlier uses are added to that one by one.

        Args:
            transfers: those by which gradients go back.
        """
        returning = set(map(id, transfers))
        for uses in self._uses.values():
            used = [use.transfer for use in uses if use.transfer is None or id(use.transfer) in returning]
            if not used or (last := used.pop()) is None:
                continue
            for transfer in reversed(used):
                if transfer is None or transfer.destination != last.destination:
                    break
                transfer.is_merged = True
                last.merged.append(transfer)

    def give_back(self, transfer: Transfer, spec: TensorSpec) -> list[Tensor]:
        """Give the visit that sent a value its gradient. Returns it on the rank of that visit, in parts."""
        if transfer.is_merged:
            return []
        sender, receiver = self.rank_of(transfer.source), self.rank_of(transfer.destination)
        if receiver == self._rank:
            gradients = self._merged(transfer)
            if sender == receiver:
                return gradients
            assert self._direct is not None
            for gradient in gradients:
                self._direct.send_with_strides(gradient, sender)
            return []
        if sender == self._rank:
            assert self._direct is not None
            what = f"a gradient of micro-batch {self._microbatch}"
            return [self._direct.receive_with_strides(spec, receiver, what) for _ in range(transfer.num_parts)]
        return []

    def end_backward(self, transfers: Sequence[Transfer], wanted: Container[int], *, is_repeated: bool) -> None:
        """Gradients have gone back by these transfers.

        Args:
            wanted: the values from which the loss was made.
            is_repeated: they may once more, as the graph is kept.
        """
        for one in transfers:
            if is_repeated:
                one.begin_again()
            else:
                one.end(wanted)

    def let_go(self) -> None:
        self._all.clear()
        self._uses.clear()
        self._first.clear()

    def add(self, transfer: Transfer) -> None:
        """Take in a transfer, which is the next use of its value."""
        if self.user is not None and not transfer.users:
            transfer.users.append(self.user)
        self._all.append(transfer)
        self._first.setdefault((transfer.value, transfer.destination), transfer)
        self._uses.setdefault(transfer.value, []).append(Use(transfer.destination, transfer, self.user))

    def _merged(self, transfer: Transfer) -> list[Tensor]:
        """The gradient of a use, in parts, the first of which has what earlier uses have merged into it."""
        if not transfer.merged:
            return transfer.gradients()
        total = reduce(add, transfer.gradients())
        for one in transfer.merged:
            if one.caught is not None and one.caught.gradient is not None:
                total = reduce(add, one.gradients(), total)
        return transfer.padded(total)


def requiring_gradients(tensor: Tensor) -> Tensor:
    """A tensor as it is under enable_grad in an evaluation, where kernels are others than under no_grad."""
    with torch.enable_grad():
        return written_into(tensor.requires_grad_())


def written_into(leaf: Tensor) -> Tensor:
    """A tensor with the data of an autograd leaf that may be modified in place, as neither a leaf nor its views may be.

    It shares the leaf's memory, unless that would change the strides of dimensions of size one: convolutions choose
    their memory format, and so their kernel, by those.
    """
    view = _torch.unsafe_view(leaf, leaf.shape)
    return view if view.stride() == leaf.stride() else leaf.clone()


GRAD_SIGNATURE = inspect.signature(torch.autograd.grad)


def by_leaves(leaves: Mapping[int, Sequence[Tensor]]) -> Callable[..., Any]:
    """A `torch.autograd.grad` that sums the gradients over a tensor's leaves, last use first, as autograd does.

    Args:
        leaves: the leaves of each tensor, by its id. A tensor without leaves is differentiated itself.
    """

    def grad(*args: Any, **kwargs: Any) -> tuple[Tensor | None, ...]:
        bound = GRAD_SIGNATURE.bind(*args, **kwargs)
        inputs = bound.arguments["inputs"]
        uses = [leaves.get(id(one)) or [one] for one in ([inputs] if isinstance(inputs, Tensor) else inputs)]
        bound.arguments["inputs"] = [leaf for own in uses for leaf in own]
        if any(len(own) > 1 for own in uses):
            bound.arguments["allow_unused"] = True  # the output may depend on some uses only
        with CaughtGradient.paused():
            found = iter(torch.autograd.grad(*bound.args, **bound.kwargs))
        return tuple(_sum([next(found) for _ in own]) for own in uses)

    return grad


def _sum(parts: Sequence[Tensor | None]) -> Tensor | None:
    present = [part for part in reversed(parts) if part is not None]
    return reduce(add, present) if present else None
