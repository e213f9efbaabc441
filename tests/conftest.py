"""What holds for all tests."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch.distributed as dist

# Files that take long, first, so that no worker is left with one of them at the end.
LONG = ["zoo", "launcher", "replicas", "survival", "launchers", "resume", "automatic"]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    places = {f"test_{name}": place for place, name in enumerate(LONG)}
    items.sort(key=lambda item: places.get(item.path.stem, len(LONG)))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that the tests of a file share."""
    return tmp_path_factory.mktemp("shared")


@pytest.fixture(scope="module", autouse=True)
def no_group_is_left() -> Iterator[None]:
    """A group that a file leaves in this process would be that of the tests after it."""
    yield
    assert not dist.is_initialized(), "run what makes a process group in processes of its own, by tests.launching"
