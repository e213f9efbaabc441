"""Tensors that the nodes of an autograd graph have saved for backward."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from typing import Any

from torch import Tensor
from torch.autograd.graph import Node

from lightning_pipeline.partition.recomputed import Place


def let_go(nodes: Iterable[Node]) -> None:
    """Free what `nodes` have saved; they cannot run again."""
    for node in nodes:
        for name in _names(type(node)):
            saved = getattr(node, name)
            for one in saved if isinstance(saved, (list, tuple)) else (saved,):
                _let_go(one)


def _let_go(saved: Any) -> None:
    packed = getattr(saved, "data", None)
    if isinstance(packed, Place):
        packed.let_go()
    elif isinstance(packed, Tensor) and saved.unpack_hook is None:  # one with hooks of the user's stays
        saved.register_hooks(_nothing, _gone)


@cache
def _names(kind: type[Node]) -> tuple[str, ...]:
    return tuple(name for name in dir(kind) if name.startswith("_raw_saved_"))


def _nothing(_: Tensor) -> None:
    return None


def _gone(_: None) -> Tensor:
    raise RuntimeError("trying to run backward through the same graph a second time, after a part of it was freed")
