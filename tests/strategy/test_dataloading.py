"""What stands for a loader on the stages is told from it by nothing but its batches."""

from __future__ import annotations

from typing import Any

import pytest
from lightning.fabric.utilities.types import _Stateful
from torch.utils.data import DataLoader

from lightning_pipeline.strategy.dataloading import AnnouncedLoader, FollowingLoader
from tests.training.resumable import ResumableLoader


@pytest.mark.parametrize("kind", [AnnouncedLoader, FollowingLoader])
def test_lightning_finds_the_state_of_a_loader_that_has_one(kind: Any) -> None:
    options: dict[str, Any] = {"whole": False, "lending": lambda: None}
    if kind is AnnouncedLoader:
        options["replicas"] = None
    plain = DataLoader(range(4))  # type: ignore[arg-type]
    stateful = kind(ResumableLoader(plain), None, **options)
    # As `isinstance` with a protocol looks since Python 3.12, on any Python.
    assert {"state_dict", "load_state_dict"} <= vars(stateful).keys()
    assert isinstance(stateful, _Stateful) and not isinstance(kind(plain, None, **options), _Stateful)
    stateful.load_state_dict({"num_given": 3})
    assert stateful.start == 3
