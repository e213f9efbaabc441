"""``optimizer.state`` in steps and after a run: that of one process on every rank, or an error that it is in parts."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import chain
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_pipeline.partition import tree
from lightning_pipeline.partition.attributes import USES_OF_DICT, call_before
from lightning_pipeline.partition.memory import num_storage_bytes
from lightning_pipeline.partition.ownership import Ownership
from lightning_pipeline.partition.placeholder import Placeholder, is_absent
from lightning_pipeline.partition.users_code import users_line
from lightning_pipeline.runtime.direct import recv_tree, send_tree, to_cpu
from lightning_pipeline.runtime.transport import Transport

from ..checkpoint.optimizer_layout import OptimizerLayout


def make_states_whole(
    layouts: Sequence[OptimizerLayout], ownership: Ownership, transport: Transport, limit: int
) -> bool:
    """Give every stage the states of all parameters, on the CPU, if they fit. All stages must call it.

    Args:
        layouts: of optimizers whose parameters are whole.
        limit: the bytes that this rank can take.

    Returns:
        Whether every stage has them.
    """
    here = list(chain.from_iterable(_tensors(layout.optimizer.state.values()) for layout in layouts))
    if any(type(tensor) is Placeholder for tensor in here):  # which a hook has put there
        limit = -1
    own = [_owned(layout, ownership) for layout in layouts]
    num_bytes = sum(num_storage_bytes(tensor) for states in own for tensor in _tensors(states.values()))
    sizes = torch.tensor([num_bytes, limit], dtype=torch.float64)
    sent, limits = transport.all_gather_vector(sizes, "sizes of the optimizers' states").unbind(1)
    if sent.sum() > limits.min():
        return False
    for layout, states in zip(layouts, own, strict=True):
        _spread(layout, states, ownership, transport)
    return True


def _owned(layout: OptimizerLayout, ownership: Ownership) -> dict[int, Any]:
    """The states of the parameters that this stage owns, by their places; of LBFGS, which every stage has run, none.

    Not by name, which the parameters of a module and of another one in its place have in common.
    """
    state = layout.optimizer.state
    return {
        place: state[parameter]
        for place, (name, parameter) in enumerate(layout.parameters())
        if not (layout.keeps_all or is_absent(parameter)) and ownership.is_owner(name) and parameter in state
    }


def _spread(layout: OptimizerLayout, own: dict[int, Any], ownership: Ownership, transport: Transport) -> None:
    states: dict[nn.Parameter, Any] = layout.optimizer.state  # type: ignore[assignment]
    # Also of modules that have gone, which stay without data elsewhere.
    names, parameters = [name for name, _ in layout.parameters()], [parameter for _, parameter in layout.parameters()]
    for owner in range(ownership.num_stages):
        if owner != ownership.stage:
            received = recv_tree(transport, owner, "states of the whole optimizer")
            states.update({parameters[place]: state for place, state in received.items()})
            continue
        for peer in range(ownership.num_stages):
            if peer != owner:
                lacking = {place: own[place] for place in own if peer not in ownership.holders[names[place]]}
                send_tree(lacking, transport, peer)
    ordered = {key: to_cpu(states[key]) for key in parameters if key in states}
    ordered.update({key: state for key, state in states.items() if key not in ordered})
    states.clear()
    states.update(ordered)


def _tensors(states: Iterable[Any]) -> list[Tensor]:
    return tree.leaves(list(states))


# -- states that stay in parts -----------------------------------------------------------------------------------------


def refuse_use(optimizers: Iterable[Optimizer], when: str, way_out: str) -> list[Optimizer]:
    """From now on, `optimizer.state` is an error that says that this rank has a part of it.

    Returns:
        The optimizers that were not refused before.
    """
    refused = []
    for optimizer in optimizers:
        if not isinstance(optimizer.state, _InParts):
            with suppress(AttributeError):  # a property without a setter, which hooks have refused
                optimizer.state = _InParts(optimizer, when, way_out)
                refused.append(optimizer)
    return refused


def allow_use(optimizers: Iterable[Optimizer]) -> None:
    """Undo `refuse_use`."""
    for optimizer in optimizers:
        if isinstance(optimizer.state, _InParts):
            optimizer.state = optimizer.state.own


@contextmanager
def used_in_parts(optimizer: Optimizer) -> Iterator[None]:
    """While entered, the package works on the part that this rank has."""
    state = optimizer.state
    allow_use([optimizer])
    try:
        yield
    finally:
        if isinstance(state, _InParts):
            optimizer.state = state


class _InParts(defaultdict[Any, Any]):
    """In place of a state of which this rank has a part."""

    def __init__(self, optimizer: Optimizer, when: str, way_out: str) -> None:
        super().__init__(dict)
        self.own = optimizer.state
        self.name, self.when, self.way_out = type(optimizer).__name__, when, way_out

    def refuse(self) -> NoReturn:
        raise RuntimeError(
            f"{self.name}.state is used {self.when} ({users_line()}), of which this rank has only a part: "
            f"{self.way_out}"
        )


call_before(_InParts, (*USES_OF_DICT, "__reduce__", "__copy__"), _InParts.refuse)
