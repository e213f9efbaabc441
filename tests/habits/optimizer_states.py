"""What hooks do with optimizers and schedulers: their states, their groups, their rates."""

from __future__ import annotations

import copy
import io
from typing import Any

import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn

from tests.habits.modules import WIDTH, Evaluated, Layers, Noting
from tests.habits.table import error, habit


@habit(observed=["found"], plain=False)
class MomentumRead(Noting):
    """Reads the momentum of all parameters after each update."""

    def on_train_batch_end(self, *_: Any) -> None:
        state = self.trainer.optimizers[0].state
        self.found.append(sum(state[p]["momentum_buffer"].norm().item() for p in self.parameters()))


@habit(plain=False)
class MomentumForgotten(Layers):
    """Clears the optimizer's state after an epoch."""

    def on_train_epoch_end(self) -> None:
        self.trainer.optimizers[0].state.clear()


@habit(plain=False)
class MomentumHalved(Layers):
    """Halves the momentum of each group's parameters after an epoch."""

    def on_train_epoch_end(self) -> None:
        optimizer = self.trainer.optimizers[0]
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                optimizer.state[parameter]["momentum_buffer"].mul_(0.5)


@habit(observed=["found"], plain=False)
class OptimizerStateDict(Noting):
    """Reads the optimizer's state dict."""

    def on_train_epoch_end(self) -> None:
        state = self.optimizers().state_dict()["state"]  # type: ignore[union-attr]
        self.found.append({index: entries["momentum_buffer"].norm().item() for index, entries in state.items()})


@habit(observed=["found"], plain=False)
class AdamMomentsChanged(Noting):
    """Changes the state of all parameters, and drops that of some."""

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.05)

    def on_train_batch_end(self, *_: Any) -> None:
        state = self.optimizers().state  # type: ignore[union-attr]
        self.found.append([state[p]["exp_avg_sq"].mean().item() for p in self.parameters() if p in state])
        self.found.append(int(state[self.head.weight]["step"]))
        if self.global_step % 3 == 0:
            for parameter in self.parameters():
                state[parameter]["exp_avg"].zero_()
                state[parameter]["exp_avg_sq"] = state[parameter]["exp_avg_sq"] * 0.5
            del state[self.layers[0].linear.weight]  # type: ignore[union-attr, arg-type]
            state[self.head.bias] = {}


@habit(observed=["found"], plain=False)
class StateOfOnesOwn(Noting):
    """Keeps slow weights in the optimizer's state."""

    def on_train_batch_end(self, *_: Any) -> None:
        state = self.trainer.optimizers[0].state
        for parameter in self.parameters():
            slow = state[parameter].setdefault("slow", parameter.detach().clone())
            slow.lerp_(parameter.detach(), 0.5)
            self.found.append(slow.sum().item())


@habit(plain=False, epochs=3)
class OptimizerRewound(Layers):
    """Goes back to the optimizer's state of the epoch's beginning."""

    def on_train_epoch_start(self) -> None:
        if self.current_epoch == 1:
            self.snapshot = copy.deepcopy(self.trainer.optimizers[0].state_dict())

    def on_train_epoch_end(self) -> None:
        if self.current_epoch == 1:
            self.trainer.optimizers[0].load_state_dict(self.snapshot)


@habit(observed=["found"], plain=False)
class OptimizerCopied(Noting):
    """Copies the optimizer."""

    def on_train_epoch_end(self) -> None:
        state = copy.deepcopy(self.trainer.optimizers[0]).state
        self.found.append(sum(entries["momentum_buffer"].sum().item() for entries in state.values()))


@habit(observed=["found"], plain=False)
class NormsOfGroups(Noting):
    """The largest and the total norm of each group's gradients."""

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        for group in optimizer.param_groups:
            gradients = [p.grad for p in group["params"] if p.grad is not None]
            self.found.append(float(torch.stack([gradient.norm() for gradient in gradients]).max()))
            self.found.append(float(torch.nn.utils.get_total_norm(gradients)))


@habit(plain=False)
class AveragedByHand(Layers):
    """Averages all weights, and has the averages in the end."""

    def __init__(self) -> None:
        super().__init__()
        self.averages: dict[str, Tensor] = {}
        self.number = 0

    def on_train_batch_end(self, *_: Any) -> None:
        self.number += 1
        for name, parameter in self.named_parameters():
            before = self.averages.get(name, torch.zeros_like(parameter))
            self.averages[name] = before + (parameter.detach() - before) / self.number

    def on_train_end(self) -> None:
        with torch.no_grad():
            for name, parameter in self.named_parameters():
                parameter.copy_(self.averages[name])


@habit(plain=False)
class OneCycle(Layers):
    """A schedule over all steps of the run, as the Trainer estimates them; a hook looks at batches."""

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.05)
        steps = int(self.trainer.estimated_stepping_batches)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=steps)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        batch[0].mul_(0.9)


@habit(plain=False)
class SchedulerStepOverridden(Layers):
    """`lr_scheduler_step` of the user's."""

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        return [optimizer], [torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: 0.5**epoch)]

    def lr_scheduler_step(self, scheduler: Any, metric: Any) -> None:
        scheduler.step(epoch=self.current_epoch + 1)


@habit(plain=False)
class Plateau(Evaluated):
    """A schedule that watches the validation loss."""

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, threshold=10.0)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "monitor": "val_loss"}}


@habit()
class GroupRates(Layers):
    """Groups with rates and decays of their own."""

    def configure_optimizers(self) -> Any:
        matrices = [parameter for parameter in self.parameters() if parameter.ndim > 1]
        vectors = [parameter for parameter in self.parameters() if parameter.ndim <= 1]
        groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "lr": 0.3}]
        return torch.optim.AdamW(groups, lr=0.05)


@habit(plain=False, epochs=3)
class OptimizerSwapped(Layers):
    """Another optimizer from the second epoch on."""

    def on_train_epoch_start(self) -> None:
        if self.current_epoch == 1:
            self.trainer.optimizers = [torch.optim.Adam(self.parameters(), lr=0.02)]


@habit(plain=False, epochs=3)
class OptimizerSwappedAtTheEnd(Layers):
    """A fresh optimizer after the last epoch, which the checkpoint has."""

    def on_train_epoch_end(self) -> None:
        if self.current_epoch == 2:
            self.trainer.strategy.optimizers = [torch.optim.SGD(self.parameters(), lr=0.02)]


@habit(plain=False)
class WeightsReadWhenConfiguring(Layers):
    """configure_optimizers initialises weights, takes copies of them, and rates from their norms."""

    def configure_optimizers(self) -> Any:
        for layer in self.layers:
            nn.init.orthogonal_(layer.linear.weight)
        self.first = {name: parameter.detach().clone() for name, parameter in self.named_parameters()}
        groups = [{"params": [*one.parameters()], "lr": 0.05 * float(one.linear.weight.norm())} for one in self.layers]
        groups.append({"params": [*self.head.parameters()]})
        return torch.optim.Adagrad(groups, lr=0.1, initial_accumulator_value=0.1)

    def on_train_epoch_end(self) -> None:
        self.log("moved", sum((p - self.first[name]).norm() for name, p in self.named_parameters()))


class SlowWeights(torch.optim.Optimizer):
    """Lookahead around another optimizer, with slow weights copied when it is made (Zhang et al., 2019)."""

    def __init__(self, fast: torch.optim.Optimizer) -> None:
        self.fast = fast
        self.num_updates = 0
        self.slow = [[p.detach().clone() for p in group["params"]] for group in fast.param_groups]
        super().__init__([dict(group) for group in fast.param_groups], {})
        self.state, self.param_groups = fast.state, fast.param_groups

    def step(self, closure: Any = None) -> Any:
        loss = self.fast.step(closure)
        self.num_updates += 1
        if self.num_updates % 2 == 0:
            with torch.no_grad():
                for group, slow in zip(self.param_groups, self.slow, strict=True):
                    for fast, one in zip(group["params"], slow, strict=True):
                        one.add_(fast - one, alpha=0.5)
                        fast.copy_(one)
        return loss


@habit(plain=False)
class LookaheadAroundAdam(Layers):
    """An optimizer around Adam, whose state a hook reads in between."""

    def configure_optimizers(self) -> Any:
        return SlowWeights(torch.optim.Adam(self.parameters(), lr=0.1))

    def on_train_epoch_end(self) -> None:
        states = self.trainer.optimizers[0].state.values()
        self.log("moments", sum(state["exp_avg"].sum() * state["step"] for state in states))


class StateOfAnother(SlowWeights):
    """Its state is a property without a setter."""

    def __init__(self, fast: torch.optim.Optimizer) -> None:
        self.fast, self.param_groups, self.defaults = fast, fast.param_groups, fast.defaults
        self._optimizer_step_pre_hooks = fast._optimizer_step_pre_hooks
        self._optimizer_step_post_hooks = fast._optimizer_step_post_hooks

    @property
    def state(self) -> Any:  # type: ignore[override]
        return self.fast.state

    def step(self, closure: Any = None) -> Any:
        return self.fast.step(closure)

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.fast.zero_grad(set_to_none)


@habit(expect=error(r"StateOfAnother\.state.*setter"), shows=False)
class StateThatCannotBeSet(Layers):
    """A wrapper that shows its inner optimizer's state by a property."""

    def configure_optimizers(self) -> Any:
        return StateOfAnother(torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9))


class Sharpness(torch.optim.SGD):
    """Sharpness-aware minimization: the closure runs at the weights and uphill from them (Foret et al., 2021)."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        with torch.enable_grad():
            loss = closure()
        parameters = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        before = [p.clone() for p in parameters]
        norm = torch.stack([p.grad.norm() for p in parameters if p.grad is not None]).norm()
        for p in parameters:
            p.add_(p.grad / (norm + 1e-12), alpha=0.05)
        with torch.enable_grad():
            closure()
        for p, old in zip(parameters, before, strict=True):
            p.copy_(old)
        super().step()
        return loss


@habit(plain=False)
class SharpnessAware(Layers):
    """An optimizer of one's own that goes uphill by the norm of all gradients, and calls Lightning's closure twice."""

    def configure_optimizers(self) -> Any:
        return Sharpness(self.parameters(), lr=0.1, momentum=0.9)


@habit(observed=["found"], plain=False)
class OptimizerSavedAtTheEnd(Noting):
    """Saves the optimizer's state dict, and reads its state, in each hook after the last step."""

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.05)

    def note(self, name: str) -> None:
        optimizer = self.trainer.optimizers[0]
        file = io.BytesIO()
        torch.save(optimizer.state_dict(), file)
        file.seek(0)
        state = torch.load(file)["state"]
        moments = {index: entries["exp_avg"].norm().item() for index, entries in state.items()}
        self.found.append((name, moments, len(optimizer.state), optimizer.state[self.head.bias]["step"].item()))

    def on_train_end(self) -> None:
        self.note("on_train_end")

    def on_fit_end(self) -> None:
        self.note("on_fit_end")

    def teardown(self, stage: str) -> None:
        if self.trainer.optimizers:
            self.note("teardown")


@habit(observed=["found"], plain=False, epochs=3)
class DirectionsOfLBFGS(Noting):
    """Reads the state of LBFGS, which is that of all parameters together, in hooks and after the run."""

    def configure_optimizers(self) -> Any:
        return torch.optim.LBFGS(self.parameters(), lr=0.1, max_iter=3)

    def note(self) -> None:
        optimizer = self.trainer.optimizers[0]
        [state] = optimizer.state.values()
        self.found.append((state["d"].norm().item(), state["func_evals"], len(state["old_dirs"])))
        self.found.append(optimizer.state_dict()["state"][0]["d"].sum().item())

    def on_train_epoch_end(self) -> None:
        self.note()

    def on_fit_end(self) -> None:
        self.note()


@habit(expect=error(r"Adam\.state is used in training_step .*on_train_batch_start"), shows=False)
class MomentsReadInStep(Layers):
    """Looks at the moments of all parameters in a step."""

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=0.1)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        state = self.optimizers().state  # type: ignore[union-attr]
        self.log("moments", sum(float(state[p]["exp_avg"].norm()) for p in self.parameters() if p in state))
        return super().training_step(batch, batch_idx)


class SteppedByHand(Noting):
    """A step by hand."""

    automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        loss = super().training_step(batch, batch_idx)
        self.manual_backward(loss)
        optimizer.step()
        return loss


@habit(expect=error(r"SGD\.state is used in training_step .*on_train_batch_start"), shows=False)
class MomentumReadByHand(SteppedByHand):
    """Looks at the momentum after a step by hand."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        state: Any = self.optimizers().state  # type: ignore[union-attr]
        self.log("momentum", state[self.head.weight]["momentum_buffer"].norm())
        return loss


@habit(observed=["found"], plain=False)
class MomentumReadBetweenStepsByHand(SteppedByHand):
    """Looks at the momentum in a hook within a step by hand."""

    def on_after_backward(self) -> None:
        states = self.trainer.optimizers[0].state.values()
        self.found += [entries["momentum_buffer"].norm().item() for entries in states]


@habit(plain=False, shows=False)
class GroupsClearedAndAddedAnew(Layers):
    """A callback of the first epoch's end drops all groups, and adds one of what goes on to be trained."""

    def on_train_epoch_start(self) -> None:
        if self.current_epoch == 1:
            optimizer = self.trainer.optimizers[0]
            optimizer.param_groups.clear()
            optimizer.state.clear()
            optimizer.add_param_group({"params": list(self.layers.parameters())})


@habit(observed=["mean"], plain=False, shows=False)
class OptimizesNothing(Layers):
    """Statistics of the features are gathered, and there is no optimizer (anomalib's PaDiM)."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.register_buffer("mean", torch.zeros(WIDTH))

    def training_step(self, batch: Any, batch_idx: int) -> None:
        with torch.no_grad():
            self.mean += self.features(batch[0]).mean(0)

    def configure_optimizers(self) -> None:
        return None


@habit(
    observed=["mean"],
    plain=False,
    shows=False,
    calls=["fit", "fit:last"],
    callbacks=lambda: [ModelCheckpoint(save_last=True)],
    trainer={"enable_checkpointing": True},
)
class OptimizesNothingAndIsSaved(OptimizesNothing):
    """The same, and a checkpoint of each epoch is saved, from which a run goes on."""


@habit(shows=False)
class OptimizesNothingByItself(Layers):
    """As above, and losses are returned."""

    def configure_optimizers(self) -> None:
        return None


class SlowWeightsInState(torch.optim.Optimizer):
    """Lookahead with slow weights in a state of its own, which begins in the constructor."""

    def __init__(self, fast: torch.optim.Optimizer) -> None:
        super().__init__([dict(group) for group in fast.param_groups], {})
        self.fast, self.num_updates = fast, 0
        self.param_groups = fast.param_groups
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter]["slow"] = parameter.detach().clone()

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = self.fast.step(closure)
        self.num_updates += 1
        for group in self.param_groups if self.num_updates % 2 == 0 else ():
            fast = [parameter for parameter in group["params"] if parameter.grad is not None]
            slow = [self.state[parameter]["slow"] for parameter in fast if "slow" in self.state[parameter]]
            torch._foreach_lerp_(fast, slow, weight=0.5)
            torch._foreach_copy_(slow, fast)
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.fast.zero_grad(set_to_none)


@habit(plain=False, shows=False, calls=("fit", "fit"))
class LookaheadInState(Layers):
    """Lists of what has gradients and of their states belong together."""

    def configure_optimizers(self) -> Any:
        return SlowWeightsInState(torch.optim.Adam(self.parameters(), lr=0.1))
