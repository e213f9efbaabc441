"""The table of habits: what a habit is, and how one is registered.

A habit is a small LightningModule that does one thing that real users do. It is trained (or validated, tested, asked
for predictions) on stages and in one process, and everything that can be seen from outside is compared.

    @habit(observed=["seen"], without={"beta": 0.0})
    class KLFromSecondEpoch(Layers):
        ...
"""

from __future__ import annotations

import importlib
import pkgutil
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import lightning as L

from tests.habits.shared_out import differs, refusal


@dataclass(frozen=True)
class Expectation:
    """What stages have to come to: the same as one process, an error that matches `pattern`, or something else."""

    pattern: str | None = None
    differs: bool = False

    def __str__(self) -> str:
        told = "equal" if self.pattern is None else f"an error that matches {self.pattern!r}"
        return "different" if self.differs else told


EQUAL = Expectation()
DIFFERENT = Expectation(differs=True)


def error(pattern: str) -> Expectation:
    """An error is right. `pattern` is a regular expression for what it has to name: the place, and what to do."""
    re.compile(pattern)
    return Expectation(pattern)


@dataclass(frozen=True)
class Habit:
    """One line of the table.

    Attributes:
        name: of the class.
        subject: the file that it is in.
        module: makes the LightningModule.
        expectation: on stages.
        automatic: on stages that are cut automatically, where that is another: measuring runs the step more often.
        replicated: with two replicas, where that is another.
        reversed: with the first stage on the last rank, where that is another.
        observed: names of the module's attributes that every rank has to have alike in the end; dots go inwards.
        calls: what is called of the Trainer, in this order.
        epochs, batches: how much there is to train on.
        callbacks: makes callbacks of the Trainer.
        trainer: further options of the Trainer, or a function that makes them, given the run's folder.
        without: the same module without the habit, which has to come to something else in one process. None for habits
            that are left out of that check, with the reason beside them.
        plain: whether plain Lightning that accumulates over the micro-batches does the same. It does not where numbers
            are drawn at random, or where something happens once a batch.
        plain_tolerance: of that comparison, relative to the largest value.
        tolerance: of the comparison with one process; 0 is bit for bit.
        prints: whether what is printed is compared.
    """

    name: str
    subject: str
    module: Callable[[], L.LightningModule]
    expectation: Expectation = EQUAL
    automatic: Expectation | None = None
    replicated: Expectation | None = None
    reversed: Expectation | None = None
    observed: tuple[str, ...] = ()
    calls: tuple[str, ...] = ("fit",)
    epochs: int = 2
    batches: int = 3
    callbacks: Callable[[], list[L.Callback]] = list
    trainer: Mapping[str, Any] | Callable[[Path], Mapping[str, Any]] = field(default_factory=dict)
    without: type[L.LightningModule] | None = None
    plain: bool = True
    plain_tolerance: float = 0.0
    tolerance: float = 0.0
    prints: bool = False

    def expected_of(self, configuration: str) -> Expectation:
        if configuration == "plain":
            return EQUAL
        if configuration.startswith("2x2"):
            return self._with_replicas(configuration.split("-", 2)[2] if configuration.count("-") > 1 else "")
        if configuration.endswith("-reversed") and self.reversed is not None:
            return self.reversed
        return (self.automatic if "-auto" in configuration else None) or self.expectation

    def _with_replicas(self, kind: str) -> Expectation:
        """With two replicas, of which `kind` tells what they share out: see shared_out.py."""
        if (pattern := refusal(kind, self.name)) is not None:
            return error(pattern)
        return DIFFERENT if differs(kind, self.name) else self.replicated or self.expectation

    @property
    def full_name(self) -> str:
        return f"{self.subject}.{self.name}"

    def trainer_options(self, folder: Path) -> dict[str, Any]:
        return dict(self.trainer(folder) if callable(self.trainer) else self.trainer)


HABITS: dict[str, Habit] = {}
"""All habits by name, once `load` was called."""


def habit(
    *,
    expect: Expectation = EQUAL,
    observed: Sequence[str] = (),
    calls: Sequence[str] = ("fit",),
    without: Mapping[str, Any] | None = None,
    shows: bool = True,
    **options: Any,
) -> Callable[[type[L.LightningModule]], type[L.LightningModule]]:
    """Register a LightningModule as a habit. `options` are those of `Habit`.

    Args:
        without: attributes of a subclass that does without the habit: `{"beta": 0.0}`. By default the first base class.
        shows: that the run without differs can be checked.
    """

    def register(cls: type[L.LightningModule]) -> type[L.LightningModule]:
        if cls.__name__ in HABITS:
            raise ValueError(f"two habits are called {cls.__name__}: {HABITS[cls.__name__].module} and {cls}")
        rid = type(cls.__name__, (cls,), dict(without)) if without is not None else cls.__mro__[1]
        HABITS[cls.__name__] = Habit(
            cls.__name__,
            cls.__module__.rpartition(".")[2],
            cls,
            expect,
            observed=tuple(observed),
            calls=tuple(calls),
            without=rid if shows else None,
            **options,
        )
        return cls

    return register


MACHINERY = ("__main__", "table", "harness", "driver", "modules", "preloaded", "shared_out", "test_habits")
"""Files of this folder that hold no habits."""


def load() -> dict[str, Habit]:
    """Import every file of habits; returns the table."""
    package = importlib.import_module("tests.habits")
    for info in pkgutil.iter_modules(package.__path__):
        if info.name not in MACHINERY:
            importlib.import_module(f"tests.habits.{info.name}")
    return HABITS


def chosen(names: Sequence[str]) -> list[Habit]:
    """The habits whose full name contains one of `names`, in the table's order; all for none.

    Raises:
        ValueError: a name that no habit has.
    """
    habits = list(load().values())
    for name in names:
        if not any(name in each.full_name for each in habits):
            raise ValueError(f"no habit's name contains {name!r}")
    return [each for each in habits if not names or any(name in each.full_name for name in names)]
