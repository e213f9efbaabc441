"""Rank tables are read, written and converted, and what a file lacks is told with its place in it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lightning_pipeline.accelerators.rank_table import Rank, RankTableError, listed
from lightning_pipeline.accelerators.rank_table_formats import (
    FORMATS,
    MAX_BYTES,
    format_rank_table,
    lost_in,
    parse_rank_table,
    read_rank_table,
)
from lightning_pipeline.accelerators.rank_table_rules import server_key
from tests.accelerators.tables import group_list, v1_0, v1_2, write
from tests.memory_limit import little_memory

CONTENTS = {"v1.0": v1_0, "v1.2": v1_2, "group_list": group_list}


def parse(content: dict[str, Any]) -> Any:
    return parse_rank_table(json.dumps(content))


@pytest.mark.parametrize("format", FORMATS)
def test_a_file_is_written_as_it_was_read(format: str, tmp_path: Path) -> None:
    content = CONTENTS[format]()
    table = read_rank_table(write(tmp_path / "table.json", content))
    assert table.format == format
    assert [(r.rank_id, *table.node_and_local_rank(r), r.server_id, r.device_id) for r in table.ranks] == [
        (0, 0, 0, "10.0.0.1", 0),
        (1, 0, 1, "10.0.0.1", 1),
        (2, 1, 0, "10.0.0.2", 0),
        (3, 1, 1, "10.0.0.2", 1),
    ]
    assert table.rank(3).device_ip == "192.168.2.9"
    written = json.loads(format_rank_table(table, format))
    if format == "v1.2":
        assert written.pop("server_count") == "2"  # which this version may leave out
    assert written == content
    assert parse_rank_table(format_rank_table(table, format)) == table


def test_what_formats_have_in_common_survives_every_conversion() -> None:
    old = parse(group_list())
    for first in FORMATS:
        for second in FORMATS:
            converted = parse_rank_table(format_rank_table(parse_rank_table(format_rank_table(old, first)), second))
            assert converted == old
            assert converted.format == second
    assert json.loads(format_rank_table(parse(v1_0()), "v1.2"))["version"] == "1.2"
    assert "board_id" not in json.loads(format_rank_table(old, "v1.0"))
    assert json.loads(format_rank_table(parse(v1_0()), "group_list"))["group_list"][0]["server_num"] == "2"


def test_what_a_format_has_no_place_for_is_named() -> None:
    pods, new, old = parse(v1_2()), parse(v1_0()), parse(group_list())
    assert lost_in(pods, "v1.2") == []
    assert lost_in(pods, "v1.0") == ["super_device_id", "super_pod_list"]
    assert lost_in(pods, "group_list") == ["super_device_id", "super_pod_list", "host_nic_ip"]
    assert lost_in(new, "v1.2") == []
    assert "board_id" in lost_in(old, "v1.0")
    assert lost_in(old, "group_list") == []
    assert "super" not in format_rank_table(pods, "v1.0")


def test_network_cards_are_kept_or_one_a_device() -> None:
    more = {**group_list(), "para_plane_nic_name": ["eth0", "eth1", "eth2"], "para_plane_nic_num": "3"}
    assert json.loads(format_rank_table(parse(more), "group_list")) == more
    made = json.loads(format_rank_table(parse(v1_0()), "group_list"))
    assert (made["para_plane_nic_name"], made["para_plane_nic_num"]) == (["eth0", "eth1"], "2")


def test_the_order_in_the_file_does_not_count() -> None:
    content, old = v1_0(), group_list()
    content["server_list"].reverse()
    content["server_list"][0]["device"].reverse()
    old["group_list"][0]["instance_list"].reverse()
    assert parse(content) == parse(v1_0())
    assert parse(content).digest == parse(old).digest == parse(v1_2()).digest
    assert [rank.rank_id for rank in parse(old).ranks] == [0, 1, 2, 3]


def test_super_pods_and_fields_that_nobody_knows() -> None:
    table = parse({**v1_2(), "data_version": 7})
    assert table.super_pods == {"0": ("10.0.0.1",), "1": ("10.0.0.2",)}
    assert table.servers["10.0.0.1"] == [
        Rank(0, "10.0.0.1", 0, "192.168.1.8", "1000", {"device_port": "16666"}),
        Rank(1, "10.0.0.1", 1, "192.168.1.9", "1001", {"device_port": "16666"}),
    ]
    assert table.server_fields["10.0.0.1"] == {"host_nic_ip": "reserve"}
    assert json.loads(format_rank_table(table, "v1.2"))["data_version"] == 7


def changed(path: str, value: Any, make: Any = v1_0) -> dict[str, Any]:
    """A table with another value at a path such as ``server_list.0.server_id``; `...` takes it away."""
    content = make()
    *outer, last = path.split(".")
    inside: Any = content
    for part in outer:
        inside = inside[int(part) if part.isdigit() else part]
    if value is ...:
        del inside[last]
    else:
        inside[last] = value
    return content


INSTANCES = "group_list.0.instance_list"


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (changed("status", "initializing"), r'status is "initializing", not "completed"'),
        (changed("status", ...), "the file has no status"),
        (
            changed("version", "2.0"),
            r'version is "2\.0"; this package reads "1\.0", "1\.2" and files with a group_list',
        ),
        (changed("version", ...), "has no version"),
        (changed("server_count", "3"), r'server_count is "3", but there are 2 servers'),
        ({**v1_2(), "server_count": "3"}, r'server_count is "3", but there are 2 servers'),
        (changed("server_count", 2), "server_count has to be a string in quotes, got 2"),
        (changed("server_list", []), r"server_list has to be a list with something in it, got \[\]"),
        (changed("server_list.1.device", []), r"server_list\[1\]\.device has to be a list with something in it"),
        (
            changed("server_list.0.device.1.device_id", 1),
            r"server_list\[0\]\.device\[1\]\.device_id has to be a string",
        ),
        (changed("server_list.0.device.1.rank_id", ...), r"server_list\[0\]\.device\[1\] has no rank_id"),
        (
            changed("server_list.0.device.1.rank_id", "-1"),
            r'rank_id has to be a whole number from 0, of at most 9 digits, got "-1"',
        ),
        (
            changed("server_list.0.device.1.rank_id", "1" * 10),
            r'device\[1\]\.rank_id has to be a whole number from 0, of at most 9 digits, got "1111111111"',
        ),
        (changed("server_list.0.device.1.device_id", "9" * 5000), r'of at most 9 digits, got "9{59}\.\.\.'),
        (changed("server_list.0.device.1.rank_id", "²"), "has to be a whole number"),
        (changed("server_list.0.server_id", "a\x1b[2J"), r"server_list\[0\]\.server_id has to be printable text"),
        (changed("server_list.0.server_id", "\ud800"), r"server_list\[0\]\.server_id has to be printable text"),
        ({**v1_0(), "\ud800": 1}, r'the file has the field "\\ud800", which is no printable text'),
        (changed("server_list.0.device.1.device_ip", None), "device_ip has to be a string in quotes, got null"),
        (
            changed("server_list.1.server_id", "10.0.0.1"),
            r'server_list\[1\]: server_id "10.0.0.1" is there twice; list all that it has in one place',
        ),
        (
            changed("super_pod_list.1.super_pod_id", "0", v1_2),
            r'super_pod_list\[1\]: super_pod_id "0" is there twice',
        ),
        (changed("server_list", ["a"]), r'server_list\[0\] has to be an object in braces, got "a"'),
        (
            changed("super_pod_list.0.server_list", [{}], v1_2),
            r"super_pod_list\[0\]\.server_list\[0\] has no server_id",
        ),
        (changed("group_count", "2", group_list), r'group_count is "2", but there are 1 groups'),
        (
            {**group_list(), "group_count": "2", "group_list": group_list()["group_list"] * 2},
            "group_list has 2 groups; put all ranks into one",
        ),
        (changed("group_list.0.device_num", "8", group_list), r'device_num is "8", but there are 4 devices'),
        (
            changed("group_list.0.server_num", "1", group_list),
            r'server_num is "1", but there are 2 different server_id',
        ),
        (changed("group_list.0.instance_count", "1", group_list), r'instance_count is "1", but there are 4 instances'),
        (changed(f"{INSTANCES}.1.rank_id", 1, group_list), r"instance_list\[1\]\.rank_id has to be a string"),
        (
            changed(f"{INSTANCES}.1.devices", [{"device_id": "0"}] * 2, group_list),
            r"instance_list\[1\] has 2 devices; an instance is one rank",
        ),
    ],
)
def test_what_a_file_lacks_is_told_with_its_place(content: dict[str, Any], words: str, tmp_path: Path) -> None:
    with pytest.raises(RankTableError, match=words) as error:
        read_rank_table(write(tmp_path / "table.json", content))
    assert str(error.value).startswith(f"rank table {tmp_path}/table.json: ")


def test_files_that_are_none(tmp_path: Path) -> None:
    with pytest.raises(RankTableError, match=r"cannot read the rank table /.*/none: No such file.*RANK_TABLE_FILE"):
        read_rank_table(tmp_path / "none")
    with pytest.raises(RankTableError, match=r"cannot read the rank table .*: Is a directory"):
        read_rank_table(tmp_path)
    for text, words in (
        ('{"status": "completed",  // comment\n', r"is not JSON: .*line 1 .*comments have to be left out"),
        ("", "is not JSON: it is empty"),
        ('{"status": "completed",\n', "is not JSON: .*: line 2 column 1"),
        ("[]", r"the file has to be an object in braces, got \[\]"),
    ):
        with pytest.raises(RankTableError, match=words):
            read_rank_table(write(tmp_path / "table", text))
    (tmp_path / "bytes").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(RankTableError, match="bytes is not a rank table: byte 0 is no text in UTF-8"):
        read_rank_table(tmp_path / "bytes")
    (tmp_path / "marked").write_bytes(b"\xef\xbb\xbf" + json.dumps(v1_0()).encode())
    assert len(read_rank_table(tmp_path / "marked")) == 4


@pytest.mark.parametrize("make", CONTENTS.values())
def test_a_comma_too_many_is_named_with_its_line(make: Any) -> None:
    lines = json.dumps(make(), indent=2).splitlines()
    for number, line in enumerate(lines[:-1], 1):
        if lines[number].strip()[0] not in "]}":
            continue
        with pytest.raises(RankTableError, match=rf"line {number} has a comma after the last entry"):
            parse_rank_table("\n".join([*lines[: number - 1], f"{line} , ", "", *lines[number:]]))
    # All on one line; and commas that are no such ones.
    text = json.dumps(make())
    with pytest.raises(RankTableError, match=r"line 1 has a comma after the last entry"):
        parse_rank_table(f"{text[:-1]},}}")
    for wrong in (f"{text},}}", text.replace(": ", ":, ", 1), text.replace('"completed"', ",")):
        with pytest.raises(RankTableError, match=r"is not JSON: (?!line).*: line 1 column"):
            parse_rank_table(wrong)


def test_a_rank_that_is_not_there() -> None:
    with pytest.raises(RankTableError, match="has no rank 4, it has ranks 0-3"):
        parse(v1_0()).rank(4)


def test_numbers_in_a_row() -> None:
    assert listed([5, 0, 1, 2]) == "0-2, 5"
    assert listed([0, 1]) == "0, 1"
    assert listed([]) == ""


def test_files_that_nobody_could_hold(tmp_path: Path) -> None:
    path = tmp_path / "table.json"
    for content, words in (
        (b"9" * 5000, "is not JSON: Exceeds the limit"),
        (b"[" * 100_000, "is not JSON"),
        (b'{"status": "\xff"}', "is not a rank table: byte 12 is no text in UTF-8"),
        (b" " * (MAX_BYTES + 1), "is too large for a rank table: it has more than 67,108,864 bytes"),
    ):
        path.write_bytes(content)
        with little_memory(), pytest.raises(RankTableError, match=rf"table\.json.*{words}"):
            read_rank_table(path)


def test_a_field_that_is_too_deep_to_be_written_is_told() -> None:
    table = parse_rank_table(json.dumps(v1_0()))
    deep: list[Any] = []
    for _ in range(100_000):
        deep = [deep]
    with pytest.raises(RankTableError, match="nested too deeply"):
        format_rank_table(replace(table, other={"deep": deep}), "v1.0")


def test_servers_sort_by_their_numbers_however_long_these_are() -> None:
    longest = "node_" + "9" * 5000
    names = [longest, "node_²", "node_10", "node_2", "10.0.0.10", "10.0.0.9"]
    assert sorted(names, key=server_key) == ["10.0.0.9", "10.0.0.10", "node_2", "node_10", longest, "node_²"]
