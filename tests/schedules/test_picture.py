"""Pictures: what is in the boxes, and that both formats are what they say."""

from __future__ import annotations

import re
import struct
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from lightning_pipeline.schedules import Action, ScheduleError, Timeline, build, save_picture, simulate

SVG = "{http://www.w3.org/2000/svg}"
# Four virtual stages on two ranks: 0 and 2, 1 and 3. Received and sent values are no boxes.
RECORDED = [
    [(Action.parse("0F7"), 5.0, 6.0), (Action.parse("0SEND_F7"), 6.0, 6.5), (Action.parse("2B8"), 7.0, 9.0)],
    [(Action.parse("1RECV_F7"), 6.0, 6.5), (Action.parse("1I7"), 7.0, 8.0), (Action.parse("3W9"), 8.0, 9.0)],
]


def texts(timeline: Timeline, path: Path, **options: Any) -> list[str]:
    save_picture(timeline, path, **options)
    return [text.text or "" for text in ElementTree.parse(path).iter(f"{SVG}text")]


def test_a_box_for_each_computing_action(tmp_path: Path) -> None:
    found = texts(RECORDED, tmp_path / "p.svg", title="two ranks", time_label="seconds")
    assert found.count("7") == 2 and found.count("8") == 1 and found.count("9") == 1
    assert {"rank 0", "rank 1", "seconds", "two ranks, bubble 37.5%"} <= set(found)


def test_the_legend_names_what_is_there(tmp_path: Path) -> None:
    many = {"forward", "backward", "input gradients", "weight gradients", "idle", "virtual stage 1 of a rank"}
    assert many <= set(texts(RECORDED, tmp_path / "many.svg"))
    few = set(texts(simulate(build("1f1b", 2, 2)).spans, tmp_path / "few.svg"))
    assert few & many == {"forward", "backward", "idle"}


def test_hue_and_hatching_tell_the_virtual_stage(tmp_path: Path) -> None:
    def looks(stages: int) -> tuple[set[str], int]:
        orders = [[(Action("F", stage, 0), float(stage), stage + 1.0) for stage in range(stages)]]
        text = save_picture(orders, tmp_path / f"{stages}.svg").read_text()
        return set(re.findall("#0072b2|#56b4e9", text)), len(re.findall("<pattern ", text))

    assert looks(1) == ({"#0072b2"}, 0)
    hues, patterns = looks(3)
    assert hues == {"#0072b2", "#56b4e9"}
    assert patterns >= 2  # the third has the first one's hue, and a hatching of its own


@pytest.mark.slow
def test_a_large_schedule_stays_legible(tmp_path: Path) -> None:
    """In an SVG, which may be wide, all numbers are there; where they would be too small, boxes merge."""

    spans = simulate(build("1f1b", 16, 64)).spans
    found = texts(spans, tmp_path / "wide.svg")
    assert found.count("63") == 2 * 16
    sizes = re.findall(r"font-size: ([0-9.]+)px", (tmp_path / "wide.svg").read_text())
    assert min(map(float, sizes)) >= 6
    many = simulate(build("gpipe", 2, 400)).spans
    assert texts(many, tmp_path / "many.svg").count("0–399") == 2 * 2


def test_all_reduces_are_a_strip_that_may_go_on(tmp_path: Path) -> None:
    reductions = [[], [(8.5, 11.0), (8.5, 13.0)]]
    found = texts(RECORDED, tmp_path / "p.svg", reductions=reductions, labels=["rank 0", "rank 5"])
    assert {"all-reduce of gradients", "rank 5", "8"} <= set(found)  # eight after the first start: 13
    assert "rank 1" not in found
    assert "bubble 37.5%" in found  # as without them
    assert "all-reduce of gradients" not in texts(RECORDED, tmp_path / "without.svg", reductions=[[], []])


def test_png_grows_with_the_schedule(tmp_path: Path) -> None:
    def size(num_ranks: int, num_microbatches: int) -> tuple[int, int]:
        path = tmp_path / "p.png"
        save_picture(simulate(build("1f1b", num_ranks, num_microbatches)).spans, path)
        data = path.read_bytes()
        assert data.startswith(b"\x89PNG\r\n\x1a\n")
        width, height = struct.unpack(">II", data[16:24])
        return width, height

    small, large = size(2, 2), size(4, 32)
    assert small[0] >= 1000
    assert large[0] > small[0]
    assert large[1] > small[1]


def test_same_timeline_same_file(tmp_path: Path) -> None:
    first, second = (save_picture(RECORDED, tmp_path / name).read_bytes() for name in ("a.svg", "b.svg"))
    assert first == second


def test_nothing_to_draw(tmp_path: Path) -> None:
    with pytest.raises(ScheduleError, match="without any action"):
        save_picture([[], []], tmp_path / "p.svg")
    # A run may record waiting only.
    assert "bubble 100.0%" in texts([[(Action.parse("1RECV_F0"), 0.0, 1.0)]], tmp_path / "waiting.svg")
