"""Files: checkpoints with a module's own entries, hyper-parameters, resuming, and what scripts write themselves."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import lightning as L
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import EMAWeightAveraging, ModelCheckpoint, StochasticWeightAveraging
from lightning.pytorch.core.hooks import CheckpointHooks, DataHooks, ModelHooks
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor, nn

from tests.habits.modules import SAMPLES, WIDTH, Evaluated, Layers, Normed
from tests.habits.table import habit


def folder_of(module: L.LightningModule) -> Path:
    folder = Path(module.trainer.default_root_dir)
    folder.mkdir(parents=True, exist_ok=True)
    return folder


@habit(observed=["restored"], plain=False)
class OwnEntriesInCheckpoint(Layers):
    """on_save_checkpoint adds counters, losses and tensors, which the last step's file is read for."""

    def __init__(self) -> None:
        super().__init__()
        self.losses: list[float] = []
        self.centers: list[Tensor] = []
        self.restored: Any = None

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        features = self.features(x)
        self.centers.append(features.detach().mean(0))
        loss = F.cross_entropy(self.head(features), y)
        self.losses.append(loss.item())
        return loss

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["own"] = {"losses": list(self.losses), "center": torch.stack(self.centers).mean(0)}

    def on_train_end(self) -> None:
        path = folder_of(self) / "own.ckpt"
        self.trainer.save_checkpoint(path)
        self.restored = torch.load(path, weights_only=False)["own"]


@habit(observed=["best"], plain=False)
class SavesBestByHand(Evaluated):
    """A checkpoint is saved by hand whenever the validation loss falls, and a file of figures beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.best = float("inf")

    def on_validation_epoch_end(self) -> None:
        value = self.trainer.callback_metrics["val_loss"].item()
        if not self.trainer.sanity_checking and value < self.best:
            self.best = value
            self.trainer.save_checkpoint(folder_of(self) / "best.ckpt")
            if self.trainer.is_global_zero:
                (folder_of(self) / "best.json").write_text(json.dumps({"epoch": self.current_epoch, "loss": value}))


@habit(plain=False, shows=False)  # the file is compared
class SavesStateDictByHand(Layers):
    """`torch.save(self.state_dict())` on rank 0 when training ends, as scripts do."""

    def on_train_end(self) -> None:
        if self.trainer.is_global_zero:
            torch.save(self.state_dict(), folder_of(self) / "weights.pt")


@habit(plain=False, shows=False)  # the file is compared
class SavesStateDictOnAllRanks(Layers):
    """The same, where every rank asks for the state dictionary and rank 0 writes."""

    def on_train_end(self) -> None:
        state = {name: value.cpu() for name, value in self.state_dict().items() if "layers" in name}
        if self.global_rank == 0:
            torch.save(state, folder_of(self) / "weights.pt")


@habit(
    plain=False,
    observed=["best_loaded"],
    callbacks=lambda: [ModelCheckpoint(filename="{epoch}", save_top_k=-1)],
    trainer={"enable_checkpointing": True},
)
class LoadsEarlierCheckpoint(Evaluated):
    """When training ends, the first epoch's weights are read from its file and loaded into the module."""

    best_loaded = 0.0

    def on_train_end(self) -> None:
        callback = self.trainer.checkpoint_callback
        path = Path(callback.dirpath) / "epoch=0.ckpt"
        state = torch.load(path, weights_only=False)["state_dict"]
        self.load_state_dict(state)
        self.best_loaded = float(sum(value.double().sum() for value in state.values()))


@habit(shows=False)  # hyper-parameters are in the checkpoint
class HyperParameters(Layers):
    """save_hyperparameters, and self.hparams read and changed."""

    def __init__(self, lr: float = 0.05, name: str = "small", sizes: tuple[int, ...] = (1, 2)) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.hparams.extra = [lr, name]

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=self.hparams.lr)


@habit(plain=False, shows=False, trainer=lambda folder: {"logger": CSVLogger(folder, name="logs", version="0")})
class LogsToCSV(Layers):
    """A CSVLogger's file."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.log("double", 2 * loss)
        return loss


@habit(
    callbacks=lambda: [StochasticWeightAveraging(swa_lrs=0.05, swa_epoch_start=1, annealing_epochs=1)],
    epochs=3,
    plain=False,
    shows=False,  # the callback is the habit
)
class AveragesWeights(Layers):
    """StochasticWeightAveraging beside a counter on self."""


@habit(callbacks=lambda: [StochasticWeightAveraging(swa_lrs=0.05, swa_epoch_start=1, annealing_epochs=1)], shows=False)
class AveragesWeightsAndNorms(Evaluated):
    """With batch norms there is an epoch more for their statistics, whose steps have no backward."""

    layer = Normed


@habit(plain=False, without={"keeps": False})
class CopiesFirstWeights(Layers):
    """Weights are written to a file in on_train_start, and read again into the middle layers in the second epoch."""

    keeps = True

    def on_train_start(self) -> None:
        self.kept = {name: value.clone() for name, value in self.layers.state_dict().items()}

    def on_train_epoch_start(self) -> None:
        if self.current_epoch == 1 and self.keeps:
            missing = self.layers.load_state_dict({n: v for n, v in self.kept.items() if n[0] in "12"}, strict=False)
            assert len(missing.missing_keys) == 4


@habit(shows=False)  # nothing but the optimizer's state
class AdamWithAmsgrad(Layers):
    """An optimizer with more state, by parameter groups of the layers' own methods."""

    def configure_optimizers(self) -> Any:
        groups = [{"params": self.layers.parameters(), "lr": 1e-2}, {"params": [*self.head.parameters()], "lr": 1e-3}]
        optimizer = torch.optim.AdamW(groups, amsgrad=True, foreach=True)
        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, [1e-2, 1e-3], total_steps=6)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


HOOKS = [
    name
    for hooks in (ModelHooks, DataHooks, CheckpointHooks)
    for name, value in vars(hooks).items()
    if name.startswith("on_") and callable(value)
]


def noting(name: str) -> Any:
    def hook(self: Any, *args: Any, **kwargs: Any) -> Any:
        self.order.append(name)
        return getattr(super(EveryHookCalled, self), name)(*args, **kwargs)

    return hook


@habit(observed=["order"], plain=False)
class EveryHookCalled(Evaluated):
    """Every hook that a LightningModule has notes its name."""

    def __init__(self) -> None:
        super().__init__()
        self.order: list[str] = []

    for name in HOOKS:
        locals()[name] = noting(name)


@habit(observed=["from_extra"], plain=False)
class ExtraState(Layers):
    """A submodule with get_extra_state, whose count is in the state dictionary."""

    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(WIDTH, WIDTH)
            self.count = 0

        def forward(self, x: Tensor) -> Tensor:
            self.count += len(x)
            return torch.tanh(self.linear(x)) * (1 + 0.001 * self.count)

        def get_extra_state(self) -> Any:
            return {"count": self.count}

        def set_extra_state(self, state: Any) -> None:
            self.count = state["count"]

    layer = Counting
    from_extra: Any = None

    def on_train_end(self) -> None:
        self.from_extra = [layer.count / SAMPLES for layer in self.layers]


@habit(
    plain=False,
    observed=["seen"],
    callbacks=lambda: [ModelCheckpoint(filename="{epoch}", save_top_k=-1)],
    trainer={"enable_checkpointing": True},
)
class FiltersCheckpoint(Layers):
    """on_save_checkpoint keeps what trains and halves a weight, and notes norms of weights and an optimizer's state."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Any] = []
        self.layers[0].requires_grad_(False)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        if self.trainer.state.finished:
            return  # the harness's own
        state = checkpoint["state_dict"]
        state.pop("layers.0.linear.bias")
        trained = {name: state[name] for name, parameter in self.named_parameters() if parameter.requires_grad}
        trained["head.weight"] = trained["head.weight"] / 2
        checkpoint["state_dict"] = trained
        [optimizer] = checkpoint["optimizer_states"]
        buffers = [one["momentum_buffer"] for one in optimizer["state"].values()]
        self.seen.append([value.norm().item() for value in (*trained.values(), *buffers)])


@habit(plain=False, observed=["seen"])
class IteratesOverCheckpoint(Layers):
    """on_save_checkpoint goes over all entries, drops what is frozen, and notes the rest, also after the run."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Any] = []
        self.layers[0].requires_grad_(False)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        state = checkpoint["state_dict"]
        for name in list(state):
            if name.startswith("layers.0."):
                del state[name]
        self.seen.append({name: value.sum().item() for name, value in state.items()})
        [optimizer] = checkpoint["optimizer_states"]
        self.seen.append([entries["momentum_buffer"].sum().item() for entries in optimizer["state"].values()])

    def on_train_end(self) -> None:
        self.trainer.save_checkpoint(folder_of(self) / "own.ckpt")


@habit(
    callbacks=lambda: [EMAWeightAveraging(decay=0.5), ModelCheckpoint(monitor="val_loss")],
    trainer={"enable_checkpointing": True},
    calls=("fit", "test:best", "validate:best"),
    plain=False,
    shows=False,  # the callback is the habit
)
class TestsBestAverage(Evaluated):
    """The best checkpoint is tested, whose weights Lightning's callback puts into its average, too."""


@habit(
    callbacks=lambda: [ModelCheckpoint(filename="{epoch}", save_top_k=-1)],
    trainer={"enable_checkpointing": True},
    plain=False,
    shows=False,  # the files are compared
)
class WeightsChangedWhenSaved(Layers):
    """As by an optimizer that puts its averages into the weights before they are saved."""

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.mul_(0.9)


@habit(plain=False, shows=False)  # the files are compared
class StateSavedByFirstRankThenCheckpoint(Layers):
    """All ranks take the state, rank 0 alone saves it, and all of them save a checkpoint in the same hook."""

    def on_train_epoch_end(self) -> None:
        state = self.state_dict()
        if self.trainer.is_global_zero:
            torch.save(state, folder_of(self) / f"{self.current_epoch}.pt")
        self.trainer.save_checkpoint(folder_of(self) / f"{self.current_epoch}.ckpt")
