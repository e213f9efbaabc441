"""What holds for all tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch.distributed as dist


@pytest.fixture(scope="module", autouse=True)
def no_group_is_left() -> Iterator[None]:
    """A group that a file leaves in this process would be that of the tests after it."""
    yield
    assert not dist.is_initialized(), "run what makes a process group in processes of its own, by tests.launching"
