"""Jobs that are started MindSpore's way: a process for each device, with RANK_TABLE_FILE, RANK_ID and others set.

    RANK_TABLE_FILE  the rank table, on every server
    RANK_ID          rank of this process
    RANK_SIZE        number of processes in all; may be left out, as the table knows
    DEVICE_ID        device of this process, likewise

Lightning chooses among the environments that it knows. Where it finds none of them, `with_rank_table` puts this one in.
Under torchrun, SLURM, MPI and LSF the launcher's own ranks count, whatever RANK_ID says, as it started the process; and
with RANK_TABLE_FILE alone Lightning starts the processes itself. HCCL reads the table in all these cases, so
`check_processes` compares the launcher's ranks with it.
"""

from __future__ import annotations

import os

import torch
from lightning.fabric.plugins import ClusterEnvironment
from lightning.fabric.plugins.environments import LightningEnvironment
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from typing_extensions import override

from lightning_pipeline.accelerators.rank_table import Rank, RankTable, RankTableError, Server
from lightning_pipeline.accelerators.rank_table_formats import read_rank_table
from lightning_pipeline.accelerators.rank_table_hosts import address_of, check_host
from lightning_pipeline.accelerators.rank_table_placement import check_placement
from lightning_pipeline.accelerators.rank_table_rules import generation_of, require_valid

# As SLURM's environment does: high enough to be free, and below the ports that HCCL (60000 on) and systems give out.
_PORTS = range(15_000, 25_000)


class RankTableEnvironment(ClusterEnvironment):
    """The processes of a rank table, as RANK_ID and the table tell.

    The processes meet at MASTER_ADDR and MASTER_PORT where these are set. Otherwise they meet on the server of rank 0,
    by its host_ip or its server_id, at a port that follows from the table, so that jobs of two tables do not meet.

    Raises:
        RankTableError: a table that cannot be used, or variables that do not fit it.
    """

    def __init__(self) -> None:
        super().__init__()
        self.table = read_rank_table(os.environ["RANK_TABLE_FILE"])
        require_valid(self.table)
        self.place = _place_of_this_process(self.table)

    @staticmethod
    @override
    def detect() -> bool:
        return bool(os.environ.get("RANK_TABLE_FILE")) and "RANK_ID" in os.environ

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
        port = os.environ.get("MASTER_PORT")
        return int(port) if port else _PORTS[int(self.table.digest, 16) % len(_PORTS)]

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
        """Nothing: RANK_ID tells."""

    @override
    def validate_settings(self, num_devices: int, num_nodes: int) -> None:
        server = self.place.server
        if (num_devices, num_nodes) != (len(server.devices), len(self.table.servers)):
            raise RankTableError(
                f"the Trainer has devices={num_devices} and num_nodes={num_nodes}, but the rank table has "
                f"{len(self.table.servers)} servers and {len(server.devices)} devices on server {server.server_id}: "
                f"set devices={len(server.devices)} and num_nodes={len(self.table.servers)}, or use another table"
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
    started = {name: os.environ.get(name, "") for name in ("RANK_ID", "RANK_SIZE", "DEVICE_ID")}
    if all(started.values()) and started["RANK_SIZE"] != "1" and not environment.creates_processes_externally:
        shown = ", ".join(f"{name}={value}" for name, value in started.items())
        raise RankTableError(
            f"{shown} say that a script has started this process as one of several, but RANK_TABLE_FILE is not set: "
            "set it, or unset RANK_ID and let Lightning start the processes"
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


def _place_of_this_process(table: RankTable) -> Rank:
    rank, size, device = (_number(name) for name in ("RANK_ID", "RANK_SIZE", "DEVICE_ID"))
    assert rank is not None
    if size is not None and size != len(table):
        raise RankTableError(
            f"RANK_SIZE={size}, but the rank table has {len(table)} ranks: set RANK_SIZE={len(table)}, or use the "
            "table that was made for this job"
        )
    try:
        place = table.rank(rank)
    except RankTableError as error:
        raise RankTableError(f"RANK_ID={rank}, but {error}") from None
    if device is not None and device != place.device.device_id:
        raise RankTableError(
            f"DEVICE_ID={device}, but the rank table has {place}: set DEVICE_ID={place.device.device_id}, or unset it"
        )
    check_host(table, place)
    return place


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


def _number(name: str) -> int | None:
    text = os.environ.get(name, "")
    if not text:
        if name == "RANK_ID":
            raise RankTableError("RANK_ID is empty: set it to the rank of this process")
        return None
    if not (text.isascii() and text.isdigit()):
        raise RankTableError(f"{name} has to be a whole number from 0, got {text!r}")
    return int(text)
