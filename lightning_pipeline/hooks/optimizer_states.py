"""Gradients and optimizer states as hooks see them, whichever rank holds the parameter."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_pipeline.hooks.operands import Exchanges, Operands, TensorKeys
from lightning_pipeline.partition.ownership import holders_of
from lightning_pipeline.partition.placeholder import Placeholder, TensorSpec, placeholder
from lightning_pipeline.partition.users_line import users_line
from lightning_pipeline.runtime.transport import Transport


class OptimizerStates:
    """Answers for ``optimizer.state`` outside of steps. All ranks must make the same calls.

    Attributes:
        optimizers: of the run.
        are_shared_out: whether a rank may have a part of the state of what it holds.
    """

    def __init__(self, transport: Transport, exchanges: Exchanges, keys: TensorKeys) -> None:
        self.optimizers: Iterable[Optimizer] = ()
        self.are_shared_out = False
        self._transport = transport
        self._exchanges = exchanges
        self._keys = keys
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
        """While entered, the package sees what this rank has."""
        was_shown = bool(self._shown)
        self._hide()
        try:
            yield
        finally:
            if was_shown:
                self._show()

    def _show(self) -> None:
        for optimizer in self.optimizers:
            whole = _WholeState(optimizer.state, lambda optimizer=optimizer: self._completed(optimizer))  # type: ignore[misc]
            self._shown.append((optimizer, whole))
            optimizer.state = whole

    def _hide(self) -> None:
        for optimizer, whole in self._shown:
            if optimizer.state is whole:  # and not what a hook has put in its place
                optimizer.state = whole.taken_back()
        self._shown = []

    def _completed(self, optimizer: Optimizer) -> dict[Any, dict[str, Any]]:
        """For each parameter of which some rank has state, in the optimizer's order."""
        if self.are_shared_out:
            raise NotImplementedError(
                f"optimizer.state is used in a hook ({users_line()}), and with data_parallel='zero1' or 'fsdp', or "
                f"tensor parallelism a rank has parts of it: take it from a checkpoint"
            )
        [(_, whole)] = [one for one in self._shown if one[0] is optimizer]
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        own = {
            index: {name: _told(value) for name, value in whole.own[parameter].items()}
            for index, parameter in enumerate(parameters)
            if parameter in whole.own and type(parameter) is not Placeholder
        }
        self._exchanges.meet("optimizer.state", users_line())
        told = [
            self._transport.broadcast_object(own, rank, "the state of optimizers")
            for rank in range(self._transport.num_stages)
        ]
        found: dict[Any, dict[str, Any]] = {}
        for index, parameter in enumerate(parameters):
            holders = holders_of(parameter)
            entries = told[(holders or (self._transport.stage,))[0]].get(index)
            if entries is None:
                continue
            if type(parameter) is Placeholder:
                found[parameter] = {name: _made(value, f"the optimizer's {name}") for name, value in entries.items()}
            else:
                found[parameter] = whole.own[parameter]
            for name in entries:
                if isinstance(found[parameter][name], Tensor) and holders is not None:
                    self._keys.note(found[parameter][name], holders)
        return found


class _WholeState(defaultdict[Any, Any]):
    """Asks other ranks for their parts when it is first used.

    Attributes:
        own: what this rank has.
    """

    def __init__(self, own: defaultdict[Any, Any], complete: Callable[[], dict[Any, Any]]) -> None:
        super().__init__(dict)
        self.own = own
        self._complete: Callable[[], dict[Any, Any]] | None = complete

    def use(self) -> None:
        """Become whole."""
        if self._complete is not None:
            complete, self._complete = self._complete, None
            found = complete()
            super().update({**found, **{key: value for key, value in self.own.items() if key not in found}})

    def taken_back(self) -> defaultdict[Any, Any]:
        """This rank's part, with what the hook has done to it."""
        if self._complete is None:
            here = {key: value for key, value in dict.items(self) if type(key) is not Placeholder}
            self.own.clear()
            self.own.update(here)
        return self.own

    def __reduce__(self) -> Any:
        self.use()
        return defaultdict, (dict,), None, None, iter(dict.items(self))


def _used_first(name: str) -> Callable[..., Any]:
    plain = getattr(defaultdict, name)

    def run(self: _WholeState, *args: Any, **kwargs: Any) -> Any:
        self.use()
        return plain(self, *args, **kwargs)

    return run


for _name in (
    *("__getitem__", "__setitem__", "__delitem__", "__contains__", "__iter__", "__len__", "__eq__", "__repr__"),
    *("get", "keys", "values", "items", "pop", "popitem", "clear", "setdefault", "update", "copy"),
):
    setattr(_WholeState, _name, _used_first(_name))


def _told(value: Any) -> Any:
    return TensorSpec.of(value) if isinstance(value, Tensor) else value


def _made(told: Any, what: str) -> Any:
    return placeholder(told, what) if isinstance(told, TensorSpec) else told


class ParameterGradients:
    """Answers for ``.grad`` outside of steps. All ranks must make the same calls.

    Args:
        module: the LightningModule.
    """

    def __init__(
        self, module: nn.Module, transport: Transport, exchanges: Exchanges, operands: Operands, keys: TensorKeys
    ) -> None:
        self._module = module
        self._transport = transport
        self._exchanges = exchanges
        self._operands = operands
        self._keys = keys
        self._layouts: dict[int, torch.layout | None] | None = None

    def forget(self) -> None:
        """Other code may have run since it was asked which parameters have gradients."""
        self._layouts = None

    def of(self, tensor: Tensor) -> Tensor | None:
        """The gradient, or the placeholder that stands for it; None where there is none."""
        held = holders_of(tensor)
        layout = self._layout_of(tensor)
        if layout is None:
            return None
        if type(tensor) is not Placeholder:
            gradient = tensor.grad
            assert gradient is not None
            return self._keys.note(gradient, held)
        spec = tensor.spec.but(requires_grad=False, is_leaf=True, is_parameter=False)
        if layout is not torch.strided:
            spec = spec.but(stride=None, layout=layout)
        kept = tensor.__dict__.get("_gradient")
        if kept is None or kept.spec is not spec:
            kept = tensor.__dict__["_gradient"] = placeholder(spec, f"the gradient of {tensor.what}")
        return self._keys.note(kept, held)

    def set(self, tensor: Tensor, gradient: Tensor | None) -> None:
        """Give a tensor a gradient, or none."""
        held = holders_of(tensor)
        if gradient is not None:
            [here] = self._operands.gather([gradient], [held], "grad.__set__")
        if held is not None:
            self._layout_of(tensor)
            assert self._layouts is not None
            self._layouts[id(tensor)] = None if gradient is None else gradient.layout
        if type(tensor) is not Placeholder:
            tensor.grad = None if gradient is None else here

    def _layout_of(self, tensor: Tensor) -> torch.layout | None:
        """Of a parameter's gradient; None where there is none. Asked of the parameters' holders, once for a hook."""
        if self._layouts is None:
            parameters = [p for p in self._module.parameters() if holders_of(p) is not None]
            own = torch.zeros(len(parameters), dtype=torch.float64)
            for index, parameter in enumerate(parameters):
                if type(parameter) is not Placeholder and parameter.grad is not None:
                    own[index] = _LAYOUTS.index(parameter.grad.layout)
            self._exchanges.meet("grad", users_line())
            rows = self._transport.all_gather_vector(own, "which parameters have gradients").tolist()
            self._layouts = {
                id(parameter): _LAYOUTS[int(rows[(holders_of(parameter) or (0,))[0]][index])]
                for index, parameter in enumerate(parameters)
            }
        if id(tensor) in self._layouts:
            return self._layouts[id(tensor)]
        # Of a copy of the module, or made outside.
        return tensor.grad.layout if type(tensor) is not Placeholder and tensor.grad is not None else None


_LAYOUTS = (None, torch.strided, torch.sparse_coo)
"""Of gradients, by the number under which ranks tell one another of them; an embedding's may be sparse."""
