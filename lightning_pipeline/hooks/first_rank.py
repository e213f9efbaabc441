"""Code that only the first rank runs: hooks guarded by `is_global_zero`, and its data loader.

Once a hook has asked which rank runs it, ranks may do different things until it ends. From then on the first rank tells
the others of each call on what not every rank holds. Ranks that have come to the same call go on with it. The others
are further on, at the end of the hook at the latest: they give the first rank what the call takes, and wait for its
next one.

What the first rank's loader computes with the module, of which other ranks hold parts.

The first rank alone iterates its loader. Where data comes out of the model, as the episodes of a policy do, it borrows
the tensors that it lacks from ranks that wait for the batch::

    rank 0   next(loader): policy(state) ... tensor 7? ... policy(state) ...   the batch is ready
    rank 1   waits for the batch             here it is    waits for the batch
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, NoReturn

from torch import Tensor, nn

from lightning_pipeline.hooks.operands import TensorKeys
from lightning_pipeline.partition.ownership import holders_of
from lightning_pipeline.partition.placeholder import Placeholder, TensorSpec, absent
from lightning_pipeline.partition.torch_functions import FunctionKind, function_name, kind_of
from lightning_pipeline.partition.users_line import users_line
from lightning_pipeline.recording.operation import put_together, take_apart
from lightning_pipeline.runtime.direct import DirectTransport
from lightning_pipeline.runtime.host_memory import available_bytes
from lightning_pipeline.runtime.tensor_meta import conform


class Wanted(NamedTuple):
    """A tensor that the first rank needs, if it is alone.

    Attributes:
        key: what all ranks call it; None where it has no name.
        owner: the rank that gives it.
        gradient: its gradient is needed, rather than the tensor.
    """

    key: int | None
    owner: int
    gradient: bool


class _Call(NamedTuple):
    """The first rank is at this call."""

    place: Any
    line: str
    wanted: tuple[Wanted, ...]


class _Over(NamedTuple):
    """The first rank is through with the hook."""


class _Answer(NamedTuple):
    """Whether a rank is at the same call, and the specs of what it gives; None for a gradient that is not there."""

    is_there: bool
    specs: tuple[TensorSpec | None, ...] = ()


class FirstRank:
    """Follows the first rank through hooks in which the ranks' ways may part.

    Args:
        num_ranks: of the pipeline.
        tensor_of: the tensor of a key; None where it is gone.
    """

    def __init__(self, direct: DirectTransport, num_ranks: int, tensor_of: Callable[[int], Tensor | None]) -> None:
        self._direct = direct
        self._num_ranks = num_ranks
        self._tensor_of = tensor_of

    def meet(self, place: Any, line: str, wanted: Sequence[Wanted]) -> list[Tensor | None] | None:
        """Come to a call. Returns None if all ranks have; else, on the first rank alone, the tensors that it wants.

        Raises:
            RuntimeError: some of the others run this call, and not all of them.
        """
        if self._direct.rank:
            while (call := self._next_call(line)).place != place:
                self._give(call)
            self._direct.tell_one(0, _Answer(is_there=True))
            return None
        self._direct.tell(_Call(place, line, tuple(wanted)))
        answers = {peer: self._direct.hear(peer, "its place in a hook") for peer in range(1, self._num_ranks)}
        there = [peer for peer, answer in answers.items() if answer.is_there]
        if len(there) == len(answers):
            return None
        if there:
            _refuse_part(f"stages 0 and {', '.join(map(str, there))} run", line)
        found: list[Tensor | None] = []
        specs = {peer: list(answer.specs) for peer, answer in answers.items()}
        for one in wanted:
            spec = specs[one.owner].pop(0)
            found.append(None if spec is None else like(self._direct.receive(spec, one.owner), spec))
        if any(one.key is None for one in wanted):
            raise NotImplementedError(
                f"the first rank alone takes what another stage holds and no name is known for ({line}): let every "
                f"rank run the line"
            )
        return found

    def end(self) -> None:
        """Come to the end of the hook."""
        if not self._direct.rank:
            self._direct.tell(_Over())
            return
        while type(call := self._direct.hear(0, "the end of a hook on the first rank")) is not _Over:
            if type(call) is not _Call:
                raise RuntimeError(
                    f"the first rank alone went on to what all ranks do together ({type(call).__name__}), in a hook "
                    f"that asks for the rank: let every rank run it, as trainer.save_checkpoint"
                )
            self._give(call)

    def _next_call(self, line: str) -> _Call:
        call = self._direct.hear(0, "the first rank's next call in a hook")
        if type(call) is not _Call:
            _refuse_part(f"stage {self._direct.rank} runs", line)
        return call

    def _give(self, call: _Call) -> None:
        """Give the first rank, which is at another call, what that one takes."""
        given: list[Tensor | None] = []
        for one in call.wanted:
            if one.owner == self._direct.rank:
                tensor = None if one.key is None else self._tensor_of(one.key)
                given.append(tensor.grad if one.gradient and tensor is not None else tensor)
        specs = [None if tensor is None else TensorSpec.of(tensor) for tensor in given]
        self._direct.tell_one(0, _Answer(is_there=False, specs=tuple(specs)))
        for tensor, spec in zip(given, specs, strict=True):
            if tensor is not None and spec is not None:
                self._direct.send(conform(tensor.detach(), spec), 0)


def _refuse_part(who: str, line: str) -> NoReturn:
    raise RuntimeError(
        f"{who} this alone ({line}), on what one stage holds: let every rank run it, or the first rank alone"
    )


def like(data: Tensor, spec: TensorSpec) -> Tensor:
    """Data as the parameter, or other tensor, of these specs."""
    return nn.Parameter(data, spec.requires_grad) if spec.is_parameter else data.requires_grad_(spec.requires_grad)


class Asked(NamedTuple):
    """The first rank asks for a tensor."""

    key: int


class Lending:
    """Lends tensors of the module to the first rank."""

    def __init__(self, direct: DirectTransport, keys: TensorKeys) -> None:
        self._direct = direct
        self._keys = keys
        self._borrowed: dict[int, Tensor] = {}
        self._place = (0, 0)

    @contextmanager
    def borrowing(self) -> Iterator[None]:
        """While entered on the first rank, code takes what it lacks from ranks that call `lend`."""
        self._place = os.getpid(), threading.get_ident()
        absent.answer = self._answer
        before = self._keys.versions_everywhere()
        try:
            yield
        finally:
            absent.answer = None
            self._borrowed.clear()
        for name, version in self._keys.versions_everywhere().items():
            if before.get(name, version) != version:
                _refuse(f"a write into {name}")

    def lend(self, asked: Asked) -> None:
        """Give the first rank what it asks for."""
        tensor = self._keys.tensor_of(asked.key)
        assert tensor is not None
        self._direct.send(conform(tensor.detach(), TensorSpec.of(tensor)), 0)

    def _answer(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """What a call gives; NotImplemented where this is other code than the loader's, as in a worker of its own."""
        if (os.getpid(), threading.get_ident()) != self._place:
            return NotImplemented
        kind, name = kind_of(func), function_name(func)
        call = take_apart(func, args, kwargs)
        is_written = kind is FunctionKind.WRITES and type(call.tensors[0]) is Placeholder
        if (
            is_written
            or kind in (FunctionKind.HOOKS, FunctionKind.BACKWARD)
            or name in ("grad.__get__", "_grad.__get__")
        ):
            _refuse(name)
        tensors = [self._borrow(one) if type(one) is Placeholder else one for one in call.tensors]
        return func(*put_together(call.args, tensors, call.numbers), **put_together(call.kwargs, tensors, call.numbers))

    def _borrow(self, place: Placeholder) -> Tensor:
        key, holders = self._keys.key_of(place), holders_of(place)
        if key is None or holders is None:
            raise RuntimeError(f"{place.what} is on another stage, and no name is known for it ({users_line()})")
        found = self._borrowed.get(key)
        if found is None:
            spec = place.spec
            if sum(one.nbytes for one in self._borrowed.values()) + spec.num_bytes > available_bytes() // 2:
                self._borrowed.clear()
            self._direct.tell_one(holders[0], Asked(key))
            data = self._direct.receive(spec, holders[0], f"{place.what}, which the loader computes with")
            found = like(data, spec)
            if spec.requires_grad:
                found.register_hook(_no_gradient)
            self._borrowed[key] = found
        return found


def _no_gradient(gradient: Tensor) -> NoReturn:
    _refuse("a backward")


def _refuse(name: str) -> NoReturn:
    raise NotImplementedError(
        f"{name} changes, or asks for, what another stage has of a tensor, in code of a loader, which the first rank "
        f"alone runs ({users_line()}): do it in a step or in a hook"
    )
