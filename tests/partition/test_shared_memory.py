from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn
from torch.nn.utils import spectral_norm

from lightning_pipeline.partition.ownership import Ownership
from lightning_pipeline.partition.shared_memory import refuse_apart, tensors_that_share_memory, warn_of_aliases


def two_layers() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))


def ownership(stage: int = 0) -> Ownership:
    names = {f"{layer}.{kind}": (layer,) for layer in (0, 1) for kind in ("weight", "bias")}
    return Ownership(2, stage, names)


def test_tensors_on_the_same_memory_are_found_by_one_name_each() -> None:
    module = two_layers()
    assert tensors_that_share_memory(module) == []
    module[1].weight.data = module[0].weight.data.t()
    assert tensors_that_share_memory(module) == [["0.weight", "1.weight"]]
    torch.nn.utils.vector_to_parameters(torch.zeros(sum(p.numel() for p in module.parameters())), module.parameters())
    assert tensors_that_share_memory(module) == []  # parts of one memory
    module[1].weight.data = module[0].weight.data[:1].expand_as(module[1].weight)
    assert tensors_that_share_memory(module) == [["0.weight", "1.weight"]]


def test_what_is_tied_as_one_object_is_not_among_them() -> None:
    module = two_layers()
    module[1].weight = module[0].weight
    assert tensors_that_share_memory(module) == []


def test_they_have_to_be_on_the_same_stages() -> None:
    refuse_apart([["0.weight", "0.bias"]], ownership())
    with pytest.raises(ValueError, match=r"1\.weight shares its memory with 0\.weight.*tie the tensors as one object"):
        refuse_apart([["0.weight", "1.weight"]], ownership())


def test_attributes_on_memory_that_is_released_are_warned_of() -> None:
    module = two_layers()
    module.kept = {"head": module[1].weight.detach()[0]}  # type: ignore[assignment]
    with pytest.warns(UserWarning, match=r"kept shares its memory with 1\.weight.*clone"):
        warn_of_aliases(module, ownership())


def test_the_tensor_itself_clones_and_spectral_norms_are_not() -> None:
    module = nn.Sequential(*two_layers(), spectral_norm(nn.Linear(4, 4)))
    module.itself = [module[1].weight]  # type: ignore[assignment]
    module.cloned = module[1].weight.detach().clone()
    held = {**ownership().holders, "2.weight_orig": (1,), "2.bias": (1,)}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warn_of_aliases(module, Ownership(2, 0, held))
