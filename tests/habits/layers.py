"""Layers of torch.nn that do more than a linear one: with states, attention, statistics, functions and draws."""

from __future__ import annotations

import random
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.habits.modules import WIDTH, Evaluated, Layer, Layers, Normed
from tests.habits.table import habit


@habit(plain=False)
class RecurrentLayers(Layers):
    """A GRU in both directions, and an LSTM of two layers with dropout, in each layer."""

    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gru = nn.GRU(2, 4, batch_first=True, bidirectional=True)
            self.lstm = nn.LSTM(2, 2, num_layers=2, dropout=0.2)

        def forward(self, x: Tensor) -> Tensor:
            outputs, _ = self.gru(x.view(len(x), 4, 2))
            _, (hidden, cells) = self.lstm(x.view(4, len(x), 2))
            return x + outputs.mean(1) + torch.cat([hidden[0], cells[1], hidden[1], cells[0]], -1)

    layer = Recurrent


@habit(observed=["deviations"], plain=False)
class AttentionWeightsKept(Layers):
    """Attention with dropout and a causal mask, whose weights layers keep for a hook."""

    class Attending(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = nn.MultiheadAttention(WIDTH, 2, dropout=0.1, batch_first=True)
            self.norm = nn.LayerNorm(WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            tokens = x[:, None].expand(-1, 3, -1) * torch.tensor([1.0, 2.0, 3.0])[None, :, None]
            mask = torch.triu(torch.ones(3, 3, dtype=torch.bool), 1)
            output, weights = self.attention(tokens, tokens, tokens, attn_mask=mask, need_weights=True)
            self.weights = weights.detach()
            return self.norm(x + output.mean(1))

    layer = Attending

    def __init__(self) -> None:
        super().__init__()
        self.deviations: list[Any] = []

    def on_train_batch_end(self, *_: Any) -> None:
        self.deviations.append([float(layer.weights.std()) for layer in self.layers])


@habit(calls=("fit", "predict", "test"), shows=False)
class PaddedEncoder(Evaluated):
    """nn.TransformerEncoder over sequences with padding: in evaluation it leaves the padding out, and zeros there."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(WIDTH, 2, 16, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 3, norm=nn.LayerNorm(WIDTH))

    def chain(self) -> list[str]:
        return ["layers.0", "layers.2", *(f"encoder.layers.{i}" for i in range(3))]

    def features(self, x: Tensor) -> Tensor:
        # The longest sequence may be shorter than the tensor, and one has a single element.
        lengths = 1 + torch.arange(len(x)) % 4
        is_padding = torch.arange(5) >= lengths[:, None]
        tokens = super().features(x)[:, None] + torch.linspace(-1, 1, 5)[:, None]
        # The mean takes in what is at the padding.
        return self.encoder(tokens, src_key_padding_mask=is_padding).mean(1)


@habit(observed=["outputs"], shows=False)
class TransformerInHook(Evaluated):
    """nn.Transformer with padding on both sides, which a hook calls in evaluation, too."""

    def __init__(self) -> None:
        super().__init__()
        self.transformer = nn.Transformer(WIDTH, 2, 2, 2, 16, dropout=0.0, batch_first=True)
        self.outputs: list[Any] = []

    def chain(self) -> list[str]:
        return ["layers.0", "layers.2", "transformer.encoder.layers.1", "transformer.decoder.layers.0"]

    def features(self, x: Tensor) -> Tensor:
        is_padding = torch.arange(3) > torch.arange(len(x))[:, None] % 3
        tokens = super().features(x)[:, None] * torch.linspace(-1, 1, 3)[:, None]
        masks = {"src_key_padding_mask": is_padding, "tgt_key_padding_mask": is_padding}
        return self.transformer(tokens, tokens, **masks, memory_key_padding_mask=is_padding).mean(1)

    @torch.no_grad()
    def on_train_epoch_end(self) -> None:
        self.eval()
        self.outputs.append(self(torch.linspace(-1, 1, 5 * WIDTH).view(5, WIDTH)).tolist())
        self.train()


@habit(plain=False)
class TransformerEncoderLayers(Evaluated):
    """nn.TransformerEncoderLayer with dropout, which takes a path of its own in evaluation."""

    class Encoding(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoder = nn.TransformerEncoderLayer(WIDTH, 2, 16, dropout=0.1, batch_first=True)

        def forward(self, x: Tensor) -> Tensor:
            return self.encoder(x[:, None].repeat(1, 2, 1)).sum(1)

    layer = Encoding


@habit(plain=False)
class NormsOfEveryKind(Evaluated):
    """Convolution, batch norm with cumulative averages, instance norm with statistics, group norm, ReLU in place."""

    class Normed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            norms = nn.BatchNorm1d(2, momentum=None), nn.InstanceNorm1d(2, affine=True, track_running_stats=True)
            self.body = nn.Sequential(nn.Conv1d(2, 2, 3, padding=1), *norms, nn.GroupNorm(1, 2))

        def forward(self, x: Tensor) -> Tensor:
            return x + F.relu(self.body(x.view(len(x), 2, 4)), inplace=True).flatten(1)

    layer = Normed


class SineAndCosine(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(x)
        ctx.scale = scale
        return x.sin() * scale, x.cos()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        (x,) = ctx.saved_tensors
        return gradients[0] * x.cos() * ctx.scale - gradients[1] * x.sin(), None


@habit()
class FunctionOfTwoResults(Layers):
    """A function of its own with a number as argument and two results."""

    class Waves(Layer):
        def forward(self, x: Tensor) -> Tensor:
            sine, cosine = SineAndCosine.apply(super().forward(x), 1.5)
            return sine + 0.1 * cosine

    layer = Waves


class SparseWeights(torch.autograd.Function):
    """Sparsemax, after Martins and Astudillo (2016)."""

    @classmethod
    def forward(cls, ctx: Any, x: Tensor, dim: int = -1, k: int | None = None) -> Tensor:
        ctx.dim = dim
        ordered = x.sort(dim=dim, descending=True)[0]
        places = torch.arange(1, x.shape[dim] + 1, dtype=x.dtype)
        sums = ordered.cumsum(dim) - 1
        size = (places * ordered > sums).sum(dim, keepdim=True)
        result = torch.clamp(x - sums.gather(dim, size - 1) / size, min=0)
        ctx.save_for_backward(size, result)
        return result

    @classmethod
    def backward(cls, ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        size, result = ctx.saved_tensors
        gradient = gradient * (result != 0)
        mean = gradient.sum(ctx.dim, keepdim=True) / size
        return torch.where(result != 0, gradient - mean, gradient), None, None


def sparse_weights(x: Tensor, dim: int = -1, k: int | None = None) -> Tensor:
    return SparseWeights.apply(x, dim, k)


@habit()
class FunctionOfParameters(Layers):
    """A function of its own of a parameter alone, and what it gives masks the layer's input."""

    class Masked(Layer):
        def __init__(self) -> None:
            super().__init__()
            self.mask = nn.Parameter(torch.rand(2, WIDTH))
            self.choose = partial(sparse_weights, dim=-1)

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(torch.einsum("nd,bd->bnd", self.choose(self.mask), x).sum(1))

    layer = Masked


@habit(plain=False)  # it goes by the batch's number
class HookOfSomeSteps(Layers):
    """A forward hook that some steps register and remove again, and that changes what a layer returns."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        collected: list[Tensor] = []

        def double(module: nn.Module, arguments: Any, result: Tensor) -> Tensor:
            collected.append(result)
            return result * 2

        hooks = [self.layers[number].linear.register_forward_hook(double) for number in (0, 2) if batch_idx == 1]
        logits = self(x)
        for hook in hooks:
            hook.remove()
        return F.cross_entropy(logits, y) + 0.01 * sum(value.pow(2).mean() for value in collected)


@habit(plain=False)
class LayersShuffled(Layers):
    """Layers are called in an order that Python's and numpy's generators draw."""

    def features(self, x: Tensor) -> Tensor:
        order = list(range(len(self.layers)))
        random.shuffle(order)
        if np.random.rand() < 0.3:
            order = order[::-1]
        for number in order:
            x = self.layers[number](x)
        return x


@habit(plain=False)
class DrawsOfEveryKind(Layers):
    """Dropout of several kinds, randn_like, rand, bernoulli, and distributions around hidden values."""

    def features(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = F.alpha_dropout(F.dropout(layer(x), 0.2, self.training), 0.1, self.training)
            x = x + 0.01 * torch.randn_like(x) + 0.01 * torch.rand(x.shape)
        x = x + torch.bernoulli(torch.full_like(x, 0.5)) + 0.1 * torch.distributions.Normal(x.detach(), 1.0).sample()
        return x + 0.1 * torch.distributions.Normal(x, 1.0).rsample()


@habit()
class NormedOnALaterStage(Layers):
    """A batch norm is used on its stage, and then, with other weights, on a later one."""

    layer = Normed

    def features(self, x: Tensor) -> Tensor:
        first = self.layers[0]
        x = self.layers[3](first(x))
        halved = {name: parameter * 0.5 for name, parameter in first.named_parameters()}
        return x + torch.func.functional_call(first, halved, (x,))
