"""Settings of optimizers, such as learning rates, which have to be the same on all ranks at a step."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Sequence
from typing import NoReturn

from torch.optim import Optimizer

from lightning_pipeline.runtime.transport import Transport

Settings = dict[str, object]


def settings_of_groups(optimizers: Iterable[Optimizer]) -> list[list[Settings]]:
    """The numbers in each optimizer's groups of parameters."""
    return [
        [
            {name: _plain(value) for name, value in group.items() if _is_setting(value)}
            for group in optimizer.param_groups
        ]
        for optimizer in optimizers
    ]


def digest_of_groups(optimizers: Iterable[Optimizer]) -> float:
    """A digest of `settings_of_groups`, to be gathered with other numbers."""
    return float(zlib.crc32(repr(settings_of_groups(optimizers)).encode()))


def refuse_other_settings(optimizers: Sequence[Optimizer], transport: Transport) -> NoReturn:
    """Raise an error that names a setting that ranks differ in. All ranks of the pipeline must call it."""
    own = settings_of_groups(optimizers)
    told = [transport.broadcast_object(own, rank, "optimizers' settings") for rank in range(transport.num_stages)]
    for number, of_ranks in enumerate(zip(*told, strict=False)):
        for place, groups in enumerate(zip(*of_ranks, strict=False)):
            for name in groups[0]:
                values = [group.get(name) for group in groups]
                if len(set(map(repr, values))) > 1:
                    shown = ", ".join(f"{value} on {transport.name_of(rank)}" for rank, value in enumerate(values))
                    what = f"param_groups[{place}][{name!r}] of {type(optimizers[number]).__name__}"
                    raise RuntimeError(
                        f"{what} is {shown}: each stage would update its weights by another one. Let every rank set it "
                        f"to the same, as to a number that all ranks count, and not the first rank alone under "
                        f"trainer.is_global_zero, or that comes from trainer.strategy.broadcast"
                    )
    raise RuntimeError("the ranks' optimizers have different groups of parameters: let every rank add the same ones")


def _is_setting(value: object) -> bool:
    return isinstance(value, int | float) or (isinstance(value, tuple) and all(map(_is_setting, value)))


def _plain(value: object) -> object:
    """As a Python number, since one rank may have a NumPy one of the same value."""
    return tuple(map(_plain, value)) if isinstance(value, tuple) else float(value)  # type: ignore[arg-type]
