"""Runs habits on stages and in one process, and tells which of them came out the same.

    python -m tests.habits                                   # all of them, on 2 stages under 1f1b
    python -m tests.habits --only KL --only state.           # those whose "subject.Name" contains either
    python -m tests.habits --configuration 4-1f1b 2-interleaved_1f1b
    python -m tests.habits --only KLFromSecondEpoch -v       # everything that differs, and tracebacks

Other configurations: `plain` compares one process with Lightning alone, `without` shows that each habit is seen in what
is compared (there, being equal is a fault), and 1-1f1b runs one process again. The exit code is 1 where anything is not
as the table says. NO REFERENCE is a habit that one process of this package already fails on.

Most sizes are powers of two. With HABITS_WIDTH=13 HABITS_CLASSES=5 HABITS_SAMPLES=12, tensors begin anywhere in memory,
on which sums depend; some 50 habits that count on the usual sizes have no reference then.

With TESTS_ON=cuda or npu (see on_device.py), those habits are left out that one process fails on there.
"""

from __future__ import annotations

import argparse
import tempfile
import textwrap
import time
from collections import Counter
from pathlib import Path

from tests import on_device
from tests.habits.driver import (
    COMPARED,
    EQUAL,
    PATIENCE_S,
    WRONG,
    Verdict,
    judge,
    load_records,
    run_configuration,
)
from tests.habits.harness import CONFIGURATIONS, Configuration
from tests.habits.table import Expectation, Habit, chosen
from tests.launching import PRELOADED


def main() -> None:
    options = read_options()
    first, _, shares = options.share.partition("/")
    habits = chosen(options.only)[int(first) - 1 :: int(shares)]
    if options.list:
        for habit in habits:
            print(f"{habit.full_name:<60}  {habit.expectation}")
        return
    PRELOADED.append("tests.habits.preloaded")  # a launch takes a fifth of the time
    failed = False
    with tempfile.TemporaryDirectory(prefix="habits-") as scratch:
        folder = Path(scratch) if options.keep is None else options.keep
        began = time.monotonic()
        for _ in run_configuration(habits, "1", folder, options.patience):
            pass
        if on_device.DEVICE != "cpu":
            habits = [habit for habit in habits if has_reference(habit, folder)]
        print(f"one process, {len(habits)} habits: {time.monotonic() - began:.0f} s", flush=True)
        for configuration in options.configuration:
            asked = [habit for habit in habits if applies(habit, configuration)]
            failed |= report(asked, configuration, folder, options)
    raise SystemExit(failed)


def read_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m tests.habits",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--only",
        nargs="+",
        action="extend",
        default=[],
        metavar="NAME",
        help="habits whose subject.Name contains it",
    )
    parser.add_argument(
        "--configuration",
        nargs="+",
        action="extend",
        default=[],
        metavar="2-1f1b",
        help=f"stages and schedule; all: {' '.join(CONFIGURATIONS)}; or plain, without",
    )
    parser.add_argument("--ignore", nargs="+", default=[], metavar="PART", help=f"not to compare: {' '.join(COMPARED)}")
    parser.add_argument("--share", default="1/1", metavar="2/8", help="only every eighth habit, from the second on")
    parser.add_argument("--patience", type=float, default=PATIENCE_S, help="seconds for one habit, default %(default)s")
    parser.add_argument("--keep", type=Path, help="a folder for the records and files of every rank")
    parser.add_argument("--list", action="store_true", help="list habits and what is expected of them; run nothing")
    parser.add_argument("-v", "--verbose", action="store_true", help="all that differs, and tracebacks")
    parser.add_argument("-q", "--quiet", action="store_true", help="only what is not as expected, and the sums")
    options = parser.parse_args()
    options.configuration = options.configuration or ["2-1f1b"]
    if options.configuration == ["all"]:
        options.configuration = list(CONFIGURATIONS)
    for text in options.configuration:
        Configuration.of(text)
    return options


def has_reference(habit: Habit, folder: Path) -> bool:
    [record] = load_records(folder, "1", habit.name, 1)
    return record is not None and "error" not in record


def applies(habit: Habit, configuration: str) -> bool:
    return {"plain": habit.plain, "without": habit.without is not None}.get(configuration, True)


def report(habits: list[Habit], configuration: str, folder: Path, options: argparse.Namespace) -> bool:
    """Print a line a habit as launches end, and the sums; whether anything is not as the table says."""
    began = time.monotonic()
    print(f"{configuration}, {len(habits)} habits", flush=True)
    outcomes: Counter[str] = Counter()
    not_as_told = only_random = 0
    for done in run_configuration(habits, configuration, folder, options.patience):
        for habit in done:
            verdict = judge(habit, configuration, folder, ignored=options.ignore)
            if configuration == "without":
                verdict = turned_round(verdict)
            outcomes[verdict.outcome] += 1
            only_random += verdict.outcome == WRONG and all(": random." in line for line in verdict.differences)
            not_as_told += not verdict.is_as_told
            if not verdict.is_as_told or not options.quiet:
                print(line(habit, verdict, habit.expected_of(configuration), options.verbose), flush=True)
    sums = ", ".join(f"{number} {outcome}" for outcome, number in sorted(outcomes.items()))
    sums += f" ({only_random} of them in the generators' final states alone)" if only_random else ""
    print(f"{configuration}: {sums}; {not_as_told} not as told; {time.monotonic() - began:.0f} s\n", flush=True)
    return not_as_told > 0


def turned_round(verdict: Verdict) -> Verdict:
    """What does without the habit has to differ."""
    if verdict.outcome == EQUAL:
        return Verdict(WRONG, ["nothing that is compared shows the habit"], verdict.seconds)
    differs = verdict.outcome == WRONG
    return Verdict("differs" if differs else verdict.outcome, verdict.differences, verdict.seconds, differs)


def line(habit: Habit, verdict: Verdict, expected: Expectation, verbose: bool) -> str:
    head = f"  {verdict.outcome:<14} {habit.full_name:<56} {verdict.seconds:5.1f} s"
    if verdict.is_as_told and not verbose:
        return head
    if not verdict.is_as_told and verdict.outcome not in (WRONG,):
        head += f"   (expected: {expected})" if expected.pattern or verdict.outcome == EQUAL else ""
    told = verdict.differences if verbose else [d.splitlines()[0][:200] for d in verdict.differences[:3]]
    more = len(verdict.differences) - len(told)
    told = [*told, f"and {more} more"] if more > 0 else told
    return "\n".join([head, *(textwrap.indent(text, " " * 17) for text in told)])


if __name__ == "__main__":
    main()
