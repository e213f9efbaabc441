"""Files of records: what a run wrote before it was killed, and files that are none."""

from __future__ import annotations

from pathlib import Path

import pytest

from lightning_pipeline.schedules import Action, ScheduleError
from lightning_pipeline.schedules import records as module
from lightning_pipeline.schedules.records import MAX_STEPS, RecordedStep, RecordFile, earlier_of, read_records
from lightning_pipeline.schedules.report import report_of_records

RUN = {"module": "Net", "schedule": "1f1b", "stages": [{"rank": 0, "first": ""}], "stage_config": {}}


def recorded(start: float = 10.0) -> list[list[RecordedStep]]:
    actions = [(Action.parse("0F0"), start, start + 0.001), (Action.parse("0B0"), start + 0.001, start + 0.003)]
    return [[RecordedStep(0, actions, [(start + 0.003, start + 0.004)], 1, {Action.parse("0SEND_F0"): 12}, 7)]]


def test_what_is_written_is_read(tmp_path: Path) -> None:
    file = RecordFile(tmp_path / "new" / "timeline.jsonl", RUN)
    file.add_step(5, 1e9, recorded())
    file.add_advice({"better": "as it is"})
    found = read_records(file.path)
    assert (found.run["module"], found.advice["better"], found.num_steps) == ("Net", "as it is", 1)
    [(number, _, [[rank]])] = found.steps
    assert number == 5
    assert [(str(action), start) for action, start, _ in rank.actions] == [("0F0", 0.0), ("0B0", pytest.approx(0.001))]
    assert (rank.sent, rank.memory, rank.peak_live) == ({Action.parse("0SEND_F0"): 12}, 7, 1)


def test_a_killed_run_leaves_its_last_line_unfinished(tmp_path: Path) -> None:
    file = RecordFile(tmp_path / "timeline.jsonl", RUN)
    for step in (1, 2):
        file.add_step(step, 1e9, recorded())
    text = file.path.read_text()
    file.path.write_text(text[: len(text) - 40])
    assert [number for number, _, _ in read_records(file.path).steps] == [1]


def test_a_long_run_keeps_its_last_steps_in_two_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = RecordFile(tmp_path / "timeline.jsonl", RUN)
    monkeypatch.setattr(module, "MAX_FILE_BYTES", 2000)
    for step in range(40):
        file.add_step(step, 1e9, recorded())
    assert file.path.stat().st_size + earlier_of(file.path).stat().st_size < 5000
    numbers = [number for number, _, _ in read_records(file.path).steps]
    assert numbers == list(range(numbers[0], 40)) and len(numbers) > 5


def test_of_many_steps_some_are_read(tmp_path: Path) -> None:
    file = RecordFile(tmp_path / "timeline.jsonl", RUN)
    for step in range(MAX_STEPS + 50):
        file.add_step(step, 1e9, recorded())
    found = read_records(file.path)
    numbers = [number for number, _, _ in found.steps]
    assert (len(numbers), numbers[0], numbers[-1]) == (MAX_STEPS, 0, MAX_STEPS + 49)
    assert report_of_records(found).notes == [f"{MAX_STEPS} of {MAX_STEPS + 50} recorded steps are shown."]


@pytest.mark.parametrize("text", ["", "{}\n", "[]\n", "nonsense\n", '{"kind":"step"}\n', '{"kind":"other"}\n'])
def test_other_files_are_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "x.jsonl").write_text(text)
    with pytest.raises(ScheduleError, match=r"no record of steps|no whole step"):
        read_records(tmp_path / "x.jsonl")


def test_a_run_without_a_step_says_when_there_will_be_one(tmp_path: Path) -> None:
    with pytest.raises(ScheduleError, match="no whole step yet; PipelineTimeline records every every_n_steps"):
        read_records(RecordFile(tmp_path / "timeline.jsonl", RUN).path)
