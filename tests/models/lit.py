"""LightningModules of the zoo that wrap a Hugging Face model, and small ones of our own with unusual steps."""

from __future__ import annotations

import itertools
import random
from typing import Any

import lightning as L
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint


class Lit(L.LightningModule):
    """What all of them share: the optimizer."""

    def configure_optimizers(self) -> torch.optim.Optimizer:
        trained = [parameter for parameter in self.parameters() if parameter.requires_grad]
        return torch.optim.SGD(trained, lr=0.1, momentum=0.9)


class HuggingFace(Lit):
    """A Hugging Face model trained on the loss that it returns. `options` are added to each call."""

    def __init__(self, model: nn.Module, **options: Any) -> None:
        super().__init__()
        self.model = model
        self.options = options

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        output = self.model(**batch, **self.options)
        loss = output.loss
        if self.options.get("output_hidden_states"):
            loss = loss + 1e-3 * torch.stack([hidden.pow(2).mean() for hidden in output.hidden_states]).sum()
        if self.options.get("output_attentions"):
            loss = loss + 1e-2 * sum(attention[..., 0].mean() for attention in output.attentions)
        self.log("train_loss", loss)
        return loss


class EmbeddingAsHead(Lit):
    """GPT-2's body; the head uses the embedding's weight by itself."""

    def __init__(self, transformer: nn.Module) -> None:
        super().__init__()
        self.transformer = transformer

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        hidden = self.transformer(batch["input_ids"]).last_hidden_state
        logits = hidden @ self.transformer.wte.weight.T
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten())


class Block(nn.Module):
    """A residual layer."""

    def __init__(self, width: int = 16, dropout: float = 0.0) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.dropout = nn.Dropout(dropout)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.dropout(F.gelu(self.up(self.norm(x)))))


class Stack(Lit):
    """Blocks and a head, of which the cases below change the step."""

    def __init__(self, dropout: float = 0.0, num_blocks: int = 4) -> None:
        super().__init__()
        self.embed = nn.Linear(8, 16)
        self.blocks = nn.ModuleList([Block(dropout=dropout) for _ in range(num_blocks)])
        self.head = nn.Linear(16, 4)

    def through(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x

    def loss(self, hidden: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self.head(hidden), y)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        return self.loss(self.through(self.embed(x)), y)


class Padded(Stack):
    """A dictionary padded to the longest of the batch, so that lengths change from batch to batch."""

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        mask = batch["mask"].unsqueeze(-1)
        hidden = self.through(self.embed(batch["x"]) * mask)
        pooled = (hidden * mask).sum(1) / mask.sum(1).clamp(min=1)
        return self.loss(pooled, batch["y"])


class Diffusion(Stack):
    """Noise and timestep drawn in the step, used at both its ends."""

    def __init__(self) -> None:
        super().__init__()
        self.time = nn.Embedding(10, 16)
        self.head = nn.Linear(16, 8)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, _ = batch
        noise = torch.randn_like(x)
        t = torch.randint(0, 10, (x.shape[0],), device=x.device)
        alpha = torch.cos(t / 10 * torch.pi / 2).unsqueeze(-1)
        noisy = alpha * x + (1 - alpha**2).sqrt() * noise
        hidden = self.through(self.embed(noisy) + self.time(t))
        return ((self.head(hidden) - noise) ** 2 * (1 + t.unsqueeze(-1))).mean()


class UNet(Lit):
    """Skips from the way down to the way up, over several stages."""

    def __init__(self) -> None:
        super().__init__()
        widths = [4, 8, 16, 16]
        self.inward = nn.Conv2d(3, widths[0], 3, padding=1)
        pairs = list(itertools.pairwise(widths))
        self.down = nn.ModuleList([self._convolution(a, b, stride=2) for a, b in pairs])
        self.middle = self._convolution(16, 16)
        self.up = nn.ModuleList([self._convolution(b + b, a) for a, b in reversed(pairs)])
        self.outward = nn.Conv2d(widths[0] * 2, 3, 1)

    @staticmethod
    def _convolution(inward: int, outward: int, stride: int = 1) -> nn.Module:
        return nn.Sequential(
            nn.Conv2d(inward, outward, 3, stride=stride, padding=1), nn.BatchNorm2d(outward), nn.ReLU(inplace=True)
        )

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, _ = batch
        hidden = self.inward(x)
        skips = [hidden]
        for down in self.down:
            hidden = down(hidden)
            skips.append(hidden)
        hidden = self.middle(hidden)
        for up in self.up:
            hidden = up(torch.cat([hidden, skips.pop()], 1))
            hidden = F.interpolate(hidden, scale_factor=2)
        return F.mse_loss(self.outward(torch.cat([hidden, skips.pop()], 1)), x)


class FrozenBackbone(Stack):
    """The embedding and the first blocks do not train, and what follows gets their result detached from nothing."""

    def __init__(self, frozen: int) -> None:
        super().__init__()
        for module in (self.embed, *self.blocks[:frozen]):
            module.requires_grad_(False)


class LayerDrop(Stack):
    """Half of the blocks are left out at random: the first ones of a stage too, and at times all of a stage's."""

    def __init__(self) -> None:
        super().__init__(num_blocks=8)

    def through(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            if torch.rand(()) < 0.5:
                continue
            x = block(x)
        return x


class LayerDropByPython(Stack):
    """As above, and the choice leaves no trace among the tensors."""

    def __init__(self) -> None:
        super().__init__(num_blocks=8)

    def through(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            if random.random() < 0.3:
                continue
            x = block(x)
        return x


class ReadsNumber(Stack):
    """A number of an early value decides what a later stage does."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        early = self.blocks[0](self.embed(x))
        scale = early.abs().mean().item()
        hidden = early
        for block in self.blocks[1:]:
            hidden = block(hidden)
        if scale > 0.5:
            hidden = hidden * scale
        self.log("scale", scale)
        return self.loss(hidden / (1 + scale), y)


class SelectsByData(Stack):
    """Rows are selected by a mask that depends on data, so shapes at the cut differ between micro-batches."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        early = self.blocks[0](self.embed(x))
        wanted = early.mean(-1) > early.mean()
        early, y = early[wanted], y[wanted]
        for block in self.blocks[1:]:
            early = block(early)
        return self.loss(early, y)


class Routed(nn.Module):
    """Keeps its auxiliary loss in an attribute, as mixtures of experts do."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.gate = nn.Linear(width, 2)
        self.experts = nn.ModuleList([Block(width), Block(width)])
        self.auxiliary: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        weights = self.gate(x).softmax(-1)
        self.auxiliary = weights.mean(0).pow(2).sum()
        return sum(weights[..., i : i + 1] * expert(x) for i, expert in enumerate(self.experts))


class KeepsAuxiliaryLoss(Stack):
    """The attribute that each layer sets is read at the end of the step."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Routed() for _ in self.blocks])

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        return loss + 0.1 * sum(block.auxiliary for block in self.blocks)


class Collecting(Block):
    """Appends to the list and the dictionary that it is given."""

    def forward(self, x: Tensor, found: list[Tensor], named: dict[str, Tensor]) -> Tensor:  # type: ignore[override]
        x = super().forward(x)
        found.append(x.mean(-1))
        named[f"max{len(found)}"] = x.amax()
        return x


class CollectsInLeaves(Stack):
    """A list and a dictionary go into the layers and are filled there."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Collecting() for _ in self.blocks])

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        found: list[Tensor] = []
        named: dict[str, Tensor] = {}
        x = self.embed(x)
        for block in self.blocks:
            x = block(x, found, named)
        return self.loss(x, y) + 0.1 * torch.stack(found).pow(2).mean() + 0.01 * sum(named.values())


class InPlace(Stack):
    """Writes in place between the modules: into results, into views of them, and into the batch."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        x = self.embed(x.clone().mul_(0.5))
        total = torch.zeros_like(x)
        for i, block in enumerate(self.blocks):
            x = block(x)
            x.add_(0.1)
            x[:, i] *= 2
            total += x
            F.relu_(x)
        total[:, :4].div_(4)
        return self.loss(x + total, y)


class _ReverseGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: float) -> Tensor:
        ctx.scale = scale
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return -ctx.scale * gradient, None


class ReversesGradient(Stack):
    """An autograd.Function between the modules."""

    def through(self, x: Tensor) -> Tensor:
        for i, block in enumerate(self.blocks):
            x = block(x)
            if i % 2:
                x = x + _ReverseGradient.apply(x, 0.5)
        return x


class Checkpointed(Stack):
    """One checkpointed function over all blocks, and hence over all boundaries."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__(dropout=0.2, num_blocks=8)
        self.reentrant = reentrant

    def through(self, x: Tensor) -> Tensor:
        half = checkpoint(self._part, x, 0, 5, use_reentrant=self.reentrant)
        return checkpoint(self._part, half, 5, 8, use_reentrant=self.reentrant)

    def _part(self, x: Tensor, start: int, stop: int) -> Tensor:
        for block in self.blocks[start:stop]:
            x = block(x)
        return x


class HooksInside(Stack):
    """Forward hooks on modules inside the layers collect features."""

    def __init__(self) -> None:
        super().__init__()
        self.features: list[Tensor] = []
        for block in self.blocks:
            block.up.register_forward_hook(lambda module, args, output: self.features.append(output))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.features.clear()
        loss = super().training_step(batch, batch_idx)
        return loss + 0.01 * sum(feature.pow(2).mean() for feature in self.features)


class DirectParameters(Stack):
    """Parameters and buffers of the module itself, used between the layers of several stages."""

    def __init__(self) -> None:
        super().__init__()
        self.position = nn.Parameter(torch.full((16,), 0.1))
        self.scales = nn.ParameterList([torch.full((16,), 1.0 + i / 10) for i in range(4)])
        self.register_buffer("shift", torch.linspace(0, 1, 16))
        self.register_buffer("late", torch.linspace(1, 0, 16), persistent=False)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        x = self.embed(x) + self.position + self.shift
        for block, scale in zip(self.blocks, self.scales, strict=True):
            x = block(x) * scale
        return self.loss(x + self.position + self.late, y)


class SharedLayer(Stack):
    """One layer called on every stage."""

    def __init__(self) -> None:
        super().__init__()
        self.shared = nn.Linear(16, 16)

    def through(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x) + 0.1 * self.shared(x)
        return x
