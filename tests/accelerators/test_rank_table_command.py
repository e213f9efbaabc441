"""`lightning-pipeline rank-table`: what it prints and writes, and what it says about mistakes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from lightning_pipeline.accelerators.rank_table_formats import read_rank_table
from lightning_pipeline.accelerators.rank_table_rules import check_rank_table
from lightning_pipeline.cli import app
from tests.accelerators.tables import group_list, v1_0, v1_2, write
from tests.launching import PATIENCE_S
from tests.test_cli import BARE

EXAMPLES = Path(__file__).parents[2] / "examples/rank_tables"


def call(*arguments: str | Path, code: int = 0) -> str:
    result = CliRunner().invoke(app, ["rank-table", *map(str, arguments)])
    assert result.exit_code == code, result.output
    return result.output


def rows(output: str) -> list[str]:
    return [" ".join(line.split()) for line in output.splitlines() if line.strip()]


def test_check_shows_where_ranks_and_stages_sit() -> None:
    shown = rows(call("check", EXAMPLES / "16_devices.json", "--stages", 4, "--generation", "910a"))
    assert shown == [
        "ranks server devices",
        shown[1],
        "0-7 10.0.0.1 0 1 2 3 4 5 6 7",
        "8-15 10.0.0.2 0 1 2 3 4 5 6 7",
        "stage replicas ranks server devices",
        shown[5],
        "0 0-3 0-3 10.0.0.1 0 1 2 3",
        "1 0-3 4-7 10.0.0.1 4 5 6 7",
        "2 0-3 8-11 10.0.0.2 0 1 2 3",
        "3 0-3 12-15 10.0.0.2 4 5 6 7",
        f"{EXAMPLES}/16_devices.json: a rank table (v1.0) of 16 ranks on 2 servers that can be used.",
    ]
    one = call("check", EXAMPLES / "16_devices.json", "--stages", 1)
    assert "Warning: replicas inside a server: with num_stages=1" in one
    assert "8-15 8-15 10.0.0.2" in "\n".join(rows(one))


def test_check_tells_all_that_is_wrong_and_fails(tmp_path: Path) -> None:
    content = v1_2()
    content["server_list"][0]["device"][0]["rank_id"] = "1"
    content["server_list"][1]["device"][0]["device_ip"] = "?"
    output = call("check", write(tmp_path / "table.json", content), "--stages", 2, code=2)
    assert "Error: rank ids: rank_id 1 is there 2 times" in output
    assert 'Error: device addresses: device_ip has to be an IPv4 or IPv6 address: rank 2 has "?"' in output
    assert rows(output)[0] == "ranks server devices super pod"
    assert "stage" not in output
    assert "can be used" not in output
    assert "Error: " in call("check", write(tmp_path / "table.json", v1_0()), "--generation", "910a", code=2)
    assert "Warning: 8n devices" in call("check", tmp_path / "table.json")


@pytest.mark.parametrize("num_devices", [2, 8, 16])
def test_the_examples_can_be_used(num_devices: int) -> None:
    table = read_rank_table(EXAMPLES / f"{num_devices}_devices.json")
    assert len(table) == num_devices
    for generation in (None, "910a", "a2", "a3"):
        assert check_rank_table(table, generation) == []
    assert "Warning" not in call("check", EXAMPLES / f"{num_devices}_devices.json", "--stages", 2)


def test_make_numbers_servers_and_devices_in_order(tmp_path: Path) -> None:
    (tmp_path / "hccn.conf").write_text("address_0=192.168.2.1\nnetmask_0=255.255.255.0\naddress_3 = 192.168.2.4\n")
    servers = [f"10.0.0.10={tmp_path}/hccn.conf", "10.0.0.9=192.168.1.1,192.168.1.4"]
    output = tmp_path / "table.json"
    for format in ("v1.0", "v1.2", "group_list"):
        shown = call("make", *servers, "--devices", "0,3", "--to", format, "-o", output, "--force")
        assert f"Wrote {output} ({format})." in shown
        assert "0, 1 10.0.0.9 0 3" in rows(shown)
        table = read_rank_table(output)
        assert table.format == format
        assert [(r.server_id, r.device_id, r.device_ip) for r in table.ranks] == [
            ("10.0.0.9", 0, "192.168.1.1"),
            ("10.0.0.9", 3, "192.168.1.4"),
            ("10.0.0.10", 0, "192.168.2.1"),
            ("10.0.0.10", 3, "192.168.2.4"),
        ]
    assert "Warning: 8n devices" in call("make", *servers, "--devices", "0,3")
    # Without --output the file goes to the terminal, where one server needs no addresses.
    assert [
        d["device_id"] for d in json.loads(call("make", "node", "--devices", "4-7"))["server_list"][0]["device"]
    ] == [
        "4",
        "5",
        "6",
        "7",
    ]


def test_convert_changes_format_and_ranks(tmp_path: Path) -> None:
    source = write(tmp_path / "old.json", group_list())
    new = tmp_path / "new.json"
    call("convert", source, "--to", "v1.0", "-o", new)
    assert read_rank_table(new) == read_rank_table(source)
    back = tmp_path / "back.json"
    call("convert", new, "--to", "group_list", "-o", back)
    assert read_rank_table(back) == read_rank_table(source)

    output = call("convert", write(tmp_path / "pods.json", v1_2()), "--to", "group_list")
    assert "Warning: group_list has no place for super_device_id, super_pod_list, host_nic_ip: left out" in output

    content = v1_0()
    content["server_list"][0]["server_id"] = "10.0.0.3"
    mixed = write(tmp_path / "mixed.json", content)
    assert "order of servers" in call("convert", mixed, code=2)
    call("convert", mixed, "--renumber", "-o", tmp_path / "sorted.json")
    table = read_rank_table(tmp_path / "sorted.json")
    assert list(table.servers) == ["10.0.0.2", "10.0.0.3"]
    assert table.format == "v1.0"


def test_processes_of_a_server() -> None:
    assert call("processes", EXAMPLES / "2_devices.json").splitlines() == [
        "RANK_ID=0 RANK_SIZE=2 DEVICE_ID=0",
        "RANK_ID=1 RANK_SIZE=2 DEVICE_ID=1",
    ]
    second = call("processes", EXAMPLES / "16_devices.json", "--server", "10.0.0.2").splitlines()
    assert second[3] == "RANK_ID=11 RANK_SIZE=16 DEVICE_ID=3"
    assert len(second) == 8


def test_this_machines_server_is_found_by_its_address(tmp_path: Path) -> None:
    content = v1_0()
    content["server_list"][1]["server_id"] = "127.0.0.1"
    content["server_list"][0]["server_id"] = "10.255.255.1"  # after the other as text, so that both orders agree
    path = write(tmp_path / "table.json", content)
    shown = [line for line in call("processes", path).splitlines() if line.startswith("RANK_ID=")]
    assert shown == ["RANK_ID=2 RANK_SIZE=4 DEVICE_ID=0", "RANK_ID=3 RANK_SIZE=4 DEVICE_ID=1"]


def test_it_needs_neither_torch_nor_lightning() -> None:
    command = [sys.executable, "-c", BARE, "rank-table", "check", str(EXAMPLES / "8_devices.json"), "--stages", "2"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S)
    assert done.returncode == 0, done.stderr
    assert "that can be used" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ("check none.json", "cannot read the rank table"),
        ("check table.json --stages 3", "4 devices cannot be 3 stages; use a num_stages of 1, 2, 4"),
        ("make a= --devices 0", "a server is SERVER_ID or SERVER_ID=ADDRESSES, got 'a='"),
        ("make a=1.1.1.1 --devices 0-1", "server a has 1 addresses for 2 devices (0, 1)"),
        ("make a=hccn.conf --devices 0-1", "hccn.conf has no address of devices 1"),
        ("make a=binary.conf --devices 0", "binary.conf is not an hccn.conf: byte 0 is no text in UTF-8"),
        ("make a=none.conf", "none.conf: No such file or directory"),
        ("make a --devices 0,0", "--devices takes different numbers such as 0-7 or 0,1,4,5, got '0,0'"),
        ("make a --devices x", "--devices takes different numbers"),
        ("make a --devices 0-99999999999", "--devices takes different numbers"),
        ("make a --devices 99999999999", "--devices takes different numbers"),
        ("make a -o table.json", "table.json exists: choose another --output, or replace it with --force"),
        ("make a b", "ranks 0-15 have no device_ip"),
        (
            "processes table.json",
            "none of the servers has an address or the name of this machine: choose one with --server",
        ),
        ("processes table.json --server c", "the rank table has no server 'c', it has 198.51.100.1, 198.51.100.2"),
    ],
)
def test_mistakes_are_told(arguments: str, sentence: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    content = v1_0()
    for number, server in enumerate(content["server_list"], 1):
        server["server_id"] = f"198.51.100.{number}"
    write(tmp_path / "table.json", content)
    (tmp_path / "hccn.conf").write_text("address_0=192.168.1.1\n")
    (tmp_path / "binary.conf").write_bytes(b"\xff\xfe")
    before = sorted(path.name for path in tmp_path.iterdir())
    output = call(*arguments.split(), code=2)
    assert sentence in output
    assert "Error: " in output
    assert sorted(path.name for path in tmp_path.iterdir()) == before
