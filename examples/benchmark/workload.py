"""What every contender trains: the same modules, weights and batch, however they are cut."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from zoo.models.gpt import GPT

VOCAB_SIZE = 512


class Embedding(nn.Module):
    """Token and position embedding: ids (N, T) become (N, T, width)."""

    def __init__(self, gpt: GPT) -> None:
        super().__init__()
        self.tokens = gpt.tokens
        self.positions = gpt.positions

    def forward(self, ids: Tensor) -> Tensor:
        return self.tokens(ids) + self.positions(torch.arange(ids.shape[1], device=ids.device))


@dataclass(frozen=True)
class Workload:
    """A chain of layers, the index where each stage after the first begins, a loss, and one batch."""

    layers: nn.Sequential
    cuts: list[int]
    loss: Callable[[Tensor, Tensor], Tensor]
    batch: tuple[Tensor, Tensor]

    def part(self, stage: int) -> nn.Sequential:
        """The layers of one stage."""
        bounds = [0, *self.cuts, len(self.layers)]
        return nn.Sequential(*list(self.layers)[bounds[stage] : bounds[stage + 1]])


def gpt(*, num_stages: int, batch_size: int, width: int = 256, num_blocks: int = 8, length: int = 128) -> Workload:
    """A GPT of plain modules with as many blocks on every stage, on random tokens.

    The embedding comes with the first blocks, the head with the last.
    """
    torch.manual_seed(0)
    net = GPT(vocab_size=VOCAB_SIZE, max_length=length, width=width, num_blocks=num_blocks, num_heads=4, tied=False)
    layers = nn.Sequential(Embedding(net), *net.blocks, nn.Sequential(net.norm, net.head))
    ids = torch.randint(0, VOCAB_SIZE, (batch_size, length + 1), generator=torch.Generator().manual_seed(1))
    cuts = [1 + num_blocks * stage // num_stages for stage in range(1, num_stages)]
    return Workload(layers, cuts, token_loss, (ids[:, :-1].contiguous(), ids[:, 1:].contiguous()))


def linear(*, num_layers: int, batch_size: int) -> Workload:
    """An 8x8 Linear on every stage: next to no work, so that a step's time is overhead."""
    torch.manual_seed(0)
    layers = nn.Sequential(*(nn.Linear(8, 8) for _ in range(num_layers)))
    batch = (torch.rand(batch_size, 8), torch.rand(batch_size, 8))
    return Workload(layers, list(range(1, num_layers)), F.mse_loss, batch)


def token_loss(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())
