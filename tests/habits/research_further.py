"""More models of papers, small: vision, series, speech, retrieval."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import weight_norm

from tests.habits.modules import CLASSES, SAMPLES, WIDTH, Evaluated, Layers
from tests.habits.table import habit


class RevIN(nn.Module):
    """Normalizes each series and keeps its statistics for the way back, as attributes."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(1)), nn.Parameter(torch.zeros(1))

    def forward(self, x: Tensor, mode: str) -> Tensor:
        if mode == "norm":
            self.mean = x.mean(-1, keepdim=True).detach()
            self.std = torch.sqrt(x.var(-1, keepdim=True, unbiased=False) + 1e-5).detach()
            return (x - self.mean) / self.std * self.weight + self.bias
        return (x - self.bias) / (self.weight + 1e-8) * self.std + self.mean


@habit(calls=["fit", "validate", "predict"], shows=False, observed=["errors"])
class Forecasts(Evaluated):
    """Reversible instance normalization around the layers, quantile losses, and errors gathered by hand."""

    quantiles = (0.1, 0.5, 0.9)

    def __init__(self) -> None:
        super().__init__()
        self.revin = RevIN()
        self.out = nn.Linear(WIDTH, 3)
        self.errors: list[float] = []
        self.validation_outputs: list[dict[str, Tensor]] = []

    on_last_stage = ("out",)

    def forward(self, x: Tensor) -> Tensor:
        h = self.features(self.revin(x, "norm"))
        return self.revin(self.out(h), "denorm")

    def quantile_loss(self, forecast: Tensor, target: Tensor) -> Tensor:
        losses = []
        for i, q in enumerate(self.quantiles):
            error = target - forecast[:, i]
            losses.append(torch.max((q - 1) * error, q * error).unsqueeze(1))
        return torch.cat(losses, 1).sum(1).mean()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, _ = batch
        loss = self.quantile_loss(self(x), x[:, -1]) + 0 * self.head.weight.sum()
        self.log("train_loss", loss, on_epoch=True, batch_size=x.shape[0])
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> dict[str, Tensor]:
        x, _ = batch
        output = {"forecast": self(x), "target": x[:, -1]}
        self.validation_outputs.append(output)
        return output

    def on_validation_epoch_end(self) -> None:
        forecast = torch.cat([o["forecast"] for o in self.validation_outputs])
        target = torch.cat([o["target"] for o in self.validation_outputs])
        smape = (2 * (forecast[:, 1] - target).abs() / (forecast[:, 1].abs() + target.abs())).mean()
        self.log("smape", smape)
        self.errors.append(smape.item())
        self.validation_outputs.clear()


@habit(plain=False, shows=False, calls=["fit", "predict"])
class MaskedAutoencoder(Layers):
    """Patches are shuffled, most dropped, encoded, unshuffled among mask tokens, and decoded."""

    def __init__(self) -> None:
        super().__init__()
        self.mask_token = nn.Parameter(torch.randn(1, 1, WIDTH) * 0.02)
        self.register_buffer("position", torch.randn(1, 6, WIDTH), persistent=False)
        self.out = nn.Linear(WIDTH, WIDTH)

    on_last_stage = ("out",)

    @staticmethod
    def batch(generator: torch.Generator) -> Any:
        return torch.randn(SAMPLES, 6, WIDTH, generator=generator)

    def random_masking(self, x: Tensor, ratio: float) -> tuple[Tensor, Tensor, Tensor]:
        n, length, width = x.shape
        keep = int(length * (1 - ratio))
        shuffle = torch.rand(n, length, device=x.device).argsort(1)
        restore = shuffle.argsort(1)
        kept = torch.gather(x, 1, shuffle[:, :keep].unsqueeze(-1).repeat(1, 1, width))
        mask = torch.ones(n, length)
        mask[:, :keep] = 0
        return kept, torch.gather(mask, 1, restore), restore

    def reconstruct(self, x: Tensor) -> tuple[Tensor, Tensor]:
        kept, mask, restore = self.random_masking(x + self.position, 0.5)
        for layer in self.layers[:2]:
            kept = layer(kept)
        tokens = self.mask_token.repeat(x.shape[0], x.shape[1] - kept.shape[1], 1)
        full = torch.cat([kept, tokens], 1).gather(1, restore.unsqueeze(-1).repeat(1, 1, WIDTH)) + self.position
        for layer in self.layers[2:]:
            full = layer(full)
        return self.out(full), mask

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        found, mask = self.reconstruct(batch)
        target = (batch - batch.mean(-1, keepdim=True)) / (batch.var(-1, keepdim=True) + 1e-6) ** 0.5
        loss = ((found - target) ** 2).mean(-1)
        return (loss * mask).sum() / mask.sum() + 0 * self.head.weight.sum()

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.reconstruct(batch)[0]


def drop_path(x: Tensor, rate: float, training: bool) -> Tensor:
    if rate == 0.0 or not training:
        return x
    shape = (x.shape[0],) + (1,) * (x.ndim - 1)
    kept = x.new_empty(shape).bernoulli_(1 - rate)
    if 1 - rate > 0.0:
        kept.div_(1 - rate)
    return x * kept


class Windowed(nn.Module):
    """Attention within windows, shifted in every other block, with a table of relative positions."""

    count = 0

    def __init__(self) -> None:
        super().__init__()
        self.shift = 2 * (Windowed.count % 2)
        Windowed.count += 1
        self.norm, self.qkv, self.proj = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.table = nn.Parameter(torch.randn(7, 2) * 0.02)
        coords = torch.arange(4)
        self.register_buffer("index", coords[:, None] - coords[None, :] + 3, persistent=False)
        self.gamma = nn.Parameter(torch.full((WIDTH,), 0.1))
        self.attn_mask: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        n, length, width = x.shape
        residual = x
        x = self.norm(x)
        if self.shift:
            x = torch.roll(x, -self.shift, 1)
            if self.attn_mask is None or self.attn_mask.shape[0] != length // 4:
                region = torch.zeros(length)
                for i, part in enumerate((slice(0, -4), slice(-4, -self.shift), slice(-self.shift, None))):
                    region[part] = i
                region = region.view(-1, 4)
                difference = region[:, None, :] - region[:, :, None]
                self.attn_mask = difference.masked_fill(difference != 0, -100.0)
        windows = x.view(n, length // 4, 4, width).flatten(0, 1)
        q, k, v = self.qkv(windows).view(-1, 4, 3, 2, width // 2).permute(2, 0, 3, 1, 4).unbind(0)
        attention = (q * (width // 2) ** -0.5) @ k.transpose(-2, -1)
        attention = attention + self.table[self.index.view(-1)].view(4, 4, 2).permute(2, 0, 1).unsqueeze(0)
        if self.shift:
            attention = attention.view(n, length // 4, 2, 4, 4) + self.attn_mask.unsqueeze(1).unsqueeze(0)
            attention = attention.view(-1, 2, 4, 4)
        x = (attention.softmax(-1) @ v).transpose(1, 2).reshape(n, length, width)
        if self.shift:
            x = torch.roll(x, self.shift, 1)
        return residual + drop_path(self.gamma * self.proj(x), 0.2, self.training)


@habit(plain=False, shows=False, calls=["fit", "validate", "predict"])
class ShiftedWindows(Evaluated):
    """A small Swin, with labels mixed by a random permutation of the batch."""

    layer = Windowed

    def forward(self, x: Tensor) -> Tensor:
        x = x.unsqueeze(1) * torch.linspace(-1, 1, 8).view(1, 8, 1)
        return self.head(self.features(x).mean(1))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        lam = torch.distributions.Beta(0.8, 0.8).sample().item()
        order = torch.randperm(x.size(0))
        logits = self(lam * x + (1 - lam) * x[order])
        targets = lam * F.one_hot(y, CLASSES) + (1 - lam) * F.one_hot(y[order], CLASSES)
        loss = torch.sum(-targets * F.log_softmax(logits, -1), -1).mean()
        self.log("lam", lam)
        return loss


class Dilated(nn.Module):
    """A gated causal convolution with weight norm, whose skip is summed by the model."""

    count = 0

    def __init__(self) -> None:
        super().__init__()
        self.dilation = 2 ** (Dilated.count % 2)
        Dilated.count += 1
        self.conv = weight_norm(nn.Conv1d(WIDTH, 2 * WIDTH, 2, dilation=self.dilation))
        self.skip, self.residual = weight_norm(nn.Conv1d(WIDTH, WIDTH, 1)), nn.Conv1d(WIDTH, WIDTH, 1)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        gate, filtered = self.conv(F.pad(x, (self.dilation, 0))).chunk(2, 1)
        h = torch.sigmoid(gate) * torch.tanh(filtered)
        return (x + self.residual(h)) * 0.5**0.5, self.skip(h)


@habit(shows=False, plain=False, calls=["fit", "validate"], observed=["generated"])
class Waves(Evaluated):
    """A small WaveNet that generates sample by sample after each validation."""

    layer = Dilated

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(CLASSES, WIDTH)
        self.generated: list[list[int]] = []

    @staticmethod
    def batch(generator: torch.Generator) -> Any:
        return torch.randint(0, CLASSES, (SAMPLES, 7), generator=generator)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens).transpose(1, 2)
        total: Any = 0
        for layer in self.layers:
            x, skip = layer(x)
            total = total + skip
        return self.head(F.relu(total).transpose(1, 2))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return F.cross_entropy(self(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", F.cross_entropy(self(batch[:, :-1]).transpose(1, 2), batch[:, 1:]), prog_bar=True)

    @torch.inference_mode()
    def on_validation_epoch_end(self) -> None:
        self.eval()
        samples = torch.zeros(1, 1, dtype=torch.long)
        for _ in range(4):
            probabilities = F.softmax(self(samples)[:, -1] / 0.8, -1)
            samples = torch.cat([samples, torch.multinomial(probabilities, 1)], 1)
        self.generated.append(samples[0].tolist())


class Experts(nn.Module):
    """Noisy top-1 routing with a capacity; the auxiliary loss is an attribute of the layer."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.noise = nn.Linear(WIDTH, 3, bias=False), nn.Linear(WIDTH, 3, bias=False)
        self.experts = nn.ModuleList([nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(3)])
        self.register_buffer("usage", torch.zeros(3))

    def forward(self, x: Tensor) -> Tensor:
        logits = self.gate(x)
        if self.training:
            logits = logits + torch.randn_like(logits) * F.softplus(self.noise(x))
        probabilities = logits.softmax(-1)
        best, chosen = probabilities.max(-1)
        out = torch.zeros_like(x)
        capacity = max(1, x.shape[0] // 2)
        for i, expert in enumerate(self.experts):
            rows = torch.where(chosen == i)[0][:capacity]
            if rows.numel() == 0:
                continue
            out[rows] = expert(x[rows]) * best[rows].unsqueeze(-1)
        share = F.one_hot(chosen, 3).float().mean(0)
        self.l_aux = (share * probabilities.mean(0)).sum() * 3
        if self.training:
            self.usage += share.detach()
        return x + out


@habit(plain=False, shows=False, calls=["fit", "validate"])
class RoutedExperts(Evaluated):
    """A mixture of experts; usage is logged and reset when an epoch ends."""

    layer = Experts

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        aux = sum(m.l_aux for m in self.modules() if isinstance(m, Experts))
        self.log("aux", aux, prog_bar=True)
        return loss + 0.01 * aux

    def on_train_epoch_end(self) -> None:
        for i, layer in enumerate(self.layers):
            for j, share in enumerate((layer.usage / layer.usage.sum()).tolist()):
                self.log(f"usage/{i}/{j}", share)
            layer.usage.zero_()


class Rotary(nn.Module):
    """Attention with rotary positions, whose tables are made when they are first needed, or longer ones are."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.cos_cached: Tensor | None = None
        self.sin_cached: Tensor | None = None
        self.seq_len_cached = 0

    def tables(self, length: int) -> tuple[Tensor, Tensor]:
        if length > self.seq_len_cached:
            self.seq_len_cached = length
            inverse = 1.0 / (10 ** (torch.arange(0, WIDTH, 2).float() / WIDTH))
            angles = torch.cat([torch.outer(torch.arange(length).float(), inverse)] * 2, -1)[:, :WIDTH]
            self.cos_cached, self.sin_cached = angles.cos()[None], angles.sin()[None]
        assert self.cos_cached is not None and self.sin_cached is not None
        return self.cos_cached[:, :length], self.sin_cached[:, :length]

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).chunk(3, -1)
        cos, sin = self.tables(x.shape[1])
        q, k = (t * cos + torch.cat([-t[..., WIDTH // 2 :], t[..., : WIDTH // 2]], -1) * sin for t in (q, k))
        return x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True))


@habit(shows=False, plain=False, calls=["fit", "predict"])
class RotaryCurriculum(Layers):
    """A language model with tables of positions that grow with the sequences, which grow with the epoch."""

    layer = Rotary

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(CLASSES, WIDTH)

    @staticmethod
    def batch(generator: torch.Generator) -> Any:
        return {"input_ids": torch.randint(0, CLASSES, (SAMPLES, 9), generator=generator)}

    def forward(self, input_ids: Tensor) -> Tensor:
        return self.head(self.features(self.embed(input_ids)))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        ids = batch["input_ids"][:, : 5 + 4 * self.trainer.current_epoch]
        logits = self(ids[:, :-1])
        loss = F.cross_entropy(logits.reshape(-1, CLASSES), ids[:, 1:].reshape(-1))
        self.log("ppl", loss.exp(), on_step=False, on_epoch=True)
        return loss

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        ids = batch["input_ids"][:, :3]
        for _ in range(3):
            ids = torch.cat([ids, self(ids)[:, -1:].argmax(-1)], 1)
        return {"ids": ids}


@habit(shows=False, plain=False)
class VarianceInvariance(Layers):
    """VICReg over two views, with an expander behind batch norms and terms logged apart."""

    def __init__(self) -> None:
        super().__init__()
        self.expander = nn.Sequential(nn.Linear(WIDTH, 16), nn.BatchNorm1d(16), nn.ReLU(True), nn.Linear(16, 16))

    on_last_stage = ("expander",)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, _ = batch
        za, zb = (self.expander(self.features(x + 0.1 * torch.randn_like(x))) for _ in range(2))
        terms: dict[str, Any] = {"invariance": F.mse_loss(za, zb), "variance": 0.0, "covariance": 0.0}
        for z in (za, zb):
            z = z - z.mean(0)
            terms["variance"] += torch.mean(F.relu(1 - torch.sqrt(z.var(0) + 1e-4))) / 2
            cov = z.T @ z / (z.shape[0] - 1)
            n = cov.shape[0]
            off = cov.flatten()[:-1].view(n - 1, n + 1)[:, 1:].flatten()
            terms["covariance"] += off.pow(2).sum() / n
        self.log_dict(terms)
        return 25 * terms["invariance"] + 25 * terms["variance"] + terms["covariance"] + 0 * self.head.bias.sum()


@habit(shows=False, plain=False, calls=["fit", "validate", "test"])
class RendersRays(Evaluated):
    """A small NeRF: coarse samples of rays, then fine ones where the weights are, without gradients."""

    def encode(self, points: Tensor) -> Tensor:
        bands = [f(points * 2**i) for i in range(2) for f in (torch.sin, torch.cos)]
        encoded = torch.cat([points, *bands], -1)
        return F.pad(encoded, (0, max(0, WIDTH - encoded.shape[-1])))[..., :WIDTH]

    def render(self, origin: Tensor, t: Tensor) -> tuple[Tensor, Tensor]:
        points = origin[:, None, :1] + t.unsqueeze(-1)
        raw = self.head(self.features(self.encode(points)))
        density, color = F.relu(raw[..., 0]), torch.sigmoid(raw[..., 1:])
        delta = torch.cat([t[:, 1:] - t[:, :-1], torch.full_like(t[:, :1], 1e10)], -1)
        alpha = 1 - torch.exp(-density * delta)
        through = torch.cumprod(torch.cat([torch.ones_like(alpha[:, :1]), 1 - alpha + 1e-10], -1), -1)[:, :-1]
        weights = alpha * through
        return (weights.unsqueeze(-1) * color).sum(1), weights

    def fine(self, t: Tensor, weights: Tensor) -> Tensor:
        middle = 0.5 * (t[:, 1:] + t[:, :-1])
        pdf = (weights[:, 1:-1] + 1e-5) / (weights[:, 1:-1] + 1e-5).sum(-1, keepdim=True)
        cdf = torch.cat([torch.zeros_like(pdf[:, :1]), pdf.cumsum(-1)], -1)
        n = t.shape[0]
        u = torch.rand(n, 3) if self.training else torch.linspace(0, 0.99, 3).expand(n, 3).contiguous()
        index = torch.searchsorted(cdf.detach(), u, right=True)
        below, above = (index - 1).clamp(min=0), index.clamp(max=cdf.shape[-1] - 1)
        low, high = torch.gather(cdf, 1, below), torch.gather(cdf, 1, above)
        width = torch.where(high - low < 1e-5, torch.ones_like(high), high - low)
        left, right = torch.gather(middle, 1, below), torch.gather(middle, 1, above)
        return torch.sort(torch.cat([t, (left + (u - low) / width * (right - left)).detach()], -1), -1)[0]

    def both(self, x: Tensor) -> tuple[Tensor, Tensor]:
        t = torch.linspace(0, 1, 5).expand(x.shape[0], 5).clone()
        if self.training:
            t += torch.rand(t.shape) / 5
        coarse, weights = self.render(x, t)
        return coarse, self.render(x, self.fine(t, weights))[0]

    def loss(self, batch: Any) -> tuple[Tensor, Tensor]:
        x, y = batch
        target = F.one_hot(y, CLASSES)[:, 1:].float()
        coarse, fine = self.both(x)
        return F.mse_loss(coarse, target), F.mse_loss(fine, target)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        coarse, fine = self.loss(batch)
        self.log("psnr", -10 * torch.log10(fine.detach()), prog_bar=True)
        return coarse + fine

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_psnr", -10 * torch.log10(self.loss(batch)[1]))

    def test_step(self, batch: Any, batch_idx: int) -> None:
        for i, part in enumerate(torch.split(batch[0], 3)):
            self.log(f"mean{i}", self.both(part)[1].mean(), on_step=False, on_epoch=True)


class Reads(nn.Module):
    """A decoder step by step with attention over the encoded, until it says stop."""

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.query = nn.LSTMCell(2 * WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.frame, self.stop = nn.Linear(2 * WIDTH, WIDTH), nn.Linear(2 * WIDTH, 1)

    def forward(self, memory: Tensor, teacher: Tensor | None, most: int = 6) -> tuple[Tensor, Tensor]:
        n = memory.shape[0]
        hidden = cell = context = frame = memory.new_zeros(n, WIDTH)
        frames, stops = [], []
        while len(frames) < most:
            hidden, cell = self.cell(torch.cat([frame, context], -1), (hidden, cell))
            energy = (memory * self.query(hidden).unsqueeze(1)).sum(-1)
            context = (energy.softmax(-1).unsqueeze(-1) * memory).sum(1)
            both = torch.cat([hidden, context], -1)
            frame, stop = self.frame(both), self.stop(both).squeeze(-1)
            frames.append(frame)
            stops.append(stop)
            if teacher is not None:
                if len(frames) == teacher.shape[1]:
                    break
                frame = teacher[:, len(frames) - 1]
            elif bool((torch.sigmoid(stop) > 0.5).all()):
                break
        return torch.stack(frames, 1), torch.stack(stops, 1)


@habit(shows=False, calls=["fit", "validate", "predict"])
class SpeaksFrames(Evaluated):
    """A small Tacotron: forced by the target in training, on its own until it stops in evaluation."""

    def __init__(self) -> None:
        super().__init__()
        self.decoder = Reads()

    on_last_stage = ("decoder",)

    def both(self, batch: Any, force: bool) -> tuple[Tensor, Tensor]:
        x, _ = batch
        memory = self.features(torch.stack([x, x.flip(1), x.roll(1, 1)], 1))
        return self.decoder(memory, torch.stack([x, -x, x * 0.5], 1) if force else None)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        frames, stops = self.both(batch, True)
        gate = torch.zeros_like(stops)
        gate[:, -1:] = 1
        loss = F.l1_loss(frames, torch.stack([batch[0]] * 3, 1)) + F.binary_cross_entropy_with_logits(stops, gate)
        return loss + 0 * self.head.bias.sum()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        frames, _ = self.both(batch, False)
        self.log("length", float(frames.shape[1]))

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.both(batch, False)[0]


@habit(shows=False, plain=False, calls=["fit", "validate"])
class SegmentsWithDeepSupervision(Evaluated):
    """A U-Net with outputs at each depth, dice and class weights, and windows that slide in validation."""

    class Block(nn.Module):
        def __init__(self, into: int = 4, out: int = 4) -> None:
            super().__init__()
            self.conv, self.norm = nn.Conv2d(into, out, 3, padding=1), nn.InstanceNorm2d(out, affine=True)

        def forward(self, x: Tensor) -> Tensor:
            return F.leaky_relu(self.norm(self.conv(x)), 0.1)

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([self.Block(1), self.Block(), self.Block(), self.Block(8)])
        self.heads = nn.ModuleList([nn.Conv2d(4, 2, 1) for _ in range(2)])

    on_last_stage = ("heads.1",)

    @staticmethod
    def batch(generator: torch.Generator) -> Any:
        x = torch.randn(SAMPLES, 1, 8, 8, generator=generator)
        return {"image": x, "label": (x > 0.3).long()[:, 0], "name": [f"case{i}" for i in range(SAMPLES)]}

    def forward(self, x: Tensor) -> list[Tensor]:
        skip = self.layers[0](x)
        deep = self.layers[2](self.layers[1](F.max_pool2d(skip, 2)))
        up = F.interpolate(deep, scale_factor=2, mode="bilinear", align_corners=False)
        return [self.heads[1](self.layers[3](torch.cat([up, skip], 1))), self.heads[0](deep)]

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        total: Any = 0
        for i, logits in enumerate(self(batch["image"])):
            label = F.interpolate(batch["label"][:, None].float(), size=logits.shape[2:], mode="nearest")[:, 0].long()
            p, onehot = logits.softmax(1), F.one_hot(label, 2).permute(0, 3, 1, 2)
            dice = 1 - (2 * (p * onehot).sum((0, 2, 3)) + 1e-5) / ((p + onehot).sum((0, 2, 3)) + 1e-5)
            weight = 1 / onehot.sum((0, 2, 3)).clamp(min=1).float()
            total = total + 0.5**i * (dice.mean() + F.cross_entropy(logits, label, weight / weight.sum()))
        self.log("loss", total, batch_size=len(batch["name"]))
        return total + 0 * self.head.weight.sum()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        x = batch["image"]
        summed, count = torch.zeros(x.shape[0], 2, 8, 8), torch.zeros(1, 1, 8, 8)
        for top in (0, 4):
            for left in (0, 4):
                window = (..., slice(top, top + 4), slice(left, left + 4))
                summed[window] += self(x[window])[0]
                count[window] += 1
        found = (summed / count).argmax(1)
        for name, mask, label in zip(batch["name"], found, batch["label"], strict=True):
            both = (mask & label).sum().item()
            dice = 2.0 * both / max((mask.sum() + label.sum()).item(), 1)
            self.log(f"dice/{name}", dice, on_epoch=True, batch_size=1)
