"""Memory that a hook puts into a tensor of another rank, as ``a.weight.data = b.weight.data`` does.

The other rank gets a copy. That is the same for as long as only one of the two is used, as where the data of two layers
are exchanged. Where a hook leaves both, a write into one would be missed in the other.
"""

from __future__ import annotations

from torch import Tensor, nn

from lightning_pipeline.hooks.operands import Holders
from lightning_pipeline.partition.memory import memory_of
from lightning_pipeline.partition.ownership import holders_of, named_tensors
from lightning_pipeline.partition.users_code import users_line


class LentMemory:
    """What tensors on other ranks have been given of this rank's memory, in the hook that runs."""

    def __init__(self, module: nn.Module, rank: int) -> None:
        self._module = module
        self._rank = rank
        self._lent: dict[int, tuple[Tensor, int, str]] = {}

    def note(self, tensor: Tensor, held: Holders, value: Tensor) -> None:
        """The data of `value` becomes that of `tensor`, which other ranks hold."""
        self._lent.pop(id(tensor), None)
        given = holders_of(value)
        if given is not None and given != held and self._rank in given:
            self._lent[id(tensor)] = tensor, memory_of(value), users_line()

    def check(self) -> None:
        """To be called at the end of a hook.

        Raises:
            NotImplementedError: the module still has the memory itself.
        """
        if not self._lent:
            return
        lent, self._lent = self._lent, {}
        own = {memory_of(tensor): (name, tensor) for name, tensor in named_tensors(self._module)}
        for tensor, memory, line in lent.values():
            if memory in own and own[memory][1] is not tensor:
                raise NotImplementedError(
                    f"{own[memory][0]} shares its memory since {line} with a tensor that another stage holds, and "
                    f"neither would see what is written into the other: clone() it there, or tie them before the run, "
                    f"as one object"
                )
