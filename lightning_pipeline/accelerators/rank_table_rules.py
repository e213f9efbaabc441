"""What HCCL and the machines require of a rank table, and where stages and replicas sit on it.

Most rules hold everywhere. How many devices of a server may take part depends on the generation of the machine, which
no format tells: on a machine the device's name does (``generation_of``). Where it is not known, what only Atlas
training servers (910A) forbid is a warning.
"""

from __future__ import annotations

import ipaddress
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal

from lightning_pipeline.accelerators.rank_table import (
    Rank,
    RankTable,
    RankTableError,
    device_ids,
    grouped,
    listed,
    rank_ids,
)

Generation = Literal["910a", "a2", "a3"]

RENUMBER = "`lightning-pipeline rank-table convert FILE --renumber` numbers them so"
_NETWORKS = (range(4), range(4, 8))


@dataclass(frozen=True)
class RuleViolation:
    """A rule that a table breaks.

    Attributes:
        is_error: False if training runs all the same.
    """

    rule: str
    message: str
    is_error: bool = True

    def __str__(self) -> str:
        return f"{self.rule}: {self.message}"


def check_rank_table(table: RankTable, generation: Generation | None = None) -> list[RuleViolation]:
    """Everything that is wrong with a table, errors first."""
    findings = [RuleViolation(rule, message) for rule, check in _EVERYWHERE.items() for message in check(table)]
    findings += [*_atlas(table, generation), *_equal_counts(table)]
    return sorted(findings, key=lambda finding: not finding.is_error)


def require_valid(table: RankTable, generation: Generation | None = None) -> list[RuleViolation]:
    """As :func:`check_rank_table`; returns the warnings.

    Raises:
        RankTableError: naming every rule that is broken.
    """
    findings = check_rank_table(table, generation)
    errors = [str(finding) for finding in findings if finding.is_error]
    if errors:
        raise RankTableError("the rank table cannot be used\n  " + "\n  ".join(errors))
    return findings


def generation_of(device_name: str) -> Generation | None:
    """The generation from a device's name, such as "Ascend910B2" (A2) or "Ascend910_9391" (A3); None for others.

    "Ascend910B" without a number is of the first generation, as are 910A, 910ProA, 910ProB and 910PremiumA.
    """
    if re.match(r"Ascend910B\d", device_name):
        return "a2"
    if device_name.startswith("Ascend910_93"):
        return "a3"
    return "910a" if re.match(r"Ascend910(A|B|Pro|Premium|$)", device_name) else None


# -- everywhere -------------------------------------------------------------------------------------------------------


def _rank_ids(table: RankTable) -> Iterator[str]:
    by_id = grouped(table.ranks, lambda rank: rank.rank_id)
    for rank_id, ranks in by_id.items():
        if len(ranks) > 1:
            where = ", ".join(f"{rank.server_id} device {rank.device_id}" for rank in ranks)
            yield f"rank_id {rank_id} is there {len(ranks)} times ({where}); each rank has one device; {RENUMBER}"
    size = len(table)
    if missing := sorted(set(range(size)) - set(by_id)):
        beyond = [rank_id for rank_id in by_id if rank_id >= size]
        instead = f", and {listed(beyond)} instead" if beyond else ""
        all_ids = f"{size} devices are ranks 0 to {size - 1}"
        yield f"{all_ids}, but rank_id {listed(missing)} is missing{instead}; {RENUMBER}"


def _devices(table: RankTable) -> Iterator[str]:
    for (server_id, device_id), ranks in grouped(table.ranks, lambda rank: (rank.server_id, rank.device_id)).items():
        if len(ranks) > 1:
            who = f"ranks {listed(rank_ids(ranks))}"
            yield f"{who} share device {device_id} of server {server_id}; give each rank a device_id of its own"


def _order_of_ranks(table: RankTable) -> Iterator[str]:
    """The ranks of a server follow one another, those of a super pod too."""
    if any(_rank_ids(table)):
        return
    blocks = [("server", server_id, ranks) for server_id, ranks in table.servers.items()]
    for pod, server_ids in table.super_pods.items():
        blocks.append(("super pod", pod, [rank for rank in table.ranks if rank.server_id in server_ids]))
    for kind, name, ranks in blocks:
        if ranks and ranks[-1].rank_id - ranks[0].rank_id + 1 > len(ranks):
            yield (
                f"{kind} {name} has ranks {listed(rank_ids(ranks))}, and ranks between them are elsewhere; HCCL wants "
                f"the ranks of a {kind} to follow one another; {RENUMBER}"
            )


def _order_of_servers(table: RankTable) -> Iterator[str]:
    """Ranks go through the servers in the order of their ids; with super pods, the order is that of the pods."""
    if table.super_pods or any(_rank_ids(table)) or any(_order_of_ranks(table)):
        return
    names = list(table.servers)
    # "10.0.0.10" comes after "10.0.0.9" as an address and before it as text: either order will do.
    if names not in (sorted(names), sorted(names, key=server_key)):
        now = ", then ".join(f"{name} (ranks {listed(rank_ids(ranks))})" for name, ranks in table.servers.items())
        yield f"ranks go through the servers in another order than that of their server_id: {now}; {RENUMBER}"


def server_key(server_id: str) -> tuple[object, ...]:
    """Sorts addresses as numbers, and other names with their numbers as numbers: node_2 before node_10."""
    parts = re.findall(r"[0-9]+|[^0-9]+", server_id)
    # Compares numbers by their length, then as text: some have more digits than Python converts.
    return tuple((0, len(n := part.lstrip("0")), n) if part[0] in "0123456789" else (1, 0, part) for part in parts)


def _addresses(table: RankTable) -> Iterator[str]:
    how = "`hccn_tool -i DEVICE -ip -g` or /etc/hccn.conf on the server tells it"
    addresses = grouped(table.ranks, lambda rank: _address(rank.device_ip))
    missing = rank_ids(rank for rank in table.ranks if not rank.device_ip)
    malformed = [rank for rank in addresses.pop(None, []) if rank.device_ip]
    if malformed:
        found = ", ".join(f'rank {rank.rank_id} has "{rank.device_ip}"' for rank in malformed)
        yield f"device_ip has to be an IPv4 or IPv6 address: {found}; {how}"
    for address, ranks in addresses.items():
        if len(ranks) > 1:
            yield f"ranks {listed(rank_ids(ranks))} have the same device_ip {address}; {how}"
    # The devices of one super pod have links of their own.
    if missing and len(table.servers) > 1 and len(table.super_pods) != 1:
        who = f"ranks {listed(missing)}"
        yield f"{who} have no device_ip, through which devices of several servers reach one another; {how}"


def _address(text: str) -> Any:
    try:
        return ipaddress.ip_address(text)
    except ValueError:
        return None


def _super_pods(table: RankTable) -> Iterator[str]:
    if not table.super_pods:
        return
    listings = Counter(server_id for server_ids in table.super_pods.values() for server_id in server_ids)
    for server_id in table.servers:
        if listings.pop(server_id, 0) != 1:
            yield f"server {server_id} has to be in one entry of super_pod_list"
    for server_id in listings:
        yield f'super_pod_list names server "{server_id}", which server_list does not have'
    if without := rank_ids(rank for rank in table.ranks if not rank.super_device_id):
        how = "`npu-smi info -t spod-info` shows it as SDID, or leave super_pod_list out"
        yield f"ranks {listed(without)} have no super_device_id; {how}"
    for pod, server_ids in table.super_pods.items():
        inside = (rank for rank in table.ranks if rank.server_id in server_ids and rank.super_device_id)
        for super_device_id, ranks in grouped(inside, lambda rank: rank.super_device_id).items():
            if len(ranks) > 1:
                yield f"super_device_id {super_device_id} is there {len(ranks)} times in super pod {pod}"


_EVERYWHERE = {
    "rank ids": _rank_ids,
    "devices": _devices,
    "order of ranks": _order_of_ranks,
    "order of servers": _order_of_servers,
    "device addresses": _addresses,
    "super pods": _super_pods,
}

# -- by generation ----------------------------------------------------------------------------------------------------


def _atlas(table: RankTable, generation: Generation | None) -> Iterator[RuleViolation]:
    """Counts and networks of Atlas training servers (910A): eight devices, wired as 0-3 and 4-7."""
    can_be_910a = not table.super_pods and all(rank.device_id < 8 for rank in table.ranks)
    if generation in ("a2", "a3") or (generation is None and not can_be_910a):
        return
    is_error = generation == "910a"
    doubt = "" if is_error else " (A2 and A3 machines do not ask for it)"
    atlas = "an Atlas training server (910A)"
    for server_id, ranks in table.servers.items():
        devices = device_ids(ranks)
        count = len(devices)
        who = f"server {server_id} has {count} (devices {listed(devices)}, ranks {listed(rank_ids(ranks))}){doubt}"
        if any(device > 7 for device in devices):
            rule, message = "devices of a 910A server", f"its devices are 0-7: {who}"
        elif len(table.servers) > 1 and count != 8:
            rule = "8n devices on several servers"
            message = f"{atlas} that trains with others uses all 8 devices: {who}; use all, or one server"
        elif count not in (1, 2, 4, 8):
            rule = "1, 2, 4 or 8 devices on one server"
            message = f"{atlas} trains on 1, 2, 4 or 8 devices: {who}; use such a count"
        elif count in (2, 4) and not any(set(devices) <= set(network) for network in _NETWORKS):
            rule = "networks 0-3 and 4-7"
            message = (
                f"devices 0-3 and 4-7 of {atlas} are two networks, and jobs of 2 or 4 devices stay in one: {who}; take "
                "them all from 0-3 or all from 4-7"
            )
        else:
            continue
        yield RuleViolation(rule, message, is_error)


def _equal_counts(table: RankTable) -> Iterator[RuleViolation]:
    counts = {server_id: len(ranks) for server_id, ranks in table.servers.items()}
    if len(set(counts.values())) > 1:
        shown = ", ".join(f"{server_id}: {count}" for server_id, count in counts.items())
        yield RuleViolation(
            "equal counts",
            f"servers have different numbers of devices ({shown}); the same is recommended",
            is_error=False,
        )


# -- stages and replicas ----------------------------------------------------------------------------------------------


def place_stages(table: RankTable, num_stages: int) -> list[tuple[Rank, ...]]:
    """The ranks of each stage, replica by replica: neighbours, as ``runtime.topology`` lays them out."""
    size = len(table)
    if num_stages < 1 or size % num_stages:
        divisors = ", ".join(map(str, _divisors(size)))
        raise RankTableError(f"{size} devices cannot be {num_stages} stages; use a num_stages of {divisors}")
    num_replicas = size // num_stages
    return [table.ranks[start : start + num_replicas] for start in range(0, size, num_replicas)]


def replicas_by_server(stage: tuple[Rank, ...]) -> dict[str, list[int]]:
    """The replicas of a stage that each server holds, by server_id."""
    servers: dict[str, list[int]] = {}
    for replica, rank in enumerate(stage):
        servers.setdefault(rank.server_id, []).append(replica)
    return servers


def check_placement(table: RankTable, num_stages: int) -> list[RuleViolation]:
    """A warning if replicas of a stage sit on several servers: what they exchange is most of the traffic.

    Replicas add up all gradients of their stage; neighbouring stages exchange activations only. So the slower links
    between servers are for the stages.
    """
    stages = [replicas_by_server(stage) for stage in place_stages(table, num_stages)]
    split = "; ".join(
        f"stage {number}: "
        + ", ".join(f"replicas {listed(replicas)} on {server_id}" for server_id, replicas in servers.items())
        for number, servers in enumerate(stages)
        if len(servers) > 1
    )
    if not split:
        return []
    better = [
        count
        for count in _divisors(len(table))
        if all(len(replicas_by_server(stage)) == 1 for stage in place_stages(table, count))
    ]
    return [
        RuleViolation(
            "replicas inside a server",
            f"with num_stages={num_stages} replicas exchange their gradients between servers ({split}); a num_stages "
            f"of {', '.join(map(str, better))} keeps the replicas of each stage on one server",
            is_error=False,
        )
    ]


def _divisors(size: int) -> list[int]:
    return [count for count in range(1, size + 1) if size % count == 0]


def renumber(table: RankTable) -> RankTable:
    """The same devices with new ranks: by super pod, server_id and device_id.

    Neighbouring ranks are then as close as can be, so the replicas of a stage are.
    """
    pods = {server_id: number for number, ids in enumerate(table.super_pods.values()) for server_id in ids}

    def place(rank: Rank) -> Any:
        return pods.get(rank.server_id, 0), server_key(rank.server_id), rank.server_id, rank.device_id

    ranks = sorted(table.ranks, key=place)
    return replace(table, ranks=tuple(replace(rank, rank_id=number) for number, rank in enumerate(ranks)))
