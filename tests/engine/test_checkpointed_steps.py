"""Checkpointed functions in steps on stages: equal to one process, and their activations are not kept."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

from lightning_pipeline.planning.observing import LiveBytes
from lightning_pipeline.recording.execution import visit_function
from tests.engine.one_process import assert_equal, on_stages

STAGES = {"layers.2": 1}
BATCHES = [torch.randn(4, 8, generator=torch.Generator().manual_seed(number)) for number in range(4)]


class Block(nn.Module):
    """A layer whose inside may be checkpointed, and checkpointed again within."""

    def __init__(self, reentrant: bool, inner: bool | None = None, norm: bool = False) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)
        self.norm: nn.Module = nn.BatchNorm1d(16) if norm else nn.Identity()
        self.dropout = nn.Dropout(0.2)
        self.reentrant, self.inner = reentrant, inner

    def forward(self, x: Tensor) -> Tensor:
        return x + checkpoint(self.body, x, use_reentrant=self.reentrant)

    def body(self, x: Tensor) -> Tensor:
        h = self.dropout(torch.tanh(self.norm(self.up(x))))
        return self.down(h) if self.inner is None else checkpoint(self.down, h, use_reentrant=self.inner)


def network(*args: Any, **kwargs: Any) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        module = nn.Module()
        module.layers = nn.Sequential(*(Block(*args, **kwargs) for _ in range(4)))
        return module

    return make


def step(module: Any, batch: Tensor) -> Tensor:
    return module.layers(batch.requires_grad_()).pow(2).mean()


@pytest.mark.parametrize("inner", [None, False, True])
@pytest.mark.parametrize("reentrant", [False, True])
def test_equals_one_process(reentrant: bool, inner: bool | None) -> None:
    assert_equal(network(reentrant, inner), STAGES, step, BATCHES, in_order=False)


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_batch_norm_inside_is_updated_twice_as_in_one_process(reentrant: bool) -> None:
    assert_equal(network(reentrant, norm=True), STAGES, step, BATCHES, in_order=True)


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_function_may_span_stages(reentrant: bool) -> None:
    def over_all(module: Any, batch: Tensor) -> Tensor:
        return checkpoint(module.layers, batch.requires_grad_(), use_reentrant=reentrant).pow(2).mean()

    def in_segments(module: Any, batch: Tensor) -> Tensor:
        found = checkpoint_sequential(module.layers, 3, batch.requires_grad_(), use_reentrant=reentrant)
        return found.pow(2).mean()

    def of_two_stages(module: Any, batch: Tensor) -> Tensor:
        early = module.layers[0](batch.requires_grad_())
        late = module.layers[3](module.layers[2](early))
        return checkpoint(lambda a, b: (a * b).tanh().mean(), early, late, use_reentrant=reentrant) + early.pow(2).sum()

    for each in (over_all, in_segments, of_two_stages):
        assert_equal(network(reentrant), STAGES, each, BATCHES, in_order=False)


@pytest.mark.parametrize("reentrant", [False, True])
def test_where_a_step_reads(reentrant: bool) -> None:
    def reads(module: Any, batch: Tensor) -> Tensor:
        loss = step(module, batch)
        return loss * 2 if loss.item() > 0 else loss

    assert_equal(network(reentrant), STAGES, reads, BATCHES, in_order=True)


def test_turned_on_and_off_while_training_goes_on() -> None:
    calls = []

    def sometimes(module: Any, batch: Tensor) -> Tensor:
        calls.append(1)
        if len(calls) % 3:
            return step(module, batch)
        return checkpoint(module.layers, batch.requires_grad_(), use_reentrant=False).pow(2).mean()

    def make() -> nn.Module:
        calls.clear()
        return network(False)()

    assert_equal(make, STAGES, sometimes, BATCHES[:3], in_order=False)


class Live(TorchDispatchMode):
    """Notes how many bytes are alive of what visits have made."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = LiveBytes(())
        self.most = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        self.bytes.note(found if isinstance(found, (tuple, list)) else (found,))
        return found

    def visit_function(self, *args: Any) -> Any:
        run = visit_function(*args)

        def noted(*args: Any) -> Any:
            with self:
                found = run(*args)
            self.most = max(self.most, self.bytes.now)
            return found

        return noted


@pytest.mark.parametrize("splits", [False, True])
@pytest.mark.parametrize("reentrant", [False, True])
def test_activations_are_not_kept(reentrant: bool, splits: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    width, rows = 512, 64

    def make() -> nn.Module:
        module = nn.Module()
        layers = [nn.Sequential(nn.Linear(2, width), nn.Tanh(), nn.Tanh(), nn.Linear(width, 2)) for _ in range(4)]
        module.layers = nn.ModuleList(layers)
        return module

    def plain(module: Any, batch: Tensor) -> Tensor:
        batch.requires_grad_()
        for layer in module.layers:
            batch = layer(batch)
        return batch.mean()

    def checkpointed(module: Any, batch: Tensor) -> Tensor:
        batch.requires_grad_()
        for layer in module.layers:
            batch = checkpoint(layer, batch, use_reentrant=reentrant)
        return batch.mean()

    batches = [torch.randn(rows, 2) for _ in range(3)]
    most = []
    for each in (plain, checkpointed):
        live = Live()
        monkeypatch.setattr("lightning_pipeline.engine.visit.visit_function", live.visit_function)
        on_stages(make(), STAGES, each, batches, splits=splits, steps=1)
        most.append(live.most)
    one_layer = rows * width * 4
    assert most[0] >= 3 * 4 * 2 * one_layer  # what two tanh save in each of three micro-batches
    assert most[1] < one_layer
