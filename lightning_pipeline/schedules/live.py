"""What the ranks of a run are at right now: a small file for each, which `lightning-pipeline watch` reads."""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from lightning_pipeline.schedules.schedule import Action, Kind
from lightning_pipeline.schedules.simulation import SENDS
from lightning_pipeline.schedules.validation import ScheduleError, read_text

SUFFIX = ".live"
"""Of the folder of these files, which lies beside the records."""
MAX_BYTES = 2**12


@dataclass
class LiveRank:
    """What a rank is at.

    Attributes:
        now: in words: what it computes, or waits for, or that it is between steps.
        done, actions: how many of the step's actions it has run, and how many there are.
        memory: the most bytes so far, as in `RecordedStep`.
        seconds: from the beginning of the step before to that of this one; 0 in the first one.
    """

    rank: int
    stages: list[int]
    step: int
    now: str
    is_waiting: bool
    done: int
    actions: int
    live: int
    memory: int
    seconds: float

    def write(self, folder: Path) -> None:
        """Replace the rank's file, at once for those that read it."""
        path = folder / f"{self.rank}.json"
        draft = path.with_suffix(".new")
        folder.mkdir(parents=True, exist_ok=True)
        draft.write_text(json.dumps(asdict(self)), encoding="utf-8")
        os.replace(draft, path)


def read_live(folder: Path) -> list[tuple[LiveRank, float]]:
    """The ranks of a run that goes on, in order, each with when it was written (seconds since 1970)."""
    found = []
    for path in folder.glob("*.json"):
        try:
            written = path.stat().st_mtime
            content = json.loads(read_text(path, kind="what a rank is at", most=MAX_BYTES))
            rank = LiveRank(**{field.name: content[field.name] for field in fields(LiveRank)})
            kinds: dict[str, type | tuple[type, ...]] = {
                "int": int,
                "str": str,
                "bool": bool,
                "float": (int, float),
                "list[int]": list,
            }
            for field in fields(LiveRank):
                if not isinstance(getattr(rank, field.name), kinds[str(field.type)]):
                    raise ValueError(f"{field.name} is no {field.type}")
        except FileNotFoundError:  # the run has just ended
            continue
        except (KeyError, RecursionError, TypeError, ValueError) as error:
            raise ScheduleError(f"{path} does not tell what a rank is at ({type(error).__name__}: {error})") from None
        found.append((rank, written))
    return sorted(found, key=lambda one: one[0].rank)


def at_work(
    program: Sequence[Action], done: Collection[Action], ranks: Sequence[int], *, is_waiting: bool
) -> tuple[str, int]:
    """What a rank is at, in words, and how many activations it holds."""
    live = sum({Kind.F: 1, Kind.B: -1, Kind.W: -1}.get(action.kind, 0) for action in program if action in done)
    action = next((one for one in program if one not in done), None)
    if action is None:
        return ("waits for another rank at" if is_waiting else "is at") + " the step's end", live
    if not is_waiting:
        doing = "computes" if action.kind.is_compute else "exchanges"
        return f"{doing} {action}", live + (action.kind is Kind.F)
    if action.kind in SENDS:
        peer = action.stage + (1 if action.kind is Kind.SEND_F else -1)
        return f"waits until rank {ranks[peer]} takes what {action} sends", live
    is_forward = action.kind in (Kind.F, Kind.RECV_F)
    peer = action.stage + (-1 if is_forward else 1)
    if not 0 <= peer < len(ranks):
        return f"waits in {action}", live
    return f"waits for {peer}{'F' if is_forward else 'B'}{action.microbatch} of rank {ranks[peer]}", live
