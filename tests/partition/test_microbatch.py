"""Splitting nested batches."""

from __future__ import annotations

import dataclasses
import pickle
import re
import weakref
from collections import deque
from contextlib import nullcontext
from typing import Any, NamedTuple

import numpy
import pytest
import torch
from torch import Tensor, nn
from transformers import BatchEncoding

from lightning_pipeline.partition import tree
from lightning_pipeline.partition.batches import microbatches_of, refuse_list_of_samples
from lightning_pipeline.partition.microbatch import batch_size, num_samples, signature, split_batch


class Pair(NamedTuple):
    x: Tensor
    names: list[str]


@dataclasses.dataclass
class Sample:
    x: Tensor
    scale: Any


@dataclasses.dataclass(frozen=True, slots=True)
class Slotted:
    x: Tensor
    names: list[str]


def rows(size: int, *shape: int) -> Tensor:
    return torch.arange(size).reshape(-1, *[1] * len(shape)).expand(size, *shape)


def test_every_container_is_split_along_the_samples() -> None:
    batch = {
        "list": [rows(5, 2), rows(5)],
        "tuple": (rows(5), None),
        "named": Pair(rows(5, 3), ["a", "b", "c", "d", "e"]),
        "data": Sample(rows(5), 0.5),
        "slots": Slotted(rows(5), ["a", "b", "c", "d", "e"]),
        "encoding": BatchEncoding({"input_ids": rows(5, 7)}),
        "array": numpy.arange(5),
        "numbers": [1, 2, 3, 4, 5],
        "points": [torch.tensor(float(i)) for i in range(5)],
        "nothing": (None, None),
        "scalar": torch.tensor(2.0),
        "text": "all",
    }
    parts = split_batch(batch, 2)
    assert [batch_size(part) for part in parts] == [3, 2]
    first, second = parts
    assert first["list"][0].tolist() == [[0, 0], [1, 1], [2, 2]] and second["list"][1].tolist() == [3, 4]
    assert second["tuple"][0].tolist() == [3, 4] and second["tuple"][1] is None
    assert isinstance(second["named"], Pair) and second["named"].names == ["d", "e"]
    assert isinstance(second["data"], Sample) and second["data"].x.tolist() == [3, 4] and second["data"].scale == 0.5
    assert isinstance(second["slots"], Slotted) and second["slots"].x.tolist() == [3, 4]
    assert second["slots"].names == ["d", "e"]
    assert isinstance(second["encoding"], BatchEncoding) and second["encoding"].input_ids.shape == (2, 7)
    assert second["array"].tolist() == [3, 4] and second["numbers"] == [4, 5]
    assert list(map(float, second["points"])) == [3, 4] and second["nothing"] == (None, None)
    assert second["scalar"] is batch["scalar"] and second["text"] == "all"


@pytest.mark.parametrize(
    ("size", "num", "sizes"), [(8, 4, [2] * 4), (7, 4, [2, 2, 2, 1]), (3, 4, [1, 1, 1]), (1, 8, [1])]
)
def test_parts_are_as_even_as_possible(size: int, num: int, sizes: list[int]) -> None:
    parts = split_batch((rows(size), rows(size, 2)), num)
    assert [part[0].shape[0] for part in parts] == sizes
    assert torch.equal(torch.cat([part[1] for part in parts]), rows(size, 2))


def test_micro_batches_are_views() -> None:
    batch = torch.zeros(4, 2)
    split_batch(batch, 2)[1].fill_(1)
    assert batch.sum() == 4


@pytest.mark.parametrize(
    ("batch", "parts"),
    [
        ((rows(12, 4, 3), rows(4)), r"[0] [12, 4, 3], [1] [4]"),
        ((rows(12, 1, 3), rows(1)), r"[0] [12, 1, 3], [1] [1]"),
        ({"x": rows(4, 2), "weights": rows(3)}, r"['x'] [4, 2], ['weights'] [3]"),
        (Sample(rows(6), {"edges": rows(2, 9)}), r".x [6], .scale['edges'] [2, 9]"),
        ({"x": rows(4), "names": ["a", "b"]}, r"['x'] [4], ['names'] with 2 entries"),
        ({"x": rows(4), "array": numpy.zeros((3, 2))}, r"['x'] [4], ['array'] [3, 2]"),
        (([rows(3, 8, 8), rows(3, 8, 8)], [1, 0]), r"[0][0] [3, 8, 8], [1] with 2 entries"),
        ({"x": rows(4), "empty": rows(0)}, r"['x'] [4], ['empty'] [0]"),
    ],
)
def test_a_batch_whose_parts_differ_in_length_is_not_guessed_at(batch: Any, parts: str) -> None:
    assert batch_size(batch) is None
    with pytest.raises(ValueError, match=re.escape(f"({parts}); define split_batch(batch, num_microbatches) on")):
        split_batch(batch, 2)
    assert split_batch(batch, 1) == [batch]


class Graph:
    def __init__(self, x: Tensor) -> None:
        self.x = x


class GraphInSlots:
    __slots__ = ("x",)

    def __init__(self, x: Tensor) -> None:
        self.x = x


class CallableGraph(Graph):
    """As torch_geometric's: it can be called, and a part of it refers to it weakly, which only it knows to pickle."""

    def __init__(self, x: Tensor) -> None:
        self.parts = Parts(x, self)

    def __call__(self) -> None:
        raise AssertionError("only iterates")


class Parts:
    def __init__(self, x: Tensor, whole: CallableGraph) -> None:
        self.x, self.whole = x, weakref.ref(whole)

    def __getstate__(self) -> dict[str, Any]:
        return {"x": self.x, "whole": self.whole()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.x, self.whole = state["x"], weakref.ref(state["whole"])


@pytest.mark.parametrize("kind", [Graph, GraphInSlots, CallableGraph, lambda x: deque([x])])
def test_an_object_is_not_guessed_at(kind: Any) -> None:
    batch = kind(rows(4))
    with pytest.raises(ValueError, match=r"an object of type \w+ in the batch; define split_batch\(batch, num_micro"):
        split_batch({"graph": batch, "y": rows(4)}, 2)
    tensors, layout = tree.flatten(batch)
    assert tensors[0] is (batch[0] if isinstance(batch, deque) else getattr(batch, "parts", batch).x)
    pickle.dumps(layout)
    made = tree.rebuild(layout, [torch.ones(2)])
    assert type(made) is type(batch) and made is not batch
    assert tree.leaves(made)[0].tolist() == [1, 1]
    assert not isinstance(made, CallableGraph) or made.parts.whole() is made


def test_what_says_nothing_of_samples_names_the_way_out() -> None:
    for batch in (3, {"x": torch.tensor(1.0)}, torch.zeros(0, 3), []):
        with pytest.raises(ValueError, match=r"no tensor or list in it says .* define split_batch\(batch, num_micro"):
            split_batch(batch, 2)


@pytest.mark.parametrize(("size", "num", "sizes"), [(8, 4, [2] * 4), (7, 4, [3, 2, 2]), (3, 4, [3]), (1, 4, [1])])
def test_a_batch_norm_gets_no_single_sample_where_the_batch_has_two(size: int, num: int, sizes: list[int]) -> None:
    module = nn.Sequential(nn.BatchNorm1d(2))
    assert [batch_size(part) for part in microbatches_of((rows(size, 2), rows(size)), num, module)] == sizes
    assert len(microbatches_of(rows(size, 2), num, module.eval())) == min(num, size)


def test_signatures_differ_where_a_step_may() -> None:
    def key(batch: object) -> object:
        return signature(batch)[2]

    assert key((rows(2), 3)) == key((rows(2), 3)) != key((rows(2), 4))
    assert key((rows(2), 0.5)) == key((rows(2), 0.7))
    assert key(rows(2)) != key(rows(3))
    assert key({"a": rows(2)}) != key({"b": rows(2)})
    assert key((rows(2), ["x", "y"])) == key((rows(2), ["u", "v"]))


@pytest.mark.parametrize(("returned", "what"), [(None, "a NoneType"), ([], "an empty list"), (iter([1]), "iterator")])
def test_what_a_module_makes_of_a_batch_has_to_be_a_list(returned: Any, what: str) -> None:
    module = nn.Module()
    assert microbatches_of(rows(4), 2, module)[0].shape == (2,)
    module.split_batch = lambda batch, count: returned  # type: ignore[assignment]
    with pytest.raises(ValueError, match=f"Module.split_batch returned .*{what}; it has to return a list"):
        microbatches_of(rows(4), 2, module)


@pytest.mark.parametrize(
    ("batch", "size", "is_refused"),
    [
        ([torch.zeros(8, 3), torch.zeros(8)], 8, False),
        ([torch.zeros(2, 8), torch.zeros(2)], 2, False),
        ([{"x": torch.zeros(8)}] * 8, 8, True),
        ([{"x": torch.zeros(8)}] * 8, None, False),
        ([torch.zeros(3, 4, 4)] * 8, 8, True),
        ([{"x": torch.zeros(5), "boxes": torch.zeros(5, 4)}] * 4, 4, True),
        ([{"x": torch.zeros(2, 8)}, {"x": torch.zeros(2, 8)}], 2, False),  # two loaders' batches
        (({"x": torch.zeros(4)},) * 4, 4, False),  # a tuple is what a collate function made of fields
    ],
)
def test_a_list_of_samples_is_refused(batch: Any, size: int | None, is_refused: bool) -> None:
    with pytest.raises(ValueError, match="collate_fn") if is_refused else nullcontext():
        refuse_list_of_samples(batch, size, set())


def test_a_last_batch_with_as_many_fields_as_the_batch_size_is_known_by_the_full_ones() -> None:
    accepted: set[Any] = set()
    refuse_list_of_samples([torch.zeros(3, 7), torch.zeros(3), torch.ones(3)], 3, accepted)
    for _ in range(2):
        refuse_list_of_samples([torch.zeros(2, 7), torch.zeros(2), torch.ones(2)], 3, accepted)
    for other in ([torch.zeros(2, 5)] * 3, [torch.zeros(2, 7, 7)] * 3, [torch.zeros(5, 7), *[torch.zeros(5)] * 2]):
        with pytest.raises(ValueError, match="collate_fn"):
            refuse_list_of_samples(other, 3, accepted)


def of_objects(*sizes: int) -> Any:
    """Images of these sizes, each with as many boxes."""
    return tuple(torch.zeros(size, 4) for size in sizes), tuple({"boxes": torch.zeros(size, 4)} for size in sizes)


def test_lists_of_samples_are_split_by_their_items() -> None:
    batch = of_objects(5, 6, 7)
    first, second = split_batch(batch, 2)
    assert [len(image) for image in first[0]] == [5, 6] and [len(image) for image in second[0]] == [7]
    assert second[1][0]["boxes"] is batch[1][2]["boxes"]
    assert num_samples(first, *tree.flatten(first)) == 2
    assert num_samples(second, *tree.flatten(second)) == 1  # of seven rows


@pytest.mark.parametrize("size", [3, 5])
def test_lists_whose_tensors_have_as_many_rows_each_are_ambiguous(size: int) -> None:
    with pytest.raises(ValueError, match=rf"lists have 3 items, and all its tensors {size} rows.*define split_batch"):
        split_batch(of_objects(size, size, size), 2)
    if size == 3:
        with pytest.raises(ValueError, match="either could be samples"):
            split_batch((torch.zeros(size, 4), of_objects(size, size, size)[1]), 2)


def targets(*sizes: int) -> list[dict[str, Any]]:
    return [{"boxes": torch.zeros(size, 4), "file": f"{size}.png"} for size in sizes]


@pytest.mark.parametrize(
    ("batch", "other"),
    [
        ((torch.arange(3), targets(5, 6, 7)), 0),
        ({"pixel_values": torch.arange(3), "labels": targets(5, 6, 7), "scale": torch.tensor(2.0)}, "pixel_values"),
        ([numpy.arange(3), tuple(targets(5, 6, 7)), ["a", "b", "c"], "train"], 0),
        ((torch.arange(3), targets(3, 3, 7), [torch.zeros(2), torch.zeros(3), torch.zeros(4)]), 0),
    ],
)
def test_a_list_of_dictionaries_beside_stacked_tensors_is_of_samples(batch: Any, other: Any) -> None:
    first, second = split_batch(batch, 2)
    assert type(first) is type(batch) and batch_size(batch) == 3
    assert [part[other].tolist() for part in (first, second)] == [[0, 1], [2]]
    key = "labels" if isinstance(batch, dict) else 1
    assert first[key] == batch[key][:2] and second[key] == batch[key][2:]
    assert num_samples(second, *tree.flatten(second)) == 1


@pytest.mark.parametrize(
    "batch",
    [
        (torch.zeros(2, 3), targets(5, 6), [torch.zeros(2), torch.zeros(2)]),  # of samples, or of fields
        (torch.zeros(4, 3), targets(5, 6, 7)),
        [targets(5, 6, 7)],
    ],
)
def test_a_list_of_dictionaries_may_be_of_something_else(batch: Any) -> None:
    with pytest.raises(ValueError, match="differ in length"):
        split_batch(batch, 2)
