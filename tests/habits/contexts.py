"""What torch puts around calls: contexts and modes, transforms, hooks over several tensors, Python for each element."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from tests.habits.modules import CLASSES, SAMPLES, WIDTH, Evaluated, Layer, Layers
from tests.habits.table import error, habit


class Attends(nn.Module):
    """Attention over a sequence that is made of each sample."""

    def __init__(self) -> None:
        super().__init__()
        self.projection = nn.Linear(WIDTH, 3 * WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        steps = torch.linspace(0.5, 1.0, 6)[:, None]
        return torch.tanh(x + self.attend(*(self.projection(x)[:, None, None] * steps).chunk(3, -1)).sum((1, 2)))

    def attend(self, *args: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(*args, is_causal=True)


class AttendsByMath(Attends):
    """With torch's plain kernel, which rounds otherwise, in a part that goes on by what it has read."""

    by_math = True

    def attend(self, *args: Tensor) -> Tensor:
        before = super().attend(*args)
        kernels = SDPBackend.MATH if self.by_math else [SDPBackend.FLASH_ATTENTION, SDPBackend.MATH]
        with sdpa_kernel(kernels, set_priority=not self.by_math):
            found = before - super().attend(*args)
            if found.mean() > -1:
                found = found + F.scaled_dot_product_attention(*args)
        return found


@habit()
class KernelsOfAttention(Layers):
    """sdpa_kernel in each layer, with other kernels in the second epoch."""

    layer = AttendsByMath

    def on_train_epoch_start(self) -> None:
        for layer in self.layers:
            layer.by_math = self.current_epoch == 0


class AttendsWithHeads(nn.Module):
    """`nn.MultiheadAttention` over such a sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True, dropout=0.1)

    def forward(self, x: Tensor) -> Tensor:
        steps = x[:, None] * torch.linspace(0.5, 1.0, 6)[:, None]
        return torch.tanh(x + self.attention(steps, steps, steps, need_weights=False)[0].sum(1))


@habit(plain=False, calls=("fit", "validate"))
class KernelsAroundTheStep(Evaluated):
    """sdpa_kernel around the whole step."""

    layer = AttendsWithHeads

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        with sdpa_kernel(SDPBackend.MATH):
            return super().training_step(batch, batch_idx)


@habit(without={"threshold": 100.0})
class ReadsInInferenceMode(Layers):
    """What is computed in inference mode is read there, before stages have run what comes before it."""

    threshold = 0.0

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        hidden = self.layers[1](self.layers[0](x))
        with torch.inference_mode():
            term = self.layers[2](self.layers[0](hidden)).square()
            if term.mean() > self.threshold:
                term = term * 0.5
        hidden = self.layers[3](self.layers[2](hidden) + term.clone())
        return F.cross_entropy(self.head(hidden), y)


@habit(plain=False, without={"threshold": 100.0})
class ReadsInInferenceModeByHand(ReadsInInferenceMode):
    """Likewise, optimized by hand."""

    automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(super().training_step(batch, batch_idx))
        optimizer.step()


@habit(expect=error(r"contexts\.py:\d+.*saved.*checkpoint"))
class SavesInBFloat16(Layers):
    """Hooks on what is saved for backward, which keep it in bfloat16."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        def pack(tensor: Tensor) -> Tensor:
            return tensor.bfloat16().float() if tensor.is_floating_point() else tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            return super().training_step(batch, batch_idx)


@habit(shows=False)  # which changes no number
class SavesOnCPU(Layers):
    """save_on_cpu around the step."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        with torch.autograd.graph.save_on_cpu():
            return super().training_step(batch, batch_idx)


class Scaling(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        return found * 1.1 if func is torch.ops.aten.tanh.default else found


@habit(expect=error(r"Scaling.*contexts\.py:\d+.*TorchFunctionMode"))
class EntersDispatchMode(Layers):
    """A mode that changes what operators of aten give."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        with Scaling():
            return super().training_step(batch, batch_idx)


@habit(expect=error(r"FlopCounterMode.*contexts\.py:\d+"))
class CountsFlops(Layers):
    """Torch's counter of floating point operations, whose sum is logged."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        with FlopCounterMode(display=False) as counter:
            loss = super().training_step(batch, batch_idx)
        self.log("flops", float(counter.get_total_flops()))
        return loss


class Doubling(TorchFunctionMode):
    """Doubles what tanh gives, and counts its calls."""

    num_calls = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        if func is not torch.tanh:
            return found
        self.num_calls += 1
        return found * 2


@habit()
class EntersFunctionMode(Layers):
    """A mode that changes what torch's functions give."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        with Doubling() as mode:
            loss = super().training_step(batch, batch_idx)
        return loss * mode.num_calls


@habit(expect=error(r"(?s)contexts\.py:\d+.*torch\.autograd\.grad"), automatic=error(r"calls 0 modules"))
class TangentOfForwardMode(Layers):
    """A derivative by forward_ad, which is left out where there is none."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        loss = F.cross_entropy(self(x), y)
        with forward_ad.dual_level():
            tangent = forward_ad.unpack_dual(self(forward_ad.make_dual(x, torch.ones_like(x)))).tangent
        return loss if tangent is None else loss + 0.1 * tangent.pow(2).mean()


@habit(expect=error(r"(?s)torch\.func.*torch\.autograd\.grad"), automatic=error(r"torch\.func"))
class GradientByFunc(Layers):
    """torch.func.grad of the whole model by its input, after a call of it."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        loss = F.cross_entropy(self(x), y)
        return loss + 0.1 * torch.func.grad(lambda each: self(each).pow(2).sum())(x).pow(2).mean()


@habit(expect=error(r"(?s)torch\.func.*torch\.autograd\.grad"), automatic=error(r"calls 0 modules"))
class TangentByFunc(Layers):
    """torch.func.jvp of the whole model, after a call of it."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        loss = F.cross_entropy(self(x), y)
        return loss + 0.1 * torch.func.jvp(self, (x,), (torch.ones_like(x),))[1].pow(2).mean()


@habit(expect=error(r"(?s)contexts\.py:\d+.*whole batch"), automatic=error(r"torch\.func"))
class EnsembleByVmap(Layers):
    """Heads whose parameters are stacked, and called by one vmap."""

    def __init__(self) -> None:
        super().__init__()
        self.heads = nn.ModuleList([nn.Linear(WIDTH, CLASSES) for _ in range(3)])

    def forward(self, x: Tensor) -> Tensor:
        stacked = torch.func.stack_module_state(list(self.heads))  # type: ignore[arg-type]
        base = copy.deepcopy(self.heads[0]).to("meta")
        call = torch.vmap(lambda state, each: torch.func.functional_call(base, state, (each,)), in_dims=(0, None))
        return call(stacked, self.features(x)).mean(0)


@habit(plain=False)
class ElementsByPython(Layers):
    """Tensor.apply_ and map_, with functions that count."""

    num_calls = 0

    def features(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
            changed = x.detach().clone().apply_(self.halved).map_(x.detach(), lambda one, other: one + other)
            x = x + 0.1 * changed + 1e-4 * self.num_calls
        return x

    def halved(self, number: float) -> float:
        self.num_calls += 1
        return number / 2 if number > 0 else number

    def on_train_batch_end(self, *_: Any) -> None:
        for parameter in self.parameters():
            parameter.data.apply_(lambda number: round(number * 1024) / 1024)


@habit(expect=error(r"register_multi_grad_hook.*contexts\.py:\d+.*register_hook"))
class HookOnTwoGradients(Layers):
    """register_multi_grad_hook over hidden values."""

    def features(self, x: Tensor) -> Tensor:
        first = self.layers[0](x)
        second = self.layers[1](first)
        torch.autograd.graph.register_multi_grad_hook(
            (first, second), lambda gradients: self.log("norm", sum(one.norm() for one in gradients if one is not None))
        )
        return self.layers[3](self.layers[2](second))


class Tagged(Tensor):
    """A subclass that only has another name."""


@habit(expect=error(r"(?s)contexts\.py:\d+.*plain tensors"))
class TensorsOfASubclass(Layers):
    """Hidden values become a subclass of Tensor."""

    def features(self, x: Tensor) -> Tensor:
        return super().features(self.layers[0](x).as_subclass(Tagged) * 1.1)


@habit(expect=error(r"(?s)contexts\.py:\d+.*instead of set_ a copy_"))
class MemoryTakenOver(Layers):
    """Tensor.set_ to a hidden value's memory."""

    def features(self, x: Tensor) -> Tensor:
        kept = torch.empty(0)
        kept.set_(self.layers[0](x).detach().clone())
        return super().features(x) + kept


class ReadsAttribute(Layer):
    def forward(self, x: Tensor) -> Tensor:
        found = super().forward(x)
        found.origin, found.doubled = x, found * 2  # type: ignore[attr-defined]
        return found


@habit()
class AttributesOfTensors(Layers):
    """Layers put attributes on what they return, from which later code takes tensors."""

    layer = ReadsAttribute

    def features(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
            x = x + 0.1 * x.doubled - 0.1 * x.origin  # type: ignore[attr-defined]
        return x


@habit(plain=False)
class DefaultDtypeOfAPart(Layers):
    """Double is the default for a part of the step, and of the second epoch, in which integers are divided."""

    def on_train_epoch_start(self) -> None:
        torch.set_default_dtype(torch.float64 if self.current_epoch else torch.float32)

    def on_train_epoch_end(self) -> None:
        torch.set_default_dtype(torch.float32)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        hidden = self.layers[1](self.layers[0](x))
        torch.set_default_dtype(torch.float64 if self.global_step % 2 else torch.float32)
        shares = hidden.argmax(-1) / 3 * torch.full((len(x),), 0.7)
        torch.set_default_dtype(torch.float64 if self.current_epoch else torch.float32)
        loss = F.cross_entropy(self.head(self.layers[3](self.layers[2](hidden))), y)
        return loss * (1 + shares.mean() + (hidden > 0).sum() / 7).float()


@habit(observed=["found"], plain=False)
class DeterministicInAPart(Layers):
    """What is not written yet is NaN while torch is deterministic."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[bool] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        hidden = self.features(batch[0])
        torch.use_deterministic_algorithms(True)
        empty = torch.empty_like(hidden)
        torch.use_deterministic_algorithms(False)
        self.found.append(bool(empty.isnan().all()))
        return F.cross_entropy(self.head(hidden), batch[1])


@habit(expect=error(r"set_flush_denormal.*contexts\.py:\d+.*on_fit_start"), plain=False)
class DenormalsFlushed(Layers):
    """Numbers that are almost nothing are nothing in a part of the step."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        hidden = self.features(batch[0])
        torch.set_flush_denormal(True)
        small = hidden.abs() * 1e-40
        torch.set_flush_denormal(False)
        return F.cross_entropy(self.head(hidden), batch[1]) + (small * 1e30).mean() * 1e10


@habit()
class AttentionWithBiases(Layers):
    """Attention with torch's causal bias, which is a tensor of a class of its own, and with one by distance."""

    @staticmethod
    def batch(generator: torch.Generator) -> Any:
        x = torch.randn(SAMPLES, 5, WIDTH, generator=generator)
        return x, torch.randint(CLASSES, (SAMPLES,), generator=generator)

    def features(self, x: Tensor) -> Tensor:
        distances = (torch.arange(5)[:, None] - torch.arange(5)).abs()
        slopes = torch.tensor([0.5, 0.25])[:, None, None]
        for i, layer in enumerate(self.layers):
            x = layer(x)
            heads = x.view(len(x), 5, 2, -1).transpose(1, 2)
            if i % 2:
                bias = causal_lower_right(3, 5)
                found = F.scaled_dot_product_attention(heads[:, :, -3:], heads, heads, attn_mask=bias)
                found = F.pad(found, (0, 0, 2, 0))
            else:
                bias = (-distances * slopes).expand(len(x), -1, -1, -1)
                found = F.scaled_dot_product_attention(heads, heads, heads, attn_mask=bias)
            x = x + found.transpose(1, 2).flatten(2)
        return x.mean(1)
