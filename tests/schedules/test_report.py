"""The report in a real browser: it draws, says what is under the pointer, zooms, and goes through the steps."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from lightning_pipeline.schedules import ScheduleError, build, forward_only, save_chrome_trace, simulate
from lightning_pipeline.schedules.chrome_trace import load_chrome_trace
from lightning_pipeline.schedules.records import RecordedStep, RecordFile, read_records
from lightning_pipeline.schedules.report import report_of_records, report_of_simulation, report_of_trace
from lightning_pipeline.schedules.simulation import message_of
from tests.browser import opened

MICROBATCHES = 4
RUN = {
    "module": "Net</script>",
    "schedule": "1f1b",
    "stages": [{"rank": 0, "first": ""}, {"rank": 1, "first": "layers.2"}],
    "stage_config": {"layers.2": 1},
}
ADVICE = {
    "stages": [
        {"rank": 0, "first": "", "last": "layers.1", "kept_bytes": 2048.0, "parameter_bytes": 4096.0},
        {"rank": 1, "first": "layers.2", "last": "head", "kept_bytes": 1024.0, "parameter_bytes": 8192.0},
    ],
    "moves": [{"module": "layers.1", "before": 0, "after": 1, "seconds": 0.02, "gain": 0.125}],
    "better": "Move layers.1.",
}


def recorded(factor: float = 1.0) -> list[list[RecordedStep]]:
    """As if 1F1B on two ranks had run with these times, in seconds."""
    schedule = build("1f1b", 2, MICROBATCHES)
    ranks = []
    for rank, row in enumerate(simulate(schedule, 1e-3, 1e-3, 1e-3, 5e-4).spans):
        step = RecordedStep(rank, peak_live=2 - rank, memory=5 * 2**20)
        for action, start, end in row:
            step.actions.append((action, start * factor, end * factor))
            message = message_of(action, schedule)
            if message is not None:
                step.actions.append((message.send, end * factor, end * factor + 1e-4))
                step.sent[message.send] = 3 * 2**20
        ranks.append(step)
    return [ranks]


@pytest.fixture(scope="module")
def page_of_run(folder: Path) -> Path:
    file = RecordFile(folder / "timeline.jsonl", RUN)
    for step, factor in enumerate((1.0, 1.5, 2.0)):
        file.add_step(10 * step, 1e9, recorded(factor))
    file.add_advice(ADVICE)
    return report_of_records(read_records(file.path)).save(folder / "pages" / "report.html")


def hovered(page: Any, name: str, nth: int = 0) -> str:
    """What the page says over the nth box of an action."""
    find = "([name, nth]) => items.map((x, i) => x.action && x.action[0] === name ? i : -1).filter(i => i >= 0)[nth]"
    page.hover(f"[data-i='{page.evaluate(find, [name, nth])}']")
    return page.inner_text("#tip")


@pytest.mark.parametrize("colours", ["light", "dark"])
def test_a_run(page_of_run: Path, colours: str) -> None:
    with opened(page_of_run, colours=colours) as page:
        assert page.inner_text("h1") == "Net</script>, schedule 1f1b"
        assert page.locator("#chart rect[data-i]").count() > 2 * 2 * 2 * MICROBATCHES  # measured and simulated
        background = page.evaluate("getComputedStyle(document.body).backgroundColor")
        assert background == ("rgb(255, 255, 255)" if colours == "light" else "rgb(20, 23, 27)")

        told = hovered(page, "1F0").splitlines()
        assert told[:3] == ["1F0: forward, stage 1, micro-batch 0", "rank 1", "start 3.00 ms, duration 2.00 ms"]
        assert told[3:] == ["received 3 MiB", "waited 2.00 ms: peer's compute (0F0)", "waited 1.00 ms: transfer (0F0)"]
        assert "1F0" in hovered(page, "1F0", nth=1) and "simulated" in hovered(page, "1F0", nth=1)

        assert "layers.2 to head" in page.inner_text("#stages")
        assert re.search(r"layers\.1\s+0\s+1\s+20\.00 ms\s+12\.5 %", page.inner_text("#moves"))
        assert page.inner_text("#config") == 'stage_config = {\n    "layers.2": 1\n}'


def test_words_stay_whole_in_a_narrow_window(page_of_run: Path) -> None:
    with opened(page_of_run) as page:
        page.set_viewport_size({"width": 480, "height": 900})
        rows = page.evaluate("[...document.querySelectorAll('#ranks tr, #stages tr')].map(row => row.clientHeight)")
        assert len(rows) == 6 and max(rows) < 60  # two lines at most
        assert page.evaluate("document.documentElement.scrollWidth <= 480")  # tables scroll, not the page


def test_its_slider_zoom_and_copy(page_of_run: Path) -> None:
    with opened(page_of_run) as page:
        assert page.inner_text("#steplabel") == "step 20 (3 of 3)"
        longest = page.inner_text("#figures b >> nth=0")
        page.locator("#step").focus()
        page.keyboard.press("Home")
        assert page.inner_text("#steplabel") == "step 0 (1 of 3)"
        assert page.inner_text("#figures b >> nth=0") != longest

        def width() -> float:
            return float(page.locator("#chart rect[data-i][fill='#0072b2']").nth(1).get_attribute("width"))

        before = width()
        page.locator("#chart").focus()
        for _ in range(3):
            page.keyboard.press("+")
        page.keyboard.press("ArrowLeft")
        page.keyboard.press("ArrowLeft")
        assert width() > 2 * before
        page.click("#all")
        assert width() == pytest.approx(before)
        page.click("#copy")
        page.wait_for_function("document.getElementById('copied').textContent !== ''")


def test_virtual_stages_differ_by_hue_and_hatching(tmp_path: Path) -> None:
    simulation = simulate(build("zbv", 2, 4, 2))
    path = report_of_simulation(simulation, "zbv").save(tmp_path / "zbv.html")
    with opened(path) as page:
        fills = page.evaluate("[...document.querySelectorAll('#legend rect')].map(r => r.getAttribute('fill'))")
        assert {"#0072b2", "#56b4e9", "url(#h1)"} <= set(fills)
        assert "stage 3" in hovered(page, "3F0")
        assert not page.is_visible("#stepbar") and not page.is_visible("#cut") and not page.is_visible("#gains")


def test_many_narrow_actions_merge_until_zoomed(tmp_path: Path) -> None:
    simulation = simulate(build("gpipe", 8, 1000))
    path = report_of_simulation(simulation, "long").save(tmp_path / "long.html")
    with opened(path) as page:
        boxes = page.locator("#chart rect[data-i]").count()
        assert boxes < 8 * 1000
        merged = page.evaluate("items.find(x => x.merged).merged")
        assert merged > 1


def test_a_trace_of_several_replicas(tmp_path: Path) -> None:
    rows = [rank.actions for rank in recorded()[0]]
    trace = save_chrome_trace([*rows, *rows], tmp_path / "t.json")
    report = report_of_trace(load_chrome_trace(trace), "two")
    assert report.labels[2] == "rank 2 (replica 1, stage 0)"
    assert report.steps[0]["simulated_bubble"] is not None


def test_a_page_is_whole_and_asks_for_nothing(page_of_run: Path) -> None:
    text = page_of_run.read_text()
    assert "default-src 'none'" in text
    assert not re.search(r"(src|href)\s*=|@import|url\((?!#)", text)
    content = re.search(r'<script type="application/json" id="data">(.*?)</script>', text, re.DOTALL)
    assert content is not None
    assert json.loads(content[1])["title"] == "Net</script>, schedule 1f1b"


def test_what_does_not_fit() -> None:
    simulation = simulate(forward_only(300, 2))
    with pytest.raises(ScheduleError, match="room for 256 ranks, got 300"):
        report_of_simulation(simulation, "wide")
