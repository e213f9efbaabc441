"""Module state gathered from stages equals the state dict of one process, and loads back."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import nn

from lightning_pipeline.checkpoint.state import gather_module_state, load_module_state
from lightning_pipeline.partition.ownership import Ownership, release


class Counter(nn.Linear):
    """Has an extra state, as quantized layers do."""

    calls = 0

    def get_extra_state(self) -> dict[str, Any]:
        return {"calls": self.calls, "scale": torch.tensor([1.5])}

    def set_extra_state(self, state: dict[str, Any]) -> None:
        self.calls = state["calls"]


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 4)
        self.first = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
        self.second = nn.Sequential(Counter(4, 4), nn.BatchNorm1d(4))
        self.second.to(torch.bfloat16)
        self.head = nn.Linear(4, 7, bias=False)
        self.head.weight = self.embed.weight
        self.twin = nn.Linear(4, 4)
        self.second.append(self.twin)  # registered under two names
        self.register_buffer("scale", torch.tensor(2.0))
        self.register_buffer("phase", torch.randn(3, dtype=torch.complex64).conj())
        self.register_buffer("empty", torch.zeros(0, 3))
        self.register_buffer("hidden", torch.ones(2), persistent=False)


class Renaming(Model):
    """Saves a parameter under another name, and leaves one out."""

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        state = super().state_dict(*args, **kwargs)
        state["renamed"] = state.pop("second.1.weight")
        del state["first.0.bias"]
        return state


def make(kind: type[Model] = Model, seed: int = 0) -> Model:
    torch.manual_seed(seed)
    return kind()


def ownership_of(module: nn.Module, num_stages: int, stage: int) -> Ownership:
    last = num_stages - 1
    remote = ("second", "twin", "phase", "empty", "hidden")
    holders = {}
    for named in (module.named_parameters(remove_duplicate=False), module.named_buffers(remove_duplicate=False)):
        for name, _ in named:
            tied = name in ("embed.weight", "head.weight")
            holders[name] = tuple(sorted({0, last})) if tied else (last,) if name.startswith(remote) else (0,)
    return Ownership(num_stages, stage, holders)


def assert_same_state(actual: dict[str, Any], expected: dict[str, Any]) -> None:
    assert type(actual) is type(expected) and list(actual) == list(expected)
    assert getattr(actual, "_metadata", None) == getattr(expected, "_metadata", None)
    for key, value in expected.items():
        if isinstance(value, torch.Tensor):
            assert actual[key].dtype == value.dtype and torch.equal(actual[key], value), key
    assert actual["second.0._extra_state"]["calls"] == expected["second.0._extra_state"]["calls"]
    for one, other in (("embed.weight", "head.weight"), ("twin.weight", "second.2.weight")):
        assert actual[one].data_ptr() == actual[other].data_ptr()


@pytest.mark.multiprocess
def test_gathered_state_is_the_plain_one(run_stages):
    num_stages = 3

    def body(stage, transport):
        for kind in (Model, Renaming):
            plain = make(kind)
            module = make(kind)
            module.second[0].calls = stage
            ownership = ownership_of(module, num_stages, stage)
            release(module, ownership)
            state = gather_module_state(module, ownership, transport)
            if stage != 0:
                assert state == {}
                continue
            assert_same_state(state, plain.state_dict())
            if kind is Model:  # a plain process loads it
                make(seed=1).load_state_dict(state)

        # Every stage hears of data that nobody has.
        module = make().to("meta")
        with pytest.raises(RuntimeError, match=r"cannot save 'phase': its data is on the meta device"):
            gather_module_state(module, ownership_of(module, num_stages, stage), transport)

    run_stages(body, num_stages)


def test_one_stage_needs_no_transport():
    module = make()
    assert_same_state(gather_module_state(module, ownership_of(module, 1, 0), None), module.state_dict())


def test_loading_fills_what_is_local_and_warns_of_nothing():
    state = make(seed=1).state_dict()
    module = make()
    release(module, ownership_of(module, 2, 0))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        result = load_module_state(module, state)
    assert not result.missing_keys and not result.unexpected_keys
    assert torch.equal(module.first[0].weight, state["first.0.weight"])
    assert module.second[0].weight.is_meta


def test_strict_loading_checks_remote_entries_too():
    module = make()
    release(module, ownership_of(module, 2, 0))
    state = make(seed=1).state_dict()
    state["stranger"] = state.pop("second.0.weight")
    with pytest.raises(RuntimeError, match=r"Missing key\(s\) in state_dict: \"second.0.weight\""):
        load_module_state(module, state)
    result = load_module_state(module, state, strict=False)
    assert (result.missing_keys, result.unexpected_keys) == (["second.0.weight"], ["stranger"])
    state = make(seed=1).state_dict()
    state["second.0.weight"] = torch.zeros(5, 4)
    with pytest.raises(RuntimeError, match=r"size mismatch for second.0.weight"):
        load_module_state(module, state)
