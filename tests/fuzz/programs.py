"""Random LightningModules as source text: statements of many kinds, combined as they come.

Reentrant checkpoints are left out, whose last bits may differ (docs/faq.md).
"""
# ruff: noqa: E501 -- a statement is a line

from __future__ import annotations

import random
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

KINDS = (
    *("Block", "Plain", "Normed", "BatchNormed", "Convolved", "Recurrent", "Attending", "Embedded", "Dropped"),
    *("Counting", "Remembering", "InPlace", "Routed", "Lazy", "LayerDropped", "Several", "ByName", "Recomputing"),
    *("Rounding", "Nested", "Hooking", "Switching", "Tracking", "Noisy"),
)

HEADER = '''"""Made by tests/fuzz/programs.py."""

import copy
import random
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import clip_grad_norm_, clip_grad_value_, parameters_to_vector, parametrizations, vector_to_parameters
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

from tests.fuzz.parts import Base, Block, Scaled
from tests.habits.table import habit
'''

SET_UP = """
self.blocks[{i}].linear = self.blocks[{j}].linear
self.blocks[{i}].linear.weight = self.blocks[{j}].linear.weight
parametrizations.weight_norm(self.blocks[{i}].linear)
parametrizations.spectral_norm(self.blocks[{i}].linear)
self.blocks[{i}].register_forward_hook(lambda module, args, out: out * {c})
self.blocks[{i}].linear.register_forward_hook(lambda module, args, out: self.values.append(out.detach().mean()))
self.blocks[{i}].register_forward_pre_hook(lambda module, args: (args[0] * {c},))
self.blocks[{i}].linear.register_full_backward_hook(lambda module, into, out: (into[0] * {c},) if into[0] is not None else None)
self.blocks[{i}].register_full_backward_pre_hook(lambda module, out: (out[0] * {c},))
self.blocks[{i}].linear.weight.register_hook(lambda gradient: gradient * {c})
self.blocks[{i}].linear.bias.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", p.grad * {c}))
self.blocks[{i}].linear.weight.register_hook(lambda gradient: self.norms.append(gradient.norm()))
self.blocks[{i}].requires_grad_(False)
self.teach({i})
""".strip().splitlines()

FEATURES = """
x = self.blocks[{i}](x)
x = self.blocks[{i}](x)
x = self.blocks[{i}](x)
x = x + self.blocks[{i}](x * {c})
x, aux = self.blocks[{i}].both(x); extra.append(aux)
d = self.blocks[{i}].as_dict(x); x = d["x"] + d["more"][0] * d["more"][1]
o = self.blocks[{i}].as_data(x); x = o.x; extra.append(o.aux)
for block in self.blocks[{i}:]: x = block(x)
for block in reversed(self.blocks): x = block(x)
x = checkpoint(self.blocks[{i}], x, use_reentrant=False)
x = checkpoint(lambda v: self.blocks[{i}](v) + self.blocks[{j}](v), x, use_reentrant=False)
x = checkpoint(lambda v: self.blocks[{i}](v) * {c}, x, use_reentrant=False)
x = torch.func.functional_call(self.blocks[{i}], {{name: p * {c} for name, p in self.blocks[{i}].named_parameters()}}, (x,))
x = F.linear(x, self.blocks[{i}].linear.weight, self.blocks[{j}].linear.bias)
x = x @ self.blocks[{i}].linear.weight.t() * {c}
x = x + self.blocks[{i}].linear.bias.sum()
x = x * self.scale
x = x + self.words(batch["tokens"]).mean(1)
with torch.no_grad(): x = x + self.blocks[{i}](x)
t = torch.no_grad()(self.blocks[{i}])(x); x = x + t
x = self.blocks[{i}](x.detach()) + x
x = x + self.teacher(x).detach() if hasattr(self, "teacher") else x
h.append(x)
h.append(x)
h.append(x.detach())
x = x + h[{k} % len(h)]
x = x * torch.sigmoid(h[{k} % len(h)])
x = torch.where(x > h[{k} % len(h)], x, h[{k} % len(h)] * {c})
x = torch.stack([x, h[{k} % len(h)]]).mean(0)
x = torch.cat([x[:, :4], h[{k} % len(h)][:, 4:]], 1)
x = sum(h, x) / (len(h) + 1)
m = x[:, 0] > {c}; x = x.clone(); x[m] = self.blocks[{i}].linear(x[m])
m = x > {c}; extra.append(x[m].sum() * 0.01)
x = x.masked_fill(h[{k} % len(h)] > {c}, 0.1)
index = (x.sum(1) > 0).nonzero().squeeze(1); x = x.index_add(0, index, self.blocks[{i}].linear(x[index]))
u, inverse = torch.unique(batch["tokens"][:, 0], return_inverse=True); x = x + self.words(u)[inverse]
u, inverse = torch.unique(x.argmax(1), return_inverse=True); x = x + self.blocks[{i}].linear(u[:, None].float().expand(-1, 8))[inverse]
rows = [self.blocks[{i}].linear(row) for row in x]; x = torch.stack(rows)
a, b = x.chunk(2, 1); x = torch.cat([b, a.tanh()], 1)
a, b = x.unbind(0)[0], x[1:]; x = torch.cat([a[None] * {c}, b])
x = x.view(-1, 2, 4).transpose(1, 2).reshape(-1, 8)
x = x.t().contiguous().t()
x = x.clone(); x[:, {k}] = x[:, 0] * {c}
x = x.clone(); x[:, :4] += h[{k} % len(h)][:, 4:]
x = x * 1.0; x.mul_({c})
x = x.clone(); v = x[:, 2:6]; v.add_({c}); x = x + v.mean()
x = x.clone(); v = x.t(); v[0].copy_(h[{k} % len(h)][:, 1])
x = x.clone(); part = x[:, {k}:]; x[:, -1].zero_(); x = x + part.sum(1, keepdim=True) * 0.1
new = x.new_zeros(len(x), 8); new[:, :4] = x[:, 4:].sin(); new[:, 4:] = h[{k} % len(h)][:, :4]; x = new
x = F.dropout(x, 0.2, self.training)
x = x + 0.1 * torch.randn_like(x)
x = x * torch.rand(())
x = x + random.random()
x = x * np.random.rand()
x = x[:, torch.randperm(8)]
x = x[torch.randperm(len(x))]
x = x.roll(int(torch.randint(0, 8, (1,))), 1)
x = x * torch.bernoulli(x.detach().sigmoid())
x = x + self.words(torch.multinomial(x.softmax(1), 1).squeeze(1))
x = x + torch.rand(8, generator=self.generator)
x = self.blocks[random.randrange(len(self.blocks))](x)
x = self.blocks[{i}](x) if random.random() < 0.5 else x
x = x * {c} if x.mean() > 0 else x + 0.1
x = x * min(1.0, 1 / (1e-3 + x.norm().item()))
for _ in range(int(x.detach().abs().sum().item() * 10) % 3): x = self.blocks[{i}](x)
self.seen.append(float(x.mean()))
self.seen.append(x.argmax(1).tolist())
self.seen.append(np.asarray(x.detach()).sum().item())
self.seen.append((tuple(x.shape), x.stride(), x.requires_grad, x.is_contiguous()))
x = x / x.detach().abs().max().clamp(min=1)
self.n += 1
self.n += int(batch["y"].sum())
x = x * (1 + 0.01 * self.n)
self.values.append(x.detach().mean())
self.values.append(x.mean())
x = x + torch.stack(self.values[-3:]).mean().detach() if self.values else x
self.kept = x.detach()
self.kept = h[{k} % len(h)]
x = x + self.kept.detach().mean(0) if self.kept is not None else x
self.queue.append(x.detach().clone()); x = x + self.queue[0].mean(0); self.queue = self.queue[-3:]
self.table[self.n % 3] = x.detach().sum(); x = x * (1 + 0.01 * sum(self.table.values()))
self.mean.lerp_(x.detach().mean(0), 0.1)
self.mean[{k}] = x.detach().max()
self.mean = self.mean * 0.9 + x.detach().mean(0) * 0.1
x = x - self.mean
self.count += 1
self.count.add_(int((x > 0).sum()))
x = x / (1 + 0.1 * self.count)
x.register_hook(lambda gradient: gradient * {c}) if x.requires_grad else None
x.register_hook(lambda gradient: self.norms.append(gradient.norm())) if x.requires_grad else None
x = Scaled.apply(x, {c})
x = x + (x.round() - x).detach()
v = x.detach().requires_grad_(); (g,) = torch.autograd.grad(torch.enable_grad()(self.blocks[{i}])(v).sum(), v); x = x + g
v = x.detach().requires_grad_(); (g,) = torch.autograd.grad(torch.enable_grad()(self.blocks[{i}])(v).square().sum(), v, create_graph=True); extra.append(g.norm())
v = h[{k} % len(h)].detach().requires_grad_(); torch.enable_grad()(self.blocks[{i}])(v).sum().backward(); x = x + v.grad
x = x * {c} if self.current_epoch % 2 else x
x = self.blocks[{i}](x) if batch_idx == 1 else x
x = x if self.global_step < 2 else self.blocks[{i}](x)
x = self.blocks[{i}](x) if self.training else x
self.log("f{u}", x.mean(), on_step=True, on_epoch=True)
self.log("f{u}", x.detach().max(), on_step=False, on_epoch=True, reduce_fx="max")
with torch.autocast("cpu", dtype=torch.bfloat16): x = self.blocks[{i}].linear(x).float()
x = x.float()
x = x.double().softmax(1).float()
self.blocks[{i}].eval(); x = self.blocks[{i}](x); self.blocks[{i}].train(self.training)
self.blocks[{i}].requires_grad_(self.current_epoch > 0)
with torch.set_grad_enabled(self.current_epoch > 0): x = x + self.blocks[{i}](x)
x = x.sort(1).values
x = x.topk(4, 1).values.repeat(1, 2)
x = x.cumsum(1) * 0.3
x = torch.einsum("ni,nj->nij", x, x).mean(2)
x = x.scatter_add(1, x.argsort(1), x * {c})
x = x + F.one_hot(x.argmax(1), 8) * {c}
x = x.gather(1, h[{k} % len(h)].argsort(1))
q = x.view(-1, 2, 4); x = F.scaled_dot_product_attention(q, q, q).flatten(1)
x = F.normalize(x, dim=1)
x = copy.copy(x)
h[:] = [value * {c} for value in h]
del h[1:]
x = h[-1]
x = nn.Sequential(*self.blocks[{i}:])(x)
x = self.blocks[{i}].forward(x)
x = type(self.blocks[{i}]).forward(self.blocks[{i}], x)
x = checkpoint_sequential(list(self.blocks[{i}:]), 2, x, use_reentrant=False) if x.requires_grad and len(self.blocks[{i}:]) > 1 else x
x = checkpoint(self.blocks[{i}].both, x, use_reentrant=False)[0]
x = x.clone(); x.data.mul_({c})
x = x.clone(); x.detach().add_({c})
x = x.clone(); a = x.detach().numpy(); a *= {c}
x = x * 1.0; x.detach()[:, {k}] = {c}
batch["x"] = batch["x"] * {c}; x = x + batch["x"]
batch["more"] = x; x = x + batch["more"].mean()
batch["x"].add_({c}); x = x + batch["x"]
self.blocks[{i}].note = x.detach().mean(); x = x + getattr(self.blocks[{j}], "note", 0.1)
with torch.no_grad(): self.blocks[{i}].linear.bias.clamp_(-0.2, 0.2)
x = x + self.blocks[{i}].linear.weight.detach().mean()
x = x + x.new_tensor([{c}]); x = x.type_as(h[0])
x = x * (batch["tokens"] > 5).float().mean(1, keepdim=True)
y = batch["y"]; x = x + (y.float().mean() - y.min()) * {c}
n = len(x) - int((x.sum(1) > 0).sum()); x = x + n * 0.1
s = torch.stack([block.linear.weight.norm() for block in self.blocks]); x = x * s.softmax(0)[{i}]
x = x + torch.cat([block.linear.bias for block in self.blocks]).mean()
x = x + parameters_to_vector(self.blocks[{i}].parameters()).mean()
x = torch.addmm(self.blocks[{i}].linear.bias, x, self.blocks[{j}].linear.weight)
x = F.layer_norm(x, (8,), self.scale)
x = F.batch_norm(x, None, None, training=True) if len(x) > 1 else x
x.retain_grad() if x.requires_grad else None
torch.manual_seed(7); x = x + 0.1 * torch.randn(8)
random.seed(batch_idx); x = x * random.random()
state = torch.get_rng_state(); x = x + 0.1 * torch.rand(8); torch.set_rng_state(state)
with torch.random.fork_rng(devices=[]): torch.manual_seed(self.n); x = self.blocks[{i}](F.dropout(x, 0.3))
x = F.gumbel_softmax(x, tau=1.0, hard=True) + x * 0.1
x = F.rrelu(x, training=self.training)
x = torch.distributions.Normal(x, 1.0).rsample() * 0.1 + x
dist = torch.distributions.Categorical(logits=x); a = dist.sample(); extra.append(-dist.log_prob(a).mean() * 0.1)
inner = lambda v, scale={c}: self.blocks[{i}](v) * scale; x = inner(x)
x = self.blocks[{i}](x=x) if "Nested" not in self.kinds else self.blocks[{i}](x)
with torch.autograd.graph.saved_tensors_hooks(lambda t: t.clone(), lambda t: t): x = self.blocks[{i}](x)
g = torch.func.grad(lambda v: self.blocks[{i}].linear(v).square().sum())(x.detach()); x = x + g * 0.1
x = x + torch.func.vmap(self.blocks[{i}].linear)(x)
x = x + torch.autograd.functional.jacobian(self.blocks[{i}].linear, x[0].detach()).mean() if torch.is_grad_enabled() else x
(g,) = torch.autograd.grad(x.sum(), h[-1], retain_graph=True, allow_unused=True) if x.requires_grad and h[-1].requires_grad else (None,); x = x if g is None else x + 0.1 * g
x = x + (self.trainer.callback_metrics.get("f0", torch.zeros(())) * 0.1)
x = torch.nan_to_num(x / (x - x.detach()), 0.1, 0.2, 0.3) * 0.1 + x
x = {{"a": x, "b": [x * {c}, None]}}; x = x["a"] + x["b"][0]
x = max([x, x * {c}], key=lambda v: float(v.sum()))
x = x[x.sum(1).argsort()]
x = torch.cat([self.blocks[{i}](part) for part in x.split(1)]) if "BatchNormed" not in self.kinds else x
x = torch.cat([self.blocks[{i}](x), self.blocks[{j}](x)], 1)[:, ::2]
x, *rest = (self.blocks[{i}](x), x, None); x = x + rest[0]
for name, block in self.blocks.named_children(): x = x + 0.1 * block.linear(x) if int(name) % 2 else x
x = x + sum(p.sum() for n, p in self.named_parameters() if n.endswith("bias")) * 0.01
x = x.index_select(1, torch.arange(7, -1, -1))
x = torch.nn.functional.pad(x, (1, 0))[:, :8]
x = x.masked_scatter(x > {c}, h[{k} % len(h)])
x = x.where(batch["y"][:, None] > 1, h[{k} % len(h)])
x = torch.lerp(x, h[{k} % len(h)], 0.3)
x = (x.unsqueeze(1) * h[{k} % len(h)].unsqueeze(2)).mean(1)
x = torch.linalg.solve(torch.eye(8) + 0.01 * self.blocks[{i}].linear.weight, x.t()).t()
x = x + self.blocks[{i}].linear(self.mean)
self.mean.copy_(self.blocks[{i}].linear.bias.detach())
self.mean.mul_(0.9).add_(x.detach().sum(0), alpha=0.01)
self.register_buffer("fresh", x.detach().mean(0), persistent=False); x = x + self.fresh
self.last_x = x; self.values.append(self.last_x.detach().max())
self.seen.append(str(x.dtype)); self.seen.append(x.grad_fn is None)
self.seen.append([p.requires_grad for p in self.blocks[{i}].parameters()])
self.table.setdefault("n", []).append(len(x))
self.table["m"] = self.table.get("m", 0.0) + x.detach().mean().item(); x = x * (1 + 0.01 * self.table["m"])
self.table["t"] = 0.5 * self.table.get("t", 0.0) + x.detach().mean(); x = x + self.table["t"]
self.scale.requires_grad_(False); x = x * self.scale; self.scale.requires_grad_(True)
self.blocks[{i}].linear.bias.requires_grad_(False); x = self.blocks[{i}](x) + self.blocks[{i}].linear.bias; self.blocks[{i}].linear.bias.requires_grad_(True)
self.scale.requires_grad = not self.scale.requires_grad; x = x * self.scale
for p in self.blocks[{i}].parameters(): p.requires_grad_(not p.requires_grad)
self.blocks[{i}].requires_grad_(False); x = self.blocks[{i}](x); self.blocks[{i}].requires_grad_(True)
self.words.weight.requires_grad_(self.n % 2 == 0); x = x + self.words(batch["tokens"][:, {k} % 5])
x = x * self.scale.detach()
x = x * self.scale.data + self.scale
x = x + copy.deepcopy(self.blocks[{i}].linear)(x)
self.scale.register_hook(lambda gradient: gradient * {c}) if self.n % 2 else None; x = x * self.scale
x = F.linear(x, self.blocks[{i}].linear.weight[:4].repeat(2, 1))
w = self.blocks[{i}].linear.weight.view(-1)[:8]; x = x * w.sigmoid()
h.append(x * 0 + self.blocks[{i}].linear.weight[{k}])
h.append(self.scale.expand_as(x))
x = x.detach().requires_grad_() * {c}
x = x + batch["x"].requires_grad_().sin() * self.scale
torch.set_grad_enabled(self.n % 2 == 0); x = self.blocks[{i}](x); torch.set_grad_enabled(True)
with torch.no_grad(): x = x + self.scale * x; x = x * self.scale
t = torch.inference_mode()(self.blocks[{i}])(x.detach()).clone(); x = x + t
x = checkpoint(lambda v: v * self.scale + self.blocks[{j}].linear.bias, x, use_reentrant=False)
x = checkpoint(lambda v: self.blocks[{i}](v * self.scale), x, use_reentrant=False)
with torch.autocast("cpu", dtype=torch.bfloat16): x = F.linear(x, self.blocks[{i}].linear.weight, self.scale).float()
with torch.autocast("cpu", dtype=torch.bfloat16): x = (x @ self.blocks[{i}].linear.weight.t()).float() + self.blocks[{j}](x.float()).float()
x = x + F.embedding(batch["tokens"], self.words.weight).mean(1)
x = x + (x @ self.words.weight.t()).softmax(1) @ self.words.weight
x = x.to(torch.float64).mul({c}).to(torch.float32)
x = x.bfloat16().float()
x = torch.complex(x, x * {c}).abs()
x = torch.fft.irfft(torch.fft.rfft(x, dim=1), n=8, dim=1)
x = x.cpu().to(self.device).to(self.scale)
x = x + self.trainer.global_step * 0.1 + self.trainer.num_training_batches * 0.01
with torch.no_grad(): self.scale.mul_(0.99)
self.scale.data.mul_(0.99); x = x * self.scale
self.scale.data = self.scale.data * 0.99; x = x + self.scale
self.blocks[{i}].linear.weight.data = self.blocks[{i}].linear.weight.data * 0.99
self.mean = x.detach().mean(0); x = x - self.mean * self.scale
self.blocks[{i}].linear.bias.data[{k}] = 0.1
v = x.detach().requires_grad_(); o = torch.enable_grad()(lambda v: v * self.scale + self.blocks[{i}].linear.bias)(v); (g,) = torch.autograd.grad(o.sum(), v); x = x + g
(g,) = torch.autograd.grad((x * self.scale).sum(), self.scale, retain_graph=True) if x.requires_grad and self.scale.requires_grad else (x.mean(0),); x = x + g
(g,) = torch.autograd.grad((x * self.scale).square().sum(), self.scale, create_graph=True) if x.requires_grad and self.scale.requires_grad else (x.mean(0),); x = x + g * 0.01
x = self.blocks[{i}](x, ) + sum(p.mean() for p in self.blocks[{j}].parameters())
for n, p in self.blocks[{i}].named_parameters(): x = x + p.sum() * 0.01 if p.requires_grad else x - p.sum() * 0.01
x = x + torch.stack([p.mean() for p in self.parameters()]).mean()
x = x + torch.stack([p.detach().abs().max() for p in self.parameters()]).max()
x = torch.nn.utils.stateless.functional_call(self.blocks[{i}].linear, {{"weight": self.blocks[{j}].linear.weight, "bias": self.scale}}, (x,)) if type(self.blocks[{i}].linear) is nn.Linear else x
x = self.blocks[{i}].linear(x) * self.scale.exp() / self.scale.exp().sum()
x = x.clone(); x[0] = self.scale
x = torch.cat([x, self.scale[None]])[1:]
x = torch.maximum(x, self.scale)
x = x.lerp(self.scale.expand_as(x), {c})
v = x[:, :4]; v.add_(h[{k} % len(h)][:, 4:] * {c})
x = x * 1.0; x[:, {k}].mul_(h[-1][:, 0].sigmoid())
x = x * 1.0; a, b = x[:, :4], x[:, 4:]; b.mul_(a.sin().detach()); x = x + a.mean()
new = x.new_zeros(len(x), 8); new.t()[:4].copy_(x.t()[4:]); new[:, 4:].copy_(h[{k} % len(h)][:, :4]); x = new
x = x * 1.0; h.append(x); h.append(x[:, :4].repeat(1, 2)); x.mul_({c})
x = x * 1.0; v = x.view(-1, 2, 4); x = self.blocks[{i}](x); v[:, 0].add_(x[:, :4]); x = x + v.flatten(1)
x = x * 1.0; v = x.t(); h.append(x); x = self.blocks[{i}](x); v.add_(x.t() * {c})
v = x.detach(); x = x * 1.0 + v; v.mul_(0.9)
h[{k} % len(h)].data[:, 0].add_(x.data[:, 0] * 0.1)
x = x * 1.0; x.diagonal().mul_({c}); x.narrow(1, 2, 3).add_(self.scale[:3])
x = x * 1.0; v = x.select(1, {k}); x = x * 0.9 + self.blocks[{i}](x); v.copy_(x[:, 0]); x = x + v[:, None]
""".strip().splitlines()

LOSSES = """
loss = loss + 0.1 * x.square().mean()
loss = loss + 0.1 * F.mse_loss(x, h[{k} % len(h)])
loss = loss + 0.1 * F.mse_loss(x, h[{k} % len(h)].detach())
loss = loss + 0.001 * sum(p.square().sum() for p in self.parameters())
loss = loss + 0.1 * self.blocks[{i}].linear.weight.norm()
loss = loss + 0.1 * (self.blocks[{i}].linear.weight * self.blocks[{j}].linear.weight).sum()
loss = loss + 0.1 * self.scale.abs().sum()
loss = loss + 0.1 * sum(extra)
loss = loss + 0.1 * torch.stack(extra).sum() if extra else loss
loss = loss * (1 + 0.1 * self.current_epoch)
loss = loss * 0.9 if loss.item() > 1 else loss
loss = loss / loss.detach().clamp(min=0.5)
loss = loss if torch.isfinite(loss) else loss * 0
loss = loss if batch_idx != 1 else loss * 0.5
loss = loss + 0.1 * F.cross_entropy(self.head(h[{k} % len(h)]), batch["y"])
(g,) = torch.autograd.grad(loss, self.head.weight, retain_graph=True); loss = loss + 0.1 * (g.detach() * self.head.weight).sum()
(g,) = torch.autograd.grad(loss, self.head.weight, create_graph=True); loss = loss + 0.1 * g.square().sum()
self.log("l{u}", loss)
self.log("l{u}", loss.detach() * 2, on_step=True, on_epoch=True, prog_bar=True)
self.log_dict({{"l{u}": loss, "n{u}": float(self.n), "a{u}": (logits.argmax(1) == batch["y"]).float().mean()}})
self.log("l{u}", loss.item())
self.norms.append(logits.detach().norm(dim=1))
self.values.append(loss.detach())
self.kept = logits
loss.register_hook(lambda gradient: gradient * {c})
self.seen.append(loss.item())
self.count += len(batch["y"])
loss = loss + 0.1 * F.kl_div(F.log_softmax(x, 1), h[{k} % len(h)].detach().softmax(1), reduction="batchmean")
loss = loss + 0.1 * (1 - F.cosine_similarity(x, h[{k} % len(h)])).mean()
loss = loss + 0.01 * sum((p - q.detach()).square().sum() for p, q in zip(self.blocks[{i}].linear.parameters(), self.blocks[{j}].linear.parameters()))
loss = (loss - 0.1).abs() + 0.1
hard = F.cross_entropy(logits, batch["y"], reduction="none"); loss = loss + 0.1 * hard[hard > hard.mean()].sum()
hard = F.cross_entropy(logits, batch["y"], reduction="none"); loss = loss + 0.1 * hard.topk(1).values.mean()
loss = loss + 0.1 * sum(getattr(block, "aux", 0.0) for block in self.blocks)
self.best = min(getattr(self, "best", 9.0), loss.item()); loss = loss * (1 + 0.1 * self.best)
self.smooth = loss.detach() if not hasattr(self, "smooth") else 0.9 * self.smooth + 0.1 * loss.detach(); loss = loss / self.smooth
loss = loss + 0.1 * self.blocks[{i}](x).mean()
loss = loss.mean().reshape(())
loss = sum([loss, 0.1 * x.abs().mean()])
self.trainer.should_stop = self.global_step > 4
self.scale.requires_grad_(False); loss = loss + 0.1 * (x * self.scale).mean(); self.scale.requires_grad_(True)
self.blocks[{i}].requires_grad_(False); loss = loss + 0.1 * self.blocks[{i}](x).mean(); self.blocks[{i}].requires_grad_(True)
loss = loss + 0.1 * ((x @ self.words.weight.t()) * self.scale.mean()).logsumexp(1).mean()
loss = loss + 0.1 * self.blocks[{i}].linear.weight.square().sum() * self.scale.mean()
self.head.requires_grad_(self.n % 2 == 0)
loss = loss + 0.1 * F.cross_entropy(self.head(self.features(batch, batch_idx)[0]), batch["y"]) if self.n % 3 else loss
loss = loss + 0.1 * (self.blocks[{i}].linear.weight @ self.blocks[{j}].linear.weight.detach()).diagonal().mean()
(g,) = torch.autograd.grad(loss, x, retain_graph=True, allow_unused=True) if x.requires_grad else (None,); loss = loss if g is None else loss + 0.1 * F.cross_entropy(self.head(x.detach() + 0.1 * g.sign()), batch["y"])
""".strip().splitlines()

HOOK_STATEMENTS = """
self.n += 1
self.blocks[{i}].linear.weight.data.mul_(0.99)
with torch.no_grad(): self.blocks[{i}].linear.weight.clamp_(-0.3, 0.3)
with torch.no_grad(): self.blocks[{i}].linear.weight.copy_(self.blocks[{j}].linear.weight * 0.5)
with torch.no_grad(): self.mean.add_(self.blocks[{i}].linear.bias)
clip_grad_norm_(self.parameters(), 0.5)
clip_grad_norm_(self.blocks[{i}].parameters(), 0.1)
for p in self.parameters(): p.grad = p.grad * {c} if p.grad is not None else None
for p in self.blocks[{i}].parameters(): p.grad = None
self.norms.append([p.grad.norm().item() for p in self.parameters() if p.grad is not None])
self.norms.append(self.blocks[{i}].linear.weight.norm())
self.log("h{u}", self.blocks[{i}].linear.weight.norm())
self.log("h{u}", float(self.n))
self.log("h{u}", torch.stack(self.values).mean()) if self.values else None
self.values.clear()
self.ema({i})
self.trainer.optimizers[0].param_groups[0]["lr"] *= 0.9
self.blocks[{i}].requires_grad_(self.n % 2 == 0)
with torch.no_grad(): self.values.append(self.blocks[{i}](torch.ones(2, 8)).mean())
with torch.no_grad(): self.kept = self.blocks[{i}](self.kept[:2, :8]) if self.kept is not None and self.kept.shape[1] == 8 else None
self.seen.append(random.random())
self.kept = torch.randn(2, 8)
with torch.no_grad(): self.blocks[{i}].linear.bias.add_(torch.randn(8) * 0.01)
if self.current_epoch: self.seen.append(self.blocks[{i}].linear.weight[0].tolist())
self.count.zero_()
if self.blocks[{i}].linear.bias.sum() > 0: self.n += 1
self.generator.manual_seed(self.n)
vector_to_parameters(parameters_to_vector(self.blocks[{i}].parameters()) * 0.99, self.blocks[{i}].parameters())
clip_grad_value_(self.blocks[{i}].parameters(), 0.01)
self.blocks[{i}].load_state_dict({{n: v * 0.99 if v.is_floating_point() else v for n, v in self.blocks[{i}].state_dict().items()}})
torch._foreach_mul_([p.data for p in self.parameters()], 0.999)
self.seen.append(sorted(n for n, p in self.named_parameters() if p.grad is not None and self.trainer.training))
self.seen.append(sum(p.abs().sum().item() for p in self.blocks[{i}].parameters()))
nn.init.normal_(self.blocks[{i}].linear.bias, std=0.01)
self.blocks[{i}].linear.reset_parameters() if not hasattr(self.blocks[{i}].linear, "parametrizations") else None
self.values.append(torch.stack([p.detach().norm() for p in self.parameters()]).norm())
self.blocks[{i}].train(self.n % 2 == 0)
for g in self.optimizers().param_groups: self.seen.append(g["lr"]); g["lr"] *= 0.95
self.log("h{u}", sum(p.numel() for p in self.parameters() if p.requires_grad) * 1.0)
self.log("h{u}", max(p.detach().abs().max() for p in self.parameters()))
""".strip().splitlines()

HOOKS = {
    "on_fit_start": "",
    "on_train_epoch_start": "",
    "on_train_batch_start": ", batch, batch_idx",
    "on_before_zero_grad": ", optimizer",
    "on_before_backward": ", loss",
    "on_after_backward": "",
    "on_before_optimizer_step": ", optimizer",
    "on_train_batch_end": ", outputs, batch, batch_idx",
    "on_train_epoch_end": "",
    "on_validation_epoch_end": "",
    "on_train_start": "",
    "on_train_end": "",
    "on_validation_epoch_start": "",
    "on_save_checkpoint": ", checkpoint",
    "on_validation_batch_end": ", outputs, batch, batch_idx",
}

WRAPPERS = (
    "if batch_idx % 2:",
    "if self.current_epoch:",
    "for _ in range(2):",
    "with torch.no_grad():",
    "if batch_idx < 2 or self.current_epoch:",
    "if x.requires_grad:",
    "if isinstance(self.blocks[0], Block) and len(batch['y']):",
    "with torch.autocast('cpu', enabled=False):",
    "while self.n % 3:\n    self.n += 1",
    "if 'c' not in self.table or self.table['c']:",
    "with torch.enable_grad():",
    "if self.n % 2:",
    "if x.sum() > 0:",
    "if random.random() < 0.5:",
)

OPTIMIZERS = """
torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)
torch.optim.Adam(self.parameters(), lr=0.01)
torch.optim.AdamW([{{"params": self.blocks.parameters()}}, {{"params": self.head.parameters(), "lr": 0.05}}], lr=0.01)
torch.optim.SGD([p for p in self.parameters() if p.requires_grad], lr=0.1, weight_decay=0.01)
torch.optim.Adagrad(self.parameters(), lr=0.05)
""".strip().splitlines()

BY_HAND = (
    """
opt = self.optimizers()
opt.zero_grad()
self.manual_backward(loss)
opt.step()
""",
    """
opt = self.optimizers()
self.manual_backward(loss / 2)
if batch_idx % 2: opt.step(); opt.zero_grad()
""",
    """
opt = self.optimizers()
self.manual_backward(loss, retain_graph=True)
self.manual_backward(0.5 * F.cross_entropy(logits * 2, batch["y"]))
clip_grad_norm_(self.parameters(), 1.0)
opt.step()
opt.zero_grad()
""",
    """
opt = self.optimizers()
self.manual_backward(loss)
opt.step()
opt.zero_grad()
again = F.cross_entropy(self.head(self.blocks[{i}](batch["x"])), batch["y"])
self.manual_backward(again)
opt.step()
opt.zero_grad()
self.log("again", again)
""",
    """
opt = self.optimizers()
self.manual_backward(loss)
opt.step()
opt.zero_grad(set_to_none=False)
""",
    """
opt = self.optimizers()
self.toggle_optimizer(opt)
self.manual_backward(loss)
self.clip_gradients(opt, gradient_clip_val=0.5, gradient_clip_algorithm="norm")
opt.step()
opt.zero_grad()
self.untoggle_optimizer(opt)
for group in opt.param_groups: group["lr"] *= 0.97
""",
    """
opt = self.optimizers()
opt.zero_grad()
self.manual_backward(loss)
if batch_idx != 1: opt.step()
with torch.no_grad(): self.blocks[{i}].linear.bias.mul_(0.9)
self.log("lr", opt.param_groups[0]["lr"])
""",
)

OPTIONS = (
    {"gradient_clip_val": 0.1},
    {"accumulate_grad_batches": 2},
    {"precision": "bf16-mixed"},
    {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"},
    {"num_sanity_val_steps": 1},
    {"detect_anomaly": True},
)


@dataclass
class Program:
    """Statements by the method that they are in."""

    name: str
    kinds: list[str]
    set_up: list[str] = field(default_factory=list)
    features: list[str] = field(default_factory=list)
    losses: list[str] = field(default_factory=list)
    hooks: dict[str, list[str]] = field(default_factory=dict)
    optimizer: str = "torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)"
    by_hand: list[str] = field(default_factory=list)
    validates: bool = False
    calls: tuple[str, ...] = ("fit",)
    trainer: Mapping[str, Any] = field(default_factory=dict)

    def text(self) -> str:
        set_up = [*self.set_up, *(["self.automatic_optimization = False"] if self.by_hand else [])]
        observed = ["n", "values", "seen", "norms", "queue", "table", "kept"]
        lines = [
            f"@habit(observed={observed}, plain=False, shows=False, calls={self.calls!r}, trainer={self.trainer!r})",
            f"class {self.name}(Base):",
            f"    kinds = {tuple(self.kinds)!r}",
            *method("set_up", "", set_up),
            *method(
                "features",
                ", batch, batch_idx=0",
                ['x = batch["x"]', "h = [x]", "extra = [x.sum() * 0]", *self.features, "return x, h, extra"],
            ),
            *method(
                "training_step",
                ", batch, batch_idx",
                [
                    "x, h, extra = self.features(batch, batch_idx)",
                    "logits = self.head(x)",
                    'loss = F.cross_entropy(logits, batch["y"])',
                    *self.losses,
                    *(self.by_hand or ["return loss"]),
                ],
            ),
        ]
        if self.validates:
            lines += method(
                "validation_step",
                ", batch, batch_idx",
                [
                    "x, h, extra = self.features(batch, batch_idx)",
                    'self.log("val_loss", F.cross_entropy(self.head(x), batch["y"]))',
                    'return {"x": x, "mean": x.mean()}',
                ],
            )
        if "predict" in self.calls:
            lines += method(
                "predict_step",
                ", batch, batch_idx",
                ["x, h, extra = self.features(batch, batch_idx)", "return x, [v.mean() for v in h]"],
            )
        for hook, statements in self.hooks.items():
            if statements:
                lines += method(hook, HOOKS[hook], statements)
        lines += method("configure_optimizers", "", [f"return {self.optimizer}"])
        return HEADER + "\n\n" + "\n".join(lines) + "\n"


def method(name: str, arguments: str, statements: list[str]) -> list[str]:
    lines = [f"    def {name}(self{arguments}):"]
    for statement in statements or ["pass"]:
        lines += ["        " + line for line in statement.strip("\n").splitlines()]
    return ["", *lines]


def make(seed: int, name: str) -> Program:
    """The program of a seed."""
    dice = random.Random(seed)
    depth = dice.choice([4, 4, 5, 6])
    program = Program(name, [dice.choice(KINDS) for _ in range(depth)])
    unique = iter(range(1000))

    def fill(template: str) -> str:
        i, j = dice.sample(range(depth), 2)
        c = dice.choice([0.5, 0.9, 1.1, 0.3, -0.7])
        return template.format(i=i, j=j, k=dice.randrange(7), c=c, u=next(unique))

    def one(templates: Sequence[str], wrapped: float = 0.0) -> str:
        statement = fill(dice.choice(templates))
        if dice.random() < wrapped and "self.log" not in statement:
            inner = "\n".join("    " + part for part in re.split(r"; (?=\S)", statement))
            statement = dice.choice(WRAPPERS) + "\n" + inner
        return statement

    program.set_up = [one(SET_UP) for _ in range(dice.choice([0, 0, 1, 1, 2, 3]))]
    program.features = [one(FEATURES, 0.15) for _ in range(dice.randrange(4, 20))]
    # Every block is called once, in order, at random places
    if dice.random() < 0.8:
        places = sorted(dice.randrange(len(program.features) + 1) for _ in range(depth))
        for number, place in reversed(list(enumerate(places))):
            program.features.insert(place, f"x = self.blocks[{number}](x)")
    program.losses = [one(LOSSES) for _ in range(dice.randrange(0, 6))]
    for _ in range(dice.choice([0, 1, 2, 3, 4])):
        hook = dice.choice(list(HOOKS))
        program.hooks.setdefault(hook, []).append(one(HOOK_STATEMENTS))
    program.optimizer = fill(dice.choice(OPTIMIZERS))
    if dice.random() < 0.25:
        program.by_hand = [fill(dice.choice(BY_HAND))]
    program.validates = dice.random() < 0.4
    if dice.random() < 0.2:
        program.calls = ("fit", "predict")
    if not program.by_hand and dice.random() < 0.3:
        program.trainer = dice.choice(OPTIONS)
    return program
