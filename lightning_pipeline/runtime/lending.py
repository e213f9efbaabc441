"""What the first rank's loader computes with the module, of which other ranks hold parts.

The first rank alone iterates its loader. Where data comes out of the model, as the episodes of a policy do, it borrows
the tensors that it lacks from ranks that wait for the batch::

    rank 0   next(loader): policy(state) ... tensor 7? ... policy(state) ...   the batch is ready
    rank 1   waits for the batch             here it is    waits for the batch
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, NoReturn

from torch import Tensor

from lightning_pipeline.partition.functions import Kind, function_name, kind_of
from lightning_pipeline.partition.operation import put_together, take_apart
from lightning_pipeline.partition.ownership import holders_of
from lightning_pipeline.partition.placeholder import Look, Placeholder, absent
from lightning_pipeline.partition.users_line import users_line
from lightning_pipeline.runtime.direct import Direct
from lightning_pipeline.runtime.first_rank import like
from lightning_pipeline.runtime.host_memory import available_bytes
from lightning_pipeline.runtime.tensor_keys import TensorKeys
from lightning_pipeline.runtime.tensor_meta import conform


class Asked(NamedTuple):
    """The first rank asks for a tensor."""

    key: int


class Lending:
    """Lends tensors of the module to the first rank."""

    def __init__(self, direct: Direct, keys: TensorKeys) -> None:
        self._direct = direct
        self._keys = keys
        self._borrowed: dict[int, Tensor] = {}
        self._place = (0, 0)

    @contextmanager
    def borrowing(self) -> Iterator[None]:
        """While entered on the first rank, code takes what it lacks from ranks that call `lend`."""
        self._place = os.getpid(), threading.get_ident()
        absent.answer = self._answer
        try:
            yield
        finally:
            absent.answer = None
            self._borrowed.clear()

    def lend(self, asked: Asked) -> None:
        """Give the first rank what it asks for."""
        tensor = self._keys.tensor_of(asked.key)
        assert tensor is not None
        self._direct.send(conform(tensor.detach(), Look.of(tensor)), 0)

    def _answer(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """What a call gives; NotImplemented where this is other code than the loader's, as in a worker of its own."""
        if (os.getpid(), threading.get_ident()) != self._place:
            return NotImplemented
        kind, name = kind_of(func), function_name(func)
        call = take_apart(func, args, kwargs)
        is_written = kind is Kind.WRITES and type(call.tensors[0]) is Placeholder
        if is_written or kind in (Kind.HOOKS, Kind.BACKWARD) or name in ("grad.__get__", "_grad.__get__"):
            _refuse(name)
        tensors = [self._borrow(one) if type(one) is Placeholder else one for one in call.tensors]
        return func(*put_together(call.args, tensors, call.numbers), **put_together(call.kwargs, tensors, call.numbers))

    def _borrow(self, place: Placeholder) -> Tensor:
        key, holders = self._keys.key_of(place), holders_of(place)
        if key is None or holders is None:
            raise RuntimeError(f"{place.what} is on another stage, and no name is known for it ({users_line()})")
        found = self._borrowed.get(key)
        if found is None:
            look = place.look
            if sum(one.nbytes for one in self._borrowed.values()) + look.num_bytes > available_bytes() // 2:
                self._borrowed.clear()
            self._direct.tell_one(holders[0], Asked(key))
            data = self._direct.receive(look, holders[0], f"{place.what}, which the loader computes with")
            found = like(data, look)
            if look.requires_grad:
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
