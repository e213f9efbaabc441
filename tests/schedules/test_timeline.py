"""Timelines: their extent, their idle share, and their Chrome trace."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from lightning_pipeline.schedules import (
    SCHEDULE_NAMES,
    Action,
    ScheduleError,
    build,
    default_virtual_stages,
    extent,
    idle_share,
    save_chrome_trace,
    simulate,
)
from lightning_pipeline.schedules.chrome_trace import load_chrome_trace
from lightning_pipeline.schedules.timeline import one_at_a_time, overlapped_share
from tests.trace_format import complaints

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


def test_overlapped_share() -> None:
    # Two buckets on their way at once count once: 12.5 to 13.5 and 13.5 to 16, of which 1.5 are before 14.
    assert overlapped_share(RECORDED, [[], [(12.5, 13.5), (13.0, 16.0)]]) == pytest.approx(1.5 / 3.5)
    assert overlapped_share(RECORDED, [[(12.5, 13.5)], [(14.0, 14.5)]]) == pytest.approx(1 / 1.5)
    assert overlapped_share(RECORDED, [[(14.5, 15.0)], []]) == 0.0
    assert overlapped_share(RECORDED, [[], []]) == 1.0


def test_one_at_a_time() -> None:
    assert one_at_a_time([(1.0, 4.0), (1.0, 2.0), (5.0, 6.0)]) == [(1.0, 2.0), (2.0, 4.0), (5.0, 6.0)]
    assert one_at_a_time([(2.0, 3.0), (1.0, 4.0)]) == [(2.0, 3.0), (3.0, 4.0)]


def test_chrome_trace_has_all_reduces_on_their_own_tracks(tmp_path: Path) -> None:
    reductions = [[], [(12.5, 14.5), (13.0, 15.0)]]
    path = save_chrome_trace(RECORDED, tmp_path / "t.json", reductions=reductions, labels=["rank 0", "rank 2"])
    events = json.loads(path.read_text())["traceEvents"]
    assert [event["args"]["name"] for event in events if event["ph"] == "M"] == ["rank 0", "rank 2"]
    found = [event for event in events if event["cat" if "cat" in event else "name"] == "all-reduce"]
    assert {event["name"] for event in found} == {"all-reduce, rank 2"}
    assert [(e["ph"], e["ts"], e["args"]["bucket"]) for e in found] == [
        ("b", 2.5e6, 0),
        ("e", 4.5e6, 0),
        ("b", 3.0e6, 1),
        ("e", 5.0e6, 1),
    ]
    assert len({event["id"] for event in found}) == 2


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


def test_chrome_trace_has_arrows_from_sends_to_their_users_and_counters(tmp_path: Path) -> None:
    """Each replica's own: the second one's rows are those of ranks 2 and 3."""
    twice = [*RECORDED, *RECORDED]
    path = save_chrome_trace(twice, tmp_path / "t.json", kept={0: 100.0, 1: 50.0})
    events = json.loads(path.read_text())["traceEvents"]
    flows = [(e["id"], e["ph"], e["tid"], e["ts"]) for e in events if e.get("cat") == "transfer"]
    assert flows == [(0, "s", 0, 1.25e6), (0, "f", 1, 1.5e6), (1, "s", 2, 1.25e6), (1, "f", 3, 1.5e6)]
    counters = [(e["name"], e["ts"], e["args"]) for e in events if e["ph"] == "C" and "rank 0" in e["name"]]
    assert counters == [
        ("live activations, rank 0", 0.0, {"count": 1}),
        ("bytes of live activations, rank 0", 0.0, {"bytes": 100.0}),
        ("live activations, rank 0", 4e6, {"count": 0}),
        ("bytes of live activations, rank 0", 4e6, {"bytes": 0.0}),
    ]
    assert [len(row) for row in load_chrome_trace(path)] == [3, 2, 3, 2]


@pytest.mark.parametrize("name", SCHEDULE_NAMES)
def test_perfetto_has_nothing_to_complain_about(tmp_path: Path, name: str) -> None:
    """Thirds of a millisecond are no whole nanoseconds, so no time is what its neighbours' sums come to."""
    spans = simulate(build(name, 4, 8, default_virtual_stages(name)), transfer=1 / 3).spans
    shown: dict[str, Any] = {"reductions": [[(2.0, 20.0), (3.0, 9.0)]] * 4, "kept": dict.fromkeys(range(8), 1e6)}
    assert complaints(save_chrome_trace(spans, tmp_path / "t.json", unit=1e-3 / 3, **shown)) == []


@pytest.mark.parametrize(
    ("changed", "complaint"),
    [
        ({"dur": 1_000_000.002}, "overlap on"),
        ({"ts": float("nan")}, "NaN is no JSON"),
        ({"ts": -1}, "its ts is no number from 0"),
        ({"ph": "B"}, "its phase is B"),
        ({"tid": 3}, "lies in no slice"),
    ],
)
def test_a_trace_that_perfetto_would_not_show(tmp_path: Path, changed: dict[str, object], complaint: str) -> None:
    path = save_chrome_trace(RECORDED, tmp_path / "t.json")
    content = json.loads(path.read_text())
    assert complaints(path) == []
    next(event for event in content["traceEvents"] if event.get("name") == "0SEND_F0").update(changed)
    first = next(event for event in content["traceEvents"] if event.get("name") == "0F0")
    first.update({key: value for key, value in changed.items() if key == "dur"})
    path.write_text(json.dumps(content))
    try:
        found = complaints(path)
    except ValueError as error:
        found = [str(error)]
    assert complaint in " ".join(found)
