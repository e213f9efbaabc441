"""Norms that see data twice, weights that are tied, and weights that are computed from others."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_, parametrizations, parametrize, weight_norm
from torch.utils.checkpoint import checkpoint

from tests.habits.modules import SAMPLES, WIDTH, Layer, Layers, Normed, Noting
from tests.habits.table import habit


@habit(plain=False)
class SimCLRInTwoCalls(Layers):
    """Two augmented views, each through batch norms in a call of its own."""

    layer = Normed

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, _ = batch
        views = [x + 0.2 * torch.randn_like(x), x * (1 + 0.2 * torch.randn_like(x))]
        first, second = (F.normalize(self.features(view), dim=1) for view in views)
        z = torch.cat([first, second])
        similarity = (z @ z.T / 0.5).masked_fill(torch.eye(len(z), dtype=torch.bool), -9e15)
        target = torch.arange(len(z)).roll(len(x))
        return F.cross_entropy(similarity, target)


@habit(plain=False)
class SimCLRConcatenated(SimCLRInTwoCalls):
    """The same with both views in one call."""

    def features(self, x: Tensor) -> Tensor:
        return super().features(torch.cat([x, x.flip(0)]))[: len(x)]


@habit(without={"visits": 1})
class LayerVisitedTwiceInAStage(Layers):
    """A batch norm's module is called twice by its own stage."""

    layer = Normed
    visits = 2

    def features(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            for _ in range(self.visits):
                x = layer(x)
        return x


@habit()
class BatchNormInCheckpoint(Layers):
    """A batch norm that is recomputed in backward, and sees its data twice."""

    layer = Normed

    def features(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False)
        return x


@habit(without={"epoch": 100})
class BatchNormsFrozenLater(Layers):
    """Batch norms are put into eval mode from the second epoch on."""

    layer = Normed
    epoch = 1

    def on_train_epoch_start(self) -> None:
        for module in self.modules():
            if isinstance(module, nn.BatchNorm1d):
                module.train(self.current_epoch < self.epoch)


class TiedWords(Layers):
    """Tokens in and tokens out."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(12, WIDTH)
        self.head = nn.Linear(WIDTH, 12, bias=False)

    @staticmethod
    def batch(generator: torch.Generator) -> Any:
        return torch.randint(0, 12, (SAMPLES, 5), generator=generator)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.features(self.embedding(tokens)))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return F.cross_entropy(self(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())


@habit()
class EmbeddingTiedToHead(TiedWords):
    """The head's weight is the embedding's."""

    def __init__(self) -> None:
        super().__init__()
        self.head.weight = self.embedding.weight


@habit()
class EmbeddingUsedAsHead(TiedWords):
    """`F.linear(x, self.embedding.weight)`"""

    def forward(self, tokens: Tensor) -> Tensor:
        return F.linear(self.features(self.embedding(tokens)), self.embedding.weight)


@habit()
class FirstAndLastLayerTied(Layers):
    """Two layers share a Linear."""

    def __init__(self) -> None:
        super().__init__()
        self.layers[3].linear = self.layers[0].linear


@habit()
class AutoencoderTransposed(Layers):
    """Decoders use the encoders' weights transposed, so each is used on two stages."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, _ = batch
        code = self.features(x)
        for layer in reversed(self.layers):
            code = torch.tanh(F.linear(code, layer.linear.weight.t()))
        return F.mse_loss(code, x)


@habit(without={"norm": nn.Identity})
class NormShared(Layers):
    """One LayerNorm with weights between all layers."""

    norm: Any = staticmethod(lambda: nn.LayerNorm(WIDTH))

    def __init__(self) -> None:
        super().__init__()
        self.shared = self.norm()

    def features(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = self.shared(layer(x))
        return x


@habit()
class WeightNorm(Layers):
    """torch's old weight_norm, which recomputes the weight in a hook."""

    def __init__(self) -> None:
        super().__init__()
        for layer in self.layers:
            layer.linear = weight_norm(layer.linear)


@habit()
class WeightNormParametrised(Layers):
    """The new one, as a parametrization."""

    def __init__(self) -> None:
        super().__init__()
        for layer in self.layers:
            layer.linear = parametrizations.weight_norm(layer.linear)


@habit()
class SpectralNorm(Layers):
    """Spectral norm, whose power iteration changes a buffer in each forward."""

    def __init__(self) -> None:
        super().__init__()
        for layer in self.layers:
            layer.linear = parametrizations.spectral_norm(layer.linear)


class Symmetric(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.triu() + x.triu(1).transpose(-1, -2)


@habit()
class OwnParametrisation(Layers):
    """Symmetric weights, cached within the step, one of them read by another stage."""

    def __init__(self) -> None:
        super().__init__()
        for layer in self.layers:
            parametrize.register_parametrization(layer.linear, "weight", Symmetric())

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        with parametrize.cached():
            loss = super().training_step(batch, batch_idx)
            return loss + 0.01 * self.layers[0].linear.weight.diagonal().pow(2).sum()


class Shift(Layers):
    """A parameter that every layer uses twice, so that stages add several gradients to each other's."""

    scale = 1.0

    def __init__(self) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.randn(3, WIDTH))

    def shifted(self, x: Tensor) -> Tensor:
        return x + self.scale * self.shift.sum(0) * self.shift.mean(0)

    def features(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = self.shifted(layer(x))
        return x


@habit(without={"scale": 0.0})
class ShiftInEveryLayer(Shift):
    """As it is."""


@habit(without={"scale": 0.0})
class ShiftWithReadLoss(Shift):
    """The loss is read, so micro-batches run one by one."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.log("read", loss.item())
        return loss


@habit(without={"scale": 0.0})
class ShiftWithDecay(Shift):
    """The norms of all parameters are in the loss: one more use, after those of all stages."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        for parameter in self.parameters():
            loss = loss + 0.01 * parameter.pow(2).sum()
        return loss


@habit(without={"scale": 0.0})
class ShiftInTwoRounds(Shift):
    """The layers run twice, so that the first stage comes after the last one."""

    def features(self, x: Tensor) -> Tensor:
        return super().features(super().features(x) * 0.1)


@habit(without={"scale": 0.0})
class ShiftFromSecondEpoch(Shift):
    """It is not used before."""

    def shifted(self, x: Tensor) -> Tensor:
        return super().shifted(x) if self.current_epoch else x


@habit(without={"scale": 0.0})
class ShiftByHand(Shift):
    """Manual optimization with two backwards."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        optimizer = self.optimizers()
        for inputs in (x, 0.5 * x):
            optimizer.zero_grad()
            self.manual_backward(F.cross_entropy(self(inputs), y))
            optimizer.step()


@habit(without={"scale": 0.0})
class ShiftInCheckpoints(Shift):
    """Its uses are within checkpointed functions."""

    def features(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = checkpoint(lambda x, layer=layer: self.shifted(layer(x)), x, use_reentrant=False)
        return x


class Coupled(Layers):
    """A penalty is computed from the weights of several stages at once."""

    weight = 0.01

    def penalty(self) -> Tensor:
        raise NotImplementedError

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        return F.cross_entropy(self(x), y) + self.weight * self.penalty()


@habit(without={"weight": 0.0})
class NeighboursMultiplied(Coupled):
    """Products of each layer's weight and the next one's."""

    def penalty(self) -> Tensor:
        pairs = zip(self.layers[:-1], self.layers[1:], strict=True)
        return torch.stack([(a.linear.weight @ b.linear.weight).pow(2).sum() for a, b in pairs]).sum()


@habit(without={"weight": 0.0})
class WeightsStacked(Coupled):
    """The spread of the layers' weights around their mean."""

    def penalty(self) -> Tensor:
        stacked = torch.stack([layer.linear.weight for layer in self.layers])
        return (stacked - stacked.mean(0)).pow(2).sum()


@habit(without={"weight": 0.0})
class FirstWeightInAllLayers(Layers):
    """All later layers use the weight of the first one."""

    weight = 0.1

    def features(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x) + self.weight * x @ self.layers[0].linear.weight.t()
        return x


@habit(plain=False)
class ClipsPartlySharedLayer(Layers):
    """Clipping of a layer of which every rank has a part, and one alone the rest."""

    def __init__(self) -> None:
        super().__init__()
        self.layers[3].linear = self.layers[0].linear
        self.layers[3].extra = nn.LayerNorm(WIDTH)

    def features(self, x: Tensor) -> Tensor:
        return self.layers[3].extra(super().features(x))

    def on_train_batch_start(self, *_: Any) -> None:
        clip_grad_norm_(self.layers[3].parameters(), 0.1)

    def on_train_batch_end(self, *_: Any) -> None:
        clip_grad_norm_(self.layers[3].parameters(), 0.1)
        self.seen = [p.grad.sum() for p in self.layers[3].parameters()]


class Recurring(Layers):
    """A recurrent layer, whose weights take part several times in each call."""

    def __init__(self) -> None:
        super().__init__()
        self.recurrent = nn.GRU(2, 2, batch_first=True)

    def again(self, x: Tensor) -> Tensor:
        found, last = self.recurrent(x.reshape(-1, 4, 2))
        return found.reshape(-1, WIDTH) + x * last.mean()


@habit(plain=False)
class RecurrentLayerOnTwoStages(Recurring):
    """The same recurrent layer at the beginning and at the end."""

    def features(self, x: Tensor) -> Tensor:
        return self.again(super().features(self.again(x)))


@habit(plain=False)
class RecurrentLayerBetweenLayers(Recurring):
    """The same recurrent layer, of one stage, after each layer."""

    beside = {"recurrent": "layers.1"}

    def features(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = self.again(layer(x))
        return x


@habit(plain=False)
class RecurrentLayerDifferentiated(RecurrentLayerBetweenLayers):
    """Gradients of the layer's weights that a step takes for itself."""

    def features(self, x: Tensor) -> Tensor:
        x = super().features(x)
        with torch.enable_grad():
            [slope] = torch.autograd.grad(self.again(x.detach()).sum(), self.recurrent.weight_hh_l0)
        return x * (1 + 0.1 * slope.sum())


@habit(shows=False)
class BiasOfALaterLayer(Layers):
    """The bias of a layer also scales what is given to that layer."""

    def features(self, x: Tensor) -> Tensor:
        x = self.layers[1](self.layers[0](x))
        return self.layers[3](self.layers[3](x) + x * self.layers[3].linear.bias)


@habit(shows=False)
class LateTwiceThenEarly(Layers):
    """A layer mixes the last features twice, and then the first ones."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(WIDTH, WIDTH)

    def features(self, x: Tensor) -> Tensor:
        early = self.layers[0](x)
        late = self.layers[3](self.layers[2](self.layers[1](early)))
        return self.mix(torch.tanh(self.mix(late))) + self.mix(early)


class TiedEnds(Noting):
    """The first and the last layer share their weights, and gradients accumulate over batches."""

    def __init__(self) -> None:
        super().__init__()
        self.layers[3].linear = self.layers[0].linear


@habit(plain=False, shows=False, observed=["found"], trainer={"accumulate_grad_batches": 2}, batches=4)
class TiedGradientsWithinAWindow(TiedEnds):
    """A hook notes norms after each backward."""

    def on_after_backward(self) -> None:
        self.found += [p.grad.norm() for p in self.parameters() if p.grad is not None]


@habit(plain=False, shows=False, observed=["found"], trainer={"accumulate_grad_batches": 2}, batches=4)
class LargeTiedGradientsWithinAWindow(TiedEnds):
    """The same with weights above a megabyte, which are added up on each stage first where nobody looks."""

    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.Embedding(40_000, WIDTH)

    def features(self, x: Tensor) -> Tensor:
        index = x.detach().argmax(1)
        x = super().features(x + self.wide(index))
        return x + self.wide(index + 7)

    def on_train_batch_end(self, *_: Any) -> None:
        self.found += [p.grad.norm() for p in self.parameters() if p.grad is not None]


@habit(plain=False, shows=False, observed=("found",))
class TiedTransposed(Noting):
    """The first and the last layer share a weight that is stored transposed; a hook reads its gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.layers[0].linear.weight = nn.Parameter(torch.randn(WIDTH, WIDTH).t() * 0.3)
        self.layers[3].linear.weight = self.layers[0].linear.weight

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.found.append(self.layers[0].linear.weight.grad[0].tolist())


class RecurrentLayer(Layer):
    def __init__(self) -> None:
        super().__init__()
        self.recurrent = nn.GRU(4, 4, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        found, last = self.recurrent(x.reshape(-1, 2, 4))
        return found.reshape(-1, WIDTH) + self.linear(x) * last.mean()


@habit(plain=False)
class SharedWeightBeforeItsStages(Layers):
    """The bias of two later stages' layer takes part twice on the first stage, and then scaled on one of the two."""

    def __init__(self) -> None:
        super().__init__()
        self.layers[1] = RecurrentLayer()
        self.layers[3].linear = self.layers[1].linear

    def features(self, x: Tensor) -> Tensor:
        x = self.layers[0](x) + torch.cat([layer.linear.bias for layer in self.layers]).mean()
        self.layers[0].requires_grad_(not self.layers[0].linear.bias.requires_grad)
        scaled = {name: p * 0.3 for name, p in self.layers[1].named_parameters()}
        return torch.func.functional_call(self.layers[1], scaled, (x,))


@habit(plain=False)
class SharedWeightInTwoBackwards(Layers):
    """Two backwards through one graph, in which a weight takes part before its stage and after it."""

    depth = 6

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        x = x @ self.layers[3].linear.weight.t() + self.layers[4](x)
        logits = self.head(self.layers[3](x))
        loss = F.cross_entropy(logits, y)
        self.manual_backward(loss, retain_graph=True)
        self.manual_backward(0.5 * F.cross_entropy(logits * 2, y))
        self.log("train_loss", loss)

    def on_train_batch_end(self, *_: Any) -> None:
        self.optimizers().step()


@habit(plain=False)
class FadesInByHand(Layers):
    """What an early layer gives is used on the next stage and then on its own, before a later backward of a step."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.critic = nn.Linear(WIDTH, 1)

    def generated(self, x: Tensor) -> Tensor:
        hidden = self.layers[0](x)
        later = self.layers[2](hidden)
        return torch.tanh(0.6 * self.layers[1].linear(hidden) + 0.4 * later)

    def training_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        optimizer = self.optimizers()
        made = self.generated(x.flip(1))
        loss = self.critic(self.layers[3](x)).square().mean() + self.critic(self.layers[3](made.detach())).mean()
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()
        loss = F.cross_entropy(self.head(made), y) - self.critic(self.layers[3](made)).mean()
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()
        self.log("train_loss", loss)
