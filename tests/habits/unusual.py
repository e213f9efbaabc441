"""Habits that are seen seldom: threads, caches, lazily made modules, odd layers and losses."""

from __future__ import annotations

import contextvars
import functools
import io
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector, prune, vector_to_parameters

from tests.habits.modules import CLASSES, SAMPLES, WIDTH, Layer, Layers
from tests.habits.table import error, habit


@functools.lru_cache(maxsize=8)
def mask(size: int) -> Tensor:
    return torch.ones(size, size).triu(1).bool()


@habit()
class MaskCached(Layers):
    """A mask comes from a cache, made in an earlier micro-batch."""

    def features(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x.masked_fill(mask(WIDTH)[0], 0.0)) + mask(WIDTH).float().mean()
        return x


@habit(shows=False, expect=error(r"pickle needs the data of .*unusual.py.*in the thread that they run in"))
class ThreadSavesWeights(Layers):
    """Weights are cloned in a hook, and written to a file by a thread."""

    def on_train_epoch_end(self) -> None:
        weights = {name: value.clone() for name, value in self.state_dict().items()}
        with ThreadPoolExecutor(1) as pool:
            pool.submit(lambda: torch.save(weights, io.BytesIO())).result()


@habit(expect=error(r"in the thread that they run in"), automatic=error("cannot be cut automatically"))
class ThreadsInForward(Layers):
    """Layers are called in threads of their own."""

    def features(self, x: Tensor) -> Tensor:
        with ThreadPoolExecutor(2) as pool:
            return sum(pool.map(lambda layer: layer(x), self.layers))


@habit(shows=False)  # which changes no number
class ForkedByJit(Layers):
    """torch.jit.fork and wait around each layer."""

    def features(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            future = torch.jit.fork(layer, x)
            x = torch.jit.wait(future)
        return x


@habit()
class ForwardAsGenerator(Layers):
    """A generator yields the hidden values."""

    def hidden(self, x: Tensor) -> Iterator[Tensor]:
        for layer in self.layers:
            x = layer(x)
            yield x

    def features(self, x: Tensor) -> Tensor:
        return torch.stack(list(self.hidden(x))).mean(0)


class Words(Layers):
    """Of bags of words."""

    def __init__(self) -> None:
        super().__init__()
        self.words = self.embedding()

    def embedding(self) -> nn.Module:
        return nn.Embedding(20, WIDTH)

    def chain(self) -> list[str]:
        return ["words", *super().chain()]

    @staticmethod
    def batch(generator: torch.Generator) -> Any:
        words = torch.randint(0, 20, (SAMPLES, 5), generator=generator)
        return words, torch.randint(0, CLASSES, (SAMPLES,), generator=generator)

    def features(self, x: Tensor) -> Tensor:
        return super().features(self.words(x).mean(1))


@habit(plain=False)
class EmbeddingMaxNorm(Words):
    """An embedding scales its rows down where they are read."""

    def embedding(self) -> nn.Module:
        return nn.Embedding(20, WIDTH, max_norm=0.5)


@habit()
class EmbeddingBags(Words):
    """An embedding bag."""

    def embedding(self) -> nn.Module:
        return nn.EmbeddingBag(20, WIDTH, mode="mean")

    def features(self, x: Tensor) -> Tensor:
        return Layers.features(self, self.words(x))


@habit()
class AdaptiveSoftmax(Layers):
    """A head with clusters of classes."""

    def __init__(self) -> None:
        super().__init__()
        self.adaptive = nn.AdaptiveLogSoftmaxWithLoss(WIDTH, CLASSES, [2])

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.adaptive(self.features(batch[0]), batch[1]).loss


@habit()
class CTC(Layers):
    """A loss over alignments."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        logits = torch.stack([self(x), self(x * 0.5), self(x * 0.2)]).log_softmax(-1)
        lengths = torch.full((len(x),), 3)
        return F.ctc_loss(logits, (y % 3 + 1)[:, None], lengths, torch.ones_like(lengths))


@habit()
class CTCOfColumn(Layers):
    """Its targets are a column of a matrix, between whose elements are others."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        logits = torch.stack([self(x), self(x * 0.5), self(x * 0.2)]).log_softmax(-1)
        targets = torch.stack([y, y.roll(1)], 1) % 3 + 1
        return F.ctc_loss(logits, targets[:, :1].flatten(), (3,) * len(x), (1,) * len(x))


@habit()
class SortsLosses(Layers):
    """Python's max and sorted compare losses."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        losses = [F.cross_entropy(self(x + shift), y) for shift in (0.0, 0.3, -0.3)]
        return max(losses) + sorted(losses)[0]


@habit()
class OptimizerHooks(Layers):
    """A hook of the optimizer clamps all parameters after each update."""

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)

        def clamp(*_: Any) -> None:
            with torch.no_grad():
                for parameter in self.parameters():
                    parameter.clamp_(-0.3, 0.3)

        optimizer.register_step_post_hook(clamp)
        return optimizer


@habit(plain=False)
class VectorOfParameters(Layers):
    """All parameters as one vector, and back."""

    def on_train_batch_end(self, *_: Any) -> None:
        with torch.no_grad():
            vector = parameters_to_vector(self.parameters())
            vector_to_parameters(vector * 0.99, self.parameters())


@habit()
class Pruned(Layers):
    """Masks on weights, from the beginning."""

    def __init__(self) -> None:
        super().__init__()
        for layer in self.layers:
            prune.l1_unstructured(layer.linear, "weight", 0.3)


@habit(without={"epoch": 2})
class PrunedInHook(Layers):
    """Masks on weights from the second epoch on: parameters change their names."""

    epoch = 1

    def on_train_epoch_start(self) -> None:
        if self.current_epoch == self.epoch:
            for layer in self.layers:
                prune.l1_unstructured(layer.linear, "weight", 0.3)


@habit(plain=False)
class FakeQuantised(Layers):
    """Observers note ranges in their buffers."""

    class Observed(Layer):
        def __init__(self) -> None:
            super().__init__()
            self.quantise = torch.ao.quantization.FakeQuantize()

        def forward(self, x: Tensor) -> Tensor:
            return self.quantise(super().forward(x))

    layer = Observed


@habit()
class Orthogonal(Layers):
    """Weights that stay orthogonal."""

    class Turned(Layer):
        def __init__(self) -> None:
            super().__init__()
            nn.utils.parametrizations.orthogonal(self.linear)

    layer = Turned


scale: contextvars.ContextVar[float] = contextvars.ContextVar("scale", default=1.0)


@habit()
class ScaleInContext(Layers):
    """A context variable."""

    class Scaled(Layer):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * scale.get()

    layer = Scaled

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        token = scale.set(0.5)
        try:
            return super().training_step(batch, batch_idx)
        finally:
            scale.reset(token)


@habit(plain=False)  # whose steps are fewer
class CountsInContextVar(ScaleInContext):
    """A context variable counts steps, and layers use it."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        scale.set(scale.get() * 1.1)
        return Layers.training_step(self, batch, batch_idx)

    def on_train_batch_end(self, *args: Any) -> None:
        self.log("scale", scale.get())


@habit(plain=False)  # whose steps are fewer
class CountsInEnvironment(CountsInContextVar):
    """An environment variable does."""

    class Scaled(Layer):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * (1 + 0.1 * int(os.environ["HABIT_STEPS"]))

    layer = Scaled

    def on_fit_start(self) -> None:
        os.environ["HABIT_STEPS"] = "0"

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        os.environ["HABIT_STEPS"] = str(int(os.environ["HABIT_STEPS"]) + 1)
        return Layers.training_step(self, batch, batch_idx)

    def on_train_batch_end(self, *args: Any) -> None:
        self.log("steps", float(os.environ["HABIT_STEPS"]))


@habit(plain=False)
class ForkedGenerator(Layers):
    """A seed of its own within a fork of the generators."""

    def features(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(3)
                noise = torch.randn_like(x)
            x = layer(x + 0.1 * noise)
        return x


@habit()
class BufferRegisteredInStep(Layers):
    """The first step registers a buffer."""

    def features(self, x: Tensor) -> Tensor:
        if not hasattr(self, "shift"):
            self.register_buffer("shift", torch.full((WIDTH,), 0.3))
        return super().features(x + self.shift)


@habit()
class GrowsInSecondEpoch(Layers):
    """A layer more from the second epoch on."""

    def on_train_epoch_start(self) -> None:
        if self.current_epoch == 1:
            torch.manual_seed(5)
            extra = Layer()
            self.layers.append(extra)
            self.trainer.optimizers[0].add_param_group({"params": list(extra.parameters())})


@habit(without={"epoch": 2})
class LayerDeleted(Layers):
    """A layer less: the ones after it change their names."""

    epoch = 1

    def on_train_epoch_start(self) -> None:
        if self.current_epoch == self.epoch:
            del self.layers[1]


@habit()
class ChannelsLast(Layers):
    """Images in another order of memory."""

    class Convolution(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(2, 2, 3, padding=1)
            self.drop = nn.Identity()

        def forward(self, x: Tensor) -> Tensor:
            return x + torch.tanh(self.conv(x.to(memory_format=torch.channels_last)))

    layer = Convolution

    def features(self, x: Tensor) -> Tensor:
        image = x.reshape(len(x), 2, 2, 2).to(memory_format=torch.channels_last)
        return super().features(image).flatten(1)


@habit()
class LaidOutAnew(Layers):
    """Layers give transposed values, slices and repetitions, whose gradients are laid out in other ways again."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList([nn.BatchNorm1d(6) for _ in range(self.depth)])
        self.beside = {f"norms.{i}": f"layers.{i}" for i in range(self.depth)}

    def features(self, x: Tensor) -> Tensor:
        x = x[:, None].expand(-1, 6, -1)
        for layer, norm in zip(self.layers, self.norms, strict=True):
            x = norm(layer(x)).transpose(0, 1)
            x = torch.cat([x, x.sin()], -1)[..., 3 : WIDTH + 3].transpose(0, 1)
        return x.mean(1)


@habit()
class BFloat16Blocks(Layers):
    """Two layers in bfloat16."""

    def __init__(self) -> None:
        super().__init__()
        self.layers[1].to(torch.bfloat16)
        self.layers[2].to(torch.bfloat16)

    def features(self, x: Tensor) -> Tensor:
        for number, layer in enumerate(self.layers):
            x = layer(x.bfloat16() if number in (1, 2) else x.float())
        return x.float()


@habit(expect=error(r"nested tensors.*padded"))
class JaggedBetween(Layers):
    """A nested tensor of parts of the activations."""

    def features(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
            nested = torch.nested.nested_tensor([x[0], x[1][:3]])
            x = x + nested.to_padded_tensor(0.0).sum() * 0.01
        return x


@habit(shows=False)  # which changes no number
class AnomalyDetected(Layers):
    """Anomaly detection around the step."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        with torch.autograd.set_detect_anomaly(True):
            return super().training_step(batch, batch_idx)


@habit(expect=error(r"unusual\.py:\d+.*saved.*checkpoint"), shows=False)  # which changes no number
class SavedTensorsHooks(Layers):
    """Hooks on what is saved for backward."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        with torch.autograd.graph.saved_tensors_hooks(lambda t: t.clone(), lambda t: t):
            return super().training_step(batch, batch_idx)
