"""What the code of a loader changes in Python, which the first rank alone runs: the other ranks change the same.

A dataset that counts, a sampler with a generator of its own, a collate function that keeps what it saw: the objects
that a loader refers to are noted before a batch is fetched, and compared afterwards.

Containers of more than `LARGEST` entries are compared by what is added to them, arrays of more than `LARGEST_ARRAY`
bytes and what lies beyond `MOST` objects not at all.
"""

from __future__ import annotations

import functools
import types
import warnings
from typing import Any

from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_pipeline._names import PACKAGES
from lightning_pipeline.hooks.loader_changes import pickled_changes
from lightning_pipeline.recording.object_state import DICT, TENSOR, Path, Walk, is_made_by_python

MOST_BYTES = 1 << 20
"""That are sent of tensors and arrays for one batch."""

_OF_LOADERS = ("dataset", "batch_sampler", "sampler", "collate_fn", "generator")
_FOREIGN = tuple(f"{name}." for name in ("torch", "numpy", "lightning_pipeline", *PACKAGES))


class LoaderState(Walk):
    """The contents of what a loader refers to, at one time."""

    MOST = 1000
    DEEPEST = 64
    LARGEST = 10_000
    LARGEST_ARRAY = 1 << 18
    LOOKS = (
        (Tensor, "look_at_tensor"),
        *Walk.LOOKS,
        (nn.Module, "look_at_module"),
        (DataLoader, "look_at_loader"),
    )

    def __init__(self, loader: Any) -> None:
        super().__init__([(loader, ())])

    def changes(self) -> list[bytes]:
        """What has changed since, for `apply`."""
        found = [
            (change, path, key, value)
            for kind, path, holder, content in self.noted
            for change, key, value in kind.differences(kind.now(holder, content), content)
        ]
        left = [MOST_BYTES]
        pickled = pickled_changes(found, self.paths, left)
        if None in pickled:  # what it has met has not been sent
            found = [change for change, one in zip(found, pickled, strict=True) if one is not None]
            pickled = pickled_changes(found, self.paths, [MOST_BYTES])
        if left[0] < 0:
            _warn_of_size()
        return [one for one in pickled if one is not None]

    @classmethod
    def is_open(cls, kind: type) -> bool:
        is_known = not _is_foreign(kind) or kind.__module__.startswith("torch.utils.data.")
        return issubclass(kind, types.SimpleNamespace) or (is_known and is_made_by_python(kind))

    def look_at_tensor(self, value: Tensor, path: Path) -> None:
        if type(value) is Tensor and not value.is_inference():
            self.note(TENSOR, path, value, value._version)

    def look_at_loader(self, value: DataLoader[Any], path: Path) -> None:
        attributes = vars(value)
        self.go_on(((name, attributes.get(name)) for name in _OF_LOADERS), (*path, ("get", "__dict__")))

    def look_at_module(self, value: nn.Module, path: Path) -> None:
        if not _is_foreign(type(value)):
            self.look_at_object(value, path)
        if value._buffers:  # writes into them are refused (`Lending`)
            self.note(DICT, (*path, ("get", "_buffers")), value._buffers, value._buffers.copy())
        for name, one in value._modules.items():
            if one is not None and (one._modules or not _is_foreign(type(one))):
                self.go_on([(name, one)], (*path, ("get", "_modules")))


def _is_foreign(cls: type) -> bool:
    """Whether a class is torch's or Lightning's own, whose attributes their code looks after."""
    return f"{cls.__module__}.".startswith(_FOREIGN)


@functools.cache
def _warn_of_size() -> None:
    warnings.warn(
        f"code of a data loader changes or keeps more than {MOST_BYTES >> 20} MiB of tensors or arrays at once. The "
        f"first rank alone runs it, and the others do not get them: use them in the loader, not in steps and hooks",
        stacklevel=2,
    )
