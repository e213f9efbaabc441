"""Clipping over stages has the bits of torch's clipping in one process."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from lightning_pipeline.checkpoint.optimizer_layout import OptimizerLayout
from lightning_pipeline.partition.ownership import Ownership, release
from lightning_pipeline.strategy.gradient_norm import global_grad_norm
from lightning_pipeline.strategy.stage_optimizers import StageOptimizers

NORM_TYPES = (1.0, 2.0, 3.0, float("inf"))


class Tied(nn.Module):
    """19 parameters: an embedding tied to the head, one without gradient, some of another dtype."""

    def __init__(self, mixed: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(23, 17)
        self.layers = nn.ModuleList(nn.Linear(17, 17) for _ in range(8))
        self.unused = nn.Parameter(torch.zeros(5))
        self.head = nn.Linear(17, 23)
        self.head.weight = self.embed.weight
        if mixed:
            self.layers[1].to(torch.bfloat16)
            self.layers[2].to(torch.bfloat16)


def make(seed: int, mixed: bool = False) -> Tied:
    torch.manual_seed(seed)
    module = Tied(mixed)
    for name, parameter in module.named_parameters():
        if name != "unused":
            parameter.grad = torch.randn_like(parameter) * 3
    return module


def optimizer_over(module: nn.Module) -> torch.optim.Optimizer:
    # Biases first, as weight-decay groups do: the order is the optimizer's, not the module's.
    biases = [parameter for name, parameter in module.named_parameters() if name.endswith("bias")]
    others = [parameter for name, parameter in module.named_parameters() if not name.endswith("bias")]
    return torch.optim.SGD([{"params": biases}, {"params": others, "weight_decay": 0.1}], lr=0.1)


def ownership_of(module: Tied, num_stages: int, stage: int) -> Ownership:
    holders = {}
    for name, _ in module.named_parameters(remove_duplicate=False):
        if name in ("embed.weight", "head.weight"):
            holders[name] = (0, num_stages - 1) if num_stages > 1 else (0,)
        elif name == "unused":
            holders[name] = tuple(range(num_stages))
        elif name == "head.bias":
            holders[name] = (num_stages - 1,)
        else:
            holders[name] = (int(name.split(".")[1]) * num_stages // 8,)
    return Ownership(num_stages, stage, holders, unseen=frozenset({"unused"}))


def settled(layout: OptimizerLayout, ownership: Ownership, transport) -> StageOptimizers:
    return StageOptimizers([layout], ownership, transport)


def clipped_by_torch(seed: int, norm_type: float, max_norm: float, mixed: bool) -> tuple[torch.Tensor, Tied]:
    module = make(seed, mixed)
    parameters = [p for group in optimizer_over(module).param_groups for p in group["params"]]
    return torch.nn.utils.clip_grad_norm_(parameters, max_norm, norm_type), module


def assert_same_as_torch(stage: int, num_stages: int, transport) -> None:
    for seed, norm_type in enumerate(NORM_TYPES):
        for mixed in (False, True):
            for max_norm in (0.7, 1e4):
                expected_norm, expected = clipped_by_torch(seed, norm_type, max_norm, mixed)
                module = make(seed, mixed)
                layout = OptimizerLayout(optimizer_over(module), module)
                ownership = ownership_of(module, num_stages, stage)
                release(module, ownership)
                norm = settled(layout, ownership, transport).clip_by_norm(
                    layout.optimizer, max_norm, norm_type=norm_type
                )
                assert norm.dtype == expected_norm.dtype
                assert torch.equal(norm, expected_norm), (norm_type, mixed, norm, expected_norm)
                for (name, parameter), other in zip(module.named_parameters(), expected.parameters(), strict=True):
                    if ownership.is_local(name) and name != "unused":
                        assert torch.equal(parameter.grad, other.grad), (name, norm_type, mixed)


def test_one_stage_equals_torch():
    assert_same_as_torch(0, 1, None)


@pytest.mark.multiprocess
@pytest.mark.parametrize("num_stages", [2, 3])
def test_stages_equal_torch(run_stages, num_stages):
    def body(stage, transport):
        assert_same_as_torch(stage, num_stages, transport)

        # A gradient on one stage only, and none on the others.
        module = make(0)
        ownership = ownership_of(module, num_stages, stage)
        layout = OptimizerLayout(optimizer_over(module), module)
        release(module, ownership)
        for name, parameter in module.named_parameters():
            if name != "layers.7.bias" or not ownership.is_local(name):
                parameter.grad = None
        expected = make(0).layers[7].bias.grad.norm()
        norm = settled(layout, ownership, transport).clip_by_norm(layout.optimizer, 0.5)
        assert torch.equal(norm, torch.stack([expected]).norm())

        # NaN on one stage is seen by all.
        if ownership.is_local("layers.7.bias"):
            module.layers[7].bias.grad.fill_(float("nan"))
        norm = global_grad_norm(
            layout.local_parameters(), layout.dtypes, ownership=ownership, transport=transport, norm_type=2
        )
        assert norm.isnan()

        # No gradient anywhere.
        module.zero_grad()
        assert settled(layout, ownership, transport).clip_by_norm(layout.optimizer, 0.5).item() == 0.0

    run_stages(body, num_stages)


def test_clip_by_value_clamps_what_the_optimizer_holds():
    module = make(0)
    layout = OptimizerLayout(optimizer_over(module), module)
    ownership = ownership_of(module, 2, 0)
    release(module, ownership)
    settled(layout, ownership, None).clip_by_value(layout.optimizer, 0.25)
    assert module.layers[0].weight.grad.abs().max() == 0.25
    assert module.layers[7].weight.grad is None
