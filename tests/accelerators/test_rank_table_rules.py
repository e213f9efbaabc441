"""What HCCL and the machines ask of a rank table: each rule is named, with the ranks or servers and the way out."""

from __future__ import annotations

from dataclasses import replace

import pytest

from lightning_pipeline.accelerators.rank_table import RankTable, RankTableError
from lightning_pipeline.accelerators.rank_table_rules import (
    check_placement,
    check_rank_table,
    generation_of,
    place_stages,
    renumber,
    replicas_by_server,
    require_valid,
    server_key,
)
from lightning_pipeline.runtime.topology import Topology
from tests.accelerators.tables import make_table

EIGHT = list(range(8))
ONE = make_table(("10.0.0.1", EIGHT))
TWO = make_table(("10.0.0.1", EIGHT), ("10.0.0.2", EIGHT))


def edited(table: RankTable, rank: int, /, **changes: object) -> RankTable:
    """With another value for one rank's device."""
    changed = (replace(old, **changes) if old.rank_id == rank else old for old in table.ranks)  # type: ignore[arg-type]
    return replace(table, ranks=tuple(changed))


def swapped(table: RankTable, one: int, other: int) -> RankTable:
    return edited(edited(edited(table, one, rank_id=-1), other, rank_id=one), -1, rank_id=other)


def in_pods(table: RankTable, *pods: tuple[str, ...]) -> RankTable:
    for rank in table.ranks:
        table = edited(table, rank.rank_id, super_device_id=str(rank.rank_id))
    return replace(table, super_pods={str(number): names for number, names in enumerate(pods)})


PODS = in_pods(make_table(("a", EIGHT), ("b", EIGHT)), ("a",), ("b",))

ERRORS = {
    "a rank twice": (
        edited(ONE, 3, rank_id=2),
        "rank ids: rank_id 2 is there 2 times (10.0.0.1 device 2, 10.0.0.1 device 3)",
    ),
    "a rank missing": (edited(ONE, 3, rank_id=9), "0 to 7, but rank_id 3 is missing, and 9 instead; `lightning"),
    "a device twice": (edited(ONE, 3, device_id=2), "devices: ranks 2, 3 share device 2 of server 10.0.0.1; give each"),
    "ranks of a server apart": (
        swapped(TWO, 7, 8),
        "order of ranks: server 10.0.0.1 has ranks 0-6, 8, and ranks between",
    ),
    "servers in another order": (
        make_table(("10.0.0.2", EIGHT), ("10.0.0.1", EIGHT)),
        "order of servers: ranks go through the servers in another order than that of their server_id: "
        "10.0.0.2 (ranks 0-7), then 10.0.0.1 (ranks 8-15); `lightning-pipeline rank-table convert FILE --renumber`",
    ),
    "no address": (
        edited(TWO, 3, device_ip=""),
        "device addresses: ranks 3 have no device_ip, through which devices of",
    ),
    "no proper address": (edited(ONE, 3, device_ip="192.168.0"), 'or IPv6 address: rank 3 has "192.168.0"; `hccn_tool'),
    "an address twice": (edited(TWO, 3, device_ip="192.168.0.1"), "ranks 0, 3 have the same device_ip 192.168.0.1"),
    "no address between pods": (edited(PODS, 3, device_ip=""), "ranks 3 have no device_ip"),
    "a server in no pod": (
        replace(PODS, super_pods={"0": ("a",)}),
        "super pods: server b has to be in one entry",
    ),
    "a server in two pods": (in_pods(ONE, ("10.0.0.1",), ("10.0.0.1",)), "server 10.0.0.1 has to be in one entry"),
    "a pod of others": (in_pods(ONE, ("10.0.0.1", "c")), 'super_pod_list names server "c", which server_list does not'),
    "no super device": (edited(PODS, 3, super_device_id=""), "ranks 3 have no super_device_id; `npu-smi"),
    "a super device twice": (edited(PODS, 3, super_device_id="2"), "super_device_id 2 is there 2 times in super pod 0"),
    "pods apart": (
        in_pods(make_table(("a", [0]), ("b", [0]), ("c", [0])), ("a", "c"), ("b",)),
        "order of ranks: super pod 0 has ranks 0, 2, and ranks between them are elsewhere",
    ),
}


@pytest.mark.parametrize("name", ERRORS)
def test_a_broken_rule_is_named(name: str) -> None:
    table, words = ERRORS[name]
    first, *more = [finding for finding in check_rank_table(table) if finding.is_error]
    assert words in str(first)
    assert all(finding.rule == first.rule for finding in more)
    with pytest.raises(RankTableError, match="the rank table cannot be used\n  "):
        require_valid(table)


@pytest.mark.parametrize(
    "table",
    [
        ONE,
        TWO,
        PODS,
        make_table(("10.0.0.1", EIGHT), addresses=False),
        in_pods(make_table(("b", EIGHT), ("a", EIGHT), addresses=False), ("a", "b")),
        make_table(("10.0.0.9", EIGHT), ("10.0.0.10", EIGHT)),
        make_table(("10.0.0.10", EIGHT), ("10.0.0.9", EIGHT)),  # in order as text
        make_table(("node_2", EIGHT), ("node_10", EIGHT)),
        *(make_table(("a", devices)) for devices in ([5], [0, 1], [6, 7], [0, 1, 2, 3], [4, 5, 6, 7])),
    ],
)
def test_a_good_table_breaks_none(table: RankTable) -> None:
    generation = "a3" if table.super_pods else "910a"
    assert check_rank_table(table) == check_rank_table(table, generation) == []


ATLAS = {
    "three devices": (
        make_table(("a", [0, 1, 2])),
        "1, 2, 4 or 8 devices on one server: an Atlas training server (910A) trains on 1, 2, 4 or 8 devices: "
        "server a has 3 (devices 0-2, ranks 0-2)",
    ),
    "two networks": (
        make_table(("a", [3, 4])),
        "networks 0-3 and 4-7: devices 0-3 and 4-7 of an Atlas training server (910A) are two networks, and jobs of 2 "
        "or 4 devices stay in one: server a has 2 (devices 3, 4, ranks 0, 1)",
    ),
    "two networks of four": (
        make_table(("a", [0, 1, 4, 5])),
        "stay in one: server a has 4 (devices 0, 1, 4, 5, ranks 0-3)",
    ),
    "four devices of one server": (
        make_table(("a", EIGHT), ("b", [0, 1, 2, 3])),
        "8n devices on several servers: an Atlas training server (910A) that trains with others uses all 8 devices: "
        "server b has 4 (devices 0-3, ranks 8-11)",
    ),
}


@pytest.mark.parametrize("name", ATLAS)
def test_rules_of_atlas_training_servers(name: str) -> None:
    table, words = ATLAS[name]
    first, *more = check_rank_table(table, "910a")
    assert first.is_error
    assert words in str(first)
    # Where nobody knows what the machine is, it is a warning; other machines do not mind.
    doubtful = check_rank_table(table)[0]
    assert (doubtful.rule, doubtful.is_error) == (first.rule, False)
    assert "A2 and A3 machines do not ask for it" in doubtful.message
    rest = [finding.rule for finding in more]
    for generation in ("a2", "a3"):
        assert [finding.rule for finding in check_rank_table(table, generation)] == rest


def test_what_cannot_be_a_910a_server() -> None:
    sixteen = make_table(("a", list(range(16))))
    assert check_rank_table(sixteen) == []
    assert "its devices are 0-7: server a has 16" in str(check_rank_table(sixteen, "910a")[0])
    assert check_rank_table(in_pods(make_table(("a", [0, 1, 2])), ("a",))) == []


def test_equal_counts_are_recommended() -> None:
    [warning] = check_rank_table(make_table(("a", [0, 1, 2]), ("b", [0])), "a2")
    assert not warning.is_error
    assert "different numbers of devices (a: 3, b: 1); the same is recommended" in str(warning)


def test_errors_come_first_and_all_are_told() -> None:
    table = edited(edited(make_table(("b", [0, 1, 2]), ("a", [0])), 1, device_ip="x"), 2, device_id=1)
    findings = check_rank_table(table)
    assert [finding.is_error for finding in findings] == sorted((f.is_error for f in findings), reverse=True)
    with pytest.raises(RankTableError) as error:
        require_valid(table)
    for rule in ("devices", "device addresses", "order of servers"):
        assert f"\n  {rule}: " in str(error.value)
    assert [w.rule for w in require_valid(make_table(("a", [3, 4])))] == ["networks 0-3 and 4-7"]


@pytest.mark.parametrize(
    ("name", "generation"),
    [
        ("Ascend910A", "910a"),
        ("Ascend910B", "910a"),
        ("Ascend910ProB", "910a"),
        ("Ascend910PremiumA", "910a"),
        ("Ascend910", "910a"),
        ("Ascend910B2", "a2"),
        ("Ascend910B2C", "a2"),
        ("Ascend910_9391", "a3"),
        ("Ascend310P3", None),
        ("", None),
    ],
)
def test_generations_by_the_name_of_the_device(name: str, generation: str | None) -> None:
    assert generation_of(name) == generation


def test_new_ranks_go_by_pod_server_and_device() -> None:
    mixed = make_table(("10.0.0.10", [3, 1]), ("10.0.0.9", [2, 0]))
    assert [(r.rank_id, r.server_id, r.device_id) for r in renumber(mixed).ranks] == [
        (0, "10.0.0.9", 0),
        (1, "10.0.0.9", 2),
        (2, "10.0.0.10", 1),
        (3, "10.0.0.10", 3),
    ]
    pods = in_pods(make_table(("a", [0]), ("b", [0]), ("c", [0])), ("c",), ("a", "b"))
    assert [rank.server_id for rank in renumber(pods).ranks] == ["c", "a", "b"]
    for name in ("a rank twice", "a rank missing", "ranks of a server apart", "servers in another order", "pods apart"):
        assert check_rank_table(renumber(ERRORS[name][0])) == [], name
    assert renumber(TWO) == TWO
    assert sorted(["node_10", "node_2", "2001:db8::1", "10.0.0.1"], key=server_key)[-2:] == ["node_2", "node_10"]


@pytest.mark.parametrize(("num_stages", "parts"), [(1, [2]), (2, [1, 1]), (4, [1] * 4), (16, [1] * 16)])
def test_stages_lie_as_the_topology_has_them(num_stages: int, parts: list[int]) -> None:
    stages = place_stages(TWO, num_stages)
    assert [len(replicas_by_server(stage)) for stage in stages] == parts
    for number, stage in enumerate(stages):
        for replica, rank in enumerate(stage):
            topology = Topology(num_ranks_per_pipeline=num_stages, world_size=16, rank=rank.rank_id)
            assert (topology.stage_rank, topology.replica) == (number, replica)
            assert topology.data_ranks == [other.rank_id for other in stage]


def test_replicas_on_several_servers_are_warned_of() -> None:
    assert check_placement(TWO, 2) == []
    [warning] = check_placement(TWO, 1)
    assert not warning.is_error
    assert "stage 0: replicas 0-7 on 10.0.0.1, replicas 8-15 on 10.0.0.2" in warning.message
    assert "a num_stages of 2, 4, 8, 16 keeps the replicas of each stage on one server" in warning.message

    three = make_table(("a", EIGHT), ("b", EIGHT), ("c", EIGHT))
    [warning] = check_placement(three, 2)
    assert "stage 0: replicas 0-7 on a, replicas 8-11 on b; stage 1: replicas 0-3 on b, replicas 4-11 on c" in str(
        warning
    )
    assert "a num_stages of 3, 6, 12, 24 keeps" in warning.message
    uneven = make_table(("a", [0, 1]), ("b", [0]))
    assert "a num_stages of 3 keeps" in check_placement(uneven, 1)[0].message

    with pytest.raises(RankTableError, match="16 devices cannot be 3 stages; use a num_stages of 1, 2, 4, 8, 16"):
        place_stages(TWO, 3)
