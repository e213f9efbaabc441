"""A bound on the memory of a test, so that what would eat the machine fails instead."""

from __future__ import annotations

import re
import resource
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def little_memory(mebibytes: int = 1024) -> Iterator[None]:
    """Let this process take no more than so much beyond what it has; no bound where there is no /proc."""
    if sys.platform != "linux":
        yield
        return
    now = re.search(r"VmSize:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert now is not None
    old = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (int(now[1]) * 1024 + mebibytes * 2**20, old[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, old)
