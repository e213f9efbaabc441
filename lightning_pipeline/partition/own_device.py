"""Devices in messages between ranks: each rank reads its own device in place of the sender's."""

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
    """A device as all ranks name it. Texts that name no device stay as they are."""
    if isinstance(device, torch.device):
        return device.type
    return device.partition(":")[0] if _NAME.fullmatch(device) else device


def dumps(obj: Any) -> bytes:
    """A pickle for other ranks, in which this rank's device becomes theirs."""
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
"""The dispatch table of pickles for other ranks."""
