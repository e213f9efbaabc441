"""Tensors and layers of a module that hooks replace during training, on stages that are settled by then."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.habits.checkpointing import folder_of
from tests.habits.modules import CLASSES, WIDTH, Layer, Layers, Noting
from tests.habits.normed_blocks import Blocks
from tests.habits.table import error, habit


@habit(observed=["found"], without={"from_epoch": 9}, plain=False)
class BuffersReplaced(Blocks):
    """Buffers are given new tensors between two steps, and are read after each one."""

    from_epoch = 1

    def __init__(self) -> None:
        super().__init__()
        self.found: list[list[float]] = []

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if self.current_epoch >= self.from_epoch and batch_idx == 0:
            for layer in self.layers:
                layer.mean = torch.ones(WIDTH)
        self.found.append([float(layer.mean.sum()) for layer in self.layers])


@habit(without={"from_epoch": 9}, plain=False)
class StatisticsReplaced(Blocks):
    """A norm's statistics are replaced, on a stage of its own."""

    from_epoch = 1

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if self.current_epoch >= self.from_epoch and batch_idx == 1:
            self.layers[3].norm.running_mean = torch.ones(WIDTH)


@habit(plain=False)
class OneTensorForTwoBuffers(Blocks):
    """Buffers of two stages become one tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.head.register_buffer("mean", torch.zeros(WIDTH))

    def on_train_epoch_start(self) -> None:
        if self.current_epoch:
            self.layers[0].mean = self.head.mean = torch.ones(WIDTH)

    def features(self, x: Tensor) -> Tensor:
        return super().features(x) + self.head.mean


@habit(without={"from_epoch": 9})
class StateAssigned(Blocks):
    """A layer's tensors are assigned by load_state_dict."""

    from_epoch = 1

    def on_train_epoch_start(self) -> None:
        if self.current_epoch >= self.from_epoch:
            state = {key: torch.full_like(value, 0.5) for key, value in self.layers[3].norm.state_dict().items()}
            buffers = dict(self.layers[3].norm.named_buffers())
            self.layers[3].norm.load_state_dict({key: state[key] for key in buffers}, strict=False, assign=True)


@habit(without={"from_epoch": 9})
class LayerReplacedInAGroupOfItsOwn(Layers):
    """A layer is replaced, and the new one trained in a group of its own, beside the old one's."""

    from_epoch = 1

    def on_train_epoch_start(self) -> None:
        if self.current_epoch == self.from_epoch:
            self.layers[3] = Layer()
            nn.init.eye_(self.layers[3].linear.weight)
            nn.init.zeros_(self.layers[3].linear.bias)
            self.trainer.optimizers[0].add_param_group({"params": list(self.layers[3].parameters()), "lr": 0.05})


@habit(without={"from_epoch": 9})
class WeightReplacedInItsGroup(Layers):
    """A weight is replaced, in the optimizer's group, too."""

    from_epoch = 1

    def new_weight(self) -> Tensor:
        return torch.eye(WIDTH)

    def on_train_epoch_start(self) -> None:
        if self.current_epoch == self.from_epoch:
            linear, [group] = self.layers[3].linear, self.trainer.optimizers[0].param_groups
            place = next(place for place, parameter in enumerate(group["params"]) if parameter is linear.weight)
            self.trainer.optimizers[0].state.pop(linear.weight, None)
            linear.weight = nn.Parameter(self.new_weight())
            group["params"][place] = linear.weight


@habit(without={"from_epoch": 9})
class WeightOfAnotherLayer(WeightReplacedInItsGroup):
    """The same by a copy of one that another stage holds."""

    def new_weight(self) -> Tensor:
        return self.layers[0].linear.weight.detach().clone()


@habit(without={"from_epoch": 9})
class CopyOfALayer(Layers):
    """The last layer is replaced by a copy of an earlier stage's, and the optimizer made anew."""

    from_epoch = 1

    def on_train_epoch_start(self) -> None:
        if self.current_epoch == self.from_epoch:
            self.layers[3] = copy.deepcopy(self.layers[0])
            self.trainer.optimizers = [self.configure_optimizers()]


@habit(without={"from_epoch": 9})
class BuffersOfOtherLayers(Blocks):
    """Buffers are replaced by what is computed from those of other stages."""

    from_epoch = 1

    def on_train_epoch_start(self) -> None:
        if self.current_epoch >= self.from_epoch:
            self.layers[3].mean = self.layers[0].mean * 2
            self.layers[0].mean = self.layers[2].mean + 1


@habit(observed=["found"])
class SavedAfterACopy(Layers):
    """Layers are replaced by copies of other stages' after the last step, and a checkpoint is saved."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[dict[str, float]] = []

    def on_train_epoch_end(self) -> None:
        if self.current_epoch == 1:
            self.layers[3] = copy.deepcopy(self.layers[0])
            self.layers[0] = copy.deepcopy(self.layers[2])
            self.trainer.optimizers = [self.configure_optimizers()]
            path = folder_of(self) / "copied.ckpt"
            self.trainer.save_checkpoint(path)
            state = torch.load(path, weights_only=False)["state_dict"]
            for one in (state, self.state_dict()):
                self.found.append({key: float(value.sum()) for key, value in one.items()})


@habit(without={"factor": 1.0})
class BuffersReplacedAtTheEnd(Blocks):
    """Buffers are replaced by what is computed from those of other stages when training has ended."""

    factor = 2.0

    def on_train_end(self) -> None:
        if self.factor > 1:
            self.layers[3].mean = self.layers[0].mean * self.factor
            self.layers[0].mean = self.layers[3].norm.running_mean + 1


@habit(without={"from_epoch": 9})
class TeacherCopiedLater(Layers):
    """A teacher is copied from the layers at each epoch from the second on."""

    from_epoch = 1

    def on_train_epoch_start(self) -> None:
        if self.current_epoch >= self.from_epoch:
            self.teacher = copy.deepcopy(self.layers).requires_grad_(False)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        if self.current_epoch >= self.from_epoch:
            told = batch[0] * 1.5
            with torch.no_grad():
                for layer in self.teacher:
                    told = layer(told)
            loss = loss + F.mse_loss(self.features(batch[0]), told)
        return loss


class TiedEnds(Layers):
    """The head's weight is that of an embedding, on the first stage."""

    from_epoch = 1

    def __init__(self) -> None:
        super().__init__()
        self.emb, self.head = nn.Embedding(CLASSES, WIDTH), nn.Linear(WIDTH, CLASSES, bias=False)
        self.head.weight = self.emb.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.features(x + self.emb(torch.zeros(len(x), dtype=torch.long))))

    def on_train_epoch_start(self) -> None:
        if self.current_epoch == self.from_epoch:
            self.change()
            self.trainer.strategy.setup_optimizers(self.trainer)

    def change(self) -> None:
        raise NotImplementedError


@habit(without={"from_epoch": 9})
class UntiedInSecondEpoch(TiedEnds):
    """A tied weight becomes two, which go on apart."""

    def change(self) -> None:
        self.head.weight = nn.Parameter(self.emb.weight.detach().clone())


@habit(without={"from_epoch": 9})
class TiedToANewWeight(TiedEnds):
    """Both places of a tied weight are given another parameter."""

    def change(self) -> None:
        self.emb.weight = self.head.weight = nn.Parameter(self.emb.weight.detach() * 0.5)


@habit(without={"from_epoch": 9})
class TiedHeadReplaced(TiedEnds):
    """A head of as many classes takes the place of a tied one."""

    def change(self) -> None:
        self.head = nn.Linear(WIDTH, CLASSES, bias=False)


@habit(without={"from_epoch": 9})
class VocabularyResized(TiedEnds):
    """A tied embedding grows, in the manner of `resize_token_embeddings`."""

    def change(self) -> None:
        before, self.emb = self.emb, nn.Embedding(CLASSES + 2, WIDTH)
        self.emb.weight.data[:CLASSES] = before.weight.data
        self.head.weight, self.head.out_features = self.emb.weight, CLASSES + 2


@habit(without={"from_epoch": 9})
class UntiedLayer(Layers):
    """The weight of a layer becomes its own, and a group of the optimizer."""

    from_epoch = 1

    def __init__(self) -> None:
        super().__init__()
        self.layers[3].linear.weight = self.layers[0].linear.weight

    def on_train_epoch_start(self) -> None:
        if self.current_epoch == self.from_epoch:
            weight = nn.Parameter(self.layers[0].linear.weight.detach().clone())
            self.layers[3].linear.weight = weight
            self.optimizers().add_param_group({"params": [weight]})


@habit(without={"weight": 0.0}, plain=False)  # whose target follows micro-batches
class TargetCopiedAtStart(Layers):
    """A target network is copied before the first step, and follows."""

    weight = 1.0

    def on_fit_start(self) -> None:
        self.target = copy.deepcopy(self.layers).requires_grad_(False)

    def on_train_batch_end(self, *args: Any) -> None:
        for own, target in zip(self.layers.parameters(), self.target.parameters(), strict=True):
            target.data.mul_(0.9).add_(own.data, alpha=0.1)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        found, expected = self.features(x), x
        with torch.no_grad():
            for layer in self.target:
                expected = layer(expected)
        return F.cross_entropy(self.head(found), y) + self.weight * F.mse_loss(found, expected)


@habit(without={"places": ()})
class LayersCopiedAtStart(Layers):
    """Layers and weights are copies of other stages' before the first step."""

    places = (3, 1)

    def on_fit_start(self) -> None:
        for number, place in enumerate(self.places):
            source = self.layers[number + 1 if number else 0]
            if number:
                self.layers[place].linear.weight = nn.Parameter(source.linear.weight.detach().clone())
            else:
                self.layers[place] = copy.deepcopy(source)
        self.trainer.strategy.setup_optimizers(self.trainer)


@habit(expect=error(r"shares its memory since .*replaced\.py:\d+.*clone\(\)"), without={"from_epoch": 9})
class DataOfAnotherStage(Layers):
    """The head is given the data of another stage's, without a copy."""

    from_epoch = 1

    def on_train_epoch_start(self) -> None:
        if self.current_epoch == self.from_epoch:
            self.head.weight.data = self.layers[0].linear.weight.data[:CLASSES]


@habit(expect=error(r"weight shares its memory with.*clone\(\)"), without={"from_epoch": 9})
class ParameterOfDataOfAnotherStage(Layers):
    """A parameter is made of the data of another stage's, without a copy."""

    from_epoch = 1

    def on_train_epoch_start(self) -> None:
        if self.current_epoch == self.from_epoch:
            self.head.weight = nn.Parameter(self.layers[0].linear.weight.data[:CLASSES])
            self.trainer.strategy.setup_optimizers(self.trainer)


@habit(expect=error(r"replaced\.py:\d+.*in training_step"), observed=["found"])
class DerivativeOfAHeadInHook(Noting):
    """A hook takes a forward-mode derivative with respect to a layer's weights."""

    def on_train_batch_end(self, *args: Any) -> None:
        given, weights = torch.linspace(-1.0, 1.0, WIDTH), dict(self.head.named_parameters())
        ones = {name: torch.ones_like(weight) for name, weight in weights.items()}
        found = torch.func.jvp(lambda own: torch.func.functional_call(self.head, own, (given,)), (weights,), (ones,))
        self.found.append(float(found[1].sum()))
