"""Optimizers split over stages: they step, save and load as one process's optimizer does."""

from __future__ import annotations

import copy
import io

import pytest
import torch
from torch import nn

from lightning_pipeline.checkpoint.optimizer_layout import OptimizerLayout
from lightning_pipeline.partition.ownership import Ownership, release
from lightning_pipeline.partition.placeholder import is_absent

OPTIMIZERS = {
    "sgd": lambda groups: torch.optim.SGD(groups, lr=0.1, momentum=0.9),
    "sgd without state": lambda groups: torch.optim.SGD(groups, lr=0.1),
    "adam": lambda groups: torch.optim.Adam(groups, lr=0.1, amsgrad=True),
    "adamw foreach": lambda groups: torch.optim.AdamW(groups, lr=0.1, foreach=True),
    "adamw fused": lambda groups: torch.optim.AdamW(groups, lr=torch.tensor(0.1), fused=True),
    "adafactor": lambda groups: torch.optim.Adafactor(groups, lr=0.1),
    "rmsprop": lambda groups: torch.optim.RMSprop(groups, lr=0.1, momentum=0.5, centered=True),
    "adagrad": lambda groups: torch.optim.Adagrad(groups, lr=0.1),
}


class Tied(nn.Module):
    """Stage 0: embed and the first layers; last stage: the last layers and the head, tied to embed."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 6)
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(4))
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.embed.weight
        self.unused = nn.Parameter(torch.ones(3))


def make() -> Tied:
    torch.manual_seed(0)
    return Tied()


def groups_of(module: nn.Module) -> list[dict]:
    biases = [parameter for name, parameter in module.named_parameters() if name.endswith("bias")]
    others = [parameter for name, parameter in module.named_parameters() if not name.endswith("bias")]
    return [{"params": biases, "lr": 0.05}, {"params": others}]


def ownership_of(module: nn.Module, num_stages: int, stage: int) -> Ownership:
    holders = {}
    for name, _ in module.named_parameters(remove_duplicate=False):
        if name in ("embed.weight", "head.weight"):
            holders[name] = (0, num_stages - 1)
        elif name == "unused":
            holders[name] = tuple(range(num_stages))
        else:
            holders[name] = (int(name.split(".")[1]) * num_stages // 4,)
    return Ownership(num_stages, stage, holders, unseen=frozenset({"unused"}))


def train(module: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        for index, (name, parameter) in enumerate(module.named_parameters()):
            if name != "unused" and not parameter.is_meta:
                generator = torch.Generator().manual_seed(100 * step + index)
                parameter.grad = torch.randn(parameter.shape, generator=generator)
        optimizer.step()


def assert_equal(actual, expected, path: str = "state_dict") -> None:
    """Same types, keys in the same order, and bits."""
    assert type(actual) is type(expected), (path, type(actual), type(expected))
    if isinstance(expected, dict):
        assert list(actual) == list(expected), path
        for key in expected:
            assert_equal(actual[key], expected[key], f"{path}.{key}")
    elif isinstance(expected, (list, tuple)):
        assert len(actual) == len(expected), path
        for index, pair in enumerate(zip(actual, expected, strict=True)):
            assert_equal(*pair, f"{path}.{index}")
    elif isinstance(expected, torch.Tensor):
        assert actual.device == expected.device and actual.dtype == expected.dtype, path
        assert torch.equal(actual, expected), path
    else:
        assert actual == expected, path


@pytest.mark.multiprocess
def test_every_optimizer_saves_and_loads_the_plain_state(run_stages):
    num_stages = 3

    def body(stage, transport):
        for name, build in OPTIMIZERS.items():
            plain = make()
            plain_optimizer = build(groups_of(plain))
            train(plain, plain_optimizer, range(3))
            plain_state = copy.deepcopy(plain_optimizer.state_dict())
            halfway = copy.deepcopy(plain.state_dict())
            train(plain, plain_optimizer, range(3, 5))

            module = make()
            ownership = ownership_of(module, num_stages, stage)
            optimizer = build(groups_of(module))
            layout = OptimizerLayout(optimizer, module)
            release(module, ownership)
            layout.forget_remote()
            train(module, optimizer, range(3))
            if stage != 0:  # stage 0 owns it
                for value in optimizer.state.get(module.embed.weight, {}).values():
                    value.fill_(7) if isinstance(value, torch.Tensor) else None
            state = layout.gather_state(ownership, transport)
            if stage == 0:
                assert_equal(state, plain_state, name)
                buffer = io.BytesIO()
                torch.save(state, buffer)
                buffer.seek(0)
                torch.load(buffer, weights_only=True)
            else:
                assert state == {}

            # Resumed from the plain state, before and after ownership has settled.
            for settled in (True, False):
                resumed = make()
                resumed.load_state_dict(halfway)
                optimizer = build(groups_of(resumed))
                layout = OptimizerLayout(optimizer, resumed)
                if settled:
                    release(resumed, ownership)
                    layout.load_state(copy.deepcopy(plain_state))
                else:
                    layout.load_state(copy.deepcopy(plain_state))
                    release(resumed, ownership)
                    layout.forget_remote()
                assert set(optimizer.state) <= {parameter for _, parameter in layout.local_parameters()}, name
                train(resumed, optimizer, range(3, 5))
                for (key, parameter), other in zip(resumed.named_parameters(), plain.parameters(), strict=True):
                    assert parameter.is_meta != ownership.is_local(key)
                    assert parameter.is_meta or torch.equal(parameter, other), (name, key)

    run_stages(body, num_stages)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_optimizer_without_local_parameters_steps(name):
    module = make()
    optimizer = OPTIMIZERS[name](groups_of(module))
    layout = OptimizerLayout(optimizer, module)
    before = [list(group["params"]) for group in optimizer.param_groups]
    holders = {key: (1,) for key, _ in module.named_parameters(remove_duplicate=False)}
    release(module, Ownership(2, 0, holders))
    layout.forget_remote()
    assert layout.local_parameters() == []
    for group, parameters in zip(optimizer.param_groups, before, strict=True):
        assert all(now is then for now, then in zip(group["params"], parameters, strict=True))
    assert not optimizer.state
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    optimizer.step()
    optimizer.zero_grad()
    scheduler.step()
    assert float(optimizer.param_groups[0]["lr"]) == pytest.approx(0.025)


def test_what_a_constructor_notes_of_parameters_stays():
    def noting(module):
        optimizer = torch.optim.SGD(groups_of(module), lr=0.1, momentum=0.9)
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                optimizer.state[parameter].update(is_matrix=parameter.ndim >= 2, slow=parameter.detach().clone())
        return optimizer

    plain = make()
    plain_optimizer = noting(plain)
    train(plain, plain_optimizer, range(2))
    module = make()
    optimizer = noting(module)
    layout = OptimizerLayout(optimizer, module)
    before = list(optimizer.state)
    release(module, ownership_of(module, 2, 1))
    absent = [parameter for parameter in before if is_absent(parameter)]
    assert absent
    layout.forget_remote()
    for load in (False, True):
        if load:
            layout.load_state(plain_optimizer.state_dict())
            layout.forget_remote()
        assert [id(parameter) for parameter in optimizer.state] == [id(parameter) for parameter in before]
        assert all(optimizer.state[parameter] == {"is_matrix": parameter.ndim >= 2} for parameter in absent)
        assert all("slow" in optimizer.state[parameter] for _, parameter in layout.local_parameters())


def test_one_stage_saves_what_torch_saves():
    module = make()
    optimizer = torch.optim.AdamW(groups_of(module), lr=0.1)
    layout = OptimizerLayout(optimizer, module)
    train(module, optimizer, range(2))
    holders = {name: (0,) for name, _ in module.named_parameters(remove_duplicate=False)}
    assert_equal(layout.gather_state(Ownership(1, 0, holders), None), optimizer.state_dict())


def test_names_given_by_the_user_follow_their_parameters():
    module = make()
    optimizer = torch.optim.AdamW(module.layers.named_parameters(), lr=0.1)
    plain_state = copy.deepcopy(optimizer.state_dict())
    layout = OptimizerLayout(optimizer, module)
    ownership = ownership_of(module, 2, 1)
    release(module, ownership)
    expected = ["2.weight", "2.bias", "3.weight", "3.bias"]
    assert optimizer.param_groups[0]["param_names"] == plain_state["param_groups"][0]["param_names"]
    layout.load_state(plain_state)
    assert optimizer.param_groups[0]["param_names"] == plain_state["param_groups"][0]["param_names"]
    assert [name for name, _ in layout.local_parameters()] == [f"layers.{name}" for name in expected]
    holders = dict.fromkeys(ownership.holders, (0,))
    assert_equal(layout.gather_state(Ownership(1, 0, holders), None), plain_state)


def test_a_group_added_later_is_taken_in():
    module = make()
    optimizer = torch.optim.SGD(module.layers[0].parameters(), lr=0.1)
    layout = OptimizerLayout(optimizer, module)
    ownership = ownership_of(module, 2, 0)
    release(module, ownership)
    optimizer.add_param_group({"params": [*module.layers[1].parameters(), *module.layers[2].parameters()]})
    layout.note_new_groups(module)
    assert [len(names) for names in layout.groups] == [2, 4]
    assert [name for name, _ in layout.local_parameters()][2:] == ["layers.1.weight", "layers.1.bias"]


def test_a_tensor_outside_of_the_module_is_refused():
    stray = nn.Parameter(torch.zeros(2, 5))
    with pytest.raises(ValueError, match=r"tensors of shapes \[\(2, 5\)\] that are not parameters"):
        OptimizerLayout(torch.optim.SGD([stray], lr=0.1), make())


def test_parameters_on_the_meta_device_may_be_there_from_the_start():
    module = make()
    ownership = ownership_of(module, 2, 0)
    release(module, ownership)
    optimizer = torch.optim.Adagrad(groups_of(module), lr=0.1)
    layout = OptimizerLayout(optimizer, module)
    layout.forget_remote()
    assert not any(parameter.is_meta for _, parameter in layout.local_parameters())
    assert not any(value.is_meta for state in optimizer.state.values() for value in state.values())
    optimizer.step()
