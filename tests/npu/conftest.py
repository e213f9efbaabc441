"""Tests of the real torch_npu over a stand-in for CANN: ``make test-npu``, in an environment of its own."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import launching
from tests.npu import stand_in

HERE = Path(__file__).parent


def pytest_ignore_collect(config: pytest.Config) -> bool | None:
    """Run only when this folder is named: elsewhere torch_npu is missing, or is there with a CANN of its own."""
    named = (Path(argument.partition("::")[0]).resolve() for argument in config.args)
    return None if any(path == HERE or HERE in path.parents for path in named) else True


@pytest.fixture(scope="session", autouse=True)
def simulated_device() -> Iterator[None]:
    """The stand-in is compiled, and ranks that tests launch have torch_npu over it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CANN_STAND_IN", str(stand_in.build(HERE.parents[1] / "build" / "cann")))
        patch.setenv("HCCL_CONNECT_TIMEOUT", "20")  # seconds that a deadlock takes to come to light
        patch.setenv("STREAMS_PER_DEVICE", "8")  # communicators share them early, as in long pipelines
        patch.setenv("HCCL_EXEC_TIMEOUT", "20")
        patch.setattr(launching, "PRELOADED", ["tests.npu.preloaded"])
        yield
