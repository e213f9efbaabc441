"""What a step keeps on modules, with two virtual stages on a rank that run in turn."""

from __future__ import annotations

from collections import deque
from typing import Any

import torch
from torch import nn

from lightning_pipeline.partition.absent import Absent, ValueMeta
from lightning_pipeline.partition.attributes import MAX_ITEMS, StageAttributes


class Root(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.leaf = nn.Linear(1, 1)
        self.count = 0
        self.found: list[Any] = []
        self.recent: deque[int] = deque(maxlen=2)
        self.by_name: dict[str, Any] = {}
        self.register_buffer("average", torch.zeros(1))


def attributes(root: Root) -> StageAttributes:
    return StageAttributes([root], root.modules())


def absent() -> Absent:
    return Absent.make(ValueMeta((1,), (1,), torch.float32, False), torch.device("cpu"), (0, 0), "a layer")


def test_each_stage_counts_for_itself() -> None:
    root = Root()
    kept = attributes(root)
    for step in range(2):
        with kept.step():
            for microbatch in range(3):
                for stage in (0, 2):
                    with kept.of(stage):
                        assert root.count == len(root.found) == 3 * step + microbatch
                        root.count += 1
                        root.found.append(stage)
                        root.recent.append(stage)
        assert root.count == 3 * (step + 1)
        assert root.found == [2] * root.count and list(root.recent) == [2, 2]


def test_what_is_changed_between_steps_every_stage_sees() -> None:
    root = Root()
    kept, found = attributes(root), root.found
    with kept.step():
        for stage in (0, 1):
            with kept.of(stage):
                root.found.append(stage)
                root.made = stage
    root.found.clear()
    root.count = 7
    del root.made
    with kept.step():
        for stage in (0, 1):
            with kept.of(stage):
                assert root.found is found and root.found == [] and root.count == 7
                assert not hasattr(root, "made")


def test_callables_are_made_once_for_each_stage() -> None:
    root, made = Root(), []
    root.function = None
    kept = attributes(root)
    for _ in range(2):
        with kept.step():
            for stage in (0, 1):
                with kept.of(stage):
                    if root.function is None:
                        made.append(stage)
                        root.function = lambda s=stage: s
                    assert root.function() == stage
    assert made == [0, 1] and root.function() == 1


def test_what_backward_changes_within_a_step_every_stage_sees() -> None:
    root = Root()
    kept = attributes(root)
    with kept.step():
        with kept.of(0):
            root.count += 1
        root.found.append("backward")
        with kept.of(1):
            assert root.count == 0 and root.found == ["backward"]
        root.found.append("again")
        with kept.of(0):
            assert root.count == 1 and root.found == ["backward", "again"]
            root.count += 1
    assert root.found == ["backward", "again"]


def test_the_tensor_of_the_stage_that_has_it_remains() -> None:
    root = Root()
    kept, value = attributes(root), torch.ones(1)
    with kept.step():
        for stage in (0, 1):
            with kept.of(stage):
                root.average = value if stage == 0 else absent()
                root.last = value if stage == 0 else absent()
                root.by_name["x"] = value if stage == 0 else absent()
    assert root.average is value and root.last is value and root.by_name["x"] is value
    assert list(root.state_dict()) == ["average", "leaf.weight", "leaf.bias"]


def test_hooks_that_the_first_step_registers_run_once() -> None:
    root, calls = Root(), []
    kept = attributes(root)
    outside = root.leaf.register_forward_hook(lambda *_: calls.append("outside"))
    handles = {}
    for _ in range(2):
        with kept.step():
            for stage in (0, 1):
                with kept.of(stage):
                    if not hasattr(root, "hooked"):
                        root.hooked = True
                        handles[stage] = root.leaf.register_forward_hook(lambda *_, s=stage: calls.append(s))
                    calls.clear()
                    root.leaf(torch.ones(1))
                    assert calls == ["outside", stage]
    assert len(root.leaf._forward_hooks) == 2
    handles[1].remove()
    outside.remove()
    assert not root.leaf._forward_hooks


def test_long_collections_are_shared() -> None:
    root = Root()
    root.found = list(range(MAX_ITEMS + 1))
    kept = attributes(root)
    with kept.step():
        for stage in (0, 1):
            with kept.of(stage):
                root.found.append(stage)
    assert root.found[-2:] == [0, 1]
