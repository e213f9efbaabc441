"""Gradients between the schedule, which makes them, and Lightning, which zeroes and then expects them."""

from __future__ import annotations

from collections.abc import Container, Iterable

from torch import Tensor, nn


class GradientHold:
    """Keeps a step's gradients out of reach of the `zero_grad` that Lightning calls after `training_step`.

    On the first batch of an accumulation window the gradients found are those of the last window; they are put aside
    and come back for Lightning to zero, and `publish` adds the new ones. Those that nobody would see are let go of
    instead, or a step would take the memory of two. On later batches autograd goes on adding to what is there, in the
    order in which one process would.
    """

    def __init__(self) -> None:
        self._parameters: list[nn.Parameter] = []
        self._aside: list[Tensor | None] | None = None
        self._held: list[Tensor | None] = []

    def begin(self, parameters: Iterable[nn.Parameter], *, first: bool, unseen: Container[nn.Parameter] = ()) -> None:
        """Before the schedule.

        Args:
            first: this batch begins an accumulation window.
            unseen: those whose gradients of the last window nobody needs.
        """
        self._parameters = [parameter for parameter in parameters if parameter.requires_grad]
        self._held = []
        self._aside = None
        if first:
            self._aside = [None if parameter in unseen else parameter.grad for parameter in self._parameters]
            for parameter in self._parameters:
                parameter.grad = None

    def end(self) -> None:
        """After the schedule."""
        if self._aside is None:
            return
        self._held = [parameter.grad for parameter in self._parameters]
        for parameter, gradient in zip(self._parameters, self._aside, strict=True):
            parameter.grad = gradient
        self._aside = None

    def publish(self) -> None:
        """When Lightning asks for backward: the gradients appear in `.grad`."""
        for parameter, gradient in zip(self._parameters, self._held, strict=False):
            if gradient is not None:
                parameter.grad = gradient if parameter.grad is None else parameter.grad.add_(gradient)
        self._held = []
