"""Rank tables of Ascend's HCCL as values: which rank runs on which device of which server."""

from __future__ import annotations

import ipaddress
import socket
import zlib
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

T = TypeVar("T")
Format = Literal["v1.0", "v1.2", "group_list"]
"""HCCL's versions 1.0 and 1.2, and MindSpore's older format."""


class RankTableError(ValueError):
    """A rank table that cannot be used; the message names the place in it and the way out."""


@dataclass(frozen=True)
class Rank:
    """A rank and the device that it runs on.

    Attributes:
        device_id: the device's number on its server, as in /dev/davinci0.
        device_ip: address of the device's own network card; "" if the table gives none.
        super_device_id: the device's number in its super pod; "" outside of one.
        other: further fields of the device, which are kept as they are.
    """

    rank_id: int
    server_id: str
    device_id: int
    device_ip: str = ""
    super_device_id: str = ""
    other: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        return f"rank {self.rank_id} (server {self.server_id}, device {self.device_id})"


@dataclass(frozen=True)
class RankTable:
    """A rank table, whatever the format of its file.

    Tables are equal if they place the same ranks alike, in whichever format and order.

    Attributes:
        ranks: in the order of their rank_id.
        server_fields: further fields of each server, by server_id.
        super_pods: the server_ids of each super pod, by super_pod_id; devices of a pod reach one another directly.
        other: further fields at the top of the file, such as board_id.
        format: that of the file.
    """

    ranks: tuple[Rank, ...]
    server_fields: dict[str, dict[str, Any]] = field(default_factory=dict, compare=False)
    super_pods: dict[str, tuple[str, ...]] = field(default_factory=dict)
    other: dict[str, Any] = field(default_factory=dict, compare=False)
    format: Format = field(default="v1.0", compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "ranks", tuple(sorted(self.ranks, key=lambda rank: rank.rank_id)))

    def __len__(self) -> int:
        return len(self.ranks)

    @property
    def servers(self) -> dict[str, list[Rank]]:
        """The ranks of each server by server_id; servers are in the order of their lowest ranks."""
        return grouped(self.ranks, lambda rank: rank.server_id)

    def rank(self, rank_id: int) -> Rank:
        """The rank of this number."""
        for rank in self.ranks:
            if rank.rank_id == rank_id:
                return rank
        raise RankTableError(f"the rank table has no rank {rank_id}, it has ranks {listed(rank_ids(self.ranks))}")

    def node_and_local_rank(self, rank: Rank) -> tuple[int, int]:
        """The number of the rank's server, and the rank's number on it, both counted in the order of ranks."""
        return list(self.servers).index(rank.server_id), self.servers[rank.server_id].index(rank)

    @property
    def digest(self) -> str:
        """Eight hexadecimal digits that differ between tables, and not between formats of one table."""
        key = [(rank.rank_id, rank.server_id, rank.device_id, rank.device_ip) for rank in self.ranks]
        return f"{zlib.crc32(repr(key).encode()):08x}"

    def address_of(self, server_id: str) -> str | None:
        """The server's address, if the table has one."""
        fields = self.server_fields.get(server_id, {})
        for candidate in (fields.get("host_ip"), server_id, fields.get("host_nic_ip")):
            with suppress(ValueError):
                return str(ipaddress.ip_address(str(candidate)))
        return None

    def servers_here(self) -> list[str]:
        """The server_ids that are known to be this machine: several if the table was made up of local addresses."""
        return [server_id for server_id in self.servers if self.is_here(server_id)]

    def is_here(self, server_id: str) -> bool:
        """Whether the server is known to be this machine, by its name or its address."""
        if _is_same_host(server_id, socket.gethostname()):
            return True
        address = self.address_of(server_id)
        if address is None:
            return False
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        with socket.socket(family, socket.SOCK_DGRAM) as probe:  # only an address of this machine can be bound
            try:
                probe.bind((address, 0))
            except (OSError, ValueError):  # ValueError: an IPv6 zone that is not the name of an interface
                return False
        return True


def _is_same_host(one: str, other: str) -> bool:
    """Whether two names are the same host's; either may lack the domain."""
    (host, _, domain), (other_host, _, other_domain) = (name.lower().partition(".") for name in (one, other))
    return host == other_host and (domain == other_domain or not domain or not other_domain)


def grouped(ranks: Iterable[Rank], key: Callable[[Rank], T]) -> dict[T, list[Rank]]:
    """The ranks by their keys, in the order in which the keys come."""
    groups: dict[T, list[Rank]] = {}
    for rank in ranks:
        groups.setdefault(key(rank), []).append(rank)
    return groups


def rank_ids(ranks: Iterable[Rank]) -> list[int]:
    return [rank.rank_id for rank in ranks]


def device_ids(ranks: Iterable[Rank]) -> list[int]:
    return [rank.device_id for rank in ranks]


def listed(numbers: Sequence[int]) -> str:
    """``[0, 1, 2, 5]`` as ``"0-2, 5"``; a pair is not a range."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 2 else ", ".join(map(str, run)) for run in runs)
