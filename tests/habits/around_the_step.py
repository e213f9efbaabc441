"""What Lightning calls around a step and the user overrides: closures, clipping, learning rates, changes of mode."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import Callback, ModelSummary
from lightning.pytorch.utilities import rank_zero_only
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader

from tests.habits.first_rank import RowsLogger, folder_of
from tests.habits.loaders import OwnLoader, samples
from tests.habits.modules import CLASSES, WIDTH, Evaluated, Layers, Noting
from tests.habits.table import habit


@habit(plain=False, shows=False, observed=("found",))
class ClosureReadsGradients(Noting):
    """The optimizer is given a closure that notes the gradients' norms before the update."""

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        def closure() -> Any:
            loss = optimizer_closure()
            self.found.append([p.grad.norm().item() for p in self.parameters() if p.grad is not None])
            return loss

        optimizer.step(closure=closure)


@habit(plain=False)
class ClosureNormsGradients(Layers):
    """The closure divides all gradients by their common norm."""

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        def closure() -> Any:
            loss = optimizer_closure()
            gradients = [p.grad for p in self.parameters() if p.grad is not None]
            norm = torch.stack([gradient.norm() for gradient in gradients]).norm()
            for gradient in gradients:
                gradient.div_(norm)
            return loss

        optimizer.step(closure=closure)


@habit(plain=False, trainer={"gradient_clip_val": 0.1})
class ClippingOverridden(Layers):
    """`clip_gradients` itself is the user's, who logs the norm and clips by twice the value."""

    def clip_gradients(self, optimizer: Any, gradient_clip_val: Any = None, **_: Any) -> None:  # type: ignore[override]
        self.log("norm", nn.utils.clip_grad_norm_(self.parameters(), 2 * gradient_clip_val))


@habit(plain=False)
class RateFromWeights(Layers):
    """LambdaLR's function looks at weights of the first and of the last stage."""

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        scheduler = LambdaLR(optimizer, lambda _: 1 / (1 + self.head.weight.norm().item() + self.norm_of_first()))
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]

    def norm_of_first(self) -> float:
        return self.layers[0].linear.weight.detach().norm().item()


class Merged(nn.Module):
    """A linear layer with a low-rank addition, which is merged into its weight for evaluation, as loralib does."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(width, width) / width)
        self.down = nn.Parameter(torch.randn(2, width) / width)
        self.up = nn.Parameter(torch.randn(width, 2) / width)
        self.is_merged = False

    def train(self, mode: bool = True) -> Merged:
        super().train(mode)
        if mode == self.is_merged:
            self.weight.data += (self.up @ self.down) * (-1 if mode else 1)
            self.is_merged = not mode
        return self

    def forward(self, x: Tensor) -> Tensor:
        x = F.linear(x, self.weight) if self.is_merged else F.linear(x, self.weight) + x @ self.down.T @ self.up.T
        return torch.tanh(x)


@habit(plain=False, shows=False, calls=("fit", "validate", "predict"))
class WeightsMergedForEvaluation(Evaluated):
    layer = staticmethod(lambda: Merged(8))

    def on_validation_model_train(self) -> None:
        self.train()


@habit(plain=False, shows=False, observed=("found",))
class ParametersWatched(Noting):
    """Hooks on all parameters, registered when training begins, note gradients, as loggers that watch a model do."""

    def on_train_start(self) -> None:
        for name, parameter in self.named_parameters():
            parameter.register_hook(lambda gradient, name=name: self.found.append((name, gradient.norm().item())))


@habit(plain=False, shows=False, trainer=lambda folder: {"logger": RowsLogger(folder)})  # the file is compared
class HistogramsInHooks(Layers):
    """Weights and gradients are given to the logger's experiment, and printed, in hooks."""

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        assert isinstance(self.logger, RowsLogger)
        for name, parameter in self.named_parameters():
            self.logger.experiment.add_histogram(f"grad {name}", parameter.grad, self.global_step)
            self.print(name, parameter.grad)

    def on_train_epoch_end(self) -> None:
        assert isinstance(self.logger, RowsLogger)
        for name, parameter in self.named_parameters():
            self.logger.experiment.add_histogram(name, parameter, self.global_step)
        self.print("weight", self.layers[0].linear.weight, self.head.weight)


@habit(plain=False, observed=("found",), trainer={"num_sanity_val_steps": 0})
class IteratesLoaderInStep(OwnLoader, Evaluated):
    """A validation step compares its batch with the first one of the training loader."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[Any] = []

    def train_dataloader(self) -> Any:
        return DataLoader(samples(16, 1), batch_size=8, shuffle=True)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        super().validation_step(batch, batch_idx)
        x, _ = next(iter(self.trainer.train_dataloader))
        self.log("distance", (self.features(x).mean(0) - self.features(batch[0]).mean(0)).norm())
        self.found.append(x.sum().item())


class OnlineProbe(Callback):
    """Trains a classifier of its own on the module's features, as in self-supervised learning."""

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        self.probe = nn.Linear(WIDTH, CLASSES)
        self.optimizer = torch.optim.SGD(self.probe.parameters(), lr=0.1)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        x, y = batch
        with torch.no_grad():
            features = pl_module.features(x)
        loss = F.cross_entropy(self.probe(features), y)
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        pl_module.log("probe", loss)


@habit(callbacks=lambda: [OnlineProbe()], plain=False, shows=False)
class ProbedOnline(Layers):
    pass


@habit(plain=False, shows=False)  # the file is compared
class ExampleInput(Layers):
    """The summary of the model runs it on an example, for sizes of inputs and outputs, and counts operations."""

    def __init__(self) -> None:
        super().__init__()
        self.example_input_array = torch.ones(2, *samples(1, 0)[0][0].shape)

    def configure_callbacks(self) -> Callback:
        callback = ModelSummary(max_depth=-1)

        def write(summary_data: Any, *args: Any, **kwargs: Any) -> None:
            (folder_of(self) / "summary.txt").write_text(f"{summary_data} {args} {kwargs}")

        callback.summarize = write  # type: ignore[method-assign, assignment]
        return callback


class GraphLogger(RowsLogger):
    """Traces the model, as TensorBoardLogger does with `log_graph=True`."""

    @rank_zero_only
    def log_graph(self, model: Any, input_array: Any = None) -> None:
        traced = torch.jit.trace(model, model.example_input_array, check_trace=False)
        self.experiment.rows.append(f"{[node.kind() for node in traced.inlined_graph.nodes()]}")


@habit(plain=False, shows=False, trainer=lambda folder: {"logger": GraphLogger(folder)})  # the file is compared
class GraphLogged(ExampleInput):
    """The graph of a forward that draws random numbers is logged."""

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.features(x)
        return self.head(hidden + 0.1 * torch.randn_like(hidden))
