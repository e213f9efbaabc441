"""Measures how long the positions of a step take on a device."""

from __future__ import annotations

import time
from collections.abc import Callable
from itertools import pairwise
from statistics import fmean
from typing import Any

import torch
from torch import Tensor, nn

from lightning_pipeline.partition import tree
from lightning_pipeline.planning.observing import Step, called_through, gradients_apart, run_backward, without_reentrant
from lightning_pipeline.planning.trace import DeviceSpeed, Trace

MAX_RUNS = 40
BUDGET_S = 1.0
"""Short runs are repeated up to so often, and for so long."""
MIN_RUNS = 7
LIMIT_S = 5.0
"""Longer ones at least so often, but for no longer than this."""


class Clock:
    """Marks points in the work of a device, and tells the times between them afterwards.

    On the CPU, where torch has one thread, it is the time that this thread has had: what else the machine does then
    does not count.
    """

    def __init__(self, device: torch.device) -> None:
        self._module = None if device.type == "cpu" else torch.get_device_module(device)
        self._now = time.thread_time if torch.get_num_threads() == 1 else time.perf_counter

    def mark(self) -> Any:
        if self._module is None:
            return self._now()
        event = self._module.Event(enable_timing=True)
        event.record()
        return event

    def seconds(self, marks: list[Any]) -> list[float]:
        """The time of each mark since the first."""
        if self._module is None:
            return [mark - marks[0] for mark in marks]
        self._module.synchronize()
        return [marks[0].elapsed_time(mark) / 1e3 for mark in marks]


def time_step(
    root: nn.Module, step: Step, batch: Any, trace: Trace, device: torch.device
) -> tuple[list[float], list[float]]:
    """Seconds of the forward and of the backward of each position of `trace`, which another run has given.

    They are means over runs that are neither the fastest nor the slowest; positions of equal structure share theirs.
    Means add up to what the runs take: the fastest times, or medians, of many short positions add up to less, so that
    modules of many parts would look fast.

    Raises:
        ValueError: no run called the modules that the trace has.
    """
    runs: list[tuple[list[float], list[float]]] = []
    began = time.perf_counter()
    tried = 0
    with gradients_apart(root):
        while tried < 2 or (
            tried < MAX_RUNS
            and (time.perf_counter() - began) * (tried + 1) / tried < (LIMIT_S if tried < MIN_RUNS else BUDGET_S)
        ):
            tried += 1
            found = _timed_run(root, step, batch, trace, Clock(device))
            if found is not None:
                runs.append(found)
    if not runs:
        raise ValueError(
            f"{type(root).__name__} cannot be cut automatically, as its step calls other modules each time that it is "
            f"measured: name the first module of each later stage in stage_config"
        )
    if len(runs) > 2:
        runs = runs[1:]  # the first one warms up
    runs.sort(key=lambda run: sum(run[0]) + sum(run[1]))
    usual = runs[len(runs) // 8 : len(runs) - len(runs) // 8]
    alike = _alike(root, trace)
    means = [[fmean(times) for times in zip(*(run[way] for run in usual), strict=True)] for way in (0, 1)]
    return _shared(means[0], alike), _shared(means[1], alike)


def _timed_run(
    root: nn.Module, step: Step, batch: Any, trace: Trace, clock: Clock
) -> tuple[list[float], list[float]] | None:
    names: list[str] = []
    batch = tree.replace(batch, Tensor.clone)  # which the step may write into
    sequence = [torch.autograd._get_sequence_nr()]
    is_forward = True

    def call(name: str, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        if is_forward:
            marks.append(clock.mark())
            names.append(name)
            sequence.append(torch.autograd._get_sequence_nr())
        return forward(*args, **kwargs)

    with called_through(root, call), without_reentrant():
        marks = [clock.mark()]
        loss = step(batch)
        marks.append(clock.mark())
        is_forward = False
        reached: list[int] = []
        back: list[Any] = []

        def reach(position: int) -> None:
            back.append(clock.mark())
            reached.append(position)

        run_backward(loss, sequence, reach)
        back.append(clock.mark())
    if names != trace.names:
        return None
    forward = _differences(clock.seconds(marks))
    backward = [0.0] * trace.num_positions
    for position, seconds in zip(reached, _differences(clock.seconds(back)), strict=True):
        backward[position] += seconds
    return forward, backward


def _differences(times: list[float]) -> list[float]:
    return [max(0.0, later - earlier) for earlier, later in pairwise(times)]  # below zero where a step has threads


def _alike(root: nn.Module, trace: Trace) -> list[Any]:
    """A key for each position; positions of equal structure have equal ones."""
    modules = dict(root.named_modules())
    keys: list[Any] = [("the step", 0)]
    for index, call in enumerate(trace.calls):
        following = trace.calls[index + 1] if index + 1 < len(trace.calls) else None
        shapes = tuple(tuple(p.shape) for p in modules[call.name].parameters())
        pattern = "".join("#" if part.isdigit() else f".{part}" for part in call.name.split("."))
        # What comes after it, up to the next call, is of the modules around.
        after = following and (following.callers == (*call.callers, call.name), len(following.callers))
        keys.append((pattern, shapes, call.inputs, after))
    return keys


def _shared(times: list[float], keys: list[Any]) -> list[float]:
    together: dict[Any, list[float]] = {}
    for key, seconds in zip(keys, times, strict=True):
        together.setdefault(key, []).append(seconds)
    return [fmean(together[key]) for key in keys]


def measured_speed(device: torch.device, dtype: torch.dtype) -> DeviceSpeed:
    """A short measurement of matrix products and additions on a device."""
    clock = Clock(device)
    size = 512 if device.type == "cpu" else 4096
    one = torch.rand(size, size, device=device).to(dtype)
    many = torch.rand(size * size * 8, device=device).to(dtype)
    small = torch.rand(8, device=device).to(dtype)

    def fastest(function: Any) -> float:
        marks = [clock.mark()]
        for _ in range(6):
            function()
            marks.append(clock.mark())
        times = clock.seconds(marks)
        return max(min(b - a for a, b in pairwise(times[1:])), 1e-9)

    return DeviceSpeed(
        flops=2.0 * size**3 / fastest(lambda: one @ one),
        memory_bytes=3.0 * many.numel() * many.element_size() / fastest(lambda: many + many),
        launch=fastest(lambda: small + small),
    )
