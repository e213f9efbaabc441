"""A simulated NPU: tensors whose device is ``npu``, in host memory, and a backend ``hccl`` that is Gloo underneath.

What is real: the tensors are PrivateUse1 tensors of device type ``npu``, as torch_npu's are. So the dispatcher, the
autograd engine, device checks (a CPU tensor among NPU tensors is refused), Lightning's choice of a device and the
choice of a backend for process groups are the real ones.

What is simulated, and therefore not tested: every kernel is the CPU's, on the same memory, so a computation gives the
CPU's bits; there are no streams, and nothing is asynchronous; autocast changes nothing; gradients can be computed on
``npu:0`` only, so a process sees one device; and ``hccl`` obeys Gloo's rules. HCCL's own hazards, such as deadlocks
from the order of first uses, refused dtypes and ignored tags, cannot be seen here.

`install` changes the process that calls it for good, so call it in a child process; and before anything computes
gradients there, as autograd counts devices once.
"""

from __future__ import annotations

import contextlib
import ctypes
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._pytree import tree_map
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

DEVICE = "npu"
_CPU, _EXTENSION = 1, 12  # kDLCPU and kDLExtDev of dlpack.h; torch calls the latter PrivateUse1
_PRIVATE_USE_1 = 20  # c10/core/DeviceType.h
_kept: list[Any] = []  # a library of kernels lives as long as its object


def install(*, num_devices: int = 1) -> ModuleType:
    """Make device type ``npu`` known to torch, and ``hccl`` to torch.distributed. Returns the module `torch.npu`."""
    module = _device_module(num_devices)
    _setup_privateuseone_for_python_backend(DEVICE, backend_module=module)
    _borrow_allocator()
    library = torch.library.Library("_", "IMPL")
    library.fallback(_on_host, "PrivateUse1")
    library.fallback(torch.library.fallthrough_kernel, "AutocastPrivateUse1")
    kernels = torch.library.Library("aten", "IMPL")
    kernels.impl("_copy_from", _copy_from, "PrivateUse1")
    kernels.impl("_copy_from_and_resize", _copy_from, "PrivateUse1")
    kernels.impl("set_.source_Storage", _set, "PrivateUse1")
    kernels.impl("set_.source_Storage_storage_offset", _set, "PrivateUse1")
    kernels.impl("convolution_overrideable", _convolution, "PrivateUse1")
    kernels.impl("convolution_backward_overrideable", _convolution_backward, "PrivateUse1")
    _kept.extend([library, kernels])
    dist.Backend.register_backend("hccl", _make_group, extended_api=True, devices=[DEVICE])
    return module


# -- the device -------------------------------------------------------------------------------------------------------


def _device_module(num_devices: int) -> ModuleType:
    """`torch.npu`: the part of torch_npu.npu's interface that is used."""
    module: Any = ModuleType("torch.npu")
    module.calls = []  # names of what has no effect on host memory, in the order of the calls
    module.default_generators = tuple(torch.Generator() for _ in range(num_devices))

    def index(device: Any = None) -> int:
        return device if isinstance(device, int) else torch.device(device or DEVICE).index or 0

    def noted(name: str) -> Any:
        return lambda *args, **kwargs: module.calls.append(name)

    def manual_seed_all(seed: int) -> None:
        for generator in module.default_generators:
            generator.manual_seed(seed)

    module.is_available = lambda: num_devices > 0
    module.is_initialized = lambda: True
    module.init = noted("init")
    module.device_count = lambda: num_devices
    module.current_device = lambda: 0
    module.set_device = noted("set_device")
    module.device = lambda device: contextlib.nullcontext()
    module.synchronize = noted("synchronize")
    module.empty_cache = noted("empty_cache")
    module._is_in_bad_fork = lambda: False
    module.manual_seed_all = manual_seed_all
    module.get_rng_state = lambda device=None: module.default_generators[index(device)].get_state()
    module.set_rng_state = lambda state, device=None: module.default_generators[index(device)].set_state(state)
    module.memory_stats = lambda device=None: {"allocated_bytes.all.current": 0, "allocated_bytes.all.peak": 1}
    module.get_amp_supported_dtype = lambda: [torch.float16, torch.bfloat16]
    return module


def _borrow_allocator() -> None:
    """Storages that are made for the device without a tensor, as `copy.deepcopy` does, have host memory."""
    c10 = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libc10.so"))
    host_allocator = c10._ZN3c1015GetCPUAllocatorEv
    host_allocator.restype = ctypes.c_void_p
    set_allocator = c10._ZN3c1012SetAllocatorENS_10DeviceTypeEPNS_9AllocatorEh
    set_allocator.restype, set_allocator.argtypes = None, [ctypes.c_int8, ctypes.c_void_p, ctypes.c_uint8]
    set_allocator(_PRIVATE_USE_1, host_allocator(), 0)


# -- tensors ----------------------------------------------------------------------------------------------------------


class _Device(ctypes.Structure):
    _fields_ = [("type", ctypes.c_int32), ("index", ctypes.c_int32)]


class _Capsuled(ctypes.Structure):
    """The beginning of dlpack.h's DLManagedTensor."""

    _fields_ = [("data", ctypes.c_void_p), ("device", _Device)]


_pointer = ctypes.pythonapi.PyCapsule_GetPointer
_pointer.restype, _pointer.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]


def _moved(tensor: Tensor, device_type: int, index: int) -> Tensor:
    """The same memory as a tensor of another device."""
    capsule = torch._C._to_dlpack(tensor.detach())
    device = _Capsuled.from_address(_pointer(capsule, b"dltensor")).device
    device.type, device.index = device_type, index
    return torch._C._from_dlpack(capsule)


def on_host(tensor: Tensor) -> Tensor:
    """A CPU tensor over an NPU tensor's memory."""
    return _moved(tensor, _CPU, 0) if tensor.device.type == DEVICE else tensor


def _on_device(tensor: Tensor, index: int) -> Tensor:
    return _moved(tensor, _EXTENSION, index) if tensor.device.type == "cpu" else tensor


def _on_host(operator: Any, *args: Any, **kwargs: Any) -> Any:
    """The CPU's kernel in place of the device's."""
    index = 0
    devices: dict[int, Tensor] = {}  # an argument may appear twice
    hosts: dict[int, Tensor] = {}

    def to_host(value: Any) -> Any:
        nonlocal index
        if isinstance(value, torch.device) and value.type == DEVICE:
            index = value.index or 0
            return torch.device("cpu")
        if not isinstance(value, Tensor):
            return value
        if value.device.type != DEVICE:
            if value.dim():
                raise RuntimeError(f"{operator} got tensors of {value.device} and {DEVICE}, which is one too many")
            return value
        index = value.device.index
        if id(value) not in hosts:
            devices[id(value)] = value
            # An empty tensor may be there to be filled, and borrowed memory cannot grow.
            hosts[id(value)] = on_host(value) if value.numel() else torch.empty_like(value, device="cpu")
        return hosts[id(value)]

    host_args, host_kwargs = tree_map(to_host, (args, kwargs))
    names = {argument.name for argument in operator._schema.arguments}
    if "generator" in names and host_kwargs.get("generator") is None:
        host_kwargs["generator"] = torch.get_device_module(DEVICE).default_generators[index]
    if host_kwargs.get("pin_memory"):
        host_kwargs["pin_memory"] = False
    result = operator(*host_args, **host_kwargs)
    written = {}
    for key, host in hosts.items():
        written[id(host)] = device = devices[key]
        if host.numel() != device.numel():
            device.data = _on_device(host, index)

    def to_device(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        return written[id(value)] if id(value) in written else _on_device(value, index)

    if not _makes_view(operator):
        return tree_map(to_device, result)
    with torch.inference_mode(any(tensor.is_inference() for tensor in devices.values())):  # a view is as its base
        return tree_map(to_device, result)


def _makes_view(operator: Any) -> bool:
    return any(value.alias_info is not None and not value.alias_info.is_write for value in operator._schema.returns)


def _copy_from(source: Tensor, destination: Tensor, non_blocking: bool = False) -> Tensor:
    on_host(destination).copy_(on_host(source))
    return destination


def _set(tensor: Tensor, storage: Any, offset: int = 0, size: Any = None, stride: Any = ()) -> Tensor:
    """Let a tensor look at a storage, as reading and writing files does."""
    if not storage.nbytes():
        return tensor
    memory = (ctypes.c_char * storage.nbytes()).from_address(storage.data_ptr())
    memory.owner = storage
    flat = torch.frombuffer(memory, dtype=tensor.dtype)
    host = flat if size is None else flat.as_strided(size, stride, offset)
    tensor.data = _on_device(host, storage.device.index or 0)
    return tensor


def _convolution(*args: Any) -> Tensor:
    return _on_host(torch.ops.aten.convolution.default, *args)


def _convolution_backward(gradient: Tensor, value: Tensor, weight: Tensor, *args: Any) -> Any:
    *settings, transposed, output_padding, groups, mask = args
    channels = weight.shape[1] * groups if transposed else weight.shape[0]
    operator = torch.ops.aten.convolution_backward.default
    return _on_host(operator, gradient, value, weight, [channels], *settings, transposed, output_padding, groups, mask)


# -- communication ----------------------------------------------------------------------------------------------------


class SimulatedHCCL(dist.ProcessGroup):
    """Gloo, for tensors of the device."""

    supports_splitting = False

    def __init__(self, options: Any) -> None:
        super().__init__(options.group_rank, options.group_size)
        self._gloo = dist.ProcessGroupGloo(options.store, options.group_rank, options.group_size, options.timeout)
        self.used: list[str] = []

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device("cpu"), torch.device(DEVICE)]

    def _get_backend(self, device: torch.device) -> Any:
        return self if device.type == DEVICE else self._gloo

    def name(self) -> str:
        return "hccl"

    def getBackendName(self) -> str:
        return "hccl"

    def allreduce(self, tensors: list[Tensor], opts: Any = None) -> Any:
        return self._gloo.allreduce(self._hosts("allreduce", tensors), opts or dist.AllreduceOptions())

    def broadcast(self, tensors: list[Tensor], opts: Any) -> Any:
        return self._gloo.broadcast(self._hosts("broadcast", tensors), opts)

    def allgather(self, outputs: list[list[Tensor]], inputs: list[Tensor], opts: Any = None) -> Any:
        hosts = [self._hosts("allgather", tensors) for tensors in outputs]
        return self._gloo.allgather(hosts, self._hosts("allgather", inputs), opts or dist.AllgatherOptions())

    def _allgather_base(self, output: Tensor, given: Tensor, opts: Any = None) -> Any:
        hosts = self._hosts("allgather", [output, given])
        return self._gloo._allgather_base(*hosts, opts or dist.AllgatherOptions())

    all_gather_single = _allgather_base  # its name since torch 2.13

    def send(self, tensors: list[Tensor], peer: int, tag: int) -> Any:
        return self._gloo.send(self._hosts("send", tensors), peer, tag)

    def recv(self, tensors: list[Tensor], peer: int, tag: int) -> Any:
        return self._gloo.recv(self._hosts("recv", tensors), peer, tag)

    def barrier(self, opts: Any = None) -> Any:
        return self._gloo.barrier()

    def abort(self) -> None:
        pass

    def shutdown(self) -> None:
        pass

    def _hosts(self, name: str, tensors: list[Tensor]) -> list[Tensor]:
        self.used.append(name)
        return [on_host(tensor) for tensor in tensors]


def _make_group(options: Any, _: Any) -> SimulatedHCCL:
    return SimulatedHCCL(options)
