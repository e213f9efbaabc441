"""Logged values and torchmetrics, from steps, hooks, submodules and callbacks."""

from __future__ import annotations

from typing import Any

import lightning as L
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import EarlyStopping, LearningRateMonitor, ModelCheckpoint
from torch import Tensor, nn
from torchmetrics import AUROC, Accuracy, AveragePrecision, ConfusionMatrix, MeanMetric, MetricCollection, SumMetric
from torchmetrics.classification import MulticlassAccuracy, MulticlassF1Score

from tests.habits.modules import CLASSES, WIDTH, Evaluated, Layer, Layers
from tests.habits.table import habit


def accuracy() -> Any:
    return Accuracy(task="multiclass", num_classes=CLASSES)


@habit()
class LogsWithEveryOption(Layers):
    """on_step, on_epoch, both, prog_bar, logger=False, reduce_fx, batch_size, add_dataloader_idx."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        features = self.features(x)
        loss = F.cross_entropy(self.head(features), y)
        self.log("step", loss, on_step=True, on_epoch=False)
        self.log("epoch", loss, on_step=False, on_epoch=True)
        self.log("both", loss, on_step=True, on_epoch=True, prog_bar=True)
        self.log("quiet", loss, logger=False, prog_bar=True)
        self.log("largest", features.max(), on_step=False, on_epoch=True, reduce_fx="max")
        self.log("smallest", features.min(), on_step=False, on_epoch=True, reduce_fx=torch.min)
        self.log("sum", features.mean(), on_step=False, on_epoch=True, reduce_fx="sum")
        self.log("weighted", loss.detach(), on_epoch=True, batch_size=3)
        self.log("number", 0.5 * self.global_step)
        return loss


@habit()
class LogsFromEveryStage(Layers):
    """Values of early, middle and late layers, under names that are made of their numbers."""

    def features(self, x: Tensor) -> Tensor:
        for number, layer in enumerate(self.layers):
            x = layer(x)
            self.log(f"norm/{number}", x.norm(), on_step=True, on_epoch=True)
        return x


@habit()
class LogsDictionary(Layers):
    """log_dict with tensors and numbers, some of them only in the second epoch."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        first = self.layers[0](x)
        logits = self.head(self.layers[3](self.layers[2](self.layers[1](first))))
        values = {"loss": F.cross_entropy(logits, y), "accuracy": (logits.argmax(-1) == y).float().mean()}
        if self.current_epoch:
            values["early"] = first.mean()
        self.log_dict(values, on_epoch=True, prog_bar=True)
        self.log_dict({f"constant/{i}": float(i) for i in range(2)})
        return values["loss"]


@habit(plain=False, shows=False)  # logging alone is what is compared
class LogsInHooks(Evaluated):
    """self.log in on_train_batch_start, on_train_batch_end, on_*_epoch_start and on_*_epoch_end."""

    def on_train_epoch_start(self) -> None:
        self.log("start", float(self.current_epoch))

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.log("batch_mean", batch[0].mean(), on_step=True, on_epoch=True)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.log("twice", 2 * outputs["loss"])

    def on_train_epoch_end(self) -> None:
        self.log("bias", self.head.bias.detach().sum())

    def on_validation_epoch_end(self) -> None:
        self.log("val_norm", self.layers[0].linear.weight.norm())


class LogsItself(Layer):
    """Logs through the LightningModule that it is given."""

    def __init__(self, owner: Any = None) -> None:
        super().__init__()
        self.__dict__["owner"] = owner

    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x)
        if self.owner is not None:
            self.owner.log(f"mean_of_{id_of(self)}", x.mean())
        return x


def id_of(layer: LogsItself) -> int:
    return list(layer.owner.layers).index(layer)


@habit()
class LogsFromSubmodules(Layers):
    """Layers log their own means."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([LogsItself(self) for _ in range(4)])


class LogsInCallback(L.Callback):
    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.log("in_callback", outputs["loss"] * 3, on_epoch=True)
        pl_module.log("through_module", batch[0].std())

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        pl_module.log("epoch_loss_again", trainer.callback_metrics["train_loss"] + 1)


habit(plain=False, callbacks=lambda: [LogsInCallback()], shows=False)(
    type("LoggedByCallback", (Layers,), {"__module__": __name__, "__doc__": "Callbacks log for themselves."})
)


@habit(observed=["means"], without={"counts": False})
class CountsProcesses(Layers):
    """The step and an epoch's mean count the processes that samples are shared out to."""

    counts = True

    def __init__(self) -> None:
        super().__init__()
        self.means: list[float] = []
        self.losses: list[Tensor] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        trainer = self.trainer
        if self.counts and trainer.world_size > 1:
            batch = [part[self.global_rank :: trainer.world_size] for part in batch]
        loss = super().training_step(batch, batch_idx) * trainer.world_size
        self.losses.append(loss.detach())
        return loss

    def on_train_epoch_end(self) -> None:
        total = self.all_gather(torch.stack(self.losses).sum()).sum().item()
        self.means.append(total / (self.trainer.world_size * self.trainer.num_devices) if self.counts else 0.0)


@habit(observed=["epochs"])
class MetricUpdatedByHand(Layers):
    """A torchmetrics object on the LightningModule: update in the step, compute and reset when the epoch ends."""

    def __init__(self) -> None:
        super().__init__()
        self.accuracy = accuracy()
        self.epochs: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        logits = self(x)
        self.accuracy.update(logits, y)
        return F.cross_entropy(logits, y)

    def on_train_epoch_end(self) -> None:
        value = self.accuracy.compute()
        self.log("train_acc", value)
        self.epochs.append(value.item())
        self.accuracy.reset()


@habit()
class MetricLoggedAsObject(Layers):
    """The object itself is logged, on_step and on_epoch."""

    def __init__(self) -> None:
        super().__init__()
        self.accuracy = accuracy()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        logits = self(x)
        self.accuracy(logits, y)
        self.log("train_acc", self.accuracy, on_step=True, on_epoch=True)
        return F.cross_entropy(logits, y)


@habit(observed=["batch_values"])
class MetricForwardUsed(Layers):
    """The value that a metric's forward returns is kept, and weights the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.accuracy = accuracy()
        self.batch_values: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        logits = self(x)
        value = self.accuracy(logits, y)
        self.batch_values.append(value.item())
        return F.cross_entropy(logits, y) * (1.5 - value)


@habit(calls=["fit", "test"])
class MetricCollections(Evaluated):
    """MetricCollection with clones by prefix, logged by log_dict in training, validation and test."""

    def __init__(self) -> None:
        super().__init__()
        metrics = MetricCollection([MulticlassAccuracy(CLASSES), MulticlassF1Score(CLASSES)])
        self.train_metrics, self.val_metrics = metrics.clone(prefix="train/"), metrics.clone(prefix="val/")
        self.test_metrics = metrics.clone(prefix="test/")

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        logits = self(x)
        self.log_dict(self.train_metrics(logits, y))
        return F.cross_entropy(logits, y)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.val_metrics.update(self(batch[0]), batch[1])

    def on_validation_epoch_end(self) -> None:
        self.log_dict(self.val_metrics.compute())
        self.val_metrics.reset()

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.test_metrics.update(self(batch[0]), batch[1])
        self.log_dict(self.test_metrics, on_step=False, on_epoch=True)


class WithMetric(Layer):
    """A layer that has a metric of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.mean = MeanMetric()

    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x)
        self.mean.update(x.detach())
        return x


@habit(observed=["means"])
class MetricsInLayers(Layers):
    """Metrics inside of the layers of all stages are computed when the epoch ends."""

    layer = WithMetric

    def __init__(self) -> None:
        super().__init__()
        self.means: list[list[float]] = []

    def on_train_epoch_end(self) -> None:
        self.means.append([layer.mean.compute().item() for layer in self.layers])
        for number, layer in enumerate(self.layers):
            self.log(f"mean/{number}", self.means[-1][number])
            layer.mean.reset()


class Criterion(SumMetric):
    """A loss that is a metric, as chemprop has them."""

    def forward(self, logits: Tensor, y: Tensor) -> Tensor:  # type: ignore[override]
        loss = F.cross_entropy(logits, y)
        self.update(loss.detach())
        return loss


@habit()
class CriterionIsAMetric(Layers):
    """chemprop: the criterion lives in the last layer's module, and is logged as an object."""

    class Predictor(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.ffn = nn.Linear(WIDTH, CLASSES)
            self.criterion = Criterion()

        def forward(self, x: Tensor) -> Tensor:
            return self.ffn(x)

    def __init__(self) -> None:
        super().__init__()
        self.head = self.Predictor()

    @property
    def criterion(self) -> Criterion:
        return self.head.criterion

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        loss = self.criterion(self(x), y)
        self.log("train_sum", self.criterion, on_epoch=True, prog_bar=True)
        return loss


@habit(observed=["matrix"])
class ConfusionMatrixReset(Evaluated):
    """A confusion matrix, read row by row as numbers, and reset by hand in the middle of an epoch."""

    def __init__(self) -> None:
        super().__init__()
        self.confusion = ConfusionMatrix(task="multiclass", num_classes=CLASSES)
        self.matrix: list[Any] = []

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.confusion(self(batch[0]), batch[1])

    def on_validation_epoch_end(self) -> None:
        counts = self.confusion.compute()
        self.matrix.append(counts.tolist())
        for row in range(CLASSES):
            self.log(f"recall/{row}", counts[row, row] / counts[row].sum().clamp(min=1))
        self.confusion.reset()


@habit(plain=False, observed=["sums"])
class MetricsInDictionaries(Layers):
    """Metrics in a ModuleDict by phase, and one in a plain attribute of an object, reset in on_train_epoch_start."""

    def __init__(self) -> None:
        super().__init__()
        self.metrics = nn.ModuleDict({phase: nn.ModuleList([accuracy()]) for phase in ("early", "late")})
        self.sums: list[float] = []
        self.total = SumMetric()

    def on_train_epoch_start(self) -> None:
        self.total.reset()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        logits = self(x)
        for metric in self.metrics["early" if self.global_step < 3 else "late"]:
            metric.update(logits, y)
        self.total.update((logits.argmax(-1) == y).sum())
        return F.cross_entropy(logits, y)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.sums.append(self.total.compute().item())


@habit(epochs=4, callbacks=lambda: [EarlyStopping("val_loss", patience=0, min_delta=0.5)], plain=False)
class StopsEarly(Evaluated):
    """EarlyStopping on a logged value, with lists of outputs beside it."""

    def on_validation_epoch_end(self) -> None:
        self.log("seen", float(len(self.trainer.callback_metrics)))


@habit(
    callbacks=lambda: [ModelCheckpoint(monitor="train_loss_epoch", filename="{epoch}-{train_loss_epoch:.4f}")],
    trainer={"enable_checkpointing": True},
    shows=False,  # the files are compared
)
class CheckpointsByLoss(Layers):
    """ModelCheckpoint with a logged value in its file's name."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        loss = F.cross_entropy(self(x), y)
        self.log("train_loss", loss, on_step=True, on_epoch=True)
        return loss


@habit(plain=False, callbacks=lambda: [LearningRateMonitor("step")])
class SchedulerOnLoggedValue(Layers):
    """ReduceLROnPlateau on a value that only the last stage has, watched by LearningRateMonitor."""

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, factor=0.5, threshold=0.5)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "monitor": "train_loss"}}


@habit(plain=False, observed=["bars"])
class MetricsReadByHand(Layers):
    """callback_metrics, logged_metrics and progress_bar_metrics are read in on_train_batch_end."""

    def __init__(self) -> None:
        super().__init__()
        self.bars: list[Any] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.log("bar", loss * 2, prog_bar=True)
        return loss

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        metrics = self.trainer.callback_metrics
        self.bars.append({name: float(value) for name, value in metrics.items()})
        self.bars.append(sorted(self.trainer.progress_bar_metrics))


@habit(shows=False)  # logging alone is what is compared
class LogsToTheLogger(Layers):
    """self.logger.log_metrics by hand, and self.loggers, with values read in the step."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        middle = self.layers[1](self.layers[0](x))
        loss = F.cross_entropy(self.head(self.layers[3](self.layers[2](middle))), y)
        for logger in self.loggers:
            logger.log_metrics({"by_hand": loss.item(), "middle": middle.norm().item()}, step=self.global_step)
        return loss


@habit()
class LossesInDictionary(Layers):
    """The step returns a dictionary with the loss, more tensors, and values that are not tensors."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        features = self.features(x)
        logits = self.head(features)
        return {
            "loss": F.cross_entropy(logits, y),
            "logits": logits.detach(),
            "features": features.detach(),
            "count": len(x),
            "name": "train",
        }


@habit(plain=False)
class CurvesOfUndetachedLogits(Layers):
    """Metrics that keep the scores they are given, which are never detached, logged as an object and by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.auroc = AUROC(task="multiclass", num_classes=CLASSES)
        self.precision = AveragePrecision(task="multiclass", num_classes=CLASSES)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        logits = self(x)
        self.log("auroc_of_step", self.auroc(logits.softmax(-1), y))
        self.log("auroc", self.auroc, on_step=False, on_epoch=True)
        self.precision.update(logits, y)
        return F.cross_entropy(logits, y)

    def on_train_epoch_end(self) -> None:
        self.log("precision", self.precision.compute())
        self.precision.reset()


@habit(observed=["made"], plain=False, shows=False)
class MetricsBesideTheModule(Evaluated):
    """Made in hooks, or kept in a dictionary: they count each sample once, as the module's own do."""

    def __init__(self) -> None:
        super().__init__()
        self.made: list[Any] = []
        self.beside = {"total": SumMetric(), "matrix": ConfusionMatrix("multiclass", num_classes=CLASSES)}

    def on_train_epoch_start(self) -> None:
        self.mean, self.total = MeanMetric(), SumMetric()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        for metric in (self.mean, self.total, self.beside["total"]):
            metric.update(loss)
        return loss

    def on_train_epoch_end(self) -> None:
        self.made += [metric.compute().item() for metric in (self.mean, self.total, self.beside["total"])]

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        logits = self(batch[0])
        self.beside["matrix"].update(logits, batch[1])
        self.log("val_loss", logits.mean())

    def on_validation_epoch_end(self) -> None:
        norm = SumMetric()
        norm.update(self.head.weight.norm())
        self.made += [norm.compute().item(), self.beside["matrix"].compute().tolist()]


class TotalsLosses(L.Callback):
    def __init__(self) -> None:
        self.total = SumMetric()

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, *args: Any) -> None:
        self.total.update(outputs["loss"])
        module.made.append(self.total.compute().item())


@habit(observed=["made"], callbacks=lambda: [TotalsLosses()], plain=False, shows=False)
class MetricOfACallback(Layers):
    def __init__(self) -> None:
        super().__init__()
        self.made: list[float] = []


@habit()
class LogGivesABatchSize(Evaluated):
    """A `log` of one's own gives a batch size."""

    def log(self, name: str, value: Any, **options: Any) -> None:  # type: ignore[override]
        super().log(name, value, batch_size=8, **options)


@habit()
class LogTakesTwoOptions(Layers):
    """A `log` of one's own takes two options, and is called by name."""

    def log(self, name: str, value: Any, on_step: bool = True, on_epoch: bool = False) -> None:  # type: ignore[override]
        super().log(f"own/{name}", value, on_step=on_step, on_epoch=on_epoch)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        self.log(name="twice", value=2 * loss, on_epoch=True)
        self.log("thrice", 3 * loss, False, True)
        return loss


@habit()
class LogPassesOn(Evaluated):
    """A `log` of one's own passes on all that it is given."""

    def log(self, *args: Any, **kwargs: Any) -> None:
        kwargs.setdefault("on_epoch", True)
        super().log(*args, **kwargs)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        self.log("twice", 2 * loss, True)
        self.log(name="thrice", value=3 * loss, prog_bar=True, batch_size=len(batch[0]))
        return loss


@habit()
class LogTakesAStage(Evaluated):
    """A `log` of one's own takes an option that Lightning's does not have."""

    def log(self, name: str, value: Any, stage: str = "train", **options: Any) -> None:  # type: ignore[override]
        super().log(f"{stage}/{name}", value, **options)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        self.log("twice", 2 * loss, stage="other", on_step=False, on_epoch=True)
        self.log(name="thrice", value=3 * loss, stage="third", prog_bar=True)
        return loss


@habit(trainer={"precision": "64-true"}, calls=("fit", "validate"), shows=False, observed=["found"])
class NumbersLoggedInDouble(Evaluated):
    """Numbers and float32 tensors that steps log are added up in double precision; so is the loss that hooks get."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[Any] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.log("train_number", 1 / 3, on_epoch=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        super().validation_step(batch, batch_idx)
        self.log("val_number", 1 / 3)
        self.log("val_single", torch.tensor(1 / 3, dtype=torch.float32))

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        assert outputs["loss"].dtype is torch.float64

    def on_train_epoch_end(self) -> None:
        names = ("train_number_epoch", "val_number", "val_single")
        kept = {name: self.trainer.callback_metrics[name] for name in names}
        assert all(value.dtype is torch.float64 for value in kept.values())
        self.found.append([value.item() for value in kept.values()])
