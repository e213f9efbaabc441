"""State in Python: what steps leave on the module, and read again."""

from __future__ import annotations

from collections import defaultdict, deque
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.habits.modules import Evaluated, Layer, Layers
from tests.habits.table import habit


@habit(observed=["means"])
class TrainingOutputsInList(Layers):
    """Lightning 2's own idiom: outputs collected in a list, and averaged when the epoch ends."""

    def __init__(self) -> None:
        super().__init__()
        self.training_step_outputs: list[Tensor] = []
        self.means: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.training_step_outputs.append(loss.detach())
        return loss

    def on_train_epoch_end(self) -> None:
        mean = torch.stack(self.training_step_outputs).mean()
        self.log("epoch_mean", mean)
        self.means.append(float(mean))
        self.training_step_outputs.clear()


class Collecting(Evaluated):
    """Collects dictionaries in each kind of evaluation."""

    def __init__(self) -> None:
        super().__init__()
        self.outputs: dict[str, list[Any]] = defaultdict(list)
        self.results: list[Any] = []

    def collect(self, kind: str, batch: Any) -> dict[str, Tensor]:
        x, y = batch
        logits = self(x)
        output = {"loss": F.cross_entropy(logits, y), "predictions": logits.argmax(-1), "targets": y}
        self.outputs[kind].append(output)
        return output

    def conclude(self, kind: str) -> None:
        outputs = self.outputs.pop(kind)
        predictions = torch.cat([output["predictions"] for output in outputs])
        targets = torch.cat([output["targets"] for output in outputs])
        accuracy = (predictions == targets).float().mean()
        self.results.append(
            (kind, len(outputs), accuracy.item(), torch.stack([o["loss"] for o in outputs]).mean().item())
        )
        if kind != "predict":
            self.log(f"{kind}_acc", accuracy)


@habit(observed=["results"])
class ValidationOutputsInList(Collecting):
    """Predictions and targets of all validation batches."""

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        return self.collect("val", batch)

    def on_validation_epoch_end(self) -> None:
        self.conclude("val")


@habit(observed=["results"], calls=["fit", "test"])
class TestOutputsInList(Collecting):
    """The same in a test."""

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.collect("test", batch)

    def on_test_epoch_end(self) -> None:
        self.conclude("test")


@habit(observed=["results"], calls=["predict"], plain=False)
class PredictionsInList(Collecting):
    """The same in a prediction that returns something else."""

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.collect("predict", batch)["predictions"]

    def on_predict_epoch_end(self) -> None:
        self.conclude("predict")


@habit(observed=["calls", "samples"])
class CountersOnSelf(Layers):
    """How many steps and samples there were, in the loss as well."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0
        self.samples = 0

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.calls += 1
        self.samples += len(batch[0])
        return loss / (1 + 0.01 * self.calls)


@habit(observed=["layers.0.calls", "layers.1.calls", "layers.2.calls", "layers.3.calls"], without={"layer": Layer})
class CountersInLayers(Layers):
    """Every layer counts its own calls."""

    class Counting(Layer):
        calls = 0

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            return super().forward(x) * (1 + 0.01 * (self.calls % 3))

    layer = Counting


@habit(observed=["running", "history"])
class RunningLossAsNumber(Layers):
    """A running mean of the loss as a plain number, which scales the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.running: float | None = None
        self.history: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        value = loss.item()
        self.running = value if self.running is None else 0.9 * self.running + 0.1 * value
        self.history.append(self.running)
        return loss / self.running


@habit(observed=["running"])
class RunningLossAsTensor(Layers):
    """The same as a tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.running = torch.tensor(1.0)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.running = 0.9 * self.running + 0.1 * loss.detach()
        return loss / self.running


@habit()
class ValueKeptForNextStep(Layers):
    """The last features are kept, and pulled towards in the next step."""

    def __init__(self) -> None:
        super().__init__()
        self.previous: Tensor | None = None

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        features = self.features(x)
        loss = F.cross_entropy(self.head(features), y)
        if self.previous is not None:
            loss = loss + 0.1 * F.mse_loss(features.mean(0), self.previous)
        self.previous = features.mean(0).detach()
        return loss


@habit(observed=["recent"], without={"weight": 0.0})
class DequeOfFeatures(Layers):
    """A deque of the last features of an early layer, whose mean is subtracted."""

    weight = 0.5

    def __init__(self) -> None:
        super().__init__()
        self.recent: deque[Tensor] = deque(maxlen=3)

    def features(self, x: Tensor) -> Tensor:
        x = self.layers[0](x)
        self.recent.append(x.detach().mean(0))
        x = x - self.weight * torch.stack(list(self.recent)).mean(0)
        for layer in self.layers[1:]:
            x = layer(x)
        return x
