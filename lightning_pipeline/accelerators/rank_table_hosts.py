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
    """Whether the server's address is one of this machine's: only then a socket can be bound to it."""
    address = address_of(server)
    if address is None:
        return False
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.bind((address, 0))
        except OSError:
            return False
    return True


def check_host(table: RankTable, place: Rank) -> None:
    """Only where the table names this machine as another server: it may as well name none by an address it has."""
    if is_this_host(place.server):
        return
    here = [server.server_id for server in table.servers if is_this_host(server)]
    if here:
        raise RankTableError(
            f"the rank table has {place}, but this machine is server {here[0]}: start each rank on its own server"
        )
