"""Checks on every rank that a checkpoint can be resumed from, before anything is changed."""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from lightning_pipeline.partition.ownership import absent_state_expected
from lightning_pipeline.runtime.failure import waiting_for
from lightning_pipeline.schedules.validation import shown

from .._lightning import LightningModule
from .optimizer_layout import OptimizerLayout
from .state import load_module_state
from .stored_tensors import StoredTensor
from .torch_files import CheckpointError, few

T = TypeVar("T")
OTHER_SHAPES = "of other shapes"


def with_one_outcome(action: Callable[[], T]) -> T:
    """What `action` returns; if it fails on any rank, it fails on all. Every rank must call it.

    For what can fail on some ranks only, such as reading a file of which each node has a copy.

    Raises:
        CheckpointError: names the rank on which it failed. That rank raises the error itself.
    """
    failure: Exception | None = None
    try:
        result = action()
    except Exception as error:
        failure = error
    if dist.is_initialized() and dist.get_world_size() > 1:
        failures: list[str] = [""] * dist.get_world_size()
        with waiting_for("whether other ranks could load the checkpoint"):
            dist.all_gather_object(failures, f"{type(failure).__name__}: {failure}" if failure is not None else "")
        if failure is None and any(failures):
            rank, message = next((rank, message) for rank, message in enumerate(failures) if message)
            raise CheckpointError(f"rank {rank} cannot load the checkpoint: {message}")
    if failure is not None:
        raise failure
    return result


def check_format(checkpoint: Any, path: str | Path) -> None:
    """Raise CheckpointError if the content of a file is not what a Trainer saves."""
    found = f"a {type(checkpoint).__name__}"
    if isinstance(checkpoint, Mapping):
        if {"state_dict", "pytorch-lightning_version"} <= checkpoint.keys():
            state = checkpoint["state_dict"]
            if isinstance(state, Mapping) and all(isinstance(key, str) for key in state):
                return
            raise CheckpointError(f"{path} is damaged, or no checkpoint of a Trainer: its state_dict has no names")
        names = [str(key) for key in checkpoint]
        if checkpoint and all(isinstance(value, Tensor) for value in checkpoint.values()):
            raise CheckpointError(
                f"{path} holds bare weights ({few(names)}), no checkpoint of a Trainer: load them with "
                "module.load_state_dict(torch.load(path)) before the Trainer starts, and give it no ckpt_path"
            )
        found = f"a dict with the keys {few(names)}" if names else "an empty dict"
    raise CheckpointError(f"{path} holds {found}, no checkpoint of a Trainer")


def check_optimizer_states(states: Any, name: str) -> None:
    """Raise CheckpointError if a checkpoint's "optimizer_states" are no state dicts, as in a damaged file."""
    if not isinstance(states, list) or not all(map(_is_optimizer_state, states)):
        raise CheckpointError(
            f"{name} is damaged, or none of a Trainer's: its optimizer_states are no state dicts with `state` and "
            f"`param_groups`, by which stages share them out. An optimizer that wraps another one has to give these, "
            f"and may add keys of its own"
        )


def _is_optimizer_state(state: Any) -> bool:
    if state == {}:  # of Lightning's optimizer for a configure_optimizers that gives None
        return True
    if not isinstance(state, Mapping) or not isinstance(state.get("state"), Mapping):
        return False
    groups = state.get("param_groups")
    if not isinstance(groups, list) or not all(isinstance(group, Mapping) for group in groups):
        return False
    ids = [group.get("params") for group in groups]
    if not all(isinstance(params, list) and all(isinstance(number, int) for number in params) for params in ids):
        return False
    count = sum(map(len, ids))
    return all(
        isinstance(values, Mapping) and 0 <= number < count
        for number, values in state["state"].items()
        if isinstance(number, int)
    )


def check_checkpoint(
    checkpoint: Mapping[str, Any],
    module: LightningModule,
    *,
    strict: bool,
    goes_on: bool,
    path: str | Path | None,
) -> None:
    """Raise if loading a checkpoint's weights would fail half-way. Changes nothing.

    Shapes are those of the whole model, known on every stage, so the outcome is the same on all.

    Args:
        strict: the module and the checkpoint have to have the same names.
        goes_on: training is resumed, and not only weights are loaded.

    Raises:
        CheckpointError: names some of the entries that do not fit, with both values, and the way out.
    """
    name = "the checkpoint" if path is None else str(path)
    _check_weights(checkpoint, module, strict, name)
    if goes_on and not {"optimizer_states", "lr_schedulers"} <= checkpoint.keys():
        raise CheckpointError(
            f"{name} holds weights only (save_weights_only=True), so that fit cannot go on from it: start a new run "
            f"with trainer.fit({type(module).__name__}.load_from_checkpoint(path)), without ckpt_path"
        )


def _check_weights(checkpoint: Mapping[str, Any], module: LightningModule, strict: bool, name: str) -> None:
    """Do all that torch and the user's hooks do to load weights, except for the copies."""
    saved = checkpoint["state_dict"]
    # Entries that are no tensors go to set_extra_state, which may change them.
    state = OrderedDict((key, v if isinstance(v, Tensor) else copy.deepcopy(v)) for key, v in saved.items())
    if hasattr(saved, "_metadata"):
        state._metadata = saved._metadata  # type: ignore[attr-defined]
    try:
        with _WithoutCopies(module):
            load_module_state(module, state, strict=strict)
    except RuntimeError as error:
        with absent_state_expected():
            differences = _differences(saved, module.state_dict(), strict)
        found = [f"{len(keys)} of its entries are {what}: {few(keys)}" for what, keys in differences.items() if keys]
        way_out = "make the module with the arguments that the checkpoint was made with"
        if arguments := _differing_arguments(checkpoint, module):
            way_out += f" ({arguments})"
        if strict and not differences[OTHER_SHAPES]:
            way_out += ", or set its strict_loading to False to load what both have"
        raise CheckpointError(
            f"{name} is of another model than this {type(module).__name__}: {'; '.join(found) or error}. Nothing was "
            f"loaded: {way_out}"
        ) from error


class _WithoutCopies(TorchFunctionMode):
    """Skips copies into a module's parameters and buffers."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self._kept = {id(tensor) for tensor in chain(module.parameters(), module.buffers())}

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is Tensor.copy_ and id(args[0]) in self._kept:
            return args[0]
        return function(*args, **(kwargs or {}))


def _differences(saved: Mapping[str, Any], own: Mapping[str, Any], strict: bool) -> dict[str, list[str]]:
    """The entries of a checkpoint that do not fit a module, by what is wrong with them."""
    shapes = [
        f"{key} {tuple(saved[key].shape)} in the file, {tuple(value.shape)} in the module"
        for key, value in own.items()
        if isinstance(value, Tensor) and isinstance(saved.get(key), Tensor) and saved[key].shape != value.shape
    ]
    return {
        OTHER_SHAPES: shapes,
        "missing": [key for key in own if strict and key not in saved],
        "unknown to the module": [key for key in saved if strict and key not in own],
    }


def _differing_arguments(checkpoint: Mapping[str, Any], module: LightningModule) -> str:
    """The hyperparameters of which a checkpoint has other values than a module."""
    saved = checkpoint.get(LightningModule.CHECKPOINT_HYPER_PARAMS_KEY) or {}
    plain = (bool, int, float, str, type(None))
    return ", ".join(
        f"{key}={shown(saved[key])} instead of {shown(value)}"
        for key, value in module.hparams.items()
        if key in saved and isinstance(value, plain) and isinstance(saved[key], plain) and saved[key] != value
    )


def check_optimizers(
    checkpoint: Mapping[str, Any],
    module: LightningModule,
    layouts: Sequence[OptimizerLayout],
    *,
    path: str | Path | None,
) -> None:
    """Raise if loading a checkpoint's states of optimizers would fail half-way. Changes nothing.

    Args:
        layouts: the optimizers that load the states, with the groups that callbacks have added.
    """
    name = "the checkpoint" if path is None else str(path)
    states = checkpoint["optimizer_states"]
    if states == []:  # on_load_checkpoint has emptied it, for optimizers that begin anew, as in Lightning
        return
    way_out = "resume with the configure_optimizers that wrote it, or load the weights only"
    if isinstance(states, list) and len(states) != len(layouts):
        raise CheckpointError(
            f"{name} has states of {len(states)} optimizers, and configure_optimizers gave {len(layouts)}: {way_out}"
        )
    check_optimizer_states(states, name)
    shapes = {key: tuple(parameter.shape) for key, parameter in module.named_parameters()}
    for layout, state in zip(layouts, states, strict=True):
        if problem := _problem_of_state(layout, state, shapes):
            raise CheckpointError(f"the optimizer state in {name} {problem}: {way_out}")


def _problem_of_state(layout: OptimizerLayout, state: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]) -> str:
    """Why an optimizer cannot take a state; "" if it can."""
    optimizer = type(layout.optimizer)
    saved = [group["params"] for group in state.get("param_groups", [])]
    saved_sizes, sizes = [len(ids) for ids in saved], [len(names) for names in layout.groups]
    if saved_sizes != sizes:
        return (
            f"has {len(saved_sizes)} groups with {saved_sizes} parameters, and {optimizer.__name__} has {len(sizes)} "
            f"with {sizes}"
        )
    strangers = [
        f"that of {stranger} where {name} is"
        for name, number in zip(layout.names, chain.from_iterable(saved), strict=True)
        if (stranger := _name_in_folder(state["state"].get(number, {}))) != name and stranger in layout.names
    ]
    if strangers:
        return f"is in another order ({few(strangers)})"
    is_torchs = optimizer.__module__.startswith("torch.optim") and optimizer is not torch.optim.Adafactor
    if layout.keeps_all or not is_torchs:
        return ""  # its state may have other shapes than its parameters
    others = [
        f"{key} of {name} is {tuple(value.shape)} there, and the parameter is {shapes[name]}"
        for name, number in zip(layout.names, chain.from_iterable(saved), strict=True)
        for key, value in state["state"].get(number, {}).items()
        if isinstance(value, Tensor) and value.dim() > 0 and tuple(value.shape) != shapes[name]
    ]
    return f"has other shapes ({few(others)})" if others else ""


def _name_in_folder(state: Mapping[str, Any]) -> str:
    """The parameter whose state this is, from the names in a checkpoint folder; "" if they do not tell.

    By positions alone, parameters could silently get each other's state.
    """
    for key, value in state.items():
        if isinstance(value, StoredTensor):
            return value.name_in_files.partition(".state.")[2].removesuffix(f".{key}")
    return ""
