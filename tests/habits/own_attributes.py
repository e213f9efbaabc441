"""What a hand-optimized step keeps on modules while its micro-batches wait for one another."""

from __future__ import annotations

import contextlib
import dataclasses
from collections import deque
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchmetrics.classification import MulticlassAccuracy

from tests.habits.modules import CLASSES, SAMPLES, WIDTH, Layer, Layers
from tests.habits.table import error, habit


class ByHand(Layers):
    on_last_stage = ("judge",)

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.judge = nn.Linear(2 * WIDTH, 1)
        self.seen: list[Any] = []

    def configure_optimizers(self) -> Any:
        generator = torch.optim.SGD([*self.layers.parameters(), *self.head.parameters()], 0.1)
        return [generator, torch.optim.SGD(self.judge.parameters(), 0.1)]

    def update(self, number: int, loss: Tensor) -> None:
        optimizer = self.optimizers()[number]
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()

    def judged(self, real: Tensor, fake: Tensor, is_real: bool) -> Tensor:
        score = self.judge(torch.cat([real, fake], 1))
        return F.binary_cross_entropy_with_logits(score, torch.full_like(score, float(is_real)))


@habit(plain=False)
class PairKeptOnSelf(ByHand):
    """As pix2pix: what the first update has made, on `self`, is used by the second one."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        self.real, _ = batch
        self.fake = fake = self.features(self.real)
        self.loss_of_generator = self.judged(self.real, self.fake, True)
        self.update(0, self.loss_of_generator)
        assert self.fake is fake and self.real is batch[0]
        self.loss_of_judge = self.judged(self.real, self.fake.detach(), False)
        self.update(1, self.loss_of_judge)
        self.log_dict({"generator": self.loss_of_generator, "judge": self.loss_of_judge})


@dataclasses.dataclass
class Pair:
    real: Any = None
    fake: Any = None
    count: int = 0


@habit(plain=False, observed=["counts"])
class PairInDictionaryAndRecord(ByHand):
    def __init__(self) -> None:
        super().__init__()
        self.pair, self.losses, self.counts = Pair(), dict[str, Any](), {"steps": 0}

    def training_step(self, batch: Any, batch_idx: int) -> None:
        self.pair.real, _ = batch
        self.pair.fake = self.features(self.pair.real)
        self.counts["steps"] += 1
        self.losses["generator"] = self.judged(self.pair.real, self.pair.fake, True)
        kept = self.pair.real, self.pair.fake, self.losses["generator"]
        self.update(0, self.losses["generator"])
        found = self.pair.real, self.pair.fake, self.losses["generator"]
        assert all(one is other for one, other in zip(kept, found, strict=True))
        self.losses["judge"] = self.judged(self.pair.real, self.pair.fake.detach(), False)
        self.counts["steps"] += 1
        self.update(1, self.losses["judge"])
        self.log_dict(self.losses)


class Shift(nn.Module):
    def __init__(self, by: Tensor) -> None:
        super().__init__()
        self.by = by

    def forward(self, x: Tensor) -> Tensor:
        return x + self.by


@habit(plain=False)
class ModulesAndBuffersSet(ByHand):
    """A layer made in the step, another one that is taken away again, a buffer, and a metric logged after an update."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("cache", torch.zeros(SAMPLES, WIDTH), persistent=False)
        self.accuracy = MulticlassAccuracy(CLASSES, average="micro")

    def training_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        h = self.features(x)
        self.cache, self.shift, self.way = h.detach(), Shift(h.detach()), nn.Identity()
        logits = self.head(self.way(h))
        self.accuracy(logits, y)
        kept = self.cache, self.shift, self.way
        self.update(0, F.cross_entropy(logits, y))
        assert all(one is other for one, other in zip(kept, (self.cache, self.shift, self.way), strict=True))
        self.log("accuracy", self.accuracy, on_step=True, on_epoch=True)
        self.update(1, self.judged(self.way(self.cache), self.shift(x), False))
        del self.way

    def on_train_batch_end(self, *_: Any) -> None:
        self.cache = torch.zeros(SAMPLES, WIDTH)


class Caching(Layer):
    def forward(self, x: Tensor) -> Tensor:
        self.cache = super().forward(x)
        return self.cache * (2.0 if self.training else 1.0)


@habit(plain=False)
class CachedByALayer(ByHand):
    """And the layer is in evaluation for the first update."""

    layer = Caching

    @contextlib.contextmanager
    def evaluating(self, module: nn.Module) -> Iterator[None]:
        was = module.training
        module.eval()
        try:
            yield
        finally:
            module.train(was)

    def training_step(self, batch: Any, batch_idx: int) -> None:
        with self.evaluating(self.layers[0]):
            h = self.features(batch[0])
            cache = self.layers[0].cache
            self.update(0, F.cross_entropy(self.head(h), batch[1]))
        assert self.layers[0].cache is cache and self.layers[0].training
        self.update(1, self.judged(h.detach(), self.layers[0].cache.detach(), False))


@habit(plain=False, observed=["count", "samples"])
class CountsInEachPart(ByHand):
    count = 0
    samples = 0

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        assert self.count % 8 == 0 and self.samples == self.count // 8 * len(batch[0])

    def training_step(self, batch: Any, batch_idx: int) -> None:
        self.count += 1
        self.samples += len(batch[0])
        h = self.features(batch[0])
        self.update(0, F.cross_entropy(self.head(h), batch[1]) * (1 + self.count % 3))
        self.count += 1
        self.update(1, self.judged(h.detach(), batch[0], False))


@habit(expect=error(r"'factor' of a FactorPutBack .*num_microbatches=1"), plain=False)
class FactorPutBack(ByHand):
    factor = 1.0

    def training_step(self, batch: Any, batch_idx: int) -> None:
        with mock.patch.object(self, "factor", self.factor * 2):
            self.update(0, F.cross_entropy(self(batch[0]), batch[1]) * self.factor)


@habit(plain=False, observed=["total", "kept", "highest", "last"])
class SumsAndOwnNumbers(ByHand):
    """In each part: sums over micro-batches, which also keep a tensor and a tuple, and numbers of each one's own."""

    def __init__(self) -> None:
        super().__init__()
        self.total, self.kept, self.highest, self.last, self.of_step = torch.zeros(()), (), 0.0, 0.0, 0.0

    def training_step(self, batch: Any, batch_idx: int) -> None:
        h = self.features(batch[0])
        before, self.of_step = self.highest, 0.0
        for number in range(2):
            loss = F.cross_entropy(self.head(h.detach() if number else h), batch[1])
            self.total = self.total + 1
            self.kept = (*self.kept, number)
            self.highest = max(self.highest, loss.item())
            self.last = loss.item()
            self.of_step += loss.item()
            self.update(0, loss)
            assert self.last == loss.item()
        self.log("of_step", self.of_step / 2)
        assert self.highest >= before and self.of_step < 3 * self.highest

    def on_train_batch_end(self, *_: Any) -> None:
        batches = self.trainer.fit_loop.epoch_loop.batch_progress.total.completed + 1
        assert len(self.kept) == float(self.total) == 8 * batches


@habit(plain=False)
class SetByAHook(ByHand):
    """A hook between the parts sets what the step has set before, and adds to a list that the step has made anew."""

    has_updated = False

    def __init__(self) -> None:
        super().__init__()
        self.updates: list[str] = []

    def training_step(self, batch: Any, batch_idx: int) -> None:
        self.has_updated = False
        self.updates.clear()
        self.updates.append("begun")
        h = self.features(batch[0])
        self.update(0, F.cross_entropy(self.head(h), batch[1]))
        self.seen.append((self.has_updated, *self.updates))
        self.update(1, self.judged(h.detach(), batch[0], False))

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.has_updated = True
        self.updates.append("updated")

    def on_train_batch_end(self, *_: Any) -> None:
        assert self.seen == [(True, "begun", "updated")] * 4
        self.seen.clear()


@habit(expect=error(r"removes a hook .*h\.remove.*register_forward_hook"), plain=False)
class HookAroundUpdate(ByHand):
    def training_step(self, batch: Any, batch_idx: int) -> None:
        h = self.layers[0].register_forward_hook(lambda module, given, found: found * 0.5)
        self.update(0, F.cross_entropy(self(batch[0]), batch[1]))
        h.remove()


@habit(plain=False)
class GradientAfterBackward(ByHand):
    """As GradNorm: gradients of what was computed before a backward are taken after it."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        h = self.features(x)
        judged = self.judged(h.detach(), x, True)
        loss = F.cross_entropy(self.head(h), y)
        optimizer = self.optimizers()[0]
        optimizer.zero_grad()
        self.manual_backward(loss, retain_graph=True)
        (of_judge,) = torch.autograd.grad(judged, self.judge.weight)
        (of_head,) = torch.autograd.grad(loss, self.head.weight)
        optimizer.step()
        self.log_dict({"judge": of_judge.norm(), "head": of_head.norm()})


@habit(plain=False)
class TogglesBetweenForwardAndBackward(ByHand):
    """As CycleGAN: the layers run several times, on what they have made, before the micro-batches meet."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        x, _ = batch
        optimizer = self.optimizers()[0]
        there = self.features(x)
        other = self.features(-x)
        loss = F.l1_loss(self.features(there), x) + other.square().mean()
        self.toggle_optimizer(optimizer)
        self.manual_backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        self.untoggle_optimizer(optimizer)
        self.log("loss", loss)


@habit(plain=False)
class FeaturesCollectedByHooks(ByHand):
    """In a list that each step clears first, and one that keeps the last ones; a third collects for the epoch's end."""

    def __init__(self) -> None:
        super().__init__()
        self.collected: list[Tensor] = []
        self.recent: deque[Tensor] = deque(maxlen=2)
        self.losses: list[Tensor] = []
        for layer in self.layers:
            layer.register_forward_hook(lambda module, given, found: self.collected.append(found))

    def training_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        self.collected.clear()
        loss = F.cross_entropy(self(x), y)
        self.recent.extend(self.collected[:2])
        self.losses.append(loss.detach())
        kept = [*self.collected, *self.recent]
        self.update(0, loss)
        assert all(one is other for one, other in zip(kept, [*self.collected, *self.recent], strict=True))
        loss = self.judged(self.recent[0].detach(), self.collected[-1].detach(), False)
        self.losses.append(loss.detach())
        self.update(1, loss)

    def on_train_epoch_end(self) -> None:
        assert len(self.losses) == 8 * self.trainer.num_training_batches
        self.log("mean", torch.stack(self.losses).mean())
        self.losses.clear()


@habit(expect=error(r"adds to self\.seen, and takes from it after.*clear it at the begin"), plain=False)
class ListClearedAtTheEnd(ByHand):
    def training_step(self, batch: Any, batch_idx: int) -> None:
        self.seen.append(self.features(batch[0]))
        self.update(0, F.cross_entropy(self.head(self.seen[-1]), batch[1]))
        self.update(1, self.judged(batch[0], self.seen[-1].detach(), False))
        self.seen.clear()
