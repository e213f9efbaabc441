"""The grid of stages and replicas."""

from __future__ import annotations

import copy
import pickle

import pytest

from lightning_pipeline.runtime.topology import ReplicaRank, Topology


def test_ranks_of_a_grid() -> None:
    #            replica 0   replica 1
    #   stage 0  rank 0      rank 1
    #   stage 1  rank 2      rank 3
    #   stage 2  rank 4      rank 5
    grid = [Topology(num_ranks_per_pipeline=3, world_size=6, rank=rank) for rank in range(6)]
    assert [t.stage_rank for t in grid] == [0, 0, 1, 1, 2, 2]
    assert [t.replica for t in grid] == [0, 1, 0, 1, 0, 1]
    assert grid[3].pipeline_ranks == [1, 3, 5]
    assert grid[3].data_ranks == [2, 3]
    assert grid[3].data_parallel_size == 2
    assert grid[3].describe(5) == "stage 2 (rank 5)"
    assert [t.is_first_stage for t in grid] == [True, True, False, False, False, False]


def test_one_replica_has_stages_equal_to_ranks() -> None:
    topology = Topology(num_ranks_per_pipeline=4, world_size=4, rank=2)
    assert (topology.stage_rank, topology.replica) == (2, 0)
    assert topology.pipeline_ranks == [0, 1, 2, 3]
    assert topology.data_ranks == [2]


def test_more_stages_than_devices() -> None:
    with pytest.raises(ValueError, match=r"4 stages need at least 4 devices, got 2: set devices=4"):
        Topology(num_ranks_per_pipeline=4, world_size=2, rank=0)


def test_devices_not_a_multiple_of_stages() -> None:
    with pytest.raises(
        ValueError, match=r"6 devices are not a multiple of 4 stages: use 4 or 8 devices.*\(1, 2, 3, 6\)"
    ):
        Topology(num_ranks_per_pipeline=4, world_size=6, rank=0)


def test_impossible_numbers() -> None:
    with pytest.raises(ValueError, match="got 0 stages"):
        Topology(num_ranks_per_pipeline=0, world_size=2, rank=0)
    with pytest.raises(ValueError, match=r"rank must be in 0\.\.1, got 2"):
        Topology(num_ranks_per_pipeline=2, world_size=2, rank=2)


def test_a_rank_in_a_hook_counts_replicas_and_is_one_process() -> None:
    first, second = ReplicaRank(0, process=0), ReplicaRank(0, process=2)
    assert (first == 0, first != 0, bool(first)) == (True, False, False)
    assert (second == 0, second != 0, bool(second)) == (False, True, True)
    assert (3 * second, [7, 8][second], f"{second}", str(second), second >= 1) == (0, 7, "2", "2", False)
    for copied in (copy.deepcopy(second), pickle.loads(pickle.dumps(second))):
        assert copied == 2 and copied + 1 == 1
