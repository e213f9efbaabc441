"""The operators of the simulated NPU: torch's own for the CPU, on the device's memory, which is host memory.

torch_npu allocates every tensor, moves it between host and device, and orders streams. Its kernels, and the autograd
formulas that call them, are replaced, as they cannot run without CANN.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

NPU = "PrivateUse1"
AUTOGRAD = "AutogradPrivateUse1"

# What torch_npu does in memory, without a kernel.
KEPT = {
    *("empty", "empty_like", "empty_strided", "new_empty_strided", "resize_", "resize_as_", "set_", "as_strided_"),
    *("_local_scalar_dense", "record_stream", "is_pinned", "_pin_memory", "_copy_from", "_copy_from_and_resize"),
}

_library: torch.library.Library | None = None  # registrations last as long as it does


def redirect_operators() -> None:
    """Give each of torch's operators that has a kernel for the CPU, or one of torch_npu, a kernel that works here."""
    global _library
    _library = torch.library.Library("aten", "IMPL")
    for name in torch._C._dispatch_get_all_op_names():
        namespace, _, qualified = name.partition("::")
        base, _, overload = qualified.partition(".")
        packet = getattr(torch.ops.aten, base, None)
        if namespace == "aten" and base not in KEPT and "npu" not in base and packet is not None:
            _redirect(_library, getattr(packet, overload or "default", None))


def _redirect(library: torch.library.Library, operator: OpOverload | None) -> None:
    if operator is None:  # an operator that torch_npu added
        return
    if operator is torch.ops.aten.copy_.default:
        library.impl(operator, _copy_with(torch.library.get_kernel(operator, NPU)), NPU, with_keyset=True)
    elif operator is torch.ops.aten._to_copy.default:  # an allocation and a copy_, on any device
        library.impl(operator, torch.library.get_kernel(operator, "CPU").call_boxed, NPU, with_keyset=True)
    elif _has(operator, "CompositeImplicitAutograd"):  # made of others, which have formulas
        for key in filter(lambda key: _has(operator, key), (NPU, AUTOGRAD)):
            library.impl(operator, operator.decompose, key)
    else:
        if _has(operator, AUTOGRAD):
            formula = torch.library.get_kernel(operator, "AutogradCPU")  # the one for all devices
            library.impl(operator, formula.call_boxed, AUTOGRAD, with_keyset=True)
        if not _is_view(operator) and (_has(operator, NPU) or _has(operator, "CPU")):
            library.impl(operator, _on_host(operator), NPU)


def _has(operator: OpOverload, key: str) -> bool:
    return torch._C._dispatch_has_kernel_for_dispatch_key(operator.name(), key)


def _is_view(operator: OpOverload) -> bool:
    aliases = [result.alias_info for result in operator._schema.returns]
    return any(alias is not None and not alias.is_write for alias in aliases)


def _on_host(operator: OpOverload) -> Callable[..., Any]:
    """A kernel that runs `operator` on the CPU."""
    draws = torch.Tag.nondeterministic_seeded in operator.tags

    def kernel(*args: Any, **kwargs: Any) -> Any:
        call = _Call()
        arguments = [call.to_host(value) for value in args]
        keywords = {name: call.to_host(value) for name, value in kwargs.items()}
        _let_stream_end()
        with _drawing(call.generator, call.device) if draws else _nothing():
            result = operator(*arguments, **keywords)
        call.resize()
        return call.to_device(result)

    return kernel


class _Call:
    """One call's tensors on both sides."""

    def __init__(self) -> None:
        self.device = torch.device("npu", torch.npu.current_device())
        self.generator: torch.Generator | None = None
        self._pairs: dict[int, tuple[Tensor, Tensor]] = {}  # by id of the tensor on the host: both of them

    def to_host(self, value: Any) -> Any:
        """An argument as the CPU's kernel takes it."""
        if isinstance(value, Tensor) and value.device.type == "npu":
            host = on_host(value)
            self._pairs[id(host)] = (host, value)
            self.device = value.device
            return host
        if isinstance(value, list | tuple):
            return type(value)(map(self.to_host, value))
        if isinstance(value, torch.device):
            if value != torch.device("npu"):  # without an index it is the current one
                self.device = value
            return torch.device("cpu")
        if isinstance(value, torch.Generator) and value.device.type == "npu":
            self.generator = value
            return torch.default_generator
        return value

    def resize(self) -> None:
        """Outputs that were empty, and which the operator has resized."""
        for host, tensor in self._pairs.values():
            if host.shape != tensor.shape:
                tensor.resize_(host.shape)
                on_host(tensor).copy_(host)

    def to_device(self, value: Any) -> Any:
        """A result: an argument that was written to, or a new tensor on the device."""
        if isinstance(value, Tensor):
            if id(value) in self._pairs:
                return self._pairs[id(value)][1]
            if self.device.type == "cpu":
                return value
            tensor = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=self.device)
            on_host(tensor).copy_(value)
            return tensor
        if isinstance(value, list | tuple):
            return type(value)(map(self.to_device, value))
        return value


def on_host(tensor: Tensor) -> Tensor:
    """A CPU tensor over the memory of an NPU tensor."""
    storage = tensor.untyped_storage()
    host = torch.empty(0, dtype=tensor.dtype)
    if not storage.nbytes():
        return host.resize_(tensor.shape)
    memory = torch.frombuffer((ctypes.c_uint8 * storage.nbytes()).from_address(storage.data_ptr()), dtype=torch.uint8)
    return host.set_(memory.untyped_storage(), tensor.storage_offset(), tensor.shape, tensor.stride())


def _let_stream_end() -> None:
    """What was put on the stream before comes first. A device's kernel would not wait for it here."""
    mode = torch.npu.get_sync_debug_mode()
    torch.npu.set_sync_debug_mode("default")
    torch.npu.current_stream().synchronize()
    torch.npu.set_sync_debug_mode(mode)


def _copy_with(original: Any) -> Callable[..., Tensor]:
    """``copy_``: between host and device as torch_npu does it, which needs kernels for other strides and dtypes."""

    def copy_(keys: Any, to: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
        if to.device.type == source.device.type == "npu":
            _let_stream_end()
            on_host(to).copy_(on_host(source))
        elif source.device.type == "npu":
            whole = source.contiguous()
            if to.is_contiguous() and to.dtype == source.dtype and to.shape == source.shape:
                return original.call_boxed(keys, to, whole, non_blocking)
            to.copy_(original.call_boxed(keys, torch.empty(source.shape, dtype=source.dtype), whole, False))
        else:
            whole = source.to(to.dtype).expand(to.shape).contiguous()
            if to.is_contiguous():
                return original.call_boxed(keys, to, whole, non_blocking)
            moved = torch.empty(to.shape, dtype=to.dtype, device=to.device)
            copy_(keys, to, original.call_boxed(keys, moved, whole, non_blocking))
        return to

    return copy_


@contextmanager
def _drawing(generator: torch.Generator | None, device: torch.device) -> Iterator[None]:
    """The CPU's kernel draws from a stream that the NPU's generator gives by its seed and offset."""
    generator = generator or torch.npu.default_generators[device.index]
    offset = generator.get_offset()
    host = torch.default_generator
    state = host.get_state()
    host.manual_seed((generator.initial_seed() + 0x9E3779B97F4A7C15 * (offset + 1)) & 0x7FFFFFFFFFFFFFFF)
    generator.set_offset(offset + 4)
    try:
        yield
    finally:
        host.set_state(state)


@contextmanager
def _nothing() -> Iterator[None]:
    yield
