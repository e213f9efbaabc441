"""What the callback writes of recorded actions, whose times are in seconds."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

from lightning_pipeline.schedules import Action
from lightning_pipeline.schedules.records import RecordedStep
from lightning_pipeline.strategy.timeline_files import MAX_ROWS, draw_timeline, write_chrome_trace

RECORDED = [
    [
        RecordedStep(0, [(Action.parse("0F0"), 10.0, 10.001), (Action.parse("0SEND_F0"), 10.001, 10.002)]),
        RecordedStep(1, [(Action.parse("1RECV_F0"), 10.0, 10.002), (Action.parse("1F0"), 10.002, 10.004)]),
    ]
]


def texts_of(path: Path) -> list[str | None]:
    return [text.text for text in ElementTree.parse(path).iter("{http://www.w3.org/2000/svg}text")]


def test_trace_is_in_microseconds(tmp_path: Path) -> None:
    events = json.loads(write_chrome_trace(RECORDED, tmp_path / "t.json").read_text())["traceEvents"]
    spans = {event["name"]: (event["ts"], event["dur"]) for event in events if event["ph"] == "X"}
    assert spans["1F0"] == (pytest.approx(2000), pytest.approx(2000))
    assert set(spans) == {"0F0", "0SEND_F0", "1RECV_F0", "1F0"}


def test_picture_is_in_milliseconds(tmp_path: Path) -> None:
    path = draw_timeline(RECORDED, tmp_path / "t.svg")
    assert path is not None
    texts = texts_of(path)
    assert "milliseconds" in texts
    assert "last training step, bubble 62.5%" in texts
    # The last tick of an axis of four milliseconds.
    assert "4.0" in texts or "4" in texts


def test_of_many_replicas_the_trace_has_all_and_the_picture_the_first(tmp_path: Path) -> None:
    num_replicas = MAX_ROWS
    reductions = [(10.004, 10.006)]
    recorded = [
        [
            RecordedStep(replica + num_replicas * stage, rank.actions, reductions * stage)
            for stage, rank in enumerate(RECORDED[0])
        ]
        for replica in range(num_replicas)
    ]
    path = draw_timeline(recorded, tmp_path / "t.svg")
    assert path is not None
    texts = texts_of(path)
    assert f"last training step, {MAX_ROWS // 2} of {num_replicas} replicas, bubble 62.5%" in texts
    assert "rank 0 (replica 0, stage 0)" in texts
    assert f"rank {num_replicas + 1} (replica 1, stage 1)" in texts
    assert len([text for text in texts if text and text.startswith("rank")]) == MAX_ROWS
    trace = write_chrome_trace(recorded, tmp_path / "t.json")
    events = json.loads(trace.read_text())["traceEvents"]
    assert len([event for event in events if event["ph"] == "b"]) == num_replicas
    assert len({event["tid"] for event in events}) == 2 * num_replicas


def test_without_matplotlib_a_warning_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.warns(UserWarning, match=r"pip install lightning-pipeline\[plot\]"):
        assert draw_timeline(RECORDED, tmp_path / "t.png") is None
    assert not list(tmp_path.iterdir())
