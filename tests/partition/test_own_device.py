"""Ranks on one machine have devices that differ in their index: of this nothing may come between them."""

from __future__ import annotations

import pickle
from unittest import mock

import pytest
import torch

from lightning_pipeline.partition import tree
from lightning_pipeline.partition.placeholder import TensorSpec
from lightning_pipeline.partition.tree import dumps
from lightning_pipeline.recording.operation import Call, shown

FIRST, SECOND = torch.device("cuda:0"), torch.device("cuda:1")


@pytest.fixture(autouse=True)
def on_second() -> object:
    """This process is the one that has the second device."""
    with mock.patch.object(torch, "get_device_module", lambda kind: mock.Mock(current_device=lambda: 1)):
        yield


def call(device: object) -> object:
    made = Call((torch.float32, [device]), {"device": device}, [], [])
    return shown(made.args), shown(made.kwargs)


@pytest.mark.parametrize("kind", [torch.device, str])
def test_calls_with_each_ranks_device_are_one(kind: type) -> None:
    assert repr(call(kind(FIRST))) == repr(call(kind(SECOND))) != repr(call(kind(torch.device("cpu"))))
    assert repr(call("mean:0")) != repr(call("mean:1"))


def test_what_another_rank_tells_is_on_the_own_device() -> None:
    spec = TensorSpec(torch.Size([2]), (1,), torch.float32, FIRST, torch.strided, False, True, False)
    told = {"look": spec, "devices": [FIRST, torch.device("cpu"), torch.device("cuda")]}
    found = pickle.loads(dumps(told))
    assert found == {"look": spec.but(device=SECOND), "devices": [SECOND, torch.device("cpu"), torch.device("cuda")]}


class Batch:
    """A batch of a class of the user's."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.values = torch.ones(2)

    def __reduce__(self) -> object:
        return Batch._made, (self.device, self.values)

    @staticmethod
    def _made(device: torch.device, values: torch.Tensor) -> Batch:
        made = Batch(device)
        made.values = values
        return made


@pytest.mark.parametrize("batch", [Batch(FIRST), {"device": FIRST, "values": torch.ones(2)}])
def test_a_batch_that_names_its_device_names_the_own_one(batch: object) -> None:
    tensors, layout = tree.flatten(batch)
    found = tree.rebuild(pickle.loads(dumps(layout)), tensors)
    assert (found["device"] if isinstance(found, dict) else found.device) == SECOND
