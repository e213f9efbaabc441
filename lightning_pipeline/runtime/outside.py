"""Outside of steps: what hooks and callbacks do with tensors that not every rank holds.

All ranks run the same code, so all know which ranks hold each operand (`holders_of`): the holders of what is written
into, or of the operands, compute; the others get a placeholder. What an operand's holder alone has goes to those who
compute at once. Numbers that Python asks for are the same on every rank.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode

from lightning_pipeline.partition import tree
from lightning_pipeline.partition.functions import Kind, function_name, is_drawing_of_own, kind_of
from lightning_pipeline.partition.guards import absent_state_expected
from lightning_pipeline.partition.matcher import autocast_state
from lightning_pipeline.partition.operation import Call, put_together, take_apart
from lightning_pipeline.partition.ownership import holders_of, note_holders
from lightning_pipeline.partition.placeholder import Look, Placeholder, become, in_hook, is_absent, placeholder
from lightning_pipeline.partition.recording import Recorder
from lightning_pipeline.partition.users_line import users_line
from lightning_pipeline.runtime.direct import Direct
from lightning_pipeline.runtime.transport import Transport
from lightning_pipeline.runtime.visit import conform

Holders = tuple[int, ...] | None
"""The ranks that hold a tensor; None for all."""

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
        self._num_exchanges = 0
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
        in_hook.on, self._gradients = True, None
        try:
            with absent_state_expected(), self:
                yield
        finally:
            in_hook.on = False

    @contextmanager
    def aside(self) -> Iterator[None]:
        """While the package does its own, or a step is recorded."""
        if not in_hook.on:
            yield
            return
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
        return self._gather(tensors, [None] * len(tensors), what)  # type: ignore[return-value]

    # -- one call ---------------------------------------------------------------------------------------------------

    def _meet(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        kind, name = kind_of(func), function_name(func)
        if kind is Kind.DESCRIBES or name == "__deepcopy__":
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs) if kind is Kind.DESCRIBES else self._copied(func, args)
        if kind is Kind.GRAD_MODE or kind is Kind.ENTERED:
            return func(*args, **kwargs)
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
            return self._run(func, call, here)
        if kind is Kind.DRAWS and not is_drawing_of_own(kwargs):
            return self._draw(func, call, name)
        return self._compute(func, call, name, kind)

    def _compute(self, func: Any, call: Call, name: str, kind: Kind) -> Any:
        """The holders compute; the others get placeholders."""
        held = [holders_of(tensor) for tensor in call.tensors]
        looks = [Look.of(tensor) for tensor in call.tensors]
        state = (torch.is_grad_enabled(), torch.is_inference_mode_enabled(), autocast_state())
        result = self._recorder.result(func, call, looks, state)
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
                    raise RuntimeError(f"{name} gave {Look.of(made[index])} where {known} was expected ({users_line()})")
                else:
                    note_holders(made[index], where)
            return tree.rebuild(layout, made)
        for slot, look in result.writes:
            self._look_now(call.tensors[slot], look)
        return tree.rebuild(
            result.layout,
            [
                call.tensors[known] if isinstance(known, int) else _absent(known, where, name)
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
        if _is_rank_zero_only() and not any(type(tensor) is Placeholder for tensor in call.tensors):
            return call.tensors  # nobody else asks
        found = self.whole(call.tensors, name)
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
            here = self.whole(call.tensors, name)
            here = [tensor if type(tensor) is not Placeholder else data for tensor, data in zip(call.tensors, here)]
        made, layout = tree.flatten(self._run(func, call, here))
        for index, tensor in enumerate(made):
            slot = next((slot for slot, operand in enumerate(here) if operand is tensor), None)
            if slot is not None:
                made[index] = call.tensors[slot]
            elif name in _BY_LOOKS and held[0] is not None:
                note_holders(tensor, held[0])
                if not self._is_among(held[0]):
                    made[index] = _absent(Look.of(tensor), held[0], name)
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
            note_holders(gradient, held)
            return gradient
        look = tensor.look.but(requires_grad=False, is_leaf=True, is_parameter=False)
        kept = tensor.__dict__.get("_gradient")
        if kept is None or kept.look is not look:
            kept = tensor.__dict__["_gradient"] = _absent(look, held, f"the gradient of {tensor.what}")
        return kept

    def _has_gradient(self, tensor: Tensor) -> bool:
        """Asked of the parameters' holders, once for a hook."""
        if self._gradients is None:
            parameters = [p for p in self._module.parameters() if holders_of(p) is not None]
            own = torch.zeros(len(parameters), dtype=torch.float64)
            for index, parameter in enumerate(parameters):
                if type(parameter) is not Placeholder and parameter.grad is not None:
                    own[index] = 1
            self._meet_others("grad")
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

    def _copied(self, func: Any, args: Any) -> Any:
        tensor, memo = args
        if id(tensor) not in memo:
            copied = placeholder(tensor.look, tensor.what) if type(tensor) is Placeholder else func(tensor, memo)
            note_holders(copied, holders_of(tensor))
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
            targets = [rank for rank in (everybody if ranks is None else ranks) if held is not None and rank not in held]
            if targets and held is not None:
                moves.append((index, held[0], targets))
        if moves:
            self._meet_others(what, [(source, targets, repr(Look.of(tensors[index]))) for index, source, targets in moves])
        arrived: dict[int, Tensor] = {}
        for index, source, targets in moves:
            tensor = tensors[index]
            look = Look.of(tensor)
            if source == self._rank:
                dense = conform(tensor.detach(), look)
                for rank in targets:
                    self._direct.send(dense, rank)
            elif self._rank in targets:
                data = self._direct.receive(look, source)
                if look.requires_grad and torch.is_grad_enabled():
                    data.requires_grad_().register_hook(_refuse_gradient(users_line()))
                    with torch.enable_grad():
                        data = data.view_as(data)
                arrived[index] = data
        return [
            arrived.get(index, tensor if type(tensor) is not Placeholder else _room(tensor) if needed[index] == () else None)
            for index, tensor in enumerate(tensors)
        ]

    def _meet_others(self, what: str, moves: Any = ()) -> None:
        line = users_line()
        if _is_rank_zero_only():
            raise RuntimeError(
                f"{what} takes data of another stage in code that the first rank alone runs, by rank_zero_only ({line}): "
                f"read it where every rank does, and pass on the number"
            )
        self._num_exchanges += 1
        digest = hashlib.blake2b(repr(moves).encode(), digest_size=4).hexdigest()
        self._transport.meet(self._num_exchanges, f"{what} [{digest}]", line)


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


def _absent(look: Look, holders: Holders, name: str) -> Placeholder:
    made = placeholder(look, name)
    note_holders(made, holders)
    return made


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


def _is_rank_zero_only() -> bool:
    """Whether the running code is inside a function that `rank_zero_only` keeps to the first rank."""
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_filename.endswith("rank_zero.py") and frame.f_code.co_name == "wrapped_fn":
            return True
        frame = frame.f_back  # type: ignore[assignment]
    return False
