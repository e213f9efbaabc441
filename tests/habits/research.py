"""Models of papers, small: each does several unusual things at once."""

from __future__ import annotations

import itertools
import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.habits.modules import CLASSES, SAMPLES, WIDTH, Evaluated, Layer, Layers
from tests.habits.table import error, habit

HALF = WIDTH // 2


class ActNorm(nn.Module):
    """Normalizes its first batch, which decides its parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.loc = nn.Parameter(torch.zeros(1, WIDTH))
        self.log_scale = nn.Parameter(torch.zeros(1, WIDTH))
        self.register_buffer("initialized", torch.tensor(0, dtype=torch.uint8))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        if self.training and self.initialized.item() == 0:
            with torch.no_grad():
                self.loc.copy_(-x.mean(0, keepdim=True))
                self.log_scale.copy_(-(x.std(0, keepdim=True) + 1e-6).log())
            self.initialized.fill_(1)
        return (x + self.loc) * self.log_scale.exp(), self.log_scale.sum()

    def reverse(self, z: Tensor) -> Tensor:
        return z * (-self.log_scale).exp() - self.loc


class Coupling(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = ActNorm()
        self.register_buffer("order", torch.randperm(WIDTH))
        self.net = nn.Sequential(nn.Linear(HALF, 16), nn.ReLU(), nn.Linear(16, 2 * (WIDTH - HALF)))
        self.net[-1].weight.data.zero_()
        self.net[-1].bias.data.zero_()

    def forward(self, x: Tensor, log_det: Tensor) -> tuple[Tensor, Tensor]:
        x, added = self.norm(x)
        x = x[:, self.order]
        a, b = x[:, :HALF], x[:, HALF:]
        shift, scale = self.net(a).chunk(2, 1)
        scale = torch.sigmoid(scale + 2)
        return torch.cat([a, (b + shift) * scale], 1), log_det + added + scale.log().sum(1)

    def reverse(self, z: Tensor) -> Tensor:
        a, b = z[:, :HALF], z[:, HALF:]
        shift, scale = self.net(a).chunk(2, 1)
        x = torch.cat([a, b / torch.sigmoid(scale + 2) - shift], 1)
        return self.norm.reverse(x[:, torch.argsort(self.order)])


@habit(plain=False, shows=False, observed=["samples"])
class Flow(Evaluated):
    """A normalizing flow that is initialised by its first batch, and samples in validation."""

    layer = Coupling

    def __init__(self) -> None:
        super().__init__()
        self.samples: list[Tensor] = []

    def log_prob(self, x: Tensor) -> Tensor:
        log_det = x.new_zeros(x.shape[0])
        for layer in self.layers:
            x, log_det = layer(x, log_det)
        return -0.5 * (x.pow(2) + math.log(2 * math.pi)).sum(1) + log_det

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = -self.log_prob(batch[0]).mean() / (WIDTH * math.log(2)) + 0 * self.head.weight.sum()
        self.log("bits_per_dim", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_nll", -self.log_prob(batch[0]).mean())

    @torch.no_grad()
    def on_validation_epoch_end(self) -> None:
        z = torch.randn(4, WIDTH, device=self.device)
        for layer in reversed(self.layers):
            z = layer.reverse(z)
        self.samples.append(z.cpu())


@habit(plain=False, shows=False)
class Bayesian(Evaluated):
    """Weights are drawn anew for each batch, and the divergence of all layers is in the loss."""

    class Drawn(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mu = nn.Parameter(torch.randn(WIDTH, WIDTH) * 0.1)
            self.rho = nn.Parameter(torch.full((WIDTH, WIDTH), -3.0))
            self.prior = torch.distributions.Normal(0, 1)
            self.divergence: Any = 0

        def forward(self, x: Tensor) -> Tensor:
            posterior = torch.distributions.Normal(self.mu, F.softplus(self.rho))
            weight = posterior.rsample() if self.training else self.mu
            self.divergence = torch.distributions.kl_divergence(posterior, self.prior).sum()
            return x + torch.tanh(F.linear(x, weight))

    layer = Drawn

    def training_step(self, batch: Any, batch_idx: int) -> dict[str, Tensor]:
        x, y = batch
        nll = F.cross_entropy(self(x), y)
        kl = sum(module.divergence for module in self.modules() if hasattr(module, "divergence"))
        self.log_dict({"nll": nll, "kl": kl}, on_step=True, on_epoch=True)
        return {"loss": nll + kl / 1000, "nll": nll.detach()}


class FixedPoint(nn.Module):
    """An implicit layer: iterates to a fixed point, and again in backward, by a hook on its result."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        with torch.no_grad():
            self.linear.weight.mul_(0.4)
        self.hook: Any = None

    def f(self, z: Tensor, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(z) + x)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            z = torch.zeros_like(x)
            for _ in range(30):
                following = self.f(z, x)
                distance = (following - z).norm()
                z = following
                if distance < 1e-4:
                    break
        z = self.f(z, x)
        z0 = z.clone().detach().requires_grad_()
        f0 = self.f(z0, x)

        def backward_hook(grad: Tensor) -> Tensor:
            g = grad
            for _ in range(10):
                g = torch.autograd.grad(f0, z0, g, retain_graph=True)[0] + grad
            return g

        if z.requires_grad:
            z.register_hook(backward_hook)
        return z


@habit(calls=["fit", "predict"], shows=False)
class Equilibrium(Evaluated):
    """Deep equilibrium layers."""

    layer = FixedPoint


@habit(expect=error(r"goes back over what stages \d"), calls=["fit", "predict"], shows=False, plain=False)
class Physics(Layers):
    """The residual of a differential equation: second derivatives by the input, and a read adaptive weight."""

    weight = 1.0

    def u(self, t: Tensor) -> Tensor:
        return self.head(self.features(torch.cat([t, t.sin(), torch.ones(t.shape[0], WIDTH - 2)], 1)))[:, :1]

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        t = batch[0][:, :1].clone().requires_grad_(True)
        u = self.u(t)
        (du,) = torch.autograd.grad(u.sum(), t, create_graph=True)
        (ddu,) = torch.autograd.grad(du.sum(), t, create_graph=True)
        residual = F.mse_loss(ddu, -u)
        start = (self.u(torch.zeros(1, 1)) - 1).pow(2).mean()
        self.weight = 0.9 * self.weight + 0.1 * (residual.detach() / (start.detach() + 1e-3)).clamp(max=10).item()
        self.log_dict({"residual": residual, "start": start, "weight": self.weight})
        return residual + self.weight * start

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.u(batch[0][:, :1])


@habit(
    expect=error(r"goes back over what stages \d"),
    automatic=error(r"calls 0 modules that a stage can begin with"),
    shows=False,
    plain=False,
)
class Meta(Layers):
    """MAML: a step on the support set, then the loss of the query set by the updated weights."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        half = x.shape[0] // 2
        fast = dict(self.named_parameters())
        for _ in range(2):
            inner = F.cross_entropy(torch.func.functional_call(self, fast, (x[:half],)), y[:half])
            grads = torch.autograd.grad(inner, list(fast.values()), create_graph=True)
            fast = {name: p - 0.1 * g for (name, p), g in zip(fast.items(), grads, strict=True)}
        outer = F.cross_entropy(torch.func.functional_call(self, fast, (x[half:],)), y[half:])
        self.log("outer", outer)
        return outer


class Spike(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return (x > 0).to(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        (x,) = ctx.saved_tensors
        return grad / (1 + 10 * x.abs()).pow(2)


class Leaky(nn.Module):
    """Spiking neurons that keep their potential between time steps."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.beta = nn.Parameter(torch.tensor(0.9))
        self.potential: Tensor | None = None
        self.count = 0.0

    def reset(self) -> None:
        self.potential = None

    def forward(self, x: Tensor) -> Tensor:
        current = self.linear(x)
        if self.potential is None:
            self.potential = torch.zeros_like(current)
        self.potential = self.beta.clamp(0, 1) * self.potential + current
        spikes = Spike.apply(self.potential - 0.3)
        self.potential = self.potential - 0.3 * spikes.detach()
        self.count += spikes.detach().sum().item()
        return spikes


@habit(calls=["fit", "validate"], shows=False, observed=["rates"])
class Spiking(Evaluated):
    """A spiking network: a loop over time through all layers, with states, reset for each batch."""

    layer = Leaky

    def __init__(self) -> None:
        super().__init__()
        self.rates: list[float] = []

    def forward(self, x: Tensor) -> Tensor:
        for module in self.modules():
            if isinstance(module, Leaky):
                module.reset()
        out = []
        for _ in range(3):
            spikes = x
            for layer in self.layers:
                spikes = layer(spikes)
            out.append(self.head(spikes))
        return torch.stack(out).mean(0)

    def on_train_epoch_end(self) -> None:
        self.rates.append(sum(layer.count for layer in self.layers))
        for layer in self.layers:
            layer.count = 0.0


@habit(shows=False, calls=["fit", "predict"])
class MixtureDensity(Layers):
    """The logarithm of a mixture's density, by torch.distributions, of logits, means and scales."""

    def __init__(self) -> None:
        super().__init__()
        self.logits, self.means = nn.Linear(WIDTH, 3), nn.Linear(WIDTH, 3)
        self.scales = nn.Sequential(nn.Linear(WIDTH, 3), nn.Softplus())

    on_last_stage = ("logits", "means", "scales")

    def mixture(self, x: Tensor) -> torch.distributions.MixtureSameFamily:
        h = self.features(x)
        return torch.distributions.MixtureSameFamily(
            torch.distributions.Categorical(logits=self.logits(h)),
            torch.distributions.Normal(self.means(h), self.scales(h) + 1e-3),
        )

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, _ = batch
        mixture = self.mixture(x)
        loss = -mixture.log_prob(x.sum(1)).mean() + 0 * self.head.bias.sum()
        self.log_dict({"nll": loss, "spread": mixture.variance.mean()})
        return loss

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        mixture = self.mixture(batch[0])
        return {"mean": mixture.mean, "std": mixture.stddev}


class Graph(nn.Module):
    """Message passing over the edges of a batch of graphs, with a mean over neighbours by index_add_."""

    def __init__(self) -> None:
        super().__init__()
        self.message, self.update = nn.Linear(2 * WIDTH, WIDTH), nn.GRUCell(WIDTH, WIDTH)

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        source, target = edges
        messages = F.relu(self.message(torch.cat([x[source], x[target]], -1)))
        summed = torch.zeros_like(x).index_add_(0, target, messages)
        degree = torch.bincount(target, minlength=x.size(0)).clamp(min=1).unsqueeze(-1)
        return self.update(summed / degree, x)


@habit(calls=["fit", "validate"], shows=False)
class Graphs(Evaluated):
    """Batches whose graphs have nodes in rows, an attention readout, and edges that are dropped at random."""

    layer = Graph

    def forward(self, x: Tensor) -> Tensor:
        n = x.shape[0]
        nodes = torch.arange(n)
        edges = torch.stack([torch.cat([nodes, nodes]), torch.cat([nodes.roll(1), nodes.roll(-1)])])
        x = x.unsqueeze(1).expand(-1, 3, -1).reshape(-1, WIDTH) * torch.linspace(0.5, 1, 3).repeat(n).unsqueeze(1)
        edges = torch.cat([edges, edges + n, edges + 2 * n], 1) % x.shape[0]
        for layer in self.layers:
            x = layer(x, edges)
        batch = torch.arange(x.shape[0]) // 3
        score = torch.exp(torch.tanh(x.mean(1)))
        total = torch.zeros(n).scatter_add(0, batch, score)
        return self.head(torch.zeros(n, WIDTH).index_add(0, batch, x * (score / total[batch]).unsqueeze(1)))


@habit(calls=["fit", "predict"], shows=False, plain=False)
class Hypernetwork(Layers):
    """Early layers make the weights of a small network that is applied to the batch; another is read for its scale."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(CLASSES, WIDTH)
        self.maker = nn.Linear(WIDTH, WIDTH * CLASSES + CLASSES)
        self.scale = 1.0

    on_last_stage = ("maker",)

    def forward(self, x: Tensor) -> Tensor:
        made = self.maker(self.features(self.embedding.weight).mean(0))
        weight, bias = made[: WIDTH * CLASSES].view(CLASSES, WIDTH), made[WIDTH * CLASSES :]
        if self.training:
            self.scale = 0.9 * self.scale + 0.1 / max(float(weight.detach().norm()), 1e-3)
        return F.linear(x, weight * self.scale, bias) + 0 * self.head.bias

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self(batch[0])


@habit(plain=False, shows=False, observed=["images"])
class Diffuses(Evaluated):
    """A denoising model with buffers of its schedule, an average of its weights, and samples by it in validation."""

    def __init__(self) -> None:
        super().__init__()
        self.time = nn.Embedding(10, WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)
        betas = torch.linspace(1e-3, 0.2, 10)
        self.register_buffer("betas", betas)
        self.register_buffer("alphas_bar", torch.cumprod(1 - betas, 0))
        self.average = {name: p.detach().clone() for name, p in self.named_parameters()}
        self.images: list[Tensor] = []

    on_last_stage = ("out",)

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        return self.out(self.features(x + self.time(t)))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x = batch[0]
        t = torch.randint(0, 10, (x.shape[0],))
        noise = torch.randn_like(x)
        bar = self.alphas_bar[t].unsqueeze(1)
        losses = (self(bar.sqrt() * x + (1 - bar).sqrt() * noise, t) - noise).pow(2).mean(1)
        for step in t.unique():
            self.log(f"loss_t{int(step) // 4}", losses[t == step].mean(), on_step=False, on_epoch=True)
        return losses.mean() + 0 * self.head.weight.sum()

    def on_train_batch_end(self, *_: Any) -> None:
        for name, p in self.named_parameters():
            self.average[name].mul_(0.9).add_(p.detach(), alpha=0.1)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", (self(batch[0], torch.zeros(batch[0].shape[0], dtype=torch.long))).pow(2).mean())

    def on_validation_epoch_end(self) -> None:
        kept = {name: p.detach().clone() for name, p in self.named_parameters()}
        self.load_state_dict(self.average, strict=False)
        x = torch.randn(2, WIDTH)
        for t in range(9, -1, -1):
            noise = self(x, torch.full((2,), t))
            beta, bar = self.betas[t], self.alphas_bar[t]
            x = (x - beta / (1 - bar).sqrt() * noise) / (1 - beta).sqrt()
            if t > 0:
                x = x + beta.sqrt() * torch.randn_like(x)
        self.images.append(x.cpu())
        self.load_state_dict(kept, strict=False)


@habit(shows=False, plain=False, calls=["fit", "predict"])
class TagsSequences(Layers):
    """A conditional random field over a sequence of emissions, with Viterbi decoding when it predicts."""

    def __init__(self) -> None:
        super().__init__()
        self.transitions = nn.Parameter(torch.randn(CLASSES, CLASSES) * 0.1)
        self.begin = nn.Parameter(torch.zeros(CLASSES))

    @staticmethod
    def batch(generator: torch.Generator) -> Any:
        x = torch.randn(SAMPLES, 5, WIDTH, generator=generator)
        mask = torch.arange(5) < torch.randint(2, 6, (SAMPLES, 1), generator=generator)
        return x, torch.randint(0, CLASSES, (SAMPLES, 5), generator=generator), mask

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, tags, mask = batch
        emissions = self(x)
        rows = torch.arange(x.shape[0])
        score = self.begin[tags[:, 0]] + emissions[rows, 0, tags[:, 0]]
        alpha = self.begin + emissions[:, 0]
        for i in range(1, x.shape[1]):
            step = self.transitions[tags[:, i - 1], tags[:, i]] + emissions[rows, i, tags[:, i]]
            score = score + step * mask[:, i]
            following = torch.logsumexp(alpha.unsqueeze(2) + self.transitions + emissions[:, i].unsqueeze(1), 1)
            alpha = torch.where(mask[:, i].unsqueeze(1), following, alpha)
        loss = (torch.logsumexp(alpha, 1) - score).mean()
        self.log("nll", loss)
        return loss

    def predict_step(self, batch: Any, batch_idx: int) -> list[list[int]]:
        x, _, mask = batch
        emissions = self(x)
        paths = []
        for e, length in zip(emissions, mask.sum(1).tolist(), strict=True):
            best, back = self.begin + e[0], []
            for i in range(1, length):
                best, index = (best.unsqueeze(1) + self.transitions).max(0)
                best = best + e[i]
                back.append(index)
            tag = int(best.argmax())
            path = [tag]
            for index in reversed(back):
                tag = int(index[tag])
                path.append(tag)
            paths.append(path[::-1])
        return paths


class AddressedMemory(Layer):
    """Reads and writes rows of a memory by attention over them, kept from step to step without its graph."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("memory", torch.randn(6, WIDTH) * 0.1)
        self.key, self.write = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        where = torch.softmax(self.key(x) @ self.memory.T, -1)
        memory = self.memory * (1 - where.mean(0).unsqueeze(1)) + where.T @ self.write(x)
        x = super().forward(x) + where @ memory
        if self.training:
            self.memory = memory.detach()
        return x


@habit(calls=["fit", "validate"], shows=False)
class Remembers(Evaluated):
    """Layers with an addressed memory."""

    layer = AddressedMemory


class SlotAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mu, self.log_sigma = nn.Parameter(torch.randn(1, 1, WIDTH)), nn.Parameter(torch.zeros(1, 1, WIDTH))
        self.q, self.k, self.v = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3))
        self.gru, self.norm = nn.GRUCell(WIDTH, WIDTH), nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        slots = self.mu + self.log_sigma.exp() * torch.randn(x.shape[0], 3, WIDTH)
        k, v = self.k(x), self.v(x)
        for _ in range(3):
            before = slots
            attention = (torch.einsum("bsd,bnd->bsn", self.q(self.norm(slots)), k) * WIDTH**-0.5).softmax(1) + 1e-8
            attention = attention / attention.sum(-1, keepdim=True)
            slots = self.gru((attention @ v).flatten(0, 1), before.flatten(0, 1)).view_as(slots)
        return slots


@habit(plain=False, shows=False)
class SlotsDecoded(Layers):
    """Objects are found by slots, and assigned to targets by the least total cost, which is read."""

    def __init__(self) -> None:
        super().__init__()
        self.slots = SlotAttention()

    on_last_stage = ("slots",)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, _ = batch
        tokens = self.features(torch.stack([x, x.roll(1, 1), x.flip(1), -x], 1))
        found = self.head(self.slots(tokens))
        targets = x[:, :3].unsqueeze(-1).expand(-1, -1, CLASSES).tanh()
        cost = torch.cdist(found, targets)
        loss = 0.0
        for b in range(x.shape[0]):
            c = cost[b].detach().numpy()
            order = min(itertools.permutations(range(3)), key=lambda order: sum(c[i, j] for i, j in enumerate(order)))
            loss = loss + sum(cost[b, i, j] for i, j in enumerate(order))
        return loss / x.shape[0]
