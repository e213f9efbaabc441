"""The user's hooks on gradients of values that stages compute.

Hooks are Python, so every rank runs them, on the gradient that the stage has computed. A micro-batch with hooks runs in
order for that.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

from torch import Tensor
from torch.utils.hooks import RemovableHandle

from lightning_pipeline.partition.users_code import users_line


class Hook:
    """A hook that was registered in a micro-batch's step.

    Attributes:
        function: the user's; None once it is removed.
        run: called on the stage when the gradient comes; set before backward.
    """

    def __init__(self, function: Callable[..., Any], number: int) -> None:
        self.function: Callable[..., Any] | None = function
        self.number = number
        self.run: Callable[[Hook, tuple[Any, ...]], Any] | None = None

    def __call__(self, *gradients: Any) -> Any:
        return None if self.run is None else self.run(self, gradients)


class Handle(RemovableHandle):
    """Removes a hook."""

    def __init__(self, hook: Hook) -> None:
        self._hook = hook
        self.id = id(hook)

    def remove(self) -> None:
        self._hook.function = None


# The functions that a visit runs on data, where the value is computed. They are functions of ours, and not torch's, so
# that recording them does not register a hook once more.


def hook_of_tensor(tensor: Tensor, hook: Hook) -> None:
    tensor.register_hook(hook)


def hook_after_node(tensor: Tensor, hook: Hook) -> None:
    assert tensor.grad_fn is not None
    tensor.grad_fn.register_hook(hook)


def hook_before_node(tensor: Tensor, hook: Hook) -> None:
    assert tensor.grad_fn is not None
    tensor.grad_fn.register_prehook(hook)


def retained(tensor: Tensor) -> None:
    tensor.retain_grad()


HOOKS = (hook_of_tensor, hook_after_node, hook_before_node)
REGISTERING = (*HOOKS, retained)


class NodeOf:
    """Stands for the autograd node of a placeholder's value, which only the stage has."""

    def __init__(self, place: Any) -> None:
        self._place = place

    def name(self) -> str:
        """Close to the name that torch gives."""
        made_by = self._place._pl_what.removeprefix("the result of ").partition(" ")[0]
        return f"{made_by.removesuffix('.apply')}Backward"

    @property
    def next_functions(self) -> NoReturn:
        raise NotImplementedError(
            f"the graph of {self._place._pl_what} is on its stages, and cannot be walked in a step ({users_line()}): "
            f"take torch.autograd.grad or a hook"
        )

    def register_hook(self, hook: Callable[..., Any]) -> Handle:
        return self._place._pl_recording.register(hook_after_node, self._place, hook)

    def register_prehook(self, hook: Callable[..., Any]) -> Handle:
        return self._place._pl_recording.register(hook_before_node, self._place, hook)

    def __repr__(self) -> str:
        return f"<{self.name()} on a stage>"
