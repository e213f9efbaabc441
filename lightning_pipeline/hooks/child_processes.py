"""Processes that a hook starts, such as the workers of a loader over features: they get data, and no connection.

A process has what its target, arguments and dataset refer to. While it is started, all of that is there in place of
placeholders; then this rank goes on without it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.process import BaseProcess
from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode

from lightning_pipeline import _torch
from lightning_pipeline._names import PACKAGES
from lightning_pipeline.hooks.first_rank import like
from lightning_pipeline.partition.attributes import attributes_of
from lightning_pipeline.partition.overrides import overridden
from lightning_pipeline.partition.ownership import holders_of
from lightning_pipeline.partition.placeholder import Placeholder, become, placeholder
from lightning_pipeline.partition.users_code import in_hook
from lightning_pipeline.recording.object_state import parts_of

_LEFT_OUT = (type, nn.Module)
"""What is not looked into: a model is as large as all of its tensors."""
_LONG = 10_000
"""Entries of a container from which on it is taken for one of samples, which no hook has made."""


@contextmanager
def processes_started(mode: TorchFunctionMode, whole: Callable[[list[Tensor], str], list[Tensor]]) -> Iterator[None]:
    """While entered, processes that hooks start have the data of tensors that they are given.

    Args:
        mode: is left by them, as it would ask other ranks.
        whole: gives the data of tensors on every rank, all of which call it.
    """
    plain = BaseProcess.start

    def start(process: BaseProcess) -> None:
        if not in_hook.is_here():
            return plain(process)
        given = _tensors_in(vars(process))
        data = whole(given, "the start of a process") if given else []
        absent = [(one, one._pl_spec, one._pl_what) for one in given if type(one) is Placeholder]
        with _torch.function_modes_taken_off() as modes:
            in_hook.on = False
            try:
                for one, found in zip(given, data, strict=True):
                    if type(one) is Placeholder:
                        become(one, like(found, one._pl_spec))
                with _torch.function_modes_put_on([other for other in reversed(modes) if other is not mode]):
                    return plain(process)
            finally:
                in_hook.on = True
                for one, spec, what in absent:
                    become(one, placeholder(spec, what))

    with overridden() as override:
        override(BaseProcess, "start", start)
        yield


def _tensors_in(value: Any) -> list[Tensor]:
    """The tensors that not every rank holds, to which attributes, containers and functions lead from a value."""
    found: list[Tensor] = []
    seen: set[int] = set()
    pending: deque[Any] = deque([value])
    while pending:
        one = pending.popleft()
        if isinstance(one, Tensor):
            if id(one) not in seen and holders_of(one) is not None and not isinstance(one, DTensor):
                found.append(one)
        elif id(one) not in seen and not isinstance(one, _LEFT_OUT):
            pending.extend(_parts(one))
        seen.add(id(one))
    return found


def _parts(value: Any) -> list[Any]:
    parts = parts_of(value, _LONG)
    if parts is None and not type(value).__module__.startswith(PACKAGES):
        parts = list((attributes_of(value) or {}).values())
    return parts or []
