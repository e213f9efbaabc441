"""Trials: what is run, and what goes wrong when and where; all of it drawn from a seed and a number."""

from __future__ import annotations

import random
from dataclasses import dataclass, field, fields, replace
from typing import Any

LAYOUTS = {"2": (2, 2), "4": (4, 4), "2x2": (2, 4)}
"""Stages and ranks."""

PHASES = ("start-up", "set-up", "first step", "steady", "saving", "validation", "shutdown", "end")
"""What a fault may happen in. A module that is cut automatically is cut in the first step; the end is after the run."""

KINDS = {
    "kill": 5,  # SIGKILL
    "stop": 4,  # SIGSTOP, for ever
    "pause": 3,  # SIGSTOP, and SIGCONT before the timeout
    "terminate": 2,  # SIGTERM
    "interrupt": 1,  # SIGINT to all processes, as the keyboard sends it
    "raise": 6,  # an error in a hook of the user's
    "exit": 4,  # os._exit, with 0 and others
    "close": 2,  # a rank's connections break
    "disk": 3,  # the disk is full
    "memory": 2,  # no memory is given any more
    "threads": 2,  # no thread starts any more, and then an error
    "unequal": 3,  # another configuration on one rank
    "damage": 3,  # the last checkpoint, before a run goes on from it
}
"""Kinds of fault, with how often each is drawn."""

BY_SIGNAL = ("kill", "stop", "pause", "terminate")
WITH_PHASE = (*BY_SIGNAL, "interrupt", "exit", "close", "disk", "memory", "threads")

HOOKS = (
    *(f"module.{name}" for name in ("setup", "configure_model", "on_fit_start", "configure_optimizers")),
    *(f"module.{name}" for name in ("on_train_start", "on_train_epoch_start", "on_train_batch_start")),
    *(f"module.{name}" for name in ("training_step", "forward", "on_before_zero_grad", "on_before_backward")),
    *(f"module.{name}" for name in ("on_after_backward", "on_before_optimizer_step", "on_train_batch_end")),
    *(f"module.{name}" for name in ("on_validation_start", "validation_step", "on_validation_epoch_end")),
    *(f"module.{name}" for name in ("on_train_epoch_end", "on_save_checkpoint", "on_train_end", "on_fit_end")),
    "module.teardown",
    *(f"callback.{name}" for name in ("setup", "on_fit_start", "on_sanity_check_start", "on_train_start")),
    *(f"callback.{name}" for name in ("on_train_batch_start", "on_train_batch_end", "on_validation_batch_end")),
    *(f"callback.{name}" for name in ("on_validation_end", "state_dict", "on_save_checkpoint", "on_train_end")),
    *("callback.on_fit_end", "callback.teardown"),
    *(f"data.{name}" for name in ("prepare_data", "setup", "train_dataloader", "val_dataloader", "teardown")),
    "data.__getitem__",
)
IN_STEPS = ("module.on_train_batch_start", "module.training_step")
ON_RANK_0 = ("data.prepare_data",)

OTHERS: tuple[dict[str, Any], ...] = (
    {"max_epochs": 3},
    {"limit_train_batches": 1},
    {"seed": 7},
    {"num_microbatches": 8},
    {"schedule": "gpipe"},
    {"width": 40},
    {"optimizer": "SGD"},
    {"timeout": 77},
)
"""What may be configured otherwise on one rank."""


@dataclass(frozen=True)
class Trial:
    """One run with one fault.

    Attributes:
        layout: of `LAYOUTS`.
        launcher: "lightning" or "torchrun".
        is_auto: the module is cut automatically.
        is_folder: checkpoints are folders that all ranks write.
        workers: processes of each loader.
        epochs: how long the run is.
        timeout: the strategy's, in seconds.
        kind: of fault.
        victim: the rank that it befalls.
        phase: of `PHASES`, for what befalls a process from outside or at any time.
        delay: seconds from the beginning of the phase; at start-up a share of what that takes.
        pause: share of the timeout that a process stops.
        hook: which raises, "owner.name".
        call: of that hook, which is the one that raises.
        error: what it raises.
        exit_code: of a process that ends.
        spare: bytes that a rank without memory still gets.
        other: what is configured otherwise.
        damage: what is done to a checkpoint, and where in it, as a share of its size.
    """

    seed: int
    number: int
    layout: str
    launcher: str = "lightning"
    is_auto: bool = False
    is_folder: bool = False
    workers: int = 0
    epochs: int = 5
    timeout: float = 12.0
    kind: str = "none"
    victim: int = 0
    phase: str = ""
    delay: float = 0.0
    pause: float = 0.0
    hook: str = ""
    call: int = 1
    error: str = "ValueError"
    exit_code: int = 0
    spare: int = 0
    other: dict[str, Any] = field(default_factory=dict)
    damage: tuple[str, float] = ("", 0.0)

    @property
    def stages(self) -> int:
        return LAYOUTS[self.layout][0]

    @property
    def world(self) -> int:
        return LAYOUTS[self.layout][1]

    @property
    def run(self) -> str:
        """What two trials have in common whose weights have to be the same bits."""
        return f"{self.layout}{' auto' * self.is_auto}"

    def as_dict(self) -> dict[str, Any]:
        values = {one.name: getattr(self, one.name) for one in fields(self)}
        return {**values, "stages": self.stages, "world": self.world}

    def within(self, timeout: float) -> Trial:
        """The same with another timeout."""
        return replace(self, timeout=timeout)

    def describe(self) -> str:
        """In a line: what, where and when."""
        where = f"{self.layout} under {self.launcher}{', auto' * self.is_auto}{', folders' * self.is_folder}"
        what = {
            "pause": f"for {self.pause * self.timeout:.1f} s",
            "raise": f"{self.error} in {self.hook}, call {self.call}",
            "threads": f"then {self.error} in {self.hook}",
            "exit": f"with {self.exit_code}",
            "unequal": str(self.other),
            "damage": f"{self.damage[0]} at {self.damage[1]:.2f}",
        }.get(self.kind, "")
        when = f"in {self.phase} + {self.delay:.2f}" if self.phase else ""
        return f"{self.kind} {what} on rank {self.victim} {when} ({where}, {self.workers} workers)"


def draw(seed: int, number: int, *, kinds: list[str], layouts: list[str]) -> Trial:
    """The trial with this number, but for what depends on the machine; the same for the same arguments.

    Args:
        kinds: that may be drawn.
        layouts: that may be drawn.
    """
    pick = random.Random(f"{seed}/{number}")
    kind = pick.choices(kinds, [KINDS[kind] for kind in kinds])[0]
    layout = pick.choices(layouts, [3 if layout == "2" else 1 for layout in layouts])[0]
    victim = pick.randrange(LAYOUTS[layout][1])
    found: dict[str, Any] = {
        "launcher": "torchrun" if pick.random() < 0.2 else "lightning",
        "is_auto": pick.random() < 0.2,
        "is_folder": pick.random() < 0.35,
        "workers": int(pick.random() < 0.25),
    }
    if kind in WITH_PHASE:
        # Nothing of ours runs in a process that starts up; and torchrun waits for ever for one that stops at its end.
        early = kind in (*BY_SIGNAL, "interrupt")
        late = not (kind == "stop" and found["launcher"] == "torchrun")
        found["phase"] = pick.choice(PHASES[not early : None if late else -1])
        found["delay"] = pick.random() if found["phase"] == "start-up" else pick.random() ** 2 * 0.4
        if found["is_auto"] and found["phase"] == "first step":
            found["delay"] *= 8
    if kind in ("raise", "threads"):
        found["hook"] = pick.choice(HOOKS if kind == "raise" else IN_STEPS)
        found["error"] = pick.choice(("ValueError", "ValueError", "MemoryError", "sys.exit(0)"))
        found["call"] = pick.choice((1, 1, 2, 3, 5))
        if kind == "threads":
            found.update(error="ValueError", call=1, phase=pick.choice(PHASES[1:4]))
        if found["hook"] in ON_RANK_0:
            victim = 0
    if kind == "unequal":
        found["other"] = pick.choice(OTHERS)
    if kind == "damage":
        found["damage"] = (pick.choice(("cut", "flip")), pick.random())
    if kind == "memory":
        found["spare"] = pick.choice((0, 1 << 20, 64 << 20))
    return Trial(
        seed,
        number,
        layout,
        kind=kind,
        victim=victim,
        pause=pick.uniform(0.1, 0.5),
        exit_code=pick.choice((0, 0, 3)),
        **found,
    )
