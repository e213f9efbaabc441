"""Quantize-aware training with torch.ao.quantization: observers in forwards that write into buffers."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.ao import quantization

from tests.habits.modules import WIDTH, Layers, Noting
from tests.habits.table import error, habit

FUSED = quantization.get_default_qat_qconfig("fbgemm")
BY_TENSOR = quantization.QConfig(
    activation=quantization.default_fused_act_fake_quant, weight=quantization.default_fused_wt_fake_quant
)
APART = quantization.QConfig(
    activation=quantization.FakeQuantize.with_args(observer=quantization.MovingAverageMinMaxObserver),
    weight=quantization.FakeQuantize.with_args(
        observer=quantization.MovingAverageMinMaxObserver,
        quant_min=-128,
        quant_max=127,
        dtype=torch.qint8,
        qscheme=torch.per_tensor_symmetric,
    ),
)


def prepare(module: Layers, config: quantization.QConfig) -> None:
    """Have fake quantization in the layers."""
    for layer in module.layers:
        layer.linear.qconfig = config
        quantization.prepare_qat(layer, inplace=True)


class Quantized(Noting):
    """Notes the observers' ranges after each batch."""

    config = APART

    def __init__(self) -> None:
        super().__init__()
        prepare(self, self.config)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.found.append([buffer.double().sum().item() for buffer in self.buffers()])


@habit(observed=["found"], plain=False)
class ObserversApart(Quantized):
    """Observers and fake quantization as two modules; the observers stop in the second epoch."""

    def on_train_epoch_start(self) -> None:
        if self.current_epoch == 1:
            self.apply(quantization.disable_observer)


@habit(observed=["found"], plain=False)
class ObserversByTensor(Quantized):
    """One call that observes and quantizes, with a range for each tensor."""

    config = BY_TENSOR


@habit(expect=error(r"min_val another shape in a step .* observers per tensor"), plain=False)
class ObserversByChannel(Quantized):
    """Torch's default, whose ranges get the number of channels in the first forward."""

    config = FUSED


@habit(observed=["found"], plain=False)
class ObserversWithShapes(Quantized):
    """The same after a forward on sample data."""

    config = FUSED

    def __init__(self) -> None:
        super().__init__()
        with torch.no_grad():
            self(torch.linspace(-1, 1, 2 * WIDTH).view(2, WIDTH))


@habit(plain=False)
class QuantizedFromSecondEpoch(Layers):
    """Layers that get fake quantization during the run."""

    def on_train_epoch_start(self) -> None:
        if self.current_epoch == 1:
            prepare(self, APART)
            assert isinstance(self.layers[0].linear, nn.Linear)
