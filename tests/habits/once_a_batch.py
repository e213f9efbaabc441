"""What hand-optimized steps change by themselves in weights and buffers, which all micro-batches do once."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.parametrizations import spectral_norm
from torch.optim.swa_utils import AveragedModel

from tests.habits.by_hand import ByHand
from tests.habits.modules import CLASSES, WIDTH
from tests.habits.table import error, habit


class Followed(ByHand):
    """A copy of the model follows it after each update, and is a target."""

    tau = 0.3

    def __init__(self) -> None:
        super().__init__()
        self.target = copy.deepcopy(nn.Sequential(*self.layers, self.head)).requires_grad_(False)

    def loss(self, batch: Any) -> Tensor:
        x, y = batch
        with torch.no_grad():
            soft = self.target(x).softmax(1)
        return F.cross_entropy(self(x), y) + F.cross_entropy(self(x), soft)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        super().training_step(batch, batch_idx)
        with torch.no_grad():
            for own, other in self.pairs():
                self.follow(own, other)

    def pairs(self) -> Any:
        return zip(self.target.parameters(), [*self.layers.parameters(), *self.head.parameters()], strict=True)

    def follow(self, own: Tensor, other: Tensor) -> None:
        raise NotImplementedError


@habit(plain=False, without={"tau": 0.0})
class CopiesAMixture(Followed):
    """As most of reinforcement learning does."""

    def follow(self, own: Tensor, other: Tensor) -> None:
        own.data.copy_(self.tau * other.data + (1.0 - self.tau) * own.data)


@habit(plain=False, without={"tau": 0.0})
class Lerps(Followed):
    def follow(self, own: Tensor, other: Tensor) -> None:
        own.lerp_(other, self.tau)


@habit(plain=False, without={"tau": 0.0})
class MultipliesAndAdds(Followed):
    def follow(self, own: Tensor, other: Tensor) -> None:
        own.data.mul_(1 - self.tau).add_(other.data, alpha=self.tau)


@habit(plain=False, without={"tau": 0.0})
class AssignsData(Followed):
    def follow(self, own: Tensor, other: Tensor) -> None:
        own.data = own.data * (1 - self.tau) + other.data * self.tau


@habit(plain=False, without={"tau": 0.0})
class LerpsAll(Followed):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        ByHand.training_step(self, batch, batch_idx)
        with torch.no_grad():
            own, other = zip(*self.pairs(), strict=True)
            torch._foreach_lerp_(list(own), list(other), self.tau)


@habit(plain=False, without={"tau": 0.0})
class FollowsAtTheStart(Followed):
    """Before the target is used, and the model as it was left by the last batch."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        with torch.no_grad():
            for own, other in self.pairs():
                own.lerp_(other, self.tau)
        ByHand.training_step(self, batch, batch_idx)


@habit(plain=False, without={"tau": 0.0})
class LooksBeforeAndAfter(Followed):
    """Logs how far the target is, while it follows."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        ByHand.training_step(self, batch, batch_idx)
        with torch.no_grad():
            for place, (own, other) in enumerate(self.pairs()):
                self.log(f"before/{place}", (own - other).abs().sum())
                own.lerp_(other, self.tau)
                self.log(f"after/{place}", (own - other).abs().sum())
            self.log("of_all", sum((own * other).sum() for own, other in self.pairs()))


@habit(plain=False)
class AveragesByTorch(ByHand):
    def __init__(self) -> None:
        super().__init__()
        self.average = AveragedModel(nn.Sequential(*self.layers, self.head))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        super().training_step(batch, batch_idx)
        self.average.update_parameters(nn.Sequential(*self.layers, self.head))


@habit(plain=False, shows=False)  # what it shows is on whole batches
class Wasserstein(ByHand):
    """Weights are kept small, after the update, and fade."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        super().training_step(batch, batch_idx)
        with torch.no_grad():
            for p in self.head.parameters():
                for _ in range(2):
                    p.mul_(0.9)
            for p in self.layers.parameters():
                p.data.clamp_(-0.2, 0.2)
            self.layers[1].linear.weight /= self.layers[1].linear.weight.norm()


@habit(plain=False, shows=False)
class Spectral(ByHand):
    """A power iteration in each forward, of weights alone."""

    def __init__(self) -> None:
        super().__init__()
        self.layers[0].linear = spectral_norm(nn.Linear(WIDTH, WIDTH))
        self.layers[3].linear = spectral_norm(nn.Linear(WIDTH, WIDTH))


@habit(plain=False, shows=False)
class UpdatesByGradients(ByHand):
    """Without an optimizer, for all that it configures."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.zero_grad()
        self.manual_backward(self.loss(batch))
        with torch.no_grad():
            for p in self.parameters():
                p -= 0.1 * p.grad


@habit(plain=False, shows=False)
class MomentumInBuffers(ByHand):
    def __init__(self) -> None:
        super().__init__()
        for place, p in enumerate([*self.parameters()]):
            self.register_buffer(f"velocity{place}", torch.zeros_like(p))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.zero_grad()
        self.manual_backward(self.loss(batch))
        with torch.no_grad():
            for place, p in enumerate(self.parameters()):
                velocity = getattr(self, f"velocity{place}")
                velocity.copy_(0.9 * velocity + p.grad)
                p.add_(velocity, alpha=-0.1)


@habit(plain=False, shows=False)
class CountsOfTheBatch(ByHand):
    """Buffers that each micro-batch changes: a queue and its pointer, a center, counts."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("queue", torch.zeros(24, WIDTH))
        self.register_buffer("place", torch.tensor([0]))
        self.register_buffer("counts", torch.zeros(CLASSES))
        self.register_buffer("one", torch.tensor(1.0))
        self.register_buffer("seen", torch.tensor(0.0))
        self.register_buffer("samples", torch.tensor(0.0))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        super().training_step(batch, batch_idx)
        x, y = batch
        place = int(self.place)
        self.queue[place : place + len(x)] = x
        self.place[0] = (place + len(x)) % len(self.queue)
        for label in y:
            self.counts[label] += 1
            self.samples += 1
        self.seen.copy_(self.seen + self.one * len(x))


@habit(plain=False, expect=error(r"(?s)the change of head\.bias by mul_\(.*once_a_batch\.py:\d+.*called for by all"))
class ChangesByMicroBatch(ByHand):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        super().training_step(batch, batch_idx)
        with torch.no_grad():
            self.head.bias.mul_(0.5 + 0.1 * float(batch[0][0, 0] > 0) + 0.1 * float(batch[0][0, 1] > 0))


ON_WHOLE_BATCHES = (
    *(CopiesAMixture, Lerps, MultipliesAndAdds, AssignsData, LerpsAll, FollowsAtTheStart, LooksBeforeAndAfter),
    *(AveragesByTorch, Wasserstein, Spectral, UpdatesByGradients, MomentumInBuffers, CountsOfTheBatch),
)
