"""Which stages hold each parameter and buffer; frees the memory of those that other stages hold."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

import torch
from torch import nn

from lightning_pipeline.partition.memory import memory_of, tensors_in_memory_of
from lightning_pipeline.partition.placeholder import TensorSpec, become, become_absent, is_absent, placeholder
from lightning_pipeline.partition.users_code import users_line


@dataclass(frozen=True, eq=False)
class Ownership:
    """The stages that hold each parameter and buffer of a module, seen from one stage.

    Attributes:
        holders: name of each parameter and buffer (as ``named_parameters(remove_duplicate=False)`` and
            ``named_buffers(remove_duplicate=False)`` give them) to the sorted stages that hold it. The first is
            its owner. Names that are tied have equal holders.
        unseen: names that no stage has used so far. Every stage holds them, and they do not count as shared.
    """

    num_stages: int
    stage: int
    holders: Mapping[str, tuple[int, ...]]
    unseen: frozenset[str] = frozenset()

    def __contains__(self, name: object) -> bool:
        return name in self.holders

    def owner(self, name: str) -> int:
        """The stage that saves and counts a parameter or buffer."""
        return self.holders[name][0]

    def is_local(self, name: str) -> bool:
        """Whether this stage holds a parameter or buffer."""
        return self.stage in self.holders[name]

    def is_owner(self, name: str) -> bool:
        """Whether this stage owns a parameter or buffer."""
        return self.owner(name) == self.stage

    def shared_names(self) -> list[str]:
        """The names of what several stages use, whose gradient is a sum over them."""
        return [name for name, stages in self.holders.items() if len(stages) > 1 and name not in self.unseen]


HELD_BY = "_held_by"
"""The attribute of a tensor, or of its placeholder on other stages, that tells which stages hold it."""


def holders_of(tensor: torch.Tensor) -> tuple[int, ...] | None:
    """The stages that hold a tensor; None where all do."""
    return tensor.__dict__.get(HELD_BY)


def note_holders(tensor: torch.Tensor, stages: tuple[int, ...] | None) -> None:
    """Set which stages hold a tensor; None for all. Every rank has to call it, with its tensor or placeholder."""
    if stages is not None:
        tensor.__dict__[HELD_BY] = stages
    else:
        tensor.__dict__.pop(HELD_BY, None)


def named_tensors(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Each parameter and buffer of a module, once for each of its names."""
    yield from module.named_parameters(remove_duplicate=False)
    yield from module.named_buffers(remove_duplicate=False)


def names_of_tensors(module: nn.Module) -> list[list[str]]:
    """The names of each parameter and buffer of a module; tied ones have several."""
    return [names for names, _ in tensors_with_names(module)]


def tensors_with_names(module: nn.Module) -> list[tuple[list[str], torch.Tensor]]:
    """Each parameter and buffer of a module, once, with all of its names."""
    found: dict[int, tuple[list[str], torch.Tensor]] = {}
    for name, tensor in named_tensors(module):
        found.setdefault(id(tensor), ([], tensor))[0].append(name)
    return list(found.values())


def release(module: nn.Module, ownership: Ownership) -> None:
    """Replace every parameter and buffer that this stage does not hold by a placeholder, and free its memory.

    A tensor keeps its identity, so that optimizers and the user's own references see the placeholder. Ties,
    ``requires_grad`` and attributes set on a tensor are kept. The placeholder tells who holds the data (`holders_of`).
    Lazy parameters and names that ``ownership`` does not know stay as they are.
    """
    _release_views(module, ownership)
    for name, tensor in named_tensors(module):
        if name not in ownership:
            continue
        stages = ownership.holders[name]
        if ownership.is_local(name):
            note_holders(tensor, stages if len(stages) < ownership.num_stages else None)
        elif is_held_otherwise(name, tensor, ownership):
            become_absent(tensor, name)
            note_holders(tensor, stages)


def _release_views(module: nn.Module, ownership: Ownership) -> None:
    """Do the same with what the user's code keeps in the memory of a parameter or buffer, such as `weight.data`."""
    named = [(name, tensor) for name, tensor in named_tensors(module) if name in ownership and not is_absent(tensor)]
    views = tensors_in_memory_of([tensor for _, tensor in named])
    for name, tensor in named if views else ():
        stages = ownership.holders[name]
        for view in views.get(memory_of(tensor), ()) if len(stages) < ownership.num_stages else ():
            if holders_of(view) is None:
                if not ownership.is_local(name):
                    become(view, placeholder(TensorSpec.of(view), f"a view of {name}"))
                note_holders(view, stages)


def is_held_otherwise(name: str, tensor: torch.Tensor, ownership: Ownership) -> bool:
    """Whether a tensor is here, and is to be released as other stages hold it."""
    if name not in ownership or ownership.is_local(name):
        return False
    return not is_absent(tensor) and not nn.parameter.is_lazy(tensor)


_expected: ContextVar[bool] = ContextVar("_expected", default=False)


@contextmanager
def absent_state_expected() -> Iterator[None]:
    """While entered, state dicts may hold placeholders."""
    token = _expected.set(True)
    try:
        yield
    finally:
        _expected.reset(token)


def guard_state_dict(root: nn.Module) -> None:
    """Make `state_dict` of `root`, or of a module inside, raise if a tensor in it is on another stage."""
    for module in root.modules():
        if _has_absent(module) and _check not in module._state_dict_pre_hooks.values():
            module.register_state_dict_pre_hook(_check)


def unguard(module: nn.Module) -> None:
    """Undo `guard_state_dict` for a module, but not for those inside."""
    for key, hook in list(module._state_dict_pre_hooks.items()):
        if hook is _check:
            del module._state_dict_pre_hooks[key]


def lift_guards(root: nn.Module) -> None:
    """Undo `guard_state_dict` for modules whose tensors have arrived."""
    for module in root.modules():
        if not _has_absent(module):
            unguard(module)


def _has_absent(module: nn.Module) -> bool:
    return any(is_absent(tensor) for tensor in (*module._parameters.values(), *module._buffers.values()))


def _check(module: nn.Module, prefix: str, keep_vars: bool) -> None:
    if _expected.get():
        return
    for slots in (module._parameters, module._buffers):
        for name, tensor in slots.items():
            if is_absent(tensor) and name not in module._non_persistent_buffers_set:
                raise RuntimeError(
                    f"{prefix}{name} is on another stage, so state_dict() is not whole on this rank ({users_line()}): "
                    f"call it in a hook, such as on_train_batch_end, write a checkpoint with "
                    f"trainer.save_checkpoint(path), or call trainer.strategy.gather_module() on all ranks, which "
                    f"gives rank 0 a module with all weights; where an error has ended the run, load a checkpoint "
                    f"into a new module"
                )
