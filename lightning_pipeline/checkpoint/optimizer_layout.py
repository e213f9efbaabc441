"""The layout of an optimizer over the whole model, of which each stage updates its own parameters."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn, optim
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from lightning_pipeline import _torch
from lightning_pipeline.engine.slices import slice_like, sliced_further
from lightning_pipeline.partition.ownership import Ownership
from lightning_pipeline.partition.placeholder import is_absent
from lightning_pipeline.runtime.direct import recv_tree, send_tree, to_cpu

from .files import read_into_memory
from .stored_tensors import StoredTensor

if TYPE_CHECKING:
    from lightning_pipeline.runtime.transport import Transport

ELEMENTWISE = (
    *(optim.ASGD, optim.Adadelta, optim.Adagrad, optim.Adam, optim.Adamax, optim.NAdam, optim.RAdam),
    *(optim.RMSprop, optim.Rprop, optim.SGD),
)
"""Optimizers that are known to update each element by itself. AdamW is an Adam."""

_NOTES = (bool, int, float, str)
"""Types of what optimizers note of parameters when they are made, beside tensors."""

_END: dict[int, Any] = {}  # follows a stage's last part


class OptimizerLayout:
    """The position of each parameter of the model in an optimizer, in one process and on this stage.

    Made from the optimizer that ``configure_optimizers`` returned, which has all parameters; some may be on the meta
    device. The state dicts that it returns and loads have the layout of that optimizer, whatever the number of stages.

    Args:
        module: the module whose parameters it optimizes, for their names.

    Attributes:
        is_elementwise: the optimizer updates each element by itself, so a slice of a parameter has a slice of state.
        groups: parameter names of each group, over the whole model.
        dtypes: name to dtype of each parameter, in the optimizer's own order.
        notes: what its constructor has noted in the states of parameters. Of torch's own, which skip parameters without
            gradients, no tensors.

    Raises:
        ValueError: the optimizer holds a tensor that is not a parameter of the module.
    """

    def __init__(self, optimizer: Optimizer, module: nn.Module) -> None:
        self.optimizer = optimizer
        self.is_elementwise = isinstance(optimizer, ELEMENTWISE)
        self.groups: list[list[str]] = []
        self.dtypes: dict[str, torch.dtype] = {}
        self._given: list[dict[str, Any]] = []  # the user's values of options that had to change, by group
        self.notes: dict[nn.Parameter, dict[Any, Any]] = {}
        self.note_new_groups(module)

    def note_new_groups(self, module: nn.Module) -> None:
        """Take in groups that were added to the optimizer since, as finetuning callbacks add them, or removed."""
        before, now = list(map(len, self.groups)), [len(group["params"]) for group in self.optimizer.param_groups]
        if now == before:
            return
        if now[: len(before)] != before:
            self.groups, self.dtypes, self._given = [], {}, []
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
            state = self.optimizer.state
            if type(state) in (dict, defaultdict):  # to hooks, what stands for it may be in parts
                kinds = _NOTES if type(self.optimizer).__module__.startswith("torch.") else (*_NOTES, Tensor)
                found = {parameter: _notes_in(state.get(parameter), kinds) for parameter in group["params"]}
                self.notes.update((parameter, notes) for parameter, notes in found.items() if notes)
        self._keep_kinds_apart()

    def rename(self, names: Mapping[int, str]) -> dict[str, str]:
        """Take in other names of parameters, by their ids. Returns those that have changed, by the ones before."""
        changed: dict[str, str] = {}
        for own, group in zip(self.groups, self.optimizer.param_groups, strict=True):
            for place, parameter in enumerate(group["params"]):
                before, own[place] = own[place], names.get(id(parameter), own[place])
                changed.setdefault(before, own[place])  # a later one has come in its place
        if any(before != now for before, now in changed.items()):
            self.dtypes = {name: parameter.dtype for name, parameter in self.parameters()}
        return changed

    @property
    def names(self) -> list[str]:
        """Parameter names over the whole model; the index is the positional id in a state dict."""
        return list(chain.from_iterable(self.groups))

    def parameters(self) -> list[tuple[str, nn.Parameter]]:
        """The optimizer's parameters by name, in its order. Some may be without data."""
        return [
            (name, parameter)
            for names, group in zip(self.groups, self.optimizer.param_groups, strict=True)
            for name, parameter in zip(names, group["params"], strict=True)
        ]

    def local_parameters(self) -> list[tuple[str, nn.Parameter]]:
        """Those that this stage holds."""
        return [(name, parameter) for name, parameter in self.parameters() if not is_absent(parameter)]

    def forget_remote(self) -> None:
        """Free the state of parameters that turned out to be other stages'.

        The parameters stay in their groups, as in one process: the optimizer skips them, as they have no gradient. What
        its constructor has noted of them stays too, as steps may read it before they look for gradients.
        """
        if self.keeps_all:
            return
        state: dict[Any, Any] = self.optimizer.state
        for parameter in [parameter for parameter in state if is_absent(parameter)]:
            if notes := self.notes.get(parameter):
                state[parameter] = {key: state[parameter].get(key, note) for key, note in notes.items()}
            else:
                del state[parameter]

    @property
    def keeps_all(self) -> bool:
        """Whether its state is that of all parameters together, though it is stored with the first one."""
        return isinstance(self.optimizer, optim.LBFGS)

    def replace(self, new: Mapping[nn.Parameter, nn.Parameter]) -> None:
        """Replace parameters by their sharded ones. State of a parameter's shape is sharded too."""
        for group in self.optimizer.param_groups:
            group["params"][:] = [new.get(parameter, parameter) for parameter in group["params"]]
        self._keep_kinds_apart()
        for parameter, sharded in new.items():
            if notes := self.notes.pop(parameter, None):
                self.notes[sharded] = notes
            state = self.optimizer.state.pop(parameter, None)
            if state is not None:
                self.optimizer.state[sharded] = self._sharded(state, sharded)

    def gather_state(
        self,
        ownership: Ownership,
        transport: Transport | None,
        collect: Callable[[dict[str, Any]], dict[str, Any] | None] = lambda state: state,
        *,
        is_writer: bool = True,
    ) -> dict[str, Any]:
        """The state dict that one process would have, of builtins and CPU tensors. Every stage must call it.

        States are sent one parameter after the other, so a stage needs the memory of one beside its own.

        Args:
            collect: called for each parameter that this stage owns, in the same order on all its replicas, with its
                state by its name; with {} if this rank has none. Returns the whole state; None or {} to leave it out.
            is_writer: this rank's pipeline collects the states; the others only call `collect`.

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
        # What belongs to no parameter is taken from stage 0.
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
                part = collect({name: state[index]} if index in state else {}) or {}
                yield from ({index: whole} for whole in part.values())

    def load_state(self, state_dict: dict[str, Any], is_kept: Callable[[str], bool] = lambda name: True) -> None:
        """Load this stage's part of a full state dict that fits (see ``check_optimizers``).

        Args:
            is_kept: whether this rank keeps the state of a parameter of its stage.
        """
        if not self.groups:
            self.optimizer.load_state_dict(state_dict)
            return
        saved_groups = state_dict["param_groups"]
        held = dict(self.local_parameters())
        saved_state = state_dict["state"]
        saved_ids = list(chain.from_iterable(group["params"] for group in saved_groups))
        names = dict(zip(saved_ids, self.names, strict=True))
        notes = {key: self.notes.get(one, {}) for key, (_, one) in zip(saved_ids, self.parameters(), strict=True)}
        state: dict[Any, Any] = {}
        for key, value in saved_state.items():
            if key not in names or self.keeps_all:
                state[key] = _in_memory(value)
            elif names[key] in held and is_kept(names[key]):
                state[key] = self._sharded(value, held[names[key]])
            elif kept := {note: value[note] for note in notes.get(key, {}) if note in value}:
                state[key] = kept
        groups = [dict(group) for group in saved_groups]
        read_into_memory(groups)
        self.optimizer.load_state_dict({**state_dict, "state": state, "param_groups": groups})
        read_into_memory(self.optimizer.state)  # torch does not copy CPU tensors
        self._keep_kinds_apart()

    def _keep_kinds_apart(self) -> None:
        """Turn off kernels over lists of tensors in groups that mix whole parameters and such on different meshes."""
        for group, given in zip(self.optimizer.param_groups, self._given, strict=True):
            held = (parameter for parameter in group["params"] if not is_absent(parameter))
            if len({parameter.device_mesh if isinstance(parameter, DTensor) else None for parameter in held}) > 1:
                for option in ("foreach", "fused"):
                    if option in group and group[option] is not False:
                        given.setdefault(option, group[option])
                        group[option] = False

    def _sharded(self, state: dict[str, Any], parameter: nn.Parameter) -> dict[str, Any]:
        """A parameter's state; if the parameter is sharded, what has its shape is sharded likewise."""
        is_sliced = isinstance(parameter, DTensor) and self.is_elementwise

        def fit(value: Any) -> Any:
            if not is_sliced or not isinstance(value, torch.Tensor) or value.shape != parameter.shape:
                return _in_memory(value)
            if isinstance(value, DTensor):  # what tensor parallelism alone has split until now
                return sliced_further(parameter, value)
            return value.read_like(parameter) if isinstance(value, StoredTensor) else slice_like(parameter, value)

        return {key: fit(value) for key, value in state.items()}


def _notes_in(state: Any, kinds: tuple[type, ...]) -> dict[Any, Any]:
    """What is noted in a parameter's state; None stands for no state."""
    return {key: value for key, value in state.items() if isinstance(value, kinds)} if isinstance(state, dict) else {}


def _in_memory(value: Any) -> Any:
    """The value with tensors of a checkpoint folder read."""
    return _torch.tree_map_only(StoredTensor, StoredTensor.read, value)
