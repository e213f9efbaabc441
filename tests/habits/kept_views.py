"""Views of the module's tensors that a step keeps, which change with these as in one process."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from tests.habits.table import error, habit
from tests.habits.view_writes import WithRows


class KeepsViews(WithRows):
    """Each step keeps views of the module's tensors, which hooks read once they have changed."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: list[Tensor] = []
        self.seen: list[Any] = []

    def features(self, x: Tensor) -> Tensor:
        self.kept = self.views()
        return super().features(x)

    def views(self) -> list[Tensor]:
        raise NotImplementedError

    def look(self) -> None:
        self.seen.append([round(one.sum().item(), 5) for one in self.kept])

    def on_train_batch_end(self, *_: Any) -> None:
        self.look()

    def on_train_epoch_end(self) -> None:
        self.look()
        self.seen.append([one.norm().item() for one in self.kept])


@habit(observed=["seen"], plain=False)
class ViewsOfWeightsReadAfterUpdate(KeepsViews):
    """Rows and wholes of weights of all stages."""

    def views(self) -> list[Tensor]:
        first, *_, last = (layer.linear.weight for layer in self.layers)
        return [
            *(first.detach()[0], first.data, first.data[1], first.detach().view(-1)[3:7], first[2].detach()),
            *(last.detach()[0], last.data, last.t().detach(), last.detach(), last.detach()[0, :2]),
            self.layers[1].linear.weight.data.view(-1),
        ]


@habit(observed=["seen"], plain=False)
class ViewsOfBuffersReadAfterHook(KeepsViews):
    """Rows of buffers, which a hook changes."""

    def views(self) -> list[Tensor]:
        return [one for i in (0, 3) for one in (self.layers[i].rows[0], self.layers[i].rows.detach().t())]

    def on_before_zero_grad(self, *_: Any) -> None:
        for layer in self.layers:
            layer.rows.add_(1)


@habit(observed=["seen"], plain=False)
class ViewsOfBuffersReadAfterStep(KeepsViews):
    """The next step changes them."""

    def features(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            layer.rows.mul_(0.5).add_(x.detach().mean())
        if not self.kept:
            self.kept = [self.layers[3].rows[0], self.layers[0].rows[0], self.layers[0].rows]
        return super(KeepsViews, self).features(x)


@habit(observed=["seen"], plain=False)
class ViewOfWeightReadInNextStep(KeepsViews):
    """The next step computes with what the last one has kept, and validation reads it."""

    def features(self, x: Tensor) -> Tensor:
        if self.training and self.kept:
            x = x + self.kept[0] * 0.1
            self.seen.append(self.kept[1].sum().item())
        elif self.kept:
            self.look()
        return super().features(x)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.kept = self.views()
        return loss

    def views(self) -> list[Tensor]:
        return [self.layers[3].linear.weight.detach()[0], self.layers[0].linear.weight.data[1]]


@habit(observed=["seen"], plain=False)
class ViewsLogged(KeepsViews):
    """They are logged, too."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        self.log("first", self.kept[0], on_step=True, on_epoch=True)
        self.log("last", self.kept[1])
        return loss

    def views(self) -> list[Tensor]:
        return [self.layers[3].linear.weight.detach()[0, 0], self.layers[0].linear.weight.data[1, 1]]


@habit(observed=["seen"], plain=False)
class ViewOfWeightWrittenInHook(KeepsViews):
    """A hook writes into a weight through them, and reads another one on the first rank alone."""

    def views(self) -> list[Tensor]:
        return [self.layers[3].linear.weight.detach()[0], self.layers[0].linear.weight.data[1]]

    def on_train_batch_end(self, *_: Any) -> None:
        self.kept[0].mul_(0.9)
        self.kept[1].copy_(self.kept[0])

    def on_train_end(self) -> None:
        if self.trainer.is_global_zero:
            self.norm = self.kept[0].norm().item()
        self.look()


@habit(observed=["seen"], plain=False)
class ViewsKeptOverSteps(KeepsViews):
    """Those of each step are kept, and compared in the end."""

    def features(self, x: Tensor) -> Tensor:
        if len(self.kept) < 8 and not self.trainer.sanity_checking:
            self.kept += self.views()
        return WithRows.features(self, x)

    def views(self) -> list[Tensor]:
        return [self.layers[3].linear.weight.detach()[0], self.layers[0].linear.weight]

    def look(self) -> None:
        self.seen.append([self.kept[0].sum().item(), self.kept[-2].sum().item(), self.kept[-1].sum().item()])


@habit(expect=error(r"in a step \(.*kept_views\.py:\d+.*itself"))
class ViewOfWeightWrittenInNextStep(KeepsViews):
    """The next step writes into what the last one has kept."""

    def features(self, x: Tensor) -> Tensor:
        if self.kept and self.training:
            self.kept[0].clamp_(-0.3, 0.3)
            self.kept[1].clamp_(-0.3, 0.3)
        return WithRows.features(self, x)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        if not self.kept:
            self.kept = self.views()
        return loss

    def views(self) -> list[Tensor]:
        return [self.layers[3].linear.weight.detach()[0], self.layers[0].linear.weight.data[1]]


@habit(plain=False, expect=error(r"in a step \(.*kept_views\.py:\d+.*make it"))
class ViewOfWeightOfHookWrittenInStep(ViewOfWeightWrittenInNextStep):
    """Or what a hook has kept."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return WithRows.training_step(self, batch, batch_idx)

    def on_train_batch_end(self, *_: Any) -> None:
        self.kept = self.views()


@habit(observed=["seen"], plain=False)
class ViewsOfHookReadAfterUpdate(ViewsOfWeightsReadAfterUpdate):
    """A hook keeps them before the first step."""

    def features(self, x: Tensor) -> Tensor:
        return WithRows.features(self, x)

    def on_fit_start(self) -> None:
        self.kept = [*self.views(), self.head.weight.detach()[0], self.head.bias.data]
