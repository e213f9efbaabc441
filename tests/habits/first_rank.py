"""What hooks and steps do on the first rank alone, and with copies and plain tensors that they keep."""

from __future__ import annotations

import copy
import json
import random
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint, TQDMProgressBar
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.loggers.logger import Logger, rank_zero_experiment
from lightning.pytorch.utilities import grad_norm, rank_zero_only
from torch import Tensor
from torchmetrics import MeanMetric

from tests.habits.checkpointing import folder_of
from tests.habits.modules import CLASSES, WIDTH, Evaluated, Layers
from tests.habits.table import EQUAL, error, habit

PARTED = error(r"a hook has changed .* on one replica alone.*Let every rank run")
DRAWN = error(r"one replica alone has drawn random numbers in a hook.*(first_rank|modules)\.py:\d+")


@habit(plain=False, shows=False)  # the file is compared
class StatisticsOnFirstRank(Layers):
    """Statistics of weights and gradients, written by rank 0 in the middle of a hook that goes on to change weights."""

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        norms = [parameter.detach().norm() for parameter in self.parameters()]
        if self.trainer.is_global_zero:
            found = {name: p.grad.abs().max().item() for name, p in self.named_parameters() if p.grad is not None}
            found["norm"] = sum(norm.item() for norm in norms)
            (folder_of(self) / f"{self.global_step}.json").write_text(json.dumps(found))
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.mul_(0.99)


@habit(plain=False, shows=False, observed=["kept", "shown"])
class GoesOnTogether(Layers):
    """Once a hook has asked for the rank, all ranks freeze, copy and print parameters of every stage."""

    def on_train_epoch_start(self) -> None:
        self.is_shown = self.trainer.is_global_zero
        self.kept = [copy.deepcopy(layer.linear.bias).tolist() for layer in self.layers]
        self.shown = [repr(layer.linear.bias) for layer in self.layers]
        for layer in self.layers:
            layer.linear.weight.requires_grad = self.current_epoch > 0
            layer.linear.bias.requires_grad_(self.current_epoch == 0)


@habit(plain=False, shows=False, tolerance=1e-6)  # gradients add up in another order on four stages
class TeacherCopiedIntoList(Layers):
    """A teacher that is no submodule: copies of the layers in a list, used in steps and led on in a hook."""

    def on_train_start(self) -> None:
        self.teacher = [copy.deepcopy(layer).requires_grad_(False) for layer in self.layers]

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        hidden = target = batch[0]
        for layer in self.layers:
            hidden = layer(hidden)
        with torch.no_grad():
            for layer in self.teacher:
                target = layer(target)
        return super().training_step(batch, batch_idx) + F.mse_loss(hidden, target)

    @torch.no_grad()
    def on_train_batch_end(self, *_: Any) -> None:
        for layer, own in zip(self.teacher, self.layers, strict=True):
            for old, new in zip(layer.parameters(), own.parameters(), strict=True):
                old.lerp_(new, 0.1)


@habit(plain=False, shows=False, observed=["norms"])
class GradientOfBatchRead(Layers):
    """Saliency: the batch requires a gradient, which is read after the step."""

    def __init__(self) -> None:
        super().__init__()
        self.norms: list[Any] = []
        self.kept: list[Tensor] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.kept.append(batch[0].requires_grad_())
        return super().training_step(batch, batch_idx)

    def on_train_batch_end(self, *_: Any) -> None:
        self.norms += [None if x.grad is None else x.grad.norm().item() for x in self.kept]
        self.kept = []


@habit(plain=False, shows=False, expect=error("a hook is registered on the gradient of a tensor that every rank has"))
class HookOnBatch(Layers):
    """A hook on the batch's gradient."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        batch[0].requires_grad_().register_hook(lambda gradient: gradient * 2)
        return super().training_step(batch, batch_idx)


class Rows:
    """An experiment, as SummaryWriter is one."""

    def __init__(self) -> None:
        self.rows: list[str] = []

    def add_scalar(self, name: str, value: Any, step: int) -> None:
        self.rows.append(f"{name} {float(value):.6f} {step}")

    def add_histogram(self, name: str, values: Tensor, step: int) -> None:
        self.rows.append(f"{name} {values.detach().cpu().numpy().std():.6f} {step}")


class RowsLogger(Logger):
    """Writes its rows when the run ends."""

    name, version = "rows", 0  # type: ignore[assignment]

    def __init__(self, folder: Any) -> None:
        super().__init__()
        self._folder = folder
        self._rows: Rows | None = None

    @property
    @rank_zero_experiment
    def experiment(self) -> Rows:
        self._rows = self._rows or Rows()
        return self._rows

    @rank_zero_only
    def log_metrics(self, metrics: Any, step: int | None = None) -> None:
        for name, value in metrics.items():
            self.experiment.add_scalar(name, value, step or 0)

    def log_hyperparams(self, *_: Any, **__: Any) -> None:
        pass

    @rank_zero_only
    def finalize(self, status: str) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        (self._folder / "rows.txt").write_text("\n".join(self.experiment.rows))


@habit(plain=False, shows=False, trainer=lambda folder: {"logger": RowsLogger(folder)})  # the file is compared
class ExperimentInStep(Layers):
    """Losses, hidden values and weights are given to the logger's experiment, and printed, in the step."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        hidden = self.features(batch[0])
        loss = F.cross_entropy(self.head(hidden), batch[1])
        assert isinstance(self.logger, RowsLogger)
        self.logger.experiment.add_scalar("own", loss, self.global_step)
        self.logger.experiment.add_histogram("hidden", values=hidden, step=self.global_step)
        for name, parameter in self.named_parameters():
            self.logger.experiment.add_histogram(name, parameter, self.global_step)
        self.logger.log_metrics({"by_hand": loss}, step=self.global_step)
        self.print("loss", loss)
        return loss


@habit(plain=False, shows=False)  # the file is compared
class RankZeroOnlyInStep(Layers):
    """A method under rank_zero_only takes a tensor, reads it, and writes a file."""

    @rank_zero_only
    def write(self, loss: Tensor) -> None:
        with (folder_of(self) / "losses.txt").open("a") as file:
            file.write(f"{loss.mean().item():.6f}\n")

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.write(loss)
        return loss


class BufferedLogger(RowsLogger):
    """Keeps what it is given, and writes it in the end."""

    def __init__(self, folder: Any) -> None:
        super().__init__(folder)
        self._kept: list[Any] = []

    @rank_zero_only
    def log_metrics(self, metrics: Any, step: int | None = None) -> None:
        self._kept.append((step, dict(metrics)))

    @rank_zero_only
    def finalize(self, status: str) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        (self._folder / "rows.txt").write_text(f"{[(step, *sorted(row.items())) for step, row in self._kept]}")


@habit(plain=False, shows=False, trainer=lambda folder: {"logger": BufferedLogger(folder)})  # the file is compared
class BufferedLoggerInHooks(Evaluated):
    """Hooks give tensors of other stages to a logger that keeps them, in the hooks' own calls and on the first rank."""

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        norm = self.head.bias.detach().norm()
        self.largest = self.head.weight.detach().abs().max()
        assert self.logger is not None
        first = self.layers[0].linear.bias.detach().sum()
        self.logger.log_metrics({"norm": norm, "largest": self.largest, "first": first}, 1)
        self.logger.log_metrics({"norm": norm.add_(1)}, 2)
        smallest = self.head.weight.detach().min()
        if self.global_rank == 0:
            self.logger.log_metrics({"smallest": smallest, "largest": self.largest}, 3)

    def on_validation_epoch_end(self) -> None:
        assert self.logger is not None
        self.logger.log_metrics({"val": self.head.bias.sum()}, step=self.global_step)


@habit(plain=False, shows=False)  # the file is compared
class KeptOnFirstRank(Evaluated):
    """The first rank alone keeps what all have computed, and reads it in a later hook, and after the run."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: list[Tensor] = []

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.last = self.head.bias.detach().norm()
        smallest = self.layers[2].linear.weight.detach().min()
        if self.trainer.is_global_zero:
            self.kept += [self.last, smallest]

    def on_train_epoch_end(self) -> None:
        if self.kept:
            text = " ".join(f"{value:.6f}" for value in self.kept)
            (folder_of(self) / f"{self.current_epoch}.txt").write_text(text)

    def teardown(self, stage: str) -> None:
        if self.trainer.is_global_zero:
            (folder_of(self) / "all.txt").write_text(str(self.kept))


@habit(  # the file is compared
    plain=False,
    shows=False,
    reversed=error(r"runs __format__.*first_rank\.py:\d+.*which takes data of another"),
)
class KeptUnderRankZeroOnly(Evaluated):
    """What a function under `rank_zero_only` has kept is read in a later hook, and after the run."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: list[Tensor] = []

    @rank_zero_only
    def keep(self, values: list[Tensor]) -> None:
        self.kept.extend(values)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        large = torch.cat([self.head.weight.flatten()] * 1024)  # which no rank is given at the end of the hook
        self.keep([self.head.bias.norm(), large])

    def on_train_epoch_end(self) -> None:
        if self.kept:
            text = " ".join(f"{value.sum():.6f}" for value in self.kept)
            (folder_of(self) / f"{self.current_epoch}.txt").write_text(text)

    def on_fit_end(self) -> None:
        if self.kept:
            torch.save(torch.stack(self.kept[::2]), folder_of(self) / "kept.pt")


@habit(
    plain=False, shows=False, expect=error(r"one rank alone uses.*first_rank\.py:\d+.*asks for the rank.*every rank")
)
class ReadsOnFirstRank(Layers):
    """The step reads its loss on the first rank."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        if self.trainer.is_global_zero and batch_idx > 0:
            print(f"loss: {loss.item():.3f}")
        return loss


@habit(
    plain=False, shows=False, expect=error(r"one rank alone uses.*first_rank\.py:\d+.*asks for the rank.*every rank")
)
class OthersReturnEarly(Layers):
    """The other ranks have returned before."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        is_first = self.global_rank == 0
        if not is_first:
            return loss
        print(f"loss: {loss.item():.3f}")
        return loss


@habit()
class StopsOnFirstRank(Layers):
    """The first rank alone stops training, after three batches."""

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if self.trainer.is_global_zero and self.trainer.global_step == 3:
            self.trainer.should_stop = True


@habit()
class StopsUnderRankZeroOnly(Layers):
    """In a function under `rank_zero_only`."""

    @rank_zero_only
    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if self.trainer.global_step == 3:
            self.trainer.should_stop = True


@habit()
class StopsOnFirstRankAfterValidation(Evaluated):
    """At the end of a validation."""

    def on_validation_epoch_end(self) -> None:
        if self.global_rank == 0 and not self.trainer.sanity_checking:
            self.trainer.should_stop = True


@habit(plain=False)
class StopsInStepOnFirstRank(Layers):
    """In a step."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if self.trainer.is_global_zero and self.trainer.global_step == 3:
            self.trainer.should_stop = True
        return super().training_step(batch, batch_idx)


@habit(plain=False)
class StopsInValidationStepOnFirstRank(Evaluated):
    """In a step of a validation."""

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        if self.trainer.is_global_zero and self.trainer.global_step == 3:
            self.trainer.should_stop = True
        return super().validation_step(batch, batch_idx)


@habit(epochs=4)
class StopsOnFirstRankBeforeEpoch(Layers):
    """As an epoch begins."""

    def on_train_epoch_start(self) -> None:
        if self.trainer.is_global_zero and self.current_epoch == 2:
            self.trainer.should_stop = True


@habit(epochs=4)
class StopsOnFirstRankAfterEpoch(Layers):
    """As an epoch ends."""

    def on_train_epoch_end(self) -> None:
        if self.trainer.is_global_zero and self.current_epoch == 1:
            self.trainer.should_stop = True


@habit(plain=False)
class StopsByHandOnFirstRank(Layers):
    """In a hand-optimized step."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()
        loss = super().training_step(batch, batch_idx)
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()
        if self.trainer.is_global_zero and batch_idx == 1:
            self.trainer.should_stop = True


@habit(plain=False)
class SkipsRestOfEpochOnFirstRank(Layers):
    """A hook that leaves out the rest of an epoch says so on the first rank alone."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> Any:
        return -1 if self.trainer.is_global_zero and self.trainer.global_step == 2 else None


class Scaled(Evaluated):
    """Outputs are scaled by a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.tensor(1.0))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.scale


@habit(
    plain=False,
    shows=False,
    replicated=PARTED,
    reversed=error(r"mul_ changes what another stage holds, in code that the first rank alone .*first_rank\.py:\d+"),
)
class InitialisedOnFirstRank(Layers):
    """The first rank alone scales weights, and replaces some, before training; of `.data`, those of its own stage."""

    @rank_zero_only
    def on_fit_start(self) -> None:
        with torch.no_grad():
            self.head.weight.mul_(0.5)
        self.layers[0].linear.weight.data.mul_(0.7)
        self.head.bias.data = self.head.bias.data * 0.9


@habit(
    expect=error(r"mul_ changes what another stage holds, in code that the first rank alone .*first_rank\.py:\d+"),
    automatic=EQUAL,  # before the module is cut, every rank holds it all
    plain=False,
    shows=False,
)
class ScalesDataOnFirstRank(Layers):
    """The first rank alone scales weights of other stages through `.data`, which has a version of its own."""

    @rank_zero_only
    def on_fit_start(self) -> None:
        for layer in self.layers:
            layer.linear.weight.data.mul_(0.7)


@habit(plain=False, shows=False, replicated=PARTED)
class ScaleOfFirstBatchOnFirstRank(Scaled):
    """The first rank alone assigns a buffer by its first batch, as latent diffusion does."""

    @rank_zero_only
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if self.global_step == 0:
            del self.scale
            self.register_buffer("scale", 1 / batch[0].flatten().std())


@habit(plain=False, shows=False, replicated=PARTED)
class ScaleAssignedOnFirstRank(Scaled):
    """The first rank alone assigns a buffer that a later stage has, when it has stages."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if self.trainer.is_global_zero and self.global_step == 1:
            self.scale = 1 / batch[0].std()


@habit(plain=False, shows=False, calls=("fit", "validate"), replicated=PARTED)
class ScaleWrittenOnFirstRank(Scaled):
    """The first rank alone writes into a buffer before validations, and all of them after batches."""

    def on_validation_start(self) -> None:
        if self.trainer.is_global_zero:
            self.scale.add_(0.1)

    def on_train_batch_end(self, *_: Any) -> None:
        if self.trainer.is_global_zero:
            self.last = self.global_step
        self.scale.mul_(0.9)


class Writing(Evaluated):
    """The first rank writes lines with what several stages hold."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if self.is_first():
            norms = self.head.weight.norm().item(), self.layers[0].linear.weight.norm()
            self.lines.append(f"{outputs['loss']:.3f} {norms}")

    def is_first(self) -> bool:
        return True


@habit(plain=False, shows=False)
class KeepsThatItIsFirst(Writing):
    """A hook keeps which rank it runs on, and later ones go by it."""

    def on_fit_start(self) -> None:
        rank = self.trainer.global_rank
        self.is_main = rank == 0

    def is_first(self) -> bool:
        return self.is_main


@habit(plain=False, shows=False)
class OpensOnFirstRank(Writing):
    """A hook makes something on the first rank, and later ones see whether it is there."""

    file: Any = None

    def setup(self, stage: str) -> None:
        if torch.distributed.is_initialized() and torch.distributed.get_rank() != 0:
            return
        self.file = self.lines

    def is_first(self) -> bool:
        return self.file is not None


@habit(plain=False, shows=False)
class AsksAgainOnFirstRank(Writing):
    """What the first rank alone runs asks for the rank again, in `setup` and in a hook."""

    def setup(self, stage: str) -> None:
        if self.trainer.is_global_zero:
            self.lines.append(f"rank {self.trainer.global_rank}")

    def on_fit_start(self) -> None:
        if self.trainer.is_global_zero:
            self.lines.append(f"rank {self.trainer.global_rank} of {self.trainer.strategy.local_rank}")

    def is_first(self) -> bool:
        return False


@habit(plain=False, shows=False)
class RankIsNotZero(Writing):
    """The rank that `rank_zero_only` has is compared in other ways."""

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if rank_zero_only.rank != 0:
            return
        super().on_train_batch_end(outputs, batch, batch_idx)

    def on_train_epoch_end(self) -> None:
        if not rank_zero_only.rank:
            self.lines.append(f"{self.layers[0].linear.bias.sum()} {self.head.bias.sum()}")
        if rank_zero_only.rank > 0:
            return
        self.lines.append(f"{self.layers[0].linear.weight.sum()} {self.head.weight.sum()}")


class WritesWhereEnabled(L.Callback):
    """As progress bars, it is switched off on other ranks."""

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        self.is_enabled = trainer.is_global_zero

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if self.is_enabled:
            pl_module.lines.append(f"{outputs['loss']:.3f} {pl_module.head.weight.norm().item():.3f}")


@habit(plain=False, shows=False, callbacks=lambda: [WritesWhereEnabled()])
class CallbackOnFirstRank(Writing):
    """A callback that is enabled on the first rank alone looks at weights."""

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        pass


class BarWithNorm(TQDMProgressBar):
    """Shows a norm of weights."""

    def get_metrics(self, trainer: Any, pl_module: Any) -> Any:
        norm = pl_module.head.weight.norm().item() + pl_module.layers[0].linear.weight.norm().item()
        pl_module.lines.append(f"{norm:.3f}")
        return super().get_metrics(trainer, pl_module) | {"norm": norm}


@habit(plain=False, shows=False, callbacks=lambda: [BarWithNorm()], trainer={"enable_progress_bar": True})
class ShowsNormInBar(CallbackOnFirstRank):
    """A progress bar computes with weights, which only the first rank shows."""


@habit(plain=False, shows=False, trainer=lambda folder: {"logger": CSVLogger(folder)})  # the file is compared
class WaitsOnFirstRank(Evaluated):
    """The first rank alone comes to what waits for all ranks, as the folder of the logs that it is told."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if self.trainer.is_global_zero:
            (Path(self.trainer.log_dir or "") / f"{batch_idx}").mkdir(parents=True, exist_ok=True)
        return super().training_step(batch, batch_idx)

    def on_train_epoch_end(self) -> None:
        if self.trainer.is_global_zero:
            self.note("epoch")
        self.note_under_rank_zero_only()

    def on_validation_epoch_end(self) -> None:
        if self.trainer.is_global_zero:
            self.note(f"{self.trainer.callback_metrics['val_loss']:.3f}")
        self.trainer.strategy.barrier()
        self.log("files", float(self.trainer.strategy.broadcast(len(list(folder_of(self).iterdir())) > 0)))

    def note(self, text: str) -> None:
        path = Path(self.trainer.log_dir or "") / "notes.txt"
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a") as file:
            file.write(f"{text} {self.head.weight.norm():.3f} {self.layers[0].linear.weight.norm():.3f}\n")
        self.trainer.strategy.barrier("written")
        assert self.trainer.strategy.reduce_boolean_decision(True)

    @rank_zero_only
    def note_under_rank_zero_only(self) -> None:
        self.note("rank_zero_only")


@habit(plain=False, shows=False, expect=error(r"broadcast.*waits for all ranks.*first_rank\.py:\d+.*every rank"))
class TellsByRank(Layers):
    """Ranks come to a broadcast at lines of their own in a step."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if self.trainer.is_global_zero:
            scale = self.trainer.strategy.broadcast(2.0)
        else:
            scale = self.trainer.strategy.broadcast(None)
        return super().training_step(batch, batch_idx) * scale


@habit(
    plain=False,
    shows=False,
    epochs=4,
    callbacks=lambda: [
        ModelCheckpoint(monitor="own", save_on_train_epoch_end=True),
        EarlyStopping("own", patience=1, mode="max", check_on_train_epoch_end=True),
    ],
    trainer={"enable_checkpointing": True},
)
class LogsOnFirstRank(Layers):
    """Training stops, checkpoints are saved and the rate falls by what the first rank alone logs."""

    def on_train_epoch_end(self) -> None:
        if self.trainer.is_global_zero:
            self.log("own", -float(self.current_epoch), rank_zero_only=True)
            self.log_dict({"norm": self.layers[0].linear.weight.norm(), "loss": self.head.bias.norm()})

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), 0.1)
        rates = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, mode="max")
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": rates, "monitor": "norm"}}


@habit(plain=False, shows=False, observed=["told"])
class WaitsForFirstRank(Layers):
    """The first rank alone takes weights of all stages, or of its own, and then all ranks wait, or are told of it."""

    def __init__(self) -> None:
        super().__init__()
        self.told: list[Any] = []

    def on_train_epoch_start(self) -> None:
        path = folder_of(self) / "weights.pt"
        if self.trainer.is_global_zero:
            torch.save(self.state_dict(), path)
        self.trainer.strategy.barrier("saved")
        self.told.append(sum(float(tensor.sum()) for tensor in torch.load(path).values()))
        norm = None
        if self.trainer.is_global_zero:
            norm = sum(parameter.detach().norm().item() for parameter in self.parameters())
        self.told.append(self.trainer.strategy.broadcast(norm))
        with torch.no_grad():
            self.head.weight.mul_(1 + self.told[-1] / 1000)

    def on_train_epoch_end(self) -> None:
        is_large = False
        if self.trainer.is_global_zero:
            is_large = bool(self.layers[0].linear.weight.norm() > 0)
        self.told.append(self.trainer.strategy.reduce_boolean_decision(is_large, all=False))
        if self.trainer.is_global_zero:
            self.told.append(self.head.weight.norm().item())
        else:
            self.told.append(0.0)
        if torch.distributed.is_initialized():
            torch.distributed.barrier()
            objects = self.told[-1:]
            torch.distributed.broadcast_object_list(objects, src=0)
            self.told[-1:] = objects


@habit(plain=False, shows=False, callbacks=lambda: [ExportsOnFirstRank()])
class ExportsOnFirstRankAtTheEnd(Layers):
    """When training has ended, the first rank alone exports weights, for which the others wait."""


class ExportsOnFirstRank(L.Callback):
    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        if trainer.is_global_zero:
            weights = {name: tensor.cpu() for name, tensor in pl_module.state_dict().items()}
            torch.save(weights, folder_of(pl_module) / "exported.pt")
        trainer.strategy.barrier()


class Disturbed(Layers):
    """Weights of all stages are disturbed at random by all ranks, after the first rank alone has drawn."""

    def show(self) -> None:
        if self.trainer.is_global_zero:
            self.shown = torch.randint(5, (1,)).item(), random.randrange(5), np.random.randint(5)

    @torch.no_grad()
    def disturb(self) -> None:
        for parameter in self.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.05)
        self.head.weight.add_(torch.randn(CLASSES, WIDTH), alpha=0.05)
        self.layers[0].linear.weight.mul_(1 + 0.1 * random.random() + 0.1 * float(np.random.rand()))


@habit(plain=False, shows=False)
class DrawsOnFirstRankBetweenSteps(Disturbed):
    """Then a step, and then a hook by which all replicas draw."""

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 0:
            self.show()

    def on_train_epoch_end(self) -> None:
        self.disturb()


@habit(plain=False, shows=False, replicated=DRAWN)
class DrawsOnFirstRankInEarlierHook(Disturbed):
    """In a hook before."""

    def on_train_batch_end(self, *_: Any) -> None:
        self.show()

    def on_train_epoch_end(self) -> None:
        self.disturb()


@habit(plain=False, shows=False, replicated=DRAWN)
class DrawsOnFirstRankThenAllInAskedHook(Disturbed):
    """Then all ranks draw in a hook that asks for the rank as well."""

    def on_train_batch_end(self, *_: Any) -> None:
        self.show()

    def on_train_epoch_end(self) -> None:
        self.is_shown = self.trainer.is_global_zero
        self.layers[0].linear.weight.data.mul_(1 + 0.1 * random.random())


@habit(plain=False, shows=False, replicated=DRAWN)
class DrawsOnFirstRankInSameHook(Disturbed):
    """In the same hook; torch's numbers alone, as all ranks then draw these."""

    def on_train_batch_end(self, *_: Any) -> None:
        self.show()
        with torch.no_grad():
            self.head.weight.add_(torch.randn(CLASSES, WIDTH), alpha=0.1)
            self.layers[0].linear.weight.add_(torch.randn(WIDTH, WIDTH), alpha=0.1)


@habit(plain=False, shows=False, replicated=DRAWN)
class SamplesOnFirstRank(Disturbed):
    """The first rank alone shows what the model makes of noise."""

    def on_train_batch_end(self, *_: Any) -> None:
        if self.trainer.is_global_zero:
            with torch.no_grad():
                self.shown = self(torch.randn(2, WIDTH)).sum().item()
        self.disturb()


@habit(plain=False, shows=False, expect=error(r"the first rank alone has drawn random numbers.*first_rank\.py:\d+"))
class DrawsOnFirstRankThenByPython(Disturbed):
    """In the same hook, all ranks go on with Python's numbers, and nothing tells of those."""

    def on_train_batch_end(self, *_: Any) -> None:
        self.show()
        with torch.no_grad():
            self.head.weight.mul_(1 + 0.1 * random.random())


@habit(plain=False, shows=False, replicated=DRAWN)
class OthersAloneDraw(Disturbed):
    """All but the first rank draw, which one process never does."""

    def on_train_batch_end(self, *_: Any) -> None:
        if not self.trainer.is_global_zero:
            torch.rand(3), random.random(), np.random.rand()

    def on_train_epoch_end(self) -> None:
        self.disturb()


@habit(
    plain=False,
    shows=False,
    expect=error(r"param_groups\[0\]\['lr'\] of SGD is 0\.05 on stage 0 .*, 0\.1 on stage 1 .*Let every rank set it"),
    reversed=error(r"param_groups\[0\]\['lr'\] of SGD is .*Let every rank set it"),
)
class CountedOnFirstRankForSchedule(Layers):
    """A count that the first rank alone keeps sets the learning rate."""

    epochs = 0

    def on_train_epoch_end(self) -> None:
        if self.trainer.is_global_zero:
            self.epochs += 1

    def on_train_epoch_start(self) -> None:
        for group in self.optimizers().param_groups:
            group["lr"] = 0.1 / (1 + self.epochs)


class ByOwnLog(Layers):
    """What is logged decides when to stop, what to save, and the rate."""

    value: Any = 0.0

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), 0.1)
        rates = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, mode="max")
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": rates, "monitor": "own"}}


DECIDING: dict[str, Any] = {
    "plain": False,
    "shows": False,
    "epochs": 4,
    "trainer": {"enable_checkpointing": True},
    "callbacks": lambda: [
        ModelCheckpoint(monitor="own", save_on_train_epoch_end=True),
        EarlyStopping("own", patience=1, mode="max", check_on_train_epoch_end=True),
    ],
}


@habit(**DECIDING)
class LogsOnAllWhatFirstRankComputed(ByOwnLog):
    """All ranks log a number that the first one alone has computed in the same hook."""

    def on_train_epoch_end(self) -> None:
        if self.trainer.is_global_zero:
            self.value = -self.current_epoch - self.head.bias.norm().item() / 100
        self.log("own", self.value)
        self.log_dict({"twice": 2 * self.value, "tensor": torch.tensor(float(self.value))})


@habit(
    plain=False,
    shows=False,
    epochs=4,
    callbacks=lambda: [EarlyStopping("own", patience=1, mode="max")],
)
class LogsOnFirstRankAfterValidation(Evaluated):
    """Training stops by what the first rank alone logs after a validation."""

    def on_validation_epoch_end(self) -> None:
        if self.trainer.is_global_zero:
            self.log("own", -float(self.current_epoch) - self.head.bias.norm() / 100)


@habit(**DECIDING)
class LogsOnAllWhatFirstRankKept(ByOwnLog):
    """All ranks log a number that the first one alone has computed in an earlier hook."""

    def on_train_epoch_start(self) -> None:
        if self.trainer.is_global_zero:
            self.value = -self.current_epoch - self.head.bias.norm().item() / 100

    def on_train_epoch_end(self) -> None:
        self.log("own", self.value)


@habit(**DECIDING)
class LogsByRankAtTwoLines(ByOwnLog):
    """The first rank logs the norm, and the others log something else by the same name."""

    def on_train_epoch_end(self) -> None:
        if self.trainer.is_global_zero:
            self.log("own", -self.current_epoch - self.head.bias.norm() / 100)
        else:
            self.log("own", 0.0)
            self.log("other", 0.0)


@habit(**DECIDING)
class LogsTwiceOnFirstRank(ByOwnLog):
    """All ranks log, and the first one alone logs again by the same name, and another name twice."""

    def on_train_epoch_end(self) -> None:
        self.is_first = self.trainer.is_global_zero
        self.log("norm", self.head.bias.norm())
        if self.is_first:
            self.log("norm", self.layers[0].linear.bias.norm())
            self.log("own", -float(self.current_epoch))
            self.log("own", -self.head.bias.norm() / 100)


@habit(plain=False, shows=False, expect=error(r"first_rank\.py:\d+: self\.trainer\.save_checkpoint.*let every rank"))
class SavesCheckpointOnFirstRank(Layers):
    """The first rank alone saves a checkpoint, for which Lightning asks all ranks."""

    def on_train_epoch_end(self) -> None:
        if self.trainer.is_global_zero:
            self.trainer.save_checkpoint(folder_of(self) / "own.ckpt")


@habit(plain=False, shows=False, expect=error(r"calls grad_norm.*first_rank\.py:\d+.*let every rank"))
class NormByStrategyOnFirstRank(Layers):
    """The first rank alone asks the strategy for the norm over all stages."""

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        if self.trainer.is_global_zero and hasattr(self.trainer.strategy, "grad_norm"):
            print(self.trainer.strategy.grad_norm())


@habit(plain=False, shows=False, expect=error(r"'metric' by a metric.*first_rank\.py:\d+.*let every rank"))
class LogsMetricOnFirstRank(Evaluated):
    """The first rank alone logs a metric, whose states are its own."""

    def __init__(self) -> None:
        super().__init__()
        self.metric = MeanMetric()

    def on_train_epoch_end(self) -> None:
        self.metric.update(1.0)
        if self.trainer.is_global_zero:
            self.log("metric", self.metric)


@habit(plain=False, shows=False, observed=["norms"])
class GradNormOnFirstRank(Layers):
    """The first rank alone asks for the norms of gradients by Lightning's function."""

    def __init__(self) -> None:
        super().__init__()
        self.norms: list[Any] = []

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        found = {}
        if self.trainer.is_global_zero:
            found = {name: float(norm) for name, norm in grad_norm(self, 2).items()}
        self.norms.append(self.trainer.strategy.broadcast(found))


@habit(plain=False, shows=False, trainer=lambda folder: {"logger": CSVLogger(folder)})  # the file is compared
class FolderOfLogsInSetup(Layers):
    """The first rank alone makes a folder where logs go, before the module is set up."""

    def setup(self, stage: str) -> None:
        if self.trainer.is_global_zero:
            self.write("setup")
        self.write_under_rank_zero_only()

    @rank_zero_only
    def write_under_rank_zero_only(self) -> None:
        self.write("rank_zero_only")

    def write(self, name: str) -> None:
        path = Path(self.trainer.log_dir or "") / "own" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(name)


class OwnRates(Layers):
    """The learning rate is set by hand."""

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.1)

    def set_rate(self, rate: Any) -> None:
        for group in self.optimizers().param_groups:
            group["lr"] = rate


RATES = error(r"param_groups\[0\]\['lr'\] of SGD is .*Let every rank set it")


@habit(plain=False, shows=False, expect=RATES)
class RateByHandOnFirstRank(OwnRates):
    """A hand-optimized step sets the rate on the first rank alone."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        if self.trainer.is_global_zero and batch_idx == 1:
            self.set_rate(0.05)
        loss = super().training_step(batch, batch_idx)
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()


@habit(plain=False, shows=False, expect=RATES, epochs=1)
class LastRateOnFirstRank(OwnRates):
    """The first rank alone sets the rate before the last update."""

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        if self.trainer.is_global_zero and self.global_step == 2:
            self.set_rate(0.05)


@habit(plain=False, shows=False, expect=RATES)
class RateForOneUpdateOnFirstRank(OwnRates):
    """The first rank alone sets the rate before an update, and all ranks set it back afterwards."""

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        if self.trainer.is_global_zero:
            self.set_rate(0.05)

    def on_train_batch_end(self, *_: Any) -> None:
        self.set_rate(0.1)


@habit(plain=False, shows=False, expect=RATES)
class RateOfNumpyOnFirstRank(OwnRates):
    """A number of NumPy's."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if self.trainer.is_global_zero:
            self.set_rate(np.float32(0.05))


@habit(plain=False, shows=False, expect=RATES)
class RateOfTensorOnFirstRank(OwnRates):
    """A tensor."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if self.trainer.is_global_zero:
            self.set_rate(torch.tensor(0.05))


@habit(plain=False, shows=False)
class RateByNormOfLayer(OwnRates):
    """The rate comes from what one stage holds, as a tensor."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.set_rate(0.05 * self.layers[0].linear.weight.norm().detach())


@habit(plain=False, shows=False)
class RateByNormBeforeUpdate(OwnRates):
    """The same right before the update, of another stage."""

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.set_rate(0.05 * self.head.weight.norm().detach())


@habit(plain=False, shows=False, trainer=lambda folder: {"logger": CSVLogger(folder)})  # the file is compared
class FolderOfLogsWhilePreparing(FolderOfLogsInSetup):
    """In `prepare_data`, which the first rank of a machine alone runs."""

    def prepare_data(self) -> None:
        self.write("prepared")
