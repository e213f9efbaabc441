"""What is cut along the sequence: rules give what the whole gives, and what cannot be cut is told."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_pipeline.partition import tree
from lightning_pipeline.partition.placeholder import TensorSpec
from lightning_pipeline.partition.stage_map import StageMap
from lightning_pipeline.recording.execution import run_event
from lightning_pipeline.recording.keyed_calls import KeyedCalls
from lightning_pipeline.recording.module_tensors import ModuleTensors
from lightning_pipeline.recording.program import Program
from lightning_pipeline.recording.recorder import Recorder
from lightning_pipeline.recording.recording import Recording
from lightning_pipeline.recording.sequence_cut import SequenceCut, cut_sequence
from lightning_pipeline.recording.sequence_rules import axes_of, resized

BATCH, LENGTH, WIDTH = 2, 8, 6
WEIGHT, SQUARE = torch.randn(5, WIDTH), torch.randn(WIDTH, WIDTH)
HALF = torch.arange(LENGTH)[None, :, None] % 3 == 0

# Calls on [BATCH, LENGTH, WIDTH], with the dimensions along which the result is cut.
CALLS: dict[str, tuple[Callable[..., Any], set[int]]] = {
    "mul": (lambda x: x * x, {0, 1, 2}),
    "broadcast": (lambda x: x + torch.ones(LENGTH, 1), {0, 1, 2}),
    "where": (lambda x: torch.where(HALF, x, 0.5), {0, 1, 2}),
    "masked_fill": (lambda x: x.masked_fill(HALF, 0.5), {0, 1, 2}),
    "gelu": (lambda x: F.gelu(x), {0, 1, 2}),
    "rsub": (lambda x: 1 - x, {0, 1, 2}),
    "to": (lambda x: x.to(torch.float64), {0, 1, 2}),
    "linear": (lambda x: F.linear(x, WEIGHT), {0, 1}),
    "layer_norm": (lambda x: F.layer_norm(x, (WIDTH,)), {0, 1}),
    "layer_norm_of_all": (lambda x: F.layer_norm(x, (LENGTH, WIDTH)), {0}),
    "rms_norm": (lambda x: F.rms_norm(x, (WIDTH,)), {0, 1}),
    "softmax": (lambda x: x.softmax(-1), {0, 1}),
    "softmax_of_positions": (lambda x: F.softmax(x, 1), {0, 2}),
    "mean": (lambda x: x.mean(-1, keepdim=True), {0, 1}),
    "sum": (lambda x: x.sum(1), {0, 1}),
    "mean_of_all": (lambda x: x.mean(), set()),
    "var": (lambda x: x.var(-1), {0, 1}),
    "cumsum": (lambda x: x.cumsum(1), {0, 2}),
    "norm": (lambda x: x.norm(2, -1), {0, 1}),
    "normalize": (lambda x: F.normalize(x, dim=-1), {0, 1}),
    "glu": (lambda x: F.glu(x), {0, 1}),
    "matmul": (lambda x: x @ SQUARE, {0, 1, 2}),
    "scores": (lambda x: x @ torch.ones(BATCH, WIDTH, LENGTH), {0, 1, 2}),
    "view": (lambda x: x.view(BATCH, LENGTH, 2, 3), {0, 1}),
    "merged": (lambda x: x.reshape(BATCH * LENGTH, WIDTH), {1}),
    "unflatten": (lambda x: x.unflatten(-1, (2, -1)), {0, 1}),
    "flatten": (lambda x: x.flatten(1), {0}),
    "bytes": (lambda x: x.view(torch.int32), set()),
    "unsqueeze": (lambda x: x.unsqueeze(1), {0, 2, 3}),
    "transpose": (lambda x: x.transpose(1, 2), {0, 1, 2}),
    "permute": (lambda x: x.permute(2, 0, 1), {0, 1, 2}),
    "mT": (lambda x: x.mT, {0, 1, 2}),
    "expand": (lambda x: x.expand(3, -1, -1, -1), {1, 2, 3}),
    "chunk": (lambda x: x.chunk(2, dim=-1), {0, 1}),
    "split": (lambda x: x.split([2, 4], -1), {0, 1}),
    "unbind": (lambda x: x.unbind(0), {0, 1}),
    "cat": (lambda x: torch.cat([x, torch.ones(BATCH, LENGTH, 1)], -1), {0, 1}),
    "cat_of_positions": (lambda x: torch.cat([x, torch.ones(BATCH, 1, WIDTH)], 1), {0, 2}),
    "cat_with_nothing": (lambda x: torch.cat([torch.tensor([]), x], 1), {0, 1, 2}),
    "stack": (lambda x: torch.stack([x, torch.ones(BATCH, LENGTH, WIDTH)], 1), {0, 2, 3}),
    "index": (lambda x: x[:, None, ..., 2:], {0, 2}),
    "first": (lambda x: x[0], {0, 1}),
    "shifted": (lambda x: x[:, 1:], {0, 2}),
    "chosen": (lambda x: x[:, [0, 2]], set()),
    "flip": (lambda x: x.flip(1), set()),
    "roll": (lambda x: x.roll(1, 1), set()),
    "dropout": (lambda x: F.dropout(x, 0.5), set()),
    "in_place": (lambda x: x.add_(1.0), set()),
}


def recorded(step: Callable[..., Any], *specs: TensorSpec) -> tuple[Program, list[Any]]:
    """The program of a step on tensors that only its stage has, and what it has taken along."""
    module = nn.Module()
    tensors = ModuleTensors(module, StageMap(1))
    recorder = Recorder(tensors, KeyedCalls(module, StageMap(1)), [0])
    data: Any = None
    recording = Recording(recorder, recorder.beginning("test", len(specs)), data, lambda number: None)
    places = [recording.placeholder_for(number, spec, "a tensor") for number, spec in enumerate(specs)]
    with recorder.patched(), recorder.installed(), recording.running():
        step(*places)
    return Program(recording.event, specs), recording.captured


@pytest.mark.parametrize("name", CALLS)
def test_parts_give_parts(name: str) -> None:
    call, dims = CALLS[name]
    x = torch.randn(BATCH, LENGTH, WIDTH)
    program, captured = recorded(call, TensorSpec.of(x))
    event = program.events[-1]
    assert set(axes_of(event)) >= dims
    operands = [
        x if value == 0 else captured[event.first_captured + event.matcher.captured_tensors[slot]]
        for slot, value in enumerate(event.inputs)
    ]
    whole = tree.leaves(run_event(event, operands, captured, lambda number: None)) if dims else []
    for dim, slots in axes_of(event).items():
        if not slots or whole[0].shape[dim] % 2:
            continue
        found = []
        for part in range(2):
            own = [one.chunk(2, slots[slot])[part] if slot in slots else one for slot, one in enumerate(operands)]
            function = resized(event)
            if function is not None:
                sizes = [*whole[0].shape]
                sizes[dim] //= 2
                found.append([function(own[0], tuple(sizes))])
            else:
                found.append(tree.leaves(run_event(event, own, captured, lambda number: None)))
        for expected, *parts in zip(whole, *found, strict=True):
            torch.testing.assert_close(torch.cat(parts, dim), expected)
    if not dims:
        assert not any(axes_of(event).values())


class Ranks:
    size = 2

    def _plain(self, *args: Any, **kwargs: Any) -> Tensor:
        raise AssertionError("nothing runs")

    part = join = attention = dropout = _plain


def cut_of(step: Callable[..., Any], length: int = LENGTH, *, training: bool = True) -> SequenceCut | None:
    x = torch.empty(BATCH, 1, length, WIDTH)
    program, _ = recorded(step, TensorSpec.of(x))
    return cut_sequence(program, Ranks(), training=training)


def attend(x: Tensor, **options: Any) -> Tensor:
    return F.scaled_dot_product_attention(x, x * 2, x * 3, **options)


def test_what_mixes_positions_gets_the_whole() -> None:
    cut = cut_of(lambda x: attend(attend((x + 1).flip(2) * 2, is_causal=True).roll(1, 2), is_causal=True).sum())
    assert cut is not None
    assert [event.name for event in cut.joined] == ["roll"]
    joins = [slot for slot, (how, _) in cut.taken.items() if how.__name__ == "_plain"]
    assert len(joins) >= 4  # parts for the first, the second's three, and the joins of roll and sum


REFUSED: dict[str, tuple[Callable[..., Any], str]] = {
    "by hand": (lambda x: (x @ x.mT).softmax(-1) @ x, "which the training step does not call"),
    "masked": (lambda x: attend(x, attn_mask=torch.ones(LENGTH, LENGTH, dtype=torch.bool)), "it has an attn_mask"),
    "dropping": (lambda x: attend(x, dropout_p=0.1), "set dropout_p"),
    "flat": (lambda x: attend(x[0]), "its inputs have 3 dimensions"),
    "short keys": (lambda x: F.scaled_dot_product_attention(x, x[:, :, 2:], x[:, :, 2:]), "to be of one length"),
    "in place": (lambda x: attend(x + 1).add_(1.0), "write x = x + y instead"),
    "in place into the whole": (lambda x: (attend(x + 1), x.add_(1.0)), "write x = x + y instead"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_cut_is_told(name: str) -> None:
    step, message = REFUSED[name]
    with pytest.raises(NotImplementedError, match=re.escape(message)):
        cut_of(step)
    if "in place" not in name:
        assert cut_of(step, training=False) is None  # each rank runs the whole, which is right


def test_lengths_that_do_not_divide() -> None:
    with pytest.raises(NotImplementedError, match="its 10 positions are not a multiple of 4"):
        cut_of(attend, 10)
