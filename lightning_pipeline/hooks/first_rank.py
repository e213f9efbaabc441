"""Code that only the first rank runs: parts of hooks guarded by `is_global_zero`, and the data loader.

Once a hook has asked for the rank, ranks may do different things until it ends. From then on the first rank tells the
others of each of its calls on tensors that not every rank holds. Ranks that are at the same call run it together. If
the others are at a later call, or at the end of the hook, they give the first rank the operands that it lacks, and wait
for its next call.

The first rank alone iterates its data loader. If that computes with the model, as for the episodes of a policy, the
first rank borrows the tensors that it lacks from ranks which wait for the batch::

    rank 0   next(loader): policy(state) ... tensor 7? ... policy(state) ...   the batch is ready
    rank 1   waits for the batch             here it is    waits for the batch
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from numbers import Number
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_pipeline import _torch
from lightning_pipeline.hooks.first_rank_changes import Changed, FirstRankChanges
from lightning_pipeline.hooks.first_rank_draws import FirstRankDraws, Given
from lightning_pipeline.hooks.first_rank_keeps import FirstRankKeeps, Kept
from lightning_pipeline.hooks.operands import TensorKeys
from lightning_pipeline.hooks.slices import SlicesRefused, refuse_slices
from lightning_pipeline.partition.ownership import holders_of
from lightning_pipeline.partition.placeholder import COPY, Placeholder, TensorSpec, answers_calls
from lightning_pipeline.partition.torch_functions import FunctionKind, function_name, kind_of
from lightning_pipeline.partition.users_code import in_hook, users_line
from lightning_pipeline.recording.operation import put_together, take_apart
from lightning_pipeline.runtime.direct import DirectTransport
from lightning_pipeline.runtime.host_memory import available_bytes
from lightning_pipeline.runtime.tensor_meta import conform


class Wanted(NamedTuple):
    """A tensor that the first rank needs if it runs a call alone.

    Attributes:
        key: its number on all ranks; None if it has none.
        gradient: its gradient is needed, not the tensor.
    """

    key: int | None
    owner: int
    gradient: bool


class Logged(NamedTuple):
    """A call of `self.log`.

    Attributes:
        is_told: other ranks are told all of it; else a metric or a function is each rank's own.
    """

    hook: str | None
    name: str
    value: Any
    args: tuple[Any, ...]
    options: dict[str, Any]
    is_told: bool = True


class _Call(NamedTuple):
    """The first rank is at this call.

    Attributes:
        drawn: the states of its generators, if the call draws and it has drawn before.
    """

    place: Any
    line: str
    wanted: tuple[Wanted, ...] = ()
    drawn: Given | None = None
    logged: Logged | None = None


class _Over(NamedTuple):
    """The first rank is at the end of the hook.

    Attributes:
        has_kept_rank: its code may go by its rank in later hooks without asking again.
        kept: what it has kept, while others may not have.
    """

    stops: bool
    changed: tuple[Changed, ...]
    has_kept_rank: bool
    drawn: Given | None
    kept: tuple[Kept, ...]


class _Answer(NamedTuple):
    """Whether a rank is at the same call; if not, the specs of what it gives, with None for a missing gradient."""

    is_there: bool
    specs: tuple[TensorSpec | None, ...] = ()


def wanted_of(keys: TensorKeys, tensors: Iterable[Tensor], *, gradient: bool = False) -> list[Wanted]:
    """What the first rank wants of other ranks, to run a call with these operands alone.

    Args:
        gradient: of each, and not the tensor itself.
    """
    return [
        Wanted(keys.key_of(tensor), (holders_of(tensor) or (0,))[0], gradient)
        for tensor in tensors
        if type(tensor) is Placeholder
    ]


def filled(tensors: Iterable[Tensor], found: list[Tensor | None]) -> list[Any]:
    """Tensors with what the first rank has got of those that it wanted; its own copies of those that others have let go
    of."""
    given: list[Any] = []
    for tensor in tensors:
        if type(tensor) is Placeholder:
            data = found.pop(0)
            given.append(tensor.__dict__.get(COPY) if data is None else data)
        else:
            given.append(tensor)
    refuse_slices_alone(given, users_line())
    return given


class FirstRank:
    """Follows the first rank through hooks in which ranks may do different things.

    Attributes:
        history: a number that tells which of them first ranks have changed in hooks so far: as replicas ask for other
            ranks, one of them may do what another does not.
        alone: what the first rank alone has logged in the hook.
    """

    def __init__(self, module: nn.Module, direct: DirectTransport, keys: TensorKeys) -> None:
        self._direct = direct
        self._keys = keys
        self.changes = FirstRankChanges(module, direct)
        self.draws = FirstRankDraws(direct.device)
        self.keeps = FirstRankKeeps(direct, keys)
        self.history = 0
        self.last_changed = ""
        self.is_first = direct.rank == 0
        self.alone: list[Logged] = []
        self._over: _Over | None = None

    def begin(self) -> None:
        """The hook asks for the rank."""
        if self._direct.rank:
            self._keys.hold()
        self.changes.begin()
        self.alone = []
        self.draws.begin()
        self._over = None

    def log(self, place: Any, line: str, logged: Logged) -> Logged | None:
        """Come to a call of `self.log`. Returns what this rank is to log: what the first rank does, which may have
        computed it alone; None if that does not come to the call.
        """
        if not self._direct.rank:
            told = _told(logged)
            self._direct.tell(_Call(place, line, logged=told))
            answers = [self._direct.hear(peer, "its place in a hook") for peer in range(1, self._direct.num_ranks)]
            if not all(answer.is_there for answer in answers):
                self.alone.append(told)
            return logged
        while type(call := self._heard("the first rank's next call in a hook")) is _Call:
            if call.place == place:
                assert call.logged is not None
                self._direct.tell_one(0, _Answer(is_there=True))
                return logged if call.logged.value is None else logged._replace(value=call.logged.value)
            self._give(call)
        return None

    def meet(
        self, place: Any, line: str, wanted: Sequence[Wanted], *, draws: bool = False, is_for_all: bool = True
    ) -> list[Tensor | None] | None:
        """Come to a call. Returns None if all ranks run it; else, on the first rank, the tensors that it wants.

        Args:
            draws: the call draws random numbers, which are to be the same on all ranks that run it.
            is_for_all: the call takes what one stage holds; else some of the ranks may run it.

        Raises:
            RuntimeError: some of the other ranks run this call, but not all.
        """
        if self._direct.rank:
            while type(call := self._heard("the first rank's next call in a hook")) is not _Call or call.place != place:
                if type(call) is _Call:
                    self._give(call)
                elif not is_for_all:
                    return None
                else:
                    _refuse_part(f"{self._direct.name_of(self._direct.rank)} runs", line)
            self._direct.tell_one(0, _Answer(is_there=True))
            if draws:
                self.draws.take(call.drawn)
            return None
        self._direct.tell(_Call(place, line, tuple(wanted), self.draws.given() if draws else None))
        answers = {peer: self._direct.hear(peer, "its place in a hook") for peer in range(1, self._direct.num_ranks)}
        there = [peer for peer, answer in answers.items() if answer.is_there]
        if len(there) == len(answers):
            if draws:
                self.draws.are_alike()
            return None
        if draws:
            self.draws.note_alone(line)
        if there and is_for_all:
            _refuse_part(f"{' and '.join(map(self._direct.name_of, (0, *there)))} run", line)
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

    def end(self, *, stops: bool) -> bool:
        """Come to the end of the hook.

        Args:
            stops: whether training is to stop, as this rank has it.

        Returns:
            The same, as the first rank has it: it alone may have run the code that decides.
        """
        if not self._direct.rank:
            changed = self.changes.found()
            drawn = self.draws.given()
            kept = self.keeps.found()
            self._direct.tell(_Over(stops, changed, in_hook.has_kept_rank, drawn, kept))
            self.draws.are_alike()
            in_hook.is_rank_kept = in_hook.has_kept_rank
            self._note(changed)
            if changed:
                self.changes.give(changed)
            if kept:
                self.keeps.take(kept)
            return stops
        while type(call := self._heard("the end of a hook on the first rank")) is not _Over:
            self._give(call)
        in_hook.is_rank_kept = call.has_kept_rank
        self.draws.take(call.drawn)
        self._note(call.changed)
        if call.changed:
            self.changes.take(call.changed)
        if call.kept:
            self.keeps.give(call.kept)
        return call.stops

    @contextmanager
    def interrupted(self, trainer: Any) -> Iterator[None]:
        """While entered, where all ranks have met, the hook that has asked for the rank is not followed."""
        trainer.should_stop = self.end(stops=trainer.should_stop)
        alone = self.alone
        try:
            yield
        finally:
            self.begin()
            self.alone, in_hook.is_rank_known = alone, True

    def _note(self, changed: Sequence[Changed]) -> None:
        if changed:
            self.last_changed = ", ".join(one.name for one in changed[:3]) + (" ..." if len(changed) > 3 else "")
            self.history = zlib.crc32(repr([one.name for one in changed]).encode(), self.history)

    def _heard(self, what: str) -> Any:
        """What the first rank tells next. When it has come to the end of the hook, nothing more comes."""
        if self._over is None:
            heard = self._direct.hear(0, what)
            if type(heard) is _Call:
                return heard
            if type(heard) is not _Over:
                raise RuntimeError(
                    f"the first rank alone went on to what all ranks do together ({type(heard).__name__}), in a hook "
                    f"that asks for the rank: let every rank run it"
                )
            self._over = heard
        return self._over

    def _give(self, call: _Call) -> None:
        """Give the first rank the operands of its call, which this rank does not run."""
        if call.logged is not None:
            if not call.logged.is_told:
                raise RuntimeError(
                    f"the first rank alone logs {call.logged.name!r} by a metric or a function of its own, which the "
                    f"others are not told ({call.line}): let every rank run the line, or log a number"
                )
            self.alone.append(call.logged)
        given: list[Tensor | None] = []
        for one in call.wanted:
            if one.owner == self._direct.rank:
                tensor = None if one.key is None else self._keys.tensor_of(one.key)
                given.append(tensor.grad if one.gradient and tensor is not None else tensor)
        refuse_slices_alone(given, call.line)
        specs = [None if tensor is None else TensorSpec.of(tensor) for tensor in given]
        self._direct.tell_one(0, _Answer(is_there=False, specs=tuple(specs)))
        for tensor, spec in zip(given, specs, strict=True):
            if tensor is not None and spec is not None:
                self._direct.send(conform(tensor.detach(), spec), 0)


def _told(logged: Logged) -> Logged:
    """What other ranks are told of a call of `self.log`: not metrics and functions."""
    with _torch.DisableTorchFunction():
        value = _torch.tree_map_only(Tensor, lambda tensor: tensor.detach().cpu(), logged.value)
    told = logged._replace(value=value if _is_plain(value) else None)
    if told.value is None or not _is_plain((logged.args, logged.options)):
        told = told._replace(args=(), options={}, is_told=False)
    return told


def _is_plain(value: Any) -> bool:
    return all(one is None or isinstance(one, str | Number | Tensor) for one in _torch.tree_leaves(value))


def _refuse_part(who: str, line: str) -> NoReturn:
    raise RuntimeError(
        f"{who} this alone ({line}), on what one stage holds: let every rank run it, or the first rank alone"
    )


def refuse_slices_alone(tensors: Iterable[Tensor | None], line: str) -> None:
    """Check that the first rank alone computes with nothing of which other replicas have slices."""
    if any(isinstance(tensor, DTensor) for tensor in tensors):
        raise NotImplementedError(
            f"the first rank alone takes a tensor that ranks keep in slices ({line}): let every rank take a clone() of "
            f"it before, outside of `if self.trainer.is_global_zero` and rank_zero_only, or use trainer.save_checkpoint"
        )


def refuse_alone(call: str) -> NoReturn:
    """Raise for a call in which all ranks take part."""
    raise RuntimeError(
        f"the first rank alone calls {call}, for which it would wait for the others ({users_line()}): let every rank "
        f"run the line"
    )


def like(data: Tensor, spec: TensorSpec) -> Tensor:
    """Data as a parameter, or a tensor of another kind, as `spec` says."""
    return nn.Parameter(data, spec.requires_grad) if spec.is_parameter else data.requires_grad_(spec.requires_grad)


class Asked(NamedTuple):
    """The first rank asks for a tensor."""

    key: int
    line: str


class Lending:
    """Lends tensors of the module to the first rank."""

    def __init__(self, direct: DirectTransport, keys: TensorKeys) -> None:
        self._direct = direct
        self._keys = keys
        self._borrowed: dict[int, Tensor] = {}
        self._process = 0

    @contextmanager
    def borrowing(self) -> Iterator[None]:
        """While entered on the first rank, code that runs takes what it lacks from ranks that call `lend`."""
        self._process = os.getpid()
        before = self._keys.versions_everywhere()
        token = answers_calls.set(self._answer)
        try:
            with SlicesRefused() if self._keys.are_in_slices else nullcontext():
                yield
        except BaseException:
            self._borrowed.clear()
            raise
        finally:
            answers_calls.reset(token)
        self._give_back()
        for name, version in self._keys.versions_everywhere().items():
            if before.get(name, version) != version:
                _refuse(f"a write into {name}", "during its fetch of a batch")

    def lend(self, asked: Asked) -> None:
        """Give the first rank what it asks for."""
        tensor = self._keys.tensor_of(asked.key)
        assert tensor is not None
        if isinstance(tensor, DTensor):
            refuse_slices(asked.line)
        self._direct.send(conform(tensor.detach(), TensorSpec.of(tensor)), 0)

    def _answer(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """The result of a call; NotImplemented in other processes, such as workers of the loader."""
        if os.getpid() != self._process:
            return NotImplemented
        kind, name = kind_of(func), function_name(func)
        call = take_apart(func, args, kwargs)
        is_written = kind is FunctionKind.WRITES and type(call.tensors[0]) is Placeholder
        is_gradient = name in ("grad.__get__", "_grad.__get__")
        if is_written or is_gradient or kind in (FunctionKind.HOOKS, FunctionKind.BACKWARD):
            _refuse(name)
        tensors = [self._borrow(one) if type(one) is Placeholder else one for one in call.tensors]
        if name == "data.__get__":  # which would have a version of its own
            return tensors[0].detach()
        return func(*put_together(call.args, tensors, call.numbers), **put_together(call.kwargs, tensors, call.numbers))

    def _borrow(self, place: Placeholder) -> Tensor:
        key, holders = self._keys.key_of(place), holders_of(place)
        if key is None or holders is None:
            raise RuntimeError(f"{place._pl_what} is on another stage, and no name is known for it ({users_line()})")
        found = self._borrowed.get(key)
        if found is None:
            spec = place._pl_spec
            if sum(one.nbytes for one in self._borrowed.values()) + spec.num_bytes > available_bytes() // 2:
                self._give_back()
            self._direct.tell_one(holders[0], Asked(key, users_line()))
            with torch.inference_mode(False):  # inference tensors have no version
                data = self._direct.receive(spec, holders[0], f"{place._pl_what}, which the loader computes with")
                found = like(data, spec)
            if spec.requires_grad:
                found.register_hook(_no_gradient)
            self._borrowed[key] = found
        return found

    def _give_back(self) -> None:
        """Let go of what was borrowed."""
        borrowed, self._borrowed = self._borrowed, {}
        if any(tensor._version > 0 for tensor in borrowed.values()):
            _refuse("a write through a view, such as .data,", "during its fetch of a batch")


def _no_gradient(gradient: Tensor) -> NoReturn:
    _refuse("a backward")


def _refuse(name: str, where: str | None = None) -> NoReturn:
    raise NotImplementedError(
        f"{name} changes, or asks for, what another stage has of a tensor, in code of a loader, which the first rank "
        f"alone runs ({where or users_line()}): do it in a step or in a hook"
    )
