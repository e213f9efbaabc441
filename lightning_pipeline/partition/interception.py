"""Interception of module calls while a step runs.

Outside of a step the user's modules are as they always were: nothing of this package is on them.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn

from lightning_pipeline.partition.absent import Absent
from lightning_pipeline.partition.attributes import StageAttributes
from lightning_pipeline.partition.compiled import entry_of, is_compiled, uncompiled
from lightning_pipeline.partition.hooks import is_split, splitting_inside
from lightning_pipeline.partition.leaves import Leaf, find_leaves
from lightning_pipeline.partition.outcome import Outcome
from lightning_pipeline.partition.overrides import overridden
from lightning_pipeline.partition.random import Streams
from lightning_pipeline.partition.recompute import recomputation
from lightning_pipeline.partition.replay import Replay
from lightning_pipeline.partition.stage_config import StageMap

_Forward = Callable[..., Any]


class _Running(threading.local):
    """What other threads call meanwhile, such as one that saves a checkpoint, is no part of the step."""

    replay: Replay | None = None


class Interception:
    """Routes calls of leaf modules, and of modules that draw random numbers, through the replay that is running.

    Args:
        root: the module whose step runs.
        stages: the stages of its modules.
        streams: the random streams of this rank.
    """

    def __init__(self, root: nn.Module, stages: StageMap, streams: Streams) -> None:
        self.root = root
        self.stages = stages
        self.streams = streams
        self.leaves: list[Leaf] = find_leaves(root, stages)
        self._running = _Running()
        self.called: defaultdict[int, set[str]] = defaultdict(set)
        """Names of the leaves that ran here, by stage."""
        self.modules = dict(root.named_modules())
        self.module_names = {id(module): name for name, module in self.modules.items()}
        self._leaf_of = {id(leaf.module): leaf for leaf in self.leaves}
        inside = {id(module) for leaf in self.leaves for module in leaf.module.modules()}
        self._around = [module for module in self.modules.values() if id(module) not in inside]
        self._compiled = [name for name, module in self.modules.items() if is_compiled(module)]
        self.cut_open = [name for name in self._compiled if id(self.modules[name]) not in inside]
        """Names of compiled modules that a boundary lies in: they run as they were written."""
        whole = [self.modules[name] for name in self._compiled if id(self.modules[name]) in inside]
        self._compiled_inside = {id(part) for module in whole for part in module.modules() if part is not module}
        self._split = [leaf.module for leaf in self.leaves if is_split(leaf.module)]
        self._attributes: StageAttributes | None = None

    @property
    def current(self) -> Replay | None:
        """The replay that is running in this thread."""
        return self._running.replay

    def keep_stages_apart(self) -> None:
        """Several virtual stages run here: each is to see its own of what the step keeps in attributes."""
        self._attributes = StageAttributes(self._around, self.modules.values())

    def tensor_names(self) -> dict[int, str]:
        """Name of each parameter and buffer, by the tensor's id."""
        names = {id(buffer): name for name, buffer in self.root.named_buffers()}
        names.update({id(parameter): name for name, parameter in self.root.named_parameters()})
        return names

    @contextmanager
    def installed(self, *, observing: bool, splitting: bool = False) -> Iterator[None]:
        """While entered, calls are intercepted.

        Args:
            observing: find out which modules draw random numbers.
            splitting: backwards run in two halves, so what a checkpoint recomputes in the first stays for the second.
        """
        with ExitStack() as stack:
            stack.callback(_without_absent, [(module, dict(module._buffers)) for module in self._around])
            if self._attributes is not None:
                stack.enter_context(self._attributes.step())
            for module in self._split:
                stack.enter_context(splitting_inside(module))
            override = stack.enter_context(overridden())
            # Under an observer's modes the compiler gives up, and would not try again.
            for name in self._compiled if observing else self.cut_open:
                override(self.modules[name], *uncompiled(self.modules[name]))
            for name, module in self._streamed(observing):
                wrap, entry = self.streams.observed if observing else self.streams.own, entry_of(module)
                override(module, entry, wrap(name or "(root)", getattr(module, entry)))
            for leaf in self.leaves:
                for method in _methods(leaf.module):
                    function = getattr(leaf.module, method)
                    name = f"{leaf.name}.{method}" if method == "update" else leaf.name
                    override(leaf.module, method, self._leaf_call(leaf, name, function))
            for owner in {_call_owner(leaf.module) for leaf in self.leaves} - {nn.Module}:
                stack.enter_context(_patched(owner, "__call__", self._call_override(owner.__call__)))
            apply = torch.autograd.Function.__dict__["apply"]
            stack.enter_context(_patched(torch.autograd.Function, "apply", self._function_apply(apply)))
            stack.enter_context(recomputation(self.streams, self, keep=splitting))
            yield

    def run(self, replay: Replay, step: Callable[..., Any], *args: Any) -> Outcome:
        """Run `step` with its calls going to `replay`."""
        self._running.replay = replay
        try:
            if self._attributes is None:
                return replay.run(step, *args)
            with self._attributes.of(replay.stage):
                return replay.run(step, *args)
        finally:
            self._running.replay = None
            for module, attribute, before in replay.replaced:
                if self._runs_elsewhere(module, replay.stage):
                    setattr(self.modules[module], attribute, before)

    def between_modules(self) -> bool:
        """Whether a replay is running, and no leaf."""
        return self.current is not None and not self.current.inside

    def checkpoint_leaves(self, more: int) -> None:
        """Enter (1) or leave (-1) a part whose leaves are checkpointed."""
        if self.current is not None:
            self.current.checkpointed += more

    def _runs_elsewhere(self, module: str, stage: int) -> bool:
        """Whether another virtual stage of this rank runs the leaf that holds the module of this name."""
        others = [names for other, names in self.called.items() if other != stage]
        while module:
            if any(module in names for names in others):
                return True
            module = module.rpartition(".")[0]
        return False

    def _streamed(self, observing: bool) -> list[tuple[str, nn.Module]]:
        drawing = self.streams.drawing
        return [
            (name, module)
            for name, module in self.modules.items()
            if (observing or (name or "(root)") in drawing)
            and (type(module).forward is not nn.Module.forward or is_compiled(module))
            and id(module) not in self._compiled_inside
            and not isinstance(module, torch.jit.ScriptModule)
        ]

    def _leaf_call(self, leaf: Leaf, name: str, function: _Forward) -> _Forward:
        running, called = self._running, self.called

        def intercepted(*args: Any, **kwargs: Any) -> Any:
            replay = running.replay
            if replay is None:
                return function(*args, **kwargs)
            if replay.inside:
                replay.nested_call(leaf)
                called[replay.stage].add(leaf.name)
                return function(*args, **kwargs)
            result = replay.call(leaf, name, function, args, kwargs)
            if replay.at == replay.stage:
                called[replay.stage].add(leaf.name)
            return result

        return intercepted

    def _call_override(self, call: _Forward) -> _Forward:
        """A class that overrides `__call__` does its work around `forward` natively, too."""

        def __call__(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            replay, leaf = self.current, self._leaf_of.get(id(module))
            if replay is None or replay.inside or leaf is None:
                return call(module, *args, **kwargs)
            return replay.call(leaf, leaf.name, lambda *a, **k: call(module, *a, **k), args, kwargs)

        return __call__

    def _function_apply(self, apply: Any) -> Any:
        """autograd.Function.apply dispatches to no mode, so it is made an event here."""

        def intercepted(cls: Any, *args: Any, **kwargs: Any) -> Any:
            function = apply.__get__(None, cls)
            if not self.between_modules():
                return function(*args, **kwargs)
            assert self.current is not None
            return self.current.function(f"{cls.__name__}.apply", function, args, kwargs)

        return classmethod(intercepted)


def _methods(module: nn.Module) -> tuple[str, ...]:
    """What of a leaf is called: mostly `forward`, and of a torchmetrics object `update` as well."""
    entry = entry_of(module)
    return (entry, "update") if hasattr(module, "update") and hasattr(module, "compute") else (entry,)


def _call_owner(module: nn.Module) -> type:
    return next(cls for cls in type(module).__mro__ if "__call__" in vars(cls))


def _without_absent(buffers: list[tuple[nn.Module, dict[str, Any]]]) -> None:
    """A buffer that the step has set to another stage's value is, on this one, what it was."""
    for module, before in buffers:
        for name, buffer in module._buffers.items():
            if isinstance(buffer, Absent):
                module._buffers[name] = before.get(name)


@contextmanager
def _patched(owner: Any, name: str, value: Any) -> Iterator[None]:
    before = owner.__dict__.get(name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        if before is None:
            delattr(owner, name)
        else:
            setattr(owner, name, before)
