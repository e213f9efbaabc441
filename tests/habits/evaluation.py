"""Validation, test and prediction, and what hooks and callbacks compute outside of steps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning as L
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import BasePredictionWriter
from torch import Tensor, nn

from tests.habits.modules import CLASSES, SAMPLES, WIDTH, Evaluated, Layers
from tests.habits.table import habit


@habit(calls=["fit", "validate", "test"], observed=["best"])
class ListsForEpochEnd(Evaluated):
    """validation_step_outputs and test_step_outputs, concatenated, with the best value so far."""

    def __init__(self) -> None:
        super().__init__()
        self.validation_step_outputs: list[Any] = []
        self.test_step_outputs: list[Any] = []
        self.best = 0.0

    def validation_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        logits = self(x)
        self.validation_step_outputs.append((logits, y))
        return F.cross_entropy(logits, y)

    def on_validation_epoch_end(self) -> None:
        logits, y = (torch.cat(parts) for parts in zip(*self.validation_step_outputs, strict=True))
        value = (logits.argmax(-1) == y).float().mean()
        self.best = max(self.best, value.item())
        self.log("val_acc", value)
        self.log("val_best", self.best)
        self.validation_step_outputs.clear()

    def test_step(self, batch: Any, batch_idx: int) -> dict[str, Any]:
        x, y = batch
        output = {"loss": F.cross_entropy(self(x), y), "n": len(x)}
        self.test_step_outputs.append(output)
        return output

    def on_test_epoch_end(self) -> None:
        total = sum(output["n"] for output in self.test_step_outputs)
        self.log("test_loss", sum(output["loss"] * output["n"] for output in self.test_step_outputs) / total)


@habit(calls=["predict"], plain=False)
class PredictsDictionaries(Evaluated):
    """predict_step returns dictionaries with tensors, lists and numbers."""

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        features = self.features(x)
        logits = self.head(features)
        return {"logits": logits, "labels": y, "guess": logits.argmax(-1).tolist(), "features": features}


@habit(calls=["predict"], plain=False, observed=["total"], shows=False)  # no other call takes such a batch
class PredictsByForward(Layers):
    """The default predict_step calls forward; the batch is one tensor."""

    total = 0

    @staticmethod
    def batch(generator: torch.Generator) -> Any:
        return torch.randn(SAMPLES, WIDTH, generator=generator)

    def forward(self, x: Tensor) -> Any:
        self.total += len(x)
        logits = super().forward(x)
        return logits.softmax(-1), logits.argmax(-1)


@habit(calls=["test"], plain=False)
class TestStepReturns(Evaluated):
    """test_step returns what on_test_batch_end adds to."""

    def test_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        logits = self(x)
        return {"loss": F.cross_entropy(logits, y, reduction="none"), "logits": logits}

    def on_test_batch_end(self, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.log("worst", outputs["loss"].max(), on_epoch=True, on_step=False, reduce_fx="max")
        outputs["rank"] = outputs["logits"].argsort(-1)


class EMASwap(Evaluated):
    """Keeps a shadow of the weights, which validation runs with."""

    decay = 0.8

    def on_fit_start(self) -> None:
        self.shadow = {name: p.detach().clone() for name, p in self.named_parameters()}
        self.backup: dict[str, Tensor] = {}

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        with torch.no_grad():
            for name, parameter in self.named_parameters():
                self.shadow[name].mul_(self.decay).add_(parameter, alpha=1 - self.decay)

    def on_validation_start(self) -> None:
        for name, parameter in self.named_parameters():
            self.backup[name] = parameter.data.clone()
            parameter.data.copy_(self.shadow[name])

    def on_validation_end(self) -> None:
        for name, parameter in self.named_parameters():
            parameter.data.copy_(self.backup[name])


habit(plain=False, without={"decay": 0.0})(
    type("ValidatesWithShadow", (EMASwap,), {"__module__": __name__, "__doc__": "apply_shadow and restore."})
)


@habit(plain=False, without={"decay": 0.0})
class ValidatesWithShadowSwapped(EMASwap):
    """The same by exchanging `.data`, which copies nothing."""

    def swap(self) -> None:
        for name, parameter in self.named_parameters():
            parameter.data, self.shadow[name] = self.shadow[name], parameter.data

    def on_validation_start(self) -> None:
        self.swap()

    def on_validation_end(self) -> None:
        self.swap()


@habit(plain=False, observed=["seen"], shows=False)
class ViewsKeptBeyondTheirLoop(Evaluated):
    """Views of weights that validation has kept are read after updates, and written into."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[float] = []
        self.views: list[Tensor] = []

    def on_validation_epoch_end(self) -> None:
        self.views = [self.head.weight.data, self.layers[3].linear.bias.detach()]

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.seen += [view.sum().item() for view in self.views]
        if self.views:
            self.views[0].mul_(0.9)


@habit(plain=False, observed=["samples"])
class ModuleCalledInHook(Layers):
    """`self(x)` in on_train_epoch_end, under no_grad and eval."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("probe", torch.randn(2, WIDTH))
        self.samples: list[Any] = []

    def on_train_epoch_end(self) -> None:
        self.eval()
        with torch.no_grad():
            logits = self(self.probe)
        self.train()
        self.samples.append(logits.tolist())
        self.log("probe", logits.max())


class Sampler(L.Callback):
    """Draws samples and metrics, as callbacks that log images do."""

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        with torch.no_grad():
            logits = pl_module(batch[0])
        accuracy = (logits.argmax(-1) == batch[1]).float().mean()
        pl_module.log("accuracy_after", accuracy)
        pl_module.found.append(accuracy.item())

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        pl_module.found.append(pl_module.layers[1](torch.ones(1, WIDTH)).sum().item())


@habit(plain=False, observed=["found"], callbacks=lambda: [Sampler()], shows=False)  # it is in what is observed
class ModuleCalledInCallback(Layers):
    """`pl_module(x)` after each batch, and one of its layers when training ends."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[float] = []


@habit(plain=False, observed=["found"])
class ModuleCalledInValidationHook(Evaluated):
    """Features of a validation bank are computed when validation begins, and used in its steps."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("bank", torch.randn(6, WIDTH))
        self.found: list[Any] = []

    def on_validation_epoch_start(self) -> None:
        self.keys = F.normalize(self.features(self.bank), dim=1)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        queries = F.normalize(self.features(batch[0]), dim=1)
        self.found.append((queries @ self.keys.T).topk(2).indices.tolist())


@habit(plain=False, observed=["accuracies"])
class KNNOverFeatureBank(Evaluated):
    """Self-supervised evaluation: a bank of features is filled in training, and classifies in validation."""

    def __init__(self) -> None:
        super().__init__()
        self.features_seen: list[Tensor] = []
        self.labels_seen: list[Tensor] = []
        self.accuracies: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        features = self.features(x)
        self.features_seen.append(F.normalize(features.detach(), dim=1))
        self.labels_seen.append(y)
        return F.cross_entropy(self.head(features), y)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        if not self.features_seen:
            return
        bank, labels = torch.cat(self.features_seen), torch.cat(self.labels_seen)
        nearest = (F.normalize(self.features(batch[0]), dim=1) @ bank.T).topk(3).indices
        guess = labels[nearest].mode(1).values
        self.accuracies.append((guess == batch[1]).float().mean().item())


@habit(observed=["seen"])
class StepSharedByPhases(Evaluated):
    """One shared step for all phases, which logs by its name and returns the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: dict[str, int] = {}

    def shared_step(self, batch: Any, phase: str) -> Tensor:
        x, y = batch
        loss = F.cross_entropy(self(x), y)
        self.seen[phase] = self.seen.get(phase, 0) + 1
        self.log(f"{phase}/loss", loss, on_epoch=True)
        return loss

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.shared_step(batch, "train")

    def validation_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.shared_step(batch, "val")


@habit(observed=["phases"])
class AsksForItsPhase(Evaluated):
    """self.training, trainer.validating, sanity_checking, is_last_batch and current_epoch are looked at in the step."""

    def __init__(self) -> None:
        super().__init__()
        self.phases: list[Any] = []

    def forward(self, x: Tensor) -> Tensor:
        trainer = self.trainer
        self.phases.append((self.training, trainer.validating, trainer.sanity_checking, trainer.state.stage.value))
        return super().forward(x) * (1.0 if self.training else 0.5)


@habit(calls=["fit", "predict"], plain=False)
class EmbedsThenClassifies(Evaluated):
    """Validation and prediction end on an early stage."""

    def validation_step(self, batch: Any, batch_idx: int) -> Tensor:
        hidden = self.layers[0](batch[0])
        self.log("early_norm", hidden.norm())
        return hidden

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        return self.layers[1](self.layers[0](batch[0])), [f"{value:.3f}" for value in batch[0][:, 0].tolist()]


class Writer(BasePredictionWriter):
    """Writes what predict_step returned."""

    def __init__(self) -> None:
        super().__init__("batch_and_epoch")

    def write_on_batch_end(
        self, trainer: Any, pl_module: Any, prediction: Any, batch_indices: Any, batch: Any, batch_idx: int, loader: int
    ) -> None:
        if trainer.is_global_zero:
            folder = Path(trainer.default_root_dir)
            folder.mkdir(parents=True, exist_ok=True)
            torch.save(prediction, folder / f"batch{batch_idx}.pt")

    def write_on_epoch_end(self, trainer: Any, pl_module: Any, predictions: Any, batch_indices: Any) -> None:
        if trainer.is_global_zero:
            lines = [str(row.argmax().item()) for prediction in predictions for row in prediction]
            (Path(trainer.default_root_dir) / "guesses.txt").write_text("\n".join(lines))


habit(calls=["predict"], plain=False, shows=False, callbacks=lambda: [Writer()])(  # its files are compared
    type("PredictionsWritten", (Evaluated,), {"__module__": __name__, "__doc__": "A BasePredictionWriter's files."})
)


@habit(calls=["test"], observed=["rows"], plain=False)
class WritesTableInTest(Evaluated):
    """Rows of a table are collected in test_step, and written as a file by rank 0."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[str] = []

    def test_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        for label, scores in zip(y, self(x).softmax(-1), strict=True):
            self.rows.append(f"{int(label)},{scores.argmax()},{scores.max():.6f}")

    def on_test_end(self) -> None:
        if self.trainer.is_global_zero:
            folder = Path(self.trainer.default_root_dir)
            folder.mkdir(parents=True, exist_ok=True)
            (folder / "rows.csv").write_text("\n".join(self.rows))


@habit(calls=["validate"], plain=False, observed=["decoded"])
class BeamInValidation(Evaluated):
    """Greedy decoding in validation: the model is called on what it gave before, until a token says stop."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(CLASSES, WIDTH)
        self.decoded: list[Any] = []

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        x, _ = batch
        tokens: list[Tensor] = []
        for _ in range(5):
            logits = self(x)
            tokens.append(logits.argmax(-1))
            if (tokens[-1] == 0).all():
                break
            x = x + self.embedding(tokens[-1])
        self.decoded.append(torch.stack(tokens, 1).tolist())


@habit(calls=["fit", "validate"], plain=False, observed=["gradients"])
class GradientsInValidation(Evaluated):
    """Saliency: gradients by the input are enabled in validation, within one stage."""

    def __init__(self) -> None:
        super().__init__()
        self.gradients: list[Any] = []

    @torch.enable_grad()
    def validation_step(self, batch: Any, batch_idx: int) -> None:
        with torch.inference_mode(False):
            x = batch[0].clone().requires_grad_(True)
            score = self.layers[0](x).pow(2).sum()
            self.gradients.append(torch.autograd.grad(score, x)[0].norm(dim=1).tolist())


@habit(observed=["after"], plain=False)
class WholeAfterFit(Layers):
    """What follows trainer.fit: state_dict(), a call, and a sum over all weights, as under DDP."""

    after: Any = None

    def teardown(self, stage: str) -> None:
        weights = {name: value.clone() for name, value in self.state_dict().items()}
        self.eval()
        with torch.no_grad():
            logits = self(torch.ones(1, WIDTH))
        self.after = (logits, float(sum(p.sum() for p in self.parameters())), weights)


@habit(plain=False)
class GradientsOnAfterBranch(Evaluated):
    """A validation that branches on its data, and then calls attention and a layer with a backward hook under
    enable_grad: kernels are others than without."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True)
        self.layers[0].register_full_backward_pre_hook(lambda module, gradients: (gradients[0] * 1.1,))

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        x = self.layers[2](batch[0])
        x = x if x.sum() > 0 else -x
        with torch.enable_grad():
            for layer in self.layers:
                x, weights = self.attention(*[layer(x).unsqueeze(1)] * 3)
                x = x.squeeze(1) + weights.mean()
        return {"x": x, "mean": x.mean()}


@habit(observed=["norms"], plain=False)
class NormsLoggedAndKept(Evaluated):
    """One hook logs the norm of a layer's weight; another keeps that of the next in a list."""

    def __init__(self) -> None:
        super().__init__()
        self.norms: list[Tensor] = []

    def on_before_backward(self, loss: Tensor) -> None:
        self.log("norm", self.layers[2].linear.weight.norm())

    def on_validation_epoch_end(self) -> None:
        self.norms.append(self.layers[3].linear.weight.norm())


class Attending(Evaluated):
    """Attention and a transformer's layer, of which torch has kernels for evaluation."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True)
        self.encoder = nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True)

    def features(self, x: Tensor) -> Tensor:
        x = self.layers[1](self.layers[0](x))
        tokens = x.t().contiguous().t().unflatten(1, (2, 4))  # as after a convolution
        found, _ = self.attention(tokens, tokens, tokens)
        found = found + self.encoder(tokens) + self.encoder(tokens.detach())
        return self.layers[3](self.layers[2](x + found.flatten(1)))


@habit(calls=["fit", "validate", "test", "predict"], shows=False, plain_tolerance=1e-6)
class AttendsToTransposed(Attending):
    """What evaluations attend to is not contiguous."""


@habit(calls=["fit", "test", "predict"], shows=False, trainer={"inference_mode": False}, plain_tolerance=1e-6)
class AttendsWithoutInferenceMode(Attending):
    """Evaluations under no_grad, which one process has other kernels for."""


@habit(calls=["fit", "validate", "test", "predict"], shows=False)
class AsksForInferenceMode(Evaluated):
    """Another scale in inference mode."""

    def features(self, x: Tensor) -> Tensor:
        x = super().features(x)
        with torch.inference_mode(False):
            x = x * (0.9 if torch.is_inference_mode_enabled() else 1.1)
        return x * (0.5 if torch.is_inference_mode_enabled() else 2.0)


@habit(calls=("fit", "validate"), plain=False)
class ValidationWritesUnderEnableGrad(Layers):
    """A validation step with gradients enabled writes in place into what other stages made."""

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        with torch.enable_grad():
            first = self.layers[1](self.layers[0](x))
            x = self.layers[3](self.layers[2](first))
            x.index_add_(0, torch.tensor([0, 1]), first[:2])
            first.mul_(0.5)
            x = self.layers[2](first) + x
            self.log("val_loss", F.cross_entropy(self.head(x), y))


@habit(observed=["seen"], plain=False)
class SaliencyInHooks(Layers):
    """Hooks ask for the gradient of what the model gives with respect to its input."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Tensor] = []

    def saliency(self) -> Tensor:
        with torch.enable_grad():
            x = torch.linspace(-1, 1, 2 * WIDTH).view(2, WIDTH).requires_grad_()
            [gradient] = torch.autograd.grad(self(x).square().sum(), x)
        return gradient

    def on_validation_epoch_end(self) -> None:
        self.seen.append(self.saliency())
        self.log("saliency", self.seen[-1].norm())

    def on_train_end(self) -> None:
        self.seen.append(self.saliency())

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", F.cross_entropy(self(batch[0]), batch[1]))
