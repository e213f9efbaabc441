"""Writes into views of what stages compute, and into what there are views of."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from tests.habits.modules import Layers
from tests.habits.table import error, habit


class Between(Layers):
    """What a subclass makes of a layer's output, and of a later layer's, goes through the last one."""

    writes = True

    def features(self, x: Tensor) -> Tensor:
        hidden = self.layers[0](x)
        return self.layers[3](self.between(hidden, self.layers[2](hidden)))

    def between(self, early: Tensor, late: Tensor) -> Tensor:
        raise NotImplementedError


@habit(without={"writes": False})
class EarlyWrittenIntoColumnOfLate(Between):
    """A column of a later layer's output is replaced by one of an earlier one's, through a view of a view."""

    def between(self, early: Tensor, late: Tensor) -> Tensor:
        if self.writes:
            late.t()[0].copy_(early[:, 1])
        return late


@habit(without={"writes": False})
class LateAddedToEarlyTransposed(Between):
    """A later layer's output is added to an earlier one's through a view."""

    def between(self, early: Tensor, late: Tensor) -> Tensor:
        kept = early * 1.0
        if self.writes:
            kept.t().add_(late.t())
        return kept


@habit(without={"writes": False})
class LateAddedToViewMadeBefore(Between):
    """The view is older than what is added to it; the whole has been used on both stages."""

    def between(self, early: Tensor, late: Tensor) -> Tensor:
        kept = early * 1.0
        part = kept[:, :4]
        other = late + kept
        if self.writes:
            part.add_(other[:, :4])
        return kept


@habit(without={"writes": False})
class WholeWrittenViewsUsed(Between):
    """Views of what is written into are used afterwards."""

    def between(self, early: Tensor, late: Tensor) -> Tensor:
        kept = early * 1.0
        first, second = kept[:, :4], kept[:, 4:]
        if self.writes:
            kept.mul_(late)
        return torch.cat([second, first], 1)


@habit(without={"writes": False})
class ZerosFilledThroughViews(Between):
    """Zeros that need no gradient are filled through views, on both stages."""

    def between(self, early: Tensor, late: Tensor) -> Tensor:
        filled = early.new_zeros(len(early), 8)
        if self.writes:
            filled.view(-1, 2, 4)[:, 0].copy_(early[:, :4])
            filled.view(-1, 2, 4)[:, 1].add_(late[:, :4])
        return filled


@habit(without={"writes": False})
class DetachedFilledThroughViews(Between):
    """Likewise for a detached tensor."""

    def between(self, early: Tensor, late: Tensor) -> Tensor:
        filled = (early * 2).detach()
        if self.writes:
            filled[:, :4].mul_(early[:, :4])
            filled.view(-1, 2, 4)[:, 1].add_(late[:, :4])
        return filled


@habit(without={"writes": False})
class DetachedTwinWritten(Between):
    """A later layer's output is added to a tensor by a detached one of the same memory, and to one by its .data."""

    def between(self, early: Tensor, late: Tensor) -> Tensor:
        kept, other = early * 1.0, early * 2.0
        twin = kept.detach()
        if self.writes:
            twin.add_(late.detach())
            other.data[:, 3:].add_(late.data[:, 3:])
        return kept + other


@habit(without={"writes": False})
class PartsWrittenInPlace(Between):
    """Slices are added to and multiplied by what an earlier layer gave, and the whole goes on."""

    def between(self, early: Tensor, late: Tensor) -> Tensor:
        first, second = late[:, :4], late[:, 4:]
        if self.writes:
            first += early[:, :4]
            second *= early[:, 4:]
        return late


@habit(without={"writes": False})
class ViewsOfEveryKindWritten(Between):
    """narrow, select, diagonal, unfold, squeeze and index."""

    def between(self, early: Tensor, late: Tensor) -> Tensor:
        filled = late * 1.0
        if self.writes:
            filled.narrow(1, 0, 4).add_(early[:, :4])
            filled.select(1, 7).copy_(early[:, 0])
            filled.diagonal().add_(early.diagonal())
            filled.unfold(1, 2, 2).select(2, 0).mul_(early[:, :4])
            wide = early.clone().unsqueeze(1)
            narrow = wide.squeeze(1)
            wide[:, 0, :4] += filled[:, 4:]
            filled = filled + narrow
            view = filled.view(-1, 2, 4)
            view[view > 1] = 0.5
            view[:, 0][late[:, :4] > 0] = 0.1
            torch._foreach_add_([filled[:, :2], filled[:, 4:6]], [early[:, :2], early[:, 2:4]])
            twisted = torch.complex(early, early * 0.5)
            twisted.real.mul_(filled)
            torch.view_as_real(twisted)[..., 1].add_(filled)
            filled = twisted.abs()
        return filled


@habit(without={"writes": False})
class ColumnsFilledLayerByLayer(Layers):
    """Each layer's output fills its part of a tensor, and multiplies its view of another one."""

    writes = True

    def features(self, x: Tensor) -> Tensor:
        hidden = self.layers[0](x)
        filled = hidden.new_zeros(len(x), 8, 4)
        kept = hidden * 1.0
        parts = [kept[:, i : i + 2] for i in range(0, 8, 2)]
        for i, layer in enumerate(self.layers):
            hidden = layer(hidden)
            if self.writes:
                filled[:, :, i].copy_(hidden)
                parts[i].mul_(hidden[:, 2 * i : 2 * i + 2])
        return self.layers[3](filled.mean(-1) + torch.cat(parts, 1) + kept)


@habit(without={"writes": False})
class WrittenThroughViewsAroundReads(Between):
    """What is read between the writes decides on them."""

    def between(self, early: Tensor, late: Tensor) -> Tensor:
        kept = early * 1.0
        view = kept.view(-1, 2, 4)
        if self.writes:
            view[:, 0].add_(late[:, 4:])
            if view.mean() > -100:
                kept.t()[0].mul_(late[:, 0])
        return kept + view.flatten(1)


@habit(plain=False, without={"writes": False})
class WrittenThroughViewsByHand(WrittenThroughViewsAroundReads):
    """Likewise, optimized by hand."""

    automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(F.cross_entropy(self(x), y))
        optimizer.step()


@habit(without={"writes": False})
class WrittenThroughViewsInCheckpoint(Layers):
    """A checkpointed function writes into views, of its own stage's and of an earlier one's."""

    writes = True

    def inner(self, hidden: Tensor) -> Tensor:
        kept = hidden * 1.0
        late = self.layers[2](self.layers[1](hidden))
        if self.writes:
            kept[:, 2:].add_(late[:, 2:])
            late.t()[0].copy_(hidden[:, 1])
        return kept + late

    def features(self, x: Tensor) -> Tensor:
        return self.layers[3](checkpoint(self.inner, self.layers[0](x), use_reentrant=False))


@habit(without={"writes": False})
class WrittenThroughViewsWithoutGradients(Between):
    """Under no_grad, and by `out=`."""

    def between(self, early: Tensor, late: Tensor) -> Tensor:
        with torch.no_grad():
            kept = early * 1.0
            filled = torch.zeros_like(early)
            if self.writes:
                kept[:, :4].add_(late[:, :4])
                kept.t()[7].zero_()
                torch.add(late[:, :4], early[:, :4], out=filled[:, :4])
        return early + kept + filled


class WithRows(Layers):
    """A layer of each stage has a buffer of two rows."""

    writes = True

    def __init__(self) -> None:
        super().__init__()
        for layer in self.layers:
            layer.register_buffer("rows", torch.zeros(2, 8))


@habit(without={"writes": False})
class BufferWrittenThroughViews(WithRows):
    """Views of an early layer's buffer take in what a later one gives, among them one that is made before."""

    def features(self, x: Tensor) -> Tensor:
        rows = self.layers[1].rows
        row = rows[1]
        x = self.layers[2](self.layers[1](self.layers[0](x + rows.sum(0))))
        if self.writes:
            mean = x.detach().mean(0)
            rows[0].mul_(0.9).add_(mean)
            rows.t()[3].add_(mean[:2])
            row.copy_(mean)
        return self.layers[3](x + self.layers[1].rows.mean(0))


@habit(without={"writes": False})
class WeightWrittenThroughViews(WithRows):
    """Likewise parts of an early layer's bias, and of a later one's weight, without gradients."""

    def features(self, x: Tensor) -> Tensor:
        x = self.layers[2](self.layers[0](x))
        if self.writes:
            with torch.no_grad():
                self.layers[1].linear.bias[2:4].copy_(x.mean(0)[2:4] * 0.1)
                self.layers[3].linear.weight.view(-1)[9:12].clamp_(-0.1, 0.1)
            self.layers[3].linear.weight.data.t()[1].add_(x.detach().mean(0) * 0.01)
        return self.layers[3](self.layers[1](x))


@habit(observed=["seen"], without={"writes": False})
class KeptViewsWrittenInHook(WithRows):
    """A step keeps a tensor and views of it, through which a hook writes."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: list[Any] = []
        self.seen: list[float] = []

    def features(self, x: Tensor) -> Tensor:
        x = self.layers[2](self.layers[0](x))
        whole = x.detach().clone()
        self.kept.append((whole, whole[:, :4], whole.view(-1, 2, 4)[:, 1]))
        self.kept.append((x.detach() * 1.0,) * 3)
        x = self.layers[3](x)
        self.kept.append((x.detach(), x.detach()[:, :3], x.detach()[:, 4]))
        return x * 1.0

    def on_train_batch_end(self, *_: Any) -> None:
        for whole, first, second in self.kept if self.writes else ():
            first.mul_(0.5)
            second.add_(1)
            self.seen.append(whole.sum().item())
        self.kept.clear()


@habit(plain=False, expect=error(r"view_writes\.py:\d+.*clone"))
class KeptViewsWrittenInNextMicrobatch(WithRows):
    """A step writes into a view that the one before has kept, and uses the whole."""

    kept: Any = None

    def features(self, x: Tensor) -> Tensor:
        x = self.layers[2](self.layers[0](x))
        if self.kept is not None:
            whole, first = self.kept
            first.mul_(0.5)
            x = x + whole * 0.1
        whole = x.detach().clone()
        self.kept = whole, whole[:, :4]
        return self.layers[3](x)


@habit(observed=["seen"], plain=False, without={"writes": False})
class RowsWrittenInHook(WithRows):
    """A hook writes into rows of weights that several ranks hold."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[float] = []

    @torch.no_grad()
    def on_train_batch_end(self, *_: Any) -> None:
        first, second, third, fourth = (layer.linear.weight for layer in self.layers)
        if self.writes:
            torch._foreach_mul_([*second.unbind(0), *fourth.unbind(0)], 0.9)
            for row, other in zip(third, first, strict=True):
                row.add_(other, alpha=0.01)
            first[0].copy_(fourth[1])
            self.layers[3].rows[1].copy_(first[3])
        self.seen.append(self.layers[3].rows.sum().item() + third.sum().item())


@habit(observed=["kept"], shows=False)
class KeptInManyForms(Layers):
    """A step keeps tensors with views of them that other tensors shape, and one whose data it has set."""

    kept: Any = ()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        early = self.layers[0](x)
        late = self.layers[2](early)
        wide = early.mean(0, keepdim=True).expand_as(late)
        twin = late.detach()
        twin.data = late.data * 2
        self.kept = [early, early.view_as(late), wide, late, twin, twin[:, :2], late[:, :3]]
        return F.cross_entropy(self.head(self.layers[3](early + wide)), y)
