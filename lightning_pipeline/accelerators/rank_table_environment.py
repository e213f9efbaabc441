"""A cluster environment for MindSpore-style jobs: one process per device, with RANK_TABLE_FILE and RANK_ID set.

    RANK_TABLE_FILE  the rank table, on every server
    RANK_ID          rank of this process
    DEVICE_ID        device of this process; if RANK_ID is not set, the rank follows from it and the table
    RANK_SIZE        number of all processes; may be left out, as the table knows it

If RANK_TABLE_FILE is set, the first of these that applies tells who started a process:

    1. torchrun, SLURM, MPI or LSF, if Lightning finds one of them: its ranks count, whatever RANK_ID says.
    2. RANK_ID is set: a script started a process for each device.
    3. LOCAL_RANK is set: Lightning's launcher did, as it sets it for every process it starts, or somebody in its place.
    4. DEVICE_ID is set, and RANK_SIZE is not 1: a script did, as under 2. (A RANK_SIZE of 1 is a job of one device.)
    5. None: Lightning starts the processes. Neither RANK_TABLE_FILE nor RANK_SIZE says which process this one is.

Under 2 and 4 `with_rank_table` replaces Lightning's own environment by `RankTableEnvironment`. HCCL reads the table in
all cases, so `check_processes` compares the ranks of other launchers with it.
"""

from __future__ import annotations

import os

import torch
from typing_extensions import override

from lightning_pipeline.accelerators.availability import DEVICE, VISIBLE
from lightning_pipeline.accelerators.rank_table import Rank, RankTable, RankTableError, device_ids, listed
from lightning_pipeline.accelerators.rank_table_formats import read_rank_table, whole_number
from lightning_pipeline.accelerators.rank_table_rules import check_placement, generation_of, require_valid

from .._lightning import ClusterEnvironment, LightningEnvironment, rank_zero_info, rank_zero_warn

# As in SLURM's environment: high enough to be free, and below the ports that HCCL (60000 on) and systems give out.
_PORTS = range(15_000, 25_000)


class RankTableEnvironment(ClusterEnvironment):
    """The processes of a rank table; RANK_ID, or else DEVICE_ID, tells which of them this one is.

    The processes meet at MASTER_ADDR and MASTER_PORT if these are set. Otherwise they meet on the server of rank 0, by
    its host_ip or its server_id, at a port that follows from the table, so that jobs of two tables do not meet.

    Raises:
        RankTableError: a table that cannot be used, or variables that do not fit it.
    """

    def __init__(self) -> None:
        super().__init__()
        self.table = read_rank_table(os.environ["RANK_TABLE_FILE"])
        require_valid(self.table)
        self.placed_by = _placed_by() or "DEVICE_ID"
        """The variable that says which rank this process is."""
        self.rank = _rank_of_this_process(self.table, self.placed_by)
        self._node_rank, self._local_rank = self.table.node_and_local_rank(self.rank)

    @staticmethod
    @override
    def detect() -> bool:
        if not os.environ.get("RANK_TABLE_FILE"):
            return False
        placed_by = _placed_by()
        return placed_by == "RANK_ID" or (placed_by == "DEVICE_ID" and "LOCAL_RANK" not in os.environ)

    @property
    @override
    def creates_processes_externally(self) -> bool:
        return True

    @property
    @override
    def main_address(self) -> str:
        if "MASTER_ADDR" in os.environ:
            return os.environ["MASTER_ADDR"]
        first, *others = self.table.servers
        address = self.table.address_of(first) if others else "127.0.0.1"
        if address is None:
            raise RankTableError(
                f"the rank table gives no address of server {first}, where rank 0 is: set MASTER_ADDR to it on all "
                "servers, or add its host_ip to the table"
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
        return self.rank.rank_id

    @override
    def local_rank(self) -> int:
        return self._local_rank

    @override
    def node_rank(self) -> int:
        return self._node_rank

    @override
    def set_world_size(self, size: int) -> None:
        """Does nothing: the table tells."""

    @override
    def set_global_rank(self, rank: int) -> None:
        """Does nothing: the variables tell."""

    @property
    def way_out(self) -> str:
        """What to do if two processes are the same rank, or ranks are missing."""
        return (
            f"start the script once for each device of the rank table, with a {self.placed_by} of its own, or unset "
            f"{self.placed_by} for Lightning to start the processes; beside another job of this table, set MASTER_PORT"
        )

    @override
    def validate_settings(self, num_devices: int, num_nodes: int) -> None:
        servers = self.table.servers
        here = len(servers[self.rank.server_id])
        if (num_devices, num_nodes) != (here, len(servers)):
            raise RankTableError(
                f"the Trainer has devices={num_devices} and num_nodes={num_nodes}, but the rank table has "
                f"{len(servers)} servers and {here} devices on server {self.rank.server_id}: set devices={here} and "
                f"num_nodes={len(servers)}, or use another table ({self.placed_by} and RANK_TABLE_FILE are set, so "
                "this process is one of the table's)"
            )

    def device(self, device: torch.device) -> torch.device:
        """The NPU that the table gives this rank, instead of Lightning's choice; other devices as given."""
        return torch.device(DEVICE, visible_index(self.table, self.rank)) if device.type == DEVICE else device


def with_rank_table(environment: ClusterEnvironment | None) -> ClusterEnvironment | None:
    """`environment`, or the rank table's instead of Lightning's own, which Lightning takes if it finds no other.

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
    """Compare the processes that a launcher started with the rank table, and this machine's generation with its rules.

    Without RANK_TABLE_FILE, or with one process, there is nothing to compare. Rank 0 gives the warnings.

    Returns:
        What has to be the same for all processes: the table.

    Raises:
        RankTableError: a table that cannot be used, or ranks or a device that are not those of the table.
    """
    path = os.environ.get("RANK_TABLE_FILE")
    if not path or environment.world_size() == 1:
        return {"rank table": "none"}
    own = environment if isinstance(environment, RankTableEnvironment) else None
    table = own.table if own is not None else read_rank_table(path)
    generation = None
    if device.type == DEVICE:
        generation = generation_of(torch.get_device_module(DEVICE).get_device_name(device))
    for warning in require_valid(table, generation):
        rank_zero_warn(f"rank table, {warning}")
    _check_ranks(table, environment, path)
    rank = table.rank(environment.global_rank())
    if own is not None and own.placed_by == "DEVICE_ID":
        rank_zero_info(
            f"RANK_ID is not set, so DEVICE_ID={rank.device_id} makes this process {rank} of the rank table's "
            f"{len(table)}; to let Lightning start the processes, unset DEVICE_ID"
        )
    _check_host(table, rank)
    if device.type == DEVICE and (device.index or 0) != visible_index(table, rank):
        raise RankTableError(
            f"the rank table has {rank}, but this process drives {device}; set "
            f"devices={device_ids(table.servers[rank.server_id])} in the Trainer, or {VISIBLE} to the table's devices, "
            "in this order"
        )
    return {"rank table": table.digest}


def warn_of_placement(num_stages: int) -> None:
    """Warn if the rank table, if there is one, makes replicas of a stage sit on several servers."""
    path = os.environ.get("RANK_TABLE_FILE")
    if path:
        for warning in check_placement(read_rank_table(path), num_stages):
            rank_zero_warn(f"rank table, {warning}")


def visible_index(table: RankTable, rank: Rank) -> int:
    """The number by which torch knows the rank's device, counted among ASCEND_RT_VISIBLE_DEVICES."""
    visible = os.environ.get(VISIBLE)
    if not visible:
        return rank.device_id
    numbers = [part.strip() for part in visible.split(",")]
    if str(rank.device_id) not in numbers:
        raise RankTableError(
            f"the rank table has {rank}, but {VISIBLE}={visible} hides that device: unset it, or set it to "
            f"{','.join(map(str, device_ids(table.servers[rank.server_id])))}"
        )
    return numbers.index(str(rank.device_id))


def _placed_by() -> str | None:
    """The variable that says which process of a job this one is; None if none does."""
    if "RANK_ID" in os.environ:
        return "RANK_ID"
    return "DEVICE_ID" if "DEVICE_ID" in os.environ and os.environ.get("RANK_SIZE") != "1" else None


def _rank_of_this_process(table: RankTable, placed_by: str) -> Rank:
    size = _number("RANK_SIZE")
    if size is not None and size != len(table):
        raise RankTableError(
            f"RANK_SIZE={size}, but the rank table has {len(table)} ranks: set RANK_SIZE={len(table)}, or use the "
            "table that was made for this job"
        )
    number = _number(placed_by)
    if number is None:
        what = "rank" if placed_by == "RANK_ID" else "device"
        raise RankTableError(f"{placed_by} is empty: set it to the {what} of this process, or unset it")
    rank = _rank_by_id(table, number) if placed_by == "RANK_ID" else _rank_by_device(table, number)
    _check_host(table, rank)
    return rank


def _rank_by_id(table: RankTable, rank_id: int) -> Rank:
    try:
        rank = table.rank(rank_id)
    except RankTableError as error:
        raise RankTableError(f"RANK_ID={rank_id}, but {error}") from None
    device = _number("DEVICE_ID")
    if device is not None and device != rank.device_id:
        raise RankTableError(
            f"DEVICE_ID={device}, but the rank table has {rank}: set DEVICE_ID={rank.device_id}, or unset it"
        )
    return rank


def _rank_by_device(table: RankTable, device: int) -> Rank:
    """The only rank on a device of this number, on this machine if the table is known to have it."""
    here = table.servers_here()
    servers = {name: ranks for name, ranks in table.servers.items() if not here or name in here}
    found = [rank for ranks in servers.values() for rank in ranks if rank.device_id == device]
    if len(found) == 1:
        return found[0]
    if not found:
        has = "; ".join(f"server {name} has devices {listed(device_ids(ranks))}" for name, ranks in servers.items())
        raise RankTableError(
            f"DEVICE_ID={device}, but in the rank table {'this machine, ' if len(here) == 1 else ''}{has}: set "
            "DEVICE_ID to the device of this process"
        )
    which = "several of them are" if here else "none of them is"
    raise RankTableError(
        f"DEVICE_ID={device} is {' or '.join(map(str, found))} of the rank table, and {which} known to be this "
        "machine, by address or host name: set RANK_ID to the rank of this process"
    )


def _check_host(table: RankTable, rank: Rank) -> None:
    """Raise if the table names this machine as another server. It may also name no server by an address it has."""
    here = table.servers_here()
    if here and rank.server_id not in here:
        raise RankTableError(
            f"the rank table has {rank}, but this machine is server {here[0]}: start each rank on its own server"
        )


def _check_ranks(table: RankTable, environment: ClusterEnvironment, path: str) -> None:
    launcher = type(environment).__name__.removesuffix("Environment")
    ways = f"start the processes as the table has them, or unset RANK_TABLE_FILE ({path})"
    if environment.world_size() != len(table):
        raise RankTableError(
            f"there are {environment.world_size()} processes ({launcher}), but the rank table has {len(table)} ranks; "
            f"{ways}"
        )
    rank = table.rank(environment.global_rank())
    node, local = environment.node_rank(), environment.local_rank()
    table_node, table_local = table.node_and_local_rank(rank)
    if (node, local) != (table_node, table_local):
        raise RankTableError(
            f"this process is rank {rank.rank_id}, number {local} of node {node} ({launcher}), but the rank table has "
            f"{rank}, number {table_local} of node {table_node}; node ranks follow the table's servers, and each node "
            f"runs as many processes as it has devices there; {ways}"
        )


def _number(name: str) -> int | None:
    text = os.environ.get(name, "")
    return whole_number(text, name) if text else None
