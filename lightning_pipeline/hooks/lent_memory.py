"""Data that a hook puts into a tensor, as ``a.weight.data = b.weight.data`` does, where another rank may hold that one.

The other rank gets a copy. That is the same for as long as only one of the two is used, as where the data of two layers
are exchanged. Where a hook leaves both, a write into one would be missed in the other.
"""

from __future__ import annotations

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lightning_pipeline.hooks.operands import Operands, set_spec
from lightning_pipeline.hooks.slices import set_data_of_gathered, set_data_of_slices, whole_with_holders
from lightning_pipeline.partition.kept_parameters import gathered_from
from lightning_pipeline.partition.memory import memory_of
from lightning_pipeline.partition.ownership import holders_of, named_tensors
from lightning_pipeline.partition.placeholder import Placeholder, TensorSpec
from lightning_pipeline.partition.users_code import users_line


class LentMemory:
    """What tensors on other ranks have been given of this rank's memory, in the hook that runs."""

    def __init__(self, module: nn.Module, rank: int, operands: Operands) -> None:
        self._module = module
        self._rank = rank
        self._operands = operands
        self._lent: dict[int, tuple[Tensor, int, str]] = {}

    def set_data(self, tensor: Tensor, value: Tensor) -> None:
        """The user's code sets ``tensor.data = value``. All ranks must call it."""
        held, given = holders_of(tensor), holders_of(value)
        self._lent.pop(id(tensor), None)
        if given is not None and given != held and self._rank in given:
            self._lent[id(tensor)] = tensor, memory_of(value), users_line()
        [here] = self._operands.gather([whole_with_holders(value)], [held], "data.__set__")
        if type(tensor) is Placeholder:
            set_spec(tensor, tensor._pl_spec.with_data_of(TensorSpec.of(value)))
        elif isinstance(tensor, DTensor):
            set_data_of_slices(tensor, here)
        elif (slices := gathered_from(tensor)) is not None:
            set_data_of_gathered(tensor, slices, here)
        else:
            tensor.data = here

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
