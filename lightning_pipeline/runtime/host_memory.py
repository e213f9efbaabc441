"""The C library's memory allocator, where stages compute on the CPU."""

from __future__ import annotations

import ctypes
import os

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # of glibc's malloc.h
KEPT = 1 << 30
"""Bytes that may lie free at the top of the heap, and up to which a block comes from it."""


def free_bytes() -> int:
    """This machine's memory that nobody uses; without a bound where the system does not tell."""
    try:
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, OSError, ValueError):
        return 1 << 62


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
