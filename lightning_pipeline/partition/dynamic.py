"""Finding out whether what a leaf computes depends on data in its shapes or numbers."""

from __future__ import annotations

from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode

_NAMES = frozenset(
    {
        *("nonzero", "masked_select", "unique", "unique_consecutive", "_unique2", "unique_dim", "bincount"),
        *("_local_scalar_dense", "equal"),
    }
)


class DataDependence(TorchDispatchMode):
    """While entered, notes operators whose result's shape depends on data. `remove` leaves it, as a hook's handle."""

    def __init__(self) -> None:
        super().__init__()
        self.found = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not self.found:
            name = func.overloadpacket.__name__
            self.found = name in _NAMES or (name == "repeat_interleave" and "Tensor" in str(func))
        return func(*args, **(kwargs or {}))

    def remove(self) -> None:
        """Stop watching."""
        self.__exit__(None, None, None)
