"""One rank's actions, run by a table and a loop."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from lightning_pipeline.engine.executor import METHODS, RankProgram, ScheduleRun
from lightning_pipeline.schedules import Schedule, build, lower

NUM_RANKS, NUM_MICROBATCHES = 4, 8


class Stage:
    """Notes what it does. A micro-batch has to be prepared before its first action, and before a receive is posted."""

    def __init__(self, stage: int, prepared: list[int], notes: list[tuple[str, int, int]]) -> None:
        self.ready_at = 0.0
        self.prepare: Callable[[int], None]
        self._stage, self._prepared, self._notes = stage, prepared, notes
        self._posted: set[tuple[str, int]] = set()

    def __getattr__(self, name: str) -> Callable[[int], bool]:
        def do(microbatch: int) -> bool:
            if name.startswith("post"):
                return self._post(name, microbatch)
            if microbatch not in self._prepared:
                self.prepare(microbatch)
            if name.startswith("receive"):
                self._post(name.replace("receive", "post"), microbatch)
            self._notes.append((name, self._stage, microbatch))
            return True

        return do

    def _post(self, name: str, microbatch: int) -> bool:
        if microbatch in self._prepared and (name, microbatch) not in self._posted:
            self._posted.add((name, microbatch))
            self._notes.append((name, self._stage, microbatch))
        return microbatch in self._prepared


def went(schedule: Schedule, rank: int, *, finishes_before: bool = False) -> list[tuple[str, int, int]]:
    """What a rank does.

    Args:
        finishes_before: each micro-batch has those before it finished while it is prepared.
    """
    actions = lower(schedule)[rank]
    notes: list[tuple[str, int, int]] = []
    prepared: list[int] = []

    def prepare(microbatch: int) -> None:
        for one in range(min(microbatch + 1, NUM_MICROBATCHES)):
            if one not in prepared and one not in underway:
                underway.add(one)
                if finishes_before:
                    run.go_on(below=one)
                prepared.append(one)
                notes.append(("prepare", -1, one))

    underway: set[int] = set()
    stages = {action.stage: Stage(action.stage, prepared, notes) for action in actions}
    for stage in stages.values():
        stage.prepare = prepare
    run = ScheduleRun(RankProgram(actions), stages, prepare=prepare)
    run.go_on()
    did = [note for note in notes if note[0] in METHODS.values()]
    expected = [(METHODS[action.kind], action.stage, action.microbatch) for action in actions]
    assert sorted(did) == sorted(expected)
    assert finishes_before or did == expected
    return notes


@pytest.mark.parametrize("rank", range(NUM_RANKS))
@pytest.mark.parametrize("name", ["gpipe", "1f1b", "zero_bubble"])
def test_micro_batches_are_prepared_while_inputs_are_on_their_way(name: str, rank: int) -> None:
    notes = went(build(name, NUM_RANKS, NUM_MICROBATCHES), rank)
    for microbatch in range(NUM_MICROBATCHES):
        before = notes[: notes.index(("forward", rank, microbatch))]
        if rank:  # by as many as there are stages before this one, and the next receive is posted before the wait
            assert ("prepare", -1, min(microbatch + rank, NUM_MICROBATCHES - 1)) in before
            assert microbatch + 1 == NUM_MICROBATCHES or ("post_forward", rank, microbatch + 1) in before
        elif name == "1f1b" and microbatch >= NUM_RANKS:  # the next one while gradients are waited for
            waited = max(index for index, (call, *_) in enumerate(before) if call == "receive_backward")
            assert ("prepare", -1, microbatch) in before[waited:]


@pytest.mark.parametrize("rank", range(NUM_RANKS))
@pytest.mark.parametrize("name", ["gpipe", "1f1b", "zero_bubble"])
def test_no_send_waits_for_a_preparation(name: str, rank: int) -> None:
    notes = went(build(name, NUM_RANKS, NUM_MICROBATCHES), rank)
    computed_by = {"send_forward": ("forward",), "send_backward": ("backward", "backward_input")}
    for index, (call, *_, microbatch) in enumerate(notes):
        if call in computed_by:
            computed = max(at for at in range(index) if notes[at][0] in computed_by[call])
            assert notes[computed][2] == microbatch
            assert "prepare" not in {note[0] for note in notes[computed:index]}


@pytest.mark.parametrize("finishes_before", [False, True])
@pytest.mark.parametrize("name", ["1f1b", "interleaved_1f1b", "looped_bfs", "zbv"])
def test_receives_are_posted_in_the_order_of_the_sends(name: str, finishes_before: bool) -> None:
    """Also where micro-batches are finished out of turn: messages between two ranks have no other order."""
    schedule = build(name, 2, NUM_MICROBATCHES, 1 if name == "1f1b" else 2)
    notes = [went(schedule, rank, finishes_before=finishes_before) for rank in range(2)]
    for source in range(2):
        for way, step in (("forward", 1), ("backward", -1)):
            sent = [(stage + step, one) for call, stage, one in notes[source] if call == f"send_{way}"]
            posted = [(stage, one) for call, stage, one in notes[1 - source] if call == f"post_{way}"]
            assert sent == posted
