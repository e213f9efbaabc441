"""The two names of Lightning, whose classes and registries are distinct."""

from __future__ import annotations

import sys
from functools import lru_cache
from importlib import import_module
from typing import Any, NamedTuple


class Names(NamedTuple):
    """One of the names.

    Attributes:
        pytorch, fabric: its packages.
        distribution: its name on PyPI.
        floor: the package below which our classes for its Trainer are imported.
    """

    pytorch: str
    fabric: str
    distribution: str
    floor: str

    @property
    def is_imported(self) -> bool:
        return self.pytorch in sys.modules

    def public(self, name: str) -> Any:
        """One of the objects that `lightning_pipeline` exports, for this name."""
        where = "accelerators.single_npu" if name == "NPUAccelerator" else "strategy"
        return getattr(import_module(f"{self.floor}.{where}"), name)


LIGHTNING = Names("lightning.pytorch", "lightning.fabric", "lightning", "lightning_pipeline")
PYTORCH_LIGHTNING = Names(
    "pytorch_lightning", "lightning_fabric", "pytorch-lightning", "lightning_pipeline.pytorch_lightning"
)
PACKAGES = ("lightning", "pytorch_lightning", "lightning_fabric")


@lru_cache(maxsize=1)
def installed() -> tuple[Names, ...]:
    """The names that can be imported. For the first one our classes are below `lightning_pipeline` itself.

    Raises:
        ImportError: there are none.
    """
    from importlib.util import find_spec  # here, as every `import torch` imports this file

    found = [names for names in (LIGHTNING, PYTORCH_LIGHTNING) if find_spec(names.pytorch.partition(".")[0])]
    if not found:
        raise ImportError("lightning_pipeline needs Lightning: pip install lightning, or pip install pytorch-lightning")
    return (found[0]._replace(floor=LIGHTNING.floor), *found[1:])


def names_of(pytorch: str) -> Names:
    """The installed name with this package."""
    return next(one for one in installed() if one.pytorch == pytorch)


def used() -> Names:
    """The name that the program has imported; the first installed one if it has imported both or none."""
    first, *others = installed()
    return next((one for one in others if one.is_imported and not first.is_imported), first)
