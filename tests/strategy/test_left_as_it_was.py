"""Trials of cuts leave the module as it was, each for the next one."""

from __future__ import annotations

import copy
import itertools
import random
from collections import ChainMap, Counter, OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import lightning as L
import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset
from torchmetrics import MeanMetric

from lightning_pipeline.planning.plan import StagePlan
from lightning_pipeline.planning.restoring import left_as_it_was
from lightning_pipeline.planning.tracing import trace_step
from lightning_pipeline.strategy.measure import reached_by_trainer
from lightning_pipeline.strategy.trials import fault_of_cut

X = torch.randn(2, 4, generator=torch.Generator().manual_seed(0))


class Metered(L.LightningModule):
    """Its loss comes out of a metric, which keeps sums."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*[nn.Linear(4, 4) for _ in range(4)])
        self.mean = MeanMetric()

    def training_step(self, x: Tensor) -> Tensor:
        return self.mean(self.layers(x).mean())


def test_what_a_metric_keeps_of_a_trial_is_nothing_to_the_next() -> None:
    module = Metered()
    for name in ("layers.1", "layers.2", "layers.3"):
        plan = StagePlan({name: 1}, 2, 4, "1f1b", [None, None], 1.0, 0.0, [0, 0], True, True)  # type: ignore[list-item]
        assert fault_of_cut(module, plan, module.training_step, X) == ""
    assert float(module.mean.mean_value) == 0
    assert all(type(value) is Tensor for value in module.mean._buffers.values())


class Following(nn.Module):
    """A teacher follows in the step."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.student, self.how = nn.Linear(4, 4), how
        self.teacher = copy.deepcopy(self.student).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        teacher, student = list(self.teacher.parameters()), list(self.student.parameters())
        with torch.no_grad():
            if self.how == "foreach":
                torch._foreach_mul_(teacher, 0.5)
            for t, s in zip(teacher, student, strict=True):
                if self.how == "in place":
                    t.mul_(0.5).add_(s + 1)
                elif self.how == "data in place":
                    t.data.view(-1).mul_(0.5)
                elif self.how == "data":
                    t.data = t.data * 0.5 + s.data
        return (self.student(x) - self.teacher(x)).pow(2).mean()


@pytest.mark.parametrize("how", ["in place", "data in place", "data", "foreach"])
def test_parameters_that_a_step_writes_into_are_put_back(how: str) -> None:
    module = Following(how)
    parameters = dict(module.named_parameters())
    before = {name: value.clone() for name, value in parameters.items()}
    with left_as_it_was(module):
        trace_step(module, module, X)
        with left_as_it_was(module):
            now = module.teacher.weight.clone()
            module(X)
        assert torch.equal(module.teacher.weight, now)
        module(X)
        assert not torch.equal(module.teacher.weight, before["teacher.weight"])
    assert all(value is parameters[name] for name, value in module.named_parameters())
    assert all(torch.equal(value, before[name]) for name, value in module.named_parameters())


class Meter:
    """An average of the user's own."""

    def __init__(self) -> None:
        self.sum, self.parts = 0.0, {"history": [0.0]}

    def update(self, value: float) -> None:
        self.sum += value
        self.parts["history"].append(value)


class Slotted:
    __slots__ = ("count", "seen")

    def __init__(self) -> None:
        self.count, self.seen = 0, [1]


CALLS = 0
SEEN: dict[str, Any] = {"calls": []}


def count_call() -> None:
    global CALLS
    CALLS += 1
    SEEN["calls"].append(CALLS)


def counter() -> Callable[[], int]:
    number = 0

    def count() -> int:
        nonlocal number
        number += 1
        return number

    return count


class Keeps(nn.Module):
    """State of every kind that a step may change beside buffers."""

    class_count = 0

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.meter, self.slotted = Meter(), Slotted()
        self.counts = Counter(a=1)
        self.window = deque([0.0], maxlen=3)
        self.confusion = np.zeros((2, 2))
        self.count = counter()
        self.numbers, self.names = itertools.count(5), iter(["a", "b", "c"])
        self.teacher = [nn.Linear(4, 4)]
        self.optimizer = torch.optim.SGD(self.parameters(), lr=1.0)
        self.warmup = torch.optim.lr_scheduler.SequentialLR(
            self.optimizer,
            [torch.optim.lr_scheduler.ExponentialLR(self.optimizer, gamma) for gamma in (0.5, 0.25)],
            milestones=[2],
        )
        self.drawn_from = (torch.Generator(), random.Random(1), np.random.default_rng(1), np.random.RandomState(1))

    def forward(self, x: Tensor) -> Tensor:
        self.meter.update(1.0)
        self.slotted.count += 1
        self.slotted.seen.append(2)
        self.counts["a"] += 1
        self.window.append(2.0)
        self.confusion[0, 1] += 1
        type(self).class_count += 1
        count_call()
        for group in self.optimizer.param_groups:
            group["lr"] *= 0.5
        self.warmup.step()
        with torch.no_grad():
            torch._foreach_mul_(list(self.teacher[0].parameters()), 0.5)
        return self.linear(x).sum()

    def state(self) -> list[Any]:
        """What a next step would see."""
        self.optimizer.step()
        self.warmup.step()
        own, python, numpy, old = self.drawn_from
        return [
            *(self.meter.sum, self.meter.parts, self.slotted.count, self.slotted.seen, dict(self.counts)),
            *(list(self.window), self.confusion.tolist(), type(self).class_count, CALLS, SEEN, self.warmup.last_epoch),
            *(self.optimizer.param_groups[0]["lr"], self.teacher[0].weight.tolist(), self.warmup.get_last_lr()),
            *(self.count(), next(self.numbers), next(self.names), torch.rand(1, generator=own).item()),
            *(python.random(), numpy.random(), old.rand()),
        ]


def test_python_objects_are_put_back() -> None:
    def make() -> Keeps:
        global CALLS
        torch.manual_seed(1)
        CALLS, Keeps.class_count = 0, 0
        SEEN["calls"].clear()
        return Keeps()

    expected = copy.deepcopy(make().state())
    module = make()
    with left_as_it_was(module):
        trace_step(module, module, X)
        for _ in range(3):
            assert module.state() != expected
            module(X)
    assert module.state() == expected


class Drawing(Dataset[float]):
    """Draws from a generator of its own."""

    def __init__(self) -> None:
        self.generator, self.calls = random.Random(1), 0

    def __getitem__(self, index: int) -> float:
        self.calls += 1
        return self.generator.random()


class Makes(OrderedDict[str, Any]):
    """Makes an object of a class that it has each time that it is asked, as transformers' table of activations."""

    def __getitem__(self, key: str) -> Any:
        return super().__getitem__(key)()


def test_a_dictionary_that_makes_what_it_is_asked_for_is_put_back() -> None:
    module = nn.Linear(4, 4)
    made = module.makes = Makes({str(number): nn.Dropout for number in range(8)})  # type: ignore[assignment]
    for number in range(5):  # Python copies one with gaps by asking for each entry
        del made[str(number)]

    def step(x: Tensor) -> Tensor:
        made["6"] = nn.ReLU
        return module(made["6"](x)).mean()

    for _ in range(2):
        with left_as_it_was(module):
            step(X)
        assert [*made.items()] == [(str(number), nn.Dropout) for number in range(5, 8)]


def test_a_dataset_that_a_step_uses_is_put_back() -> None:
    module = nn.Module()
    module.data = data = Drawing()
    with left_as_it_was(module):
        first = data[0]
    assert data.calls == 0 and data[0] == first


class Counts(L.Callback):
    def __init__(self) -> None:
        self.steps: list[int] = []


def test_data_modules_and_callbacks_are_put_back() -> None:
    module, data, counts = Metered(), L.LightningDataModule(), Counts()
    module.trainer = trainer = L.Trainer(callbacks=[counts], accelerator="cpu", logger=False)
    trainer.datamodule = data  # type: ignore[attr-defined]
    data.data, data.known = Drawing(), {"a": [1]}
    for _ in range(2):
        with left_as_it_was(module, reached_by_trainer(module)):
            data.steps = len(counts.steps)
            data.known["a"].append(data.data[0])
            counts.steps.append(1)
        assert not counts.steps and not hasattr(data, "steps")
        assert data.known == {"a": [1]} and data.data.calls == 0


class Draws(nn.Module):
    def __init__(self, values: Any) -> None:
        super().__init__()
        self.linear, self.values = nn.Linear(4, 4), values

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x).sum() * sum(next(self.values))


class Forever:
    """An iterator of the user's own around a loader."""

    def __init__(self) -> None:
        self.batches = iter(torch.utils.data.DataLoader(torch.arange(8.0), batch_size=2))

    def __next__(self) -> Tensor:
        return next(self.batches)


@pytest.mark.parametrize(
    "values",
    [
        pytest.param(lambda: (torch.ones(2) for _ in range(9)), id="generator"),
        pytest.param(lambda: itertools.cycle(torch.utils.data.DataLoader(torch.arange(8.0), batch_size=2)), id="cycle"),
        pytest.param(lambda: zip(torch.utils.data.DataLoader(torch.arange(8.0)), itertools.count()), id="zip"),
        pytest.param(Forever, id="of one's own"),
    ],
)
def test_what_gives_its_values_once_must_not_be_taken_from(values: Callable[[], Any]) -> None:
    module = Draws(values())
    with left_as_it_was(module):  # nobody takes from it
        module.linear(X)
    with pytest.raises(ValueError, match=r"values.* gives its values once.* in a stage_config"), left_as_it_was(module):
        module(X)


@dataclass(frozen=True, slots=True)
class Fixed:
    number: int = 0


class InSlots:
    __slots__ = ("first", "second")


class Counting(dict[str, int]):
    sets = 0

    def __setitem__(self, key: str, value: int) -> None:
        self.sets += 1
        super().__setitem__(key, value)


class Odd(nn.Module):
    """Changes what is there only from the first call on, or not to be set by the usual ways."""

    def __init__(self) -> None:
        super().__init__()
        self.fixed, self.slotted, self.counting = Fixed(), InSlots(), Counting()
        self.array, self.chain = np.empty((1, 1), dtype=object), ChainMap({}, {"a": 1})

    def forward(self) -> None:
        global NEW
        NEW = 1
        type(self).new = 1  # type: ignore[attr-defined]
        object.__setattr__(self.fixed, "number", 1)
        self.slotted.first = 1
        self.counting["a"] = 1
        self.array[0, 0].append(1)
        self.chain["a"] = 2


def test_what_is_new_or_set_in_odd_ways_is_put_back() -> None:
    module = Odd()
    module.array[0, 0] = [0]
    with left_as_it_was(module):
        module()
        assert "NEW" in globals() and module.array[0, 0] == [0, 1]
    assert "NEW" not in globals() and not hasattr(Odd, "new")
    assert module.fixed.number == 0 and not hasattr(module.slotted, "first")
    assert not module.counting and module.counting.sets == 0
    assert module.array[0, 0] == [0] and module.chain["a"] == 1
