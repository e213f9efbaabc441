"""Detects whether an Ascend NPU is usable; if not, names what is missing."""

from __future__ import annotations

import functools
import importlib.metadata
import importlib.util
import os
import re
from types import ModuleType
from typing import Any

import torch

DEVICE = "npu"
VISIBLE = "ASCEND_RT_VISIBLE_DEVICES"
_AUTOLOAD = "TORCH_DEVICE_BACKEND_AUTOLOAD"
_CANN = (
    "install the CANN toolkit and kernels that fit it, and let each shell run their set_env.sh "
    "(source /usr/local/Ascend/ascend-toolkit/set_env.sh)"
)


class NPUUnavailableError(RuntimeError):
    """No NPU can be used; the message says what to install or set."""


def npu_module() -> ModuleType:
    """`torch.npu`, with torch_npu imported if it was not."""
    reason = why_unavailable()
    if reason is not None:
        raise NPUUnavailableError(reason)
    return torch.get_device_module(DEVICE)


def is_installed() -> bool:
    """Whether torch_npu is installed, usable or not."""
    return hasattr(torch, DEVICE) or importlib.util.find_spec("torch_npu") is not None


def why_unavailable() -> str | None:
    """What is missing and how to get it; None if an NPU can be used. Imports torch_npu if it is installed."""
    reason = _why_not_loaded()
    if reason is not None:
        return reason
    module = torch.get_device_module(DEVICE)
    try:
        if module.is_available() and module.device_count() > 0:
            return None
        found = "sees no NPU"
    except Exception as error:  # the driver's, of any type
        found = f"cannot ask the driver for NPUs ({_first_line(error)})"
    visible = os.environ.get(VISIBLE)
    masked = f"; {VISIBLE}={visible!r} has to name devices of this machine, in ascending order" if visible else ""
    if visible == "":
        masked = f"; {VISIBLE} is empty, which hides all of them: unset it"
    return f"torch_npu {found}: check that `npu-smi info` lists some and that this user may open /dev/davinci*{masked}"


@functools.cache
def _why_not_loaded() -> str | None:
    """Why torch_npu cannot be imported. Tries once: a failed import leaves traces that break the next one."""
    if not is_installed():
        wanted = _release(torch.__version__)
        return f"torch_npu is not installed: pip install 'torch-npu=={wanted}', the version for torch {wanted}; {_CANN}"
    version = _version()
    if version is not None and _release(version) != _release(torch.__version__):
        return (
            f"torch_npu {version} is made for torch {_release(version)}, and this is torch {torch.__version__}: "
            f"pip install 'torch-npu=={_release(torch.__version__)}', or the torch that it is made for"
        )
    if hasattr(torch, DEVICE):
        return None
    autoload = os.environ.get(_AUTOLOAD)
    try:
        import torch_npu  # noqa: F401
    except Exception as error:
        if autoload is None:
            os.environ.pop(_AUTOLOAD, None)  # torch_npu has set it, and child processes would inherit it
        else:
            os.environ[_AUTOLOAD] = autoload
        return f"torch_npu {version} is installed and cannot be loaded ({_first_line(error)}): {_way_out(error)}"
    return None


def _way_out(error: Exception) -> str:
    if "accelerator" in str(error):  # this torch is built for another accelerator
        return "install torch's build for the CPU (https://download.pytorch.org/whl/cpu)"
    return f"{_CANN}; until then {_AUTOLOAD}=0 lets torch be imported without it"


def _version() -> str | None:
    try:
        return importlib.metadata.version("torch_npu")
    except importlib.metadata.PackageNotFoundError:
        return None


def _release(version: str) -> str:
    """``2.13.0`` of ``2.13.0+cpu`` or ``2.13.0.post1``; those of torch and torch_npu have to be equal."""
    found = re.match(r"\d+\.\d+(\.\d+)?", version)
    return found.group() if found else version


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"


_AFTER_TORCH = 100  # torch's own packages have priorities up to 30


@functools.cache
def read_files_of_npus() -> None:
    """Let torch load tensors that were saved from an NPU where there is none, into host memory."""

    def restore(storage: Any, location: str) -> Any:
        return storage if location.partition(":")[0] == DEVICE and not hasattr(torch, DEVICE) else None

    torch.serialization.register_package(_AFTER_TORCH, lambda storage: None, restore)
