"""Functions under ``torch.utils.checkpoint`` that do more than compute: their Python runs again in backward."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

from tests.habits.modules import Layer, Layers, Normed
from tests.habits.table import EQUAL, error, habit


class Recomputed(Layers):
    """Each layer is recomputed."""

    reenters = False

    def features(self, x: Tensor) -> Tensor:
        if self.reenters:
            x = x.requires_grad_(True)
        for number, layer in enumerate(self.layers):
            x = checkpoint(self.run, layer, x, number, use_reentrant=self.reenters)
        return x

    def run(self, layer: Any, x: Tensor, number: int) -> Tensor:
        return layer(x)


@habit(observed=["calls", "order"])
class CheckpointCounts(Recomputed):
    """A counter and a list on the module, which backward changes once more."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0
        self.order: list[int] = []

    def run(self, layer: Any, x: Tensor, number: int) -> Tensor:
        self.calls += 1
        self.order.append(number)
        return layer(x)


@habit(observed=["calls", "order"], shows=False)  # both ways come to the same
class CheckpointCountsWithReentry(CheckpointCounts):
    """The same in torch's older way."""

    reenters = True


@habit(observed=["layers.0.calls", "layers.2.calls", "layers.3.calls"])
class CheckpointCountsAtItsEnd(Recomputed):
    """A counter of each layer goes up after all is computed, which torch does not come to again."""

    class Counting(Layer):
        def __init__(self) -> None:
            super().__init__()
            self.calls = 0

        def forward(self, x: Tensor) -> Tensor:
            x = super().forward(x)
            self.calls += 1
            return x

    layer = Counting


@habit(observed=["layers.0.calls", "layers.3.calls"])
class CheckpointCountsWithoutEarlyStop(CheckpointCountsAtItsEnd):
    """The same where it is told not to stop early."""

    def features(self, x: Tensor) -> Tensor:
        with set_checkpoint_early_stop(False):
            return super().features(x)


@habit(expect=error(r"again.*recomputed\.py:\d+.*argument"))
class CheckpointComputesWithCounter(Recomputed):
    """A counter that a checkpointed function changes scales what it computes."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def run(self, layer: Any, x: Tensor, number: int) -> Tensor:
        self.calls += 1
        return layer(x * (1 + 0.01 * self.calls))


@habit(expect=error(r"again.*recomputed\.py:\d+.*argument"), plain=False)
class CheckpointDrawsFromPython(Recomputed):
    """`random.random()` inside of a checkpointed function scales what a layer is given."""

    def run(self, layer: Any, x: Tensor, number: int) -> Tensor:
        return layer(x * (0.5 + random.random()))


@habit(plain=False)
class CheckpointDrawsAtItsEnd(Recomputed):
    """The same of what a layer gives, which backward has no need of again."""

    def run(self, layer: Any, x: Tensor, number: int) -> Tensor:
        return layer(x) * (0.5 + random.random())


@habit(expect=error(r"again.*recomputed\.py:\d+.*argument"), plain=False)
class CheckpointDrawsFromNumpy(Recomputed):
    """The same with numpy, and both ways of torch."""

    reenters = True

    def run(self, layer: Any, x: Tensor, number: int) -> Tensor:
        return layer(x) * float(np.random.uniform(0.5, 1.5))


@habit(observed=["names"], plain=False)
class CheckpointDrawsForNotes(Recomputed):
    """Numbers of Python's and numpy's that are drawn and noted, and not computed with."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[float] = []

    def run(self, layer: Any, x: Tensor, number: int) -> Tensor:
        self.names.append(random.random() + np.random.rand())
        return layer(x)


@habit(observed=["layers.1.mask"])
class CheckpointCaches(Recomputed):
    """A mask is made once and kept, and the last output too."""

    class Caching(Layer):
        def __init__(self) -> None:
            super().__init__()
            self.mask: Any = None
            self.size = 0

        def forward(self, x: Tensor) -> Tensor:
            if self.mask is None or x.shape[1] > self.size:
                self.size = x.shape[1]
                self.mask = 1 + torch.arange(self.size, dtype=x.dtype) / self.size
            self.last = x.detach()
            return super().forward(x * self.mask)

    layer = Caching


@habit(observed=["seen"], without={"weight": 0.0})
class CheckpointKeepsAuxiliaryLoss(Recomputed):
    """Each layer leaves a term of the loss on itself, as routers of experts do, and a list of tensors."""

    weight = 0.1

    class Routing(Layer):
        auxiliary: Any = None

        def forward(self, x: Tensor) -> Tensor:
            found = super().forward(x)
            self.auxiliary = found.pow(2).mean()
            return found * 1.5

    layer = Routing

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Tensor] = []

    def run(self, layer: Any, x: Tensor, number: int) -> Tensor:
        mean = x.detach().mean()
        mean.mul_(2)
        self.seen.append(mean)
        return layer(x)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        loss = F.cross_entropy(self(x), y)
        loss = loss + self.weight * sum(layer.auxiliary for layer in self.layers)
        for layer in self.layers:
            layer.auxiliary = None
        return loss


@habit(expect=error(r"again.*recomputed\.py:\d+.*argument"))
class CheckpointAverages(Recomputed):
    """A running mean that is a plain attribute, and with which it computes."""

    def __init__(self) -> None:
        super().__init__()
        self.mean: Any = 0.0

    def run(self, layer: Any, x: Tensor, number: int) -> Tensor:
        self.mean = 0.9 * self.mean + 0.1 * x.detach().mean()
        return layer(x - self.mean)


@habit(observed=["norms"])
class CheckpointReads(Recomputed):
    """A norm is read inside of a checkpointed function, and noted."""

    def __init__(self) -> None:
        super().__init__()
        self.norms: list[float] = []

    def run(self, layer: Any, x: Tensor, number: int) -> Tensor:
        self.norms.append(x.norm().item())
        return layer(x)


@habit(observed=["outputs"])
class CheckpointWithForwardHooks(Recomputed):
    """Forward hooks of layers that are recomputed note what they see."""

    def __init__(self) -> None:
        super().__init__()
        self.outputs: list[Tensor] = []
        for layer in self.layers:
            layer.linear.register_forward_hook(lambda module, args, output: self.outputs.append(output.detach().norm()))


@habit(observed=["calls"], plain=False)
class CheckpointCountsByHand(Recomputed):
    """A counter in checkpointed functions under manual optimization, with a loss that leaves layers out."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.calls = 0

    def run(self, layer: Any, x: Tensor, number: int) -> Tensor:
        self.calls += 10**number
        return layer(x)

    def training_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(F.cross_entropy(self(x), y))
        optimizer.step()
        optimizer.zero_grad()
        features = checkpoint(self.run, self.layers[0], x, 0, use_reentrant=False)
        checkpoint(self.run, self.layers[1], features, 5, use_reentrant=False)
        self.manual_backward(features.pow(2).mean())
        optimizer.step()


@habit(observed=["seen"])
class CheckpointInCheckpoint(Recomputed):
    """Checkpointed functions inside of one; the outer one takes notes."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[int] = []

    def features(self, x: Tensor) -> Tensor:
        for number in range(0, len(self.layers), 2):
            x = checkpoint(self.pair, x, number, use_reentrant=False)
        return x

    def pair(self, x: Tensor, number: int) -> Tensor:
        self.seen.append(number)
        for layer in self.layers[number : number + 2]:
            x = checkpoint(layer, x, use_reentrant=False)
        return x


@habit(shows=False)
class CheckpointKeepsInCheckpoint(CheckpointInCheckpoint):
    """The inner ones keep what they compute."""

    class Keeping(Layer):
        kept: Any = None

        def forward(self, x: Tensor) -> Tensor:
            found = super().forward(x)
            self.kept, self.size = found.detach(), len(x)
            return found

    layer = Keeping

    def pair(self, x: Tensor, number: int) -> Tensor:
        for layer in self.layers[number : number + 2]:
            x = checkpoint(layer, x, use_reentrant=False)
        return x


@habit(expect=error(r"Counting\.calls.*outside"), shows=False)
class CheckpointCountsInCheckpoint(CheckpointKeepsInCheckpoint):
    """The inner ones count."""

    class Counting(Layer):
        calls = 0

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            return super().forward(x)

    layer = Counting


@habit(plain=False, observed=["layers.0.calls"])
class CheckpointCountsAndReads(Recomputed):
    """A counter beside dropout and batch norms, in a step that reads its loss."""

    class Counting(Normed):
        calls = 0

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            return F.dropout(super().forward(x), 0.2)

    layer = Counting

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.last = loss.item()
        return loss


CALLED_TWICE = "to be cut into 2 stages, and its training_step calls 1 module"


class Penalised(Recomputed):
    """Each layer is recomputed with a penalty on the gradient of what it gives."""

    dropout = 0.0
    weight = 0.1
    reads = False
    layer = Layer

    def features(self, x: Tensor) -> Tensor:
        penalties = []
        for layer in self.layers:
            x, penalty = checkpoint(self.penalised, layer, x, use_reentrant=False)
            penalties.append(penalty)
        self.penalty = sum(penalties)
        return x

    def penalised(self, layer: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        given = x.detach().requires_grad_(True)
        found = F.dropout(layer(given), self.dropout)
        (gradient,) = torch.autograd.grad(found.sum(), given, create_graph=True)
        if self.reads:
            self.largest = max(getattr(self, "largest", 0.0), gradient.abs().max().item())
        return layer(x), gradient.pow(2).mean()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        return F.cross_entropy(self(x), y) + self.weight * self.penalty


@habit(without={"weight": 0.0})
class CheckpointWithPenalty(Penalised):
    """Without dropout."""


@habit(plain=False, without={"weight": 0.0})
class CheckpointWithPenaltyAndDropout(Penalised):
    """Dropout in the part that is differentiated."""

    dropout = 0.3


@habit(without={"weight": 0.0})
class CheckpointWithPenaltyRead(Penalised):
    """The largest gradient is read, and the penalty weighed by it."""

    def penalised(self, layer: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        found, penalty = super().penalised(layer, x)
        return found, penalty * min(1.0, penalty.item())


@habit(
    expect=error(r"torch.autograd.grad \(.*recomputed\.py:\d+.*largest.*outside"),
    automatic=error(CALLED_TWICE),
    shows=False,
)
class CheckpointWithPenaltyNoted(Penalised):
    """The largest gradient is read inside of the function, and kept."""

    reads = True


@habit(
    expect=error(r"(?s)backward.*recomputed\.py:\d+.*outside"),
    automatic=error(CALLED_TWICE),
    shows=False,
    plain=False,
)
class CheckpointRunsBackward(Recomputed):
    """`backward()` of a term inside of a function that is recomputed."""

    def run(self, layer: Any, x: Tensor, number: int) -> Tensor:
        layer(x.detach()).pow(2).mean().backward()
        return layer(x)


@habit(shows=False)
class NormedByALaterStageInCheckpoint(Layers):
    """A checkpointed batch norm runs where the data is, and writes into its statistics once more in backward."""

    layer = Normed

    def features(self, x: Tensor) -> Tensor:
        x = checkpoint(self.layers[0], self.layers[3](x), use_reentrant=False)
        return self.layers[2](self.layers[1](x))


@habit(expect=error(r"checkpointed function.* stage.*do without the checkpoint, or "), automatic=EQUAL, shows=False)
class NormedByTwoStagesInCheckpoint(NormedByALaterStageInCheckpoint):
    """Two stages, of which one has a copy, would each add to the statistics once more."""

    def features(self, x: Tensor) -> Tensor:
        x = self.layers[1](checkpoint(self.layers[0], x, use_reentrant=False))
        return checkpoint(self.layers[0], self.layers[3](self.layers[2](x)), use_reentrant=False)


class BackwardTwice(Recomputed):
    """Two losses of one forward, one backward after the other."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.calls = 0

    def training_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        optimizer = self.optimizers()
        logits = self.head(self.features(x))
        self.manual_backward(F.cross_entropy(logits, y), retain_graph=True)
        self.manual_backward(0.5 * F.cross_entropy(logits * 2, y))
        optimizer.step()
        optimizer.zero_grad()


@habit(observed=["calls"])
class CheckpointCountsInTwoBackwards(BackwardTwice):
    """A counter goes up in forward and in each of the two."""

    def run(self, layer: Any, x: Tensor, number: int) -> Tensor:
        self.calls += 1
        return layer(x)


SECOND = r"goes through the checkpointed function called at .*once more\. Call it without the checkpoint"


@habit(expect=error(SECOND), shows=False)
class NormedInTwoBackwards(BackwardTwice):
    """Statistics are updated in forward and in each of the two."""

    layer = Normed


@habit(expect=error(SECOND), observed=["calls"])
class CheckpointCountsInGradients(Recomputed):
    """A counter goes up where the step takes gradients of the last layer, and in backward."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def run(self, layer: Any, x: Tensor, number: int) -> Tensor:
        self.calls += 1
        return layer(x)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        features = self.features(x)
        gradients = torch.autograd.grad(features.square().mean(), self.layers[3].parameters(), retain_graph=True)
        self.log("norm", sum(gradient.square().sum() for gradient in gradients))
        return F.cross_entropy(self.head(features), y)


@habit(expect=error(SECOND), shows=False)
class NormedInGradients(CheckpointCountsInGradients):
    """Likewise with statistics."""

    layer = Normed

    def run(self, layer: Any, x: Tensor, number: int) -> Tensor:
        return layer(x)
