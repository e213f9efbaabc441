"""Rank tables for tests, as values and as the content of files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from lightning_pipeline.accelerators.rank_table import Rank, RankTable


def make_table(*servers: tuple[str, list[int]], addresses: bool = True) -> RankTable:
    """Servers as (server_id, device ids); ranks go through them in this order."""
    ranks: list[Rank] = []
    for number, (server_id, device_ids) in enumerate(servers):
        for device_id in device_ids:
            address = f"192.168.{number}.{device_id + 1}" if addresses else ""
            ranks.append(Rank(len(ranks), server_id, device_id, address))
    return RankTable(tuple(ranks))


def v1_0() -> dict[str, Any]:
    """Two servers of two devices."""
    return {
        "status": "completed",
        "version": "1.0",
        "server_count": "2",
        "server_list": [
            {
                "server_id": "10.0.0.1",
                "device": [
                    {"device_id": "0", "device_ip": "192.168.1.8", "rank_id": "0"},
                    {"device_id": "1", "device_ip": "192.168.1.9", "rank_id": "1"},
                ],
                "host_nic_ip": "reserve",
            },
            {
                "server_id": "10.0.0.2",
                "device": [
                    {"device_id": "0", "device_ip": "192.168.2.8", "rank_id": "2"},
                    {"device_id": "1", "device_ip": "192.168.2.9", "rank_id": "3"},
                ],
                "host_nic_ip": "reserve",
            },
        ],
    }


def v1_2() -> dict[str, Any]:
    """The same in two super pods."""
    content = {**v1_0(), "version": "1.2"}
    del content["server_count"]
    for server in content["server_list"]:
        for device in server["device"]:
            device["super_device_id"] = str(1000 + int(device["device_id"]))
            device["device_port"] = "16666"
    content["super_pod_list"] = [
        {"super_pod_id": str(number), "server_list": [{"server_id": f"10.0.0.{number + 1}"}]} for number in (0, 1)
    ]
    return content


def group_list() -> dict[str, Any]:
    """The same in the older format."""
    return {
        "board_id": "0x0020",
        "chip_info": "910",
        "deploy_mode": "lab",
        "group_count": "1",
        "group_list": [
            {
                "device_num": "4",
                "server_num": "2",
                "group_name": "",
                "instance_count": "4",
                "instance_list": [
                    {
                        "devices": [
                            {"device_id": str(rank % 2), "device_ip": f"192.168.{rank // 2 + 1}.{8 + rank % 2}"}
                        ],
                        "rank_id": str(rank),
                        "server_id": f"10.0.0.{rank // 2 + 1}",
                    }
                    for rank in range(4)
                ],
            }
        ],
        "para_plane_nic_location": "device",
        "para_plane_nic_name": ["eth0", "eth1"],
        "para_plane_nic_num": "2",
        "status": "completed",
    }


def write(path: Path, content: dict[str, Any] | str) -> Path:
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return path
