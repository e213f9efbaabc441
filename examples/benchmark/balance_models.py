"""Models whose parts take unequal times, each with the parts it can be cut at and a batch."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import lightning as L
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from zoo.models.gpt import GPT
from zoo.models.resnet import digits_resnet


@dataclass(frozen=True)
class Model:
    """A network, its loss on a batch, the batch, and the names of its parts in the order in which they are called."""

    build: Callable[[], nn.Module]
    loss: Callable[[nn.Module, Any], Tensor]
    batch: Callable[[int], Any]
    parts: list[str]


class LitModel(L.LightningModule):
    """Trains one of the models by SGD."""

    def __init__(self, model: Model, stage_config: dict[str, int] | str) -> None:
        super().__init__()
        self.model = model
        self.stage_config = stage_config
        torch.manual_seed(0)
        self.net = model.build()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.model.loss(self.net, batch)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1e-4)


class Block(nn.Module):
    """Two convolutions, added to what came in."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(inputs, outputs, 3, padding=1)
        self.second = nn.Conv2d(outputs, outputs, 3, padding=1)
        self.skip = nn.Conv2d(inputs, outputs, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.skip(x) + self.second(F.relu(self.first(x)))


class UNet(nn.Module):
    """Images (N, 3, H, W) to images of the same size; each level's output goes on to the level above on the way up."""

    def __init__(self, widths: tuple[int, ...] = (16, 32, 48)) -> None:
        super().__init__()
        ups = tuple(reversed(widths))
        self.down = nn.ModuleList(Block(a, b) for a, b in zip((3, *widths[:-1]), widths, strict=True))
        self.middle = Block(widths[-1], widths[-1])
        self.up = nn.ModuleList(Block(a + b, b) for a, b in zip((widths[-1], *ups[:-1]), ups, strict=True))
        self.head = nn.Conv2d(widths[0], 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        skips = []
        for block in self.down:
            skips.append(block(x))
            x = F.max_pool2d(skips[-1], 2)
        x = self.middle(x)
        for block in self.up:
            x = block(torch.cat([F.interpolate(x, scale_factor=2.0), skips.pop()], dim=1))
        return self.head(x)


def uneven_gpt() -> nn.Module:
    """Six blocks of width 128 under a head over 8,192 tokens, which takes as long as several of them."""
    return GPT(vocab_size=8192, max_length=64, width=128, num_blocks=6, num_heads=4, tied=False)


def t5() -> nn.Module:
    import transformers

    options: dict[str, Any] = {
        "vocab_size": 512, "d_model": 96, "d_kv": 24, "d_ff": 256, "num_layers": 4, "num_heads": 4, "dropout_rate": 0.0,
        "decoder_start_token_id": 0, "use_cache": False,
    }  # fmt: skip
    return transformers.T5ForConditionalGeneration(transformers.T5Config(**options))


def vit() -> nn.Module:
    import transformers

    options: dict[str, Any] = {
        "hidden_size": 96, "num_hidden_layers": 6, "num_attention_heads": 4, "intermediate_size": 256, "image_size": 32,
        "patch_size": 4, "num_labels": 10,
    }  # fmt: skip
    return transformers.ViTForImageClassification(transformers.ViTConfig(**options))


def _token_loss(net: nn.Module, batch: Any) -> Tensor:
    return F.cross_entropy(net(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())


def _tokens(vocabulary: int, length: int) -> Callable[[int], Tensor]:
    return lambda size: torch.randint(0, vocabulary, (size, length), generator=torch.Generator().manual_seed(1))


def _images(channels: int, side: int) -> Callable[[int], Tensor]:
    return lambda size: torch.randn(size, channels, side, side, generator=torch.Generator().manual_seed(1))


def _labels(batch: Tensor) -> Tensor:
    return torch.zeros(len(batch), dtype=torch.long)


MODELS: dict[str, Model] = {
    "residual network": Model(
        digits_resnet,
        lambda net, batch: F.cross_entropy(net(batch), _labels(batch)),
        _images(1, 8),
        ["net.stem", *(f"net.layer{i}.{j}" for i in (1, 2, 3) for j in (0, 1)), "net.fc"],
    ),
    "uneven GPT": Model(
        uneven_gpt, _token_loss, _tokens(8192, 65), ["net.tokens", *(f"net.blocks.{i}" for i in range(6)), "net.head"]
    ),
    "U-Net": Model(
        UNet,
        lambda net, batch: F.mse_loss(net(batch), batch),
        _images(3, 32),
        [*(f"net.down.{i}" for i in range(3)), "net.middle", *(f"net.up.{i}" for i in range(3)), "net.head"],
    ),
    "T5": Model(
        t5,
        lambda net, batch: net(input_ids=batch, labels=batch[:, :24].contiguous()).loss,
        _tokens(512, 64),
        [f"net.{side}.block.{i}" for side in ("encoder", "decoder") for i in range(4)],
    ),
    "ViT": Model(
        vit,
        lambda net, batch: net(pixel_values=batch, labels=_labels(batch)).loss,
        _images(3, 32),
        ["net.vit.embeddings", *(f"net.vit.layers.{i}" for i in range(6)), "net.classifier"],
    ),
}
