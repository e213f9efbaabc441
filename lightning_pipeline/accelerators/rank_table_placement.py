"""Where the stages and replicas of a pipeline sit on the servers of a rank table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from lightning_pipeline.accelerators.rank_table import Rank, RankTable, RankTableError, Server, listed
from lightning_pipeline.accelerators.rank_table_rules import Finding, server_key


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


def check_placement(table: RankTable, num_stages: int) -> list[Finding]:
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
        Finding(
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
