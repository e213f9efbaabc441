"""What holds for all tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch.distributed as dist

# Files that take long, first, so that no worker is left with one of them at the end.
LONG = [
    *("test_zoo", "test_launcher", "test_replicas", "test_survival"),
    *("test_launchers", "test_resume", "test_automatic"),
]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: LONG.index(item.path.stem) if item.path.stem in LONG else len(LONG))


@pytest.fixture(scope="module", autouse=True)
def no_group_is_left() -> Iterator[None]:
    """A group that a file leaves in this process would be that of the tests after it."""
    yield
    assert not dist.is_initialized(), "run what makes a process group in processes of its own, by tests.launching"
