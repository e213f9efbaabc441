"""Parts of plain tensors that a step writes into: rows of sums, confusion matrices, leaves that it fits."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.habits.modules import CLASSES, WIDTH, Evaluated, Layers, Noting
from tests.habits.table import error, habit


@habit(plain=False, shows=False)
class RowsAddedTo(Layers):
    """Each layer's result is added to a row of zeros."""

    def zeros(self, x: Tensor) -> Tensor:
        return torch.zeros(len(x), 4, WIDTH)

    def features(self, x: Tensor) -> Tensor:
        out = self.zeros(x)
        for i, layer in enumerate(self.layers):
            x = layer(x)
            out[:, i] += x
        return out.sum(1)


@habit(plain=False, shows=False)
class RowsLikeBatchAddedTo(RowsAddedTo):
    def zeros(self, x: Tensor) -> Tensor:
        return x.new_zeros(len(x), 4, WIDTH)


@habit(plain=False, shows=False)
class RowsKeptAndAddedTo(Layers):
    """The rows are views that were made before the first write."""

    def features(self, x: Tensor) -> Tensor:
        out = torch.zeros(4, len(x), WIDTH)
        rows = [out[i] for i in range(4)]
        for row, layer in zip(rows, self.layers, strict=True):
            x = layer(x)
            row.add_(x.detach())
        return x + out.sum(0) + rows[1] * rows[3]


@habit(plain=False, shows=False)
class SumsByClass(Layers):
    """Losses are added up by class."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        losses = F.cross_entropy(self(batch[0]), batch[1], reduction="none")
        sums = torch.zeros(2)
        for i in range(len(losses)):
            sums[i % 2] += losses[i]
        return sums.max()


@habit(plain=False, shows=False, observed=("total",))
class LossOfEachBatch(Layers):
    """An attribute has the loss of each batch, added up over micro-batches."""

    def __init__(self) -> None:
        super().__init__()
        self.total = torch.zeros(3)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.total[batch_idx] += loss.detach()
        return loss

    def on_train_batch_end(self, *args: Any) -> None:
        self.log("total", self.total.sum())


@habit(plain=False, shows=False, observed=("confusion",))
class ConfusionByHand(Evaluated):
    """A confusion matrix, by the classes that are predicted."""

    def __init__(self) -> None:
        super().__init__()
        self.confusion = torch.zeros(CLASSES, CLASSES)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        for target, predicted in zip(batch[1], self(batch[0]).argmax(1), strict=True):
            self.confusion[target, predicted] += 1


@habit(plain=False, shows=False, observed=("confusion",))
class ConfusionInBuffer(ConfusionByHand):
    def __init__(self) -> None:
        super().__init__()
        del self.confusion
        self.register_buffer("confusion", torch.zeros(CLASSES, CLASSES))


@habit(plain=False, shows=False, observed=("table",))
class RowsOfPrediction(Layers):
    """Rows that predictions choose are written into, and read at once."""

    def __init__(self) -> None:
        super().__init__()
        self.table = torch.zeros(CLASSES, CLASSES)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        logits = self(batch[0])
        row = self.table[logits.argmax(1)[0]]
        row += 1
        self.log("sum", self.table.sum())
        self.table[logits.argmax(1)[1]] = logits[0].detach()
        self.table[logits.argmax(1)[1], 0] += logits[0, 0].detach()
        return F.cross_entropy(logits, batch[1]) * (1 + self.table.mean() + row.mean())


@habit(plain=False, shows=False, observed=("table",))
class EverySecondWrites(Layers):
    """Every second micro-batch writes into a tensor which the ones before have used."""

    def __init__(self) -> None:
        super().__init__()
        self.table = torch.zeros(WIDTH)
        self.count = 0

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.count += 1
        hidden = self.features(batch[0]) + self.table
        if self.count % 2 == 0:
            self.table.copy_(hidden.detach().mean(0))
        return F.cross_entropy(self.head(hidden), batch[1])


@habit(plain=False, shows=False, observed=("table",), automatic=error(r"has kept is written into.*\.py:\d+.*clone"))
class EverySecondWritesRow(EverySecondWrites):
    def __init__(self) -> None:
        super().__init__()
        self.table = torch.zeros(3, WIDTH)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.count += 1
        hidden = self.features(batch[0]) + self.table[1]
        if self.count % 2 == 0:
            self.table[1] += hidden.detach().mean(0)
            hidden = hidden + self.table[1]
        return F.cross_entropy(self.head(hidden), batch[1])


@habit(plain=False, shows=False, expect=error(r"earlier micro-batch has kept is written into.*\.py:\d+.*clone"))
class KeptRowWritten(Layers):
    """A tensor and a row of it are attributes, and steps write into the row."""

    def __init__(self) -> None:
        super().__init__()
        self.table = torch.zeros(3, WIDTH)
        self.row = self.table[2]

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        hidden = self.features(batch[0]) + self.table.sum(0)
        self.row += hidden.detach().mean(0)
        return F.cross_entropy(self.head(hidden), batch[1])


@habit(plain=False, shows=False, observed=("found",))
class LeafWrittenAfterUse(Noting):
    """A leaf that the loss depends on is written into afterwards, and keeps its gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.probes: list[Tensor] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        hidden = self.features(batch[0])
        probe = torch.zeros(WIDTH, requires_grad=True)
        loss = F.cross_entropy(self.head(hidden + probe), batch[1])
        with torch.no_grad():
            probe.copy_(hidden.mean(0))
        self.probes.append(probe)
        return loss

    def on_after_backward(self) -> None:
        self.found.append([(one.grad, one, one.requires_grad) for one in self.probes])
        self.probes = []


@habit(plain=False, shows=False)
class LeafFitted(Layers):
    """Each step fits a vector to its features."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        hidden = self.features(batch[0])
        weight = torch.zeros(WIDTH, requires_grad=True)
        for _ in range(2):
            [gradient] = torch.autograd.grad((hidden.detach() @ weight - 1).pow(2).mean(), [weight])
            with torch.no_grad():
                weight -= 0.1 * gradient
        self.log("norm", weight.detach().norm())
        return F.cross_entropy(self.head(hidden), batch[1])


@habit(plain=False, shows=False, observed=("weights",))
class LocalHeadFitted(Evaluated):
    """Each step fits a classifier of its own to its features, in training and validation."""

    def __init__(self) -> None:
        super().__init__()
        self.weights: list[Tensor] = []

    def fitted(self, hidden: Tensor, targets: Tensor) -> Tensor:
        with torch.enable_grad():
            head = nn.Linear(WIDTH, CLASSES)
            for _ in range(2):
                loss = F.cross_entropy(head(hidden.detach()), targets)
                gradients = torch.autograd.grad(loss, list(head.parameters()))
                with torch.no_grad():
                    for parameter, gradient in zip(head.parameters(), gradients, strict=True):
                        parameter -= 0.1 * gradient
        self.weights.append(head.weight)
        return F.cross_entropy(head(hidden.detach()), targets).detach()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        hidden = self.features(batch[0])
        self.log("probe", self.fitted(hidden, batch[1]))
        return F.cross_entropy(self.head(hidden), batch[1])

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_probe", self.fitted(self.features(batch[0]), batch[1]))


@habit(plain=False, shows=False, expect=error(r"gradient of a parameter is read within a step.*\.py:\d+.*p -= rate"))
class LocalOptimizer(Layers):
    """Each step trains a classifier of its own with an optimizer."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        hidden = self.features(batch[0])
        head = nn.Linear(WIDTH, CLASSES)
        optimizer = torch.optim.SGD(head.parameters(), lr=0.1)
        loss = F.cross_entropy(head(hidden.detach()), batch[1])
        loss.backward()
        optimizer.step()
        return F.cross_entropy(self.head(hidden), batch[1])


@habit(plain=False, shows=False, expect=error(r"shares its memory with another one.*written_rows\.py:\d+.*clone"))
class RowOfDataWritten(Layers):
    """A row is written into through the `.data` of an attribute, which is used afterwards."""

    def __init__(self) -> None:
        super().__init__()
        self.table = torch.zeros(3, WIDTH)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        hidden = self.features(batch[0])
        self.table.data[1] += hidden.detach().mean(0)
        return F.cross_entropy(self.head(hidden + self.table.sum(0)), batch[1])


@habit(plain=False, shows=False)
class PartWithinLargerMemory(Layers):
    """What is written into begins within the memory that it lies in."""

    def features(self, x: Tensor) -> Tensor:
        row = torch.zeros(3, WIDTH)[1].detach()
        part = row[2:]
        for layer in self.layers:
            x = layer(x)
            part += x.detach().mean(0)[2:]
        return x + row
