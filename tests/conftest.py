"""What holds for all tests."""

from __future__ import annotations

import gc
from collections.abc import Callable, Collection, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from tests.stages import run_stages  # noqa: F401 (a fixture)

# Seconds that files take, about, on one of three workers: the longest go first, so that no worker is left with one at
# the end.
SECONDS = {
    "habits/test_habits": 70,
    "training/test_replicas": 24,
    "examples/test_training": 20,
    "training/test_automatic": 19,
    "training/test_values": 19,
    "errors/test_errors": 18,
    "training/test_survival": 16,
    "test_registration": 15,
    "training/test_by_hand": 14,
    "training/test_tensor_parallel": 14,
    "training/test_virtual_stages": 13,
    "training/test_slices": 20,
    "models/test_zoo": 12,
    "training/test_names": 12,
    "training/test_advice": 12,
    "training/test_three_dimensions": 12,
    "training/test_trainer_options": 12,
    "training/test_inference": 12,
    "training/test_distributed_checkpoint": 11,
    "training/test_one_process": 11,
    "training/test_bits": 11,
    "runtime/test_failure": 11,
    "training/test_schedules": 10,
    "training/test_export": 10,
}
TESTS = Path(__file__).parent

# What failed before a test began, by identity, with the first test that met it. pytest raises it again in the others.
FAILED_SETUPS: dict[int, tuple[BaseException, str]] = {}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: -SECONDS.get(item.path.relative_to(TESTS).with_suffix("").as_posix(), 0))


def pytest_collection_finish() -> None:
    """Thousands of tests and what they import are there to stay: neither the collector nor what asks it for objects,
    as `views_of` does, need look through them again and again."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
    """A fixture that several tests share, and that fails, is an error of the first of them; the others are skipped."""
    report = yield
    error = call.excinfo.value if call.when == "setup" and call.excinfo is not None else None
    if error is None or not report.failed:
        return report
    first = FAILED_SETUPS.setdefault(id(error), (error, item.nodeid))[1]
    if first != item.nodeid:
        path, line, _ = item.location
        report.outcome = "skipped"
        report.longrepr = (path, (line or 0) + 1, f"Skipped: what it shares with {first} failed there")
    return report


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that the tests of a file share."""
    return tmp_path_factory.mktemp("shared")


@pytest.fixture(scope="module")
def wanted(request: pytest.FixtureRequest) -> Callable[..., list[Any]]:
    """Which of a file's cases to run: `wanted(cases, slow, "name")` are those that are not slow, and those of the slow
    ones that tests of this session have as their parameter `name`; of several parameters, as tuples."""

    def found(cases: Iterable[Any], slow: Collection[Any], *names: str) -> list[Any]:
        items = (item for item in request.session.items if item.path == request.path and hasattr(item, "callspec"))
        together = [tuple(map(item.callspec.params.get, names)) for item in items]
        asked = [each[0] if len(names) == 1 else each for each in together]
        return [case for case in cases if case not in slow or case in asked]

    return found


@pytest.fixture(scope="module")
def with_slow(request: pytest.FixtureRequest) -> bool:
    """Whether slow tests of the file are among those of this session: what its tests share does less without them."""
    return any(item.path == request.path and item.get_closest_marker("slow") for item in request.session.items)


@pytest.fixture(scope="module", autouse=True)
def no_group_is_left() -> Iterator[None]:
    """A group that a file leaves in this process would be that of the tests after it."""
    yield
    assert not dist.is_initialized(), "run what makes a process group in processes of its own, by tests.launching"
