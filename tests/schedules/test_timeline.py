"""Timelines: their extent, their idle share, and their Chrome trace."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from lightning_pipeline.schedules import (
    Action,
    ScheduleError,
    build,
    extent,
    idle_share,
    save_chrome_trace,
    simulate,
)

# Two ranks from 10 to 14 seconds: 3 + 1 of 8 seconds compute.
RECORDED = [
    [(Action.parse("0F0"), 10.0, 11.0), (Action.parse("0SEND_F0"), 11.0, 11.5), (Action.parse("0B0"), 12.0, 14.0)],
    [(Action.parse("1RECV_F0"), 10.5, 11.5), (Action.parse("1F0"), 11.5, 12.5)],
]


def test_extent_and_idle_share() -> None:
    assert extent(RECORDED) == (10.0, 14.0)
    assert idle_share(RECORDED) == 0.5


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "interleaved_1f1b", "zbv"])
def test_idle_share_is_the_simulated_bubble(name: str) -> None:
    simulation = simulate(build(name, 4, 8, 2 if name in ("interleaved_1f1b", "zbv") else 1), transfer=0.25)
    assert idle_share(simulation.spans) == pytest.approx(simulation.bubble)


def test_without_actions() -> None:
    for timeline in ([], [[], []]):
        with pytest.raises(ScheduleError, match=f"timeline of {len(timeline)} ranks without any action"):
            extent(timeline)
    assert idle_share([[(Action.parse("0F0"), 1.0, 1.0)]]) == 0.0


def test_chrome_trace_has_an_event_for_each_action(tmp_path: Path) -> None:
    path = save_chrome_trace(RECORDED, tmp_path / "trace.json")
    events = json.loads(path.read_text())["traceEvents"]
    names = {event["tid"]: event["args"]["name"] for event in events if event["ph"] == "M"}
    assert names == {0: "rank 0", 1: "rank 1"}
    spans = [event for event in events if event["ph"] == "X"]
    assert [(event["tid"], event["name"], event["ts"], event["dur"]) for event in spans] == [
        (0, "0F0", 0.0, 1e6),
        (0, "0SEND_F0", 1e6, 0.5e6),
        (0, "0B0", 2e6, 2e6),
        (1, "1RECV_F0", 0.5e6, 1e6),
        (1, "1F0", 1.5e6, 1e6),
    ]
    assert [event["cat"] for event in spans] == ["F", "SEND_F", "B", "RECV_F", "F"]
    assert spans[3]["args"] == {"stage": 1, "microbatch": 0}


def test_chrome_trace_of_other_units(tmp_path: Path) -> None:
    path = save_chrome_trace(RECORDED, tmp_path / "trace.json", unit=1e-3)
    ends = [e["ts"] + e["dur"] for e in json.loads(path.read_text())["traceEvents"] if e["ph"] == "X"]
    assert max(ends) == pytest.approx(4e3)
