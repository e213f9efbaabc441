"""Modules that only compute: what a call of one comes to follows from the module, as it is now, and its arguments.

That is from its classes and their code (`pure_code`), plain attributes, parameters, buffers and children. All of them
are compared at every call, which costs a tenth of running a module's Python on placeholders.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter, contains, getitem, is_
from typing import Any

from torch import Tensor, nn
from torch.nn.modules import module as torch_module

from lightning_pipeline.partition.compiled import is_compiled
from lightning_pipeline.partition.overrides import HOOKS, hooks_of
from lightning_pipeline.partition.placeholder import Placeholder
from lightning_pipeline.recording.code_reader import Impure, is_plain
from lightning_pipeline.recording.keyed_calls import is_own
from lightning_pipeline.recording.pure_code import facts_of

_FILES = (
    *("activation", "batchnorm", "container", "conv", "dropout", "flatten", "instancenorm", "linear", "normalization"),
    *("pooling", "sparse", "transformer"),
)
_ENTERED = (nn.EmbeddingBag, nn.CrossMapLRN2d, nn.SyncBatchNorm, nn.Transformer)
"""Of classes in these files, those that decide by more than their attributes."""
PURE = frozenset(
    cls
    for cls in vars(nn).values()
    if isinstance(cls, type)
    and issubclass(cls, nn.Module)
    and cls.__module__.rpartition(".")[2] in _FILES
    and cls not in _ENTERED
    and "Lazy" not in cls.__name__
    and cls.forward is not nn.Module.forward
)
_GLOBAL_HOOKS = tuple(getattr(torch_module, f"_global{kind}") for kind in HOOKS)


class PureModule:
    """A module that only computes, as it is now.

    Attributes:
        read: attributes that it reads of its arguments.

    Raises:
        Impure: it is not shown to.
    """

    def __init__(self, module: nn.Module) -> None:
        modules = list(module.modules())
        if any(_GLOBAL_HOOKS) or any(not is_own(m) or any(hooks_of(m)) or is_compiled(m) for m in modules):
            raise Impure("a module with hooks, or a forward of its own")
        if any(type(parameter) not in (nn.Parameter, Placeholder) for parameter in module.parameters()):
            raise Impure("a parameter with methods of its own")
        if any(type(buffer) not in (Tensor, nn.Buffer, Placeholder) for buffer in module.buffers()):
            raise Impure("a buffer with methods of its own")
        facts = facts_of(modules, PURE)
        self._modules = modules
        self._classes = list(map(type, modules))
        self._hooked = [vars(m) for m in modules for _ in HOOKS]
        self._hooks = [kind for _ in modules for kind in HOOKS]
        self._sized = [held for m in modules for held in (vars(m), m._parameters, m._buffers, m._modules)]
        self._sizes = list(map(len, self._sized))
        self._children = [m._modules for m in modules if len(m._modules) > 1]
        self._orders = list(map(list, self._children))
        plain = [(vars(m), key, value) for m in modules for key, value in vars(m).items() if is_plain(value)]
        slots = [(held, *slot) for m in modules for held in (m._parameters, m._buffers) for slot in held.items()]
        children = [(m._modules, *child) for m in modules for child in m._modules.items()]
        everything = (*plain, *slots, *children, *facts.items, *_forwards(modules))
        items = {(id(owner), key): (owner, key, value) for owner, key, value in everything}
        self._owners, self._keys, self._values = map(list, zip(*items.values(), strict=True))
        attributes = {(id(fact.owner), fact.name): fact for fact in facts.attributes}
        self._holders = [fact.owner for fact in attributes.values()]
        self._names = [fact.name for fact in attributes.values()]
        self._held = [fact.value for fact in attributes.values()]
        missing = [*facts.absent, *((vars(m), "forward") for m in modules if "forward" not in vars(m))]
        absent = {(id(owner), key): (owner, key) for owner, key in missing}
        self._without, self._missing = [owner for owner, _ in absent.values()], [key for _, key in absent.values()]
        self._tensors = [tensor for _, _, tensor in slots if tensor is not None]
        self._specs = list(map(_spec, self._tensors))
        self._set_on_tensors, self.read = list(map(vars, self._tensors)), frozenset(facts.names)
        if not self.is_unchanged():
            raise Impure("an attribute of a tensor that the user has set")

    def has(self, counters: Sequence[Tensor]) -> bool:
        """Whether these are different tensors of the module."""
        numbers = set(map(id, counters))
        return len(numbers) == len(counters) and numbers <= set(map(id, self._tensors))

    def is_unchanged(self) -> bool:
        """Whether a call would still come to the same."""
        try:
            return (
                not any(_GLOBAL_HOOKS)
                and not any(map(getitem, self._hooked, self._hooks))
                and list(map(len, self._sized)) == self._sizes
                and all(map(is_, map(getitem, self._owners, self._keys), self._values))
                and all(map(is_, map(type, self._modules), self._classes))
                and all(map(is_, map(getattr, self._holders, self._names), self._held))
                and not any(map(contains, self._without, self._missing))
                and list(map(list, self._children)) == self._orders
                and list(map(_spec, self._tensors)) == self._specs
                and all(map(self.read.isdisjoint, self._set_on_tensors))
            )
        except (KeyError, AttributeError):
            return False


_spec = attrgetter("requires_grad", "dtype", "shape")
"""Of a tensor of a module: what may be changed of it in place, as `module.half()` does."""


def _forwards(modules: Sequence[nn.Module]) -> list[tuple[dict[str, Any], str, Any]]:
    """What is put around the forwards of modules with keys."""
    return [(vars(m), "forward", vars(m)["forward"]) for m in modules if "forward" in vars(m)]


def state_of(module: nn.Module) -> PureModule | None:
    """A module's state, if it only computes."""
    try:
        return PureModule(module)
    except Exception:  # nothing that is odd about a user's class is to end a run: its Python runs, as it does anyhow
        return None


def pure_within(root: nn.Module) -> list[nn.Module]:
    """The modules in a module that only compute and that gain by being answered as a whole, each once, one within
    another too; none in compiled ones."""
    found: dict[nn.Module, bool] = {}

    def is_pure(module: nn.Module) -> bool:
        if module not in found:
            found[module] = False  # where it contains itself
            if not is_compiled(module):
                are_pure = [is_pure(child) for child in module.children()]
                found[module] = all(are_pure) and "_call_impl" not in vars(module) and state_of(module) is not None
        return found[module]

    for child in root.children():
        is_pure(child)
    # A call of one of torch's own without others in it is hardly more than an event anyhow.
    return [m for m, only_computes in found.items() if only_computes and (m._modules or type(m) not in PURE)]
