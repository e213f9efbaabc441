"""What a checkpoint's hooks see of the states that the first rank has gathered for it."""

from __future__ import annotations

from typing import Any, NoReturn

from torch import Tensor

from lightning_pipeline.hooks.operands import Exchanges, TensorKeys
from lightning_pipeline.partition import tree
from lightning_pipeline.partition.attributes import call_before
from lightning_pipeline.partition.placeholder import TensorSpec, placeholder
from lightning_pipeline.partition.users_code import users_line

_GATHERED = ("state_dict", "optimizer_states")
"""Entries of a checkpoint that have their contents on the first rank alone."""


class OnFirstRank(dict[str, Any]):
    """A state dict that only the first rank has; empty.

    Args:
        is_seen: by hooks, for which it is not to pass as one without entries.
    """

    def __init__(self, *, is_seen: bool = False) -> None:
        super().__init__()
        self.is_seen = is_seen

    def __missing__(self, name: str) -> Any:
        self._refuse(repr(name))

    def _refuse_if_seen(self) -> None:
        if self.is_seen:
            self._refuse("a state dict")

    def _refuse(self, what: str) -> NoReturn:
        raise RuntimeError(
            f"{what} of a checkpoint is read where only rank 0 has the state ({users_line()}): read it under "
            f"`if self.trainer.is_global_zero:`"
        )


_READS = (
    *("__contains__", "__iter__", "__len__", "__eq__", "__repr__", "__delitem__", "__reversed__"),
    *("get", "keys", "values", "items", "copy", "pop", "popitem"),
)
call_before(OnFirstRank, _READS, OnFirstRank._refuse_if_seen)


class SavedStates:
    """Lets ``on_save_checkpoint`` find the same entries on every rank. All ranks must make the same calls."""

    def __init__(self, exchanges: Exchanges, keys: TensorKeys, rank: int) -> None:
        self._are_new = False
        self._exchanges = exchanges
        self._keys = keys
        self._rank = rank

    def begin(self) -> None:
        """A checkpoint is about to be made. The hooks of callbacks, and then the module's, get the same one."""
        self._are_new = True

    def show(self, checkpoint: dict[str, Any]) -> None:
        """Put placeholders of the first rank's tensors into the checkpoint of the others."""
        if not self._are_new:
            return
        self._are_new = False
        if self._rank == 0:
            gathered = {key: checkpoint[key] for key in _GATHERED if key in checkpoint}
            if any(isinstance(state, OnFirstRank) for state in gathered.get("optimizer_states", ())):
                del gathered["optimizer_states"]  # of another replica
            tensors, layout = tree.flatten(gathered)
            self._exchanges.share("on_save_checkpoint", ([TensorSpec.of(tensor) for tensor in tensors], layout))
            # An optimizer's own tensors may be among them, and not every rank has those noted as the first one's.
            aliases = {id(tensor): self._keys.note(tensor.detach(), (0,)) for tensor in tensors}
            state = checkpoint["state_dict"]  # changed in place, as it has attributes
            for name, value in state.items():
                state[name] = _replaced(value, aliases)
            if "optimizer_states" in gathered:
                checkpoint["optimizer_states"] = _replaced(checkpoint["optimizer_states"], aliases)
        else:
            specs, layout = self._exchanges.share("on_save_checkpoint")[0]
            made = [self._keys.note(placeholder(spec, "an entry of the checkpoint"), (0,)) for spec in specs]
            checkpoint.update(tree.rebuild(layout, made))


def _replaced(value: Any, aliases: dict[int, Tensor]) -> Any:
    return tree.replace(value, lambda tensor: aliases[id(tensor)])
