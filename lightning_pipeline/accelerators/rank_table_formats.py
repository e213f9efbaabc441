"""Rank table files: HCCL's versions 1.0 and 1.2, and MindSpore's older group_list.

    v1.0        server_list: server_id, device: device_id, device_ip, rank_id
    v1.2        the same with super_device_id, and super_pod_list: super_pod_id, server_list: server_id
    group_list  group_list: instance_list: rank_id, server_id, devices (one): device_id, device_ip

Every value is a string, numbers too. Unknown fields are kept, and written again in the same place.
"""

from __future__ import annotations

import json
import re
from collections.abc import Container, Iterator
from pathlib import Path
from typing import Any, get_args

from lightning_pipeline.accelerators.rank_table import Format, Rank, RankTable, RankTableError, device_ids
from lightning_pipeline.schedules.validation import read_text

FORMATS: tuple[Format, ...] = get_args(Format)

MAX_BYTES = 64 * 2**20
"""Of a file: some hundred thousand devices."""
MAX_DIGITS = 9
"""Of a number in it, ranks and devices alike."""

# The fields that are read, by their place in the file.
_TOP = {"status", "version", "server_count", "server_list", "super_pod_list", "group_count", "group_list"}
_SERVER = {"server_id", "device"}
_DEVICE = {"device_id", "device_ip", "rank_id", "super_device_id"}


def whole_number(text: str, name: str) -> int:
    """A rank or the number of a device, from the text of a field or variable of this name."""
    if not (text.isascii() and text.isdigit() and len(text) <= MAX_DIGITS):
        raise RankTableError(
            f"{name} has to be a whole number from 0, of at most {MAX_DIGITS} digits, got {_shown(text)}"
        )
    return int(text)


# -- reading ----------------------------------------------------------------------------------------------------------


def read_rank_table(path: str | Path) -> RankTable:
    """Read a file of any of the formats.

    Raises:
        RankTableError: the file cannot be read, is not JSON, is larger than any table, or lacks a field of its format.
            What the table says is not judged here (see ``check_rank_table``).
    """
    try:
        text = read_text(path, kind="a rank table", most=MAX_BYTES)
    except OSError as error:
        reason = error.strerror or str(error)
        raise RankTableError(
            f"cannot read the rank table {Path(path).absolute()}: {reason}; set RANK_TABLE_FILE"
        ) from None
    except ValueError as error:
        raise RankTableError(str(error)) from None
    try:
        return parse_rank_table(text)
    except RankTableError as error:
        raise RankTableError(f"rank table {path}: {error}") from None


def parse_rank_table(text: str) -> RankTable:
    """As :func:`read_rank_table`, from text."""
    try:
        content = json.loads(text)
    except json.JSONDecodeError as error:
        raise RankTableError(f"it is not JSON: {_explain(error)}") from None
    except (ValueError, RecursionError) as error:  # ValueError: a number with more digits than Python converts
        raise RankTableError(f"it is not JSON: {error}") from None
    file = _Node(content, "")
    status = file.string("status")
    if status != "completed":
        raise RankTableError(f'status is "{status}", not "completed": whoever writes the file has not finished it')
    if "group_list" in file.fields:
        return _read_groups(file)
    version = file.string("version")
    if version == "1.0":
        return _read_servers(file, "v1.0")
    if version == "1.2":
        return _read_servers(file, "v1.2")
    raise RankTableError(f'version is "{version}"; this package reads "1.0", "1.2" and files with a group_list')


def _read_servers(file: _Node, format: Format) -> RankTable:
    ranks: list[Rank] = []
    server_fields: dict[str, dict[str, Any]] = {}
    for server in file.objects("server_list"):
        server_id = server.new("server_id", server_fields)
        server_fields[server_id] = server.others(_SERVER)
        ranks += [_rank(device, server_id, device.number("rank_id")) for device in server.objects("device")]
    # Version 1.2 may leave the count out.
    if format == "v1.0" or "server_count" in file.fields:
        file.count("server_count", len(server_fields), "servers in server_list")
    super_pods: dict[str, tuple[str, ...]] = {}
    for pod in file.objects("super_pod_list") if "super_pod_list" in file.fields else ():
        server_ids = tuple(server.string("server_id") for server in pod.objects("server_list"))
        super_pods[pod.new("super_pod_id", super_pods)] = server_ids
    return RankTable(tuple(ranks), server_fields, super_pods, file.others(_TOP), format)


def _read_groups(file: _Node) -> RankTable:
    groups = list(file.objects("group_list"))
    file.count("group_count", len(groups), "groups in group_list")
    if len(groups) != 1:
        raise RankTableError(f"group_list has {len(groups)} groups; put all ranks into one")
    group = groups[0]
    ranks = []
    for instance in group.objects("instance_list"):
        devices = list(instance.objects("devices"))
        if len(devices) != 1:
            raise RankTableError(f"{instance.path} has {len(devices)} devices; an instance is one rank on one device")
        ranks.append(_rank(devices[0], instance.string("server_id"), instance.number("rank_id")))
    other = {**file.others(_TOP), "group_name": group.string("group_name", "")}
    table = RankTable(tuple(ranks), other=other, format="group_list")
    group.count("instance_count", len(ranks), "instances in instance_list")
    group.count("device_num", len(ranks), "devices in instance_list")
    group.count("server_num", len(table.servers), "different server_id in instance_list")
    return table


def _rank(device: _Node, server_id: str, rank_id: int) -> Rank:
    return Rank(
        rank_id,
        server_id,
        device.number("device_id"),
        device.string("device_ip", ""),
        device.string("super_device_id", ""),
        device.others(_DEVICE),
    )


def _explain(error: json.JSONDecodeError) -> str:
    """What is wrong and in which line. The parser's own words for the usual mistake, a trailing comma, are obscure."""
    if not error.doc.strip():
        return "it is empty"
    # Python 3.13 stops at the comma, older ones at the bracket after it.
    position = error.pos + error.msg.startswith("Illegal trailing comma")
    for comma in re.finditer(r",\s*[]}]", error.doc):
        if comma.start() < position < comma.end():
            line = error.doc.count("\n", 0, comma.start()) + 1
            return f"line {line} has a comma after the last entry of a list or an object, which has to go"
    return f"{error.msg}: line {error.lineno} column {error.colno} (comments have to be left out)"


class _Node:
    """An object of the file, and its path in it, which every error names."""

    def __init__(self, content: Any, path: str) -> None:
        self.path = path or "the file"
        if not isinstance(content, dict):
            raise RankTableError(f"{self.path} has to be an object in braces, got {_shown(content)}")
        self.fields: dict[str, Any] = content
        self._prefix = f"{path}." if path else ""
        for name in content:
            if not name.isprintable():
                raise RankTableError(f"{self.path} has the field {_shown(name)}, which is no printable text")

    def string(self, name: str, default: str | None = None) -> str:
        if name not in self.fields and default is not None:
            return default
        value = self._value(name)
        if not isinstance(value, str):
            raise RankTableError(f"{self._prefix}{name} has to be a string in quotes, got {_shown(value)}")
        if not value.isprintable():
            raise RankTableError(f"{self._prefix}{name} has to be printable text, got {_shown(value)}")
        return value

    def new(self, name: str, known: Container[str]) -> str:
        value = self.string(name)
        if value in known:
            raise RankTableError(f'{self.path}: {name} "{value}" is there twice; list all that it has in one place')
        return value

    def number(self, name: str) -> int:
        return whole_number(self.string(name), f"{self._prefix}{name}")

    def count(self, name: str, found: int, what: str) -> None:
        if self.number(name) != found:
            raise RankTableError(f'{self._prefix}{name} is "{self.fields[name]}", but there are {found} {what}')

    def objects(self, name: str) -> Iterator[_Node]:
        value = self._value(name)
        if not isinstance(value, list) or not value:
            raise RankTableError(f"{self._prefix}{name} has to be a list with something in it, got {_shown(value)}")
        return (_Node(content, f"{self._prefix}{name}[{number}]") for number, content in enumerate(value))

    def others(self, known: set[str]) -> dict[str, Any]:
        return {name: value for name, value in self.fields.items() if name not in known}

    def _value(self, name: str) -> Any:
        if name not in self.fields:
            raise RankTableError(f"{self.path} has no {name}")
        return self.fields[name]


def _shown(value: Any) -> str:
    try:
        text = json.dumps(value)
    except RecursionError:  # the parser takes deeper nesting than the writer
        return f"a {type(value).__name__} that is nested too deeply"
    return text if len(text) <= 60 else f"{text[:60]}..."


# -- writing ----------------------------------------------------------------------------------------------------------


def format_rank_table(table: RankTable, format: Format) -> str:
    """The table as text. Fields that the format has no place for are left out (see ``lost_in``).

    Raises:
        RankTableError: a field that is kept from the file is nested too deeply to be written.
    """
    content = _groups_of(table) if format == "group_list" else _servers_of(table, format)
    try:
        return json.dumps(content, indent=2) + "\n"
    except RecursionError:
        raise RankTableError("the rank table has a field that is nested too deeply to be written") from None


def lost_in(table: RankTable, format: Format) -> list[str]:
    """Names of fields that ``table`` has and ``format`` has no place for."""
    lost = []
    if format != "v1.2":
        lost += ["super_device_id"] * any(rank.super_device_id for rank in table.ranks)
        lost += ["super_pod_list"] * bool(table.super_pods)
    if format == "group_list":
        lost += sorted({name for fields in table.server_fields.values() for name in fields})
    elif table.format == "group_list":
        lost += sorted(table.other)
    return lost


def _servers_of(table: RankTable, format: Format) -> dict[str, Any]:
    servers = [
        {
            "server_id": server_id,
            **table.server_fields.get(server_id, {}),
            "device": [{**_device(rank, format), "rank_id": str(rank.rank_id)} for rank in ranks],
        }
        for server_id, ranks in table.servers.items()
    ]
    content = {
        "status": "completed",
        "version": format[1:],
        **(table.other if table.format != "group_list" else {}),
        "server_count": str(len(servers)),
        "server_list": servers,
    }
    if format == "v1.2" and table.super_pods:
        content["super_pod_list"] = [
            {"super_pod_id": pod, "server_list": [{"server_id": server_id} for server_id in server_ids]}
            for pod, server_ids in table.super_pods.items()
        ]
    return content


def _groups_of(table: RankTable) -> dict[str, Any]:
    header = {"group_name": "", **(table.other if table.format == "group_list" else {})}
    group_name = header.pop("group_name")
    count = str(len(table))
    devices = sorted(set(device_ids(table.ranks)))
    instances = [
        {"devices": [_device(rank, "group_list")], "rank_id": str(rank.rank_id), "server_id": rank.server_id}
        for rank in table.ranks
    ]
    group = {
        "device_num": count,
        "server_num": str(len(table.servers)),
        "group_name": group_name,
        "instance_count": count,
        "instance_list": instances,
    }
    return {
        "board_id": "0x0000",
        "chip_info": "910",
        "deploy_mode": "lab",
        "group_count": "1",
        "group_list": [group],
        "para_plane_nic_location": "device",
        "para_plane_nic_name": [f"eth{device}" for device in devices],
        "para_plane_nic_num": str(len(devices)),
        **header,
        "status": "completed",
    }


def _device(rank: Rank, format: Format) -> dict[str, Any]:
    return {
        "device_id": str(rank.device_id),
        **({"super_device_id": rank.super_device_id} if format == "v1.2" and rank.super_device_id else {}),
        **({"device_ip": rank.device_ip} if rank.device_ip else {}),
        **rank.other,
    }
