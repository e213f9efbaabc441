"""The machines behind a rank table's servers."""

from __future__ import annotations

import ipaddress
import socket
from contextlib import suppress

from lightning_pipeline.accelerators.rank_table import Rank, RankTable, RankTableError, Server


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
