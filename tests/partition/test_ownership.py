"""Ownership, and the release of what other stages hold."""

from __future__ import annotations

import weakref

import pytest
import torch
from torch import nn

from lightning_pipeline.partition.ownership import Ownership, named_tensors, release
from lightning_pipeline.partition.placeholder import is_absent


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 4)
        self.norm = nn.BatchNorm1d(4)
        self.head = nn.Linear(4, 7, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("optional", None)


def holders_of(module: nn.Module, remote: tuple[str, ...]) -> dict[str, tuple[int, ...]]:
    names = [name for name, _ in module.named_parameters(remove_duplicate=False)]
    names += [name for name, _ in module.named_buffers(remove_duplicate=False)]
    return {name: (1,) if name.startswith(remote) else (0,) for name in names}


def test_shared_names_leave_out_unseen_ones():
    ownership = Ownership(3, 1, {"a": (0,), "b": (1, 2), "c": (0, 1, 2)}, unseen=frozenset({"c"}))
    assert ownership.shared_names() == ["b"]
    assert [name for name in "abc" if ownership.is_local(name)] == ["b", "c"]
    assert (ownership.owner("b"), ownership.is_owner("b"), ownership.is_owner("c")) == (1, True, False)
    assert "a" in ownership and "d" not in ownership


@pytest.mark.parametrize("with_weakref", [False, True])
def test_release_keeps_ties_and_flags(with_weakref):
    module = Model()
    module.embed.weight.requires_grad_(False)
    module.embed.weight.note = "kept"
    references = [weakref.ref(module.embed.weight)] if with_weakref else []
    held = module.embed.weight
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    ownership = Ownership(2, 0, holders_of(module, ("embed", "head", "norm.running")))
    release(module, ownership)

    absent = [name for name, tensor in named_tensors(module) if is_absent(tensor)]
    assert sorted(absent) == ["embed.weight", "head.weight", "norm.running_mean", "norm.running_var"]
    assert module.embed.weight.is_meta and module.head.weight is module.embed.weight
    assert module.embed.weight.shape == (7, 4) and not module.embed.weight.requires_grad
    assert isinstance(module.embed.weight, nn.Parameter) and module.embed.weight.note == "kept"
    assert module.norm.running_mean.is_meta and not module.norm.weight.is_meta
    assert not module.norm.num_batches_tracked.is_meta
    assert list(module.state_dict()) == list(Model().state_dict())
    assert held is module.embed.weight is optimizer.param_groups[0]["params"][0]
    assert all(reference() is held for reference in references)


def test_release_frees_the_memory_and_the_gradient():
    layer = nn.Linear(4, 4)
    layer(torch.ones(1, 4)).sum().backward()
    storage = weakref.ref(layer.weight.untyped_storage())
    assert storage() is not None
    release(layer, Ownership(2, 0, {"weight": (1,), "bias": (0,)}))
    assert layer.weight.grad is None and layer.weight.is_meta
    assert storage() is None
    assert layer.bias.grad is not None and not layer.bias.is_meta


def test_what_is_released_is_converted_with_its_module():
    layer = nn.Linear(4, 4)
    held = layer.weight
    release(layer, Ownership(2, 0, {"weight": (1,), "bias": (0,)}))
    layer.double()
    assert layer.weight is held and held.dtype is layer.bias.dtype is torch.float64
    assert isinstance(held, nn.Parameter) and held.requires_grad
    layer.to("cpu", torch.bfloat16)
    assert held.dtype is torch.bfloat16 and held.is_meta
