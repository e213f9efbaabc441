"""What the first rank alone changes of the module in a hook, which the others change in the same way at its end.

From the moment on at which a hook asks for the rank, every rank takes note of the parameters and buffers that it writes
into or assigns::

    rank 0   asks for the rank    self.scale.fill_(s)    the end of the hook: "scale" --> its data
    rank 1   asks for the rank    ...                    the end of the hook: lacks it <--
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_pipeline import _torch
from lightning_pipeline.partition.memory import memory_of
from lightning_pipeline.partition.placeholder import Placeholder, TensorSpec
from lightning_pipeline.partition.torch_functions import FunctionKind, function_name, kind_of
from lightning_pipeline.partition.users_code import users_line
from lightning_pipeline.runtime.direct import DirectTransport


class Changed(NamedTuple):
    """A parameter or buffer that has been changed.

    Attributes:
        is_assigned: it is another tensor than before; else that one has other contents.
    """

    name: str
    spec: TensorSpec
    is_assigned: bool


class _Seen(NamedTuple):
    tensor: Tensor
    version: int
    memory: int


class FirstRankChanges:
    """Brings what the first rank alone has changed of the module to the ranks that lack it."""

    def __init__(self, module: nn.Module, direct: DirectTransport) -> None:
        self._module = module
        self._direct = direct
        self._before: dict[str, _Seen] = {}
        self._written: set[int] = set()
        self._copies: dict[int, _torch.StorageWeakRef] = {}

    def begin(self) -> None:
        """Take note of the module's tensors as they are."""
        self._written = set()
        self._copies = {}
        tensors = _tensors_of(self._module).items()
        self._before = {name: _Seen(tensor, _version(tensor), memory_of(tensor)) for name, tensor in tensors}

    def note_copy(self, tensor: Tensor) -> None:
        """The first rank alone has this copy of another rank's tensor, and goes on with it, or with views such as
        ``.data``. The weak reference keeps the number of its memory from being given to other memory."""
        if tensor.layout is torch.strided:
            self._copies[memory_of(tensor)] = _torch.StorageWeakRef(tensor.untyped_storage())

    def note(self, func: Any, args: tuple[Any, ...]) -> None:
        """Take note of a call that may write into memory by a tensor with a version of its own, as ``.data`` gives.

        Raises:
            NotImplementedError: it writes into a copy of what another rank holds, which would not see that.
        """
        if args and kind_of(func) is FunctionKind.WRITES:
            written = args[0] if isinstance(args[0], list | tuple) else args[:1]
            memories = {memory_of(tensor) for tensor in written if isinstance(tensor, Tensor)}
            if not self._copies.keys().isdisjoint(memories):
                refuse_change_alone(function_name(func))
            self._written |= memories

    def found(self) -> tuple[Changed, ...]:
        """What this rank has changed, and holds."""
        changed = []
        for name, tensor in _tensors_of(self._module).items():
            if type(tensor) is Placeholder or isinstance(tensor, DTensor):  # one rank alone cannot write into slices
                continue
            before, memory = self._before.get(name), memory_of(tensor)
            if before is None or tensor is not before.tensor:
                changed.append(Changed(name, TensorSpec.of(tensor), is_assigned=True))
            elif memory in self._written or (_version(tensor), memory) != (before.version, before.memory):
                changed.append(Changed(name, TensorSpec.of(tensor), is_assigned=False))
        return tuple(changed)

    def give(self, changed: Iterable[Changed]) -> None:
        """On the first rank: give the others what they lack of it."""
        lacking: set[str] = set()
        for peer in range(1, self._direct.num_ranks):
            lacking.update(self._direct.hear(peer, "what it lacks of the first rank's changes"))
        given = tuple(one for one in changed if one.name in lacking)
        self._direct.tell(given)
        tensors = _tensors_of(self._module)
        for one in given:
            self._direct.spread(tensors[one.name].detach(), one.spec, 0)

    def take(self, changed: Iterable[Changed]) -> None:
        """On another rank: take what it lacks of it."""
        own = {one.name for one in self.found()}
        tensors = _tensors_of(self._module)
        lacking = {one.name for one in changed if one.name not in own and not self._has(one, tensors.get(one.name))}
        self._direct.tell_one(0, lacking)
        for one in self._direct.hear(0, "what the first rank alone has changed"):
            data = self._direct.receive(one.spec, 0, f"{one.name}, which the first rank alone has changed")
            if one.name in lacking:
                self._change(one, tensors.get(one.name), data)

    def _has(self, changed: Changed, tensor: Tensor | None) -> bool:
        """Whether a placeholder shows that this rank has come to the same change."""
        before = self._before.get(changed.name)
        return type(tensor) is Placeholder and (
            not changed.is_assigned or before is None or tensor is not before.tensor
        )

    def _change(self, changed: Changed, tensor: Tensor | None, data: Tensor) -> None:
        if not changed.is_assigned:
            assert tensor is not None
            if TensorSpec.of(tensor).shape == data.shape:
                tensor.detach().copy_(data)
            else:
                tensor.data = data
            return
        path, _, name = changed.name.rpartition(".")
        module, spec = self._module.get_submodule(path), changed.spec
        if spec.is_parameter:
            module.register_parameter(name, nn.Parameter(data, spec.requires_grad))
        elif name in module._buffers:
            module._buffers[name] = data
        else:
            module.register_buffer(name, data)


def refuse_change_alone(name: str) -> NoReturn:
    raise NotImplementedError(
        f"{name} changes what another stage holds, in code that the first rank alone runs ({users_line()}): let every "
        f"rank run it"
    )


def _version(tensor: Tensor) -> int:
    with _torch.DisableTorchFunction():
        return 0 if type(tensor) is Placeholder or tensor.is_inference() else tensor._version


def _tensors_of(module: nn.Module) -> dict[str, Tensor]:
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}
