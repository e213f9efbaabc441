"""With one stage, what plain Lightning does: with modules, callbacks and options that several stages refuse, too."""

from __future__ import annotations

import copy
import functools
import io
import pickle
import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import BatchSizeFinder, ModelCheckpoint, ModelPruning, OnExceptionCheckpoint, Timer
from lightning.pytorch.core.hooks import CheckpointHooks, DataHooks, ModelHooks
from lightning.pytorch.plugins.environments import SLURMEnvironment
from packaging.version import Version
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_pipeline import PipelineStrategy
from tests.launching import launch
from tests.training.runs import QUIET

pytestmark = pytest.mark.multiprocess

DATA = TensorDataset(torch.randn(16, 8, generator=torch.Generator().manual_seed(0)))


class Net(L.LightningModule):
    options: dict[str, Any] = {}
    of_strategy: dict[str, Any] = {"num_microbatches": 1}
    folder: Path

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
        self.batch_size = 4
        self.seen: list[Any] = []

    def run(self, trainer_of: Callable[[], L.Trainer]) -> L.Trainer:
        trainer = trainer_of()
        trainer.fit(self, val_dataloaders=DataLoader(DATA, batch_size=4))
        return trainer

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


class PadsSequences(Net):
    """Validated on a path of torch's own, which leaves padding out."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 2)  # type: ignore[assignment]

    def loss(self, batch: Any) -> Tensor:
        is_padding = torch.arange(4) > torch.arange(4)[:, None]
        return self.layers(batch[0][:, None].repeat(1, 4, 1), src_key_padding_mask=is_padding).pow(2).mean()


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


class NotesHooks(Net):
    """In a run and in the one that goes on from its checkpoint."""

    options = {"max_epochs": 1}
    NAMES = [
        name
        for name in (*vars(ModelHooks), *vars(CheckpointHooks), *vars(DataHooks), "configure_optimizers", "backward")
        if name.startswith(("on_", "configure_model", "configure_optimizers", "setup", "teardown", "backward"))
    ]

    def __init__(self) -> None:
        super().__init__()
        for name in self.NAMES:
            setattr(self, name, self.noted(name, getattr(self, name)))

    def noted(self, name: str, hook: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            given = [one.requires_grad for one in args if isinstance(one, Tensor)]
            grads = [parameter.grad is not None for parameter in self.parameters()]
            self.seen.append([name, given, grads, torch.is_inference_mode_enabled()])
            return hook(*args, **kwargs)

        return call

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.seen.append("training_step")
        return super().training_step(batch, batch_idx)

    def run(self, trainer_of: Callable[[], L.Trainer]) -> L.Trainer:
        super().run(trainer_of).save_checkpoint(self.folder / "first.ckpt")
        trainer = trainer_of()
        trainer.fit_loop.max_epochs = 2
        trainer.fit(self, ckpt_path=self.folder / "first.ckpt")
        return trainer


class KeepsObjects(Net):
    """In its checkpoint, which is trusted."""

    def run(self, trainer_of: Callable[[], L.Trainer]) -> L.Trainer:
        self.save_hyperparameters({"where": Version("1.2")})
        self._log_hyperparams = False
        super().run(trainer_of).save_checkpoint(self.folder / "first.ckpt")
        trainer = trainer_of()
        trainer.fit_loop.max_epochs = 3
        trainer.fit(self, ckpt_path=self.folder / "first.ckpt", weights_only=False)
        return trainer


class LoadsStrictlyOnce(Net):
    def run(self, trainer_of: Callable[[], L.Trainer]) -> L.Trainer:
        super().run(trainer_of).save_checkpoint(self.folder / "first.ckpt")
        trainer = trainer_of()
        trainer.fit_loop.max_epochs = 3
        trainer.fit(self, ckpt_path=self.folder / "first.ckpt")
        return trainer

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        self.seen.append(kwargs)
        return super().load_state_dict(*args, **kwargs)


class ByHand(Net):
    """Looks at gradients between backwards and updates, and gives these closures."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        optimizer: Any = self.optimizers()
        weight = self.layers[0].weight
        assert weight.grad is None
        loss = self.loss(batch)
        self.manual_backward(loss, retain_graph=True)
        self.manual_backward(loss)
        self.seen.append(float(weight.grad.sum()))  # type: ignore[union-attr]
        optimizer.step()
        optimizer.zero_grad()
        assert weight.grad is None

        def closure() -> Tensor:
            optimizer.zero_grad()
            again = self.loss(batch)
            self.manual_backward(again)
            return again

        optimizer.step(closure=closure)
        optimizer.zero_grad()
        return loss


class IsCompiled(Net):
    def run(self, trainer_of: Callable[[], L.Trainer]) -> L.Trainer:
        trainer = trainer_of()
        trainer.fit(torch.compile(self, backend="eager"))  # type: ignore[arg-type]
        return trainer

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.loss(batch)


class OutsideOfSrun(Net):
    options = {"plugins": [SLURMEnvironment(auto_requeue=False)]}


class HasNoSamples(Net):
    """In its batches, of which there is nothing to split."""

    of_strategy = {}

    def loss(self, batch: Any) -> Tensor:
        return self.layers(torch.full((1, 8), float(batch["text"][0]))).pow(2).mean()

    def train_dataloader(self) -> Any:
        return DataLoader([{"text": "3", "of": {1, 2}}] * 4, batch_size=None)  # type: ignore[arg-type]

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val", float(len(batch)), batch_size=1)


KINDS = [
    *(SkipsAll, ReturnsNumber, ReturnsNoLoss, TakesIterator, ValidatesByIterator, NoOptimizer, Pickles, Prunes),
    *(FindsBatchSize, Fails, IsTimed, ValidatesByTheClock, ClipsByPlugin, LoadsAgain, NotesHooks, KeepsObjects),
    *(LoadsStrictlyOnce, ByHand, IsCompiled, OutsideOfSrun, HasNoSamples, PadsSequences),
]


def outcome(kind: type[Net], strategy_of: Callable[[], Any], folder: Path) -> dict[str, Any]:
    torch.manual_seed(0)
    net = kind()
    net.folder = folder
    options = {**QUIET, "max_epochs": 2, "enable_checkpointing": kind is Fails, **kind.options}
    made = []

    def trainer_of() -> L.Trainer:
        made.append(L.Trainer(strategy=strategy_of(), devices=1, default_root_dir=folder, **options))
        return made[-1]

    found: dict[str, Any] = {"error": ""}
    try:
        net.run(trainer_of)
    except Exception as error:
        # What Lightning says comes first in ours.
        found["error"] = [str(error).partition(" (")[0].partition(": ")[0], *map(str, type(error).__mro__[-3:])]
    trainer = made[-1]
    found["seen"] = net.seen
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
        ours = functools.partial(PipelineStrategy, num_stages=1, **kind.of_strategy)
        for number, strategy_of in enumerate((lambda: "auto", ours)):
            own = folder / f"{kind.__name__}{number}"
            own.mkdir()
            pair.append(outcome(kind, strategy_of, own))
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


def of_one_stage() -> PipelineStrategy:
    return PipelineStrategy(num_stages=1, num_microbatches=1)


def loads_objects(folder: str) -> list[str]:
    """What loads came to, in plain Lightning and with one stage, and there with a module without memory yet."""
    found = []
    for strategy, device in (("auto", "cpu"), (of_one_stage(), "cpu"), (of_one_stage(), "meta")):
        trainer = L.Trainer(strategy=strategy, devices=1, max_epochs=1, default_root_dir=folder, **QUIET)
        trainer.fit(HoldsAnObject())
        path = Path(folder) / "x.ckpt"
        trainer.save_checkpoint(path)
        for given in ({"weights_only": False}, {}):
            with torch.device(device):
                module = HoldsAnObject()
            try:
                trainer.validate(module, DataLoader(DATA, 4), ckpt_path=path, verbose=False, **given)
                found.append("loaded")
            except Exception as error:
                found.append("refused" if "weights" in str(error) else str(error))
    return found


def test_objects_are_loaded_where_the_trainer_is_told_so(tmp_path: Path) -> None:
    assert launch(loads_objects, str(tmp_path), world=1)[0] == ["loaded", "refused"] * 3


class InParts(Net):
    """Its micro-batches meet at each backward, in threads of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(self.loss(batch))
        optimizer.step()
        self.seen += [thread.name for thread in threading.enumerate() if thread.name == "training_step"]


def threads_in_a_run() -> tuple[list[str], list[str]]:
    net = InParts()
    L.Trainer(strategy=PipelineStrategy(num_stages=1, num_microbatches=2), devices=1, max_epochs=1, **QUIET).fit(net)
    return net.seen, [thread.name for thread in threading.enumerate() if thread.name == "training_step"]


def test_threads_of_steps_end_with_the_run() -> None:
    [(during, after)] = launch(threads_in_a_run, world=1)
    assert during and not after


class HalvesGradients(InParts):
    def manual_backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        super().manual_backward(loss)
        for parameter in self.parameters():
            assert parameter.grad is not None
            parameter.grad.mul_(0.5)


class HalvesDataOfGradients(InParts):
    def manual_backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        super().manual_backward(loss)
        torch._foreach_mul_([parameter.grad.data for parameter in self.parameters() if parameter.grad is not None], 0.5)


class ReplacesGradients(InParts):
    def manual_backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        super().manual_backward(loss)
        for parameter in self.parameters():
            parameter.grad = torch.ones_like(parameter)


def changed_gradients(num_microbatches: int) -> list[str]:
    messages = []
    for module in (HalvesGradients, HalvesDataOfGradients, ReplacesGradients):
        strategy = PipelineStrategy(num_stages=1, num_microbatches=num_microbatches)
        try:
            L.Trainer(strategy=strategy, devices=1, max_epochs=1, **QUIET).fit(module())
            messages.append("")
        except NotImplementedError as error:
            messages.append(str(error))
    return messages


def test_gradients_that_each_micro_batch_would_change_again_are_refused() -> None:
    halved, by_data, replaced = launch(changed_gradients, 2, world=1)[0]
    assert "parameter.grad.mul_(0.5)" in halved and "on_after_backward" in halved
    assert "_foreach_mul_" in by_data
    assert "parameter.grad = " in replaced
    assert launch(changed_gradients, 1, world=1)[0] == ["", "", ""]
