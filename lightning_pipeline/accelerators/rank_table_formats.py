"""Rank table files: HCCL's versions 1.0 and 1.2, and MindSpore's older group_list.

    v1.0        server_list: server_id, device: device_id, device_ip, rank_id
    v1.2        the same with super_device_id, and super_pod_list: super_pod_id, server_list: server_id
    group_list  group_list: instance_list: rank_id, server_id, devices (one): device_id, device_ip

Every value is a string, numbers too. Fields that are not read here are kept, and written again in the same place.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from lightning_pipeline.accelerators.rank_table import Device, RankTable, RankTableError, Server, SuperPod

FORMATS = ("v1.0", "v1.2", "group_list")

MAX_BYTES = 64 * 2**20
"""Of a file: some hundred thousand devices."""
MAX_DIGITS = 9
"""Of a number in it, ranks and devices alike."""

_TOP = {"status", "version", "server_count", "server_list", "super_pod_list"}
_SERVER = {"server_id", "device"}
_DEVICE = {"device_id", "device_ip", "rank_id", "super_device_id"}
_GROUPED = {"status", "group_count", "group_list"}


def read_rank_table(path: str | Path) -> RankTable:
    """Read a file of any of the formats.

    Raises:
        RankTableError: no such file, one that is not JSON or larger than any table, or one that lacks what its format
            asks for. What the table says is not judged here (see ``check_rank_table``).
    """
    path = Path(path)
    try:
        with path.open("rb") as file:
            content = file.read(MAX_BYTES + 1)
        text = content.decode("utf-8-sig")
    except OSError as error:
        reason = error.strerror or str(error)
        raise RankTableError(f"cannot read the rank table {path.absolute()}: {reason}; set RANK_TABLE_FILE") from None
    except UnicodeDecodeError as error:
        raise RankTableError(f"the rank table {path} is not JSON: {error}") from None
    if len(content) > MAX_BYTES:
        raise RankTableError(f"{path} is no rank table: it has more than {MAX_BYTES:,} bytes")
    try:
        return parse_rank_table(text)
    except RankTableError as error:
        raise RankTableError(f"rank table {path}: {error}") from None


def parse_rank_table(text: str) -> RankTable:
    """As :func:`read_rank_table`, from text."""
    try:
        content = json.loads(text)
    except json.JSONDecodeError as error:
        raise RankTableError(f"it is not JSON: {_fault(error)}") from None
    except (ValueError, RecursionError) as error:  # a number may also have more digits than Python reads
        raise RankTableError(f"it is not JSON: {error}") from None
    file = _Node(content, "")
    status = file.string("status")
    if status != "completed":
        raise RankTableError(f'status is "{status}", not "completed": whoever writes the file has not finished it')
    if "group_list" in file.fields:
        return _read_groups(file)
    version = file.string("version")
    if f"v{version}" not in FORMATS:
        raise RankTableError(f'version is "{version}"; this package reads "1.0", "1.2" and files with a group_list')
    return _read_servers(file, f"v{version}")


def format_rank_table(table: RankTable, format: str) -> str:
    """The table as text of one of ``FORMATS``. Fields that the format does not have are left out (see ``lost_in``).

    Raises:
        RankTableError: another format, or a field that is kept from the file and nested too deeply to be written.
    """
    _check_format(format)
    content = _groups_of(table) if format == "group_list" else _servers_of(table, format)
    try:
        return json.dumps(content, indent=2) + "\n"
    except RecursionError:
        raise RankTableError("the rank table has a field that is nested too deeply to be written") from None


def lost_in(table: RankTable, format: str) -> list[str]:
    """Names of fields that ``table`` has and ``format`` has no place for."""
    _check_format(format)
    lost = []
    if format != "v1.2":
        lost += ["super_device_id"] * any(device.super_device_id for s in table.servers for device in s.devices)
        lost += ["super_pod_list"] * bool(table.super_pods)
    if format == "group_list":
        lost += sorted({name for server in table.servers for name in server.other})
    elif table.format == "group_list":
        lost += sorted(table.other)
    return lost


# -- server_list ------------------------------------------------------------------------------------------------------


def _read_servers(file: _Node, format: str) -> RankTable:
    servers = []
    for server in file.objects("server_list"):
        devices = [
            Device(
                device.number("device_id"),
                device.number("rank_id"),
                device.string("device_ip", ""),
                device.string("super_device_id", ""),
                device.others(_DEVICE),
            )
            for device in server.objects("device")
        ]
        servers.append(Server(server.string("server_id"), tuple(devices), server.others(_SERVER)))
    # Version 1.2 may leave the count out.
    if format == "v1.0" or "server_count" in file.fields:
        file.count("server_count", len(servers), "servers in server_list")
    pods = file.objects("super_pod_list") if "super_pod_list" in file.fields else ()
    super_pods = tuple(
        SuperPod(pod.string("super_pod_id"), tuple(s.string("server_id") for s in pod.objects("server_list")))
        for pod in pods
    )
    return RankTable(tuple(servers), super_pods, file.others(_TOP), format)


def _servers_of(table: RankTable, format: str) -> dict[str, Any]:
    in_pods = format == "v1.2"
    servers = [
        {
            "server_id": server.server_id,
            **server.other,
            "device": [_device(device, in_pods=in_pods, rank=True) for device in server.devices],
        }
        for server in table.servers
    ]
    content = {
        "status": "completed",
        "version": format[1:],
        **(table.other if table.format != "group_list" else {}),
        "server_count": str(len(servers)),
        "server_list": servers,
    }
    if in_pods and table.super_pods:
        content["super_pod_list"] = [
            {"super_pod_id": pod.super_pod_id, "server_list": [{"server_id": name} for name in pod.server_ids]}
            for pod in table.super_pods
        ]
    return content


def _device(device: Device, *, in_pods: bool, rank: bool) -> dict[str, Any]:
    return {
        "device_id": str(device.device_id),
        **({"super_device_id": device.super_device_id} if in_pods and device.super_device_id else {}),
        **({"device_ip": device.device_ip} if device.device_ip else {}),
        **device.other,
        **({"rank_id": str(device.rank)} if rank else {}),
    }


# -- group_list -------------------------------------------------------------------------------------------------------


def _read_groups(file: _Node) -> RankTable:
    groups = list(file.objects("group_list"))
    file.count("group_count", len(groups), "groups in group_list")
    if len(groups) != 1:
        raise RankTableError(f"group_list has {len(groups)} groups; put all ranks into one")
    group = groups[0]
    devices: dict[str, list[Device]] = {}
    instances = list(group.objects("instance_list"))
    for instance in instances:
        inside = list(instance.objects("devices"))
        if len(inside) != 1:
            raise RankTableError(f"{instance.path} has {len(inside)} devices; an instance is one rank on one device")
        device = inside[0]
        devices.setdefault(instance.string("server_id"), []).append(
            Device(
                device.number("device_id"),
                instance.number("rank_id"),
                device.string("device_ip", ""),
                other=device.others(_DEVICE),
            )
        )
    group.count("instance_count", len(instances), "instances in instance_list")
    group.count("device_num", len(instances), "devices in instance_list")
    group.count("server_num", len(devices), "different server_id in instance_list")
    servers = tuple(Server(name, tuple(inside)) for name, inside in devices.items())
    return RankTable(
        servers, other={**file.others(_GROUPED), "group_name": group.string("group_name", "")}, format="group_list"
    )


def _groups_of(table: RankTable) -> dict[str, Any]:
    header = table.other if table.format == "group_list" else {}
    count = str(len(table))
    nics = sorted({place.device.device_id for place in table.ranks})
    return {
        "board_id": "0x0000",
        "chip_info": "910",
        "deploy_mode": "lab",
        "group_count": "1",
        "group_list": [
            {
                "device_num": count,
                "server_num": str(len(table.servers)),
                "group_name": header.get("group_name", ""),
                "instance_count": count,
                "instance_list": [
                    {
                        "devices": [_device(place.device, in_pods=False, rank=False)],
                        "rank_id": str(place.rank),
                        "server_id": place.server.server_id,
                    }
                    for place in table.ranks
                ],
            }
        ],
        "para_plane_nic_location": "device",
        "para_plane_nic_name": [f"eth{nic}" for nic in nics],
        "para_plane_nic_num": str(len(nics)),
        **{name: value for name, value in header.items() if name != "group_name"},
        "status": "completed",
    }


# -- reading JSON -----------------------------------------------------------------------------------------------------


def _fault(error: json.JSONDecodeError) -> str:
    """What is wrong, with its line. A comma before a closing bracket is a usual mistake, of which the parser says only
    that it expects something else."""
    text = error.doc
    if not text.strip():
        return "it is empty"
    # Python 3.13 stops at the comma, older ones at the bracket after it.
    comma = error.pos if error.msg.startswith("Illegal trailing comma") else len(text[: error.pos].rstrip()) - 1
    if text[comma : comma + 1] == "," and text[comma + 1 :].lstrip()[:1] in ("]", "}"):
        *before, line = (part.strip() for part in text[: comma + 1].split("\n"))
        end = line if len(line) <= 60 else f"...{line[-60:]}"
        return f"line {len(before) + 1} has a comma after the last entry of a list or an object, which has to go: {end}"
    line = _cut(text.split("\n")[error.lineno - 1].strip())
    return f"{error.msg}: line {error.lineno} column {error.colno}: {line} (comments have to be left out)"


class _Node:
    """An object of the file and its path in it, which every complaint names."""

    def __init__(self, content: Any, path: str) -> None:
        if not isinstance(content, dict):
            raise RankTableError(f"{path or 'the file'} has to be an object in braces, got {_shown(content)}")
        self.fields: dict[str, Any] = content
        self.path = path or "the file"
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

    def number(self, name: str) -> int:
        text = self.string(name)
        if not (text.isascii() and text.isdigit() and len(text) <= MAX_DIGITS):
            raise RankTableError(
                f"{self._prefix}{name} has to be a whole number from 0 in quotes, got {_shown(text)} (of at most "
                f"{MAX_DIGITS} digits)"
            )
        return int(text)

    def count(self, name: str, found: int, what: str) -> None:
        if self.number(name) != found:
            raise RankTableError(f'{self._prefix}{name} is "{self.fields[name]}", but there are {found} {what}')

    def objects(self, name: str) -> Iterator[_Node]:
        value = self._value(name)
        if not isinstance(value, list) or not value:
            raise RankTableError(f"{self._prefix}{name} has to be a list with something in it, got {_shown(value)}")
        for number, content in enumerate(value):
            yield _Node(content, f"{self._prefix}{name}[{number}]")

    def others(self, known: set[str]) -> dict[str, Any]:
        return {name: value for name, value in self.fields.items() if name not in known}

    def _value(self, name: str) -> Any:
        if name not in self.fields:
            raise RankTableError(f"{self.path} has no {name}")
        return self.fields[name]


def _shown(value: Any) -> str:
    try:
        return _cut(json.dumps(value))
    except RecursionError:  # what json reads may be too deep for it to write
        return f"{type(value).__name__} in {type(value).__name__} without end"


def _cut(text: str) -> str:
    return text if len(text) <= 60 else f"{text[:60]}..."


def _check_format(format: str) -> None:
    if format not in FORMATS:
        raise RankTableError(f"unknown format {format!r} of rank tables; there are {', '.join(FORMATS)}")
