"""Devices of a rank in what ranks tell one another: on each it is its own."""

from __future__ import annotations

import copyreg
import io
import pickle
import re
from collections import ChainMap
from typing import Any

import torch

_NAME = re.compile(r"(cuda|npu|xpu|hpu|mtia|mps|musa|mlu|privateuseone):\d+")


def without_index(device: torch.device | str) -> str:
    """A device as all ranks name it; a text that names none as it is."""
    if isinstance(device, torch.device):
        return device.type
    return device.partition(":")[0] if _NAME.fullmatch(device) else device


def dumps(obj: Any) -> bytes:
    """A pickle for other ranks, where a device of this one becomes theirs."""
    file = io.BytesIO()
    pickler = pickle.Pickler(file, protocol=pickle.HIGHEST_PROTOCOL)
    pickler.dispatch_table = REDUCTIONS
    pickler.dump(obj)
    return file.getvalue()


def own_device(kind: str) -> torch.device:
    """This process's device of a kind."""
    return torch.device(kind, torch.get_device_module(kind).current_device())


def _reduce(device: torch.device) -> Any:
    if device.index is None or device.type in ("cpu", "meta"):
        return device.__reduce__()
    return own_device, (device.type,)


REDUCTIONS: ChainMap[Any, Any] = ChainMap({torch.device: _reduce}, copyreg.dispatch_table)
"""How a pickle for other ranks is made of what is not as elsewhere."""
