"""Gradients of parameters within a training step: what clears or reads them concerns its batch, and no micro-batch.

*Cleared*, by `zero_grad` or ``p.grad = None``, are those of earlier batches. If each micro-batch did so when it comes
to the line, it would clear what earlier micro-batches have added. Those of a hand-optimized step do it together, where
they next meet. Those of a step with automatic optimization are cleared after it, as its own gradients are held back
until then.

*Read*, in a hand-optimized step, is what the backwards of all micro-batches have added up: they meet there, and every
rank is given a copy. What is written into a copy, or into the gradient later, would be in one of the two only, so
such a write is refused, and so is the use of a copy after more has been added to the gradient.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from types import FrameType
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from lightning_pipeline import _torch
from lightning_pipeline.partition import tree
from lightning_pipeline.partition.placeholder import Placeholder
from lightning_pipeline.partition.torch_functions import FunctionKind, drawn_into, function_name
from lightning_pipeline.partition.users_code import users_line
from lightning_pipeline.recording.module_tensors import ModuleTensors

_GRADIENT: Any = Tensor.grad  # the descriptor
GETTERS = (_GRADIENT.__get__, getattr(Tensor, "_grad").__get__)  # noqa: B009  # mypy does not know it
"""The functions by which a tensor's gradient is read."""
SETTERS = (_GRADIENT.__set__, _GRADIENT.__delete__)
GRADIENT_CALLS = frozenset((*GETTERS, *SETTERS))
UNANSWERED = object()


@dataclass(frozen=True)
class StepGradients:
    """How a training step clears and reads gradients of the module's parameters.

    Attributes:
        clear: clears a parameter's gradient, given its name and number, for all micro-batches together; None for never.
        read: gives a parameter's gradient on all ranks, given its name, or `UNANSWERED`; None for never.
        accumulates: gradients of earlier batches are to stay.
    """

    clear: Callable[[str, int], None] | None = None
    read: Callable[[Tensor, str], Any] | None = None
    accumulates: bool = False

    def answer(self, func: Any, args: Any, tensors: ModuleTensors) -> Any:
        """What a call, one of `GRADIENT_CALLS`, gives; `UNANSWERED` where that is not for the step to say.

        Raises:
            NotImplementedError: it clears a gradient that accumulates over batches.
        """
        number = tensors.number_of(args[0])
        if number is None:
            return UNANSWERED
        name = tensors.names[number][0]
        if func in SETTERS and (len(args) == 1 or args[1] is None):
            self._clear(name, number)
            return None
        if func not in GETTERS:
            return UNANSWERED
        if _is_of_buffer(args[0]):
            return None
        if _is_in_zero_grad():
            self._clear(name, number)
            return None
        if _is_left_where_it_is(args[0]):
            return None
        return UNANSWERED if self.read is None else self.read(args[0], name)

    def _clear(self, name: str, number: int) -> None:
        if self.accumulates:
            raise NotImplementedError(
                f"the gradient of {name} is cleared in training_step ({users_line()}), while gradients accumulate over "
                f"batches: clear it in on_train_batch_start"
            )
        if self.clear is not None:
            self.clear(name, number)


def _is_of_buffer(tensor: Tensor) -> bool:
    """Whether a tensor of the module is a buffer, which has no gradient."""
    with _torch.DisableTorchFunction():
        is_buffer = not tensor.requires_grad and not isinstance(tensor, nn.Parameter)
        return is_buffer and (type(tensor) is Placeholder or tensor.grad is None)


def _is_in_zero_grad() -> bool:
    """Whether a `zero_grad` runs, which asks for each gradient before it clears it."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_name == "zero_grad":
            return True
        frame = frame.f_back
    return False


def _is_left_where_it_is(parameter: Tensor) -> bool:
    """Whether a module is moved to where it is (`layer.to(x.device)`), for which torch looks at gradients, too."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code is nn.Module._apply.__code__:
            return frame.f_locals.get("param_applied") is parameter
        frame = frame.f_back
    return False


class GivenGradients:
    """Copies of gradients that steps have read.

    Attributes:
        are_read: micro-batches only meet to read one.
        names: of parameters that have had one in the running step, if that has several micro-batches.
    """

    def __init__(self) -> None:
        self.are_read = False
        self.names: set[str] = set()
        self._outdated: Any = WeakIdKeyDictionary()  # with whether the gradient may be another one since
        self._changing: Any = WeakIdKeyDictionary()  # which are outdated when all micro-batches go on

    def __bool__(self) -> bool:
        return bool(self._outdated)

    def note(self, copy: Tensor) -> None:
        self._outdated[copy] = False

    def go_on(self) -> None:
        """Micro-batches go on after they have met."""
        if not self.are_read:
            self.note_changes()
        for copy in list(self._changing):
            self._outdated[copy] = True
        self._changing.clear()
        self.are_read = False

    def note_changes(self) -> None:
        """Where they meet, gradients change, but for those that are read there afterwards."""
        for copy in list(self._outdated):
            self._changing[copy] = None

    def check(self, func: Any, kind: FunctionKind, args: Any, kwargs: dict[str, Any]) -> None:
        """Check a call of the step's.

        Raises:
            NotImplementedError: it writes into a copy, or uses one that may be outdated.
        """
        if share_memory(written(func, kind, args, kwargs), self._outdated):
            refuse_written_gradient()
        if share_memory([args, kwargs], [copy for copy, is_outdated in self._outdated.items() if is_outdated]):
            raise NotImplementedError(
                f"a gradient that the step has read before it changed is used ({users_line()}), of which the step has "
                f"a copy: clone() it when it is read, or read it again"
            )


given = GivenGradients()


def share_memory(used: Any, others: Iterable[Tensor]) -> bool:
    """Whether any of the tensors in `used` shares memory with other ones."""
    tensors = list(filter(_has_memory, tree.leaves(used)))
    if not tensors:
        return False
    with _torch.DisableTorchFunction():
        memory = {_torch.storage_id(one) for one in others if _has_memory(one)}
        return any(_torch.storage_id(one) in memory for one in tensors)


def _has_memory(tensor: Tensor) -> bool:
    return tensor.layout is torch.strided and type(tensor) is not Placeholder


_OF_NO_DATA = frozenset(("requires_grad_", "requires_grad.__set__", "grad.__set__", "detach_", "share_memory_"))


def written(func: Any, kind: FunctionKind, args: Any, kwargs: dict[str, Any]) -> list[Tensor]:
    """The tensors into whose memory a call writes, as its name says."""
    if function_name(func) in _OF_NO_DATA:
        return []
    if kwargs.get("out") is not None:
        return tree.leaves(kwargs["out"])
    if kind is FunctionKind.DRAWS:
        return tree.leaves(drawn_into(func, args, kwargs))
    return tree.leaves(args[:1]) if kind is FunctionKind.WRITES else []


def refuse_read(name: str) -> NoReturn:
    """Refuse to read a parameter's gradient in a step with automatic optimization."""
    raise NotImplementedError(
        f"the gradient of {name} is read within a step ({users_line()}), where those of its micro-batches are not "
        f"added up: read it in on_after_backward, or take torch.autograd.grad"
    )


def refuse_update() -> NoReturn:
    """Refuse that a step updates a parameter by itself, now that it has read the gradient."""
    raise NotImplementedError(
        f"a parameter is changed within a step that has read its gradient ({users_line()}), which each of its "
        f"micro-batches would do again: let an optimizer update it, or change it in on_train_batch_end"
    )


def refuse_written_gradient() -> NoReturn:
    raise NotImplementedError(
        f"the gradient of a parameter is changed within a step ({users_line()}), which each of its micro-batches would "
        f"do again: change it in on_after_backward or on_before_optimizer_step; to clear it, set it to None"
    )
