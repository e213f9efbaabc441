"""Schedules survive a trip through a CSV file."""

from pathlib import Path

import pytest

from lightning_pipeline.schedules import (
    SCHEDULE_NAMES,
    Action,
    Schedule,
    ScheduleError,
    build,
    check,
    default_virtual_stages,
    load_csv,
    lower,
    save_csv,
)


@pytest.mark.parametrize(
    "schedule",
    [
        *[build(name, 4, 9, default_virtual_stages(name)) for name in SCHEDULE_NAMES],
        build("forward", 3, 1),
        build("zbv", 4, 5, 2),
    ],
    ids=str,
)
def test_round_trip(schedule: Schedule, tmp_path: Path) -> None:
    save_csv(schedule, tmp_path / "mine.csv")
    loaded = load_csv(tmp_path / "mine.csv")
    assert loaded == schedule
    assert loaded.name == "mine"


def test_round_trip_of_split_backwards_in_a_v(tmp_path: Path) -> None:
    rows = ("0F0 3F0 3B0 0F1 0I0 3F1 3I1 0W0 3W1 0B1", "1F0 2F0 2B0 1I0 1F1 2F1 1W0 2B1 1B1")
    schedule = Schedule("v", tuple(tuple(map(Action.parse, row.split())) for row in rows), 2, (0, 1, 1, 0))
    check(schedule)
    save_csv(schedule, tmp_path / "v.csv")
    assert load_csv(tmp_path / "v.csv") == schedule


def test_columns_are_time(tmp_path: Path) -> None:
    save_csv(build("1f1b", 2, 2), tmp_path / "1f1b.csv")
    assert (tmp_path / "1f1b.csv").read_text().splitlines() == ["0F0,0F1,,0B0,,0B1", ",1F0,1B0,1F1,1B1"]


def test_reads_what_people_write(tmp_path: Path) -> None:
    path = tmp_path / "mine.csv"
    path.write_bytes(b"\xef\xbb\xbf0F0, 0F1 ,,,0B0,0B1\r\n,1F0,1B0,1F1,1B1,\r\n,,,\r\n\r\n")
    assert load_csv(path) == build("1f1b", 2, 2)
    assert load_csv(str(path)).placement == (0, 1)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("0F0\n1F0,oops\n", r"mine\.csv, row 2, column 2: cannot read the action 'oops'"),
        ("0F0,0SEND_F0\n1F0\n", r"row 1, column 2: 0SEND_F0 is communication; write compute actions only"),
        ("0F0\n2F0\n", r"no action of stage 1, but of stage 2"),
        ("", r"mine\.csv holds no actions"),
        (",,\n\n", r"mine\.csv holds no actions"),
    ],
)
def test_unreadable(text: str, sentence: str, tmp_path: Path) -> None:
    (tmp_path / "mine.csv").write_text(text)
    with pytest.raises(ScheduleError, match=sentence):
        load_csv(tmp_path / "mine.csv")


def test_faults_are_left_to_the_check(tmp_path: Path) -> None:
    (tmp_path / "mine.csv").write_text("0F0,1F0,0B0\n1B0\n")
    with pytest.raises(ScheduleError, match="1B0 is on rank 1, but stage 1 is on rank 0"):
        check(load_csv(tmp_path / "mine.csv"))


def test_lowered_is_not_saved(tmp_path: Path) -> None:
    with pytest.raises(ScheduleError, match="is lowered"):
        save_csv(lower(build("1f1b", 2, 2)), tmp_path / "mine.csv")
    assert not (tmp_path / "mine.csv").exists()
