"""Measures how long each position of a step takes on a device, and how fast the device is."""

from __future__ import annotations

import time
from collections.abc import Callable
from itertools import pairwise, zip_longest
from statistics import fmean
from typing import Any

import torch
from torch import Tensor

from lightning_pipeline.partition import tree
from lightning_pipeline.planning.observing import Step, gradients_apart, run_by_position
from lightning_pipeline.planning.profile import Profile
from lightning_pipeline.planning.tracing import DeviceSpeed

MAX_RUNS = 40
BUDGET_S = 1.0
"""Short runs are repeated up to so often, and for so long."""
MIN_RUNS = 7
LIMIT_S = 5.0
"""Longer ones at least so often, but for no longer than this."""

Times = tuple[list[float], list[float]]
"""Seconds of the forward and of the backward of each position."""


class Clock:
    """Marks points in the work of a device, and gives the times between them afterwards.

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

    def between(self, marks: list[Any]) -> list[float]:
        """Seconds from each mark to the next."""
        if self._module is None:
            times = marks
        else:
            self._module.synchronize()
            times = [marks[0].elapsed_time(mark) / 1e3 for mark in marks]
        return [max(0.0, later - earlier) for earlier, later in pairwise(times)]  # below zero where a step has threads


def time_step(step: Step, batch: Any, traced: Profile, device: torch.device) -> Profile:
    """A step's profile with measured times.

    They are means over runs that are neither the fastest nor the slowest; positions of equal structure share theirs.
    Means add up to what the runs take: the fastest times, or medians, of many short positions add up to less, so that
    modules of many parts would look fast.
    """
    runs: list[Times] = []
    began = time.perf_counter()
    tried = 0
    with gradients_apart(traced.root):
        while tried < 2 or (
            tried < MAX_RUNS
            and (time.perf_counter() - began) * (tried + 1) / tried < (LIMIT_S if tried < MIN_RUNS else BUDGET_S)
        ):
            tried += 1
            times = _timed_run(step, batch, traced, Clock(device))
            if times is not None:
                runs.append(times)
    if not runs:
        raise ValueError(
            f"{type(traced.root).__name__} cannot be cut automatically, as its step calls other modules each time that "
            f"it is measured: name the first module of each later stage in stage_config"
        )
    if len(runs) > 2:
        runs = runs[1:]  # the first one warms up
    runs.sort(key=lambda run: sum(run[0]) + sum(run[1]))
    usual = runs[len(runs) // 8 : len(runs) - len(runs) // 8]
    keys = _structures(traced)
    forward, backward = (
        _shared([fmean(times) for times in zip(*of_runs, strict=True)], keys) for of_runs in zip(*usual, strict=True)
    )
    return traced.timed(forward, backward)


def _timed_run(step: Step, batch: Any, traced: Profile, clock: Clock) -> Times | None:
    """None if the run calls other modules than the traced one."""
    names: list[str] = []
    marks: list[Any] = []
    reached: list[int] = []
    backward_marks: list[Any] = []

    def forward(batch: Any) -> Tensor | None:
        marks.append(clock.mark())
        loss = step(batch)
        marks.append(clock.mark())
        return loss

    def begin(name: str, arguments: Any) -> None:
        marks.append(clock.mark())
        names.append(name)

    def begin_backward(position: int) -> None:
        backward_marks.append(clock.mark())
        reached.append(position)

    own = tree.replace(batch, Tensor.clone)  # which the step may write into
    run_by_position(traced.root, forward, own, begin=begin, begin_backward=begin_backward)
    backward_marks.append(clock.mark())
    if names != [call.name for call in traced.calls]:
        return None
    backward = [0.0] * len(traced.positions)
    for position, seconds in zip(reached, clock.between(backward_marks), strict=True):
        backward[position] += seconds
    return clock.between(marks), backward


def _structures(traced: Profile) -> list[Any]:
    """A key for each position; positions of equal structure have equal ones."""
    modules = dict(traced.root.named_modules())
    keys: list[Any] = ["the step"]
    for call, following in zip_longest(traced.calls, traced.calls[1:]):
        shapes = tuple(tuple(p.shape) for p in modules[call.name].parameters())
        pattern = "".join("#" if part.isdigit() else f".{part}" for part in call.name.split("."))
        # What comes after a call, up to the next one, belongs to the modules around it.
        after = following and (following.callers == (*call.callers, call.name), len(following.callers))
        keys.append((pattern, shapes, call.inputs, after))
    return keys


def _shared(times: list[float], keys: list[Any]) -> list[float]:
    together: dict[Any, list[float]] = {}
    for key, seconds in zip(keys, times, strict=True):
        together.setdefault(key, []).append(seconds)
    means = {key: fmean(same) for key, same in together.items()}
    return [means[key] for key in keys]


def measured_speed(device: torch.device, dtype: torch.dtype) -> DeviceSpeed:
    """A short measurement of matrix products and additions on a device."""
    clock = Clock(device)
    size = 512 if device.type == "cpu" else 4096
    matrix = torch.rand(size, size, device=device).to(dtype)
    large = torch.rand(size * size * 8, device=device).to(dtype)
    small = torch.rand(8, device=device).to(dtype)

    def fastest(function: Callable[[], Any]) -> float:
        marks = [clock.mark()]
        for _ in range(6):
            function()
            marks.append(clock.mark())
        return max(min(clock.between(marks)[1:]), 1e-9)

    return DeviceSpeed(
        flops=2.0 * size**3 / fastest(lambda: matrix @ matrix),
        memory_bytes=3.0 * large.numel() * large.element_size() / fastest(lambda: large + large),
        launch=fastest(lambda: small + small),
    )
