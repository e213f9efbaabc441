"""Functions and modules that were scripted or traced: torch runs them without a word to function modes.

A call of one is one function to whoever records a step. If it draws random numbers once, its call is a draw, as if the
user had called that function of torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor

from lightning_pipeline import _torch
from lightning_pipeline.partition.overrides import overridden
from lightning_pipeline.partition.rng import generators
from lightning_pipeline.partition.torch_functions import is_drawing, same_kind

_SCRIPTED = {cls: cls.__call__ for cls in (_torch.ScriptFunction, _torch.ScriptMethod)}
"""What torch has, by class."""
_FUNCTIONS: dict[tuple[Any, bool], Callable[..., Any]] = {}
"""Of each, in stages or not, one function by which events know its calls."""


@contextmanager
def scripted_seen(call: Callable[[Callable[..., Any], Any, Any], Any], *, in_stages: bool) -> Iterator[None]:
    """While entered, `call` runs scripted functions and methods, given a function with the arguments, instead of torch.

    Args:
        in_stages: what is drawn has to be the same in another process.
    """

    def seeing(plain: Any) -> Callable[..., Any]:
        def seen(self: Any, *args: Any, **kwargs: Any) -> Any:
            function = _FUNCTIONS.get((self, in_stages))
            if function is None:
                function = _FUNCTIONS[self, in_stages] = _function_of(partial(plain, self), self, in_stages=in_stages)
            return call(function, args, kwargs)

        return seen

    with overridden() as override:
        for cls in _SCRIPTED:
            override(cls, "__call__", seeing(_SCRIPTED[cls]))
        yield


def _function_of(function: Callable[..., Any], scripted: Any, *, in_stages: bool) -> Callable[..., Any]:
    number = _most_draws(scripted.inlined_graph)
    if number == 1:
        same_kind(function, torch.rand)
    return partial(_undrawn, scripted.name, function) if number > 1 and in_stages else function


def _most_draws(block: Any) -> int:
    """How often the nodes of a graph, or of a block in it, draw random numbers; at least 2 for a loop that does."""
    number = 0
    for node in block.nodes():
        inner = [_most_draws(one) for one in node.blocks()]
        number += is_drawing(node.kind().removeprefix("aten::")) + max(inner, default=0) * (1 + (len(inner) == 1))
    return number


def _undrawn(name: str, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call a function that may draw random numbers several times.

    Raises:
        NotImplementedError: it has drawn some. torch changes the order of draws when it optimizes the function, after a
            number of calls that is another one on each rank.
    """
    tensors = [one for one in _torch.tree_leaves((args, kwargs)) if isinstance(one, Tensor)]
    used = generators(tensors[0].device if tensors else torch.device("cpu"))
    before = [generator.get_state() for generator in used]
    found = function(*args, **kwargs)
    if not all(map(torch.equal, before, [generator.get_state() for generator in used])):
        raise NotImplementedError(
            f"the scripted function {name} draws random numbers several times, in an order that torch changes when it "
            f"optimizes it: draw them outside of it and pass them to it, or leave out torch.jit.script"
        )
    return found
