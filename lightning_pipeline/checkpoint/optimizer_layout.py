"""The layout of an optimizer over the whole model, of which each stage updates its own parameters."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch
from torch import nn, optim
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from lightning_pipeline import _torch
from lightning_pipeline.engine.fully_sharded import slice_like
from lightning_pipeline.partition.ownership import Ownership
from lightning_pipeline.partition.placeholder import is_absent
from lightning_pipeline.runtime.direct import recv_tree, send_tree, to_cpu

from .files import read_into_memory
from .stored_tensors import StoredTensor

if TYPE_CHECKING:
    from lightning_pipeline.runtime.transport import Transport

ELEMENTWISE = (
    optim.ASGD,
    optim.Adadelta,
    optim.Adagrad,
    optim.Adam,  # and AdamW
    optim.Adamax,
    optim.NAdam,
    optim.RAdam,
    optim.RMSprop,
    optim.Rprop,
    optim.SGD,
)
"""Optimizers that are known to update each element by itself."""

_END: dict[int, Any] = {}  # follows a stage's last part


class OptimizerLayout:
    """Where each parameter of the model stands in an optimizer, in one process and on this stage.

    Made from the optimizer as ``configure_optimizers`` returned it, that is over all parameters, of which some may
    be on the meta device. State dicts that it gives and takes have the layout of that optimizer, whatever the
    number of stages.

    Args:
        module: the module whose parameters it optimizes, for their names.

    Attributes:
        is_elementwise: the optimizer updates each element by itself, so a slice of a parameter has a slice of state.
        groups: parameter names of each group, over the whole model.
        dtypes: name to dtype of each parameter, in the optimizer's own order.

    Raises:
        ValueError: if the optimizer holds a tensor that is not a parameter of the module.
    """

    def __init__(self, optimizer: Optimizer, module: nn.Module) -> None:
        self.optimizer = optimizer
        self.is_elementwise = isinstance(optimizer, ELEMENTWISE)
        self.groups: list[list[str]] = []
        self.dtypes: dict[str, torch.dtype] = {}
        self._given: list[dict[str, Any]] = []  # options as they were, where they had to change
        self.note_new_groups(module)

    def note_new_groups(self, module: nn.Module) -> None:
        """Take in the groups that were added to the optimizer since, as finetuning callbacks do."""
        names = {id(parameter): name for name, parameter in module.named_parameters()}
        for index, group in enumerate(self.optimizer.param_groups[len(self.groups) :], start=len(self.groups)):
            missing = [tuple(parameter.shape) for parameter in group["params"] if id(parameter) not in names]
            if missing:
                raise ValueError(
                    f"group {index} of {type(self.optimizer).__name__} holds tensors of shapes {missing} that are not "
                    "parameters of the LightningModule: make them attributes of it, so that a stage can own them"
                )
            group_names = [names[id(parameter)] for parameter in group["params"]]
            self.groups.append(group_names)
            self._given.append({})
            self.dtypes.update((names[id(parameter)], parameter.dtype) for parameter in group["params"])
        self._keep_kinds_apart()

    @property
    def names(self) -> list[str]:
        """Parameter names over the whole model; the index is the positional id in a state dict."""
        return list(chain.from_iterable(self.groups))

    def local_parameters(self) -> list[tuple[str, nn.Parameter]]:
        """Name and parameter of what this stage holds of the optimizer's, in its own order."""
        return [
            (name, parameter)
            for names, group in zip(self.groups, self.optimizer.param_groups, strict=True)
            for name, parameter in zip(names, group["params"], strict=True)
            if not is_absent(parameter)
        ]

    def forget_remote(self) -> None:
        """Let go of the state of parameters that turned out to be other stages'.

        The parameters stay in their groups, which are as in one process: without a gradient they are passed over.
        """
        if self.keeps_all:
            return
        for parameter in [parameter for parameter in self.optimizer.state if is_absent(parameter)]:
            del self.optimizer.state[parameter]

    @property
    def keeps_all(self) -> bool:
        """Whether its state is of all parameters together, though it is kept with the first one."""
        return isinstance(self.optimizer, optim.LBFGS)

    def replace(self, new: Mapping[nn.Parameter, nn.Parameter]) -> None:
        """Let the optimizer go on with other parameters in the places of some, sharded ones.

        State that there is already is sharded where it has its parameter's shape.
        """
        for group in self.optimizer.param_groups:
            group["params"][:] = [new.get(parameter, parameter) for parameter in group["params"]]
        self._keep_kinds_apart()
        for parameter, sharded in new.items():
            state = self.optimizer.state.pop(parameter, None)
            if state is not None:
                self.optimizer.state[sharded] = self._sharded_state(state, sharded)

    def gather_state(
        self,
        ownership: Ownership,
        transport: Transport | None,
        collect: Callable[[dict[str, Any]], dict[str, Any] | None] = lambda state: state,
        *,
        is_writer: bool = True,
    ) -> dict[str, Any]:
        """The state dict that one process would have, of builtins and CPU tensors. Every stage must call it.

        Parameters follow one another, so that beside what it holds a stage needs the memory of one parameter's state.

        Args:
            collect: called for each parameter that this stage owns, in the same order on all its replicas, with its
                state by its name, {} if this rank has none. Makes of it the whole state; None or {} if there is none
                to add.
            is_writer: this rank's pipeline is the one that goes on with what is collected.

        Returns:
            The full state dict on stage 0, where each parameter's state comes from its owner; {} on other stages.
        """
        state_dict = self.optimizer.state_dict()
        parts = self._parts(state_dict["state"], ownership, collect)
        if ownership.stage != 0 or not is_writer:
            for part in parts:
                if is_writer and transport is not None:
                    send_tree(part, transport, 0)
            if is_writer and transport is not None:
                send_tree(_END, transport, 0)
            return {}
        # What belongs to no parameter is stage 0's.
        state: dict[Any, Any] = {key: value for key, value in state_dict["state"].items() if not isinstance(key, int)}
        for part in parts:
            state.update(part)
        if transport is not None:
            for stage in range(1, ownership.num_stages):
                while (part := recv_tree(transport, stage, "optimizer state")) != _END:
                    state.update(part)
        ordered = sorted(state, key=lambda key: key if isinstance(key, int) else len(self.names))
        return {
            **to_cpu({key: value for key, value in state_dict.items() if key not in ("state", "param_groups")}),
            "state": {key: to_cpu(state[key]) for key in ordered},
            "param_groups": [
                {**to_cpu(group), **given} for group, given in zip(state_dict["param_groups"], self._given, strict=True)
            ],
        }

    def _parts(
        self,
        state: Mapping[Any, Any],
        ownership: Ownership,
        collect: Callable[[dict[str, Any]], dict[str, Any] | None],
    ) -> Iterator[dict[int, Any]]:
        """The states of the parameters that this stage owns, one by one, by positional id."""
        for index, name in enumerate(self.names):
            if ownership.is_owner(name):
                part = collect({name: state[index]} if index in state else {})
                if part:
                    yield dict.fromkeys([index], *part.values())

    def load_state(self, state_dict: dict[str, Any], is_kept: Callable[[str], bool] = lambda name: True) -> None:
        """Load this stage's part of a full state dict, as ``gather_state`` or plain Lightning wrote it.

        Args:
            is_kept: whether this rank keeps the state of a parameter of its stage.

        Raises:
            ValueError: if its groups are not those of this optimizer.
        """
        saved_groups = state_dict["param_groups"]
        saved_sizes = [len(group["params"]) for group in saved_groups]
        sizes = [len(names) for names in self.groups]
        if saved_sizes != sizes:
            raise ValueError(
                f"the checkpoint's optimizer state has {len(saved_sizes)} groups with {saved_sizes} parameters, but "
                f"{type(self.optimizer).__name__} has {len(sizes)} with {sizes}: resume with the model and the "
                "configure_optimizers that wrote it, or load the weights only"
            )
        held = dict(self.local_parameters())
        saved_state = state_dict["state"]
        saved_ids = list(chain.from_iterable(group["params"] for group in saved_groups))
        state: dict[Any, Any] = {
            key: _in_memory(value) for key, value in saved_state.items() if key not in set(saved_ids)
        }
        for saved_id, name in zip(saved_ids, self.names, strict=True):
            if saved_id in saved_state and self.keeps_all:
                state[saved_id] = _in_memory(saved_state[saved_id])
            elif saved_id in saved_state and name in held and is_kept(name):
                state[saved_id] = self._sharded_state(saved_state[saved_id], held[name])
        groups = [dict(group) for group in saved_groups]
        read_into_memory(groups)
        self.optimizer.load_state_dict({**state_dict, "state": state, "param_groups": groups})
        read_into_memory(self.optimizer.state)  # which has taken CPU tensors as they are
        self._keep_kinds_apart()

    def _keep_kinds_apart(self) -> None:
        """Kernels over lists of tensors take no mixture of sharded and whole ones."""
        for group, given in zip(self.optimizer.param_groups, self._given, strict=True):
            held = (parameter for parameter in group["params"] if not is_absent(parameter))
            if len({isinstance(parameter, DTensor) for parameter in held}) > 1:
                for option in ("foreach", "fused"):
                    if option in group and group[option] is not False:
                        given.setdefault(option, group[option])
                        group[option] = False

    def _sharded_state(self, state: dict[str, Any], parameter: nn.Parameter) -> dict[str, Any]:
        """A parameter's state, with what has its shape sharded as it is, if it is."""
        return {key: self._sharded(value, parameter) for key, value in state.items()}

    def _sharded(self, value: Any, parameter: nn.Parameter) -> Any:
        is_sliced = isinstance(parameter, DTensor) and self.is_elementwise and not isinstance(value, DTensor)
        if not is_sliced or not isinstance(value, torch.Tensor) or value.shape != parameter.shape:
            return _in_memory(value)
        return value.read_like(parameter) if isinstance(value, StoredTensor) else slice_like(parameter, value)


def _in_memory(value: Any) -> Any:
    """With what is in a checkpoint folder read."""
    return _torch.tree_map_only(StoredTensor, StoredTensor.read, value)
