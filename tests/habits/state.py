"""State in Python: what steps leave on the module, and read again."""

from __future__ import annotations

import random
from collections import defaultdict, deque
from typing import Any

import lightning as L
import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.habits.modules import CLASSES, WIDTH, Evaluated, Layer, Layers
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


class Smoothed:
    """A meter of the user's own, as in many training scripts."""

    def __init__(self) -> None:
        self.mean, self.recent = 0.0, deque([0.0], maxlen=3)

    def update(self, value: float) -> float:
        self.recent.append(value)
        self.mean = 0.9 * self.mean + 0.1 * sum(self.recent)
        return self.mean


@habit()
class MeterOfOnesOwn(Layers):
    """An object that is no module smooths losses, which are logged, and counts in an attribute of the class."""

    calls = 0

    def __init__(self) -> None:
        super().__init__()
        self.meter = Smoothed()
        type(self).calls = 0

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        type(self).calls += 1
        self.log("smooth", self.meter.update(loss.item()) + self.calls)
        return loss


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


class WithPenalty(Layer):
    """Appends a penalty to a list of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.penalties: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x)
        self.penalties.append(x.pow(2).mean())
        return x


@habit(without={"weight": 0.0})
class PenaltiesInListsOfLayers(Layers):
    """Mixture-of-experts style: auxiliary losses that layers collect are summed in the step, and cleared."""

    layer = WithPenalty
    weight = 0.1

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        penalty = sum(torch.stack(layer.penalties).sum() for layer in self.layers)
        for layer in self.layers:
            layer.penalties.clear()
        self.log("penalty", penalty)
        return loss + self.weight * penalty


@habit(without={"weight": 0.0})
class PenaltyInAttribute(Layers):
    """Each layer leaves its auxiliary loss in an attribute."""

    class Leaving(Layer):
        aux_loss: Tensor | None = None

        def forward(self, x: Tensor) -> Tensor:
            x = super().forward(x)
            self.aux_loss = x.abs().mean()
            return x

    layer = Leaving
    weight = 0.1

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        return loss + self.weight * sum(m.aux_loss for m in self.modules() if getattr(m, "aux_loss", None) is not None)


class Context:
    """An object that goes through all layers."""

    def __init__(self) -> None:
        self.losses: list[Tensor] = []
        self.depth = 0


@habit(observed=["depths"], without={"weight": 0.0})
class LossesInContextObject(Layers):
    """Layers add to an object that they are given, which is no tensor and no container."""

    class Adding(Layer):
        def forward(self, x: Tensor, context: Context) -> Tensor:  # type: ignore[override]
            context.depth += 1
            context.losses.append(x.var(-1).mean() / context.depth)
            return super().forward(x)

    layer = Adding
    weight = 0.1

    def __init__(self) -> None:
        super().__init__()
        self.depths: list[int] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        context = Context()
        for layer in self.layers:
            x = layer(x, context)
        self.depths.append(context.depth)
        return F.cross_entropy(self.head(x), y) + self.weight * torch.stack(context.losses).sum()


@habit(observed=["counts"])
class CountInArgument(Layers):
    """`info["n"] += 1` in a dictionary that all layers are given."""

    class Noting(Layer):
        def forward(self, x: Tensor, info: dict[str, Any]) -> Tensor:  # type: ignore[override]
            info["n"] += 1
            info.setdefault("norms", []).append(x.detach().norm().item())
            return super().forward(x) / info["n"]

    layer = Noting

    def __init__(self) -> None:
        super().__init__()
        self.counts: list[Any] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        info = {"n": 0}
        for layer in self.layers:
            x = layer(x, info=info)
        self.counts.append(info)
        return F.cross_entropy(self.head(x), y)


@habit(observed=["best", "bad"])
class BestLossTracked(Layers):
    """The best loss and a patience counter, by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.best = float("inf")
        self.bad = 0

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        if loss.item() < self.best:
            self.best = loss.item()
            self.bad = 0
        else:
            self.bad += 1
        return loss


@habit(observed=["last_logits", "last_features"])
class LastTensorsKept(Layers):
    """The step leaves its tensors on the module, for a callback or the user afterwards."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        self.last_features = self.features(x)
        self.last_logits = self.head(self.last_features)
        return F.cross_entropy(self.last_logits, y)


@habit(observed=["confusion"], without={"observes": False})
class ConfusionInNumpy(Layers):
    """A numpy confusion matrix that the step adds to, entry by entry."""

    observes = True

    def __init__(self) -> None:
        super().__init__()
        self.confusion = np.zeros((CLASSES, CLASSES), dtype=int)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        logits = self(x)
        if self.observes:
            for target, guess in zip(y.tolist(), logits.argmax(-1).tolist(), strict=True):
                self.confusion[target, guess] += 1
        return F.cross_entropy(logits, y)


@habit(observed=["history"])
class HistoryInDictionary(Layers):
    """Losses and accuracies by epoch, in a dictionary of lists."""

    def __init__(self) -> None:
        super().__init__()
        self.history: dict[str, list[float]] = {}

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        logits = self(x)
        loss = F.cross_entropy(logits, y)
        self.history.setdefault(f"loss/{self.current_epoch}", []).append(loss.item())
        self.history.setdefault(f"acc/{self.current_epoch}", []).append((logits.argmax(-1) == y).float().mean().item())
        return loss


@habit()
class HiddenStateBetweenSteps(Layers):
    """Truncated backpropagation through time: a recurrent state goes from one step to the next."""

    def __init__(self) -> None:
        super().__init__()
        self.cells = nn.ModuleList([nn.GRUCell(WIDTH, WIDTH) for _ in range(4)])
        self.states: list[Tensor | None] = [None] * 4

    def chain(self) -> list[str]:
        return [f"cells.{i}" for i in range(4)]

    def features(self, x: Tensor) -> Tensor:
        for number, cell in enumerate(self.cells):
            x = cell(x, self.states[number])
            self.states[number] = x.detach()
        return x


@habit(observed=["baseline"])
class RewardBaseline(Layers):
    """REINFORCE: a running baseline of rewards, which are read from the logits."""

    baseline = 0.0

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        log_probabilities = F.log_softmax(self(x), -1)
        rewards = (log_probabilities.argmax(-1) == y).float()
        advantage = rewards - self.baseline
        self.baseline = 0.9 * self.baseline + 0.1 * rewards.mean().item()
        return -(advantage * log_probabilities.gather(1, y[:, None])[:, 0]).mean()


@habit(plain=False, observed=["replay"])
class ReplayBuffer(Layers):
    """Inputs of earlier steps are kept in a list, and drawn from by Python's generator."""

    def __init__(self) -> None:
        super().__init__()
        self.replay: list[Any] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        self.replay.append((x.clone(), y.clone()))
        old_x, old_y = random.choice(self.replay)
        return F.cross_entropy(self(torch.cat([x, old_x])), torch.cat([y, old_y]))


SEEN_BY_ALL: list[float] = []


@habit(observed=["totals"])
class GlobalList(Layers):
    """A list of the script collects, not one of the module."""

    def __init__(self) -> None:
        super().__init__()
        SEEN_BY_ALL.clear()
        self.totals: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        SEEN_BY_ALL.append(loss.item())
        return loss

    def on_train_epoch_end(self) -> None:
        self.totals.append(sum(SEEN_BY_ALL))


class Collector(L.Callback):
    """Takes what the module left."""

    def __init__(self) -> None:
        self.norms: list[float] = []

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.norms.append(pl_module.last_features.norm().item())

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        pl_module.norms = self.norms


@habit(observed=["norms"], callbacks=lambda: [Collector()], plain=False, shows=False)  # it is in what is observed
class CallbackTakesFeatures(Layers):
    """A callback reads what the step left on the module."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        features = self.features(x)
        self.last_features = features.detach()
        return F.cross_entropy(self.head(features), y)


@habit(without={"weight": 0.0})
class ComparesWithMicrobatchBefore(Layers):
    """What is kept of the micro-batch before takes the place of a value of this one, which looks the same."""

    weight = 0.5

    def __init__(self) -> None:
        super().__init__()
        self.before: Tensor | None = None

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        features = self.features(x)
        own = features.detach()
        before = own if self.before is None else self.before
        self.before = own
        return F.cross_entropy(self.head(features + self.weight * before), y)


@habit(observed=["shadow", "norms"], plain=False)
class KeptFromHooks(Layers):
    """Hooks keep tensors of all parameters, and copies of layers, that are looked at after the run."""

    def __init__(self) -> None:
        super().__init__()
        self.shadow: dict[str, Any] = {}
        self.norms: list[Tensor] = []

    def on_train_batch_end(self, *_: Any) -> None:
        for name, parameter in self.named_parameters():
            before = self.shadow.get(name, parameter.detach())
            self.shadow[name] = before * 0.5 + parameter.detach() * 0.5
        self.norms += [layer.linear.weight.norm() for layer in self.layers]  # type: ignore[union-attr, operator]


class Noting(L.Callback):
    """Is given the losses by the module."""

    def __init__(self) -> None:
        self.losses: list[Tensor] = []

    def state_dict(self) -> dict[str, Any]:
        return {"losses": self.losses}


@habit(plain=False, callbacks=lambda: [Noting()])
class CallbackFilledInStep(Layers):
    """A step appends to a list of a callback, which is saved, and weighs its loss by how long the list is."""

    rate = 0.1

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        for callback in self.trainer.callbacks:  # type: ignore[attr-defined]
            if isinstance(callback, Noting):
                callback.losses.append(loss.detach())
                loss = loss * (1 + self.rate * len(callback.losses))
        return loss


@habit(plain=False, shows=False, observed=("queue",))
class QueueOfPrototypes(Layers):
    """SwAV's queues: a plain tensor whose rows are compared, moved on, and filled with what a stage computes."""

    def __init__(self) -> None:
        super().__init__()
        self.queue = torch.zeros(2, 4, WIDTH)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        late = self.features(x)
        similar = torch.zeros(())
        for number in range(2):
            similar = similar + torch.mm(self.queue[number], late.detach().t()).mean()
            self.queue[number, 2:] = self.queue[number, :-2].clone()
            self.queue[number, :2] = late.detach()
        return F.cross_entropy(self.head(late), y) + similar
