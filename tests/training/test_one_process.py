"""With one stage, what plain Lightning does: with modules, callbacks and options that several stages refuse, too."""

from __future__ import annotations

import copy
import io
import pickle
import warnings
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import BatchSizeFinder, ModelCheckpoint, ModelPruning, OnExceptionCheckpoint, Timer
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_pipeline import PipelineStrategy
from tests.launching import launch
from tests.training.runs import QUIET

pytestmark = pytest.mark.multiprocess

DATA = TensorDataset(torch.randn(16, 8, generator=torch.Generator().manual_seed(0)))


class Net(L.LightningModule):
    options: dict[str, Any] = {}

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
        self.batch_size = 4

    def loss(self, batch: Any) -> Tensor:
        return self.layers(batch[0]).pow(2).mean()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val", self.loss(batch))

    def train_dataloader(self) -> Any:
        return DataLoader(DATA, batch_size=self.batch_size)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.1)


class SkipsAll(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return None


class ReturnsNumber(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return 0.5


class ReturnsNoLoss(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return {"x": self.loss(batch)}


class TakesIterator(Net):
    def training_step(self, dataloader_iter: Any) -> Any:  # type: ignore[override]
        batch, _, _ = next(dataloader_iter)
        return self.loss(batch)


class ValidatesByIterator(Net):
    def validation_step(self, dataloader_iter: Any) -> None:  # type: ignore[override]
        batch, _, _ = next(dataloader_iter)
        self.log("val", self.loss(batch), batch_size=4)


class NoOptimizer(Net):
    def configure_optimizers(self) -> Any:
        return None


class Pickles(Net):
    """The Trainer, its callbacks and its metrics, while it runs and afterwards."""

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        for each in (self.trainer, self.trainer.callbacks, self.trainer.strategy, self):
            pickle.dumps(each)
        torch.save(self.trainer.callback_metrics, io.BytesIO())
        copy.deepcopy(self.trainer.strategy)

    def on_fit_end(self) -> None:
        again = pickle.loads(pickle.dumps(self.trainer))
        assert "clip_grad_by_norm" not in vars(again.strategy.precision_plugin)


class Prunes(Net):
    def configure_callbacks(self) -> Any:
        return [ModelPruning("l1_unstructured", amount=0.5)]


class FindsBatchSize(Net):
    def configure_callbacks(self) -> Any:
        return [BatchSizeFinder(init_val=2, max_trials=2)]


class Fails(Net):
    folder: Path

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if self.global_step == 3:
            raise ArithmeticError("at step 3")
        return super().training_step(batch, batch_idx)

    def configure_callbacks(self) -> Any:
        return [OnExceptionCheckpoint(self.folder), ModelCheckpoint(self.folder, save_on_exception=True)]


class IsTimed(Net):
    def configure_callbacks(self) -> Any:
        return [Timer("00:00:01:00")]


class ValidatesByTheClock(Net):
    options = {"val_check_interval": "00:00:01:00"}


class ClipsByPlugin(Net):
    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.trainer.precision_plugin.clip_grad_by_norm(optimizer, 0.01)


class LoadsAgain(Net):
    def on_train_start(self) -> None:
        self.load_state_dict(self.state_dict(), strict=True)
        self.load_state_dict(self.state_dict(), strict=True)


KINDS = [
    *(SkipsAll, ReturnsNumber, ReturnsNoLoss, TakesIterator, ValidatesByIterator, NoOptimizer, Pickles, Prunes),
    *(FindsBatchSize, Fails, IsTimed, ValidatesByTheClock, ClipsByPlugin, LoadsAgain),
]


def outcome(kind: type[Net], strategy: Any, folder: Path) -> dict[str, Any]:
    torch.manual_seed(0)
    net = kind()
    net.folder = folder
    options = {**QUIET, "enable_checkpointing": kind is Fails, **kind.options}
    trainer = L.Trainer(strategy=strategy, devices=1, max_epochs=2, default_root_dir=folder, **options)
    found: dict[str, Any] = {"error": ""}
    try:
        trainer.fit(net, val_dataloaders=DataLoader(DATA, batch_size=4))
    except Exception as error:
        # What Lightning says comes first in ours.
        found["error"] = [str(error).partition(" (")[0].partition(": ")[0], *map(str, type(error).__mro__[-3:])]
    found["weights"] = {name: value.tolist() for name, value in net.state_dict().items()}
    found["metrics"] = {name: float(value) for name, value in trainer.callback_metrics.items()}
    found["counts"] = [trainer.global_step, trainer.current_epoch, net.batch_size]
    found["files"] = sorted(file.name for file in folder.glob("*.ckpt"))
    return found


def outcomes(folder: Path) -> dict[str, list[dict[str, Any]]]:
    warnings.simplefilter("ignore")
    found = {}
    for kind in KINDS:
        pair = []
        for number, strategy in enumerate(("auto", PipelineStrategy(num_stages=1, num_microbatches=1))):
            own = folder / f"{kind.__name__}{number}"
            own.mkdir()
            pair.append(outcome(kind, strategy, own))
        found[kind.__name__] = pair
    return found


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    [of_rank] = launch(outcomes, tmp_path_factory.mktemp("one"), world=1)
    return of_rank


@pytest.mark.parametrize("kind", [kind.__name__ for kind in KINDS])
def test_one_stage_does_what_lightning_does(kind: str, found: dict[str, Any]) -> None:
    plain, ours = found[kind]
    assert ours == plain
    assert bool(plain["error"]) is (kind in ("ReturnsNumber", "ReturnsNoLoss", "Fails"))


class HoldsAnObject(Net):
    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["object"] = SkipsAll


def loads_objects(folder: str) -> list[str]:
    """What loads came to, in plain Lightning and with one stage."""
    found = []
    for strategy in ("auto", PipelineStrategy(num_stages=1, num_microbatches=1)):
        trainer = L.Trainer(strategy=strategy, devices=1, max_epochs=1, default_root_dir=folder, **QUIET)
        trainer.fit(HoldsAnObject())
        path = Path(folder) / "x.ckpt"
        trainer.save_checkpoint(path)
        for given in ({"weights_only": False}, {}):
            try:
                trainer.validate(HoldsAnObject(), DataLoader(DATA, 4), ckpt_path=path, verbose=False, **given)
                found.append("loaded")
            except Exception as error:
                found.append("refused" if "weights" in str(error) else str(error))
    return found


def test_objects_are_loaded_where_the_trainer_is_told_so(tmp_path: Path) -> None:
    assert launch(loads_objects, str(tmp_path), world=1)[0] == ["loaded", "refused"] * 2
