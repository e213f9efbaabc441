"""Flags of the process that a step sets: ``with sdpa_kernel(SDPBackend.MATH)``, or the default dtype.

They would be others when the stage comes to run the calls. So a step that sets them sets its recording's alone, and
each of its calls takes them along.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from lightning_pipeline import _torch
from lightning_pipeline.partition.overrides import overridden
from lightning_pipeline.partition.torch_functions import FunctionKind, function_name, kind_of, same_kind
from lightning_pipeline.partition.users_code import users_line

if TYPE_CHECKING:
    from lightning_pipeline.recording.recording import Recording

_OF_ATTENTION = {
    f"_set_sdp_use_{name}": (f"_get_{name}_sdp_enabled",)
    for name in ("flash", "mem_efficient", "math", "cudnn", "overrideable")
} | {"_set_sdp_priority_order": ("_get_sdp_priority_order",)}
_FLAGS = _OF_ATTENTION | {
    "_set_default_dtype": ("get_default_dtype",),
    "_set_deterministic_algorithms": ("_get_deterministic_algorithms", "_get_deterministic_algorithms_warn_only"),
    **{
        f"_set_{name}": (f"_get_{name}",)
        for name in ("mkldnn_enabled", "cudnn_enabled", "cudnn_benchmark", "cudnn_deterministic")
    },
}
"""How torch's flags are set, and asked for."""
_PLAIN: dict[str, Callable[..., Any]] = {
    name: getattr(_torch.PROCESS_FLAGS, name) for setter, getters in _FLAGS.items() for name in (setter, *getters)
}
_ATTENDING = frozenset(
    (
        *("scaled_dot_product_attention", "multi_head_attention_forward", "_native_multi_head_attention", "attention"),
        *("_transformer_encoder_layer_fwd", "layer_on_nested"),
    )
)
_COMPUTING = (FunctionKind.COMPUTES, FunctionKind.DRAWS, FunctionKind.WRITES)

Flags = tuple[tuple[Any, ...], ...]


def process_flags() -> Flags:
    """Those that are set for the process: for each setter, what its getters give."""
    found = ([_PLAIN[getter]() for getter in getters] for getters in _FLAGS.values())
    return tuple(tuple(tuple(one) if isinstance(one, list) else one for one in values) for values in found)


@contextmanager
def flags_of_steps(running: Callable[[], Recording | None]) -> Iterator[None]:
    """While entered, a step sets the flags of its recording."""

    def setter(place: int, name: str) -> Callable[..., None]:
        def set_flag(value: Any, **options: Any) -> None:
            recording = running()
            if recording is None:
                _PLAIN[name](value, **options)
                return
            flags = list(recording.flags or process_flags())
            value = tuple(value) if isinstance(value, list) else value
            flags[place] = (value, options.get("warn_only", False))[: len(flags[place])]
            recording.choose_flags(tuple(flags))

        return set_flag

    def getter(place: int, index: int, name: str) -> Callable[[], Any]:
        def get_flag() -> Any:
            recording = running()
            if recording is None or recording.flags is None:
                return _PLAIN[name]()
            value = recording.flags[place][index]
            return list(value) if isinstance(value, tuple) else value

        return get_flag

    def set_flush_denormal(arg: bool) -> bool:
        if running() is not None:
            raise NotImplementedError(
                f"torch.set_flush_denormal in a step would come before what its stages compute ({users_line()}): call "
                f"it before the run or in on_fit_start"
            )
        return flush(arg)

    flush = torch.set_flush_denormal
    with overridden() as override:
        for place, (setting, asking) in enumerate(_FLAGS.items()):
            override(_torch.PROCESS_FLAGS, setting, setter(place, setting))
            for index, name in enumerate(asking):
                override(_torch.PROCESS_FLAGS, name, getter(place, index, name))
        override(torch, "get_default_dtype", _torch.PROCESS_FLAGS.get_default_dtype)
        override(torch, "set_flush_denormal", set_flush_denormal)
        yield


def with_flags(function: Any, flags: Flags | None) -> Any:
    """The function itself; one that sets flags, if it computes and the step has set other ones."""
    if flags is None or flags == (now := process_flags()):
        return function
    name = function_name(function)
    if name not in _ATTENDING:
        is_computing = kind_of(function) in _COMPUTING and not name.endswith(("__get__", "__set__"))
        if not is_computing or flags[len(_OF_ATTENTION) :] == now[len(_OF_ATTENTION) :]:
            return function
        if type(function).__module__.startswith("lightning_pipeline."):
            return function
    return _with_flags(function, flags)


@functools.lru_cache(maxsize=1024)
def _with_flags(function: Any, flags: Flags) -> Callable[..., Any]:
    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        before = process_flags()
        _set(flags)
        try:
            return function(*args, **kwargs)
        finally:
            _set(before)

    if hasattr(function, "seeded"):
        run.seeded = lambda *given: _with_flags(function.seeded(*given), flags)  # type: ignore[attr-defined]
    same_kind(run, function)
    return run


def _set(flags: Flags) -> None:
    for setting, (value, *others) in zip(_FLAGS, flags, strict=True):
        options = {"warn_only": others[0]} if others else {}
        _PLAIN[setting](list(value) if isinstance(value, tuple) else value, **options)


def refuse_left(flags: Flags | None) -> None:
    """Refuse flags that a step leaves set when it ends."""
    if flags is not None and flags != (now := process_flags()):
        setting = next(name for name, own, other in zip(_FLAGS, flags, now, strict=True) if own != other)
        what = "chooses the kernels of attention" if setting in _OF_ATTENTION else f"calls torch.{setting[1:]}"
        raise NotImplementedError(
            f"a step {what} for good: do it before the run or in on_fit_start, or for a part of the "
            f"step, as with torch.nn.attention.sdpa_kernel(...)"
        )
