"""Functions of torch that go through a whole module, in hooks: `torch.jit.trace`, `torch.export.export` and the like.

Every rank runs one on the module with copies of what other ranks hold in the places of that. What it makes, such as a
traced module or a file, has these copies.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_pipeline import _torch
from lightning_pipeline.hooks.first_rank_changes import refuse_change_alone
from lightning_pipeline.hooks.operands import is_partial
from lightning_pipeline.partition.kept_parameters import KeptParameter
from lightning_pipeline.partition.overrides import InPlaceOf, called_when_imported, overridden
from lightning_pipeline.partition.placeholder import Placeholder
from lightning_pipeline.partition.users_code import in_hook, users_line

if TYPE_CHECKING:
    from lightning_pipeline.hooks.owner_computes import OwnerComputes


@contextmanager
def whole_calls_seen(owner: OwnerComputes) -> Iterator[None]:
    """While entered, these functions see whole modules."""

    def seeing(plain: Callable[..., Any], name: str) -> Callable[..., Any]:
        def seen(*args: Any, **kwargs: Any) -> Any:
            if not in_hook.is_here():
                return plain(*args, **kwargs)
            with _made_whole(owner, name, args, kwargs) as (args, kwargs), owner.unseen():
                return plain(*args, **kwargs)

        return InPlaceOf(plain, seen)

    def see(module: Any) -> None:
        for name in _torch.TAKES_MODULES[module.__name__]:
            if (plain := getattr(module, name, None)) is not None:
                override(module, name, seeing(plain, name.lstrip("_")))

    with overridden() as override, called_when_imported(_torch.TAKES_MODULES, see):
        yield


def refuse_traced(name: str) -> None:
    """Refuse a call that comes from one of these functions, which has not been seen."""
    if torch.jit.is_tracing() or _torch.is_faking():
        raise NotImplementedError(
            f"{name} is traced or exported with what another stage holds ({users_line()}): give torch.jit.trace or "
            f"torch.export.export the module itself, or call them after trainer.fit, where every rank has the whole one"
        )


@contextmanager
def _made_whole(
    owner: OwnerComputes, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Iterator[tuple[tuple[Any, ...], dict[str, Any]]]:
    """While entered, the modules among a call's arguments have copies of what not every rank holds. Gives the
    arguments with copies of such tensors."""
    places: list[tuple[Any, str, Tensor]] = []
    leaves = _torch.tree_leaves((args, kwargs))
    for module in {id(m): m for leaf in leaves for root in _modules_of(leaf) for m in root.modules()}.values():
        for holder in (module._parameters, module._buffers, vars(module)):
            for key, tensor in holder.items():
                if isinstance(tensor, Tensor) and is_partial((tensor,)):
                    places.append((holder, key, tensor))
    given = [leaf for leaf in leaves if isinstance(leaf, Tensor) and is_partial((leaf,))]
    tensors = list({id(tensor): tensor for tensor in (*(tensor for _, _, tensor in places), *given)}.values())
    data = _data(owner, name, tensors)
    copies = {id(tensor): _copy_of(one, tensor) for tensor, one in zip(tensors, data, strict=True)}
    for holder, key, tensor in places:
        holder[key] = copies[id(tensor)]
    try:
        yield _torch.tree_map_only(Tensor, lambda tensor: copies.get(id(tensor), tensor), (args, kwargs))
    finally:
        for holder, key, tensor in places:
            if holder.get(key) is copies[id(tensor)]:
                holder[key] = tensor
    with _torch.DisableTorchFunction(), torch.no_grad():
        for tensor, one in zip(tensors, data, strict=True):
            if not torch.equal(one, copies[id(tensor)]):  # batch norms change their statistics when they are traced
                if in_hook.is_rank_known:
                    refuse_change_alone(name)
                if type(tensor) is not Placeholder:
                    tensor.copy_(copies[id(tensor)])


def _modules_of(value: Any) -> list[nn.Module]:
    """The modules that an argument is, or has: a method its own, a function those in its closure."""
    cells = getattr(value, "__closure__", None) or ()
    found = (value, getattr(value, "__self__", None), *(cell.cell_contents for cell in cells))
    return [one for one in found if isinstance(one, nn.Module)]


def _data(owner: OwnerComputes, name: str, tensors: list[Tensor]) -> list[Tensor]:
    """The data of tensors, on every rank. All ranks must call it."""
    if any(isinstance(tensor, (DTensor, KeptParameter)) for tensor in tensors):
        raise NotImplementedError(
            f"{name} takes a module in a hook, whose parameters ranks keep in slices ({users_line()}): call it after "
            f"trainer.fit, where every rank has the whole module"
        )
    return owner.whole(tensors, name) if tensors else []


def _copy_of(data: Tensor, tensor: Tensor) -> Tensor:
    with _torch.DisableTorchFunction(), torch.inference_mode(False), torch.no_grad():
        copy = data.clone()
        if isinstance(tensor, nn.Parameter):
            return nn.Parameter(copy, tensor.requires_grad)
        return copy.requires_grad_(tensor.requires_grad)
