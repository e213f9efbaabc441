"""A language model: the cross entropy of the next token over any network."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import lightning as L
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer


class LitLanguageModel(L.LightningModule):
    """Trains ``net``, which maps token ids (N, T) to logits (N, T, vocab_size).

    A batch is a pair of ids and next ids, both (N, T). ``optimizer`` is called with the parameters. ``stage_config``
    says where a pipeline cuts the module, and plain Lightning does not look at it.
    """

    def __init__(
        self,
        *,
        net: nn.Module,
        optimizer: Callable[[Iterable[nn.Parameter]], Optimizer],
        stage_config: Mapping[str, int] | None = None,
    ) -> None:
        super().__init__()
        self.net = net
        self.optimizer = optimizer
        self.stage_config = stage_config

    def forward(self, ids: Tensor) -> Tensor:
        return self.net(ids)

    def loss(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        """The mean cross entropy in nats a token."""
        ids, targets = batch
        return F.cross_entropy(self(ids).flatten(0, 1), targets.flatten())

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.log("train/loss", loss, on_step=True, on_epoch=True, prog_bar=True)
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        self.log("val/loss", self.loss(batch), prog_bar=True)

    def configure_optimizers(self) -> Any:
        return self.optimizer(self.parameters())
