"""Modules, loaders and callbacks for runs whose options are drawn at random, see options.py."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning as L
import torch
import torch.nn.functional as F
import torchmetrics
from lightning.pytorch.callbacks import BaseFinetuning, BasePredictionWriter, LambdaCallback
from lightning.pytorch.utilities import CombinedLoader
from torch import Tensor, nn
from torch.optim import lr_scheduler as schedulers
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset, RandomSampler, WeightedRandomSampler

WIDTH, LENGTH, CLASSES, DEPTH = 8, 3, 5, 6


class Block(nn.Module):
    """A residual layer of a kind."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.BatchNorm1d(LENGTH) if kind == "normed" else nn.Identity()
        self.dropout = nn.Dropout(0.2 if kind in ("dropped", "normed") else 0.0)
        self.recurrent = nn.GRU(WIDTH, WIDTH, batch_first=True) if kind == "recurrent" else None
        self.attention = nn.MultiheadAttention(WIDTH, 2, 0.1, batch_first=True) if kind == "attending" else None
        self.state: Any = torch.zeros(1, 1, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        if self.attention is not None:
            x = x + self.attention(x, x, x, need_weights=False)[0]
        if self.recurrent is not None:
            state = self.state.to(x.dtype).mean(1, keepdim=True).repeat(1, len(x), 1) if self.training else None
            x, new = self.recurrent(x, state)
            self.state = new.detach() if self.training else self.state
        return x + self.dropout(torch.tanh(self.linear(self.norm(x))))


class Classifier(L.LightningModule):
    """Says which number follows from a few numbers.

    Args:
        block: the kind of the layers.
        style: "by-hand" takes two optimizers in turn, "kept" keeps outputs for the epoch's end, and torchmetrics.
    """

    def __init__(
        self,
        block: str = "plain",
        style: str = "automatic",
        optimizer: str = "SGD",
        scheduler: str = "",
        logs: str = "",
        tied: bool = False,
        lr: float = 0.05,
    ) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.lr, self.counts, self.best, self.kept = lr, dict.fromkeys(("batches", "moved", "set up"), 0), 0.0, []
        self.automatic_optimization = style != "by-hand"
        self.words = nn.Embedding(CLASSES, WIDTH)
        blocks = [Block(block) for _ in range(DEPTH)]
        self.backbone, self.neck = nn.Sequential(*blocks[: DEPTH // 2]), nn.Sequential(*blocks[DEPTH // 2 :])
        self.head = nn.Linear(WIDTH, CLASSES, bias=not tied)
        if tied:
            self.head.weight = self.words.weight
        if style == "kept":
            auc = torchmetrics.classification.MulticlassAUROC(CLASSES, thresholds=5)
            self.metrics = torchmetrics.MetricCollection({"mean": torchmetrics.MeanMetric(), "auc": auc})
            self.highest = torchmetrics.MaxMetric()

    def chain(self) -> list[str]:
        return [f"{part}.{i}" for part in ("backbone", "neck") for i in range(DEPTH // 2)]

    def forward(self, numbers: Tensor) -> Tensor:
        return self.head(self.neck(self.backbone(self.words(numbers))).mean(1))

    def evaluated(self, batch: Any, stage: str) -> Tensor:
        """The loss of one batch, or of the batches of several loaders, some of which may have ended."""
        batches = [one for one in (batch.values() if isinstance(batch, dict) else [batch]) if one is not None]
        numbers, wanted = (torch.cat(parts) for parts in zip(*batches, strict=True))
        out = self(numbers)
        loss = F.cross_entropy(out.float(), wanted)
        logs = str(self.hparams["logs"])
        self.log(f"{stage}_loss", loss, on_step="step" in logs or None, on_epoch="epoch" in logs or None)
        self.log_dict({f"{stage}_acc": (out.argmax(-1) == wanted).float().mean()}, batch_size=len(out), prog_bar=True)
        if "max" in logs:
            self.log(f"{stage}_most", out.detach().float().amax(), on_epoch=True, reduce_fx="max")
        if self.hparams["style"] == "kept":
            self.metrics["auc"].update(out.detach().float().softmax(-1), wanted)
            self.metrics["mean"].update(loss.detach())
            self.kept.append(out.detach())
        return loss

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if self.automatic_optimization:
            loss = self.evaluated(batch, "train")
            return {"loss": loss, "index": batch_idx} if self.hparams["logs"] else loss
        for optimizer in self.optimizers():
            self.toggle_optimizer(optimizer)
            loss = self.evaluated(batch, f"train_{optimizer is self.optimizers()[1]}")
            optimizer.zero_grad()
            self.manual_backward(loss)
            self.clip_gradients(optimizer, 0.5, "norm")
            optimizer.step()
            self.untoggle_optimizer(optimizer)
        return None

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
        return self.evaluated(batch, "val")

    def test_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
        return {"loss": self.evaluated(batch, "test")}

    def predict_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
        batches = batch.values() if isinstance(batch, dict) else [batch]
        return [{"classes": self(one[0]).argmax(-1), "wanted": one[1].tolist()} for one in batches if one is not None]

    # -- hooks

    def setup(self, stage: str) -> None:
        self.counts["set up"] += 1

    def on_train_epoch_start(self) -> None:
        for block in (*self.backbone, *self.neck):
            block.state = torch.zeros(1, 1, WIDTH)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.counts["batches"] += 1

    def on_train_epoch_end(self) -> None:
        self.sum_up("train")
        for scheduler in [] if self.automatic_optimization else self.lr_schedulers() or []:
            is_plateau = isinstance(scheduler, schedulers.ReduceLROnPlateau)
            scheduler.step(*[self.head.weight.norm()] * is_plateau)

    def on_validation_epoch_end(self) -> None:
        self.log("val_weight", self.head.weight.detach().float().norm())
        self.sum_up("val")

    def on_test_epoch_end(self) -> None:
        self.sum_up("test")

    def sum_up(self, stage: str) -> None:
        if self.kept:
            self.best = max(self.best, torch.cat(self.kept).float().std().item())
            values = self.metrics.compute()
            self.highest.update(values["mean"])
            self.log_dict({f"{stage}_{name}": value for name, value in values.items()})
            self.log(f"{stage}_highest", self.highest.compute())
            self.metrics.reset()
            self.kept.clear()

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["best"] = self.best

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.best = checkpoint["best"]

    # -- optimizers

    def configure_optimizers(self) -> Any:
        named = [(name, p) for name, p in self.named_parameters() if p.requires_grad]
        neck = [p for name, p in named if name.startswith("neck")]
        others = [p for name, p in named if not name.startswith("neck")]
        optimizers = [
            self.optimizer(part) for part in ([others + neck] if self.automatic_optimization else [others, neck])
        ]
        return optimizers, [self.scheduler(one) for one in optimizers if self.hparams["scheduler"]]

    def optimizer(self, parameters: list[Any]) -> torch.optim.Optimizer:
        name = str(self.hparams["optimizer"])
        options = {"SGD": {"momentum": 0.9}, "LBFGS": {"max_iter": 3}, "Adamax": {"foreach": True}}.get(name, {})
        if name == "AdamW":
            small = {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0, "lr": self.lr / 5}
            parameters = [{"params": [p for p in parameters if p.ndim > 1]}, small]
        lr = self.lr if name in ("SGD", "LBFGS") else self.lr / 5
        return getattr(torch.optim, name)(parameters, lr=lr, **options)

    def scheduler(self, optimizer: torch.optim.Optimizer) -> Any:
        kind, interval, frequency, name = f"{self.hparams['scheduler']},,,".split(",")[:4]
        steps = min(self.trainer.estimated_stepping_batches, 1000)
        made: Any = {
            "decay": lambda: schedulers.ExponentialLR(optimizer, 0.8),
            "plateau": lambda: schedulers.ReduceLROnPlateau(optimizer, factor=0.5, patience=0),
            "cycle": lambda: schedulers.OneCycleLR(optimizer, 0.1, total_steps=int(steps) + 50),
            "sequence": lambda: schedulers.SequentialLR(
                optimizer, [schedulers.LinearLR(optimizer, 0.1), schedulers.CosineAnnealingLR(optimizer, 5)], [2]
            ),
        }[kind]()
        config = {"scheduler": made, "interval": interval or "epoch", "frequency": int(frequency or 1), "strict": False}
        return {**config, "name": name or None, "monitor": "train_acc" if interval else "val_weight"}


# -- data


class Numbers(Dataset):
    """Numbers and what follows from them, with noise of two random states if it is noisy."""

    def __init__(self, count: int, seed: int, is_noisy: bool = False) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.numbers = torch.randint(0, CLASSES, (count, LENGTH), generator=generator)
        self.is_noisy, self.reads = is_noisy, 0

    def __len__(self) -> int:
        return len(self.numbers)

    def __getitem__(self, index: int) -> Any:
        self.reads += 1
        numbers = self.numbers[index]
        noise = random.randrange(CLASSES) * (torch.rand(LENGTH) < 0.2) if self.is_noisy else 0
        return (numbers + noise) % CLASSES, numbers.sum() % CLASSES


class Stream(IterableDataset):
    def __init__(self, numbers: Numbers) -> None:
        self.numbers = numbers

    def __iter__(self) -> Iterator[Any]:
        return (self.numbers[i] for i in range(len(self.numbers)))


class SizedStream(Stream):
    def __len__(self) -> int:
        return len(self.numbers)


def loader(kind: str, count: int, seed: int, batch_size: int) -> Any:
    numbers = Numbers(count, seed, kind == "noisy")
    options: dict[str, Any] = {
        "shuffled": {"shuffle": True, "drop_last": True},
        "noisy": {"shuffle": True},
        "weighted": {"sampler": WeightedRandomSampler([1.0 + i % 3 for i in range(count)], count)},
        "workers": {"num_workers": 1, "persistent_workers": True, "shuffle": True},
    }.get(kind, {})
    if kind == "batches":
        return DataLoader(numbers, batch_sampler=BatchSampler(RandomSampler(numbers), batch_size, drop_last=False))
    dataset = {"stream": Stream, "sized": SizedStream}.get(kind, lambda same: same)(numbers)
    return DataLoader(dataset, batch_size=batch_size, **options)


def loaders(how: str, count: int, seed: int, batch_size: int) -> Any:
    """A loader of a kind, or several: "max_size stream plain" are combined, "several plain stream" are in a list."""
    mode, *kinds = how.split()
    is_combined = mode not in ("one", "several", "dict")
    counts = [n - n % batch_size if is_combined else n for n in (count, count - 9)]  # together, batches are of one size
    made = {kind: loader(kind, n, seed + n, batch_size) for kind, n in zip(kinds, counts, strict=False)}
    if mode == "one":
        return next(iter(made.values()))
    return list(made.values()) if mode == "several" else made if mode == "dict" else CombinedLoader(made, mode)


class Data(L.LightningDataModule):
    def __init__(self, samples: int, batch_size: int, train: str, evaluated: str) -> None:
        super().__init__()
        self.samples, self.batch_size, self.train, self.evaluated = samples, batch_size, train, evaluated
        self.made = 0

    def train_dataloader(self) -> Any:
        self.made += 1
        return loaders(self.train, self.samples, 1, self.batch_size)

    def val_dataloader(self) -> Any:
        return loaders(self.evaluated, 29, 10, self.batch_size)

    test_dataloader = val_dataloader

    def predict_dataloader(self) -> Any:
        made = self.val_dataloader()
        return CombinedLoader(made.iterables, "sequential") if isinstance(made, CombinedLoader) else made

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        self.trainer.lightning_module.counts["moved"] += 1
        return batch

    def state_dict(self) -> dict[str, Any]:
        return {"made": self.made}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.made = state_dict["made"]


# -- callbacks


class Unfreezing(BaseFinetuning):
    def __init__(self, epoch: int) -> None:
        super().__init__()
        self.epoch = epoch

    def freeze_before_training(self, pl_module: Any) -> None:
        self.freeze(pl_module.backbone, train_bn=False)

    def finetune_function(self, pl_module: Any, epoch: int, optimizer: torch.optim.Optimizer) -> None:
        if epoch == self.epoch:
            self.unfreeze_and_add_param_group(pl_module.backbone[1:], optimizer, lr=0.01)


class Saving(L.Callback):
    """Saves by itself, and keeps losses as its state."""

    def __init__(self) -> None:
        self.losses: list[float] = []

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.losses += [outputs["loss"].item()] if outputs else []

    def on_train_epoch_end(self, trainer: L.Trainer, pl_module: Any) -> None:
        path = Path(trainer.default_root_dir) / f"own-{trainer.current_epoch}.ckpt"
        trainer.save_checkpoint(path, weights_only=trainer.current_epoch == 1)

    def state_dict(self) -> dict[str, Any]:
        return {"losses": self.losses}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.losses = list(state_dict["losses"])


class Ending(L.Callback):
    """Ends the run, or an epoch, or fails, at a step."""

    def __init__(self, how: str, step: int) -> None:
        self.how, self.step = how, step

    def on_train_batch_start(self, trainer: L.Trainer, pl_module: Any, batch: Any, batch_idx: int) -> int | None:
        is_time = trainer.global_step >= self.step
        if is_time and self.how == "error":
            raise ArithmeticError(f"step {trainer.global_step}")
        trainer.should_stop |= is_time and self.how == "stop"
        return -1 if is_time and self.how == "skip" else None


def functions() -> L.Callback:
    return LambdaCallback(
        on_train_batch_end=lambda trainer, module, outputs, batch, index: module.log("by_lambda", float(index)),
        on_before_optimizer_step=lambda trainer, module, optimizer: module.log("w", module.head.weight.float().norm()),
        on_validation_end=lambda trainer, module: module.counts.update(validated=trainer.global_step),
    )


class Writing(BasePredictionWriter):
    def write_on_batch_end(self, trainer: L.Trainer, pl_module: Any, prediction: Any, *place: Any) -> None:
        self.write(trainer, f"batch {place[-2:]}", prediction)

    def write_on_epoch_end(self, trainer: L.Trainer, pl_module: Any, predictions: Any, batch_indices: Any) -> None:
        self.write(trainer, f"epoch {batch_indices}", predictions)

    def write(self, trainer: L.Trainer, title: str, content: Any) -> None:
        if trainer.is_global_zero:
            with (Path(trainer.default_root_dir) / "predictions.csv").open("a") as file:
                file.write(f"{title}: {content}\n")
