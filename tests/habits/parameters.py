"""Parameters and buffers that steps and hooks read, change, share or replace."""

from __future__ import annotations

import copy
import math
import pickle
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import all_reduce, get_rank, get_world_size, is_initialized
from torch.distributed.nn import all_gather

from tests.habits.modules import CLASSES, SAMPLES, WIDTH, Evaluated, Layer, Layers
from tests.habits.table import habit


class CLIP(Layers):
    """Two towers and a learned scale of their logits."""

    top = 1.0

    def __init__(self) -> None:
        super().__init__()
        self.text = nn.ModuleList([Layer(), Layer()])
        self.logit_scale = nn.Parameter(torch.tensor(math.log(1 / 0.07)))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, _ = batch
        image = F.normalize(self.features(x), dim=-1)
        text = F.normalize(self.text[1](self.text[0](x.roll(1, 1))), dim=-1)
        logits = self.logit_scale.exp() * image @ text.T
        labels = torch.arange(len(x), device=self.device)
        return (F.cross_entropy(logits, labels) + F.cross_entropy(logits.T, labels)) / 2


@habit(without={"share": 0.0})
class GathersOverRanksByName(CLIP):
    """Features of all ranks are negatives, and numbers of ranks are counted, by functions imported by name."""

    share = 1.0

    def features(self, x: Tensor) -> Tensor:
        features = super().features(x)
        if is_initialized():
            features = torch.cat(list(all_gather(features)))
            part = features.detach().mean()
            all_reduce(part)
            features = features[get_rank() * len(x) :][: len(x)] + (part - part / get_world_size())
        return features * self.share


@habit(plain=False, without={"top": 100.0})
class LogitScaleClampedAtBatchEnd(CLIP):
    """CLIP's `logit_scale.clamp_` after each update."""

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        with torch.no_grad():
            self.logit_scale.clamp_(0, self.top)


@habit(without={"top": 100.0})
class LogitScaleClampedInStep(CLIP):
    """The same as the first line of the step."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.logit_scale.data = torch.clamp(self.logit_scale.data, 0, self.top)
        return super().training_step(batch, batch_idx)


class SwAV(Layers):
    """Prototypes without a bias."""

    normalises = True

    def __init__(self) -> None:
        super().__init__()
        self.prototypes = nn.Linear(WIDTH, CLASSES, bias=False)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        return F.cross_entropy(self.prototypes(F.normalize(self.features(x), dim=1)) / 0.1, y)


@habit(without={"normalises": False})
class PrototypesNormalisedInStep(SwAV):
    """SwAV normalises its prototypes at the beginning of the step."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if self.normalises:
            with torch.no_grad():
                weight = self.prototypes.weight.data.clone()
                weight = F.normalize(weight, dim=1, p=2)
                self.prototypes.weight.copy_(weight)
        return super().training_step(batch, batch_idx)


@habit(plain=False, without={"normalises": False})
class PrototypesNormalisedInHook(SwAV):
    """The same in on_train_batch_start."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if self.normalises:
            self.prototypes.weight.data = F.normalize(self.prototypes.weight.data, dim=1)


@habit(plain=False, without={"bound": 10.0})
class CriticWeightsClipped(Layers):
    """WGAN's clipping of all weights after each update."""

    bound = 0.2

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        for parameter in self.parameters():
            parameter.data.clamp_(-self.bound, self.bound)


@habit(plain=False, without={"largest": 100.0})
class MaxNormConstraint(Layers):
    """Rows of weights are scaled to a largest norm, by torch.renorm."""

    largest = 0.5

    @torch.no_grad()
    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        for module in self.modules():
            if isinstance(module, nn.Linear):
                module.weight.copy_(torch.renorm(module.weight, 2, 0, self.largest))


@habit(without={"weight": 0.0})
class L2OverParameters(Layers):
    """Weight decay as a term of the loss, over self.parameters()."""

    weight = 1e-2

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        l2 = sum(parameter.pow(2).sum() for parameter in self.parameters())
        self.log("l2", l2)
        return loss + self.weight * l2


@habit(without={"weight": 0.0})
class L1OverNames(Layers):
    """The same for weights of the layers by name, joined into one vector."""

    weight = 1e-2

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        weights = torch.cat([p.flatten() for name, p in self.named_parameters() if name.endswith("weight")])
        return loss + self.weight * weights.abs().sum()


@habit(without={"weight": 0.0})
class EWC(Layers):
    """Elastic weight consolidation: old values and importances of all parameters, as plain dictionaries."""

    weight = 5.0

    def on_fit_start(self) -> None:
        self.old = {name: parameter.detach().clone() for name, parameter in self.named_parameters()}
        self.fisher = {name: torch.ones_like(parameter) * 0.1 for name, parameter in self.named_parameters()}

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        for name, parameter in self.named_parameters():
            loss = loss + self.weight * (self.fisher[name] * (parameter - self.old[name]).pow(2)).sum()
        return loss


@habit(without={"mu": 0.0})
class FedProx(Layers):
    """A proximal term towards a deep copy of the module, made in the first step."""

    mu = 1.0

    def on_train_start(self) -> None:
        self.anchor = [copy.deepcopy(parameter.data) for parameter in self.parameters()]

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        distance = sum((p - a).norm(2) ** 2 for p, a in zip(self.parameters(), self.anchor, strict=True))
        return loss + self.mu / 2 * distance


@habit(plain=False, observed=["norms"])
class ParameterNormsLogged(Layers):
    """Norms of all weights, read and logged after each batch."""

    def __init__(self) -> None:
        super().__init__()
        self.norms: list[float] = []

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        for name, parameter in self.named_parameters():
            if "weight" in name:
                self.log(f"norm/{name}", parameter.norm())
        self.norms.append(sum(p.pow(2).sum().item() for p in self.parameters()) ** 0.5)


@habit(without={"momentum": 0.0})
class BufferChangedAtStart(Layers):
    """A running mean of inputs, updated before the first layer and subtracted."""

    momentum = 0.3

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(WIDTH))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        self.mean.mul_(1 - self.momentum).add_(x.mean(0), alpha=self.momentum)
        return F.cross_entropy(self(x - self.mean), y)


@habit(without={"momentum": 0.0})
class BufferChangedAtEnd(Layers):
    """A running mean of features, replaced after the last layer, and subtracted before the first one."""

    momentum = 0.3

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("center", torch.zeros(WIDTH))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        hidden = self.features(x)
        loss = F.cross_entropy(self.head(hidden - self.center), y)
        self.center = (1 - self.momentum) * self.center + self.momentum * hidden.detach().mean(0)
        return loss


@habit()
class StepCountedInBuffer(Layers):
    """A long buffer that each step counts up, read as a number for a schedule."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("steps", torch.tensor(0, dtype=torch.long))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        self.steps += 1
        return F.cross_entropy(self(x), y) * min(1.0, self.steps.item() / 10)


@habit(without={"rate": 0.0})
class MemoryBankIndexed(Layers):
    """Instance discrimination: rows of a buffer by sample number, moved towards the features."""

    rate = 0.5

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("bank", F.normalize(torch.randn(32, WIDTH), dim=1))

    @staticmethod
    def batch(generator: torch.Generator) -> Any:
        x, _ = Layers.batch(generator)
        return {"x": x, "index": torch.randperm(32, generator=generator)[:SAMPLES]}

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        index = batch["index"]
        features = F.normalize(self.features(batch["x"]), dim=1)
        loss = F.cross_entropy(features @ self.bank.clone().T / 0.1, index)
        with torch.no_grad():
            self.bank[index] = F.normalize((1 - self.rate) * self.bank[index] + self.rate * features, dim=1)
        return loss


@habit(without={"alpha": 0.0})
class CentersByClass(Layers):
    """Centre loss: means by class in a buffer, updated by scatter_add."""

    alpha = 0.5

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("centers", torch.zeros(CLASSES, WIDTH))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        features = self.features(x)
        loss = F.cross_entropy(self.head(features), y) + 0.05 * (features - self.centers[y]).pow(2).sum(1).mean()
        with torch.no_grad():
            delta = torch.zeros_like(self.centers).index_add_(0, y, features.detach() - self.centers[y])
            count = torch.bincount(y, minlength=CLASSES).unsqueeze(1) + 1
            self.centers.add_(self.alpha * delta / count)
        return loss


class Codebook(nn.Module):
    """A VQ-VAE's codebook, which an exponential moving average of its inputs moves."""

    decay = 0.8

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("codes", torch.randn(6, WIDTH))
        self.register_buffer("counts", torch.ones(6))
        self.register_buffer("sums", self.codes.clone())

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        index = torch.cdist(x, self.codes).argmin(1)
        found = self.codes[index]
        commitment = F.mse_loss(x, found.detach())
        if self.training:
            chosen = F.one_hot(index, 6).type_as(x)
            self.counts.mul_(self.decay).add_(chosen.sum(0), alpha=1 - self.decay)
            self.sums.mul_(self.decay).add_(chosen.T @ x.detach(), alpha=1 - self.decay)
            self.codes.copy_(self.sums / self.counts.unsqueeze(1))
        return x + (found - x).detach(), commitment, index


@habit(observed=["used"], without={"decay": 1.0})
class VQCodebook(Layers):
    """A codebook in the middle, whose chosen codes are noted."""

    decay = 0.8

    def __init__(self) -> None:
        super().__init__()
        self.codebook = Codebook()
        self.codebook.decay = self.decay
        self.used: list[list[int]] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, _ = batch
        quantised, commitment, index = self.codebook(self.layers[1](self.layers[0](x)))
        self.used.append(index.tolist())
        self.log("codes", float(index.unique().numel()))
        return F.mse_loss(self.layers[3](self.layers[2](quantised)), x) + 0.25 * commitment


@habit(plain=False, without={"resets": False})
class VQDeadCodesReset(VQCodebook):
    """Codes that nobody chose are replaced by random rows when an epoch ends."""

    resets = True

    def on_train_epoch_end(self) -> None:
        if self.resets:
            dead = self.codebook.counts < 0.9
            self.codebook.codes[dead] = torch.randn(int(dead.sum()), WIDTH)


@habit(without={"rank": 0})
class LowRankAdapters(Layers):
    """LoRA: frozen layers, and adapters that are trained and merged when training ends."""

    rank = 2

    class Adapted(Layer):
        def __init__(self) -> None:
            super().__init__()
            self.linear.requires_grad_(False)
            self.a = nn.Parameter(torch.randn(2, WIDTH) * 0.3)
            self.b = nn.Parameter(torch.zeros(WIDTH, 2))
            self.merged = False

        def forward(self, x: Tensor) -> Tensor:
            x = super().forward(x)
            return x if self.merged else x + x @ self.a.T @ self.b.T

        @torch.no_grad()
        def merge(self) -> None:
            self.linear.weight += self.b @ self.a
            self.merged = True

    layer = Adapted

    def on_train_end(self) -> None:
        if self.rank:
            for layer in self.layers:
                layer.merge()

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], lr=1e-2)


@habit()
class GroupsByName(Layers):
    """No weight decay for biases, and a learning rate that falls with the depth."""

    def configure_optimizers(self) -> Any:
        groups = [
            {
                "params": [parameter],
                "weight_decay": 0.0 if name.endswith("bias") else 0.1,
                "lr": 0.01 * 0.8 ** (4 - int(name.split(".")[1])) if name.startswith("layers") else 0.01,
            }
            for name, parameter in self.named_parameters()
        ]
        return torch.optim.AdamW(groups)


@habit(shows=False)  # weights that were drawn at random are drawn anew
class InitialisedInOnFitStart(Layers):
    """Weights are set in a hook, after the module was built: some by formulas, one from another."""

    def on_fit_start(self) -> None:
        with torch.no_grad():
            for number, layer in enumerate(self.layers):
                layer.linear.weight.copy_(torch.eye(WIDTH) * (1 + 0.1 * number))
                layer.linear.bias.zero_()
            self.head.weight.copy_(self.layers[0].linear.weight[:CLASSES] * 0.5)


@habit(plain=False)
class InitialisedAtRandomInHook(Layers):
    """The same at random, in on_train_start: every rank draws what the others hold, too."""

    def on_train_start(self) -> None:
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.orthogonal_(module.weight)
                nn.init.normal_(module.bias, std=0.1)


@habit(epochs=3, without={"epoch": 100})
class RewoundToSnapshot(Layers):
    """Lottery tickets: weights of the first epoch are kept by deepcopy(state_dict()) and loaded again."""

    epoch = 2

    def on_train_epoch_start(self) -> None:
        if self.current_epoch == 1:
            self.snapshot = copy.deepcopy(self.state_dict())
        if self.current_epoch == self.epoch:
            self.load_state_dict(self.snapshot)


@habit(plain=False, without={"sparsity": 0.0})
class PrunedByMagnitude(Layers):
    """Small weights are masked out after each update, with masks made of a quantile over all of them."""

    sparsity = 0.3

    @torch.no_grad()
    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        weights = [p for p in self.layers.parameters() if p.ndim > 1]
        threshold = torch.quantile(torch.cat([w.abs().flatten() for w in weights]), self.sparsity)
        for weight in weights:
            weight.mul_((weight.abs() > threshold).float())


@habit(plain=False, without={"alpha": 1.0})
class Lookahead(Layers):
    """Slow weights: every second step all parameters move part of the way."""

    alpha = 0.5

    def on_train_start(self) -> None:
        self.slow = [p.detach().clone() for p in self.parameters()]

    @torch.no_grad()
    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if self.global_step % 2 == 0:
            for slow, fast in zip(self.slow, self.parameters(), strict=True):
                slow += self.alpha * (fast - slow)
                fast.copy_(slow)


@habit(observed=["shapes"], calls=["fit", "validate"])
class ParametersCounted(Evaluated):
    """Sizes, sums and devices of all parameters are looked at in setup and in the end."""

    def __init__(self) -> None:
        super().__init__()
        self.shapes: list[Any] = []

    def spec(self) -> None:
        total = sum(p.numel() for p in self.parameters())
        size = sum(p.numel() * p.element_size() for p in self.parameters())
        kinds = sorted({(str(p.dtype), p.device.type, p.requires_grad) for p in self.parameters()})
        self.shapes.append((total, size, kinds, [tuple(p.shape) for p in self.parameters()]))

    def on_fit_start(self) -> None:
        self.spec()

    def on_train_end(self) -> None:
        self.spec()
        self.shapes.append(round(sum(float(p.sum()) for p in self.parameters()), 9))


@habit(observed=["found"])
class LooksAtDevices(Layers):
    """Steps and hooks ask parameters where they are, move the module there, and copy and pickle it."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[Any] = []

    def spec(self, when: str) -> torch.device:
        tensors = [*self.parameters(), *self.buffers()]
        if len({tensor.device for tensor in tensors}) > 1:
            raise ValueError("Module tensors on multiple devices")
        self.found.append((when, str(next(self.parameters()).device), sorted({tensor.is_cuda for tensor in tensors})))
        return next(self.parameters()).device

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        device = self.spec("in a step")
        x, y = batch
        return super().training_step((x.to(device).to(self.head.weight.device), y.to(self.device)), batch_idx)

    def on_train_epoch_end(self) -> None:
        device = self.spec("in a hook")
        self.cpu()
        self.to(device)
        for copied in (copy.deepcopy(self.layers), pickle.loads(pickle.dumps(self.layers))):
            self.found += [float(parameter.detach().norm()) for parameter in copied.parameters()]


@habit(plain=False, without={"is_kept": False})
class ViewsFromTheBeginning(Layers):
    """Views of weights, by `.data` and detached, that are kept from before ranks hold a part of the module."""

    is_kept = True

    def __init__(self) -> None:
        super().__init__()
        self.views = [layer.linear.weight.data.view(-1) for layer in self.layers]
        self.rows = {"last": self.head.weight.detach()[:2]}

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        return loss * (1 + 0.1 * (self.views[0].mean() + self.rows["last"].sum())) if self.is_kept else loss

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if self.is_kept:
            self.log("norms", sum(view.norm() for view in self.views))
            self.views[3].clamp_(-0.2, 0.2)
            self.rows["last"][0] = 0.1


class AveragedCodebook(nn.Module):
    """The widespread VQ-VAE layer whose averages are new parameters in each step (van den Oord et al., 2017, A.1)."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(3)
        self.embedding = nn.Embedding.from_pretrained(torch.randn(6, WIDTH, generator=generator), freeze=False)
        self.sums = nn.Parameter(torch.randn(6, WIDTH, generator=generator))
        self.register_buffer("sizes", torch.zeros(6))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        codes = self.embedding.weight
        distances = (x**2).sum(1, keepdim=True) + (codes**2).sum(1) - 2 * x @ codes.t()
        nearest = distances.argmin(1, keepdim=True)
        chosen = torch.zeros(len(x), 6, device=x.device).scatter_(1, nearest, 1)
        found = chosen @ codes
        if self.training:
            self.sizes = self.sizes * 0.99 + 0.01 * chosen.sum(0)
            total = self.sizes.data.sum()
            self.sizes = (self.sizes + 1e-5) / (total + 6e-5) * total
            self.sums = nn.Parameter(self.sums * 0.99 + 0.01 * (chosen.t() @ x))
            self.embedding.weight = nn.Parameter(self.sums / self.sizes.unsqueeze(1))
        share = chosen.mean(0)
        perplexity = torch.exp(-(share * torch.log(share + 1e-10)).sum())
        return 0.25 * F.mse_loss(found.detach(), x), x + (found - x).detach(), perplexity


@habit(plain=False, without={"is_quantized": False})
class CodebookOfNewParameters(Layers):
    is_quantized = True

    def __init__(self) -> None:
        super().__init__()
        self.codebook = AveragedCodebook()

    def chain(self) -> list[str]:
        return ["layers.0", "layers.1", "codebook", "layers.2", "layers.3"]

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        x = self.layers[1](self.layers[0](x))
        loss, found, perplexity = self.codebook(x)
        if not self.is_quantized:
            return F.cross_entropy(self.head(self.layers[3](self.layers[2](x))), y)
        self.log("perplexity", perplexity)
        return loss + F.cross_entropy(self.head(self.layers[3](self.layers[2](found))), y)
