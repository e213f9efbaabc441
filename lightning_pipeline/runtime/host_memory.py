"""The memory of this machine: how much there is, how much was used, and the C library's allocator of it."""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # from glibc's malloc.h
KEPT = 1 << 30
"""Bytes that stay with the process when they are freed, and the size up to which blocks come from the heap."""
_NO_BOUND = 1 << 62


def available_bytes() -> int:
    """Bytes that can still be allocated on this machine, or in this process's control group if that is less.

    The number is huge if the system does not tell.
    """
    found = [_NO_BOUND]
    try:
        fields = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
        found.append(int(fields["MemAvailable"].split()[0]) * 1024)
        groups = Path("/proc/self/cgroup").read_text().splitlines()
    except (OSError, KeyError, ValueError):
        return found[-1]
    root = Path("/sys/fs/cgroup")
    for _, controllers, path in (line.split(":", 2) for line in groups):
        inside = path.lstrip("/")
        if not controllers:
            found.append(_left_to_group((root / inside, root), "memory.max", "memory.current", "inactive_file"))
        elif "memory" in controllers.split(","):
            places = root / "memory" / inside, root / "memory"
            found.append(
                _left_to_group(places, "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
            )
    return min(found)


def peak_memory(device: torch.device) -> int:
    """The most bytes that tensors on a device took at once so far; of the CPU, that the process took. 0 if unknown."""
    if device.type != "cpu":
        try:
            return torch.accelerator.max_memory_allocated(device)
        except RuntimeError:  # of a device whose allocator does not count
            return 0
    try:
        import resource
    except ImportError:  # not on Windows
        return 0
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def _left_to_group(places: Sequence[Path], limit: str, usage: str, cached: str) -> int:
    """What is left of a control group's limit. Cached pages of files do not count as used, as they can be dropped.

    Args:
        places: folders where the group may be, as a container sees its own at the root.
    """
    for place in places:
        try:
            stat = dict(line.split() for line in (place / "memory.stat").read_text().splitlines())
            used = int((place / usage).read_text()) - int(stat.get(cached, 0))
            return max(0, int((place / limit).read_text()) - used)
        except (OSError, ValueError):  # no such file, or "max"
            continue
    return _NO_BOUND


def keep_freed_memory() -> None:
    """Make glibc keep freed blocks for the next micro-batch.

    By default it returns large blocks to the system, and each page of the next one is a page fault again. A schedule
    allocates and frees all the time: this takes several per cent of a step on a virtual machine. Peak memory does not
    change. Other C libraries have no `mallopt`, and settings of the user (``MALLOC_...``, ``GLIBC_TUNABLES``) have
    precedence.
    """
    if "GLIBC_TUNABLES" in os.environ or any(name.startswith("MALLOC_") for name in os.environ):
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if os.name == "posix" else None
    if mallopt is not None:
        mallopt(M_TRIM_THRESHOLD, KEPT)
        mallopt(M_MMAP_THRESHOLD, KEPT)
