"""What the callback writes of recorded actions, whose times are in seconds."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

from lightning_pipeline.schedules import Action
from lightning_pipeline.strategy.timeline_files import draw_timeline, measured_bubble, write_chrome_trace

RECORDED = [
    [(Action.parse("0F0"), 10.0, 10.001), (Action.parse("0SEND_F0"), 10.001, 10.002)],
    [(Action.parse("1RECV_F0"), 10.0, 10.002), (Action.parse("1F0"), 10.002, 10.004)],
]


def test_bubble_is_time_without_computation() -> None:
    assert measured_bubble(RECORDED) == pytest.approx(5 / 8)


def test_trace_is_in_microseconds(tmp_path: Path) -> None:
    events = json.loads(write_chrome_trace(RECORDED, tmp_path / "t.json").read_text())["traceEvents"]
    spans = {event["name"]: (event["ts"], event["dur"]) for event in events if event["ph"] == "X"}
    assert spans["1F0"] == (pytest.approx(2000), pytest.approx(2000))
    assert set(spans) == {"0F0", "0SEND_F0", "1RECV_F0", "1F0"}


def test_picture_is_in_milliseconds(tmp_path: Path) -> None:
    path = draw_timeline(RECORDED, tmp_path / "t.svg")
    assert path is not None
    texts = [text.text for text in ElementTree.parse(path).iter("{http://www.w3.org/2000/svg}text")]
    assert "milliseconds" in texts
    assert "last training step, bubble 62.5%" in texts
    # The last tick of an axis of four milliseconds.
    assert "4.0" in texts or "4" in texts


def test_without_matplotlib_a_warning_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.warns(UserWarning, match=r"pip install lightning-pipeline\[examples\]"):
        assert draw_timeline(RECORDED, tmp_path / "t.png") is None
    assert not list(tmp_path.iterdir())
