"""Which kernels a step lets attention use: ``with sdpa_kernel(SDPBackend.MATH)``.

Torch has it in flags of the process, which would be others when the stage comes to run the call. So a step that sets
them sets its recording's alone, and each of its calls of attention takes them along.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from lightning_pipeline import _torch
from lightning_pipeline.partition.torch_functions import function_name, same_kind
from lightning_pipeline.partition.users_line import users_line

if TYPE_CHECKING:
    from lightning_pipeline.recording.recording import Recording

_FLAGS = {
    f"_set_sdp_use_{name}": f"_get_{name}_sdp_enabled"
    for name in ("flash", "mem_efficient", "math", "cudnn", "overrideable")
} | {"_set_sdp_priority_order": "_get_sdp_priority_order"}
"""How torch's flags are set, and asked for."""
_PLAIN: dict[str, Callable[..., Any]] = {
    name: getattr(_torch.ATTENTION_FLAGS, name) for pair in _FLAGS.items() for name in pair
}
_ATTENDING = frozenset(
    (
        *("scaled_dot_product_attention", "multi_head_attention_forward", "_native_multi_head_attention", "attention"),
        *("_transformer_encoder_layer_fwd", "layer_on_nested"),
    )
)

Flags = tuple[Any, ...]


def process_flags() -> Flags:
    """Those that are set for the process."""
    found = (_PLAIN[getter]() for getter in _FLAGS.values())
    return tuple(tuple(one) if isinstance(one, list) else one for one in found)


@contextmanager
def flags_of_steps(running: Callable[[], Recording | None]) -> Iterator[None]:
    """While entered, a step sets the flags of its recording.

    Args:
        running: tells the recording that runs, if one does.
    """

    def setter(place: int, name: str) -> Callable[[Any], None]:
        def set_flag(value: Any) -> None:
            recording = running()
            if recording is None:
                _PLAIN[name](value)
            else:
                flags = list(recording.attention or process_flags())
                flags[place] = tuple(value) if isinstance(value, list) else value
                recording.choose_attention(tuple(flags))

        return set_flag

    def getter(place: int, name: str) -> Callable[[], Any]:
        def get_flag() -> Any:
            recording = running()
            flags = None if recording is None else recording.attention
            if flags is None:
                return _PLAIN[name]()
            return list(flags[place]) if isinstance(flags[place], tuple) else flags[place]

        return get_flag

    for place, (setting, asking) in enumerate(_FLAGS.items()):
        setattr(_torch.ATTENTION_FLAGS, setting, setter(place, setting))
        setattr(_torch.ATTENTION_FLAGS, asking, getter(place, asking))
    try:
        yield
    finally:
        for name, plain in _PLAIN.items():
            setattr(_torch.ATTENTION_FLAGS, name, plain)


def attending(function: Any, flags: Flags | None) -> Any:
    """The function itself; one that sets flags, if it computes attention and the step has set other ones."""
    if flags is None or function_name(function) not in _ATTENDING or flags == process_flags():
        return function
    return _attending(function, flags)


@functools.lru_cache(maxsize=64)
def _attending(function: Any, flags: Flags) -> Callable[..., Any]:
    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        before = process_flags()
        _set(flags)
        try:
            return function(*args, **kwargs)
        finally:
            _set(before)

    same_kind(run, function)
    return run


def _set(flags: Flags) -> None:
    for setting, value in zip(_FLAGS, flags, strict=True):
        _PLAIN[setting](list(value) if isinstance(value, tuple) else value)


def refuse_left(flags: Flags | None) -> None:
    """Refuse flags that a step leaves set when it ends."""
    if flags is not None and flags != process_flags():
        raise NotImplementedError(
            f"a step chooses the kernels of attention for good ({users_line()}): do it before the run or in "
            f"on_fit_start, or for a part of the step: with torch.nn.attention.sdpa_kernel(...)"
        )
