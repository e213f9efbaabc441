"""The console command: what it prints and writes, and what it says about mistakes."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path
from textwrap import dedent
from xml.etree import ElementTree

import pytest
from typer.testing import CliRunner

import lightning_pipeline
from lightning_pipeline.cli import app
from lightning_pipeline.cli.watch import News
from lightning_pipeline.schedules import SCHEDULE_NAMES, build, load_csv, render, save_chrome_trace, save_csv, simulate
from lightning_pipeline.schedules.live import LiveRank
from lightning_pipeline.schedules.records import RecordedStep, RecordFile
from tests.launching import PATIENCE_S

SVG_TEXT = "{http://www.w3.org/2000/svg}text"

# Runs the command where only the standard library and the command line's own libraries can be imported.
BARE = """
import sys, runpy
class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {"torch", "lightning", "numpy", "matplotlib"}:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Absent())
runpy.run_module("lightning_pipeline", run_name="__main__", alter_sys=True)
"""


def call(*arguments: str) -> str:
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    return result.output


def bare(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", BARE, *arguments], capture_output=True, text=True, timeout=PATIENCE_S)


def figures(*arguments: str) -> dict[str, dict]:
    return {row["schedule"]: row for row in json.loads(call("simulate", "--json", *arguments))}


def test_it_tells_its_version() -> None:
    assert call("--version").split() == ["lightning-pipeline", lightning_pipeline.__version__]


def test_the_installed_command() -> None:
    script = shutil.which("lightning-pipeline", path=str(Path(sys.executable).parent))
    assert script is not None, "install the package again: pip install -e ."
    done = subprocess.run([script, "draw", "nope"], capture_output=True, text=True, timeout=PATIENCE_S)
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.startswith("Error: unknown schedule 'nope'; the schedules are")


def test_needs_neither_torch_nor_lightning(tmp_path: Path) -> None:
    simulated = bare("simulate", "1f1b")
    assert simulated.returncode == 0, simulated.stderr
    assert "27.3%" in simulated.stdout

    drawn = bare("draw", "1f1b", "-o", str(tmp_path / "drawn.json"))
    assert drawn.returncode == 0, drawn.stderr
    assert (tmp_path / "drawn.json").stat().st_size

    picture = bare("draw", "1f1b", "-o", str(tmp_path / "drawn.svg"))
    assert picture.returncode == 2
    assert picture.stderr.count("\n") == 1
    assert "pip install lightning-pipeline[plot]" in picture.stderr


def test_simulate_compares_all_that_can_be_built() -> None:
    rows = figures("-p", "4", "-m", "8")
    assert set(rows) == set(SCHEDULE_NAMES) - {"forward"}
    usual = {"gpipe": 1, "1f1b": 1, "zero_bubble": 1, "zero_bubble_h2": 1}
    assert {name: row["num_virtual_stages"] for name, row in rows.items()} == {n: usual.get(n, 2) for n in rows}


def test_virtual_stages_share_the_costs_of_a_rank_out() -> None:
    rows = figures("1f1b", "interleaved_1f1b", "-p", "4", "-m", "8", "-v", "4", "--transfer", "0.1")
    whole = simulate(build("1f1b", 4, 8), transfer=0.1)
    quarters = simulate(build("interleaved_1f1b", 4, 8, 4), 0.25, 0.25, 0.25, transfer=0.1)
    assert rows["1f1b"]["num_virtual_stages"] == 1
    assert rows["1f1b"]["makespan"] == pytest.approx(whole.makespan)
    assert rows["interleaved_1f1b"]["num_virtual_stages"] == 4
    assert rows["interleaved_1f1b"]["makespan"] == pytest.approx(quarters.makespan)
    assert rows["interleaved_1f1b"]["bubble"] == pytest.approx(quarters.bubble)
    assert rows["interleaved_1f1b"]["peak_live"] == quarters.peak_live
    assert rows["interleaved_1f1b"]["peak_microbatches"] == [peak / 4 for peak in quarters.peak_live]


def test_lists_of_costs_go_along_the_data() -> None:
    """The second half of the model takes three times the first: virtual stages 2 and 3 of 4, whatever their ranks."""
    costs = ("--forward", "1,3", "--input-grad", "1,3", "--weight-grad", "1,3")
    rows = figures("1f1b", "zbv", "-p", "2", "-m", "4", *costs)
    along = (0.5, 0.5, 1.5, 1.5)
    assert rows["1f1b"]["makespan"] == pytest.approx(simulate(build("1f1b", 2, 4), (1, 3), (1, 3), (1, 3)).makespan)
    assert rows["zbv"]["makespan"] == pytest.approx(simulate(build("zbv", 2, 4, 2), along, along, along).makespan)


def test_an_order_is_searched_for(tmp_path: Path) -> None:
    """A large head whose activations are twice as large: one that holds four of the others' holds two of its own."""
    head = ("--forward", "1,1,1,2", "--input-grad", "1,1,1,2", "--weight-grad", "1,1,1,2")
    bound = ("--kept-bytes", "1,1,1,2", "--max-bytes", "4")
    rows = figures("1f1b", "optimized", "-p", "4", "-m", "8", *head, *bound)
    assert rows["optimized"]["makespan"] <= 0.95 * rows["1f1b"]["makespan"]
    assert rows["optimized"]["peak_live"][-1] == 2
    call("draw", "optimized", "-p", "4", "-m", "8", *head, *bound, "-o", str(tmp_path / "mine.csv"))
    assert figures(str(tmp_path / "mine.csv"), *head)["mine.csv"]["makespan"] == rows["optimized"]["makespan"]
    for given in bound[:2], bound[2:]:
        result = CliRunner().invoke(app, ("simulate", "optimized", *given))
        assert result.exit_code == 2
        assert "--kept-bytes and --max-bytes go together" in result.output


def test_activations_in_host_memory(tmp_path: Path) -> None:
    options = ("-p", "4", "-m", "8", "--offload-activations", "1", "--host-transfer", "3")
    [row] = figures("gpipe", *options).values()
    simulated = simulate(build("gpipe", 4, 8), offload=1, host_transfer=3)
    assert row["peak_live"] == simulated.peak_live == [3, 3, 3, 3]
    assert row["in_host_memory"] == [6, 6, 6, 6]
    assert row["makespan"] == simulated.makespan > simulate(build("gpipe", 4, 8)).makespan
    assert row["waited_for_host"] == simulated.waited_for_host
    half = figures("interleaved_1f1b", *options[:4], "--offload-activations", "0.5")["interleaved_1f1b"]
    assert half["peak_live"] == simulate(build("interleaved_1f1b", 4, 8, 2), offload=0.5).peak_live
    assert "100% of activations to host memory in 3" in call("simulate", "gpipe", *options)
    drawn = call("draw", "gpipe", *options)
    assert "rank 0: 3 live at once, waits" in drawn
    assert "0F1 0F2 0F3 0F4 0F5 0F6" in drawn
    call("draw", "gpipe", *options, "-o", str(tmp_path / "drawn.json"))
    events = json.loads((tmp_path / "drawn.json").read_text())["traceEvents"]
    assert max(event["args"]["count"] for event in events if event["ph"] == "C") == 3
    result = CliRunner().invoke(app, ("simulate", "--host-transfer", "3"))
    assert result.exit_code == 2
    assert "--host-transfer goes with --offload-activations" in result.output


def test_table() -> None:
    lines = call("simulate", "gpipe", "interleaved_1f1b_low_memory", "-p", "4", "-m", "8").splitlines()
    assert lines[0] == "4 ranks, 8 micro-batches; forward 1, input grad 1, weight grad 1, transfer 0"
    assert [" ".join(line.split()) for line in lines[-2:]] == [
        "gpipe 1 33 27.3% 8 8 8 8 8 8 8 8",
        "interleaved_1f1b_low_memory 2 28.5 15.8% 8 7 6 5 4 3.5 3 2.5",
    ]


def test_table_tells_which_schedules_are_left_out() -> None:
    output = call("simulate", "-p", "2", "-m", "4", "-v", "1")
    assert "Left out: interleaved_1f1b_low_memory, here the same as 1f1b" in output
    # It cannot have the one virtual stage asked for, and is compared with its own two.
    assert any(line.split()[:2] == ["zbv", "2"] for line in output.splitlines())


def test_files_bring_their_own_counts(tmp_path: Path) -> None:
    save_csv(build("gpipe", 2, 3), tmp_path / "mine.csv")
    output = call("simulate", str(tmp_path / "mine.csv"), "1f1b", "-p", "4", "-m", "8").splitlines()
    assert output[-2].split()[:5] == ["mine.csv", "2", "3", "1", "12"]
    assert output[-1].split()[:5] == ["1f1b", "4", "8", "1", "33"]
    assert render(build("gpipe", 2, 3)) in call("draw", str(tmp_path / "mine.csv"))


def test_draw_text(tmp_path: Path) -> None:
    expected = dedent(
        """
        1f1b: 2 ranks, 3 micro-batches, bubble 25.0%
        rank 0  0F0 0F1  .  0B0 0F2 0B1  .  0B2
        rank 1   .  1F0 1B0 1F1 1B1 1F2 1B2
        """
    ).lstrip()
    assert call("draw", "1f1b", "-p", "2", "-m", "3") == expected
    call("draw", "1f1b", "-p", "2", "-m", "3", "-o", str(tmp_path / "drawn.txt"))
    assert (tmp_path / "drawn.txt").read_text() == expected


def test_wide_text_says_how_it_fits() -> None:
    assert "less -S" not in call("draw", "1f1b", "-p", "2", "-m", "4")
    told = CliRunner().invoke(app, ["draw", "1f1b", "-p", "4", "-m", "32"])
    assert "columns, and there are 80" in told.stderr and "less -S" in told.stderr
    assert "less -S" not in told.stdout


def test_draw_lowered() -> None:
    expected = """
        gpipe: 2 ranks, 2 micro-batches
        rank 0    0F0    0SEND_F0   0F1    0SEND_F1 0RECV_B0   0B0    0RECV_B1   0B1
        rank 1  1RECV_F0   1F0    1RECV_F1   1F1      1B0    1SEND_B0   1B1    1SEND_B1
        """
    assert call("draw", "gpipe", "-p", "2", "-m", "2", "--lowered") == dedent(expected).lstrip()


def test_draw_files(tmp_path: Path) -> None:
    schedule = build("interleaved_1f1b", 2, 4, 2)
    arguments = ("draw", "interleaved_1f1b", "-p", "2", "-m", "4", "--output")
    for ending in ("svg", "png", "json", "csv"):
        assert f"drawn.{ending}" in call(*arguments, str(tmp_path / f"drawn.{ending}"))
    assert "new/drawn.html" in call(*arguments, str(tmp_path / "new" / "drawn.html"))
    assert "2 virtual stages each" in (tmp_path / "new" / "drawn.html").read_text()
    texts = [text.text for text in ElementTree.parse(tmp_path / "drawn.svg").iter(SVG_TEXT)]
    assert "interleaved_1f1b: 2 ranks, 2 virtual stages each, 4 micro-batches, bubble 11.1%" in texts
    assert (tmp_path / "drawn.png").read_bytes().startswith(b"\x89PNG\r\n")
    events = json.loads((tmp_path / "drawn.json").read_text())["traceEvents"]
    ends = [event["ts"] + event["dur"] for event in events if event["ph"] == "X"]
    assert max(ends) == pytest.approx(1e3 * simulate(schedule, 0.5, 0.5, 0.5).makespan)
    assert load_csv(tmp_path / "drawn.csv") == schedule


def test_report_of_a_run_that_was_killed(tmp_path: Path) -> None:
    """From the lines that it has written, or from a trace; the folder may be above that of the files."""
    actions = [(action, start, end) for action, start, end in simulate(build("1f1b", 1, 2)).spans[0]]
    run = {"module": "Net", "schedule": "1f1b", "stages": [{"rank": 0, "first": ""}], "stage_config": {}}
    file = RecordFile(tmp_path / "logs" / "version_0" / "timeline.jsonl", run)
    for step in (10, 20):
        file.add_step(step, 1e9, [[RecordedStep(0, actions)]])
    with file.path.open("a") as lines:
        lines.write('{"kind":"step","step":30')
    assert call("report", str(tmp_path)).startswith("2 steps: ")
    page = (file.path.parent / "report.html").read_text()
    assert "step 20" in page and "step 30" not in page

    trace = save_chrome_trace([actions], tmp_path / "timeline.json")
    assert "1 steps" in call("report", str(trace), "-o", str(tmp_path / "pages" / "one.html"))
    assert "timeline.json" in (tmp_path / "pages" / "one.html").read_text()


def test_watch_shows_the_last_step(tmp_path: Path) -> None:
    costs = simulate(build("1f1b", 2, 4), forward=(1e-3, 3e-3), input_grad=(1e-3, 3e-3), weight_grad=(1e-3, 3e-3))
    ranks = [RecordedStep(rank, list(row), [], 2 - rank, {}, 2**28) for rank, row in enumerate(costs.spans)]
    run = {"module": "Net", "schedule": "1f1b", "stages": [], "stage_config": {}}
    file = RecordFile(tmp_path / "timeline.jsonl", run)
    file.add_step(10, 1e9, [ranks])
    file.add_step(20, time.time() - 4.4, [ranks])
    with file.path.open("a") as lines:
        lines.write('{"kind":"step","step":30')
    head, _, _, first, second = call("watch", str(tmp_path), "--once").splitlines()
    assert re.fullmatch(r"Net, step 20, \d+ s ago: 39 ms, bubble 38\.5%, slowest stage 1", head.strip())
    assert (
        first.split()[:2] == ["0", "0"] and "stage 1, 69%" in first and first.split()[-4:] == ["31%", "2", "256", "MiB"]
    )
    assert second.split()[:2] == ["1", "1"] and "stage 0, 8%" in second


def test_watch_shows_what_ranks_are_at(tmp_path: Path) -> None:
    """Without a recorded step, and of a rank that has written nothing for a minute."""
    folder = tmp_path / "timeline.live"
    LiveRank(0, [0], 7, "computes 0F2", False, 9, 12, 2, 2**28, 0.25).write(folder)
    LiveRank(1, [1], 7, "waits for 0F2 of rank 0", True, 8, 12, 1, 2**28, 0.25).write(folder)
    os.utime(folder / "1.json", (1, time.time() - 60))
    _, _, first, second, *rest = call("watch", str(tmp_path), "--once").splitlines()
    assert re.fullmatch(r"0 +0 +computes 0F2 +9 of 12 +2 +256 MiB +7 +250 ms +0 s ago", first.strip())
    assert "waits for 0F2 of rank 0" in second and second.strip().endswith("60 s ago")
    assert "has no timeline.jsonl" in rest[-1]
    (folder / "0.json").write_text('{"rank": "0"}')
    result = CliRunner().invoke(app, ["watch", str(tmp_path), "--once"])
    assert result.exit_code == 2 and "0.json does not tell what a rank is at (KeyError: 'stages')" in result.output


def test_watch_measures_silence_by_its_own_clock() -> None:
    """Machines that write into a shared folder have clocks of their own."""
    news, now = News(), time.time()
    behind, ahead = now - 100, now + 100
    assert 99 < news.age(0, behind) < 110  # a first look can only believe the file
    assert news.age(1, ahead) < 1
    time.sleep(0.2)
    assert news.age(0, behind + 0.5) < 0.1
    assert 0.2 <= news.age(1, ahead) < 1


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ("draw 1f1", "did you mean '1f1b'"),
        ("draw 1f1b -v 2", "1f1b runs one virtual stage on each rank"),
        ("draw gpipe -m 3", "num_microbatches=3 for 4 ranks"),
        ("simulate -m 3", "num_microbatches=3 for 4 ranks"),
        ("simulate 1f1b nope", "unknown schedule 'nope'"),
        ("simulate absent.csv", "absent.csv: No such file or directory"),
        ("simulate --forward 1,x", "--forward takes a time of 0 or more, or several such as 1,1,2, got '1,x'"),
        ("simulate --input-grad=-1", "--input-grad takes a time of 0 or more"),
        ("simulate --weight-grad 1,2", "--weight-grad has 2 times, but gpipe has 4 ranks"),
        ("draw 1f1b -o drawn.gif", "cannot write drawn.gif; its ending chooses the format"),
        ("report absent", "absent does not exist"),
        ("report .", ". has no timeline.jsonl, which the callback PipelineTimeline writes"),
        ("draw 1f1b --lowered -o drawn.svg", "write to a .txt file"),
    ],
)
def test_mistakes_are_told_in_one_line(
    arguments: str, sentence: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(app, arguments.split())
    assert result.exit_code == 2
    assert result.output.startswith("Error: ")
    assert result.output.count("\n") == 1
    assert sentence in result.output
    assert not list(tmp_path.iterdir())


def test_faults_in_files_are_shown(tmp_path: Path) -> None:
    faulty, picture = tmp_path / "faulty.csv", tmp_path / "picture.csv"
    faulty.write_text("0F0,0B0\n1B0,1F0\n")
    picture.write_bytes(b"\x89PNG\r\n\x1a\n")
    for path, sentence in ((faulty, ">1B0<"), (picture, "is not a CSV file")):
        result = CliRunner().invoke(app, ["simulate", str(path)])
        assert result.exit_code == 2
        assert sentence in result.output


@pytest.mark.parametrize("arguments", ["simulate -p 0", "draw 1f1b -m none", "draw", "simulate --transfer -1"])
def test_bad_options_end_with_the_usage(arguments: str) -> None:
    result = CliRunner().invoke(app, arguments.split())
    assert result.exit_code == 2
    assert "Usage:" in result.output
