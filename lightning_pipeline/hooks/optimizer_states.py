"""Gradients and optimizer states as hooks see them, whichever rank holds the parameter."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import LBFGS, Optimizer

from lightning_pipeline.engine.slices import slice_like
from lightning_pipeline.hooks.operands import Exchanges, Operands, TensorKeys
from lightning_pipeline.partition.attributes import USES_OF_DICT, call_before
from lightning_pipeline.partition.ownership import holders_of, note_holders
from lightning_pipeline.partition.placeholder import Placeholder, TensorSpec, is_absent, placeholder
from lightning_pipeline.partition.users_code import users_line

NotesOf = Callable[[Optimizer], Mapping[Any, Mapping[Any, Any]]]


class OptimizerStates:
    """Answers for ``optimizer.state`` outside of steps. All ranks must make the same calls.

    Attributes:
        are_shared_out: whether a rank may have only a part of the state of what it holds.
        notes_of: what an optimizer's constructor has noted in the state of each parameter, which every rank keeps.
    """

    def __init__(self, exchanges: Exchanges, keys: TensorKeys, rank: int) -> None:
        self.optimizers: Iterable[Optimizer] = ()
        self.are_shared_out = False
        self.notes_of: NotesOf = lambda optimizer: {}
        self._exchanges = exchanges
        self._keys = keys
        self._rank = rank
        self._shown: list[tuple[Optimizer, _WholeState]] = []

    @contextmanager
    def shown(self) -> Iterator[None]:
        """While entered, each optimizer has the state that it has in one process."""
        self._show()
        try:
            yield
        finally:
            self._hide()

    @contextmanager
    def hidden(self) -> Iterator[None]:
        """While entered within `shown`, each optimizer has the state that this rank holds."""
        was_shown = bool(self._shown)
        self._hide()
        try:
            yield
        finally:
            if was_shown:
                self._show()

    def _show(self) -> None:
        for optimizer in self.optimizers:
            if isinstance(optimizer, LBFGS):  # which every rank runs over all parameters, so its state is whole
                continue
            whole = _WholeState(optimizer, self._completed, self.notes_of)
            try:
                optimizer.state = whole
            except AttributeError as error:
                raise NotImplementedError(
                    f"{type(optimizer).__name__}.state cannot be set, and hooks are to see what other stages have in "
                    f"it: make it an attribute, or give the property a setter"
                ) from error
            self._shown.append((optimizer, whole))

    def _hide(self) -> None:
        for optimizer, whole in self._shown:
            if optimizer.state is whole:  # a hook may have set another one
                optimizer.state = whole.taken_back()
        self._shown = []

    def _completed(self, optimizer: Optimizer, own: dict[Any, Any]) -> dict[Any, dict[str, Any]]:
        """The state of each parameter of which some rank has state, in the optimizer's order."""
        if self.are_shared_out:
            raise NotImplementedError(
                f"optimizer.state is used in a hook ({users_line()}), and with data_parallel='zero1' or 'fsdp', or "
                f"tensor parallelism a rank has parts of it: take it from a checkpoint"
            )
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        entries_here = {
            index: {
                name: TensorSpec.of(value) if isinstance(value, Tensor) else value
                for name, value in own[parameter].items()
            }
            for index, parameter in enumerate(parameters)
            if parameter in own and type(parameter) is not Placeholder
        }
        entries_of = self._exchanges.share("optimizer.state", entries_here)
        found: dict[Any, dict[str, Any]] = {}
        for index, parameter in enumerate(parameters):
            holders = holders_of(parameter)
            entries = entries_of[self._rank if holders is None else holders[0]].get(index)
            if entries is None:
                continue
            if type(parameter) is Placeholder:
                found[parameter] = {
                    name: placeholder(value, f"the optimizer's {name}") if isinstance(value, TensorSpec) else value
                    for name, value in entries.items()
                }
            else:
                found[parameter] = own[parameter]
            for name in entries:
                if isinstance(found[parameter][name], Tensor) and holders is not None:
                    self._keys.note(found[parameter][name], holders)
        return found


class _WholeState(defaultdict[Any, Any]):
    """The state of an optimizer, which asks other ranks for their parts when it is first used."""

    def __init__(
        self,
        optimizer: Optimizer,
        complete: Callable[[Optimizer, dict[Any, Any]], dict[Any, Any]],
        notes_of: NotesOf,
    ) -> None:
        super().__init__(dict)
        self.own = optimizer.state
        self._optimizer = optimizer
        self._notes_of = notes_of
        self._complete: Callable[[Optimizer, dict[Any, Any]], dict[Any, Any]] | None = complete

    def use(self) -> None:
        """Become whole."""
        if self._complete is not None:
            complete, self._complete = self._complete, None
            found = complete(self._optimizer, self.own)
            super().update({**found, **{key: value for key, value in self.own.items() if key not in found}})

    def taken_back(self) -> defaultdict[Any, Any]:
        """This rank's part, with what the hook has done to it."""
        if self._complete is None:
            here = {key: value for key, value in dict.items(self) if type(key) is not Placeholder}
            for key, notes in self._notes_of(self._optimizer).items():
                now = dict.get(self, key)
                if type(key) is Placeholder and isinstance(now, dict):
                    here[key] = {name: now[name] for name in notes if name in now}
            self.own.clear()
            self.own.update(here)
            for value in (one for state in here.values() if isinstance(state, dict) for one in state.values()):
                if isinstance(value, Tensor) and value.dim() == 0:
                    # An optimizer within the user's own reads its counters, of what it has gradients for alone.
                    note_holders(value, None)
        return self.own

    def __reduce__(self) -> Any:
        self.use()
        return defaultdict, (dict,), None, None, iter(dict.items(self))


call_before(_WholeState, USES_OF_DICT, _WholeState.use)


class ParameterGradients:
    """Answers for ``.grad`` outside of steps. All ranks must make the same calls."""

    def __init__(self, module: nn.Module, exchanges: Exchanges, operands: Operands, keys: TensorKeys) -> None:
        self._module = module
        self._exchanges = exchanges
        self._operands = operands
        self._keys = keys
        self._layouts: dict[int, torch.layout | None] | None = None

    def forget(self) -> None:
        """Ask again which parameters have gradients, as other code may have changed it."""
        self._layouts = None

    def of(self, tensor: Tensor) -> Tensor | None:
        """The gradient of a tensor, or its placeholder; None if there is none."""
        held = holders_of(tensor)
        layout = self._layout_of(tensor)
        if layout is None:
            return None
        if not is_absent(tensor):
            gradient = tensor.grad
            assert gradient is not None
            return self._keys.note(gradient, held)
        spec = TensorSpec.of(tensor).detached()
        if layout is not torch.strided:
            spec = spec.but(stride=None, layout=layout)
        kept = tensor.__dict__.get("_gradient")
        if kept is None or kept._pl_spec is not spec:
            what = getattr(tensor, "_pl_what", "a parameter")
            kept = tensor.__dict__["_gradient"] = placeholder(spec, f"the gradient of {what}")
        return self._keys.note(kept, held)

    def set(self, tensor: Tensor, gradient: Tensor | None) -> None:
        """Set or remove the gradient of a tensor."""
        held = holders_of(tensor)
        if gradient is not None:
            [here] = self._operands.gather([gradient], [held], "grad.__set__")
            if isinstance(tensor, DTensor) and here is not None and not isinstance(here, DTensor):
                here = slice_like(tensor, here)
        if held is not None:
            self._layout_of(tensor)
            assert self._layouts is not None
            self._layouts[id(tensor)] = None if gradient is None else gradient.layout
        if type(tensor) is not Placeholder:
            tensor.grad = None if gradient is None else here

    def _layout_of(self, tensor: Tensor) -> torch.layout | None:
        """The layout of a gradient; None if there is none. The holders of all parameters are asked once in a hook."""
        if self._layouts is None:
            parameters = [p for p in self._module.parameters() if holders_of(p) is not None]
            own = [None if is_absent(p) or p.grad is None else p.grad.layout for p in parameters]
            layouts_of = self._exchanges.share("grad", own)
            self._layouts = {
                id(parameter): layouts_of[(holders_of(parameter) or (0,))[0]][index]
                for index, parameter in enumerate(parameters)
            }
        if id(tensor) in self._layouts:
            return self._layouts[id(tensor)]
        # A tensor of a copy of the module, or one that was made outside.
        return tensor.grad.layout if type(tensor) is not Placeholder and tensor.grad is not None else None
