"""Trials of runs in which something goes wrong: ``make campaign ARGS="--trials 200"``.

Each trial starts a small run, lets one fault befall one of its ranks, and checks that it ends in time and with the
right exit code, says which rank failed and why, leaves no process, and that a run which goes on from its last
checkpoint ends with the bits of one that was not interrupted. The same seed and number give the same trial.
"""

from __future__ import annotations

import argparse
import json
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter, defaultdict
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor

from tests.campaign.checks import differing, expected_seconds, leftovers, problems_of
from tests.campaign.runs import SCRIPT, can_mount, copy_checkpoints, damage, make_room, run, small_disk, weights_of
from tests.campaign.script import train
from tests.campaign.trials import KINDS, LAYOUTS, Trial, draw
from tests.launching import launch
from tests.scripts import Host

LEAST_S, TIMES_USUAL = 12.0, 1.3
"""The strategy's timeout: seconds, or what a run without a fault takes on this machine, whichever is more."""
HANGS_S = 60.0
"""How much longer than it may a run is let go on."""


class Campaign:
    """Runs trials, and what they are compared with once.

    Args:
        folder: for logs of trials in which something does not hold.
        timeout: of the strategy, in seconds; None for one that fits each layout and the machine's speed.
        kinds: of fault, that are drawn.
        layouts: that are drawn.
        host: see `run`.
    """

    def __init__(
        self,
        folder: Path,
        seed: int,
        *,
        timeout: float | None,
        kinds: list[str],
        layouts: list[str],
        host: Host | None = None,
    ) -> None:
        self.folder = folder
        self.host = host
        self.seed = seed
        self.kinds = kinds
        self.layouts = layouts
        folder.mkdir(parents=True, exist_ok=True)
        self.has_small_disks = can_mount(folder)
        self.usual: dict[str, float] = {}
        self.references: dict[str, dict[str, Tensor]] = {}
        self.timeout = timeout

    def trial(self, number: int) -> dict[str, Any]:
        """Run a trial. Returns its line."""
        kinds = [kind for kind in self.kinds if kind != "disk" or self.has_small_disks]
        trial = draw(self.seed, number, kinds=kinds, layouts=self.layouts)
        reference = self._reference(trial)
        usual = self.usual[trial.run]
        # Within it all processes have to start, too.
        trial = trial.within(self.timeout or round(max(LEAST_S, TIMES_USUAL * usual)))
        folder = self.folder / f"{self.seed}-{number}"
        shutil.rmtree(folder, ignore_errors=True)
        with small_disk(folder, wanted=trial.kind == "disk"):
            note = self._prepare(trial, folder)
            limit = 3 * usual + expected_seconds(trial, usual=usual) + HANGS_S
            ended = run(trial, folder, start_up=0.8 * usual, limit=limit, host=self.host)
            weights = weights_of(folder)
            problems = problems_of(trial, ended, weights, reference, usual=usual)
            if trial.kind != "damage" and weights is None:
                make_room(folder / "checkpoints")
                problem = self._resume(trial, folder, reference)
                problems += [problem] if problem else []
        (folder / "output.log").write_text(ended.output)
        if not problems:
            shutil.rmtree(folder)
        return {
            "trial": number,
            "seed": self.seed,
            "what": trial.describe() + note,
            "kind": trial.kind,
            "phase": trial.phase or trial.hook,
            "happened": ended.happened,
            "exit_code": ended.exit_code,
            "seconds": round(ended.seconds, 1),
            "problems": problems,
            "again": f'make campaign ARGS="{self._again(trial)}"',
            "folder": str(folder) if problems else "",
            "fields": trial.as_dict(),
        }

    def _again(self, trial: Trial) -> str:
        """The arguments that give this trial."""
        told = f"--seed {self.seed} --trial {trial.number} --timeout {trial.timeout:g}"
        if self.kinds != list(KINDS):
            told += f" --kinds {' '.join(self.kinds)}"
        return told if self.layouts == list(LAYOUTS) else f"{told} --layouts {' '.join(self.layouts)}"

    def _prepare(self, trial: Trial, folder: Path) -> str:
        """What is there before a run: nothing, or a damaged checkpoint of one that was interrupted."""
        if trial.kind != "damage":
            return ""
        kept = self.folder / f"half {trial.run} {trial.is_folder}"
        if not kept.exists():
            half = replace(trial, kind="none", launcher="lightning", epochs=trial.epochs // 2, workers=0, timeout=60.0)
            place = Path(tempfile.mkdtemp(dir=self.folder))
            (place / "checkpoints").mkdir()
            launch(train, half.as_dict(), place, world=trial.world)
            (place / "checkpoints").rename(kept)
            shutil.rmtree(place)
        copy_checkpoints(kept, folder / "checkpoints")
        return f": {damage(folder / 'checkpoints', *trial.damage)}"

    def _reference(self, trial: Trial) -> dict[str, Tensor]:
        """The weights of the uninterrupted run, and how long it takes."""
        if trial.run not in self.references:
            place = self.folder / f"reference {trial.run}"
            shutil.rmtree(place, ignore_errors=True)
            (place / "checkpoints").mkdir(parents=True)
            plain = Trial(trial.seed, trial.number, trial.layout, is_auto=trial.is_auto, timeout=120.0)
            started = time.monotonic()
            ended = run(plain, place, start_up=0.0, limit=600.0, host=self.host)
            weights = weights_of(place)
            if ended.exit_code != 0 or weights is None:
                raise SystemExit(f"the run without a fault failed:\n{ended.output}")
            self.usual[trial.run] = time.monotonic() - started
            self.references[trial.run] = weights
            shutil.rmtree(place)
        return self.references[trial.run]

    def _resume(self, trial: Trial, folder: Path, reference: dict[str, Tensor]) -> str:
        """What does not hold of a run that goes on from the last checkpoint; "" for nothing."""
        again = replace(trial, kind="none", launcher="lightning", workers=0, timeout=60.0)
        try:
            weights = launch(train, again.as_dict(), folder, world=trial.world, timeout=300.0)[0]
        except AssertionError as error:
            return f"it cannot go on from its checkpoint: {error}"
        if names := differing(weights, reference):
            return f"it went on from its checkpoint to other weights: {', '.join(names[:3])}"
        if left := leftovers(folder / "checkpoints"):
            return f"files of an interrupted save stay: {left}"
        return ""


def summary(lines: list[dict[str, Any]]) -> str:
    """A table: how many trials of each kind and phase there were, and how they ended."""
    rows: dict[str, Counter[str]] = defaultdict(Counter)
    for line in lines:
        outcome = "missed" if not line["happened"] and line["kind"] not in ("unequal", "damage") else "failed, told"
        if line["exit_code"] == 0 and outcome != "missed":
            outcome = "ended well"
        for row in (line["kind"], f"  {line['phase']}" if line["kind"] not in ("raise",) else "  (hooks)", "total"):
            rows[row if not row.startswith("  ") else f"phase {row.strip() or '-'}"].update(
                ("trials", "PROBLEM" if line["problems"] else outcome)
            )
    columns = ("trials", "failed, told", "ended well", "missed", "PROBLEM")
    table = [f"{'':24}" + "".join(f"{column:>14}" for column in columns)]
    names = [*KINDS, *sorted(row for row in rows if row.startswith("phase")), "total"]
    table += [f"{row:24}" + "".join(f"{rows[row][column]:>14}" for column in columns) for row in names if row in rows]
    return "\n".join(table)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="make campaign", description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--trials", type=int, default=20, help="how many")
    parser.add_argument("--first", type=int, default=0, help="number of the first one")
    parser.add_argument("--trial", type=int, action="append", help="this one alone; may be given several times")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kinds", nargs="+", default=list(KINDS), choices=list(KINDS), help="kinds of fault")
    parser.add_argument("--layouts", nargs="+", default=list(LAYOUTS), choices=list(LAYOUTS))
    parser.add_argument("--timeout", type=float, help="the strategy's, in seconds; default: by the machine's speed")
    parser.add_argument("--jobs", type=int, default=1, help="trials at once; more than one disturb one another")
    parser.add_argument("--folder", type=Path, default=Path("campaign"), help="for results and logs")
    parser.add_argument(
        "--forked",
        action="store_true",
        help="run scripts in forked processes: faster, but trials that end the first process see another end",
    )
    given = parser.parse_args(arguments)
    # A shell starts what runs in the background without it, and so would all that is started here.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    with closing(Host(SCRIPT, 600.0)) if given.forked else nullcontext() as host:
        return report(given, host)


def report(given: argparse.Namespace, host: Host | None) -> int:
    """Run the trials, and print and write what became of them."""
    campaign = Campaign(
        given.folder.absolute(), given.seed, timeout=given.timeout, kinds=given.kinds, layouts=given.layouts, host=host
    )
    if not campaign.has_small_disks:
        print("this process may not mount: no disk is filled")
    numbers = given.trial or range(given.first, given.first + given.trials)
    lines = []
    with (campaign.folder / "trials.jsonl").open("a") as file, ThreadPoolExecutor(given.jobs) as threads:
        for line in threads.map(campaign.trial, numbers):
            lines.append(line)
            file.write(json.dumps(line) + "\n")
            file.flush()
            state = "PROBLEM " + "; ".join(line["problems"])[:300] if line["problems"] else "ok"
            ending = f"exit {line['exit_code']} after {line['seconds']} s"
            print(f"{line['trial']:4} {line['what']}: {ending}, {state}", flush=True)
    print(summary(lines))
    return int(any(line["problems"] for line in lines))


if __name__ == "__main__":
    sys.exit(main())
