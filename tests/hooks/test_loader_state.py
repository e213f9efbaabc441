"""What a loader's code changes on one rank is changed on another, which has objects of its own."""

from __future__ import annotations

import copy
import datetime
import functools
import pickle
import random
import warnings
from collections import OrderedDict, defaultdict
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, RandomSampler

from lightning_pipeline.hooks import loader_state
from lightning_pipeline.hooks.loader_changes import apply
from lightning_pipeline.hooks.loader_state import LoaderState


class Made:
    def __init__(self, number: int) -> None:
        self.number = number


class Data(Dataset[Any]):
    """Changes itself by `change` as a sample is fetched."""

    def __init__(self, change: Any) -> None:
        self.change = change
        self.list, self.nested = [1, 2, 3], {"a": [1], "b": {"c": 1}}
        self.ordered, self.lists = OrderedDict(a=1, b=2), defaultdict(list, a=[1])
        self.tensor, self.array = torch.zeros(3), np.zeros(3)
        self.python, self.numpy = random.Random(1), np.random.RandomState(1)
        self.own: Any = None
        self.number = 0

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> int:
        self.change(self)
        return index


def take(*names: str) -> Any:
    """What is compared of a dataset."""
    return lambda data: [getattr(data, name) for name in names]


def change_lists(data: Any) -> None:
    data.list[1] = 9
    data.list.append(4)
    data.nested["a"].append(len(data.list))
    data.nested["b"]["c"] += 1
    data.nested["d"] = (1, [2])


def change_dictionaries(data: Any) -> None:
    data.ordered.pop("a", None)
    data.ordered[f"n{len(data.ordered)}"] = 3
    data.lists[len(data.lists)].append(1)


def change_numbers(data: Any) -> None:
    data.tensor[1] += 1
    data.array[2] += 1
    data.number += 1


def draw(data: Any) -> None:
    data.number = data.python.random() + data.numpy.rand()


def make(data: Any) -> None:
    data.own = Made(data.number)
    data.number += 1


def refer(data: Any) -> None:
    data.own = [data.nested["a"]]
    data.nested["a"].append(1)


def reorder(data: Any) -> None:
    data.ordered.move_to_end("a")
    data.own = [datetime.date(2026, 1, 1), functools.partial(reorder, data.nested)]


CHANGES: dict[str, tuple[Any, Any]] = {
    "lists": (change_lists, take("list", "nested")),
    "dictionaries": (change_dictionaries, take("ordered", "lists")),
    "numbers": (change_numbers, lambda data: [data.tensor.tolist(), data.array.tolist(), data.number]),
    "generators": (draw, lambda data: [data.number, data.python.random(), data.numpy.rand()]),
    "objects": (make, lambda data: [data.own.number, type(data.own)]),
    "order": (reorder, lambda data: [[*data.ordered], data.own[0], data.own[1].args[0] is data.nested]),
    "references": (refer, lambda data: [data.own, data.own[0] is data.nested["a"]]),
}


@pytest.mark.parametrize("kind", CHANGES)
def test_another_rank_changes_the_same(kind: str) -> None:
    change, look = CHANGES[kind]
    data = Data(change)
    other = copy.deepcopy(data)
    mine, theirs = DataLoader(data, batch_size=2), DataLoader(other, batch_size=2)
    for _ in range(2):
        state = LoaderState(mine)
        next(iter(mine))
        changes = state.changes()
        assert changes
        apply(pickle.loads(pickle.dumps(changes)), theirs)
    assert look(other) == look(data)


def test_a_sampler_draws_from_its_generator() -> None:
    loaders = []
    for _ in range(2):
        data = range(8)
        sampler = RandomSampler(data, generator=torch.Generator().manual_seed(1))
        loaders.append(DataLoader(data, sampler=sampler, collate_fn=functools.partial(map, float)))  # type: ignore[arg-type]
    mine, theirs = loaders
    state = LoaderState(mine)
    next(iter(mine))
    apply(pickle.loads(pickle.dumps(state.changes())), theirs)
    assert torch.equal(*(one.sampler.generator.get_state() for one in loaders))  # type: ignore[attr-defined]


def test_nothing_is_said_of_a_loader_that_changes_nothing() -> None:
    loader = DataLoader(Data(lambda data: None), batch_size=2, shuffle=True)
    state = LoaderState(loader)
    next(iter(loader))
    assert not state.changes()


def test_what_only_one_rank_can_have_stays_there(tmp_path: Any) -> None:
    (tmp_path / "data").write_text("a")

    def open_file(data: Any) -> None:
        data.own = data.own or (tmp_path / "data").open()

    data = Data(open_file)
    loader = DataLoader(data)
    state = LoaderState(loader)
    next(iter(loader))
    assert not state.changes()
    data.own.close()


def test_what_cannot_be_pickled_stays_there() -> None:
    def fill(data: Any) -> None:
        data.own = defaultdict(lambda: 0)
        data.nested[lambda: 1] = 1
        data.lists["set"] = {(1, lambda: 1)}
        data.number += 1

    data = Data(fill)
    loader = DataLoader(data)
    state = LoaderState(loader)
    next(iter(loader))
    [change] = state.changes()
    assert pickle.loads(change)[2:] == ("number", 1)


def test_what_several_changes_lead_to_is_one_object() -> None:
    def change(data: Any) -> None:
        data.own, data.number = Made(1), lambda: None
        data.list.append(data.own)
        data.nested["a"].append([data.own])

    first, other = Data(change), Data(change)
    state = LoaderState(first)
    first[0]
    apply(state.changes(), other)
    assert other.own.number == 1 and other.number == 0
    assert other.own is other.list[-1] is other.nested["a"][-1][0]


def test_large_caches_are_not_sent_and_a_warning_says_so() -> None:
    def keep(data: Any) -> None:
        data.nested[len(data.nested)] = torch.zeros(loader_state.MOST_BYTES // 8)

    loader = DataLoader(Data(keep), batch_size=4)
    state = LoaderState(loader)
    next(iter(loader))
    loader_state._warn_of_size.cache_clear()
    with pytest.warns(UserWarning, match="not in steps and hooks"):
        assert len(state.changes()) == 2
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        state.changes()
