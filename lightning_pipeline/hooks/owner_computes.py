"""Operations outside of steps on tensors that not every rank holds: the owner computes.

All ranks run the same code, so all of them know which ranks hold each operand (`holders_of`). The ranks that hold the
tensor which is written into, or else the operands, compute; the others get a placeholder. Operands that the computing
ranks do not hold are sent to them. Numbers that Python reads are the same on every rank.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from numbers import Number
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode
from torch.utils.hooks import RemovableHandle

from lightning_pipeline import _torch
from lightning_pipeline.hooks.child_processes import processes_started
from lightning_pipeline.hooks.first_rank import (
    FirstRank,
    Lending,
    Logged,
    Wanted,
    filled,
    refuse_alone,
    wanted_of,
)
from lightning_pipeline.hooks.first_rank_changes import refuse_change_alone
from lightning_pipeline.hooks.foreach import run_by_holders
from lightning_pipeline.hooks.lent_memory import LentMemory
from lightning_pipeline.hooks.operands import (
    Exchanges,
    Holders,
    Operands,
    TensorKeys,
    copy_of,
    is_partial,
    share_kept,
)
from lightning_pipeline.hooks.optimizer_states import OptimizerStates, ParameterGradients
from lightning_pipeline.hooks.patches import parameters_seen
from lightning_pipeline.hooks.placed_calls import PlacedCalls, is_draw
from lightning_pipeline.hooks.saved_states import SavedStates
from lightning_pipeline.hooks.slices import (
    deep_copy,
    gathered_by_hooks,
    on_whole_tensors,
    on_windows,
    refuse_window_of_first_rank,
    windows_among,
)
from lightning_pipeline.hooks.whole_calls import refuse_traced, whole_calls_seen
from lightning_pipeline.partition.comparisons import REFLECTED, is_never_equal, unreflected
from lightning_pipeline.partition.compiled import compiled_as_asked, compiled_as_written
from lightning_pipeline.partition.kept_parameters import in_their_places, whole_in_steps
from lightning_pipeline.partition.memory import copied
from lightning_pipeline.partition.ownership import absent_state_expected, holders_of, named_tensors
from lightning_pipeline.partition.placeholder import (
    COPY,
    Placeholder,
    TensorSpec,
    describe,
    higher_order_error,
    transform_error,
)
from lightning_pipeline.partition.torch_functions import (
    FunctionKind,
    function_name,
    kind_of,
)
from lightning_pipeline.partition.users_code import in_hook, users_line, users_lines
from lightning_pipeline.recording.operation import Call, take_apart
from lightning_pipeline.recording.recorder import Recorder
from lightning_pipeline.recording.tensor_copies import reduced
from lightning_pipeline.runtime.direct import DirectTransport
from lightning_pipeline.runtime.host_memory import available_bytes

_TOGETHER = object()
"""Returned in place of a result if all ranks run the call."""


class OwnerComputes(TorchFunctionMode):
    """The torch function mode that is active in the user's hooks and callbacks.

    Attributes:
        ended_by: the error that the last hook has ended with, where all ranks have run the same until then.
        trainer: has `should_stop`, which the first rank decides where a hook asks for the rank.
    """

    trainer: Any = SimpleNamespace(should_stop=False)

    def __init__(self, module: nn.Module, recorder: Recorder, direct: DirectTransport) -> None:
        super().__init__()
        self._module = module
        self._direct = direct
        self._recorder = recorder
        self._rank = direct.rank
        self._exchanges = Exchanges(direct)
        self._operands = Operands(direct, self._exchanges)
        self.keys = TensorKeys(recorder.tensors)
        self._calls = PlacedCalls(recorder, self._operands, self.keys, self._rank)
        self._gradients = ParameterGradients(module, self._exchanges, self._operands, self.keys)
        self.states = OptimizerStates(self._exchanges, self.keys, self._rank)
        self.saved = SavedStates(self._exchanges, self.keys, self._rank)
        self.lending = Lending(direct, self.keys)
        self.first_rank = FirstRank(module, direct, self.keys)
        self._have_met = False
        self.ended_by: BaseException | None = None
        self._lent = LentMemory(module, self._rank, self._operands)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if in_hook.is_rank_known:
            self.first_rank.changes.note(func, args)
        if is_partial(args) or (kwargs and is_partial(kwargs.values())):
            return self._meet(func, args, kwargs or {})
        if in_hook.is_rank_known and in_hook.is_here() and not self._have_met and is_draw(func, kwargs or {}):
            with _torch.DisableTorchFunction():
                self._meet_first_rank(function_name(func), (), draws=True, is_for_all=False)
        return func(*args, **(kwargs or {}))

    @contextmanager
    def patched(self) -> Iterator[None]:
        """While entered, functions that take what a hook gives them past this mode get the data of that."""
        with processes_started(self, self.whole), whole_calls_seen(self):
            yield

    @contextmanager
    def entered(self, *, shows_states: bool = True) -> Iterator[None]:
        """While entered, the user's code runs between steps.

        Args:
            shows_states: whether it sees the whole states of optimizers, which an optimizer's step must not.
        """
        self.follow_module()
        if in_hook.on:
            yield
            return
        # This one may be a hook of a run within another hook, which goes on after it.
        with self.first_rank.interrupted(self.trainer) if in_hook.is_rank_known else nullcontext():
            yield from self._entered(shows_states)

    def _entered(self, shows_states: bool) -> Iterator[None]:
        in_hook.on, in_hook.is_rank_known = True, False
        in_hook.when_rank_known, in_hook.at_rank_zero_only = self.first_rank.begin, self._give_first_rank
        self._gradients.forget()
        in_hook.take, in_hook.thread = self._take, threading.get_ident()
        if in_hook.is_rank_kept:
            in_hook.note_rank()
        before = self._exchanges.number
        try:
            states = self.states.shown() if shows_states else nullcontext()
            noted = _torch.before_collectives(self._note_collective)
            # A mode that a hook enters may stand until a later hook, which leaves it from the top of the stack.
            own = _torch.lowest_function_mode(self)
            written = compiled_as_written(self._recorder.note_as_written)
            gathered = gathered_by_hooks()
            with absent_state_expected(), parameters_seen(self.keys), gathered, noted, states, written, own:
                yield
            self._exchanges.send()
            self._lent.check()
            if in_hook.is_rank_known:
                self.trainer.should_stop = self.first_rank.end(stops=self.trainer.should_stop)
            if self._exchanges.number > before:  # a rank that made fewer calls than others is found here
                # An optimizer that is stepped in the hook may have made states on the ranks that hold its parameters.
                self.keys.number = max(self._exchanges.share("the end of a hook", self.keys.number))
        except BaseException as error:
            with suppress(Exception):
                self._exchanges.send()  # for which others may wait before they come to the same error
            self.ended_by = None if in_hook.is_rank_known else error
            raise
        finally:
            in_hook.on = in_hook.is_rank_known = False
            self.keys.let_go()

    @property
    def num_exchanges(self) -> int:
        """The number of exchanges between ranks so far."""
        return self._exchanges.number

    def _note_collective(self, name: str | None) -> None:
        """The user's code is about to ask for the rank, or to wait for other ranks in a collective of its own.

        The first rank may still be at calls that it alone runs, and needs the others for those.
        """
        if not in_hook.is_here() or _torch.is_faking():  # torch's log asks for the rank while it exports a module
            return
        if name is None or not in_hook.is_rank_known:
            in_hook.note_rank()
            self._exchanges.send()
        elif self.is_first_alone(name):
            refuse_alone(name)

    @contextmanager
    def aside(self, together: str | None = None) -> Iterator[None]:
        """While entered within `entered`, this package's own code sees the tensors that this rank holds.

        Args:
            together: the name of what all ranks do together then, if they do.
        """
        if not in_hook.on:
            yield
            return
        self._exchanges.send()
        if self.is_first_alone("aside") and together is not None:
            refuse_alone(together)
        try:
            with self.unseen(), self.states.hidden():
                yield
        finally:
            self._gradients.forget()

    @contextmanager
    def unseen(self) -> Iterator[None]:
        """While entered within `entered`, calls go past this mode, and what is compiled runs compiled."""
        with _torch.function_modes_taken_off() as modes:
            in_hook.on = False
            try:
                others = [mode for mode in reversed(modes) if mode is not self]
                with _torch.function_modes_put_on(others), compiled_as_asked():
                    yield
            finally:
                in_hook.on = True

    @contextmanager
    def resumed(self) -> Iterator[None]:
        """While entered within `aside`, the user's code runs again, as a closure that it gives to an optimizer."""
        in_hook.on = True
        self._gradients.forget()
        try:
            written = compiled_as_written(self._recorder.note_as_written)
            with _torch.lowest_function_mode(self), written:
                yield
            self._exchanges.send()
        finally:
            in_hook.on = False

    def take_over(self, other: OwnerComputes) -> None:
        """Become another one, which was made for another cut, while this one may be entered.

        A whole run may take place within a hook, as in a search for a learning rate.
        """
        number = self._exchanges.number
        vars(self).update(vars(other))
        self._exchanges.number += number
        in_hook.when_rank_known, in_hook.at_rank_zero_only = self.first_rank.begin, self._give_first_rank
        in_hook.take = self._take

    def follow_module(self) -> None:
        """Have the views of the module's tensors that the last step has kept change with these from now on."""
        views, self._recorder.views_of_module = self._recorder.views_of_module, []
        if not views:
            return
        with _torch.DisableTorchFunction(), torch.no_grad():
            for one in views:
                one.make_again()
                self.keys.note(one.view, holders_of(one.of))

    def make_whole(self, num_processes: int) -> None:
        """After the last hook, give every rank what hooks have made and the user has kept, if it fits into memory.

        All ranks must call it.
        """
        for _, tensor in named_tensors(self._module):
            tensor.__dict__.pop("_gradient", None)
            self.keys.forget(tensor)
        share_kept(self.keys, self._exchanges, self._direct, available_bytes() // (2 * num_processes))

    def whole(self, tensors: Sequence[Tensor], what: str) -> list[Tensor]:
        """The data of tensors, on every rank. All ranks must call it.

        No rank has a key for what is returned: what is made of it is not made on all ranks as parts of one tensor.
        """
        with _torch.DisableTorchFunction():
            if in_hook.is_rank_known and is_partial(tensors):
                found = self._meet_first_rank("whole", wanted_of(self.keys, tensors))
                if found is not None:
                    return filled(tensors, found)
            return [one.detach() for one in self._operands.gather_everywhere(tensors, what)]

    def log(self, logged: Logged) -> Logged | None:
        """Come to a call of `self.log`. Returns what this rank is to log: what the first rank does, which may have
        computed it alone, here or in an earlier hook; None if that does not come to the call."""
        if not in_hook.is_here():
            return logged
        with _torch.DisableTorchFunction():
            if in_hook.is_rank_known:
                self._exchanges.send()
                return self.first_rank.log(("log", logged.name, *users_lines()), users_line(), logged)
            value = logged.value.detach().clone() if isinstance(logged.value, Tensor) else logged.value
            if isinstance(value, Number) or (isinstance(value, Tensor) and value.is_cpu):  # others would have to wait
                value = self._exchanges.from_first(f"log({logged.name!r})", value)
        return logged._replace(value=value) if self._rank else logged

    def is_first_alone(self, call: str) -> bool:
        """Whether the first rank alone comes to a call that waits for all, in a part of a hook that only it runs."""
        if not (in_hook.is_here() and in_hook.is_rank_known):
            return False
        with _torch.DisableTorchFunction():  # what the first rank is given is no call of the user's
            return self._meet_first_rank(call, ()) is not None

    def _give_first_rank(self, args: Any, kwargs: dict[str, Any]) -> None:
        """Every rank comes to a call that the first rank alone makes, as a logger's under `rank_zero_only`. It gets the
        data of what hooks have made among the arguments, which it may keep while the others do not.
        """
        if not is_partial(args) and not is_partial(kwargs.values()):
            return
        tensors = list(filter(self.keys.is_made, take_apart(self._give_first_rank, args, kwargs).tensors))
        if not tensors:
            return
        with _torch.DisableTorchFunction():
            call = "a function under rank_zero_only"
            if in_hook.is_rank_known and self._meet_first_rank(call, ()) is not None:
                return  # which only the first rank comes to
            needed: list[Holders] = [(0,)] * len(tensors)
            here = self._operands.gather(tensors, needed, call)
            for tensor, data in zip(tensors, here, strict=True):
                if self._rank == 0 and type(tensor) is Placeholder:
                    tensor.__dict__[COPY] = data.detach()

    def _take(self, func: Any, args: Any, kwargs: Any) -> Any:
        """A call that torch gives to no mode, neither to the user's."""
        with _torch.function_modes_taken_off():
            return self.__torch_function__(func, (), args, kwargs)

    # -- one call ---------------------------------------------------------------------------------------------------

    def _meet(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        if self._recorder.tensors.are_in_slices:
            args, kwargs = in_their_places(args, kwargs)
        if is_never_equal(func, args):
            return NotImplemented
        if func in REFLECTED:
            func, args = unreflected(func, args, lambda tensor: holders_of(tensor) or ())
        kind, name = kind_of(func), function_name(func)
        if kind is FunctionKind.DESCRIBES:
            return describe(func, args, kwargs)
        if kind is FunctionKind.GRAD_MODE or kind is FunctionKind.ENTERED:
            return func(*args, **kwargs)
        if in_hook.is_rank_known and not self._have_met:
            found = self._alone(func, kind, name, args, kwargs)
            if found is not _TOGETHER:
                return found
        if isinstance(func, _torch.HigherOrderOperator):
            raise higher_order_error(func)
        # These take a tensor as it is, and not its data.
        if name == "__deepcopy__":
            with _torch.DisableTorchFunctionSubclass():
                return deep_copy(self.keys, *args)
        if name in ("grad.__set__", "grad.__delete__", "_grad.__set__"):
            return self._gradients.set(args[0], args[1] if len(args) > 1 else None)
        if name in ("requires_grad_", "requires_grad.__set__"):
            return func(*args, **kwargs)
        if _torch.is_in_forward_mode():  # whose tensors cannot be sent
            raise transform_error(f"here by {name}")
        call = take_apart(func, args, kwargs)
        refuse_traced(name)
        if name in ("grad.__get__", "_grad.__get__"):
            return self._gradients.of(args[0])
        if name == "data.__set__":
            return self._lent.set_data(*args)
        if kind is FunctionKind.HOOKS and (whole := whole_in_steps(args[0])) is not None:
            return func(whole, *args[1:], **kwargs)
        if any(isinstance(tensor, DTensor) for tensor in call.tensors):
            return on_whole_tensors(self._run_met, func, args, kwargs, name)
        if windows := windows_among(call.tensors):
            return on_windows(lambda: self._meet_whole(func, call, name, kind, args, kwargs), windows)
        return self._meet_whole(func, call, name, kind, args, kwargs)

    def _meet_whole(self, func: Any, call: Call, name: str, kind: FunctionKind, args: Any, kwargs: Any) -> Any:
        """`_meet` for a call that is none on slices, and no question of one rank's."""
        if kind is FunctionKind.HOOKS:
            if type(args[0]) is Placeholder and not args[0]._pl_spec.is_parameter:  # the hook runs where the data is
                return RemovableHandle(OrderedDict())
            with _torch.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        if kind is FunctionKind.BACKWARD:
            raise NotImplementedError(
                f"{function_name(func)} on what not every stage holds is not supported outside of steps "
                f"({users_line()}): compute it in training_step"
            )
        if name.startswith("_foreach_"):
            return run_by_holders(func, args, kwargs, self._calls.compute)
        if kind is FunctionKind.READS or kind is FunctionKind.PRINTS:
            here = self._operands.gather_everywhere(call.tensors, name)
            spec = TensorSpec.of(call.tensors[0])
            if kind is FunctionKind.PRINTS and spec.is_leaf and type(call.tensors[0]) is Placeholder:
                here[0] = here[0].detach().requires_grad_(spec.requires_grad)
            if name == "__reduce_ex__":
                return reduced(here[0], spec, args[1])
            return self._calls.run(func, call, here)
        if kind is FunctionKind.CALLS:  # Python, which every rank runs
            here = [copied(one) for one in self._operands.gather_everywhere(call.tensors, name)]
            return self._meet(Tensor.copy_, (args[0], self._calls.run(func, call, here)), {})
        if is_draw(func, kwargs):
            return self._calls.draw(func, call)
        return self._calls.compute(func, call, name, kind)

    def _run_met(self, func: Any, types: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Run a call at which the first rank has been met: ranks without slices come to it once."""
        before, self._have_met = self._have_met, True
        try:
            return self.__torch_function__(func, types, args, kwargs)
        finally:
            self._have_met = before

    def _alone(self, func: Any, kind: FunctionKind, name: str, args: Any, kwargs: dict[str, Any]) -> Any:
        """The result on the first rank, if it runs the call alone with operands of other ranks; else `_TOGETHER`."""
        call = take_apart(func, args, kwargs)
        is_gradient = name in ("grad.__get__", "_grad.__get__")
        keys = [self.keys.key_of(tensor) for tensor in call.tensors]
        wanted = wanted_of(self.keys, call.tensors, gradient=is_gradient)
        found = self._meet_first_rank(name, wanted, *keys, draws=is_draw(func, kwargs))
        if found is None:
            return _TOGETHER
        refuse_window_of_first_rank(call.tensors, name, writes=kind is FunctionKind.WRITES)
        is_written = kind is FunctionKind.WRITES and holders_of(call.tensors[0]) not in (None, (0,))
        if is_written or kind is FunctionKind.HOOKS or kind is FunctionKind.BACKWARD:
            refuse_change_alone(name)
        if name not in ("__deepcopy__", "__reduce_ex__"):
            for one in found:
                if one is not None:
                    self.first_rank.changes.note_copy(one)
        with _torch.DisableTorchFunction():
            if is_gradient:
                return found[0] if found else args[0].grad
            here: list[Any] = filled(call.tensors, found)
            if name == "__reduce_ex__":
                return reduced(here[0], TensorSpec.of(here[0]), args[1])
            if name == "__deepcopy__":
                copied = args[1][id(args[0])] = here[0] if here[0] is not args[0] else copy_of(*args)
                return copied
            return self._calls.run(func, call, here)

    def _meet_first_rank(
        self, call: str, wanted: Sequence[Wanted], *keys: int | None, **options: bool
    ) -> list[Tensor | None] | None:
        """`FirstRank.meet`, for a call in a hook that has asked for the rank."""
        self._exchanges.send()
        return self.first_rank.meet((call, *keys, *users_lines()), users_line(), wanted, **options)
