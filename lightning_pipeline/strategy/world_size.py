"""How many processes the user's code is told of while data, loaders and optimizers are set up.

What divides a batch, or scales a learning rate, by ``trainer.world_size`` means the processes that read other samples:
the replicas. The stages of one replica share its batches.
"""

from __future__ import annotations

import sys
from types import FrameType

from lightning_pipeline._names import PACKAGES

_LOADERS = tuple(f"{kind}_dataloader" for kind in ("train", "val", "test", "predict"))
_SETTING_UP = frozenset(("prepare_data", "setup", "configure_optimizers", *_LOADERS))
_OWN = (*PACKAGES, "lightning_pipeline")


def is_for_set_up(*ways: str) -> bool:
    """Whether code of the user's asks for a property of the strategy, in one of the hooks that set data up.

    Args:
        ways: the property's name, or those of the Trainer's properties that come to it, the last first.
    """
    frame: FrameType | None = sys._getframe(2)
    for way in ways:
        if frame is None or not _is_own(frame) or frame.f_code.co_name != way:
            break
        frame = frame.f_back
    else:
        return _is_in_set_up(frame)
    return len(ways) == 1 and _is_in_set_up(frame)


def _is_in_set_up(frame: FrameType | None) -> bool:
    if frame is None or _is_own(frame):
        return False
    while frame is not None:
        if frame.f_code.co_name in _SETTING_UP and not _is_own(frame):
            return True
        frame = frame.f_back
    return False


def _is_own(frame: FrameType) -> bool:
    return str(frame.f_globals.get("__name__")).partition(".")[0] in _OWN
