"""Gradients of parameters as hooks see them: each rank knows which there are, whoever holds them."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from lightning_pipeline.partition.ownership import holders_of
from lightning_pipeline.partition.placeholder import Placeholder, placeholder
from lightning_pipeline.partition.users_line import users_line
from lightning_pipeline.runtime.exchanges import Exchanges
from lightning_pipeline.runtime.operands import Operands
from lightning_pipeline.runtime.tensor_keys import TensorKeys
from lightning_pipeline.runtime.transport import Transport


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
        look = tensor.look.but(requires_grad=False, is_leaf=True, is_parameter=False)
        if layout is not torch.strided:
            look = look.but(stride=None, layout=layout)
        kept = tensor.__dict__.get("_gradient")
        if kept is None or kept.look is not look:
            kept = tensor.__dict__["_gradient"] = placeholder(look, f"the gradient of {tensor.what}")
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
