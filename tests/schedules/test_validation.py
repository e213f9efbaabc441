"""Numbers and files that would fill the machine are refused before anything of their size is made."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from lightning_pipeline.cli import app
from lightning_pipeline.schedules import (
    SCHEDULE_NAMES,
    ScheduleError,
    as_schedule,
    build,
    default_virtual_stages,
    load_csv,
    save_picture,
)
from lightning_pipeline.schedules.chrome_trace import load_chrome_trace
from lightning_pipeline.schedules.validation import MAX_CSV_BYTES, MAX_PASSES, MAX_RANKS, shown
from tests.memory_limit import little_memory

HUGE = 99_999_999_999


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"99999999999F0", "column 1: stage and micro-batch of an action count from 0 to 262,143, got stage=99"),
        (b"0F0,0B0\n1F99999999999", "row 2, column 1: .*microbatch=99999999999"),
        (b"0F" + b"9" * 5000, r"row 1, column 1: cannot read the action '0F9+\.\.\.9+'"),
        ("1٣F0".encode(), "cannot read the action"),
        (b"262143F0", "has no action of stage 0, but of stage 262143"),
        (b"\n" * MAX_RANKS + b"0F0", "is larger than any schedule: it has actions in row 4097"),
        pytest.param(
            b"0F0," * (3 * MAX_PASSES + 1),
            "is larger than any schedule: .* 786,433 so far",
            id="786,433",
            marks=pytest.mark.slow,
        ),
        (b"," * (MAX_CSV_BYTES + 1), "is too large for a CSV file: it has more than 16,777,216 bytes"),
        (b"\n" * 2**20, "holds no actions"),
        (b"\x89PNG\r\n\x1a\n\xff", "is not a CSV file: byte 0 is no text in UTF-8"),
        ("0F0,1Fé0".encode("utf-16"), "is not a CSV file: byte 0"),
        (b"0F0,\0,0B0", "is not a CSV file: it has a NUL byte at character 4"),
        (b'"' + b"0" * 200_000, "is not a CSV file: field larger than field limit"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_table_of_any_content_gives_an_error_that_names_it(content: bytes, words: str, tmp_path: Path) -> None:
    path = tmp_path / "mine.csv"
    path.write_bytes(content)
    with little_memory(), pytest.raises(ScheduleError, match=rf"mine\.csv.*{words}") as error:
        load_csv(path)
    assert len(str(error.value)) < 600


def test_a_device_is_read_no_further_than_a_table_may_go(tmp_path: Path) -> None:
    (tmp_path / "mine.csv").symlink_to("/dev/zero")
    with little_memory(), pytest.raises(ScheduleError, match="has more than"):
        load_csv(tmp_path / "mine.csv")


@pytest.mark.parametrize("name", SCHEDULE_NAMES)
@pytest.mark.parametrize(
    "counts",
    [(HUGE, HUGE, 2), (2, HUGE, 2), (MAX_RANKS + 1, 1, 2), (10**5000, 1, 2), (MAX_RANKS, 2 * MAX_RANKS, 1)],
    ids=shown,
)
def test_no_schedule_of_such_counts_is_built(name: str, counts: tuple[int, int, int]) -> None:
    takes_any = name in ("forward", "gpipe", "looped_bfs") or "interleaved" in name
    virtual = counts[2] if takes_any else default_virtual_stages(name)
    with (
        little_memory(),
        pytest.raises(
            ScheduleError, match=r"at most 4,096 ranks, and (262,144|16,777,216) passes .* got num_ranks=.*; use fewer"
        ),
    ):
        build(name, *counts[:2], virtual)


def test_virtual_stages_count_too() -> None:
    with little_memory(), pytest.raises(ScheduleError, match="num_virtual_stages=99999999999; use fewer"):
        build("interleaved_1f1b", 2, 2, HUGE)
    with little_memory(), pytest.raises(ScheduleError, match="num_ranks=1000, num_microbatches=1999"):
        build("zbv", 1000, 1, 2)  # whose order is made for as many micro-batches as that
    assert build("forward", MAX_RANKS, 64).num_ranks == MAX_RANKS


def test_rows_of_a_function_are_held_against_the_same_bounds() -> None:
    with little_memory(), pytest.raises(ScheduleError, match=r"'mine', rank 0, position 0: .*stage=99999999999"):
        as_schedule([["99999999999F0"]], name="mine", num_microbatches=1)


@pytest.mark.parametrize(
    ("event", "words"),
    [
        ({"tid": HUGE}, "tid is 99999999999"),
        ({"tid": -1}, "tid is -1"),
        ({"tid": True}, "tid is True"),
        ({"ts": float("inf")}, "ts is inf"),
        ({"dur": float("nan")}, "dur is nan"),
        ({"dur": 10**400}, "dur is 1000000.*"),
        ({"name": 7}, "AttributeError"),
        ({"name": "99999999999F0"}, "stage=99999999999"),
    ],
)
def test_a_trace_of_any_content_gives_an_error_that_names_it(event: dict, words: str, tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    whole = {"ph": "X", "tid": 0, "ts": 0.0, "dur": 1.0, "name": "0F0"}
    path.write_text(json.dumps({"traceEvents": [whole, {**whole, **event}]}))
    with little_memory(), pytest.raises(ScheduleError, match=rf"trace\.json is no trace of a pipeline .*{words}"):
        load_chrome_trace(path)


@pytest.mark.parametrize("content", [b"\xff\xfe", b"[" * 100_000, b"9" * 5000, b'{"traceEvents": []}', b"[]", b"\0"])
def test_what_is_no_trace_is_told(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "trace.json").write_bytes(content)
    with little_memory(), pytest.raises(ScheduleError, match=r"trace\.json is no"):
        load_chrome_trace(tmp_path / "trace.json")


def test_a_picture_has_room_for_so_many_ranks(tmp_path: Path) -> None:
    rows = [[(build("forward", 1, 1)[0][0], 0.0, 1.0)]] * 257
    with little_memory(), pytest.raises(ScheduleError, match="a picture has room for 256 ranks, got 257"):
        save_picture(rows, tmp_path / "x.png")


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ("draw 1f1b -p 99999999999", "at most 4,096 ranks"),
        ("draw gpipe -m 99999999999", "num_microbatches=99999999999"),
        ("draw looped_bfs -v 99999999999", "num_virtual_stages=99999999999"),
        ("simulate -p 99999999999 -m 99999999999", "at most 4,096 ranks"),
        ("simulate -m 99999999999", "num_microbatches=99999999999"),
        ("simulate 1f1b --forward 1e308", "got '1e308' (at most 1e+12)"),
        ("simulate 1f1b --transfer inf", "--transfer takes a time from 0 to 1e+12, got inf"),
        ("plan {script} --stages 99999999999", "num_ranks=99999999999"),
        ("plan {script} --microbatches 99999999999", "num_microbatches=99999999999"),
        ("plan {script} --device-tflops inf", "speeds and latencies are at most 1e+12, got inf"),
    ],
)
def test_the_command_line_refuses_numbers_beyond_any_use(arguments: str, sentence: str, tmp_path: Path) -> None:
    (tmp_path / "train.py").touch()
    with little_memory():
        result = CliRunner().invoke(app, arguments.format(script=tmp_path / "train.py").split())
    assert result.exit_code == 2, result.output
    assert result.output.startswith("Error: ") and sentence in result.output, result.output


def test_quotes_are_short_whatever_is_quoted() -> None:
    bomb: list = ["x"]
    for _ in range(60):
        bomb = [bomb, bomb, bomb]
    for value in (bomb, "x" * 10**6, 1 << 10**6, {"a": bomb}, [1] * 10**6):
        assert len(shown(value)) < 300
    assert shown("0F0") == "'0F0'" and shown(12) == "12"
    assert shown(1 << 10**6) == "a number of 1000001 bits"
