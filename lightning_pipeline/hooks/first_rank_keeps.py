"""What the first rank alone keeps of the values that a hook has made, as in a list under `is_global_zero`.

Where all ranks keep a value, its owner has the data for later. Others let go of what they have not kept, so the owner
gives the first rank a copy at the end of the hook.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor
from torch.distributed.tensor import DTensor

from lightning_pipeline.hooks.operands import TensorKeys
from lightning_pipeline.partition.ownership import holders_of
from lightning_pipeline.partition.placeholder import COPY, Placeholder
from lightning_pipeline.partition.users_code import in_hook
from lightning_pipeline.runtime.direct import DirectTransport
from lightning_pipeline.runtime.tensor_meta import EVERYWHERE_BYTES, device_of


class Kept(NamedTuple):
    """A tensor that a hook has made, by its key, and the rank that owns it."""

    key: int
    owner: int


class FirstRankKeeps:
    """Gives the first rank copies of what it has kept. All ranks make the same calls."""

    def __init__(self, direct: DirectTransport, keys: TensorKeys) -> None:
        self._direct, self._keys = direct, keys
        self._next_key = 0

    def found(self) -> tuple[Kept, ...]:
        """What the first rank has kept, but for what is large, of what hooks have made since it was last asked."""
        kept = [(key, tensor) for key, tensor in self._keys.kept().items() if key >= self._next_key]
        self._next_key = self._keys.number
        return tuple(
            Kept(key, (holders_of(tensor) or (0,))[0])
            for key, tensor in sorted(kept, key=lambda one: one[0])
            if type(tensor) is Placeholder and tensor._pl_spec.num_bytes <= EVERYWHERE_BYTES
        )

    def take(self, kept: Sequence[Kept]) -> None:
        """On the first rank: take copies of what it has kept. What it alone has kept, its code may read alone later."""
        for owner in sorted({owner for _, owner in kept}):
            given = self._direct.hear(owner, "what the first rank has kept")
            keys = [key for key, one in kept if one == owner]
            for key, (data, is_alone) in zip(keys, given, strict=True):
                tensor = self._keys.tensor_of(key)
                if type(tensor) is Placeholder and data is not None:
                    tensor.__dict__[COPY] = data.to(device_of(tensor._pl_spec, self._direct.device))
                    in_hook.has_kept_rank |= is_alone
        self._direct.tell(in_hook.has_kept_rank)
        in_hook.is_rank_kept = in_hook.has_kept_rank

    def give(self, kept: Sequence[Kept]) -> None:
        """On another rank: give copies of what the first rank has kept, and tell whether this one has let go of it."""
        if own := [key for key, owner in kept if owner == self._direct.rank]:
            copies = [self._copy(key) for key in own]
            self._keys.let_go()
            alone = [self._keys.tensor_of(key) is None for key in own]
            self._direct.tell_one(0, list(zip(copies, alone, strict=True)))
        in_hook.is_rank_kept = self._direct.hear(0, "whether the first rank alone has kept something")

    def _copy(self, key: int) -> Tensor | None:
        tensor = self._keys.tensor_of(key)
        return None if tensor is None or isinstance(tensor, DTensor) else tensor.detach().cpu().clone()
