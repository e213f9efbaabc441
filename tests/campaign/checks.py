"""What has to hold of every trial, whatever befell it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from torch import Tensor

from tests.campaign.runs import Ended
from tests.campaign.trials import Trial

PATIENCE_S = 30.0
"""How long ranks that are told, or whose connections break, may take to end, one after another and in the worst case:
several seconds each to learn why, to let others read it, and to be ended by whoever started them."""
TORCHRUN_S = 35.0
"""torchrun gives processes that do not answer SIGTERM half a minute."""
EXIT_S = 65.0
"""How long a launcher that ends well waits for the others."""

CAUSES = {
    "kill": r"was killed by SIGKILL|its process (ended|has ended)|has ended; ending|Signal 9|exitcode *: -9",
    "stop": r"process(es)? (is|are) stopped|was killed by SIGKILL|after this process had ended, and was killed",
    "terminate": r"SIGTERM|its process (ended|has ended)|has ended; ending",
    "interrupt": r"KeyboardInterrupt|SIGINT",
    "exit": r"ended with exit code|its process (ended|has ended)|has ended; ending|exitcode",
    "close": r"(connections broke|lost its connections|lost its connection|connection|Connection)",
    "disk": r"No space left on device",
    "memory": r"[Cc]annot allocate memory|can't allocate memory|not enough memory|MemoryError|bad_alloc",
    "threads": r"the fault of the campaign|can't start new thread",
    "unequal": r"do not agree on",
    "damage": r"checkpoint",
}
"""What the output has to say of each kind."""


def may_end_well(trial: Trial) -> bool:
    """Whether a fault that happened may leave a run that ends as if it had not."""
    late = trial.phase in ("shutdown", "end")  # its process may be gone before a signal acts
    # Where a module is cut automatically, a rank on which a step cannot be measured has no say.
    unmeasured = trial.is_auto and trial.victim != 0 and trial.hook in ("module.training_step", "module.forward")
    return trial.kind in ("none", "pause", "memory", "damage") or unmeasured or late


def expected_seconds(trial: Trial, *, usual: float) -> float:
    """How long a run may go on after its fault.

    Args:
        usual: seconds that it takes without one on this machine.
    """
    seconds = PATIENCE_S + usual
    if trial.kind in ("stop", "close", "memory"):
        seconds += 1.5 * trial.timeout
    if trial.kind in ("pause", "memory", "damage", "disk", "threads", "raise"):
        seconds += 2 * usual + trial.pause * trial.timeout  # it may go on to its end, or the fault comes late
    if trial.launcher == "torchrun":
        seconds += TORCHRUN_S
    if trial.phase in ("shutdown", "end"):
        seconds += EXIT_S
    return seconds


def problems_of(trial: Trial, ended: Ended, weights: Any, reference: dict[str, Tensor], *, usual: float) -> list[str]:
    """What does not hold of a run, one line each.

    Args:
        weights: that it ended with; None if it wrote none.
        reference: those of the uninterrupted run.
    """
    problems = []
    if ended.exit_code is None:
        problems.append("it hangs")
    limit = expected_seconds(trial, usual=usual)
    if ended.happened and ended.seconds > limit:
        problems.append(f"it went on for {ended.seconds:.0f} s after the fault, more than {limit:.0f} s")
    problems += [f"it left a process: {process}" for process in ended.stayed]
    well = ended.exit_code == 0
    if weights is not None and (names := differing(weights, reference)):
        problems.append(f"it ended well with other weights than without the fault: {', '.join(names[:3])}")
    if not ended.happened and trial.kind not in ("unequal", "damage"):
        if not well:
            problems.append("it failed though the fault did not come")
        return problems
    if well:
        own_code = trial.victim == 0 and trial.launcher == "lightning" and is_silent(trial)
        stopped = trial.kind == "terminate" and "SIGTERM was received: all ranks stop" in ended.output
        # Lightning ends what SIGTERM has stopped with exit code 0.
        if not may_end_well(trial) and not own_code and not stopped:
            problems.append("it ended with exit code 0")
        elif weights is None and not own_code and not stopped:
            problems.append("it ended with exit code 0 before its end")
        return problems
    if trial.kind in ("none", "pause"):
        problems.append("it failed")
    elif ended.exit_code is not None:
        problems += untold(trial, ended)
    return problems


def is_silent(trial: Trial) -> bool:
    """Whether the victim itself ends with exit code 0."""
    return (trial.kind == "exit" and trial.exit_code == 0) or trial.error == "sys.exit(0)"


def untold(trial: Trial, ended: Ended) -> list[str]:
    """What the output does not say."""
    if trial.victim == 0 and trial.launcher == "lightning" and trial.phase in ("start-up", "shutdown", "end"):
        return []  # nobody is left who knows what there was, or has anything to wait for
    problems = []
    cause = CAUSES.get(trial.kind) or (r"SystemExit" if trial.error == "sys.exit(0)" else trial.error)
    lines = [line for line in ended.output.splitlines() if re.search(cause, line)]
    if not lines:
        problems.append(f"the cause is not told: {cause}")
    named = trial.kind not in ("interrupt", "terminate", "damage") and trial.launcher == "lightning"
    if trial.kind == "disk" and not trial.is_folder:
        named = False  # it is rank 0 that writes
    victim = rf"\brank ?{trial.victim}\b|ranks [\d ]*\b{trial.victim}\b"
    if trial.victim == 0 and trial.kind in ("kill", "exit"):
        victim += r"|which started this one"
    if named and not any(re.search(victim, line) for line in lines):
        problems.append(f"no line tells both of rank {trial.victim} and of the cause ({cause})")
    return problems


def differing(one: dict[str, Tensor], other: dict[str, Tensor]) -> list[str]:
    """Names of tensors whose bits differ."""
    if one.keys() != other.keys():
        return ["the names of tensors"]
    return [name for name in one if one[name].shape != other[name].shape or not one[name].equal(other[name])]


def leftovers(checkpoints: Path) -> list[str]:
    """Files that an interrupted save left, and the next one should have removed."""
    return [path.name for path in checkpoints.glob(".checkpoint-*")]
