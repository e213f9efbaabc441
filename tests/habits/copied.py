"""Copies that a step takes of values, parameters and layers: copy, deepcopy, pickles and state dicts."""

from __future__ import annotations

import copy
import io
import pickle
from typing import Any

import torch
from torch import Tensor, nn

from tests.habits.modules import Layers, Noting
from tests.habits.table import error, habit

RUNS_OTHERWISE = error(r"calls other modules each time that it is measured: name the first module of each later stage")


# -- copies of values --------------------------------------------------------------------------------------------------


@habit(observed=["found"], plain=False)
class ShallowCopiesOfValues(Noting):
    """copy.copy of what each layer gives, which is a new leaf of autograd."""

    def features(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = copy.copy(layer(x))
            self.found.append((tuple(x.shape), x.requires_grad, x.is_leaf))
        return x


@habit(observed=["found"], plain=False)
class ShallowCopyWrittenInto(Noting):
    """copy.copy of a value shares its memory."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        batch = copy.copy(batch)
        hidden = self.layers[0](batch[0]).detach()
        same = copy.copy({"hidden": copy.copy(hidden)})
        same["hidden"].mul_(2)
        self.found.append((same["hidden"] - hidden).abs().max().item())
        return super().training_step(batch, batch_idx) + self.layers[3](hidden).sum() * 0.1


@habit(plain=False)
class ValuesDeepCopied(Layers):
    """copy.deepcopy of a dictionary with a value and the batch."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        hidden = self.layers[0](batch[0]).detach()
        copied = copy.deepcopy({"hidden": hidden, "batch": batch})
        copied["hidden"].mul_(2)
        return super().training_step(copied["batch"], batch_idx) + copied["hidden"].mean() + hidden.mean()


@habit(observed=["found"], plain=False)
class ValuesPickled(Noting):
    """A value and a parameter that go through pickle and torch.save."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        hidden = self.layers[0](batch[0])
        again = pickle.loads(pickle.dumps(hidden.detach()))
        file = io.BytesIO()
        torch.save({"hidden": hidden.detach(), "weight": self.layers[3].linear.weight}, file)
        file.seek(0)
        saved = torch.load(file)
        self.found.append((again.requires_grad, again.sum().item(), saved["weight"].requires_grad))
        return super().training_step(batch, batch_idx) + again.mean() + saved["hidden"].std()


# -- copies of parameters and layers -----------------------------------------------------------------------------------


@habit(observed=["found"], plain=False)
class ParametersCopied(Noting):
    """Shallow and deep copies of parameters of two stages."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        first, last = self.layers[0].linear.weight, self.layers[3].linear.weight
        copies = [copy.copy(first), copy.deepcopy(first), copy.copy(last), copy.deepcopy(last)]
        self.found += [(one.requires_grad, one.is_leaf, tuple(one.shape)) for one in copies]
        self.found += [isinstance(one, nn.Parameter) for one in copies[1::2]]
        return super().training_step(batch, batch_idx) + sum(one.sum() for one in copies) * 0.1

    def on_train_batch_end(self, *_: Any) -> None:
        first, last = copy.copy(self.layers[0].linear.weight), copy.copy(self.layers[3].linear.weight)
        self.found.append((first.requires_grad, isinstance(last, nn.Parameter), (first - last).sum().item()))


@habit(plain=False)
class LayersCopiedInEachStep(Layers):
    """Frozen copies of layers of two stages weigh the loss."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        first, last = copy.deepcopy(self.layers[0]), copy.deepcopy(self.layers[3])
        with torch.no_grad():
            weight = last(first(batch[0])).mean().exp()
        return super().training_step(batch, batch_idx) * weight


@habit(plain=False, automatic=RUNS_OTHERWISE)
class TeacherMadeInFirstStep(Layers):
    """A teacher that is copied when a step first asks for it, and becomes a module of its own."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if not hasattr(self, "teacher"):
            self.teacher = copy.deepcopy(self.layers[3]).requires_grad_(False)
        loss = super().training_step(batch, batch_idx)
        return loss + (self.teacher(batch[0]) - self.layers[3](batch[0])).square().mean()


@habit(plain=False)
class HiddenTeacherMadeInFirstStep(Layers):
    """Likewise, in a list, so that it is no part of the module."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden: list[nn.Module] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if not self.hidden:
            self.hidden.append(copy.deepcopy(self.layers[3]).requires_grad_(False))
        loss = super().training_step(batch, batch_idx)
        return loss + (self.hidden[0](batch[0]) - self.layers[3](batch[0])).square().mean()


# -- state dicts -------------------------------------------------------------------------------------------------------


class Targeted(Layers):
    """A network and its target, to which each second step copies it."""

    def __init__(self) -> None:
        super().__init__()
        self.target = copy.deepcopy(self.layers).requires_grad_(False)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        aim = batch[0]
        for layer in self.target:
            aim = layer(aim)
        loss = loss + (aim - self.features(batch[0])).square().mean()
        if self.global_step % 2 == 0:
            self.follow()
        return loss

    def follow(self) -> None:
        pass


@habit(plain=False)
class TargetLoadedInStep(Targeted):
    """DQN's target network, as Lightning's examples have it."""

    def follow(self) -> None:
        self.target.load_state_dict(self.layers.state_dict())


@habit(plain=False)
class TargetFollowsByStateDicts(Targeted):
    """DDPG's soft update, key by key."""

    def follow(self) -> None:
        source, target = self.layers.state_dict(), self.target.state_dict()
        for key in source:
            target[key] = source[key] * 0.5 + target[key] * 0.5
        self.target.load_state_dict(target)


@habit(observed=["found"], plain=False)
class StateDictReadInStep(Noting):
    """Norms and means of the whole module's state dict, and of a layer's."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.log("norm", sum(value.norm() for value in self.state_dict().values()))
        own = self.layers[2].state_dict(prefix="own.")
        self.found.append({key: (tuple(value.shape), value.abs().mean().item()) for key, value in own.items()})
        return super().training_step(batch, batch_idx)


@habit(observed=["found"], plain=False)
class StateDictSavedInStep(Noting):
    """Writes the whole module's state dict in a step."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        file = io.BytesIO()
        torch.save(self.state_dict(), file)
        file.seek(0)
        self.found.append({key: value.sum().item() for key, value in torch.load(file).items()})
        return super().training_step(batch, batch_idx)


@habit(plain=False)
class WeightsGoBackInStep(Layers):
    """The third batch of an epoch begins with the weights of the first one."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if batch_idx == 0:
            self.before = {key: value.clone() for key, value in self.state_dict().items()}
        elif batch_idx == 2:
            self.load_state_dict(self.before)
        return super().training_step(batch, batch_idx)


@habit(plain=False)
class AnchoredToFirstStateDict(Layers):
    """A deep copy of the first step's state dict, from which the weights are kept."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if not hasattr(self, "anchor"):
            self.anchor = copy.deepcopy(self.state_dict())
        distances = [(value - self.anchor[name]).square().sum() for name, value in self.named_parameters()]
        return super().training_step(batch, batch_idx) + sum(distances)
