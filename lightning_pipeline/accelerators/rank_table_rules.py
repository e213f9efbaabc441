"""What HCCL and the machines require of a rank table, and where stages and replicas sit on it.

Most rules hold everywhere. How many devices of a server may take part depends on the generation of the machine, which
no format tells: on a machine the device's name does (``generation_of``). Where it is not known, what only Atlas
training servers (910A) forbid is a warning.
"""

from __future__ import annotations

import ipaddress
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from lightning_pipeline.accelerators.rank_table import Rank, RankTable, RankTableError, Server, listed

GENERATIONS = ("910a", "a2", "a3")

RENUMBER = "`lightning-pipeline rank-table convert FILE --renumber` numbers them so"
_NETWORKS = (range(4), range(4, 8))


@dataclass(frozen=True)
class RuleViolation:
    """A rule that a table breaks.

    Attributes:
        rule: its name.
        message: what breaks it, where, and the way out.
        is_error: False where training runs all the same.
    """

    rule: str
    message: str
    is_error: bool = True

    def __str__(self) -> str:
        return f"{self.rule}: {self.message}"


def check_rank_table(table: RankTable, generation: str | None = None) -> list[RuleViolation]:
    """Everything that is wrong with a table, errors first.

    Args:
        table: the table.
        generation: one of ``GENERATIONS``, or None if it is not known.
    """
    if generation is not None and generation not in GENERATIONS:
        raise ValueError(f"unknown generation {generation!r}; there are {', '.join(GENERATIONS)}")
    rules = (_ranks, _servers, _devices, _order, _addresses, _super_pods)
    findings = [finding for rule in rules for finding in rule(table)]
    findings += _atlas(table, generation)
    findings += _equal_counts(table)
    return sorted(findings, key=lambda finding: not finding.is_error)


def require_valid(table: RankTable, generation: str | None = None) -> list[RuleViolation]:
    """As :func:`check_rank_table`; returns the warnings.

    Raises:
        RankTableError: naming every rule that is broken.
    """
    findings = check_rank_table(table, generation)
    errors = [str(finding) for finding in findings if finding.is_error]
    if errors:
        raise RankTableError("the rank table cannot be used\n  " + "\n  ".join(errors))
    return findings


def generation_of(device_name: str) -> str | None:
    """The generation from a device's name, such as "Ascend910B2" (A2) or "Ascend910_9391" (A3); None for others.

    "Ascend910B" without a number is of the first generation, as are 910A, 910ProA, 910ProB and 910PremiumA.
    """
    if re.match(r"Ascend910B\d", device_name):
        return "a2"
    if device_name.startswith("Ascend910_93"):
        return "a3"
    return "910a" if re.match(r"Ascend910(A|B|Pro|Premium|$)", device_name) else None


# -- everywhere -------------------------------------------------------------------------------------------------------


def _ranks(table: RankTable) -> Iterator[RuleViolation]:
    places = table.ranks
    counts = Counter(place.rank for place in places)
    for rank, count in counts.items():
        if count > 1:
            where = ", ".join(f"{p.server.server_id} device {p.device.device_id}" for p in places if p.rank == rank)
            yield RuleViolation(
                "rank ids", f"rank_id {rank} is there {count} times ({where}); each rank has one device; {RENUMBER}"
            )
    missing = sorted(set(range(len(places))) - set(counts))
    if missing:
        beyond = sorted(rank for rank in counts if rank >= len(places))
        instead = f", and {listed(beyond)} instead" if beyond else ""
        yield RuleViolation(
            "rank ids",
            f"{len(places)} devices are ranks 0 to {len(places) - 1}, but rank_id {listed(missing)} is missing{instead}"
            f"; {RENUMBER}",
        )


def _servers(table: RankTable) -> Iterator[RuleViolation]:
    for server_id, count in Counter(server.server_id for server in table.servers).items():
        if count > 1:
            yield RuleViolation(
                "servers", f'server_id "{server_id}" is there {count} times; list all devices of a server in one place'
            )


def _devices(table: RankTable) -> Iterator[RuleViolation]:
    devices: dict[tuple[str, int], list[int]] = {}
    for place in table.ranks:
        devices.setdefault((place.server.server_id, place.device.device_id), []).append(place.rank)
    for (server_id, device_id), ranks in devices.items():
        if len(ranks) > 1:
            yield RuleViolation(
                "devices",
                f"ranks {listed(ranks)} share device {device_id} of server {server_id}; give each rank a device_id of "
                "its own",
            )


def _order(table: RankTable) -> Iterator[RuleViolation]:
    """Ranks of a server follow one another, those of a super pod too, and servers follow their ids."""
    if any(_ranks(table)):
        return
    blocks: dict[str, list[tuple[str, list[int]]]] = {
        "server": [(server.server_id, server.ranks) for server in table.servers],
        "super pod": [
            (pod.super_pod_id, [r for s in table.servers if s.server_id in pod.server_ids for r in s.ranks])
            for pod in table.super_pods
        ],
    }
    is_split = False
    for kind, members in blocks.items():
        for name, ranks in members:
            if ranks and max(ranks) - min(ranks) + 1 > len(ranks):
                is_split = True
                yield RuleViolation(
                    "order of ranks",
                    f"{kind} {name} has ranks {listed(ranks)}, and ranks between them are elsewhere; HCCL wants the "
                    f"ranks of a {kind} to follow one another; {RENUMBER}",
                )
    names = [server.server_id for server in table.servers]
    # Within super pods the order is that of the pods. "10.0.0.10" comes after "10.0.0.9" as an address and before it
    # as text: either will do.
    if not is_split and not table.super_pods and names not in (sorted(names), sorted(names, key=server_key)):
        now = ", then ".join(f"{server.server_id} (ranks {listed(server.ranks)})" for server in table.servers)
        yield RuleViolation(
            "order of servers",
            f"ranks go through the servers in another order than that of their server_id: {now}; {RENUMBER}",
        )


def server_key(server_id: str) -> tuple[object, ...]:
    """Sorts addresses as numbers, and other names with their numbers as numbers: node_2 before node_10."""
    parts = re.findall(r"[0-9]+|[^0-9]+", server_id)
    # A number's digits and then itself: some have more than Python makes a number of.
    return tuple((0, len(n := part.lstrip("0")), n) if part[0] in "0123456789" else (1, 0, part) for part in parts)


def _addresses(table: RankTable) -> Iterator[RuleViolation]:
    holders: dict[object, list[int]] = {}
    missing, malformed = [], []
    for place in table.ranks:
        address = place.device.device_ip
        if not address:
            missing.append(place.rank)
            continue
        try:
            holders.setdefault(ipaddress.ip_address(address), []).append(place.rank)
        except ValueError:
            malformed.append(f'rank {place.rank} has "{address}"')
    how = "`hccn_tool -i DEVICE -ip -g` or /etc/hccn.conf on the server tells it"
    if malformed:
        yield RuleViolation(
            "device addresses", f"device_ip has to be an IPv4 or IPv6 address: {', '.join(malformed)}; {how}"
        )
    for shared, ranks in holders.items():
        if len(ranks) > 1:
            yield RuleViolation("device addresses", f"ranks {listed(ranks)} have the same device_ip {shared}; {how}")
    # One super pod has links of its own.
    if missing and len(table.servers) > 1 and len(table.super_pods) != 1:
        yield RuleViolation(
            "device addresses",
            f"ranks {listed(missing)} have no device_ip, through which devices of several servers reach one another; "
            f"{how}",
        )


def _super_pods(table: RankTable) -> Iterator[RuleViolation]:
    if not table.super_pods:
        return
    listings = Counter(name for pod in table.super_pods for name in pod.server_ids)
    for server in table.servers:
        if listings.pop(server.server_id, 0) != 1:
            yield RuleViolation("super pods", f"server {server.server_id} has to be in one entry of super_pod_list")
    for name in listings:
        yield RuleViolation("super pods", f'super_pod_list names server "{name}", which server_list does not have')
    without = [place.rank for place in table.ranks if not place.device.super_device_id]
    if without:
        yield RuleViolation(
            "super pods",
            f"ranks {listed(without)} have no super_device_id; `npu-smi info -t spod-info` shows it as SDID, or leave "
            "super_pod_list out",
        )
    for pod in table.super_pods:
        ids = Counter(p.device.super_device_id for p in table.ranks if p.server.server_id in pod.server_ids)
        for device, count in ids.items():
            if device and count > 1:
                yield RuleViolation(
                    "super pods", f"super_device_id {device} is there {count} times in super pod {pod.super_pod_id}"
                )


# -- by generation ----------------------------------------------------------------------------------------------------


def _atlas(table: RankTable, generation: str | None) -> Iterator[RuleViolation]:
    """Counts and networks of Atlas training servers (910A): eight devices, wired as 0-3 and 4-7."""
    if generation in ("a2", "a3") or (generation is None and not _can_be_910a(table)):
        return
    is_error = generation == "910a"
    doubt = "" if is_error else " (A2 and A3 machines do not ask for it)"
    for server in table.servers:
        devices = [device.device_id for device in server.devices]
        who = f"server {server.server_id} has {len(devices)} (devices {listed(devices)}, ranks {listed(server.ranks)})"
        if any(device > 7 for device in devices):
            yield RuleViolation("devices of a 910A server", f"its devices are 0-7: {who}")
        elif len(table.servers) > 1 and len(devices) != 8:
            yield RuleViolation(
                "8n devices on several servers",
                f"Atlas training servers (910A) that train together use all 8 devices of each: {who}{doubt}; use all, "
                "or one server",
                is_error,
            )
        elif len(devices) not in (1, 2, 4, 8):
            yield RuleViolation(
                "1, 2, 4 or 8 devices on one server",
                f"an Atlas training server (910A) trains on 1, 2, 4 or 8 devices: {who}{doubt}; use such a count",
                is_error,
            )
        elif len(devices) in (2, 4) and not any(set(devices) <= set(network) for network in _NETWORKS):
            yield RuleViolation(
                "networks 0-3 and 4-7",
                f"devices 0-3 and 4-7 of an Atlas training server (910A) are two networks, and jobs of 2 or 4 devices "
                f"stay in one: {who}{doubt}; take them all from 0-3 or all from 4-7",
                is_error,
            )


def _can_be_910a(table: RankTable) -> bool:
    return not table.super_pods and all(device.device_id < 8 for server in table.servers for device in server.devices)


def _equal_counts(table: RankTable) -> Iterator[RuleViolation]:
    counts = {server.server_id: len(server.devices) for server in table.servers}
    if len(set(counts.values())) > 1:
        shown = ", ".join(f"{name}: {count}" for name, count in counts.items())
        yield RuleViolation(
            "equal counts",
            f"servers have different numbers of devices ({shown}); the same is recommended",
            is_error=False,
        )


@dataclass(frozen=True)
class StagePlace:
    """One stage and its replicas, which are neighbouring ranks: replica ``r`` is ``ranks[r]``."""

    stage: int
    ranks: tuple[Rank, ...]

    @property
    def parts(self) -> list[tuple[Server, list[int]]]:
        """The servers that hold it, each with its replicas."""
        parts: dict[str, tuple[Server, list[int]]] = {}
        for replica, place in enumerate(self.ranks):
            parts.setdefault(place.server.server_id, (place.server, []))[1].append(replica)
        return list(parts.values())

    @property
    def is_split(self) -> bool:
        """Whether its replicas sit on several servers."""
        return len(self.parts) > 1


def place_stages(table: RankTable, num_stages: int) -> list[StagePlace]:
    """Every stage's place: contiguous ranks are the replicas of one stage, as ``runtime.topology`` lays them out.

    Raises:
        RankTableError: stages that do not divide the devices.
    """
    size = len(table)
    if num_stages < 1 or size % num_stages:
        divisors = ", ".join(str(n) for n in range(1, size + 1) if size % n == 0)
        raise RankTableError(f"{size} devices cannot be {num_stages} stages; use a num_stages of {divisors}")
    num_replicas = size // num_stages
    ranks = table.ranks
    return [
        StagePlace(stage, tuple(ranks[stage * num_replicas : (stage + 1) * num_replicas]))
        for stage in range(num_stages)
    ]


def check_placement(table: RankTable, num_stages: int) -> list[RuleViolation]:
    """A warning where replicas of a stage sit on several servers: what they exchange is most of the traffic.

    Replicas add up all gradients of their stage; neighbouring stages exchange activations only. So the slower links
    between servers are for the stages.
    """
    split = [place for place in place_stages(table, num_stages) if place.is_split]
    if not split:
        return []
    stages = "; ".join(
        f"stage {place.stage}: "
        + ", ".join(f"replicas {listed(replicas)} on {s.server_id}" for s, replicas in place.parts)
        for place in split
    )
    better = [n for n in range(1, len(table) + 1) if len(table) % n == 0 and not any(_splits(table, n))]
    return [
        RuleViolation(
            "replicas inside a server",
            f"with num_stages={num_stages} replicas exchange their gradients between servers ({stages}); "
            f"num_stages={listed_or(better)} keeps the replicas of each stage on one server",
            is_error=False,
        )
    ]


def renumber(table: RankTable) -> RankTable:
    """The same devices with new ranks: by super pod, server_id and device_id.

    Neighbouring ranks are then as close as can be, so the replicas of a stage are.
    """
    pods = {name: number for number, pod in enumerate(table.super_pods) for name in pod.server_ids}
    order = sorted(table.servers, key=lambda server: (pods.get(server.server_id, 0), server_key(server.server_id)))
    servers = []
    start = 0
    for server in order:
        devices = sorted(server.devices, key=lambda device: device.device_id)
        numbered = tuple(replace(device, rank=start + number) for number, device in enumerate(devices))
        servers.append(replace(server, devices=numbered))
        start += len(numbered)
    return replace(table, servers=tuple(servers))


def listed_or(numbers: Sequence[int]) -> str:
    """``[2, 4, 8]`` as ``"2, 4 or 8"``."""
    texts = [str(number) for number in numbers]
    return texts[0] if len(texts) == 1 else f"{', '.join(texts[:-1])} or {texts[-1]}"


def _splits(table: RankTable, num_stages: int) -> list[bool]:
    return [place.is_split for place in place_stages(table, num_stages)]
