"""What steps do with tensors every day: indices, masks, scatters, views, spectra, states kept between calls."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence, pad_sequence

from tests.habits.modules import CLASSES, WIDTH, Layers
from tests.habits.table import habit


class Middle(Layers):
    """Something is done to the features after each layer."""

    def between(self, x: Tensor) -> Tensor:
        return x

    def features(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = self.between(layer(x))
        return x


@habit()
class WrittenThroughViews(Middle):
    """A view of a view of the features is written into, and what it is a view of is used."""

    def between(self, x: Tensor) -> Tensor:
        x = x.clone()
        x.view(-1, 2, WIDTH // 2)[:, 0].mul_(0.5)
        x.t()[1] += 1.0
        x.unbind(1)[2].zero_() if not x.requires_grad else x.select(1, 2).zero_()
        return x


@habit()
class ChosenByWhere(Middle):
    """torch.where by the features' signs, with numbers and tensors."""

    def between(self, x: Tensor) -> Tensor:
        return torch.where(x > 0, x, torch.where(x < -1, -0.5, x * 0.1))


@habit()
class PutByIndex(Middle):
    """index_put_, index_add, masked_fill_, masked_scatter and scatter_add_ on features."""

    def between(self, x: Tensor) -> Tensor:
        rows, columns = torch.arange(len(x)), torch.arange(len(x)) % WIDTH
        x = x.index_put((rows, columns), x.new_tensor(0.3))
        y = x.clone()
        y.index_put_((rows, columns), x[rows, (columns + 1) % WIDTH], accumulate=True)
        y.masked_fill_(y > 2, 2.0)
        total = torch.zeros(WIDTH, len(x)).scatter_add_(0, x.argsort(1).t(), x.t())
        return y + total.t() + torch.zeros_like(y).index_add(0, rows.flip(0), x, alpha=0.1)


@habit()
class RowByRow(Middle):
    """A list comprehension over the rows of the features, and over time steps with a state."""

    def between(self, x: Tensor) -> Tensor:
        rows = [row / (1 + row.norm()) if i % 2 else row * 0.9 for i, row in enumerate(x)]
        state = x.new_zeros(len(x))
        steps = []
        for step in torch.stack(rows).unbind(1):
            state = 0.5 * state + step
            steps.append(state.unsqueeze(1))
        return torch.cat(steps, dim=1)


@habit()
class SelectedByMask(Layers):
    """A boolean mask that the data gives selects rows for the loss."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        mask = y != 0
        logits = self(x)
        loss = F.cross_entropy(logits[mask], y[mask], reduction="sum") / mask.sum().clamp(min=1)
        confident = logits.detach().softmax(1).max(1).values > 0.3
        return loss + 0.1 * logits[confident].pow(2).sum()


@habit()
class Attention(Middle):
    """nn.MultiheadAttention with a padding mask and a causal mask, its weights used as well."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.ModuleList([nn.MultiheadAttention(4, 2, batch_first=True) for _ in self.layers])
        self.count = 0

    def features(self, x: Tensor) -> Tensor:
        padding = x.view(len(x), 2, 4)[..., 0] > 1.5
        padding[:, 0] = False
        causal = torch.triu(torch.ones(2, 2, dtype=torch.bool), 1)
        for layer, attention in zip(self.layers, self.attention, strict=True):
            h = layer(x).view(len(x), 2, 4)
            out, weights = attention(h, h, h, key_padding_mask=padding, attn_mask=causal)
            x = (out + weights.mean()).reshape(len(x), -1)
        return x


@habit()
class PackedAndPadded(Layers):
    """Sequences of lengths that the data gives are packed for an LSTM, and padded again."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(2, WIDTH, batch_first=True)

    def features(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        lengths = 1 + (x.detach() > 0).sum(1).clamp(max=3)
        packed = pack_padded_sequence(x.view(len(x), 4, 2), lengths.cpu(), batch_first=True, enforce_sorted=False)
        out, (h, _) = self.lstm(packed)
        padded, _ = pad_packed_sequence(out, batch_first=True)
        return h[-1] + padded.sum(1)


@habit()
class PaddedSequences(Layers):
    """Rows of different lengths, as pad_sequence takes them."""

    def features(self, x: Tensor) -> Tensor:
        x = self.layers[1](self.layers[0](x))
        x = pad_sequence([row[: 4 + i % 4] for i, row in enumerate(x)], batch_first=True)
        x = F.pad(x, (0, WIDTH - x.shape[1]))
        return self.layers[3](self.layers[2](x))


@habit()
class CodebookThroughData(Layers):
    """A VQ-VAE's codebook that moving averages update through `.data`."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(3)
        self.register_buffer("codes", torch.randn(6, WIDTH, generator=generator))
        self.register_buffer("sizes", torch.ones(6))

    def features(self, x: Tensor) -> Tensor:
        x = self.layers[1](self.layers[0](x))
        with torch.no_grad():
            nearest = torch.cdist(x, self.codes).argmin(1)
            chosen = F.one_hot(nearest, 6).float()
            self.sizes.mul_(0.9).add_(chosen.sum(0), alpha=0.1)
            self.codes.data.mul_(0.9).add_(0.1 * (chosen.t() @ x) / self.sizes[:, None])
        x = x + (self.codes[nearest] - x).detach()
        return self.layers[3](self.layers[2](x))


@habit()
class ContrastiveQueue(Layers):
    """MoCo's queue of keys, with a place to write at that is a buffer."""

    def __init__(self) -> None:
        super().__init__()
        drawn = torch.randn(WIDTH, 12, generator=torch.Generator().manual_seed(1))
        self.register_buffer("queue", F.normalize(drawn, dim=0))
        self.register_buffer("place", torch.zeros(1, dtype=torch.long))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        q = F.normalize(self.features(x), dim=1)
        logits = q @ self.queue.clone().detach()
        place = int(self.place)
        self.queue[:, place : place + len(q)] = q.detach().t()
        self.place[0] = (place + len(q)) % 12
        return F.cross_entropy(logits, torch.zeros(len(q), dtype=torch.long)) + F.cross_entropy(self.head(q), y)


@habit()
class Complex(Middle):
    """Complex numbers: rotary embeddings as LLaMA's first code had them."""

    def between(self, x: Tensor) -> Tensor:
        angles = torch.polar(torch.ones(4), torch.arange(4) * 0.3)
        rotated = torch.view_as_complex(x.reshape(len(x), 4, 2).float().contiguous()) * angles
        return torch.view_as_real(rotated).flatten(1) + rotated.abs().repeat(1, 2) + rotated.real.sum() * 0.01


@habit()
class Spectra(Middle):
    """torch.fft between the layers, as in FNet and Fourier neural operators."""

    def between(self, x: Tensor) -> Tensor:
        return x + torch.fft.irfft(torch.fft.rfft(x, dim=-1) * (0.5 + 0.1j), n=WIDTH) + torch.fft.fft2(x).real * 0.1


@habit()
class BoundedEmbedding(Layers):
    """Embeddings with padding_idx and max_norm, which writes into its weight."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(CLASSES, WIDTH, padding_idx=0, max_norm=1.0)
        self.later = nn.Embedding(CLASSES, WIDTH, max_norm=0.5, norm_type=1.0)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        features = self.layers[1](self.layers[0](x + self.embedding(y)))
        return F.cross_entropy(self.head(self.layers[3](self.layers[2](features + self.later(y)))), y)


@habit()
class SpectralNormParametrised(Layers):
    """The new one."""

    def __init__(self) -> None:
        super().__init__()
        for layer in self.layers:
            torch.nn.utils.parametrizations.spectral_norm(layer.linear)


@habit()
class Einsums(Middle):
    """einsum, bmm and baddbmm, tensordot, cumsum, sort, topk with gather."""

    def between(self, x: Tensor) -> Tensor:
        h = x.view(len(x), 2, 4)
        scores = torch.einsum("bid,bjd->bij", h, h).softmax(-1)
        mixed = torch.einsum("bij,bjd->bid", scores, h).flatten(1)
        values, places = x.topk(3, dim=1)
        sums = x.cumsum(1).sort(1, descending=True).values
        return mixed + x.scatter(1, places, values * 0.5) + 0.1 * sums + torch.tensordot(x, x, dims=2) * 0.01


@habit()
class Sampled(Middle):
    """affine_grid and grid_sample, interpolate, and pooling with indices."""

    def between(self, x: Tensor) -> Tensor:
        image = x.view(len(x), 1, 2, 4)
        theta = torch.tensor([[0.9, 0.1, 0.0], [-0.1, 0.9, 0.1]]).repeat(len(x), 1, 1) * (1 + 0.1 * x.mean())
        moved = F.grid_sample(image, F.affine_grid(theta, list(image.shape), align_corners=False), align_corners=False)
        larger = F.interpolate(moved, scale_factor=2.0, mode="bilinear", align_corners=False)
        pooled, places = F.max_pool2d(larger, 2, return_indices=True)
        return F.max_unpool2d(pooled, places, 2).mean(1).flatten(1)[:, ::4] + moved.flatten(1)


@habit(observed=["state"])
class StateKept(Layers):
    """An LSTM's hidden state is kept on the module, detached, from one step to the next."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(WIDTH, WIDTH, batch_first=True)
        self.state: Any = None

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        x = self.layers[1](self.layers[0](x))
        out, state = self.lstm(x.unsqueeze(1), self.state)
        self.state = tuple(part.detach() for part in state)
        return F.cross_entropy(self.head(self.layers[3](self.layers[2](out.squeeze(1)))), y)


@habit()
class DataProperties(Middle):
    """`.data`, `.T`, `.mT`, `.real` and `.H` of features."""

    def between(self, x: Tensor) -> Tensor:
        return x.T.T + 0.1 * x.data + (x.mT.mT * 0.1).real + x.detach().H.T * 0.01


@habit()
class CheckedAndClamped(Middle):
    """Numbers outside of bounds are mended: isnan, nan_to_num, clamp_ by tensors, and copysign."""

    def between(self, x: Tensor) -> Tensor:
        x = torch.nan_to_num(x.masked_fill(x.isnan(), 0.0), posinf=1.0)
        low, high = x.detach().amin(1, keepdim=True), x.detach().quantile(0.9, dim=1, keepdim=True)
        return torch.copysign(x.clamp(low, high), x) + x.new_full((1,), 0.1) + x.new_ones(len(x), 1) * 0.01


@habit()
class BufferUsedThenChanged(Layers):
    """A buffer is added to features after each layer, and is changed in between by what every rank knows."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("shift", torch.ones(1))

    def features(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x) + self.shift
            self.shift.mul_(0.99)
        return x


@habit()
class TemperatureBuffer(Layers):
    """A buffer that is changed when a step begins divides features after each layer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("temperature", torch.ones(1))

    def features(self, x: Tensor) -> Tensor:
        self.temperature *= 0.95
        for layer in self.layers:
            x = layer(x) / self.temperature
        return x


@habit(observed=["shift"])
class TensorUsedThenChanged(BufferUsedThenChanged):
    """The same with a tensor that is no buffer."""

    def __init__(self) -> None:
        super().__init__()
        del self.shift
        self.shift = torch.ones(1)


@habit(observed=["history"])
class HistoryInNumpy(Layers):
    """An array that shares its memory with a tensor is written into between the layers."""

    def __init__(self) -> None:
        super().__init__()
        self.shift = torch.ones(WIDTH)
        self.history = self.shift.numpy()

    def features(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x) + self.shift
            self.shift.numpy()[:] *= 0.9
        return x


@habit()
class BufferReadOnAnotherStage(Layers):
    """An early stage writes a buffer in training, which the last one uses in validation alone."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("means", torch.zeros(WIDTH))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        h = self.layers[0](x)
        self.means.mul_(0.9).add_(h.detach().mean(0), alpha=0.1)
        return F.cross_entropy(self.head(self.layers[3](self.layers[2](self.layers[1](h)))), y)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        self.log("val", F.cross_entropy(self.head(self.features(x) - self.means), y))


@habit()
class BufferWrittenLater(Layers):
    """A buffer that the last stage uses is written into by the first one from the second epoch on."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("means", torch.zeros(WIDTH))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        h = self.layers[0](x)
        if self.current_epoch:
            with torch.no_grad():
                self.means.copy_(0.9 * self.means + 0.1 * h.mean(0))
        return F.cross_entropy(self.head(self.layers[3](self.layers[2](self.layers[1](h))) + self.means), y)
