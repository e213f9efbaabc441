"""Tunes the C library's allocator where stages compute on the CPU."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Sequence
from pathlib import Path

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # of glibc's malloc.h
KEPT = 1 << 30
"""Bytes that may lie free at the top of the heap, and up to which a block comes from it."""
_NO_BOUND = 1 << 62


def available_bytes() -> int:
    """Memory that is to be had on this machine, or in this process's control group if that is less.

    Without a bound where the system does not tell.
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


def _left_to_group(places: Sequence[Path], limit: str, usage: str, cached: str) -> int:
    """Of a control group's limit, what is not in use; files' pages that can go at any time are not in use.

    Args:
        places: where it may be found: a container sees its own at the root.
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
    """Have glibc keep freed blocks for the next micro-batch.

    By default it gives large ones back to the system, and every page of the next one is a page fault again: in a
    schedule, whose blocks come and go all the time, some per cent of a step on a virtual machine, and more where
    faults are dear. The peak stays as it is. Other C libraries have no `mallopt`, and settings of the user's own
    (``MALLOC_...``, ``GLIBC_TUNABLES``) stay in force.
    """
    if "GLIBC_TUNABLES" in os.environ or any(name.startswith("MALLOC_") for name in os.environ):
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if os.name == "posix" else None
    if mallopt is not None:
        mallopt(M_TRIM_THRESHOLD, KEPT)
        mallopt(M_MMAP_THRESHOLD, KEPT)
