"""A rank that is really slower than the others, and a model to cut on such ranks."""

from __future__ import annotations

from typing import Any

import lightning as L
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import DataLoader, TensorDataset

WIDTH, NUM_LAYERS, ROWS = 256, 10, 256
_MULTIPLICATIONS = (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)


class SlowedDown(TorchDispatchMode):
    """While entered, matrix multiplications, of backwards too, take this many times as long."""

    def __init__(self, times: int) -> None:
        super().__init__()
        self.times = times

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _MULTIPLICATIONS:
            for _ in range(self.times - 1):
                func(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


class LitLayers(L.LightningModule):
    """Equal layers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(NUM_LAYERS)))

    def training_step(self, batch: Any) -> Tensor:
        return self.layers(batch[0]).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def rows(num_steps: int) -> DataLoader:
    """Batches of ROWS rows."""
    data = torch.randn(ROWS * num_steps, WIDTH, generator=torch.Generator().manual_seed(0))
    return DataLoader(TensorDataset(data), batch_size=ROWS)
