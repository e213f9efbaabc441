"""Rank tables of Ascend's HCCL as values: which rank runs on which device of which server."""

from __future__ import annotations

import ipaddress
import socket
import zlib
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any


class RankTableError(ValueError):
    """A rank table that cannot be used; the message names the place in it and the way out."""


@dataclass(frozen=True)
class Device:
    """One device and its rank.

    Attributes:
        device_id: its number on the server, as in /dev/davinci0.
        rank: the rank of the process that drives it.
        device_ip: address of its own network card; "" where the table gives none.
        super_device_id: its number in the super pod; "" outside one.
        other: further fields of the file, which are kept as they are.
    """

    device_id: int
    rank: int
    device_ip: str = ""
    super_device_id: str = ""
    other: dict[str, Any] = field(default_factory=dict, hash=False)


@dataclass(frozen=True)
class Server:
    """One host and its devices, in the order of their ranks."""

    server_id: str
    devices: tuple[Device, ...]
    other: dict[str, Any] = field(default_factory=dict, hash=False)

    @property
    def ranks(self) -> list[int]:
        return [device.rank for device in self.devices]


@dataclass(frozen=True)
class SuperPod:
    """Servers whose devices reach one another directly."""

    super_pod_id: str
    server_ids: tuple[str, ...]


@dataclass(frozen=True)
class Rank:
    """A rank's place: ``node_rank`` counts servers, and ``local_rank`` the ranks of one, both in the order of ranks."""

    rank: int
    node_rank: int
    local_rank: int
    server: Server
    device: Device

    def __str__(self) -> str:
        return f"rank {self.rank} (server {self.server.server_id}, device {self.device.device_id})"


@dataclass(frozen=True)
class RankTable:
    """A rank table, whatever the format of its file.

    Tables are equal where they place the same ranks alike: the order in the file and its format do not count.

    Attributes:
        servers: in the order of their lowest ranks.
        super_pods: in the order of their servers; () for tables without.
        other: further fields at the top of the file, such as board_id.
        format: "v1.0", "v1.2" or "group_list", as read.
    """

    servers: tuple[Server, ...]
    super_pods: tuple[SuperPod, ...] = ()
    other: dict[str, Any] = field(default_factory=dict, hash=False, compare=False)
    format: str = field(default="v1.0", compare=False)

    def __post_init__(self) -> None:
        servers = [replace(server, devices=_by_rank(server.devices)) for server in self.servers]
        servers.sort(key=lambda server: min(server.ranks))
        object.__setattr__(self, "servers", tuple(servers))

    def __len__(self) -> int:
        return sum(len(server.devices) for server in self.servers)

    @property
    def ranks(self) -> list[Rank]:
        """Every rank and its place, in order."""
        places = [
            Rank(device.rank, node_rank, local_rank, server, device)
            for node_rank, server in enumerate(self.servers)
            for local_rank, device in enumerate(server.devices)
        ]
        return sorted(places, key=lambda place: place.rank)

    def rank(self, rank: int) -> Rank:
        """A rank's place.

        Raises:
            RankTableError: the table has no such rank.
        """
        for place in self.ranks:
            if place.rank == rank:
                return place
        ranks = listed([place.rank for place in self.ranks])
        raise RankTableError(f"the rank table has no rank {rank}, it has ranks {ranks}")

    @property
    def digest(self) -> str:
        """Eight digits that tell tables apart, alike for all formats."""
        key = [
            (place.rank, place.server.server_id, place.device.device_id, place.device.device_ip) for place in self.ranks
        ]
        return f"{zlib.crc32(repr(key).encode()):08x}"


def listed(numbers: Sequence[int]) -> str:
    """``[0, 1, 2, 5]`` as ``"0-2, 5"``; a pair is not a range."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 2 else ", ".join(map(str, run)) for run in runs)


def _by_rank(devices: Sequence[Device]) -> tuple[Device, ...]:
    return tuple(sorted(devices, key=lambda device: device.rank))


def address_of(server: Server) -> str | None:
    """The host's address, where the table has one."""
    for candidate in (server.other.get("host_ip"), server.server_id, server.other.get("host_nic_ip")):
        with suppress(ValueError):
            return str(ipaddress.ip_address(str(candidate)))
    return None


def is_this_host(server: Server) -> bool:
    """Whether the server's id is this machine's name, or its address one of this machine's: only then a socket can be
    bound to it."""
    if _are_same_name(server.server_id, socket.gethostname()):
        return True
    address = address_of(server)
    if address is None:
        return False
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.bind((address, 0))
        except (OSError, ValueError):  # of an IPv6 address with a zone that is no name of an interface
            return False
    return True


def check_host(table: RankTable, place: Rank) -> None:
    """Only where the table names this machine as another server: it may as well name none by an address it has."""
    if is_this_host(place.server):
        return
    here = servers_here(table)
    if here:
        raise RankTableError(
            f"the rank table has {place}, but this machine is server {here[0].server_id}: start each rank on its own "
            "server"
        )


def servers_here(table: RankTable) -> list[Server]:
    """The servers that are known to be this machine: several where the table was made up of local addresses."""
    return [server for server in table.servers if is_this_host(server)]


def _are_same_name(one: str, other: str) -> bool:
    """Hosts by name, with the domain or without it."""
    names = [name.lower().partition(".") for name in (one, other)]
    (host, _, domain), (other_host, _, other_domain) = names
    return host == other_host and (domain == other_domain or not domain or not other_domain)
