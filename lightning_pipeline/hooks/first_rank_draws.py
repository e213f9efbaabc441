"""Random numbers that the first rank alone draws in a hook, after which all ranks' generators go on as its own do.

In one process what code under `is_global_zero` draws moves the generators on. So the first rank gives the others their
states, at the next call of torch by which all ranks draw, and at the end of the hook::

    rank 0   asks for the rank   randint(5)   randn(3) --> states   randn(3)   the end of the hook
    rank 1   asks for the rank                randn(3) <-- states   randn(3)   the end of the hook

Other replicas, whose ranks are none of them first, follow at the next training step, where all of them meet.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from lightning_pipeline.partition.rng import random_states, set_random_states
from lightning_pipeline.partition.users_code import users_line


class Given(NamedTuple):
    """The first rank's states, and the line at which it has drawn alone, or else the hook has asked for the rank."""

    states: tuple[Any, ...]
    line: str


class Drawn(NamedTuple):
    """What a replica has drawn in hooks that ask for the rank, since replicas met.

    Attributes:
        begun: digest of its generators' states when the first of them asked.
        shared: digest of their states after what all its ranks have drawn, if nothing came after what one drew alone.
        line: that of `Given`; empty if nothing was drawn alone.
    """

    begun: int
    shared: int
    now: tuple[Any, ...]
    line: str


class FirstRankDraws:
    """Keeps the global generators of torch, Python and NumPy alike in hooks in which ranks may do different things."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._alike: tuple[Any, ...] | None = None
        self._begun: tuple[Any, ...] | None = None
        self._alone: tuple[Any, Any] | None = None
        self._line = self._line_alone = ""

    def begin(self) -> None:
        """The hook asks for the rank: up to here all ranks have drawn the same."""
        self._alike, self._line = random_states(self._device), users_line()
        self._begun = self._begun or self._alike

    def note_alone(self, line: str) -> None:
        """On the first rank: it is about to draw alone."""
        self._line = line

    def given(self) -> Given | None:
        """On the first rank: what the others lack; None if it has drawn nothing since ranks were alike."""
        states = random_states(self._device)
        return None if states == self._alike else Given(states, self._line)

    def are_alike(self) -> None:
        """On the first rank: the others go on with what it has given them."""
        self._note(random_states(self._device))

    def take(self, given: Given | None) -> None:
        """On another rank: go on with the first rank's states.

        Raises:
            RuntimeError: this rank has already drawn what the first rank has drawn after numbers of its own.
        """
        own, alike = random_states(self._device), self._alike
        states, self._line = (alike, self._line) if given is None else given
        if states is None or own == states:  # all have drawn the same, if any
            self._alike, self._alone = own, None if own != alike else self._alone
            return
        if alike is not None:
            for name, here, there, before in zip(_NAMES, own, states, alike, strict=True):
                if here not in (there, before) and there != before:
                    raise RuntimeError(
                        f"the first rank alone has drawn random numbers from {name} global generator, in a hook in "
                        f"which all ranks draw others from it afterwards ({self._line}): {_WAY_OUT}"
                    )
        set_random_states(states, self._device)
        self._note(states)

    def _note(self, states: tuple[Any, ...]) -> None:
        """All ranks of the pipeline go on with these, to which the first rank has come alone, as far as known: it is
        not told whether the others have drawn the same."""
        if self._alike is not None and states != self._alike:
            goes_on = self._alone is not None and self._alone[1] == self._alike
            self._alone = (self._alone[0] if goes_on and self._alone is not None else self._alike, states)
            self._line_alone = self._line_alone or self._line
        self._alike = states

    # -- replicas -----------------------------------------------------------------------------------------------------

    def digest(self) -> float:
        """Tells replicas whether their hooks that ask for the rank have left their generators alike."""
        return float(_digest(self._alike)) if self._begun is not None else 0.0

    def drawn(self) -> Drawn:
        """What this replica has drawn."""
        now = random_states(self._device)
        shared = self._alone[0] if self._alone is not None and self._alone[1] == now else now
        return Drawn(_digest(self._begun), _digest(shared), now, self._line_alone)

    def follow(self, drawn: Sequence[Drawn]) -> None:
        """Go on as the first replica does, if replicas' generators were alike."""
        if len({one.begun for one in drawn}) > 1 or all(one.now == drawn[0].now for one in drawn):
            return
        if len({one.shared for one in drawn}) > 1:
            line = next((one.line for one in drawn if one.line), self._line)
            raise RuntimeError(
                f"one replica alone has drawn random numbers in a hook that asks for the rank ({line}), and others "
                f"have drawn different ones afterwards: {_WAY_OUT}"
            )
        set_random_states(drawn[0].now, self._device)

    def have_met(self) -> None:
        """Replicas have met: what hooks draw from here on is new."""
        self._begun = self._alone = None
        self._line_alone = ""


_WAY_OUT = "let every rank draw both, or give the first rank a generator of its own"

_NAMES = ("Python's", "NumPy's", "torch's")


def _digest(states: tuple[Any, ...] | None) -> int:
    return zlib.crc32(repr(states).encode())
