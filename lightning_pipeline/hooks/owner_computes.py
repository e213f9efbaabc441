"""Operations outside of steps on tensors that not every rank holds: the owner computes.

All ranks run the same code, so all of them know which ranks hold each operand (`holders_of`). The holders of what is
written into, or else of the operands, compute; the others get a placeholder. Operands that those who compute lack are
sent to them. Numbers that Python asks for are the same on every rank.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode

from lightning_pipeline.hooks.first_rank import FirstRank, Lending, Wanted
from lightning_pipeline.hooks.operands import Exchanges, Holders, Operands, TensorKeys, copy_of, empty_like
from lightning_pipeline.hooks.optimizer_states import OptimizerStates, ParameterGradients
from lightning_pipeline.hooks.patches import on_whole_tensors, parameters_seen, ranks_noted, refuse_writing
from lightning_pipeline.partition import tree
from lightning_pipeline.partition.ownership import absent_state_expected, holders_of, note_holders
from lightning_pipeline.partition.placeholder import Placeholder, TensorSpec, become, in_hook, placeholder
from lightning_pipeline.partition.torch_functions import FunctionKind, function_name, is_drawing_of_own, kind_of
from lightning_pipeline.partition.users_line import users_line, users_lines
from lightning_pipeline.recording.matcher import torch_state
from lightning_pipeline.recording.operation import Call, put_together, take_apart
from lightning_pipeline.recording.recorder import Recorder
from lightning_pipeline.runtime.direct import DirectTransport
from lightning_pipeline.runtime.host_memory import available_bytes
from lightning_pipeline.runtime.tensor_meta import EVERYWHERE_BYTES
from lightning_pipeline.runtime.transport import Transport

_TOGETHER = object()
"""In place of a result: all ranks run the call."""

_BY_LOOKS = frozenset(
    (
        *("zeros_like", "ones_like", "empty_like", "full_like", "rand_like", "randn_like", "randint_like"),
        *("new_zeros", "new_ones", "new_empty", "new_full", "new_empty_strided", "new_tensor", "view_as", "expand_as"),
        *("reshape_as", "type_as", "resize_as_", "normal_", "uniform_", "random_", "exponential_", "geometric_"),
        *("cauchy_", "log_normal_", "kaiming_uniform_", "kaiming_normal_", "xavier_uniform_", "xavier_normal_"),
        *("trunc_normal_", "orthogonal_", "sparse_", "zero_", "fill_"),
    )
)
"""Functions that ask no more of tensors beside the first than their specs; of the first one too, where they draw."""


class OwnerComputes(TorchFunctionMode):
    """Answers torch's functions outside of steps.

    Args:
        module: the LightningModule.
        recorder: knows what functions give.
        direct: to the other ranks of the pipeline.
    """

    def __init__(self, module: nn.Module, recorder: Recorder, transport: Transport, direct: DirectTransport) -> None:
        super().__init__()
        self._module = module
        self._transport = transport
        self._direct = direct
        self._recorder = recorder
        self._rank = direct.rank
        self._exchanges = Exchanges(transport)
        self._operands = Operands(direct, transport.num_stages, self._exchanges)
        self._keys = TensorKeys(recorder.tensors)
        self._gradients = ParameterGradients(module, transport, self._exchanges, self._operands, self._keys)
        self.states = OptimizerStates(transport, self._exchanges, self._keys)
        self.lending = Lending(direct, self._keys)
        self._first_rank = FirstRank(direct, transport.num_stages, self._keys.tensor_of)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if _is_partial(args) or (kwargs and _is_partial(kwargs.values())):
            return self._meet(func, args, kwargs or {})
        return func(*args, **(kwargs or {}))

    @contextmanager
    def entered(self, *, shows_states: bool = True) -> Iterator[None]:
        """While entered, the user's code runs between steps.

        Args:
            shows_states: whether it sees the whole states of optimizers; an optimizer's own step makes its own.
        """
        if in_hook.on:
            yield
            return
        in_hook.on, in_hook.is_rank_known = True, False
        in_hook.when_rank_known = self._keys.hold if self._rank else None
        self._gradients.forget()
        in_hook.thread = threading.get_ident()
        before = self._exchanges.number
        try:
            states = self.states.shown() if shows_states else nullcontext()
            with absent_state_expected(), ranks_noted(self._exchanges.send), parameters_seen(self._keys), states, self:
                yield
            self._exchanges.send()
            if in_hook.is_rank_known:
                self._first_rank.end()
            if self._exchanges.number > before:
                self._exchanges.meet("the end of a hook", users_line())
        finally:
            in_hook.on = False
            self._keys.let_go()

    @contextmanager
    def aside(self) -> Iterator[None]:
        """While entered, the package works on this rank's tensors as they are, or records a step."""
        if not in_hook.on:
            yield
            return
        self._exchanges.send()
        if in_hook.is_rank_known:
            self._meet_first_rank("aside", ())
        modes = []
        while torch._C._len_torch_function_stack():
            modes.append(torch._C._pop_torch_function_stack())
        others = [mode for mode in modes if mode is not self]
        for mode in reversed(others):
            torch._C._push_on_torch_function_stack(mode)
        in_hook.on = False
        try:
            with self.states.hidden():
                yield
        finally:
            in_hook.on = True
            self._gradients.forget()
            for _ in others:
                torch._C._pop_torch_function_stack()
            for mode in reversed(modes):
                torch._C._push_on_torch_function_stack(mode)

    def take_over(self, other: OwnerComputes) -> None:
        """Go on in the place of one that was made for another cut: a whole run may be going on within a hook, as that
        of a search for a learning rate is, and this mode is entered around it."""
        number = self._exchanges.number
        vars(self).update(vars(other))
        self._exchanges.number += number
        in_hook.when_rank_known = self._keys.hold if self._rank else None

    def make_whole(self, num_processes: int) -> None:
        """Give every rank what hooks have made and the user has kept, where it fits into memory, after the last hook.

        All ranks must call it.

        Args:
            num_processes: that share this machine's memory.
        """
        for parameter in self._module.parameters():
            parameter.__dict__.pop("_gradient", None)
        kept = self._keys.kept()
        made = {(key, TensorSpec.of(tensor), holders_of(tensor)) for key, tensor in kept.items()}
        own = available_bytes() // (2 * num_processes), made
        ranks = range(self._transport.num_stages)
        told = [self._transport.broadcast_object(own, rank, "what hooks have made") for rank in ranks]
        common = sorted(set.intersection(*(made for _, made in told)), key=lambda one: one[0])
        if sum(spec.num_bytes for _, spec, _ in common) > min(limit for limit, _ in told):
            return
        for key, spec, (owner, *_) in common:
            tensor = kept[key]
            data = self._direct.spread(tensor.detach() if owner == self._rank else None, spec, owner)
            if type(tensor) is Placeholder:
                become(tensor, nn.Parameter(data, spec.requires_grad) if spec.is_parameter else data)
            note_holders(tensor, None)

    def whole(self, tensors: Sequence[Tensor], what: str) -> list[Tensor]:
        """The data of tensors, on every rank. All ranks must call it."""
        with torch._C.DisableTorchFunction():
            if in_hook.is_rank_known and _is_partial(tensors):
                found = self._meet_first_rank("whole", self._wanted(tensors))
                if found is not None:
                    return [found.pop(0) if type(one) is Placeholder else one for one in tensors]  # type: ignore[misc]
            return self._whole(tensors, what)

    def _whole(self, tensors: Sequence[Tensor], what: str) -> list[Tensor]:
        return self._operands.gather(tensors, [None] * len(tensors), what)

    # -- one call ---------------------------------------------------------------------------------------------------

    def _meet(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        kind, name = kind_of(func), function_name(func)
        if kind is FunctionKind.DESCRIBES:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        if kind is FunctionKind.GRAD_MODE or kind is FunctionKind.ENTERED:
            return func(*args, **kwargs)
        if in_hook.is_rank_known:
            found = self._alone(func, kind, name, args, kwargs)
            if found is not _TOGETHER:
                return found
        if name == "__deepcopy__":
            with torch._C.DisableTorchFunctionSubclass():
                return self._copied(*args)
        if name in ("grad.__set__", "grad.__delete__", "_grad.__set__"):
            return self._gradients.set(args[0], args[1] if len(args) > 1 else None)
        if name in ("requires_grad_", "requires_grad.__set__"):
            return func(*args, **kwargs)
        call = take_apart(func, args, kwargs)
        if name in ("grad.__get__", "_grad.__get__"):
            return self._gradients.of(args[0])
        if any(isinstance(tensor, DTensor) for tensor in call.tensors):
            return on_whole_tensors(self._meet, func, args, kwargs, name)
        if name == "data.__set__":
            return self._set_data(*args)
        if kind is FunctionKind.HOOKS:
            return func(*args, **kwargs) if type(args[0]) is not Placeholder else _NoHandle()
        if kind is FunctionKind.BACKWARD:
            raise NotImplementedError(
                f"{function_name(func)} on what not every stage holds is not supported outside of steps "
                f"({users_line()}): compute it in training_step"
            )
        if name.startswith("_foreach_"):
            return self._each(func, args, kwargs)
        if kind is FunctionKind.READS or kind is FunctionKind.PRINTS:
            here = self._whole(call.tensors, name)
            if (
                kind is FunctionKind.PRINTS
                and TensorSpec.of(call.tensors[0]).is_leaf
                and type(call.tensors[0]) is Placeholder
            ):
                here[0] = here[0].detach().requires_grad_(TensorSpec.of(call.tensors[0]).requires_grad)
            if name == "__reduce_ex__":
                return _reduced(here[0], TensorSpec.of(call.tensors[0]), args[1])
            return self._run(func, call, here)
        if kind is FunctionKind.DRAWS and not is_drawing_of_own(kwargs):
            return self._draw(func, call, name)
        return self._compute(func, call, name, kind)

    def _alone(self, func: Any, kind: FunctionKind, name: str, args: Any, kwargs: dict[str, Any]) -> Any:
        """What a call gives on the first rank, if it alone runs the call; the others give it the operands."""
        call = take_apart(func, args, kwargs)
        is_gradient = name in ("grad.__get__", "_grad.__get__")
        keys = [self._keys.key_of(tensor) for tensor in call.tensors]
        found = self._meet_first_rank(name, self._wanted(call.tensors, gradient=is_gradient), *keys)
        if found is None:
            return _TOGETHER
        is_written = kind is FunctionKind.WRITES and holders_of(call.tensors[0]) not in (None, (0,))
        if is_written or kind is FunctionKind.HOOKS or kind is FunctionKind.BACKWARD:
            raise NotImplementedError(
                f"{name} changes what another stage holds, in code that the first rank alone runs ({users_line()}): "
                f"let every rank run it"
            )
        with torch._C.DisableTorchFunction():
            if is_gradient:
                return found[0] if found else args[0].grad
            here = [found.pop(0) if type(tensor) is Placeholder else tensor for tensor in call.tensors]
            if name == "__reduce_ex__":
                own: Any = here[0]
                return _reduced(own, TensorSpec.of(own), args[1])
            if name == "__deepcopy__":
                copied = args[1][id(args[0])] = here[0] if here[0] is not args[0] else copy_of(*args)
                return copied
            return self._run(func, call, here)

    def _meet_first_rank(self, call: str, wanted: Sequence[Wanted], *keys: int | None) -> list[Tensor | None] | None:
        """Come to a call in a hook that has asked for the rank (`FirstRank.meet`)."""
        self._exchanges.send()
        return self._first_rank.meet((call, *keys, *users_lines()), users_line(), wanted)

    def _wanted(self, tensors: Iterable[Tensor], *, gradient: bool = False) -> list[Wanted]:
        return [
            Wanted(self._keys.key_of(tensor), (holders_of(tensor) or (0,))[0], gradient)
            for tensor in tensors
            if type(tensor) is Placeholder
        ]

    def _compute(self, func: Any, call: Call, name: str, kind: FunctionKind) -> Any:
        """The holders compute; the others get placeholders."""
        held = [holders_of(tensor) for tensor in call.tensors]
        specs = [TensorSpec.of(tensor) for tensor in call.tensors]
        result = self._recorder.result(func, call, specs, torch_state())
        if result is None:
            if kind is FunctionKind.WRITES:  # by a mask, as in x[x < 0] = y
                here = self._operands.gather(call.tensors, [held[0]] * len(held), name)
                return self._run(func, call, here) if self._is_among(held[0]) else call.tensors[0]
            return self._run(func, call, self._whole(call.tensors, name))
        bound = [slot for slot, _ in result.writes] + [slot for shared in result.shares for slot in shared]
        where = _where(held, specs, bound)
        for slot, _ in result.writes:
            refuse_writing(call.tensors[slot], name)
        needed: list[Holders] = [where] * len(held)
        if name in _BY_LOOKS:
            where = held[0]
            needed = [where, *([()] * (len(held) - 1))]
        here = self._operands.gather(call.tensors, needed, name)
        if self._is_among(where):
            found = self._run(func, call, here)
            if where is None and all(here[slot] is tensor for slot, tensor in enumerate(call.tensors)):
                return found
            made, layout = tree.flatten(found)
            for index, known in enumerate(result.tensors):
                if isinstance(known, int):
                    made[index] = call.tensors[known]
                elif made[index].shape != known.shape or made[index].dtype is not known.dtype:
                    given = TensorSpec.of(made[index])
                    raise RuntimeError(f"{name} gave {given} where {known} was expected ({users_line()})")
                else:
                    self._keys.note(made[index], where)
            return tree.rebuild(layout, made)
        for slot, spec in result.writes:
            self._set_spec(call.tensors[slot], spec)
        return tree.rebuild(
            result.layout,
            [
                call.tensors[known] if isinstance(known, int) else self._keys.note(placeholder(known, name), where)
                for known in result.tensors
            ],
        )

    def _run(self, func: Any, call: Call, tensors: Sequence[Any]) -> Any:
        """Run the call on data."""
        args, kwargs = put_together(call.args, tensors, call.numbers), put_together(call.kwargs, tensors, call.numbers)
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)

    def _draw(self, func: Any, call: Call, name: str) -> Any:
        """All ranks draw, so that their generators stay alike; the holders keep what is drawn."""
        held = [holders_of(tensor) for tensor in call.tensors]
        if name in _BY_LOOKS:
            here = [empty_like(tensor) if type(tensor) is Placeholder else tensor for tensor in call.tensors]
        else:
            here = self._whole(call.tensors, name)
        made, layout = tree.flatten(self._run(func, call, here))
        for index, tensor in enumerate(made):
            slot = next((slot for slot, operand in enumerate(here) if operand is tensor), None)
            if slot is not None:
                made[index] = call.tensors[slot]
            elif name in _BY_LOOKS and held[0] is not None:
                if not self._is_among(held[0]):
                    made[index] = tensor = placeholder(TensorSpec.of(tensor), name)
                self._keys.note(tensor, held[0])
        return tree.rebuild(layout, made)

    def _each(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Run one of torch's functions over lists, on the elements of each group of holders by themselves."""
        lists = [value for value in (*args, *kwargs.values()) if isinstance(value, (list, tuple))]
        count = len(lists[0])
        groups: dict[Any, list[int]] = {}
        for index in range(count):
            held = tuple(holders_of(one[index]) for one in lists if isinstance(one[index], Tensor))
            groups.setdefault(held, []).append(index)
        found: list[Any] | None = None
        for indices in groups.values():

            def part(value: Any, indices: list[int] = indices) -> Any:
                if isinstance(value, (list, tuple)):
                    return [value[index] for index in indices]
                if isinstance(value, Tensor) and value.dim() == 1 and len(value) == count and "addc" in func.__name__:
                    return value[indices]
                return value

            own_args = [part(value) for value in args]
            own_kwargs = {key: part(value) for key, value in kwargs.items()}
            if _is_partial(own_args) or _is_partial(own_kwargs.values()):
                call = take_apart(func, own_args, own_kwargs)
                results = self._compute(func, call, function_name(func), FunctionKind.COMPUTES)
            else:
                results = func(*own_args, **own_kwargs)
            if results is not None:
                found = [None] * count if found is None else found
                for index, result in zip(indices, results, strict=True):
                    found[index] = result
        return found

    def _set_data(self, tensor: Tensor, value: Tensor) -> None:
        held = holders_of(tensor)
        [here] = self._operands.gather([value], [held], "data.__set__")
        if type(tensor) is not Placeholder:
            tensor.data = here
        else:
            spec = TensorSpec.of(value)
            self._set_spec(
                tensor, tensor.spec.but(shape=spec.shape, stride=spec.stride, dtype=spec.dtype, device=spec.device)
            )

    def _copied(self, tensor: Tensor, memo: dict[int, Any]) -> Any:
        if id(tensor) not in memo:
            copied = placeholder(tensor.spec, tensor.what) if type(tensor) is Placeholder else copy_of(tensor, memo)
            self._keys.note(copied, holders_of(tensor))
            memo[id(tensor)] = copied
        return memo[id(tensor)]

    def _is_among(self, holders: Holders) -> bool:
        return holders is None or self._rank in holders

    @staticmethod
    def _set_spec(place: Tensor, spec: TensorSpec) -> None:
        if type(place) is Placeholder and place.spec is not spec:
            become(place, placeholder(spec, place.what))


class _NoHandle:
    """What registering a hook gives where the tensor is not."""

    def remove(self) -> None:
        pass


def _is_partial(values: Iterable[Any], depth: int = 0) -> bool:
    """Whether a tensor that not every rank holds is among some arguments."""
    for value in values:
        kind = type(value)
        if kind is Placeholder:
            return True
        if kind is list or kind is tuple:
            if depth < 3 and _is_partial(value, depth + 1):
                return True
        elif kind is dict:
            if depth < 3 and _is_partial(value.values(), depth + 1):
                return True
        elif isinstance(value, Tensor) and holders_of(value) is not None:
            return True
    return False


def _where(held: Sequence[Holders], specs: Sequence[TensorSpec], bound: Sequence[int]) -> Holders:
    """The ranks that compute.

    Args:
        held: the holders of each operand.
        bound: operands that are written into, or whose memory the result shares.
    """
    if bound:
        return held[bound[0]]
    partial = [slot for slot, ranks in enumerate(held) if ranks is not None]
    common = set.intersection(*(set(held[slot]) for slot in partial))  # type: ignore[arg-type]
    if common:
        return tuple(sorted(common))
    if sum(specs[slot].num_bytes for slot in partial) <= EVERYWHERE_BYTES:
        return None
    return held[max(partial, key=lambda slot: (specs[slot].is_parameter, specs[slot].num_bytes))]


def _reduced(data: Tensor, spec: TensorSpec, protocol: Any) -> Any:
    """What `Tensor.__reduce_ex__` gives; a parameter's data is pickled as a parameter."""
    with torch._C.DisableTorchFunction():
        whole = nn.Parameter(data.detach(), spec.requires_grad) if spec.is_parameter else data.detach()
        return whole.__reduce_ex__(protocol)
