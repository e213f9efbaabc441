"""Torch's transformer layers, which compute otherwise where nobody looks on.

In evaluation `nn.TransformerEncoder`, its layers and `nn.MultiheadAttention` take a fused path: other bits, and zeros
where there is padding, which the encoder leaves out by making nested tensors. They do not take it where
`has_torch_function` says that somebody wants to see each operation. Our modes want to see what one process computes:

    nested tensor                    on stages
    -------------                    ---------
    _nested_tensor_from_mask         the padded tensor with zeros where there is padding; its mask is remembered
    _transformer_encoder_layer_fwd   makes a nested tensor of it, and pads what comes of that: one function
    to_padded_tensor                 the padded tensor

To pad and to unpad copies elements, so the bits are those of one process. In inference mode these functions call others
below autograd, which for some strides have other last bits. Lightning evaluates under `no_grad` instead over Gloo, so
what one process would run in inference mode runs below autograd here.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import handle_torch_function
from torch.utils.weak import WeakTensorKeyDictionary

from lightning_pipeline import _torch
from lightning_pipeline.partition.overrides import overridden
from lightning_pipeline.partition.placeholder import Placeholder

_PACKAGE = __name__.partition(".")[0]
_from_mask = _torch.nested_tensor_from_mask
_layer = _torch.transformer_encoder_layer
_attention = _torch.native_multi_head_attention


_replaces_inference_mode: list[Callable[[], bool]] = []


@contextmanager
def fast_paths_open(replaces_inference_mode: Callable[[], bool]) -> Iterator[None]:
    """While entered, torch's layers take no notice of our modes and placeholders; higher-order operators do.

    Args:
        replaces_inference_mode: tells whether gradients are disabled where one process would be in inference mode.
    """
    plain = torch.overrides.has_torch_function

    def has_torch_function(arguments: Any) -> bool:
        return plain(arguments) and not (
            sys._getframe(1).f_code is not _torch.HigherOrderOperator.__call__.__code__
            and all(type(one).__module__.startswith(_PACKAGE) for one in _torch.function_modes())
            and all(type(one) in (Tensor, nn.Parameter, Placeholder) for one in arguments if isinstance(one, Tensor))
        )

    with overridden() as override:
        override(torch.overrides, "has_torch_function", has_torch_function)
        _replaces_inference_mode.append(replaces_inference_mode)
        try:
            yield
        finally:
            _replaces_inference_mode.remove(replaces_inference_mode)


@contextmanager
def nested_tensors_padded() -> Iterator[None]:
    """While entered, padded tensors stand for the nested ones of `nn.TransformerEncoder`."""
    kept: Any = WeakTensorKeyDictionary()  # which elements of a padded tensor are there
    aligned, padded = _torch.is_nested_mask_left_aligned, Tensor.to_padded_tensor

    def from_mask(tensor: Tensor, mask: Tensor, mask_check: bool = True) -> Tensor:
        if not _is_seen():
            return _from_mask(tensor, mask, mask_check)
        made = tensor.masked_fill(mask.logical_not().unsqueeze(-1), 0.0)
        kept[made] = mask
        return made

    def left_aligned(tensor: Tensor, mask: Tensor) -> bool:
        if not _is_seen():
            return aligned(tensor, mask)
        return bool((mask[:, 1:] <= mask[:, :-1]).all())

    def layer(tensor: Tensor, *others: Any, **named: Any) -> Tensor:
        mask = kept.get(tensor)
        if mask is None and _is_seen():
            return handle_torch_function(layer_below, (tensor,), tensor, *others, **named)
        if mask is None:
            return layer_below(tensor, *others, **named)
        made = handle_torch_function(layer_on_nested, (tensor, mask), tensor, mask, *others, **named)
        kept[made] = mask
        return made

    def attention_seen(*arguments: Any) -> tuple[Tensor, Tensor | None]:
        if not _is_seen():
            with _below_autograd():
                return _attention(*arguments)
        tensors = [one for one in arguments if isinstance(one, Tensor)]
        return handle_torch_function(attention, tensors, *arguments)

    def to_padded_tensor(tensor: Tensor, *others: Any, **named: Any) -> Tensor:
        return tensor if tensor in kept else padded(tensor, *others, **named)

    with overridden() as override:
        override(torch, "_nested_tensor_from_mask", from_mask)
        override(torch, "_nested_tensor_from_mask_left_aligned", left_aligned)
        override(torch, "_transformer_encoder_layer_fwd", layer)
        override(torch, "_native_multi_head_attention", attention_seen)
        override(Tensor, "to_padded_tensor", to_padded_tensor)
        yield


def layer_on_nested(tensor: Tensor, mask: Tensor, *others: Any, **named: Any) -> Tensor:
    """A transformer layer on the elements of a padded tensor that `mask` keeps."""
    if type(tensor) is not Tensor:  # a fake one, of which only the spec is asked for
        return _layer(tensor, *others, **named)
    nested = _from_mask(tensor, mask, mask_check=False)
    return layer_below(nested, *others, **named).to_padded_tensor(0.0, tensor.size())


def layer_below(tensor: Tensor, *others: Any, **named: Any) -> Tensor:
    """A transformer layer, below autograd where one process is in inference mode."""
    with _below_autograd():
        return _layer(tensor, *others, **named)


def attention(*arguments: Any) -> tuple[Tensor, Tensor | None]:
    """`nn.MultiheadAttention`. Weights that nobody needs are none: fake tensors would have some."""
    with _below_autograd():
        output, weights = _attention(*arguments)
    return output, weights if arguments[10] else None


def _below_autograd() -> AbstractContextManager[Any]:
    return _torch.below_autograd() if any(replaces() for replaces in _replaces_inference_mode) else nullcontext()


def _is_seen() -> bool:
    return bool(_torch.num_function_modes())
