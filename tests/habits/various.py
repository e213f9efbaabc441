"""Scratch."""
from __future__ import annotations
import collections, copy, math, random, pickle, io, weakref
from typing import Any
import numpy as np
import torch, lightning as L
import torch.nn.functional as F
from torch import Tensor, nn
from tests.habits.modules import CLASSES, WIDTH, SAMPLES, Layer, Layers, Evaluated
from tests.habits.table import habit
H = dict(plain=False, shows=False)

@habit(observed=["mean"], **H)
class M01RunningMeanAttr(Layers):
    def __init__(self):
        super().__init__(); self.mean = torch.zeros(WIDTH)
    def training_step(self, b, i):
        x, y = b; h = self.features(x)
        self.mean = 0.9 * self.mean + 0.1 * h.mean(0).detach()
        return F.cross_entropy(self.head(h - self.mean), y)

@habit(observed=["total", "n"], **H)
class M02TotalInPlace(Layers):
    def __init__(self):
        super().__init__(); self.total = torch.zeros(()); self.n = 0
    def training_step(self, b, i):
        loss = super().training_step(b, i)
        self.total += loss.detach(); self.n += 1
        return loss

@habit(observed=["seen"], **H)
class M03TwoStepsAgo(Layers):
    def __init__(self):
        super().__init__(); self.hist = []; self.seen = []
    def training_step(self, b, i):
        x, y = b; h = self.features(x); self.hist.append(h.detach())
        loss = F.cross_entropy(self.head(h), y)
        if len(self.hist) > 2: loss = loss + 0.1 * (h - self.hist[-3]).pow(2).mean()
        return loss
    def on_train_epoch_end(self):
        self.seen.append(float(torch.cat(self.hist).sum())); self.hist = self.hist[-1:]

@habit(observed=["outs"], **H)
class M04OutputsInBatchEnd(Layers):
    def __init__(self): super().__init__(); self.outs = []
    def training_step(self, b, i):
        x, y = b; l = self(x)
        return {"loss": F.cross_entropy(l, y), "logits": l.detach(), "n": len(y)}
    def on_train_batch_end(self, o, b, i): self.outs.append((o["logits"].argmax(-1).tolist(), o["n"], o["loss"].item()))

@habit(observed=["best", "count"], **H)
class M05BestByTensor(Layers):
    def __init__(self): super().__init__(); self.best = None; self.count = 0
    def training_step(self, b, i):
        loss = super().training_step(b, i)
        if self.best is None or loss < self.best: self.best = loss.detach(); self.count += 1
        return loss

@habit(observed=["bank"], **H)
class M06BankPlainTensor(Layers):
    def __init__(self): super().__init__(); self.bank = torch.zeros(6, WIDTH); self.at = 0
    def training_step(self, b, i):
        x, y = b; h = self.features(x)
        loss = F.cross_entropy(self.head(h), y) + 0.1 * (h @ self.bank.clone().T).logsumexp(-1).mean()
        with torch.no_grad(): self.bank[self.at % 6] = F.normalize(h.detach().mean(0), dim=0)
        self.at += 1
        return loss

@habit(observed=["grads"], **H)
class M07InputGradient(Layers):
    def __init__(self): super().__init__(); self.grads = []
    def training_step(self, b, i):
        x, y = b; x = x.clone().requires_grad_(True); self.x = x
        return F.cross_entropy(self(x), y)
    def on_after_backward(self): self.grads.append(None if self.x.grad is None else float(self.x.grad.abs().sum()))

@habit(**H)
class M08RowsLoop(Layers):
    def training_step(self, b, i):
        x, y = b; h = self.layers[1](self.layers[0](x))
        h = torch.stack([r * (k + 1) / len(h) for k, r in enumerate(h)])
        return F.cross_entropy(self.head(self.layers[3](self.layers[2](h))), y)

@habit(observed=["s"], **H)
class M09Formats(Layers):
    def __init__(self): super().__init__(); self.s = []
    def training_step(self, b, i):
        loss = super().training_step(b, i)
        self.s.append(f"{loss:.3f} {float(loss):.2f} {round(loss.item(), 3)} {int(loss * 10)} {bool(loss > 1)} {'%.2f' % loss}")
        return loss

@habit(observed=["s"], **H)
class M10Describes(Layers):
    def __init__(self): super().__init__(); self.s = []
    def training_step(self, b, i):
        x, y = b; h = self.features(x)
        self.s.append((h.type(), h.is_contiguous(), h.stride(), h.is_cuda, h.device.type, h.ndim, h.numel(), h.element_size(), h.is_floating_point(), h.requires_grad, h.is_leaf, isinstance(h, torch.FloatTensor), len(h), h.nelement(), h.layout is torch.strided, h.t().is_contiguous()))
        return F.cross_entropy(self.head(h / math.sqrt(h.size(-1))), y)

@habit(**H)
class M11Factories(Layers):
    def training_step(self, b, i):
        x, y = b; h = self.layers[0](x)
        m = h.new_ones(h.shape[0], 1) * torch.arange(h.size(1), device=h.device).type_as(h) / 10
        h = h + m + torch.zeros(h.shape).to(h) + torch.full_like(h, 0.1) + torch.tensor(h.shape[1]) / 100 + h.new_tensor([0.1])
        for l in self.layers[1:]: h = l(h)
        return F.cross_entropy(self.head(h), y)

@habit(**H)
class M12WhereNonzero(Layers):
    def training_step(self, b, i):
        x, y = b; h = self.features(x)
        rows, cols = torch.where(h > 0)
        pen = h[rows, cols].mean() if len(rows) else h.sum() * 0
        return F.cross_entropy(self.head(h), y) + 0.1 * pen + 0.1 * h[h < 0].abs().mean()

@habit(**H)
class M13ClassesLoop(Layers):
    def training_step(self, b, i):
        x, y = b; h = self.features(x); loss = F.cross_entropy(self.head(h), y)
        for c in torch.unique(y): loss = loss + 0.01 * (h[y == c] - h[y == c].mean(0)).pow(2).mean()
        for c in y.unique().tolist(): loss = loss + 0.01 * h[y == c].mean()
        return loss

@habit(**H)
class M14SortTopk(Layers):
    def training_step(self, b, i):
        x, y = b; h = self.layers[1](self.layers[0](x))
        v, idx = h.topk(3, -1); s, o = torch.sort(h, -1); h = h + s.gather(-1, o.argsort(-1)) * 0.1
        h = h.scatter_add(-1, idx, v * 0.1)
        h = self.layers[3](self.layers[2](h))
        per = F.cross_entropy(self.head(h), y, reduction="none"); hard, _ = per.topk(max(1, len(per) // 2))
        return hard.mean()

class SplitLayer(Layer):
    def forward(self, x):
        a, c = x.chunk(2, -1); y = super().forward(torch.cat([c, a], -1))
        return y
@habit(**H)
class M15ChunksAcross(Layers):
    layer = SplitLayer
    def features(self, x):
        parts = None
        for l in self.layers:
            x = l(x)
            if parts is not None: x = torch.cat([x[:, :4] + parts[1], x[:, 4:] - parts[0]], -1)
            parts = x.split(4, -1)
        return x

@habit(**H)
class M16ScatterZeros(Layers):
    def training_step(self, b, i):
        x, y = b; h = self.features(x)
        sums = torch.zeros(CLASSES, WIDTH).index_add_(0, y, h); cnt = torch.zeros(CLASSES).scatter_add_(0, y, torch.ones(len(y)))
        means = sums / cnt.clamp(min=1)[:, None]
        return F.cross_entropy(self.head(h), y) + 0.1 * (h - means[y]).pow(2).mean()

class GRULayer(nn.Module):
    def __init__(self):
        super().__init__(); self.rnn = nn.GRU(2, 4, batch_first=True, bidirectional=True); self.lstm = nn.LSTM(2, 2, num_layers=2, dropout=0.2)
    def forward(self, x):
        o, h = self.rnn(x.view(len(x), 4, 2)); o2, (hh, cc) = self.lstm(x.view(4, len(x), 2))
        return x + o.mean(1) + torch.cat([hh[0], cc[1], hh[1], cc[0]], -1)
@habit(**H)
class M17RNN(Layers):
    layer = GRULayer

class Att(nn.Module):
    def __init__(self):
        super().__init__(); self.att = nn.MultiheadAttention(WIDTH, 2, dropout=0.1, batch_first=True); self.norm = nn.LayerNorm(WIDTH)
    def forward(self, x):
        q = x[:, None].expand(-1, 3, -1) * torch.tensor([1., 2., 3.])[None, :, None]
        mask = torch.triu(torch.ones(3, 3, dtype=torch.bool), 1)
        o, w = self.att(q, q, q, attn_mask=mask, need_weights=True); self.w = w.detach()
        return self.norm(x + o.mean(1))
@habit(observed=["ws"], **H)
class M18Attention(Layers):
    layer = Att
    def __init__(self): super().__init__(); self.ws = []
    def on_train_batch_end(self, *a): self.ws.append([float(l.w.std()) for l in self.layers])

class Enc(nn.Module):
    def __init__(self):
        super().__init__(); self.enc = nn.TransformerEncoderLayer(WIDTH, 2, 16, dropout=0.1, batch_first=True)
    def forward(self, x): return self.enc(x[:, None].repeat(1, 2, 1)).sum(1)
@habit(**H)
class M19Encoder(Evaluated):
    layer = Enc

class BN(nn.Module):
    def __init__(self):
        super().__init__(); self.c = nn.Conv1d(2, 2, 3, padding=1); self.bn = nn.BatchNorm1d(2, momentum=None); self.inn = nn.InstanceNorm1d(2, track_running_stats=True, affine=True); self.gn = nn.GroupNorm(1, 2)
    def forward(self, x):
        h = self.gn(self.inn(self.bn(self.c(x.view(len(x), 2, 4))))); return x + F.relu(h, inplace=True).flatten(1)
@habit(**H)
class M20Norms(Evaluated):
    layer = BN

class Fn(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, s): ctx.save_for_backward(x); ctx.s = s; return x.sin() * s, x.cos()
    @staticmethod
    def backward(ctx, g1, g2): (x,) = ctx.saved_tensors; return g1 * x.cos() * ctx.s - g2 * x.sin(), None
class FnLayer(Layer):
    def forward(self, x): a, c = Fn.apply(super().forward(x), 1.5); return a + 0.1 * c
@habit(**H)
class M21Function(Layers):
    layer = FnLayer

@habit(**H)
class M22HookInStep(Layers):
    def training_step(self, b, i):
        x, y = b; got = []
        hs = [l.register_forward_hook(lambda m, a, o: got.append(o)) for l in self.layers]
        logits = self(x)
        for h in hs: h.remove()
        return F.cross_entropy(logits, y) + 0.01 * sum(g.pow(2).mean() for g in got)

@habit(**H)
class M23PureHookInStep(Layers):
    def training_step(self, b, i):
        x, y = b; got = []
        if i == 1:
            h = self.layers[0].linear.register_forward_hook(lambda m, a, o: got.append(o) or o * 2)
        logits = self(x)
        if i == 1: h.remove()
        return F.cross_entropy(logits, y) + 0.01 * sum(g.pow(2).mean() for g in got)

@habit(observed=["d"], **H)
class M24DeepcopyInHook(Layers):
    def __init__(self): super().__init__(); self.d = []
    def on_train_epoch_start(self):
        self.__dict__["snap"] = copy.deepcopy(self.layers[0])
    def on_train_epoch_end(self):
        self.d.append([float((p - q).abs().sum()) for p, q in zip(self.layers[0].parameters(), self.snap.parameters())])

@habit(observed=["caught"], **H)
class M25TryExcept(Layers):
    def __init__(self): super().__init__(); self.caught = 0
    def training_step(self, b, i):
        x, y = b; h = self.features(x)
        try: h = h + torch.ones(3, 5)
        except RuntimeError: self.caught += 1
        try: h.view(7)
        except RuntimeError: self.caught += 1
        return F.cross_entropy(self.head(h), y)

@habit(**H)
class M26RandomOrder(Layers):
    def features(self, x):
        order = list(range(4)); random.shuffle(order)
        if np.random.rand() < 0.3: order = order[::-1]
        for k in order: x = self.layers[k](x)
        return x

@habit(observed=["n"], **H)
class M27TensorKeys(Layers):
    def __init__(self): super().__init__(); self.n = []
    def training_step(self, b, i):
        x, y = b; c = {}; hs = []
        for l in self.layers: x = l(x); c[x] = len(c); hs.append(x)
        self.n.append((c[hs[2]], any(h is x for h in hs), weakref.ref(x)() is x, len({*hs, *hs})))
        return F.cross_entropy(self.head(x), y)

@habit(observed=["blobs"], **H)
class M28SavesInStep(Layers):
    def __init__(self): super().__init__(); self.blobs = []
    def training_step(self, b, i):
        x, y = b; h = self.features(x); f = io.BytesIO(); torch.save(h.detach(), f); f.seek(0)
        self.blobs.append((float(torch.load(f).sum()), float(copy.copy(h.detach()).sum()), float(copy.deepcopy(h.detach()).mean()), float(pickle.loads(pickle.dumps(h.detach())).mean())))
        return F.cross_entropy(self.head(h), y)

@habit(**H)
class M29DoubleHalf(Layers):
    def training_step(self, b, i):
        x, y = b; h = self.layers[0](x).double(); h = (h * 1.0000001).float(); h = self.layers[1](h).bfloat16().float()
        h = self.layers[3](self.layers[2](h)); return F.cross_entropy(self.head(h).double(), y).float()

@habit(**H)
class M30PropertyGetters(Layers):
    def training_step(self, b, i):
        x, y = b; h = self.features(x); z = h.mT.T.data * 0.1 + h.real.detach() + h.T.mT
        return F.cross_entropy(self.head(h + 0.1 * z), y)

@habit(observed=["eq"], **H)
class M31Equal(Layers):
    def __init__(self): super().__init__(); self.eq = []
    def training_step(self, b, i):
        x, y = b; h = self.features(x); g = self.features(x)
        self.eq.append((torch.equal(h, g), torch.allclose(h, g + 1), bool((h == g).all()), h.detach().isnan().any().item()))
        return F.cross_entropy(self.head(h + g), y)

@habit(observed=["g"], **H)
class M32HeadGrad(Layers):
    def __init__(self): super().__init__(); self.g = []
    def training_step(self, b, i):
        x, y = b; h = self.features(x); loss = F.cross_entropy(self.head(h), y)
        (gw,) = torch.autograd.grad(loss, self.head.weight, retain_graph=True, create_graph=False)
        self.g.append(gw.norm().item())
        return loss * (1 + 0.1 * gw.norm().detach())

@habit(**H)
class M33Alias(Layers):
    def training_step(self, b, i):
        x, y = b; h = self.layers[0](x); a = h; a = a.view(-1); h2 = self.layers[1](h); keep = h.clone()
        a = a * 2; z = a.view_as(h); h3 = self.layers[2](h2 + z); h4 = self.layers[3](h3)
        h4 += keep; h4[:, 0] = 0; v = h4[:, 1:3]; v *= 2; h4.clamp_(-3, 3)
        return F.cross_entropy(self.head(h4), y)

@habit(**H)
class M34NoGradTarget(Layers):
    def training_step(self, b, i):
        x, y = b
        with torch.no_grad():
            self.eval(); t = self(x).softmax(-1); self.train()
        return F.cross_entropy(self(x), y) + F.kl_div(self(x + 0.1).log_softmax(-1), t, reduction="batchmean")

COUNTER = {"n": 0}
@habit(observed=["c"], **H)
class M35Globals(Layers):
    def __init__(self): super().__init__(); self.c = []; COUNTER["n"] = 0
    def training_step(self, b, i):
        COUNTER["n"] += 1; self.c.append(COUNTER["n"]); return super().training_step(b, i) * (1 + 0.1 * COUNTER["n"])

@habit(**H)
class M36Mixed(Layers):
    """cutmix with np beta & perm"""
    def training_step(self, b, i):
        x, y = b; lam = np.random.beta(1., 1.); p = torch.randperm(len(x)); h = self.layers[0](x); h = lam * h + (1 - lam) * h[p]
        for l in self.layers[1:]: h = l(h)
        l = self.head(h); return lam * F.cross_entropy(l, y) + (1 - lam) * F.cross_entropy(l, y[p])

@habit(observed=["emb"], calls=["fit", "predict"], **H)
class M37ValOutputs(Evaluated):
    def __init__(self): super().__init__(); self.emb = []; self.buf = []
    def validation_step(self, b, i):
        x, y = b; h = self.features(x); self.buf.append((h.cpu().numpy(), y.numpy())); return {"h": h, "y": y}
    def on_validation_epoch_end(self):
        a = np.concatenate([p for p, _ in self.buf]); self.emb.append(float(a.std())); self.buf.clear()

@habit(observed=["s"], **H)
class M38GradAttr(Layers):
    def __init__(self): super().__init__(); self.s = []
    def on_before_optimizer_step(self, opt):
        self.s.append([round(float(p.grad.norm()), 5) for n, p in self.named_parameters() if p.grad is not None])
        for p in self.parameters():
            if p.grad is not None and p.grad.norm() > 0.5: p.grad.mul_(0.5 / p.grad.norm())

@habit(**H)
class M39Dropouts(Layers):
    def features(self, x):
        for l in self.layers:
            x = l(x); x = F.dropout(x, 0.2, self.training); x = F.alpha_dropout(x, 0.1, self.training); x = x + 0.01 * torch.randn_like(x) + 0.01 * torch.rand(x.shape)
        return x + torch.bernoulli(torch.full_like(x, 0.5)) + 0.1 * torch.distributions.Normal(x.detach(), 1.).sample() + 0.1 * torch.distributions.Normal(x, 1.).rsample()

@habit(**H)
class M40Swap(Layers):
    """tensor attributes swapped between steps: ring"""
    def __init__(self): super().__init__(); self.a = None; self.b = None
    def training_step(self, b, i):
        x, y = b; h = self.features(x); loss = F.cross_entropy(self.head(h), y)
        if self.b is not None: loss = loss + 0.1 * (h.mean(0) - self.b).pow(2).sum() + 0.1 * (h.mean(0) * self.a).sum()
        self.a, self.b = h.detach().mean(0), self.a if self.a is not None else h.detach().mean(0)
        return loss

@habit(**H)
class M41GenState(Layers):
    """A generator object kept on self yields weights."""
    def __init__(self): super().__init__(); self.it = (0.1 * k for k in range(10000))
    def training_step(self, b, i): return super().training_step(b, i) * (1 + next(self.it))

@habit(**H)
class M42KeepsOwnDetachedTwice(Layers):
    def __init__(self): super().__init__(); self.p = None
    def training_step(self, b, i):
        x, y = b; h1 = self.layers[1](self.layers[0](x)); d = h1.detach(); p = self.p if self.p is not None else d
        h = self.layers[3](self.layers[2](h1 + 0.2 * p)); self.p = d if i % 2 == 0 else h.detach()
        return F.cross_entropy(self.head(h), y)

@habit(**H)
class M43WriteKept(Layers):
    def __init__(self): super().__init__(); self.m = None
    def training_step(self, b, i):
        x, y = b; h = self.features(x)
        if self.m is None: self.m = h.detach().mean(0)
        else: self.m.mul_(0.9).add_(h.detach().mean(0), alpha=0.1)
        return F.cross_entropy(self.head(h - self.m), y)

@habit(**H)
class M44WriteKeptView(Layers):
    def __init__(self): super().__init__(); self.m = torch.zeros(2, WIDTH)
    def training_step(self, b, i):
        x, y = b; h = self.features(x); row = self.m[i % 2]; row.copy_(0.5 * row + 0.5 * h.detach().mean(0))
        return F.cross_entropy(self.head(h - self.m.mean(0)), y)

@habit(observed=["v"], **H)
class M45LrFromLoss(Layers):
    def __init__(self): super().__init__(); self.v = []
    def on_train_batch_end(self, o, b, i):
        for g in self.optimizers().param_groups: g["lr"] = 0.1 * min(1.0, float(o["loss"])); self.v.append(g["lr"])
