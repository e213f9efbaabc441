"""Losses of micro-batches: where they are in what a step returns, what they come to, and whether one is a sum.

Autograd's record shows, as far as it goes, whether a loss is a sum over samples. To see that in numbers, a micro-batch
and its halves would have to run through all stages once more, with all that the user's step does besides; and the
losses of contrastive learning grow with the number of samples, too, though they are means. What autograd has recorded
costs a look at some nodes, on the stage that has the loss. It shows the usual sums: those of loss functions with
``reduction="sum"``, and of their values, squares or absolute values by ``.sum()``, alone or added up. Whatever divides
them, or weights them, may make them a mean, so such losses count as unknown.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import Node

from lightning_pipeline.partition.engine import backward_from_loss

from .._lightning import LightningModule, MisconfigurationException

_SUM = "sum"
_SCALED = "scaled"  # a sum times a constant, which may make it a mean
_NONE, _TOTAL = 0, 2  # reductions, as autograd has them

# Kinds of nodes by name, without "Backward" and its number.
_TERMS = {"Add", "Sub"}
_SAME = {"View", "UnsafeView", "ReshapeAlias", "Squeeze", "Unsqueeze", "ToCopy", "Clone", "Alias"}
_ELEMENTWISE = {"Pow", "Abs", "CtcLoss"}


class LossValueError(MisconfigurationException, ValueError):
    """A training step returned something without a loss; told in Lightning's words and ours."""


def backward_of(module: LightningModule) -> tuple[Callable[..., None], bool]:
    """What runs a backward from a loss, and whether it is Lightning's own and not the user's."""
    is_plain = type(module).backward is LightningModule.backward and "backward" not in vars(module)
    return (backward_from_loss if is_plain else module.backward), is_plain


def loss_in(result: Any, module: str) -> Tensor:
    """The loss in what a training step has returned.

    Args:
        module: its class's name, for the error.

    Raises:
        LossValueError: there is none in it.
    """
    loss = result
    if not isinstance(result, Tensor) and isinstance(result, Mapping):
        loss = result.get("loss")
    if isinstance(loss, Tensor) and loss.numel() == 1:
        return loss.reshape(()) if loss.dim() else loss
    what = type(result).__name__
    rule = "In automatic optimization, `training_step` must return a Tensor, a dict, or None"
    if isinstance(result, Mapping):
        what = f"{what} {list(result)}"
        rule = "In automatic_optimization, when `training_step` returns a dict, the 'loss' key needs to be present"
    elif isinstance(result, Tensor):
        what = f"a tensor of shape {list(result.shape)}"
    raise LossValueError(
        f"{rule}: {module}.training_step returned {what}, and a pipeline needs the loss of every micro-batch: return a "
        f"tensor with one element, or a dictionary with one under 'loss', or None to skip the batch"
    )


def mean_loss(losses: list[Tensor], sizes: list[int]) -> Tensor:
    """The mean of the micro-batches' losses, weighted by their samples (a 0-d tensor)."""
    stacked = torch.stack([loss.detach().reshape(()) for loss in losses])
    if len(set(sizes)) == 1:
        return stacked.sum() / len(losses)
    return (stacked * torch.tensor(sizes, dtype=stacked.dtype, device=stacked.device)).sum() / sum(sizes)


def is_sum_over_samples(loss: Tensor, num_samples: int) -> bool:
    """Whether the loss of a micro-batch is known to be a sum over its samples. False where it is not known."""
    if loss.grad_fn is None:
        return False
    kinds = {_kind(term, num_samples) for term in _terms(loss.grad_fn)}
    return _SUM in kinds and kinds <= {_SUM, _SCALED}


def _terms(node: Node) -> Iterator[Node]:
    """What is added up; constants are not recorded."""
    node = _without_views(node)
    if _name(node) not in _TERMS or getattr(node, "_saved_alpha", 1) != 1:
        yield node
        return
    for term in _inputs(node):
        yield from _terms(term)


def _kind(node: Node, num_samples: int) -> str | None:
    """`_SUM` or `_SCALED`; None for a mean, and for what is not known."""
    node = _without_views(node)
    name, inputs = _name(node), _inputs(node)
    if hasattr(node, "_saved_reduction"):
        return _SUM if _is_over_samples(node, _TOTAL, num_samples) else None
    if name == "Sum":
        return _SUM if _is_sum_of_losses(node, num_samples) else _SCALED
    if name in ("Mul", "Neg") and len(inputs) == 1:
        kind = _kind(inputs[0], num_samples)
        # By a number of torch's own, as label smoothing does: the user's are tensors to autograd, and another node.
        return kind if node.name() == "MulBackward1" or kind is None else _SCALED
    return None


def _is_sum_of_losses(node: Node, num_samples: int) -> bool:
    """Whether a sum's operands are losses by sample, or squares or absolute values."""
    while _name(node) == "Sum":
        node = _without_views(_inputs(node)[0])
    if hasattr(node, "_saved_reduction"):
        return _is_over_samples(node, _NONE, num_samples)
    return _name(node) in _ELEMENTWISE and _has_samples(node._input_metadata[0].shape, num_samples)


def _is_over_samples(node: Node, reduction: int, num_samples: int) -> bool:
    """Whether a loss function's node has this reduction, no weights, and rows that are samples."""
    function, number = node.next_functions[0]
    if node._saved_reduction != reduction or function is None or _has_weight(node):  # type: ignore[attr-defined]
        return False
    shape = function._input_metadata[number].shape
    if _name(node).startswith("NllLoss"):  # with classes, and tokens of a sample as rows of their own
        return len(shape) > 1 and shape[0] % num_samples == 0
    return _has_samples(shape, num_samples)


def _has_samples(shape: Sequence[int], num_samples: int) -> bool:
    """Whether the first dimension is that of samples: statistics of all of them, and weights, have another."""
    return len(shape) > 0 and shape[0] == num_samples > 1


def _has_weight(node: Node) -> bool:
    """Without unpacking it, for which a checkpoint would run again what is in it."""
    saved = getattr(node, "_raw_saved_weight", None)
    return saved is not None and saved.data is not None


def _without_views(node: Node) -> Node:
    while _name(node) in _SAME and len(_inputs(node)) == 1:
        node = _inputs(node)[0]
    return node


def _inputs(node: Node) -> list[Node]:
    return [function for function, _ in node.next_functions if function is not None]


def _name(node: Node) -> str:
    return node.name().partition("Backward")[0]
