"""Teachers: copies of a model that follow it, in every spelling of an exponential moving average."""

from __future__ import annotations

import copy
from typing import Any

import lightning as L
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from tests.habits.modules import WIDTH, Evaluated, Layers, Normed
from tests.habits.table import habit

MOMENTUM = 0.9


class WithTeacher(Layers):
    """A student's features are pulled towards those of a teacher that follows it.

    The teacher is one list beside the student's, which no key of stage_config names.
    """

    momentum = MOMENTUM

    def __init__(self) -> None:
        super().__init__()
        self.teacher = copy.deepcopy(self.layers)
        for parameter in self.teacher.parameters():
            parameter.requires_grad = False

    def teach(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            for layer in self.teacher:
                x = layer(x)
        return x

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        target = self.teach(x)
        features = self.features(x)
        return F.cross_entropy(self.head(features), y) + F.mse_loss(features, target)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.follow(list(self.teacher.parameters()), list(self.layers.parameters()))

    def follow(self, teacher: list[Tensor], student: list[Tensor]) -> None:
        raise NotImplementedError

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], lr=0.1)


STILL = {"momentum": 1.0}


@habit(plain=False, without=STILL)
class FollowsByDataMulAdd(WithTeacher):
    """`t.data.mul_(m).add_((1 - m) * s.data)`"""

    def follow(self, teacher: list[Tensor], student: list[Tensor]) -> None:
        for t, s in zip(teacher, student, strict=True):
            t.data.mul_(self.momentum).add_((1 - self.momentum) * s.data)


@habit(plain=False, without=STILL)
class FollowsByMulAddOfDetached(WithTeacher):
    """`t.mul_(m).add_(s.detach(), alpha=1 - m)` under no_grad."""

    @torch.no_grad()
    def follow(self, teacher: list[Tensor], student: list[Tensor]) -> None:
        for t, s in zip(teacher, student, strict=True):
            t.mul_(self.momentum).add_(s.detach(), alpha=1 - self.momentum)


@habit(plain=False, without=STILL)
class FollowsByLerp(WithTeacher):
    """`t.lerp_(s, 1 - m)`"""

    @torch.no_grad()
    def follow(self, teacher: list[Tensor], student: list[Tensor]) -> None:
        for t, s in zip(teacher, student, strict=True):
            t.lerp_(s, 1 - self.momentum)


@habit(plain=False, without=STILL)
class FollowsByCopy(WithTeacher):
    """`t.copy_(t * m + s * (1 - m))`"""

    @torch.no_grad()
    def follow(self, teacher: list[Tensor], student: list[Tensor]) -> None:
        for t, s in zip(teacher, student, strict=True):
            t.copy_(t * self.momentum + s * (1 - self.momentum))


@habit(plain=False, without=STILL)
class FollowsByAssigningData(WithTeacher):
    """`t.data = m * t.data + (1 - m) * s.data`"""

    def follow(self, teacher: list[Tensor], student: list[Tensor]) -> None:
        for t, s in zip(teacher, student, strict=True):
            t.data = self.momentum * t.data + (1 - self.momentum) * s.data


@habit(plain=False, without=STILL)
class FollowsByForeach(WithTeacher):
    """`torch._foreach_mul_` and `_foreach_add_` over all parameters at once."""

    @torch.no_grad()
    def follow(self, teacher: list[Tensor], student: list[Tensor]) -> None:
        torch._foreach_mul_(teacher, self.momentum)
        torch._foreach_add_(teacher, student, alpha=1 - self.momentum)


@habit(plain=False, without=STILL)
class FollowsByForeachLerp(WithTeacher):
    """`torch._foreach_lerp_`"""

    @torch.no_grad()
    def follow(self, teacher: list[Tensor], student: list[Tensor]) -> None:
        torch._foreach_lerp_(teacher, student, 1 - self.momentum)


@habit(plain=False, without=STILL)
class FollowsByForeachInStep(WithTeacher):
    """The same in the step, where the teacher is on other stages than the student."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        teacher, student = list(self.teacher.parameters()), list(self.layers.parameters())
        with torch.no_grad():
            torch._foreach_mul_(teacher, self.momentum)
            torch._foreach_add_(teacher, student, alpha=1 - self.momentum)
        return super().training_step(batch, batch_idx)

    def follow(self, teacher: list[Tensor], student: list[Tensor]) -> None:
        pass


@habit(plain=False, without={"interval": 1000})
class FollowsByLoadStateDict(WithTeacher):
    """Every second step the student is copied into the teacher, as DQN's target network is."""

    interval = 2

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if self.global_step % self.interval == 0:
            self.teacher.load_state_dict(self.layers.state_dict())


@habit(plain=False, without=STILL)
class FollowsByStateDictValues(WithTeacher):
    """A loop over both state dictionaries, as timm's ModelEmaV2 does."""

    @torch.no_grad()
    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        for t, s in zip(self.teacher.state_dict().values(), self.layers.state_dict().values(), strict=True):
            t.copy_(self.momentum * t + (1.0 - self.momentum) * s)


@habit(plain=False, without=STILL)
class FollowsByNamesInDictionary(WithTeacher):
    """Parameters are looked up by name."""

    @torch.no_grad()
    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        student = dict(self.layers.named_parameters())
        for name, t in self.teacher.named_parameters():
            t.sub_((1 - self.momentum) * (t - student[name]))


@habit(plain=False, without={"rate": 0.0})
class FollowsByAveragedModel(WithTeacher):
    """torch's AveragedModel with its EMA function."""

    rate = 1 - MOMENTUM

    def __init__(self) -> None:
        super().__init__()
        self.teacher = AveragedModel(self.layers, multi_avg_fn=get_ema_multi_avg_fn(1 - self.rate))

    def teach(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            for layer in self.teacher.module:
                x = layer(x)
        return x

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.teacher.update_parameters(self.layers)


@habit(plain=False, without={"momentum": 1.0})
class FollowsInBeforeZeroGrad(WithTeacher):
    """The update is in on_before_zero_grad, as in lightning-bolts."""

    def on_before_zero_grad(self, optimizer: Any) -> None:
        for t, s in zip(self.teacher.parameters(), self.layers.parameters(), strict=True):
            t.data = t.data * self.momentum + s.data * (1 - self.momentum)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        pass


@habit(without=STILL)
class FollowsInOptimizerStep(WithTeacher):
    """The update follows the optimizer's in an overridden optimizer_step."""

    def optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        super().optimizer_step(*args, **kwargs)
        with torch.no_grad():
            for t, s in zip(self.teacher.parameters(), self.layers.parameters(), strict=True):
                t.mul_(self.momentum).add_(s, alpha=1 - self.momentum)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        pass


@habit(without=STILL)
class FollowsInStep(WithTeacher):
    """The update is the first thing in the step, as in MoCo's own code: once a micro-batch."""

    @torch.no_grad()
    def momentum_update(self) -> None:
        for s, t in zip(self.layers.parameters(), self.teacher.parameters(), strict=True):
            t.data = t.data * self.momentum + s.data * (1.0 - self.momentum)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.momentum_update()
        return super().training_step(batch, batch_idx)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        pass


class Following(L.Callback):
    """Updates the teacher from outside, with a momentum that grows as BYOL's does."""

    @torch.no_grad()
    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        momentum = 1 - (1 - MOMENTUM) * (1 - trainer.global_step / 10)
        for t, s in zip(pl_module.teacher.parameters(), pl_module.layers.parameters(), strict=True):
            t.mul_(momentum).add_(s.data, alpha=1 - momentum)


@habit(plain=False, callbacks=lambda: [Following()], without={"teach": lambda self, x: x})
class FollowsInCallback(WithTeacher):
    """A callback updates the teacher."""

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        pass


@habit(plain=False, without=STILL)
class TeacherCutAsStudent(WithTeacher):
    """Keys name the teacher's layers beside the student's, so that the teacher's data goes through all stages first."""

    beside = {f"teacher.{i}": f"layers.{i}" for i in range(4)}

    def follow(self, teacher: list[Tensor], student: list[Tensor]) -> None:
        for t, s in zip(teacher, student, strict=True):
            t.data.mul_(self.momentum).add_((1 - self.momentum) * s.data)


@habit(plain=False, without=STILL)
class ShadowByName(Layers):
    """Shadow weights in a plain dictionary, registered when training starts; no module."""

    momentum = MOMENTUM

    def on_train_start(self) -> None:
        self.shadow = {name: p.data.clone() for name, p in self.named_parameters() if p.requires_grad}

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        for name, parameter in self.named_parameters():
            if parameter.requires_grad:
                self.shadow[name] = self.momentum * self.shadow[name] + (1 - self.momentum) * parameter.data

    def on_train_end(self) -> None:
        for name, parameter in self.named_parameters():
            parameter.data.copy_(self.shadow[name])


@habit(plain=False, without=STILL)
class MeanTeacherWithBuffers(WithTeacher):
    """Mean teacher: consistency under noise; parameters are averaged, and buffers of batch norms copied."""

    layer = Normed

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        target = self.teach(x + 0.1 * torch.randn_like(x)).softmax(-1)
        features = self.features(x + 0.1 * torch.randn_like(x))
        return F.cross_entropy(self.head(features), y) + F.mse_loss(features.softmax(-1), target)

    @torch.no_grad()
    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        for t, s in zip(self.teacher.parameters(), self.layers.parameters(), strict=True):
            t.lerp_(s, 1 - self.momentum)
        for t, s in zip(self.teacher.buffers(), self.layers.buffers(), strict=True):
            t.copy_(s)


@habit(plain=False, without=STILL)
class BYOL(WithTeacher):
    """Two views, each through both networks, a predictor, and a symmetric loss."""

    def __init__(self) -> None:
        super().__init__()
        self.predictor = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH))

    def one_side(self, first: Tensor, second: Tensor) -> Tensor:
        prediction = self.predictor(self.features(first))
        return 2 - 2 * F.cosine_similarity(prediction, self.teach(second).detach(), dim=-1).mean()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, _ = batch
        first, second = x + 0.1 * torch.randn_like(x), x * (0.8 + 0.4 * torch.rand_like(x))
        loss = self.one_side(first, second) + self.one_side(second, first)
        self.log("byol_loss", loss, prog_bar=True)
        return loss

    def follow(self, teacher: list[Tensor], student: list[Tensor]) -> None:
        for t, s in zip(teacher, student, strict=True):
            t.data = t.data * self.momentum + s.data * (1 - self.momentum)


@habit(without={"center_momentum": 1.0})
class DINO(WithTeacher):
    """A centre of the teacher's outputs as a buffer, temperatures by epoch, the last layer frozen at first."""

    center_momentum = 0.9

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("center", torch.zeros(1, WIDTH))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, _ = batch
        teacher = self.teach(x)
        student = self.features(x.roll(1, 1))
        temperature = (0.04, 0.07)[min(self.current_epoch, 1)]
        target = ((teacher - self.center) / temperature).softmax(-1)
        loss = -(target * F.log_softmax(student / 0.1, -1)).sum(-1).mean()
        self.update_center(teacher)
        return loss

    @torch.no_grad()
    def update_center(self, teacher: Tensor) -> None:
        batch_center = teacher.sum(0, keepdim=True) / len(teacher)
        self.center = self.center * self.center_momentum + batch_center * (1 - self.center_momentum)

    def on_after_backward(self) -> None:
        if self.current_epoch < 1:
            for name, parameter in self.named_parameters():
                if "layers.3" in name:
                    parameter.grad = None

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        pass


@habit(without={"size": 1})
class MoCo(WithTeacher):
    """Keys of the teacher in a queue, a buffer with a pointer that each step moves on."""

    size = 16

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("queue", F.normalize(torch.randn(WIDTH, self.size), dim=0))
        self.register_buffer("queue_ptr", torch.zeros(1, dtype=torch.long))

    @torch.no_grad()
    def enqueue(self, keys: Tensor) -> None:
        pointer = int(self.queue_ptr)
        if self.size > 1:
            self.queue[:, pointer : pointer + len(keys)] = keys.T
        self.queue_ptr[0] = (pointer + len(keys)) % self.size

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, _ = batch
        q = F.normalize(self.features(x), dim=1)
        with torch.no_grad():
            for t, s in zip(self.teacher.parameters(), self.layers.parameters(), strict=True):
                t.data = t.data * self.momentum + s.data * (1.0 - self.momentum)
            k = F.normalize(self.teach(x.roll(1, 1)), dim=1)
        positive = torch.einsum("nc,nc->n", q, k).unsqueeze(-1)
        negative = torch.einsum("nc,ck->nk", q, self.queue.clone().detach())
        logits = torch.cat([positive, negative], 1) / 0.2
        loss = F.cross_entropy(logits, torch.zeros(len(logits), dtype=torch.long, device=self.device))
        self.enqueue(k)
        return loss

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        pass


@habit(without={"weight": 0.0})
class DistilsFixedTeacher(WithTeacher):
    """Distillation: a fixed teacher in eval mode, and a hint on a middle layer."""

    weight = 0.5

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        self.teacher.eval()
        with torch.no_grad():
            hint = self.teacher[1](self.teacher[0](x))
            target = self.teacher[3](self.teacher[2](hint))
        middle = self.layers[1](self.layers[0](x))
        features = self.layers[3](self.layers[2](middle))
        loss = F.cross_entropy(self.head(features), y)
        return loss + self.weight * (F.mse_loss(middle, 0.5 * hint) + F.mse_loss(features, 0.5 * target))

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        pass


@habit()
class CentersOverRanks(WithTeacher):
    """A centre of the teacher's features is summed over all ranks in the step, as DINO's is."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("center", torch.zeros(WIDTH))

    def teach(self, x: Tensor) -> Tensor:
        features = super().teach(x)
        mean = features.mean(0)
        if dist.is_initialized():
            dist.all_reduce(mean)
            mean = mean / dist.get_world_size()
            parts = [torch.empty_like(features) for _ in range(dist.get_world_size())]
            dist.all_gather(parts, features)
            features = torch.cat(parts)[dist.get_rank() * len(x) :][: len(x)]
        centered = features - self.center
        self.center = self.center * 0.9 + mean * 0.1
        return centered

    def follow(self, teacher: list[Tensor], student: list[Tensor]) -> None:
        pass


@habit(without={"size": 1})
class MoCoCutInItsTeacher(MoCo):
    """The same where the second stage begins within the teacher, so that the student is on the first one."""

    def chain(self) -> list[str]:
        return ["layers.0", *(f"teacher.{number}" for number in (1, 2, 3))]


@habit(plain=False, shows=False, observed=("average.0.0.linear.weight", "average.0.3.linear.weight"))
class ValidatesCopyInPlace(Evaluated):
    """A copy takes the module's place while it is validated, and is read after the run."""

    def on_fit_start(self) -> None:
        self.average = [copy.deepcopy(self.layers)]

    def on_validation_epoch_start(self) -> None:
        self.kept, self.layers = [self.layers], self.average[0]

    def on_validation_epoch_end(self) -> None:
        self.layers = self.kept[0]


@habit(plain=False, shows=False, observed=tuple(f"replaced.{n}.linear.weight" for n in range(2)))
class KeepsReplacedLayers(Evaluated):
    """Layers that were replaced in mid-run are kept, and read after the run."""

    def on_train_epoch_start(self) -> None:
        if self.current_epoch == 1:
            self.replaced = [self.layers[0], self.layers[3]]
            for number in (0, 3):
                self.layers[number] = copy.deepcopy(self.layers[number])


class ValidatesCopies(L.Callback):
    """A new copy takes the module's place in each validation, and is saved."""

    def on_validation_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        self.kept, pl_module.layers = pl_module.layers, copy.deepcopy(pl_module.layers)

    def on_validation_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        self.copied, pl_module.layers = pl_module.layers, self.kept

    def on_save_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: Any) -> None:
        checkpoint["callbacks"]["copied"] = self.copied.state_dict()


@habit(plain=False, shows=False, callbacks=lambda: [ValidatesCopies()])
class SavesValidatedCopy(Evaluated):
    pass
