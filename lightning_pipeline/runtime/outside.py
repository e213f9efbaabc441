"""Outside of steps: what hooks and callbacks do with tensors that not every rank holds.

All ranks run the same code, so all know which ranks hold each operand (`holders_of`): the holders of what is written
into, or of the operands, compute; the others get a placeholder. What an operand's holder alone has goes to those who
compute at once. Numbers that Python asks for are the same on every rank.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn
from torch.distributed import distributed_c10d
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode, handle_torch_function

from lightning_pipeline.partition import tree
from lightning_pipeline.partition.functions import Kind, function_name, is_drawing_of_own, kind_of
from lightning_pipeline.partition.guards import absent_state_expected
from lightning_pipeline.partition.matcher import torch_state
from lightning_pipeline.partition.operation import Call, put_together, take_apart
from lightning_pipeline.partition.ownership import holders_of, note_holders
from lightning_pipeline.partition.placeholder import Look, Placeholder, become, in_hook, is_absent, placeholder
from lightning_pipeline.partition.recorder import Recorder
from lightning_pipeline.partition.users_line import users_line
from lightning_pipeline.runtime.direct import Direct
from lightning_pipeline.runtime.exchanges import Exchanges
from lightning_pipeline.runtime.first_rank import FirstRank, Wanted
from lightning_pipeline.runtime.transport import Transport
from lightning_pipeline.runtime.visit import conform

Holders = tuple[int, ...] | None
"""The ranks that hold a tensor; None for all."""

_PACKAGE = os.path.dirname(os.path.dirname(__file__))
_TOGETHER = object()
"""In place of a result: all ranks run the call."""

EVERYWHERE_BYTES = 1 << 16
"""Up to this size operands of different holders go to every rank, which then has the result."""
_BY_LOOKS = frozenset(
    (
        *("zeros_like", "ones_like", "empty_like", "full_like", "rand_like", "randn_like", "randint_like"),
        *("new_zeros", "new_ones", "new_empty", "new_full", "new_empty_strided", "new_tensor", "view_as", "expand_as"),
        *("reshape_as", "type_as", "resize_as_", "normal_", "uniform_", "random_", "exponential_", "geometric_"),
        *("cauchy_", "log_normal_", "kaiming_uniform_", "kaiming_normal_", "xavier_uniform_", "xavier_normal_"),
        *("trunc_normal_", "orthogonal_", "sparse_", "zero_", "fill_"),
    )
)
"""Functions that ask no more of tensors beside the first than their looks; of the first one too, where they draw."""


class Outside(TorchFunctionMode):
    """Answers torch's functions outside of steps.

    Args:
        module: the LightningModule.
        recorder: knows what functions give.
        rank: this rank's place in the pipeline.
        direct: to the others.
    """

    def __init__(
        self, module: nn.Module, recorder: Recorder, rank: int, transport: Transport, direct: Direct
    ) -> None:
        super().__init__()
        self._module = module
        self._recorder = recorder
        self._rank = rank
        self._transport = transport
        self._direct = direct
        self._exchanges = Exchanges(transport)
        self._made: WeakValueDictionary[int, Tensor] = WeakValueDictionary()
        self._num_made = 0
        self._first_rank = FirstRank(direct, transport.num_stages, self._tensor_of)
        self._gradients: dict[int, bool] | None = None

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if _is_partial(args) or (kwargs and _is_partial(kwargs.values())):
            return self._meet(func, args, kwargs or {})
        return func(*args, **(kwargs or {}))

    @contextmanager
    def entered(self) -> Iterator[None]:
        """While the user's code runs between steps."""
        if in_hook.on:
            yield
            return
        in_hook.on, in_hook.is_rank_known, self._gradients = True, False, None
        in_hook.thread = threading.get_ident()
        before = self._exchanges.number
        try:
            with absent_state_expected(), self._ranks_noted(), self._parameters_seen(), self:
                yield
            self._exchanges.send()
            if in_hook.is_rank_known:
                self._first_rank.end()
            if self._exchanges.number > before:
                self._exchanges.meet("the end of a hook", users_line())
        finally:
            in_hook.on = False

    @contextmanager
    def aside(self) -> Iterator[None]:
        """While the package does its own, or a step is recorded."""
        if not in_hook.on:
            yield
            return
        self._exchanges.send()
        if in_hook.is_rank_known:
            self._meet_first_rank(("aside", *_lines()), users_line(), ())
        modes = []
        while torch._C._len_torch_function_stack():
            modes.append(torch._C._pop_torch_function_stack())
        others = [mode for mode in modes if mode is not self]
        for mode in reversed(others):
            torch._C._push_on_torch_function_stack(mode)
        in_hook.on = False
        try:
            yield
        finally:
            in_hook.on, self._gradients = True, None
            for _ in others:
                torch._C._pop_torch_function_stack()
            for mode in reversed(modes):
                torch._C._push_on_torch_function_stack(mode)

    def whole(self, tensors: Sequence[Tensor], what: str) -> list[Tensor]:
        """The data of tensors, on every rank. All ranks must call it."""
        with torch._C.DisableTorchFunction():
            if in_hook.is_rank_known and _is_partial(tensors):
                found = self._meet_first_rank(("whole", *_lines()), users_line(), self._wanted(tensors))
                if found is not None:
                    return [found.pop(0) if type(one) is Placeholder else one for one in tensors]  # type: ignore[misc]
            return self._whole(tensors, what)

    def _whole(self, tensors: Sequence[Tensor], what: str) -> list[Tensor]:
        return self._gather(tensors, [None] * len(tensors), what)

    # -- one call ---------------------------------------------------------------------------------------------------

    def _meet(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        kind, name = kind_of(func), function_name(func)
        if kind is Kind.DESCRIBES:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        if kind is Kind.GRAD_MODE or kind is Kind.ENTERED:
            return func(*args, **kwargs)
        if in_hook.is_rank_known:
            found = self._alone(func, kind, name, args, kwargs)
            if found is not _TOGETHER:
                return found
        if name == "__deepcopy__":
            with torch._C.DisableTorchFunctionSubclass():
                return self._copied(*args)
        if name in ("grad.__set__", "grad.__delete__", "_grad.__set__"):
            return self._set_gradient(args[0], args[1] if len(args) > 1 else None)
        if name in ("requires_grad_", "requires_grad.__set__"):
            return func(*args, **kwargs)
        call = take_apart(func, args, kwargs)
        if any(isinstance(tensor, DTensor) and is_absent(tensor) for tensor in call.tensors):
            raise NotImplementedError(
                f"{name} is given a parameter that tensor parallelism has split, outside of steps ({users_line()}): "
                f"leave such parameters out, or leave them whole"
            )
        if name in ("grad.__get__", "_grad.__get__"):
            return self._gradient(args[0])
        if name == "data.__set__":
            return self._set_data(*args)
        if kind is Kind.HOOKS:
            return func(*args, **kwargs) if type(args[0]) is not Placeholder else _NoHandle()
        if kind is Kind.BACKWARD:
            raise NotImplementedError(
                f"{function_name(func)} on what not every stage holds is not supported outside of steps "
                f"({users_line()}): compute it in training_step"
            )
        if name.startswith("_foreach_"):
            return self._each(func, args, kwargs)
        if kind is Kind.READS or kind is Kind.PRINTS:
            here = self._read(call, name)
            if kind is Kind.PRINTS and Look.of(call.tensors[0]).is_leaf and type(call.tensors[0]) is Placeholder:
                here[0] = here[0].detach().requires_grad_(Look.of(call.tensors[0]).requires_grad)
            if name == "__reduce_ex__":
                return _reduced(here[0], Look.of(call.tensors[0]), args[1])
            return self._run(func, call, here)
        if kind is Kind.DRAWS and not is_drawing_of_own(kwargs):
            return self._draw(func, call, name)
        return self._compute(func, call, name, kind)

    def _alone(self, func: Any, kind: Kind, name: str, args: Any, kwargs: dict[str, Any]) -> Any:
        """What a call gives on the first rank where it alone runs it, on what the others give it."""
        call = take_apart(func, args, kwargs)
        is_gradient = name in ("grad.__get__", "_grad.__get__")
        keys = [self._key_of(tensor) for tensor in call.tensors]
        wanted = self._wanted(call.tensors, gradient=is_gradient)
        found = self._meet_first_rank((name, *keys, *_lines()), users_line(), wanted)
        if found is None:
            return _TOGETHER
        is_written = kind is Kind.WRITES and holders_of(call.tensors[0]) not in (None, (0,))
        if is_written or kind is Kind.HOOKS or kind is Kind.BACKWARD:
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
                return _reduced(own, Look.of(own), args[1])
            if name == "__deepcopy__":
                copied = args[1][id(args[0])] = here[0] if here[0] is not args[0] else _copy_of(*args)
                return copied
            return self._run(func, call, here)

    def _meet_first_rank(self, place: Any, line: str, wanted: Sequence[Wanted]) -> list[Tensor | None] | None:
        self._exchanges.send()
        return self._first_rank.meet(place, line, wanted)

    def _wanted(self, tensors: Iterable[Tensor], *, gradient: bool = False) -> list[Wanted]:
        return [
            Wanted(self._key_of(tensor), (holders_of(tensor) or (0,))[0], gradient)
            for tensor in tensors
            if type(tensor) is Placeholder
        ]

    def _key_of(self, tensor: Tensor) -> int | None:
        """What a tensor that not every rank holds is called on all of them; None for other tensors."""
        if holders_of(tensor) is None:
            return None
        number = self._recorder.tensors.number_of(tensor)
        return tensor.__dict__.get("_key") if number is None else -1 - number

    def _tensor_of(self, key: int) -> Tensor | None:
        return self._made.get(key) if key >= 0 else self._recorder.tensors.tensors[-1 - key]

    def _note(self, tensor: Tensor, holders: Holders) -> Tensor:
        """What was made now, on all ranks."""
        note_holders(tensor, holders)
        if holders is not None:
            tensor.__dict__["_key"] = self._num_made
            self._made[self._num_made] = tensor
            self._num_made += 1
        return tensor

    def _absent(self, look: Look, holders: Holders, name: str) -> Tensor:
        return self._note(placeholder(look, name), holders)

    def _compute(self, func: Any, call: Call, name: str, kind: Kind) -> Any:
        """The holders compute; the others get placeholders."""
        held = [holders_of(tensor) for tensor in call.tensors]
        looks = [Look.of(tensor) for tensor in call.tensors]
        result = self._recorder.result(func, call, looks, torch_state())
        if result is None:
            if kind is Kind.WRITES:  # by a mask, as in x[x < 0] = y
                here = self._gather(call.tensors, [held[0]] * len(held), name)
                return self._run(func, call, here) if self._is_among(held[0]) else call.tensors[0]
            return self._run(func, call, self._read(call, name))
        bound = [slot for slot, _ in result.writes] + [slot for shared in result.shares for slot in shared]
        where = _where(held, looks, bound)
        needed: list[Holders] = [where] * len(held)
        if name in _BY_LOOKS:
            where = held[0]
            needed = [where, *([()] * (len(held) - 1))]
        here = self._gather(call.tensors, needed, name)
        if self._is_among(where):
            found = self._run(func, call, here)
            if where is None and all(here[slot] is tensor for slot, tensor in enumerate(call.tensors)):
                return found
            made, layout = tree.flatten(found)
            for index, known in enumerate(result.tensors):
                if isinstance(known, int):
                    made[index] = call.tensors[known]
                elif made[index].shape != known.shape or made[index].dtype is not known.dtype:
                    given = Look.of(made[index])
                    raise RuntimeError(f"{name} gave {given} where {known} was expected ({users_line()})")
                else:
                    self._note(made[index], where)
            return tree.rebuild(layout, made)
        for slot, look in result.writes:
            self._look_now(call.tensors[slot], look)
        return tree.rebuild(
            result.layout,
            [
                call.tensors[known] if isinstance(known, int) else self._absent(known, where, name)
                for known in result.tensors
            ],
        )

    def _run(self, func: Any, call: Call, tensors: Sequence[Any]) -> Any:
        """Run the call on data."""
        args, kwargs = put_together(call.args, tensors, call.numbers), put_together(call.kwargs, tensors, call.numbers)
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)

    def _read(self, call: Call, name: str) -> list[Tensor]:
        """The data of a call's tensors, for what every rank is to know."""
        found = self._whole(call.tensors, name)
        # The holders read what the others do, and nobody's memory is changed by what is made of it.
        return [
            tensor if type(tensor) is not Placeholder and holders_of(tensor) is None else data
            for tensor, data in zip(call.tensors, found, strict=True)
        ]

    def _draw(self, func: Any, call: Call, name: str) -> Any:
        """Generators go on alike on all ranks: all of them draw, and the holders keep it."""
        held = [holders_of(tensor) for tensor in call.tensors]
        if name in _BY_LOOKS:
            here = [_room(tensor) if type(tensor) is Placeholder else tensor for tensor in call.tensors]
        else:
            here = self._whole(call.tensors, name)
            here = [
                tensor if type(tensor) is not Placeholder else data
                for tensor, data in zip(call.tensors, here, strict=True)
            ]
        made, layout = tree.flatten(self._run(func, call, here))
        for index, tensor in enumerate(made):
            slot = next((slot for slot, operand in enumerate(here) if operand is tensor), None)
            if slot is not None:
                made[index] = call.tensors[slot]
            elif name in _BY_LOOKS and held[0] is not None:
                if not self._is_among(held[0]):
                    made[index] = tensor = placeholder(Look.of(tensor), name)
                self._note(tensor, held[0])
        return tree.rebuild(layout, made)

    def _each(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """torch's functions over lists, for the elements of each holder apart."""
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
                results = self._compute(func, call, function_name(func), Kind.COMPUTES)
            else:
                results = func(*own_args, **own_kwargs)
            if results is not None:
                found = [None] * count if found is None else found
                for index, result in zip(indices, results, strict=True):
                    found[index] = result
        return found

    # -- what belongs to a parameter --------------------------------------------------------------------------------

    def _gradient(self, tensor: Tensor) -> Tensor | None:
        held = holders_of(tensor)
        if not self._has_gradient(tensor):
            return None
        if type(tensor) is not Placeholder:
            gradient = tensor.grad
            assert gradient is not None
            return self._note(gradient, held)
        look = tensor.look.but(requires_grad=False, is_leaf=True, is_parameter=False)
        kept = tensor.__dict__.get("_gradient")
        if kept is None or kept.look is not look:
            kept = tensor.__dict__["_gradient"] = placeholder(look, f"the gradient of {tensor.what}")
        return self._note(kept, held)

    def _has_gradient(self, tensor: Tensor) -> bool:
        """Asked of the parameters' holders, once for a hook."""
        if self._gradients is None:
            parameters = [p for p in self._module.parameters() if holders_of(p) is not None]
            own = torch.zeros(len(parameters), dtype=torch.float64)
            for index, parameter in enumerate(parameters):
                if type(parameter) is not Placeholder and parameter.grad is not None:
                    own[index] = 1
            self._exchanges.meet("grad", users_line())
            rows = self._transport.all_gather_vector(own, "which parameters have gradients").tolist()
            self._gradients = {
                id(parameter): bool(rows[(holders_of(parameter) or (0,))[0]][index])
                for index, parameter in enumerate(parameters)
            }
        known = self._gradients.get(id(tensor))
        if known is None:  # of a copy of the module, or made outside
            return type(tensor) is not Placeholder and tensor.grad is not None
        return known

    def _set_gradient(self, tensor: Tensor, gradient: Tensor | None) -> None:
        held = holders_of(tensor)
        if gradient is not None:
            [here] = self._gather([gradient], [held], "grad.__set__")
        if held is not None:
            self._has_gradient(tensor)
            assert self._gradients is not None
            self._gradients[id(tensor)] = gradient is not None
        if type(tensor) is not Placeholder:
            tensor.grad = None if gradient is None else here

    def _set_data(self, tensor: Tensor, value: Tensor) -> None:
        held = holders_of(tensor)
        [here] = self._gather([value], [held], "data.__set__")
        if type(tensor) is not Placeholder:
            tensor.data = here
        else:
            look = Look.of(value)
            self._look_now(
                tensor, tensor.look.but(shape=look.shape, stride=look.stride, dtype=look.dtype, device=look.device)
            )

    @contextmanager
    def _ranks_noted(self) -> Iterator[None]:
        """While entered, it is noted who asks torch for the rank, and what was put by is sent before collectives of the
        user's: all of torch's ask whether this rank is in the group."""
        plain = distributed_c10d._rank_not_in_group

        def seen(group: Any) -> bool:
            if in_hook.is_here():
                in_hook.note_rank()
                self._exchanges.send()
            return plain(group)

        distributed_c10d._rank_not_in_group = seen
        try:
            yield
        finally:
            distributed_c10d._rank_not_in_group = plain

    @contextmanager
    def _parameters_seen(self) -> Iterator[None]:
        """While entered, parameters that are made, copied or pickled come here as tensors do: they go past modes."""
        before = {name: nn.Parameter.__dict__[name] for name in ("__new__", "__deepcopy__", "__reduce_ex__")}
        new = before["__new__"].__func__

        def made(cls: Any, data: Any = None, requires_grad: bool = True) -> Any:
            holders = holders_of(data) if in_hook.on and isinstance(data, Tensor) else None
            if holders is None:
                return new(cls, data, requires_grad)
            if type(data) is Placeholder:
                look = data.look.but(requires_grad=requires_grad, is_leaf=True, is_parameter=True)
                return self._note(placeholder(look, data.what), holders)
            with torch._C.DisableTorchFunction():
                return self._note(new(cls, data.detach(), requires_grad), holders)

        def through(name: str) -> Callable[..., Any]:
            def run(tensor: Tensor, argument: Any) -> Any:
                if in_hook.on and holders_of(tensor) is not None:
                    return handle_torch_function(getattr(Tensor, name), (tensor,), tensor, argument)
                return before[name](tensor, argument)

            return run

        nn.Parameter.__new__ = staticmethod(made)  # type: ignore[method-assign]
        nn.Parameter.__deepcopy__ = through("__deepcopy__")  # type: ignore[method-assign]
        nn.Parameter.__reduce_ex__ = through("__reduce_ex__")  # type: ignore[method-assign]
        try:
            yield
        finally:
            for name, function in before.items():
                setattr(nn.Parameter, name, function)

    def _copied(self, tensor: Tensor, memo: dict[int, Any]) -> Any:
        if id(tensor) not in memo:
            copied = placeholder(tensor.look, tensor.what) if type(tensor) is Placeholder else _copy_of(tensor, memo)
            self._note(copied, holders_of(tensor))
            memo[id(tensor)] = copied
        return memo[id(tensor)]

    @staticmethod
    def _look_now(place: Tensor, look: Look) -> None:
        if type(place) is Placeholder and place.look is not look:
            become(place, placeholder(look, place.what))

    # -- data on its way --------------------------------------------------------------------------------------------

    def _is_among(self, holders: Holders) -> bool:
        return holders is None or self._rank in holders

    def _gather(self, tensors: Sequence[Tensor], needed: Sequence[Holders], what: str) -> list[Any]:
        """The data of tensors on the ranks that need each, None elsewhere. All ranks must call it."""
        everybody = range(self._transport.num_stages)
        moves = []
        for index, (tensor, ranks) in enumerate(zip(tensors, needed, strict=True)):
            held = holders_of(tensor)
            if type(tensor) is Placeholder and held is None:
                raise RuntimeError(f"{tensor.what} belongs to a step that has not ended ({users_line()})")
            asked = everybody if ranks is None else ranks
            targets = [rank for rank in asked if held is not None and rank not in held]
            if targets and held is not None:
                moves.append((index, held[0], targets))
        arrived: dict[int, Tensor] = {}
        numbers = self._meet_receivers(what, [(Look.of(tensors[index]), *move) for index, *move in moves], [
            tensors[index].detach() if source == self._rank else None for index, source, _ in moves
        ]) if moves else {}
        for place, (index, source, targets) in enumerate(moves):
            tensor = tensors[index]
            look = Look.of(tensor)
            if source == self._rank:
                if not _is_number(look):
                    dense = conform(tensor.detach(), look)
                    for rank in targets:
                        self._direct.send(dense, rank)
            elif self._rank in targets:
                is_told = _is_number(look)
                data = _number_of(numbers[source][place], look) if is_told else self._direct.receive(look, source)
                if look.requires_grad and torch.is_grad_enabled():
                    data.requires_grad_().register_hook(_refuse_gradient(users_line()))
                    with torch.enable_grad():
                        data = data.view_as(data)
                arrived[index] = data

        def room(index: int, tensor: Tensor) -> Tensor | None:
            return _room(tensor) if needed[index] == () else None

        return [
            arrived.get(index, tensor if type(tensor) is not Placeholder else room(index, tensor))
            for index, tensor in enumerate(tensors)
        ]

    def _meet_receivers(self, what: str, moves: Sequence[Any], own: Sequence[Tensor | None]) -> dict[int, Any]:
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
                for rank in targets:
                    given = give.setdefault(rank, {})
                    if _is_number(look):
                        given[place] = tensor.cpu().reshape(1).resolve_conj().view(torch.uint8).numpy().tobytes()
            elif self._rank in targets:
                hear[source] = None
        found = self._exchanges.exchange(f"{what} [{digest}]", users_line(), give, hear)
        if not all(_is_number(look) for look, _, _ in moves):
            self._exchanges.send()  # before what follows it
        return found


class _NoHandle:
    """In place of a hook's handle, where the tensor is not."""

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


def _where(held: Sequence[Holders], looks: Sequence[Look], bound: Sequence[int]) -> Holders:
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
    if sum(looks[slot].num_bytes for slot in partial) <= EVERYWHERE_BYTES:
        return None
    return held[max(partial, key=lambda slot: (looks[slot].is_parameter, looks[slot].num_bytes))]


def _copy_of(tensor: Tensor, memo: dict[int, Any]) -> Any:
    """A copy of a tensor that is here."""
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(tensor.detach().clone(), tensor.requires_grad)
    copied = Tensor.__deepcopy__(tensor, memo)
    copied.__dict__.pop("_key", None)
    return copied


def _is_number(look: Look) -> bool:
    return look.shape.numel() == 1


def _number_of(content: bytes, look: Look) -> Tensor:
    return torch.frombuffer(bytearray(content), dtype=look.dtype).reshape(look.shape).to(look.device)


def _reduced(data: Tensor, look: Look, protocol: Any) -> Any:
    """What pickles a tensor, of a parameter as a parameter."""
    with torch._C.DisableTorchFunction():
        whole = nn.Parameter(data.detach(), look.requires_grad) if look.is_parameter else data.detach()
        return whole.__reduce_ex__(protocol)


def _room(place: Tensor) -> Tensor:
    """An empty tensor of the same looks."""
    look = Look.of(place)
    assert look.stride is not None
    made = torch.empty_strided(look.shape, look.stride, dtype=look.dtype, device=look.device)
    return made.requires_grad_(look.requires_grad)


def _refuse_gradient(line: str) -> Callable[[Tensor], None]:
    def refuse(gradient: Tensor) -> None:
        raise NotImplementedError(f"gradients do not go back to another stage outside of steps ({line})")

    return refuse


def _lines() -> tuple[int, ...]:
    """Where the hook that runs has come to: the lines of its functions, from the inside."""
    found = []
    frame: Any = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith((_PACKAGE, contextlib.__file__)):
        frame = frame.f_back
    while frame is not None and not frame.f_code.co_filename.startswith(_PACKAGE):
        found.append(frame.f_lineno)
        frame = frame.f_back
    return tuple(found)
