"""What Perfetto's importer would complain about in a trace in Chrome's format.

Perfetto's Python package downloads a binary to read a trace, so the rules are here: those of the "Trace Event Format"
document and of the statistics of severity "error" in Perfetto's ``src/trace_processor/importers/json``. It rounds times
to whole nanoseconds, towards zero, and then drops a slice that only partly overlaps another one of its thread, and an
arrow with an end outside of all slices.
"""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

Event = dict[str, Any]
TIMED = {"X": {"dur"}, "C": {"args"}, "b": {"id", "cat"}, "e": {"id", "cat"}, "s": {"id", "cat"}, "f": {"id", "cat"}}


def complaints(path: Path) -> list[str]:
    """Everything that is wrong with the trace at `path`; nothing for one that is shown as it was meant."""

    def refuse(constant: str) -> float:
        raise ValueError(f"{constant} is no JSON")

    content = json.loads(path.read_text(encoding="utf-8"), parse_constant=refuse)
    events: list[Event] = content["traceEvents"]
    found = [f"{event}: {what}" for event in events for what in _of_event(event)]
    if found:
        return found
    slices = {thread: _of_thread(events, thread) for thread in {_thread(event) for event in events}}
    return [
        *[f"overlap on {thread}: {names}" for thread, rows in slices.items() for names in _overlapping(rows)],
        *_arrows(events, slices),
        *_asynchronous(events),
    ]


def _of_event(event: Event) -> list[str]:
    phase = event.get("ph")
    if phase == "M":
        known = event["name"] in ("thread_name", "process_name")
        return [] if known and isinstance(event["args"]["name"], str) else ["is no name of a thread or process"]
    if phase not in TIMED:
        return [f"its phase is {phase}"]
    found = [f"has no {key}" for key in sorted({"name", "pid", "tid", "ts"} | TIMED[phase]) if key not in event]
    found += [f"its {key} is no number from 0" for key in ("ts", "dur") if not 0 <= event.get(key, 0) < 2**53]
    found += [f"its {key} is no 32 bits" for key in ("pid", "tid") if event.get(key) not in range(2**32)]
    if phase == "C" and not all(isinstance(value, (int, float)) for value in event["args"].values()):
        found.append("counts what is no number")
    return found


def _thread(event: Event) -> tuple[int, int]:
    return event["pid"], event["tid"]


def _of_thread(events: list[Event], thread: tuple[int, int]) -> list[tuple[int, int, str]]:
    """Begin, end and name of its slices as Perfetto has them: in nanoseconds, by their begin."""
    slices = [event for event in events if event["ph"] == "X" and _thread(event) == thread]
    whole = [(int(event["ts"] * 1000.0), int(event["dur"] * 1000.0), event["name"]) for event in slices]
    return sorted(((begin, begin + length, name) for begin, length, name in whole), key=lambda one: one[0])


def _overlapping(slices: list[tuple[int, int, str]]) -> list[str]:
    found, opened = [], list[tuple[int, int, str]]()
    for begin, end, name in slices:
        while opened and opened[-1][1] <= begin:
            opened.pop()
        if opened and end > opened[-1][1]:
            found.append(f"{opened[-1]} and {(begin, end, name)}")
        opened.append((begin, end, name))
    return found


def _arrows(events: list[Event], slices: dict[tuple[int, int], list[tuple[int, int, str]]]) -> list[str]:
    """An arrow has two ends of one category and name, its own number, and a slice around each end."""
    found = []
    for event in events:
        if event["ph"] in "sf":
            time = int(event["ts"] * 1000.0)
            if not any(begin <= time < end for begin, end, _ in slices[_thread(event)]):
                found.append(f"{event} lies in no slice")
            if not isinstance(event["id"], int) or (event["ph"] == "f" and event.get("bp") != "e"):
                found.append(f"{event} is bound to nothing")
    ends = {phase: Counter((e["cat"], e["name"], e["id"]) for e in events if e["ph"] == phase) for phase in "sf"}
    if ends["s"] != ends["f"] or (ends["s"] and max(ends["s"].values()) > 1):
        found.append(
            f"arrows without a second end, or with a third: {(ends['s'] - ends['f']) + (ends['f'] - ends['s'])}"
        )
    return found


def _asynchronous(events: list[Event]) -> list[str]:
    """What begins ends, and no earlier."""
    times: dict[Any, dict[str, list[float]]] = {}
    for event in events:
        if event["ph"] in "be":
            key = event["pid"], event["cat"], event["name"], event["id"]
            times.setdefault(key, {"b": [], "e": []})[event["ph"]].append(event["ts"])
    pairs = {key: (found["b"], found["e"]) for key, found in times.items()}
    return [f"{key} from {b} to {e}" for key, (b, e) in pairs.items() if not len(b) == len(e) == 1 or b[0] > e[0]]
