"""Splitting nested batches."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from transformers import BatchEncoding

from lightning_pipeline.partition.microbatch import batch_size, microbatches_of, signature, split_batch


class Pair(NamedTuple):
    x: Tensor
    names: list[str]


@dataclasses.dataclass
class Sample:
    x: Tensor
    scale: float


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
        "shared": torch.zeros(3, 3),
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
    assert second["shared"] is batch["shared"] and second["scalar"] is batch["scalar"] and second["text"] == "all"


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


def test_what_cannot_be_split_names_the_way_out() -> None:
    class Graph:
        def __init__(self) -> None:
            self.x = torch.zeros(4)

    with pytest.raises(ValueError, match=r"split_batch\(batch, num_microbatches\)"):
        split_batch(3, 2)
    with pytest.raises(ValueError, match="object of type Graph"):
        split_batch(Graph(), 2)


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
