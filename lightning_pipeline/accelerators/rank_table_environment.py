"""A cluster environment for MindSpore-style jobs: one process per device, with RANK_TABLE_FILE and RANK_ID set.

    RANK_TABLE_FILE  the rank table, on every server
    RANK_ID          rank of this process
    DEVICE_ID        device of this process; where RANK_ID is not set, its rank follows from it and the table
    RANK_SIZE        number of processes in all; may be left out, as the table knows

Who has started a process, with RANK_TABLE_FILE set, is told by the first of these that applies:

    1. torchrun, SLURM, MPI or LSF, where Lightning finds one of them: its ranks count, whatever RANK_ID says.
    2. RANK_ID is set: a script has started a process for each device.
    3. LOCAL_RANK is set: Lightning's launcher has, as it sets it for every process it starts, or somebody in its place.
    4. DEVICE_ID is set, and RANK_SIZE is not 1: a script has, as under 2. (A RANK_SIZE of 1 is a job of one device.)
    5. Nobody: Lightning starts the processes. Neither RANK_TABLE_FILE nor RANK_SIZE says which process this one is.

Under 2 and 4 `with_rank_table` puts `RankTableEnvironment` in the place of Lightning's own environment. HCCL reads the
table in all cases, so `check_processes` compares the ranks of other launchers with it.
"""

from __future__ import annotations

import os

import torch
from typing_extensions import override

from lightning_pipeline.accelerators.rank_table import (
    Rank,
    RankTable,
    RankTableError,
    Server,
    address_of,
    check_host,
    listed,
    servers_here,
)
from lightning_pipeline.accelerators.rank_table_formats import MAX_DIGITS, read_rank_table
from lightning_pipeline.accelerators.rank_table_rules import check_placement, generation_of, require_valid

from .._lightning import ClusterEnvironment, LightningEnvironment, rank_zero_info, rank_zero_warn

# As SLURM's environment does: high enough to be free, and below the ports that HCCL (60000 on) and systems give out.
_PORTS = range(15_000, 25_000)


class RankTableEnvironment(ClusterEnvironment):
    """The processes of a rank table, as RANK_ID, or else DEVICE_ID, and the table tell.

    The processes meet at MASTER_ADDR and MASTER_PORT where these are set. Otherwise they meet on the server of rank 0,
    by its host_ip or its server_id, at a port that follows from the table, so that jobs of two tables do not meet.

    Raises:
        RankTableError: a table that cannot be used, or variables that do not fit it.
    """

    def __init__(self) -> None:
        super().__init__()
        self.table = read_rank_table(os.environ["RANK_TABLE_FILE"])
        require_valid(self.table)
        self.placed_by = _placed_by() or "DEVICE_ID"
        """The variable that says which rank this process is."""
        self.place = _place_of_this_process(self.table, self.placed_by)

    @staticmethod
    @override
    def detect() -> bool:
        if not os.environ.get("RANK_TABLE_FILE"):
            return False
        return "RANK_ID" in os.environ or (_placed_by() == "DEVICE_ID" and "LOCAL_RANK" not in os.environ)

    @property
    @override
    def creates_processes_externally(self) -> bool:
        return True

    @property
    @override
    def main_address(self) -> str:
        if "MASTER_ADDR" in os.environ:
            return os.environ["MASTER_ADDR"]
        if len(self.table.servers) == 1:
            return "127.0.0.1"
        address = address_of(self.table.servers[0])
        if address is None:
            raise RankTableError(
                f"the rank table gives no address of server {self.table.servers[0].server_id}, where rank 0 is: "
                "set MASTER_ADDR to it on all servers, or add its host_ip to the table"
            )
        return address

    @property
    @override
    def main_port(self) -> int:
        port = _number("MASTER_PORT")
        return port if port is not None else _PORTS[int(self.table.digest, 16) % len(_PORTS)]

    @override
    def world_size(self) -> int:
        return len(self.table)

    @override
    def global_rank(self) -> int:
        return self.place.rank

    @override
    def local_rank(self) -> int:
        return self.place.local_rank

    @override
    def node_rank(self) -> int:
        return self.place.node_rank

    @override
    def set_world_size(self, size: int) -> None:
        """Nothing: the table tells."""

    @override
    def set_global_rank(self, rank: int) -> None:
        """Nothing: the variables tell."""

    @property
    def way_out(self) -> str:
        """What to do where two processes are the same rank, or ranks are missing."""
        return (
            f"start the script once for each device of the rank table, with a {self.placed_by} of its own, or unset "
            f"{self.placed_by} for Lightning to start the processes; beside another job of this table, set MASTER_PORT"
        )

    @override
    def validate_settings(self, num_devices: int, num_nodes: int) -> None:
        server = self.place.server
        if (num_devices, num_nodes) != (len(server.devices), len(self.table.servers)):
            raise RankTableError(
                f"the Trainer has devices={num_devices} and num_nodes={num_nodes}, but the rank table has "
                f"{len(self.table.servers)} servers and {len(server.devices)} devices on server {server.server_id}: "
                f"set devices={len(server.devices)} and num_nodes={len(self.table.servers)}, or use another table "
                f"({self.placed_by} and RANK_TABLE_FILE are set, so this process is one of the table's)"
            )

    def device(self, device: torch.device) -> torch.device:
        """The NPU that the table gives this rank, whichever Lightning would take; other devices as they are.

        Raises:
            RankTableError: it is not among ASCEND_RT_VISIBLE_DEVICES.
        """
        if device.type != "npu":
            return device
        return torch.device(device.type, visible_index(self.place))


def with_rank_table(environment: ClusterEnvironment | None) -> ClusterEnvironment | None:
    """`environment`, or the rank table's in place of Lightning's own, which Lightning takes when it finds no other.

    Raises:
        RankTableError: variables of such a job without a rank table: each process would start the others once more.
    """
    if type(environment) is not LightningEnvironment:
        return environment
    if RankTableEnvironment.detect():
        return RankTableEnvironment()
    if environment.creates_processes_externally or os.environ.get("RANK_TABLE_FILE"):
        return environment
    started = {name: os.environ[name] for name in ("RANK_ID", "RANK_SIZE", "DEVICE_ID") if os.environ.get(name)}
    if len(started) > 1 and started.get("RANK_SIZE", "1") != "1":
        shown = ", ".join(f"{name}={value}" for name, value in started.items())
        raise RankTableError(
            f"{shown} say that a script has started this process as one of several, but RANK_TABLE_FILE is not set: "
            "set it, or unset them and let Lightning start the processes"
        )
    return environment


def check_processes(environment: ClusterEnvironment, device: torch.device) -> dict[str, str]:
    """Compare whoever started the processes with the rank table, and this machine's generation with its rules.

    Without RANK_TABLE_FILE, or with one process, there is nothing to compare. Rank 0 gives the warnings.

    Returns:
        What all processes have to have alike: the table.

    Raises:
        RankTableError: a table that cannot be used, or ranks or a device that are not those of the table.
    """
    path = os.environ.get("RANK_TABLE_FILE")
    if not path or environment.world_size() == 1:
        return {"rank table": "none"}
    table = environment.table if isinstance(environment, RankTableEnvironment) else read_rank_table(path)
    generation = None
    if device.type == "npu":
        generation = generation_of(torch.get_device_module("npu").get_device_name(device))
    for warning in require_valid(table, generation):
        rank_zero_warn(f"rank table, {warning}")
    _check_ranks(table, environment, path)
    place = table.rank(environment.global_rank())
    if isinstance(environment, RankTableEnvironment) and environment.placed_by == "DEVICE_ID":
        rank_zero_info(
            f"RANK_ID is not set, so DEVICE_ID={place.device.device_id} makes this process {place} of the rank "
            f"table's {len(table)}; to let Lightning start the processes, unset DEVICE_ID"
        )
    check_host(table, place)
    if device.type == "npu" and (device.index or 0) != visible_index(place):
        raise RankTableError(
            f"the rank table has {place}, but this process drives {device}; set devices={_devices_of(place.server)} in "
            "the Trainer, or ASCEND_RT_VISIBLE_DEVICES to the table's devices, in this order"
        )
    return {"rank table": table.digest}


def warn_of_placement(num_stages: int) -> None:
    """Warn if the rank table, where there is one, makes replicas of a stage sit on several servers."""
    path = os.environ.get("RANK_TABLE_FILE")
    if path:
        for warning in check_placement(read_rank_table(path), num_stages):
            rank_zero_warn(f"rank table, {warning}")


def visible_index(place: Rank) -> int:
    """The number by which torch knows the rank's device, counted among ASCEND_RT_VISIBLE_DEVICES.

    Raises:
        RankTableError: it is not among them.
    """
    device_id = place.device.device_id
    visible = os.environ.get("ASCEND_RT_VISIBLE_DEVICES")
    if not visible:
        return device_id
    numbers = [part.strip() for part in visible.split(",")]
    if str(device_id) not in numbers:
        raise RankTableError(
            f"the rank table has {place}, but ASCEND_RT_VISIBLE_DEVICES={visible} hides that device: unset it, or "
            f"set it to {','.join(map(str, _devices_of(place.server)))}"
        )
    return numbers.index(str(device_id))


def _placed_by() -> str | None:
    """The variable that says which process of a job this one is; None if none does."""
    if "RANK_ID" in os.environ:
        return "RANK_ID"
    return "DEVICE_ID" if "DEVICE_ID" in os.environ and os.environ.get("RANK_SIZE") != "1" else None


def _place_of_this_process(table: RankTable, placed_by: str) -> Rank:
    size = _number("RANK_SIZE")
    if size is not None and size != len(table):
        raise RankTableError(
            f"RANK_SIZE={size}, but the rank table has {len(table)} ranks: set RANK_SIZE={len(table)}, or use the "
            "table that was made for this job"
        )
    place = _place_of_rank(table) if placed_by == "RANK_ID" else _place_of_device(table)
    check_host(table, place)
    return place


def _place_of_rank(table: RankTable) -> Rank:
    rank, device = _required_number("RANK_ID", "the rank"), _number("DEVICE_ID")
    try:
        place = table.rank(rank)
    except RankTableError as error:
        raise RankTableError(f"RANK_ID={rank}, but {error}") from None
    if device is not None and device != place.device.device_id:
        raise RankTableError(
            f"DEVICE_ID={device}, but the rank table has {place}: set DEVICE_ID={place.device.device_id}, or unset it"
        )
    return place


def _place_of_device(table: RankTable) -> Rank:
    """Where RANK_ID is not set: the only rank on a device of this number, on this machine where the table names it."""
    device = _required_number("DEVICE_ID", "the device")
    here = servers_here(table)
    servers = here or table.servers
    found = [place for place in table.ranks if place.server in servers and place.device.device_id == device]
    if len(found) == 1:
        return found[0]
    if not found:
        has = "; ".join(f"server {server.server_id} has devices {listed(_devices_of(server))}" for server in servers)
        raise RankTableError(
            f"DEVICE_ID={device}, but in the rank table {'this machine, ' if len(here) == 1 else ''}{has}: set "
            "DEVICE_ID to the device of this process"
        )
    which = "several of them are" if here else "none of them is"
    raise RankTableError(
        f"DEVICE_ID={device} is {' or '.join(map(str, found))} of the rank table, and {which} known to be this "
        "machine, by address or host name: set RANK_ID to the rank of this process"
    )


def _check_ranks(table: RankTable, environment: ClusterEnvironment, path: str) -> None:
    launcher = type(environment).__name__.removesuffix("Environment")
    ways = f"start the processes as the table has them, or unset RANK_TABLE_FILE ({path})"
    if environment.world_size() != len(table):
        raise RankTableError(
            f"there are {environment.world_size()} processes ({launcher}), but the rank table has {len(table)} ranks; "
            f"{ways}"
        )
    place = table.rank(environment.global_rank())
    node, local = environment.node_rank(), environment.local_rank()
    if (node, local) != (place.node_rank, place.local_rank):
        raise RankTableError(
            f"this process is rank {place.rank}, number {local} of node {node} ({launcher}), but the rank table has "
            f"{place}, number {place.local_rank} of node {place.node_rank}; node ranks follow the table's servers, and "
            f"each node runs as many processes as it has devices there; {ways}"
        )


def _devices_of(server: Server) -> list[int]:
    return [device.device_id for device in server.devices]


def _required_number(name: str, what: str) -> int:
    number = _number(name)
    if number is None:
        raise RankTableError(f"{name} is empty: set it to {what} of this process, or unset it")
    return number


def _number(name: str) -> int | None:
    text = os.environ.get(name, "")
    if text and not (text.isascii() and text.isdigit() and len(text) <= MAX_DIGITS):
        raise RankTableError(
            f"{name} has to be a whole number from 0, got {text[:40]!r} (of at most {MAX_DIGITS} digits)"
        )
    return int(text) if text else None
