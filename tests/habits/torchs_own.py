"""Torch's own modules and functions, replaced or set in ways that a call answered as a whole could overlook."""

from __future__ import annotations

import copy
import io
import pickle
import weakref
from collections.abc import Callable
from types import MethodType
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.habits.modules import WIDTH, Layers, Noting
from tests.habits.table import habit


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear, self.act = nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, WIDTH), nn.LeakyReLU(0.1)
        self.drop = nn.Dropout(0.0)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.drop(self.act(self.linear(self.norm(x))))


class Plains(Layers):
    depth = 6
    layer: Any = Plain
    is_on = True


class Masked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, masks: tuple[Tensor, Tensor]) -> Tensor:
        return x + self.linear(x * masks[0]) * masks[1]


@habit(epochs=3, without={"is_on": False})
class BufferByEpoch(Plains):
    """Buffers are given to blocks in another order in the second epoch, and a computed one in the third."""

    layer = Masked

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("cos", torch.arange(WIDTH).cos())
        self.register_buffer("sin", torch.arange(WIDTH).sin())

    def features(self, x: Tensor) -> Tensor:
        later = [(self.sin, self.cos), (self.sin * 0.5, self.cos)]
        masks = [(self.cos, self.sin), *(later if self.is_on else [])][self.current_epoch if self.is_on else 0]
        for layer in self.layers:
            x = layer(x, masks=masks)
        return x


@habit(epochs=3, plain=False, without={"is_on": False})  # plain Lightning draws other masks
class ScheduledByNumpy(Plains):
    """A slope, a rate of dropout and a momentum are numbers of numpy's, which a hook sets by epoch."""

    def on_train_epoch_start(self) -> None:
        epoch = self.current_epoch if self.is_on else 0
        for layer in self.layers:
            layer.act.negative_slope = np.linspace(0.1, 0.6, 3)[epoch]
            layer.drop.p = np.linspace(0.1, 0.4, 3)[epoch]
            layer.norm.momentum = np.maximum(0.1 * 0.5**epoch, 0.01)


class Pooled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.pool, self.linear = nn.AdaptiveAvgPool1d([4]), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        pooled = self.pool(self.linear(x).unsqueeze(1))
        return x + F.interpolate(pooled, size=WIDTH).squeeze(1)


@habit(epochs=3, without={"is_on": False})
class SizeInAList(Plains):
    """A pool's size is a list, in which a hook changes the number."""

    layer = Pooled

    def on_train_epoch_start(self) -> None:
        for layer in self.layers:
            layer.pool.output_size[0] = 2 + 2 * self.current_epoch if self.is_on else 4


def circular(model: Plains) -> Callable[..., Tensor]:
    def forward(conv: nn.Conv1d, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        model.found.append(tuple(x.shape))  # type: ignore[attr-defined]
        return F.conv1d(F.pad(x, (1, 1), mode="circular"), weight, bias) * (1 + model.current_epoch)

    return forward


class Convolved(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(1, 1, 3)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.conv(F.pad(x, (0, 0)).unsqueeze(1)).squeeze(1).mean(-1, keepdim=True)


@habit(epochs=3, plain=False, observed=["found"], without={"is_on": False})  # its number of calls
class MethodOfAConvolution(Plains, Noting):
    """`_conv_forward` of torch's layers is replaced by one that pads another way."""

    layer = Convolved

    def __init__(self) -> None:
        super().__init__()
        for layer in self.layers if self.is_on else ():
            layer.conv._conv_forward = MethodType(circular(self), layer.conv)


@habit(epochs=2, plain=False, without={"is_on": False})  # plain Lightning numbers micro-batches
class GlobalHookForAStep(Plains):
    """A hook on all modules scales what blocks give, for the first batch."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if self.is_on and not self.global_step:
            register = torch.nn.modules.module.register_module_forward_hook
            self.handle = register(lambda module, args, y: y * 0.5 if isinstance(module, Plain) else None)

    def on_train_batch_end(self, *args: Any) -> None:
        if self.is_on and self.global_step == 1:
            self.handle.remove()


@habit(epochs=3, plain=False, observed=["found"], without={"is_on": False})  # its number of calls
class CallsOfModulesReplaced(Plains, Noting):
    """`nn.Module.__call__` is replaced for the run, and `_call_impl` of blocks in the second epoch."""

    def on_fit_start(self) -> None:
        self.called = called = nn.Module.__call__

        def scaled(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            result = called(module, *args, **kwargs)
            if type(module) is not nn.Linear:
                return result
            self.found.append(tuple(result.shape))
            return result * (1.0 - 0.2 * self.current_epoch)

        if self.is_on:
            nn.Module.__call__ = scaled  # type: ignore[method-assign]

    def on_train_epoch_start(self) -> None:
        if self.is_on and self.current_epoch == 1:
            for layer in self.layers:
                layer._call_impl = self.halved(layer._call_impl)

    def halved(self, plain: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *args, **kwargs: plain(*args, **kwargs) * 0.5

    def on_fit_end(self) -> None:
        nn.Module.__call__ = self.called  # type: ignore[method-assign]


class Routed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.is_routed = nn.Linear(WIDTH, WIDTH), True

    def forward(self, x: Tensor) -> Tensor:
        y = x + self.linear(x).tanh()
        if self.is_routed:
            y.aux_loss = y.square().mean()
        return y


@habit(epochs=2, plain=False, without={"is_on": False})  # plain Lightning numbers micro-batches
class LossOnATensor(Plains):
    """Blocks leave a loss on what they give, in every second step."""

    layer = Routed

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        loss = torch.zeros(())
        for layer in self.layers:
            layer.is_routed = not (self.is_on and batch_idx % 2)
            x = layer(x)
            loss = loss + getattr(x, "aux_loss", 0.0)
        return F.cross_entropy(self.head(x), y) + 0.1 * loss


@habit(plain=False)  # its number of calls
class CachedByWeakReference(Plains):
    """A value is kept for as long as the tensor that it was computed for is there."""

    count = 0

    def scale_of(self, x: Tensor) -> float:
        kept = self.__dict__.get("kept")
        if kept is None or kept() is not x:
            self.count += 1
            self.__dict__["kept"] = weakref.ref(x)
        return 1.0 + 0.01 * self.count

    def features(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x * self.scale_of(x) + self.scale_of(x)


class Attending(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.act = nn.MultiheadAttention(WIDTH, 2, batch_first=True), nn.Softmax(dim=-1)

    def forward(self, x: Tensor) -> Tensor:
        tokens = torch.stack([x, x.roll(1, -1), -x], 1)
        return x + self.act(self.inner(tokens, tokens, tokens, need_weights=False)[0].mean(1))


@habit(epochs=3, plain=False, observed=["found"], without={"is_on": False})  # its number of calls
class FunctionsReplaced(Plains, Noting):
    """`F.softmax`, `F.cross_entropy` and `F.scaled_dot_product_attention` are wrapped, by epoch and counted."""

    layer = Attending

    def on_fit_start(self) -> None:
        self.plain = F.softmax, F.cross_entropy, F.scaled_dot_product_attention
        softmax, cross_entropy, attention = self.plain

        def tempered(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            self.found.append("softmax")
            return softmax(x / (1.0 + self.current_epoch), *args, **kwargs)

        def noted(*args: Any, **kwargs: Any) -> Tensor:
            self.found.append("attention")
            return attention(*args, **kwargs) * (1.0 - 0.2 * self.current_epoch)

        if self.is_on:
            F.softmax, F.scaled_dot_product_attention = tempered, noted  # type: ignore[assignment]
            F.cross_entropy = lambda x, y, **kwargs: cross_entropy(x, y, label_smoothing=0.1, **kwargs)

    def on_fit_end(self) -> None:
        F.softmax, F.cross_entropy, F.scaled_dot_product_attention = self.plain


class Acting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.act = nn.Linear(WIDTH, WIDTH), nn.Sequential(nn.LeakyReLU(0.1), nn.Tanh())

    def forward(self, x: Tensor) -> Tensor:
        return x + self.act(self.linear(x))


@habit(observed=["loaded"])
class ModulesPickledInStep(Plains):
    """Modules are pickled in a step, and copies that it makes are saved at the end."""

    layer = Acting

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if "mine" not in self.__dict__:
            self.__dict__["mine"] = copy.deepcopy(self.layers[0].act)
            self.__dict__["pickled"] = pickle.loads(pickle.dumps(self.layers[3].act))
        x, y = batch
        x = self.features(x)
        return F.cross_entropy(self.head(x + self.mine(x) + self.pickled(x)), y)

    def on_fit_end(self) -> None:
        file = io.BytesIO()
        torch.save(self.mine, file)
        file.seek(0)
        self.loaded = torch.load(file, weights_only=False)(torch.linspace(-1, 1, 5)).tolist()
