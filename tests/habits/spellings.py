"""How steps describe, print, make, convert, copy and compare the values of stages."""

from __future__ import annotations

import copy
import io
import math
import os
import pickle
import weakref
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import Variable

from tests.habits.modules import WIDTH, Layers, Noting
from tests.habits.table import habit


@habit(observed=["texts"])
class Formatted(Layers):
    """The loss in format strings, rounded, and as a number of each kind."""

    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.texts.append(f"{loss:.3f} {float(loss):.2f} {round(loss.item(), 3)} {int(loss * 10)} {bool(loss > 1)}")
        self.texts.append("%.2f" % loss)  # noqa: UP031
        return loss


@habit(observed=["found"])
class Described(Layers):
    """All that can be asked of a tensor without its data."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[Any] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        h = self.features(x)
        self.found.append((h.type(), h.device.type, h.is_cuda, h.layout is torch.strided, h.element_size()))
        self.found.append((h.stride(), h.is_contiguous(), h.t().is_contiguous(), h.ndim, h.numel(), h.nelement()))
        self.found.append((h.requires_grad, h.is_leaf, h.is_floating_point(), isinstance(h, torch.FloatTensor)))
        self.found.append((len(h), h.size(-1), tuple(h.shape)))
        return F.cross_entropy(self.head(h / math.sqrt(h.size(-1))), y)


@habit(observed=["found"])
class DescribedByMemory(Noting):
    """What torch looks up in a tensor's memory or graph, though its shape and strides tell the same."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        h = self.features(x)
        self.found.append((h.is_pinned(), h.is_shared(), h.is_neg(), h.detach().output_nr))
        self.found.append((h.is_same_size(x), h.is_same_size(other=h), torch.is_same_size(x, h[1:])))
        self.found.append((torch.is_signed(h), torch.is_signed(h.argmax(1)), torch.is_signed(h > 0)))
        return F.cross_entropy(self.head(h), y)

    def on_train_epoch_end(self) -> None:
        for parameter in self.parameters():
            self.found.append((parameter.is_pinned(), parameter.is_neg(), parameter.output_nr))
            self.found.append((parameter.is_same_size(self.head.bias), torch.is_same_size(self.head.bias, parameter)))


@habit()
class MadeLikeHidden(Layers):
    """Tensors that are made with the shape, the type or the device of a hidden value."""

    def features(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
            x = x + x.new_ones(len(x), 1) * torch.arange(x.size(1), device=x.device).type_as(x) / 10
            x = x + torch.zeros(x.shape).to(x) + torch.full_like(x, 0.1) + torch.tensor(x.shape[1]) / 100
            x = x + x.new_tensor([0.1]) + x.new_zeros(x.shape) + torch.empty_like(x).fill_(0.1)
        return x


@habit()
class LoopsOverClasses(Layers):
    """A loop over the classes of the batch, as tensors and as numbers, with the hidden rows of each."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        h = self.features(x)
        loss = F.cross_entropy(self.head(h), y)
        for cls in torch.unique(y):
            loss = loss + 0.01 * (h[y == cls] - h[y == cls].mean(0)).pow(2).mean()
        for cls in y.unique().tolist():
            loss = loss + 0.01 * h[y == cls].mean()
        return loss


@habit()
class HardestExamples(Layers):
    """The loss of the hardest half alone, after features that were sorted and put back."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        h = self.layers[1](self.layers[0](x))
        values, places = h.topk(3, -1)
        ordered, order = torch.sort(h, -1)
        h = (h + ordered.gather(-1, order.argsort(-1)) * 0.1).scatter_add(-1, places, values * 0.1)
        losses = F.cross_entropy(self.head(self.layers[3](self.layers[2](h))), y, reduction="none")
        return losses.topk(max(1, len(losses) // 2)).values.mean()


@habit()
class PartsOfLayerBefore(Layers):
    """Each layer's result is split, and its parts are used after the next layer."""

    def features(self, x: Tensor) -> Tensor:
        parts: Any = None
        for layer in self.layers:
            x = layer(x)
            if parts is not None:
                x = torch.cat([x[:, :4] + parts[1], x[:, 4:] - parts[0]], -1)
            parts = x.split(4, -1)
        return x


@habit()
class ViewsAcrossLayers(Layers):
    """A view is taken before a layer and used behind it, and results are written into through other views."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        first = self.layers[0](x)
        flat = first.view(-1)
        h = self.layers[1](first)
        kept = first.clone()
        flat = flat * 2
        h = self.layers[3](self.layers[2](h + flat.view_as(first)))
        h += kept
        h[:, 0] = 0
        part = h[:, 1:3]
        part *= 2
        h.clamp_(-3, 3)
        return F.cross_entropy(self.head(h), y)


@habit(observed=["caught"])
class ErrorsCaught(Layers):
    """Errors of torch are caught in the step: shapes that do not go together."""

    def __init__(self) -> None:
        super().__init__()
        self.caught = 0

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        h = self.features(x)
        try:
            h = h + torch.ones(3, 5)
        except RuntimeError:
            self.caught += 1
        try:
            h.view(7)
        except RuntimeError:
            self.caught += 1
        return F.cross_entropy(self.head(h), y)


@habit(observed=["found"])
class TensorsAsKeys(Layers):
    """Tensors as keys of dictionaries, in sets, by identity and by weak references."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[Any] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        places: dict[Tensor, int] = {}
        for layer in self.layers:
            x = layer(x)
            places[x] = len(places)
        values = list(places)
        self.found.append((places[values[2]], any(value is x for value in values), weakref.ref(x)() is x))
        self.found.append(len({*values, *values}))
        return F.cross_entropy(self.head(x), y)


@habit(observed=["sums"])
class SavedInStep(Layers):
    """torch.save into memory, copy, deepcopy and pickle, of a hidden value."""

    def __init__(self) -> None:
        super().__init__()
        self.sums: list[Any] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        features = self.features(x)
        h = features.detach()
        file = io.BytesIO()
        torch.save(h, file)
        file.seek(0)
        copies = torch.load(file), copy.copy(h), copy.deepcopy(h), pickle.loads(pickle.dumps(h))
        self.sums.append([float(each.sum()) for each in copies])
        return F.cross_entropy(self.head(features), y)


@habit()
class DtypesMixed(Layers):
    """Between layers it goes by double and bfloat16, and the loss is computed in double."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        h = (self.layers[0](x).double() * 1.0000001).float()
        h = self.layers[1](h).bfloat16().float()
        h = self.layers[3](self.layers[2](h))
        return F.cross_entropy(self.head(h).double(), y).float()


@habit()
class EvaluatesTeacherInStep(Layers):
    """The module itself as a teacher: `self.eval()` and back in the step, without gradients."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        with torch.no_grad():
            self.eval()
            target = self(x).softmax(-1)
            self.train()
        loss = F.cross_entropy(self(x), y)
        return loss + F.kl_div(self(x + 0.1).log_softmax(-1), target, reduction="batchmean")


@habit(plain=False)
class SignOfZero(Layers):
    """Zero in one step, minus zero in the next."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        hidden = self.features(x)
        zero = -0.0 if self.global_step % 2 else 0.0
        return F.cross_entropy(self.head(hidden), y) + (1 / hidden.detach().clamp(zero, zero)).sign().mean()


@habit(observed=["found"], shows=False)
class Variables(Noting):
    """Variables, types and `new` of old code, of the batch, of features and of parameters."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = Variable(batch[0]), Variable(data=batch[1], requires_grad=False)
        h = self.features(x)
        self.found += [h.type(), isinstance(h, Variable), h.type() == x.type(), isinstance(y, torch.LongTensor)]
        noise = h.data.new(h.size()).fill_(0.1) * torch.FloatTensor(h.size(0), 1).fill_(0.5)
        h = h.type(torch.FloatTensor) + noise + h.new([0.5])
        leaf = Variable(h, requires_grad=True)
        (gradient,) = torch.autograd.grad(self.layers[3](leaf).pow(2).sum(), leaf)
        self.found += [leaf.is_leaf, leaf.requires_grad, Variable(h).requires_grad]
        mask = torch.ByteTensor(h.shape[0]).fill_(1).bool()
        loss = F.cross_entropy(self.head(h - 0.01 * Variable(gradient))[mask], y) + Variable(h).mean()
        self.log("loss", Variable(loss))
        return loss

    def on_train_epoch_end(self) -> None:
        self.found += [Variable(parameter).sum().item() for parameter in self.parameters()]


@habit(plain=False)
class EmptyWhereUnread(Layers):
    """A tensor that was never filled, whose numbers are chosen nowhere, as in torch's von Mises distribution."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        h = self.features(x)
        torch.full(tuple(h.shape), float(os.getpid()))  # gives its memory back, which is another on each rank
        nothing = torch.empty(h.shape)
        chosen = torch.where(torch.ones(h.shape, dtype=torch.bool), h, nothing)
        angles = torch.distributions.VonMises(h.detach().mean(-1).tanh(), torch.ones(len(h))).sample()
        return F.cross_entropy(self.head(chosen + angles[:, None].to(h.device) * 0.01), y)


@habit()
class ShapesOfUnusedLayers(Layers):
    """Layers that give others their shape or dtype alone get no gradients, and with them no decay."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        h = self.layers[0](x)
        unused = self.layers[3](self.layers[1](h))
        scale = self.scale.expand_as(unused).type_as(unused).to(unused) * x.flatten().view_as(unused)
        return F.cross_entropy(self.head(h + self.layers[2](scale.flatten().reshape_as(unused))), y)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.1, weight_decay=0.1)


@habit()
class OneOfTwoResultsUnused(Layers):
    """What makes a result that nobody uses gets no gradients, though the same call gives one that is used."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        h = self.layers[0](x)
        rows, _ = torch.meshgrid(h.mean(1), self.layers[3](self.layers[1](h)).mean(0), indexing="ij")
        return F.cross_entropy(self.head(self.layers[2](rows * x)), y)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.1, weight_decay=0.1)


@habit(shows=False)
class LayersMovedToTheData(Layers):
    """A step moves layers to where its data is, and all others to the CPU, as mixtures of experts do."""

    def features(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            layer.to(x.device)
            x = layer.to(x.device, x.dtype)(x)
        self.head.cpu()
        return x
