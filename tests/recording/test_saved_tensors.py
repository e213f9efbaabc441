"""Saved tensors in host memory: what is sent, once, and what autograd checks all the same."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.graph import get_gradient_edge
from torch.utils.checkpoint import checkpoint

from lightning_pipeline import _torch
from lightning_pipeline.partition.memory import memory_of
from lightning_pipeline.recording.recomputation import recomputed
from lightning_pipeline.recording.saved_tensors import SMALLEST, Block, HostMemory, SavedMemory
from lightning_pipeline.recording.split_backward import SplitBackward

ROWS = 64
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA"))]


def leaf(*shape: int, device: str = "cpu", seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(device).requires_grad_()


def sent(edge: Any, *held: Tensor, share: float = 1.0, device: str = "cpu") -> dict[int, Block]:
    """Send what a graph has saved, and free it on the device."""
    saved = SavedMemory([edge.node], {memory_of(tensor) for tensor in held})
    blocks = saved.send(share, HostMemory(torch.device(device)))
    for block in blocks.values():
        block.let_go()
    return blocks


def net(x: Tensor, w: Tensor, v: Tensor) -> Tensor:
    """Its operations save inputs, results, views, weights and small tensors."""
    h = F.linear(x.clone(), w)
    h = torch.relu(h) * h.t().contiguous().t()
    h = F.layer_norm(h, h.shape[1:])
    return F.linear(h.exp().tanh(), v).sum()


@pytest.mark.parametrize("share", [0.0, 0.4, 1.0])
@pytest.mark.parametrize("device", DEVICES)
def test_the_same_bits(device: str, share: float) -> None:
    inputs = [leaf(ROWS, 96, device=device), leaf(128, 96, device=device, seed=1), leaf(32, 128, device=device, seed=2)]
    edge = get_gradient_edge(loss := net(*inputs))
    expected = torch.autograd.grad(loss, inputs, retain_graph=True)
    del loss
    blocks = sent(edge, *inputs, share=share, device=device)
    assert bool(blocks) == (share > 0)
    for block in blocks.values():
        block.fetch()
        block.arrive()
    for retain_graph in (True, False):
        found = torch.autograd.grad([edge], inputs, [torch.ones((), device=device)], retain_graph=retain_graph)
        assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


def test_memory_goes_once_and_is_freed() -> None:
    x, w = leaf(ROWS, 96), leaf(128, 96, seed=1)
    h = x.exp()
    refs = [_torch.StorageWeakRef(h.untyped_storage())]
    edge = get_gradient_edge(F.linear(h, w) @ F.linear(h[:32], w).t() + (h.t() * h.t()).sum())
    del h
    saved = SavedMemory([edge.node], {memory_of(w)})
    assert ROWS * 96 * 4 in saved.sizes.values()  # the exponentials, which five operations have saved
    assert len(saved.sizes) == 3  # and the two products
    blocks = saved.send(1.0, HostMemory(torch.device("cpu")))
    assert not refs[0].expired()  # until it has arrived there
    for block in blocks.values():
        block.let_go()
    assert refs[0].expired()
    for block in blocks.values():
        refs.append(_torch.StorageWeakRef(block.fetch()))
    del blocks, block
    torch.autograd.backward([edge], [torch.ones(ROWS, 32)])
    assert all(ref.expired() for ref in refs)  # and backward frees it as usual


def test_what_others_hold_and_what_is_small_stays() -> None:
    x, w = leaf(ROWS, 96), leaf(128, 96, seed=1)
    kept = x.exp()
    small = leaf(SMALLEST // 4 - 1).exp()
    edge = get_gradient_edge(F.linear(kept, w.view(128, 96)).sum() + (small * small).sum())
    assert not sent(edge, w, kept)


@pytest.mark.parametrize("share", [0.0, 1.0])
@pytest.mark.parametrize("is_late", [False, True])
@pytest.mark.parametrize("change", [Tensor.zero_, lambda t: t.detach().zero_(), lambda t: t[:2].zero_()])
@pytest.mark.parametrize("saves", [torch.exp, torch.sin], ids=["its result", "its input"])
def test_a_change_in_place_is_an_error(
    saves: Callable[[Tensor], Tensor], change: Callable[[Tensor], Any], is_late: bool, share: float
) -> None:
    x = leaf(ROWS, 128)
    h = x * 2 if saves is torch.sin else saves(x * 2)
    edge = get_gradient_edge(saves(h) if saves is torch.sin else h.clone())
    with torch.no_grad():
        if not is_late:
            change(h)
        blocks = sent(edge, share=share)
        if is_late:
            change(h)
    assert bool(blocks) == (is_late and share == 1.0)
    with pytest.raises(RuntimeError, match=r"has been modified by an inplace operation.*expected version 0"):
        torch.autograd.backward([edge], [torch.ones(ROWS, 128)])


class Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        result = x * x
        ctx.save_for_backward(x, None, result)
        return result

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        x, _, result = ctx.saved_tensors
        return 2 * x * gradient + 0 * result


def test_functions_of_the_users_own() -> None:
    x = leaf(ROWS, 128)
    edge = get_gradient_edge(Square.apply(x * 2).sum())
    assert len(sent(edge)) == 2
    [found] = torch.autograd.grad([edge], [x], [torch.ones(())])
    assert torch.equal(found, 2 * (2 * x) * 2)


def test_tensors_with_hooks_of_others_stay() -> None:
    x = leaf(ROWS, 128)
    h = x * 2
    unpacked = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t * 1, lambda t: unpacked.append(t) or t):
        y = h.sin()
    edge = get_gradient_edge((y * h.cos()).sum())
    del h, y
    blocks = sent(edge)
    assert len(blocks) == 3 and not unpacked  # not the copy that the hook has made
    [found] = torch.autograd.grad([edge], [x], [torch.ones(())])
    expected = torch.autograd.grad(((x * 2).sin() * (x * 2).cos()).sum(), [x])[0]
    assert torch.equal(found, expected) and unpacked


@pytest.mark.parametrize("changes", [False, True])
def test_inputs_of_checkpointed_functions(changes: bool) -> None:
    x, w = leaf(ROWS, 128), leaf(128, 128, seed=1)
    h = x * 2
    edge = get_gradient_edge(recomputed(lambda h: F.linear(h.sin(), w).tanh(), (h,), True).sum())
    ref = _torch.StorageWeakRef(h.untyped_storage())
    if not changes:
        del h
    [block] = sent(edge, w).values()
    assert ref.expired() is not changes
    block.fetch()
    if changes:
        with torch.no_grad():
            h.zero_()
        with pytest.raises(RuntimeError, match="has been modified by an inplace operation"):
            torch.autograd.grad([edge], [x, w], [torch.ones(())])
        return
    found = torch.autograd.grad([edge], [x, w], [torch.ones(())])
    expected = torch.autograd.grad(F.linear((x * 2).sin(), w).tanh().sum(), [x, w])
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpointing_of_torch(use_reentrant: bool) -> None:
    x, w = leaf(ROWS, 128), leaf(128, 128, seed=1)
    h = checkpoint(lambda h: F.linear(h.sin(), w), x * 2, use_reentrant=use_reentrant)
    edge = get_gradient_edge(h.mean().exp())
    del h
    sent(edge, w)
    torch.autograd.backward([edge], [torch.ones(())])
    expected = torch.autograd.grad(F.linear((x * 2).sin(), w).mean().exp(), [x, w])
    assert all(torch.equal(one.grad, other) for one, other in zip((x, w), expected, strict=True))


def test_double_backward() -> None:
    x = leaf(ROWS, 128)
    first = torch.autograd.grad(x.sin().square().sum(), [x], create_graph=True)[0]
    edge = get_gradient_edge(first.square().sum())
    expected = torch.autograd.grad(first.square().sum(), [x], retain_graph=True)[0]
    del first
    assert sent(edge, x)
    again = torch.autograd.grad([edge], [x], [torch.ones((), requires_grad=True)], create_graph=True)[0]
    assert torch.equal(again, expected)
    assert torch.autograd.grad(again.sum(), [x])[0].isfinite().all()


@pytest.mark.parametrize("device", DEVICES)
def test_halves_of_a_backward(device: str) -> None:
    inputs = [leaf(ROWS, 96, device=device), leaf(128, 96, device=device, seed=1), leaf(32, 128, device=device, seed=2)]
    x, w, v = inputs
    expected = torch.autograd.grad(net(*inputs), inputs)
    received = x.clone().detach().requires_grad_()
    edge = get_gradient_edge(net(received, w, v))
    blocks = sent(edge, w, v, received, device=device)
    refs = [_torch.StorageWeakRef(block.fetch()) for block in blocks.values()]
    for block in blocks.values():
        block.arrive()
    del blocks, block
    split = SplitBackward([edge], [torch.ones((), device=device)], [get_gradient_edge(received)])
    [found] = split.input_gradients()
    assert any(ref.expired() for ref in refs)  # the first half frees what the second does not need
    split.weight_gradients()
    assert torch.equal(found, expected[0])
    assert torch.equal(w.grad, expected[1])
    assert torch.equal(v.grad, expected[2])


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_the_host_does_not_wait() -> None:
    x, w = leaf(4096, 1024, device="cuda"), leaf(1024, 1024, device="cuda", seed=1)
    sent(get_gradient_edge(F.linear(x.exp(), w).sum()), w, device="cuda")  # pinned memory is allocated once
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.set_sync_debug_mode("error")
    try:
        edge = get_gradient_edge(F.linear(x.exp(), w).sum())
        full = torch.cuda.memory_allocated()
        [block] = sent(edge, w, device="cuda").values()
        assert torch.cuda.memory_allocated() - before < (full - before) / 2
        block.fetch()
        block.arrive()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    found = torch.autograd.grad([edge], [x], [torch.ones((), device="cuda")])[0]
    assert torch.equal(found, torch.autograd.grad(F.linear(x.exp(), w).sum(), [x])[0])
