"""Random training steps as source text that use values early and late, on stages in any order, in up to four parts.

Each part ends in a backward. What an optimizer's step or a backward has spoiled of earlier graphs, later parts use
detached, so that one process can run most of them.
"""
# ruff: noqa: E501 -- a statement is a line

from __future__ import annotations

import random
import re

from tests.fuzz.programs import HEADER, HOOK_STATEMENTS, HOOKS, KINDS, method

SAMPLEWISE_KINDS = ("Block", "Plain", "Normed", "Convolved", "Embedded", "InPlace", "Lazy", "Rounding", "Hooking")
"""What these give for a sample depends on no other one, so micro-batches come to what whole batches do."""

SET_UP = """
self.blocks[{i}].linear = self.blocks[{j}].linear
self.blocks[{i}].linear.weight = self.blocks[{j}].linear.weight
self.blocks[{i}].linear.weight = self.blocks[{j}].linear.weight
self.blocks[{i}].linear.bias = self.scale
self.blocks[{i}].register_full_backward_hook(lambda module, into, out: (into[0] * {c},) if into[0] is not None else None)
self.blocks[{i}].linear.weight.register_hook(lambda gradient: gradient * {c})
self.blocks[{i}].requires_grad_(False)
self.teach({i})
self.teach({i})
""".strip().splitlines()

VALUES = """
{o} = self.blocks[{i}]({x})
{o} = self.blocks[{i}]({x})
{o} = self.blocks[{i}]({x})
{o} = self.blocks[{i}]({x}) + {y}
{o} = {y} + self.blocks[{i}]({x})
{o} = {x} + self.blocks[{i}]({x}) + self.blocks[{j}]({x})
{o} = {x} + 0.3 * self.blocks[{i}]({y}.tanh()) + {y}.sin()
{o} = {x}.sin() + self.blocks[{i}]({y}) + {y}.sigmoid()
{o} = {x} * torch.sigmoid({y}) + {z} * {c}
{o} = {x} + {y} + {x} * {c}
{o} = torch.cat([{x}[:, :4], {y}[:, 4:]], 1)
{o} = torch.stack([{x}, {y}, {z}]).mean(0)
{o} = torch.where({x} > {y}, {x}, {z} * {c})
{o} = {x} * 1.0; {o}.mul_({y}.sigmoid())
{o} = {x}.clone(); {o}[:, :4] += {y}[:, 4:]
{o} = self.blocks[{i}](self.blocks[{j}]({x})) + self.blocks[{i}]({y})
{o} = F.linear({x}, self.blocks[{i}].linear.weight, self.blocks[{j}].linear.bias)
{o} = {x} @ self.blocks[{i}].linear.weight.t() * {c}
{o} = {x} + self.blocks[{i}].linear.bias * {y}
{o} = {x} * self.scale
{o} = {x} * self.scale + {y} * self.scale.tanh()
{o} = {x} + self.words(batch["tokens"]).mean(1)
{o} = checkpoint(self.blocks[{i}], {x}, use_reentrant=False)
{o} = checkpoint(lambda v, w: self.blocks[{i}](v) + self.blocks[{j}](w), {x}, {y}, use_reentrant=False)
{o} = checkpoint(lambda v: self.blocks[{i}](v) * self.scale + v, {x}, use_reentrant=False) + {y}
{o} = {x}{n}for block in self.blocks: {o} = block({o})
{o} = {x}{n}for block in self.blocks[{i}:]: {o} = block({o}) + {y} * {c}
{o} = {x}{n}for block in reversed(self.blocks[{i}:]): {o} = {o} + block({o}) * 0.3
with torch.no_grad(): {o} = self.blocks[{i}]({x})
{o} = {x}.detach() + self.blocks[{i}]({y})
{o} = {x} + ({y} - {x}).detach()
{o} = {x}; {o}.register_hook(lambda gradient: gradient * {c}) if {o}.requires_grad else None
{o} = Scaled.apply({x}, {c}) + {y}
""".strip().splitlines()

UNEVEN_VALUES = """
{o} = self.blocks[{i}]({x}) if random.random() < 0.5 else {y}
{o} = self.blocks[random.randrange(len(self.blocks))]({x})
{o} = F.dropout({x}, 0.2) + self.blocks[{i}]({y})
{o} = {x} + 0.1 * torch.randn_like({x})
{o} = {x} * {c} if {x}.mean() > 0 else {x} + {y}
{o} = {x} + self.kept.mean(0) if self.kept is not None else {x}
self.queue.append({x}.detach().clone()); {o} = {y} + self.queue[0].mean(0); self.queue = self.queue[-3:]
self.table["t"] = 0.5 * self.table.get("t", 0.0) + {x}.detach().mean(); {o} = {y} + self.table["t"]
{o} = {x} + torch.stack(self.values[-3:]).mean() if self.values else {x}
with torch.no_grad(): {o} = self.teacher({x}) if hasattr(self, "teacher") else {x}
{o} = {x} / (1 + {x}.norm().item())
{o} = {x} - self.mean; self.mean.lerp_({x}.detach().mean(0), 0.1)
{o} = F.batch_norm({x}, None, None, training=True) + {y}
{o} = {x} if batch_idx != 1 else self.blocks[{i}]({x})
(g,) = torch.autograd.grad({x}.sum(), {y}, retain_graph=True, allow_unused=True) if {x}.requires_grad and {y}.requires_grad else (None,); {o} = {x} if g is None else {x} + 0.1 * g
""".strip().splitlines()

LOSSES = """
F.cross_entropy(self.head({x}), batch["y"])
F.cross_entropy(self.head({x} + {y}), batch["y"])
F.mse_loss(self.blocks[{i}]({x}), {y}.detach())
F.mse_loss({x}, {y}) + 0.1 * self.blocks[{i}]({z}).square().mean()
F.softplus(-self.blocks[{i}]({x})).mean()
F.softplus(self.blocks[{i}]({x}.detach())).mean() + F.softplus(-self.blocks[{i}]({y})).mean()
self.blocks[{i}].linear({x})[:, 0].mean() - self.blocks[{i}].linear({y})[:, 0].mean()
F.cross_entropy(self.head({x}), batch["y"]) + 0.3 * F.cross_entropy(self.head({y}), batch["y"])
(self.head({x}) * {c}).logsumexp(1).mean() + 0.1 * (self.scale * {y}).square().mean()
0.1 * self.blocks[{i}].linear.weight.square().sum() + self.head({x}).square().mean()
""".strip().splitlines()

BETWEEN = """
self.zero_grad()
{opt}.zero_grad()
{other}.zero_grad()
{opt}.zero_grad(set_to_none=False)
for p in self.blocks[{i}].parameters(): p.grad = None
self.blocks[{i}].zero_grad()
clip_grad_norm_(self.parameters(), 0.5)
clip_grad_norm_(self.blocks[{i}].parameters(), 0.1)
clip_grad_value_(self.blocks[{i}].parameters(), 0.01)
self.clip_gradients({opt}, gradient_clip_val=0.5, gradient_clip_algorithm="norm")
self.log("l{u}", loss)
""".strip().splitlines()

UNEVEN_BETWEEN = """
self.ema({i})
self.kept = {x}.detach()
self.values.append({x}.detach().mean())
self.seen.append(loss.item())
self.n += 1
if batch_idx == 1: return
if batch_idx % 2 and self.current_epoch: return
for group in {opt}.param_groups: group["lr"] *= 0.99
self.blocks[{i}].requires_grad_(self.current_epoch > 0)
self.log("x{u}", {x}.mean(), on_step=True, on_epoch=True)
""".strip().splitlines()

PARAMETERS = {
    "halves": ("[*self.blocks[:{cut}].parameters(), self.scale]", "[*self.blocks[{cut}:].parameters(), *self.head.parameters(), *self.words.parameters()]"),
    "turns": ("[*self.blocks[::2].parameters(), *self.head.parameters()]", "[*self.blocks[1::2].parameters(), self.scale, *self.words.parameters()]"),
    "both": ("self.parameters()", "[*self.blocks[{cut}:].parameters(), *self.head.parameters()]"),
}  # fmt: skip
OPTIMIZERS = (
    "torch.optim.SGD({}, lr=0.05, momentum=0.9)",
    "torch.optim.Adam({}, lr=0.01)",
    "torch.optim.SGD({}, lr=0.1)",
)


class Writer:
    """Writes a step, and knows which values' graphs are whole.

    Attributes:
        made: by a value's name, the numbers of the statements that its graph goes through.
        used: by the number of a statement, the parameters that it uses.
        spoiled: statements whose graphs are freed, or whose parameters have changed.
    """

    def __init__(self, dice: random.Random, depth: int, *, samplewise: bool) -> None:
        self.dice, self.depth, self.samplewise = dice, depth, samplewise
        self.lines = ['v0 = batch["x"]']
        self.made: dict[str, set[int]] = {"v0": set()}
        self.used: list[set[str]] = []
        self.spoiled: set[int] = set()
        self.tied: list[set[str]] = []
        self.unique = iter(range(1000))
        self.turn = 0

    def value(self) -> str:
        """A value as an operand, of the latest ones more often."""
        names = list(self.made)
        name = self.dice.choice(names[-2:] if self.dice.random() < 0.5 else names)
        return f"{name}.detach()" if self.made[name] & self.spoiled or self.dice.random() < 0.05 else name

    def fill(self, template: str, **words: str) -> str:
        i, j = self.dice.sample(range(self.depth), 2)
        x, y, z = (self.value() for _ in range(3))
        c, u = self.dice.choice([0.5, 0.9, 1.1, 0.3, -0.7]), next(self.unique)
        return template.format(i=i, j=j, x=x, y=y, z=z, c=c, u=u, n="\n", **words)

    def graph_of(self, text: str) -> set[int]:
        """Take note of a statement; returns those that the graph of what it gives goes through."""
        number = len(self.used)
        self.used.append(self.parameters_of(text))
        names = re.findall(r"\b(v\d+|loss)\b(?!\.detach)", text)
        return {number}.union(*(self.made.get(name, set()) for name in names))

    def parameters_of(self, text: str) -> set[str]:
        found = set(re.findall(r"self\.(scale|head|words)", text))
        if re.search(r"self\.parameters|in self\.blocks:|randrange", text):
            found |= {*map(str, range(self.depth)), "scale", "head", "words"}
        for start, stop, step in re.findall(r"self\.blocks\[(\d*):(\d*):?(\d*)\]", text):
            found |= {*map(str, range(self.depth)[slice(*(int(n) if n else None for n in (start, stop, step)))])}
        found |= {*re.findall(r"self\.blocks\[(\d+)\]", text)}
        return found.union(*(group for group in self.tied if group & found))

    def add_value(self) -> None:
        uneven = not self.samplewise and self.dice.random() < 0.2
        name = f"v{len(self.made)}"
        text = self.fill(self.dice.choice(UNEVEN_VALUES if uneven else VALUES), o=name)
        if self.dice.random() < 0.4:  # the blocks in turn
            text = self.fill("{o} = self.blocks[{turn}]({x})", o=name, turn=str(self.turn % self.depth))
            self.turn += 1
        self.lines.append(text)
        self.made[name] = self.graph_of(text.replace(f"{name} =", "", 1))

    def add_loss(self) -> None:
        text = self.fill(self.dice.choice(LOSSES))
        if self.dice.random() < 0.4:
            text = f"{text} + {self.fill(self.dice.choice(LOSSES))}"
        self.lines.append(f"loss = {text}")
        self.made["loss"] = self.graph_of(text)

    def add_between(self, chance: float, opt: str, other: str) -> None:
        while self.dice.random() < chance:
            loss = self.made.pop("loss")  # no value to pick
            uneven = not self.samplewise and self.dice.random() < 0.5
            self.lines.append(self.fill(self.dice.choice(UNEVEN_BETWEEN if uneven else BETWEEN), opt=opt, other=other))
            self.made["loss"] = loss

    def add_part(self, parameters: dict[str, set[str]]) -> None:
        """Values, a backward or two, and a step."""
        dice = self.dice
        opt, other = dice.sample(["a", "b"], 2)
        toggles = dice.random() < 0.2
        self.made.pop("loss", None)
        self.lines += [f"self.toggle_optimizer({opt})"] if toggles else []
        for _ in range(dice.randrange(1, 7)):
            self.add_value()
        self.add_loss()
        self.add_between(0.2, opt, other)
        self.lines += dice.choice([[f"{opt}.zero_grad()"], [f"{opt}.zero_grad()"], [f"{other}.zero_grad()"], []])
        keeps = dice.random() < 0.5
        self.lines.append(f"self.manual_backward(loss{', retain_graph=True' if keeps else ''})")
        self.spoiled |= set() if keeps else self.made["loss"]
        if dice.random() < 0.2:
            self.made.pop("loss")
            self.add_loss()
            self.lines.append("self.manual_backward(loss)")
            self.spoiled |= self.made["loss"]
        self.add_between(0.3, opt, other)
        steps = dice.choice([[opt], [opt], [opt], [opt], [opt, other], [], [f"if batch_idx % 2: {opt}"]])
        self.lines += [f"{step}.step()" for step in steps]
        changed = set().union(*(parameters[step[-1]] for step in steps))
        self.spoiled |= {number for number, used in enumerate(self.used) if used & changed}
        self.lines += [f"self.untoggle_optimizer({opt})"] if toggles else []
        self.add_between(0.2, opt, other)


def make(seed: int, name: str, *, samplewise: bool = False) -> str:
    """The module of a seed."""
    dice = random.Random(seed)
    depth = dice.randrange(5, 9)
    some = SAMPLEWISE_KINDS if samplewise or dice.random() < 0.5 else KINDS
    kinds = tuple(dice.choice(some) for _ in range(depth))
    writer = Writer(dice, depth, samplewise=samplewise)
    set_up = [writer.fill(dice.choice(SET_UP)) for _ in range(dice.choice([0, 0, 1, 1, 2]))]
    writer.tied = [writer.parameters_of(text) for text in set_up]
    is_by_hand = samplewise or dice.random() < 0.85
    kind, cut = dice.choice(list(PARAMETERS)), dice.randrange(1, depth)
    own = [text.format(cut=cut) for text in PARAMETERS[kind]]
    if is_by_hand:
        set_up.append("self.automatic_optimization = False")
        writer.lines.insert(0, "a, b = self.optimizers()")
        for _ in range(dice.choice([1, 2, 2, 2, 3, 3, 4])):
            writer.add_part({name: writer.parameters_of(text) for name, text in zip("ab", own, strict=True)})
        optimizers = f"[{', '.join(dice.choice(OPTIMIZERS).format(text) for text in own)}]"
    else:
        for _ in range(dice.randrange(6, 16)):
            writer.add_value()
        writer.add_loss()
        writer.lines.append("return loss")
        optimizers = dice.choice(OPTIMIZERS).format("self.parameters()")
    hooks: dict[str, list[str]] = {}
    for _ in range(0 if samplewise else dice.choice([0, 0, 0, 1, 2])):
        statement = writer.fill(dice.choice([one for one in HOOK_STATEMENTS if "self.optimizers()" not in one]))
        hooks.setdefault(dice.choice([one for one in HOOKS if one != "on_save_checkpoint"]), []).append(statement)
    observed = ["n", "values", "seen", "norms", "queue", "table", "kept"]
    lines = [
        f"@habit(observed={observed}, plain=False, shows=False)",
        f"class {name}(Base):",
        f"    kinds = {kinds!r}",
        *method("set_up", "", set_up),
        *method("training_step", ", batch, batch_idx", writer.lines),
        *(line for hook, statements in hooks.items() for line in method(hook, HOOKS[hook], statements)),
        *method("configure_optimizers", "", [f"return {optimizers}"]),
    ]
    return HEADER + "\n\n" + "\n".join(lines) + "\n"
