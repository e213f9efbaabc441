"""A job that is started MindSpore's way runs: a process for each device, which RANK_TABLE_FILE and RANK_ID place."""

from __future__ import annotations

import os
import socket
import warnings
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
import torch.distributed as dist
from lightning.fabric.plugins.environments import LightningEnvironment, TorchElasticEnvironment

from lightning_pipeline import PipelineStrategy
from lightning_pipeline.accelerators.rank_table import RankTableError
from lightning_pipeline.accelerators.rank_table_environment import (
    RankTableEnvironment,
    check_processes,
    visible_index,
    with_rank_table,
)
from lightning_pipeline.accelerators.rank_table_formats import format_rank_table, read_rank_table
from tests.accelerators.tables import group_list, make_table, v1_0, write
from tests.launching import PATIENCE_S, free_port, launch
from tests.training.measured import LitLayers, measured_stages, point_loader
from tests.training.runs import QUIET, Losses

LAUNCHED = ("LOCAL_RANK", "NODE_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK_TABLE_FILE", "RANK_ID", "RANK_SIZE", "DEVICE_ID", "ASCEND_RT_VISIBLE_DEVICES", *LAUNCHED):
        monkeypatch.delenv(name, raising=False)


# -- runs -------------------------------------------------------------------------------------------------------------


def train(*, num_stages: int = 2, **devices: int) -> dict[str, Any]:
    """Losses, and where this process is, before training and after."""
    L.seed_everything(1, verbose=False)
    losses = Losses()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        strategy = PipelineStrategy(
            stage_config=measured_stages(num_stages), num_stages=num_stages, num_microbatches=2, timeout=PATIENCE_S
        )
        trainer = L.Trainer(strategy=strategy, callbacks=[losses], **{**QUIET, **devices, "max_epochs": 1})
        before = [trainer.world_size, trainer.global_rank, trainer.local_rank, trainer.node_rank]
        trainer.fit(LitLayers(), point_loader(12, 4, shuffle=True))
    assert strategy.topology is not None
    assert before == [trainer.world_size, trainer.global_rank, trainer.local_rank, trainer.node_rank]
    return {
        "place": before,
        "is_zero": trainer.is_global_zero,
        "stage": strategy.topology.stage_rank,
        "replica": strategy.topology.replica,
        "losses": losses.values,
        "environment": type(strategy.cluster_environment).__name__,
        "warnings": [str(w.message) for w in caught if "rank table" in str(w.message)],
    }


def train_both(path: Path, port: int | None, **devices: int) -> list[dict[str, Any]]:
    """Started by a launcher, then from the table, whose ranks go to the processes in another order."""
    expected = train(devices=len(read_rank_table(path)))
    dist.destroy_process_group()
    rank = expected["place"][0] - 1 - int(os.environ["LOCAL_RANK"])
    for name in LAUNCHED:
        os.environ.pop(name, None)
    place = read_rank_table(path).rank(rank)
    os.environ.update(RANK_TABLE_FILE=str(path), RANK_ID=str(rank), DEVICE_ID=str(place.device_id))
    if port is not None:
        os.environ.update(MASTER_PORT=str(port), RANK_SIZE=str(len(read_rank_table(path))))
    return [expected, train(**devices)]


def on_two_ranks(one_server: Path, folder: Path) -> tuple[list[dict[str, Any]], dict[str, Any], dict[str, Any]]:
    """Runs of a table of one server, of tables that do not fit, and, on one rank, of a table of NPUs."""
    launched = {name: os.environ[name] for name in LAUNCHED if name in os.environ}
    trained = train_both(one_server, None, devices=2)
    dist.destroy_process_group()
    for name in ("RANK_TABLE_FILE", "RANK_ID", "DEVICE_ID"):
        del os.environ[name]
    os.environ.update(launched)
    disagreed = disagree(folder)
    dist.destroy_process_group()
    return trained, disagreed, on_npus(folder) if launched["LOCAL_RANK"] == "0" else {}


def train_two_servers(path: Path, port: int) -> list[dict[str, Any]]:
    return train_both(path, port, devices=2, num_nodes=2)


@pytest.fixture(scope="module")
def two_ranks(folder: Path) -> tuple[list[list[dict[str, Any]]], list[dict[str, Any]], list[dict[str, Any]]]:
    """What `on_two_ranks` gives, each by rank."""
    # Addresses of its own, so that the port that follows from the table is no other test's.
    table = make_table((f"10.0.{os.getpid() % 256}.{os.getpid() // 256 % 256}", [5, 3]))
    path = write(folder / "one_server.json", format_rank_table(table, "group_list"))
    for rank, devices in enumerate(([0, 1], [0, 2])):
        write(folder / f"{rank}.json", format_rank_table(make_table(("a", devices)), "v1.0"))
    write(folder / "servers.json", format_rank_table(make_table(("127.0.0.1", [0]), ("127.0.0.2", [0])), "v1.0"))
    trained, disagreed, npus = zip(*launch(on_two_ranks, path, folder, world=2), strict=True)
    return list(trained), list(disagreed), list(npus)


@pytest.mark.multiprocess
def test_one_server_trains_as_lightnings_own_processes_do(two_ranks: Any) -> None:
    plain, found = zip(*two_ranks[0], strict=True)
    for rank, ours in enumerate(reversed(found)):
        assert ours["place"] == [2, rank, rank, 0]
        assert (ours["stage"], ours["replica"], ours["is_zero"]) == (rank, 0, rank == 0)
        assert ours["environment"] == "RankTableEnvironment"
        assert ours["losses"] == plain[rank]["losses"]
        assert len(ours["losses"]) == 3
    assert plain[0]["environment"] == "LightningEnvironment"
    # Rank 0 speaks for all.
    second, first = found
    assert "networks 0-3 and 4-7" in first["warnings"][0]
    assert second["warnings"] == []


@pytest.mark.multiprocess
def test_two_servers_are_two_nodes(tmp_path: Path) -> None:
    content = v1_0()
    for number, server in enumerate(content["server_list"], 1):
        server["server_id"] = f"127.0.0.{number}"  # where the processes then meet
    path = write(tmp_path / "table.json", content)
    plain, found = zip(*launch(train_two_servers, path, free_port(), world=4), strict=True)
    for rank, ours in enumerate(reversed(found)):
        assert ours["place"] == [4, rank, rank % 2, rank // 2]
        assert (ours["stage"], ours["replica"]) == divmod(rank, 2)
        assert ours["losses"] == plain[rank]["losses"]
        assert not any("replicas inside a server" in warning for warning in ours["warnings"])


def disagree(folder: Path) -> dict[str, Any]:
    """What goes wrong with tables that differ from rank to rank, and with Trainers that do not fit the table."""
    rank = os.environ["LOCAL_RANK"]
    os.environ.update(RANK_TABLE_FILE=str(folder / f"{rank}.json"), RANK_ID=rank)
    found = {}
    for devices in (2, 1):
        with pytest.raises(ValueError) as error:
            train(devices=devices)
        found[str(devices)] = str(error.value)
    # One stage, whose replicas are on two servers.
    os.environ.update(RANK_TABLE_FILE=str(folder / "servers.json"))
    return {**found, "warnings": train(devices=1, num_nodes=2, num_stages=1)["warnings"]}


@pytest.mark.multiprocess
def test_processes_that_do_not_fit_the_table_or_one_another(two_ranks: Any, folder: Path) -> None:
    first, second = two_ranks[1]
    digests = [read_rank_table(folder / f"{rank}.json").digest for rank in (0, 1)]
    for found in (first, second):
        assert "rank table" in found["2"]
        assert all(digest in found["2"] for digest in digests)
        words = (
            "has devices=1 and num_nodes=1, but the rank table has 1 servers and 2 devices on server a: set devices=2"
        )
        assert words in found["1"]
    assert any("replicas inside a server: with num_stages=1" in warning for warning in first["warnings"])
    assert second["warnings"] == []


# -- who places the processes -----------------------------------------------------------------------------------------


def from_variables(monkeypatch: pytest.MonkeyPatch, path: Path, **variables: Any) -> None:
    monkeypatch.setenv("RANK_TABLE_FILE", str(path))
    for name, value in variables.items():
        monkeypatch.setenv(name, str(value))


@pytest.fixture
def four(tmp_path: Path) -> Path:
    """Two servers of two devices, neither of them this machine."""
    content = v1_0()
    for number, server in enumerate(content["server_list"], 1):
        server["server_id"] = f"198.51.100.{number}"
    return write(tmp_path / "four.json", content)


def test_the_table_places_this_process(monkeypatch: pytest.MonkeyPatch, four: Path) -> None:
    assert not RankTableEnvironment.detect()
    from_variables(monkeypatch, four)
    assert not RankTableEnvironment.detect()
    from_variables(monkeypatch, four, RANK_ID=3)
    assert RankTableEnvironment.detect()
    environment = RankTableEnvironment()
    assert environment.creates_processes_externally
    environment.set_global_rank(0)
    environment.set_world_size(1)
    where = (environment.world_size(), environment.global_rank(), environment.local_rank(), environment.node_rank())
    assert where == (4, 3, 1, 1)
    environment.validate_settings(num_devices=2, num_nodes=2)
    for devices, nodes in ((4, 1), (2, 1), (1, 2)):
        with pytest.raises(
            RankTableError, match=f"devices={devices} and num_nodes={nodes}.* set devices=2 and num_nodes=2"
        ):
            environment.validate_settings(devices, nodes)


def test_where_the_processes_meet(monkeypatch: pytest.MonkeyPatch, four: Path, tmp_path: Path) -> None:
    from_variables(monkeypatch, four, RANK_ID=3)
    environment = RankTableEnvironment()
    assert environment.main_address == "198.51.100.1"
    assert 15_000 <= environment.main_port < 25_000
    # The same in every format, another for another table.
    write(tmp_path / "old.json", format_rank_table(read_rank_table(four), "group_list"))
    from_variables(monkeypatch, tmp_path / "old.json")
    assert RankTableEnvironment().main_port == environment.main_port
    from_variables(monkeypatch, write(tmp_path / "other.json", group_list()))
    assert RankTableEnvironment().main_port != environment.main_port
    from_variables(monkeypatch, four, MASTER_ADDR="head", MASTER_PORT=1234)
    assert (environment.main_address, environment.main_port) == ("head", 1234)

    monkeypatch.delenv("MASTER_ADDR")
    content = v1_0()
    for number, server in enumerate(content["server_list"]):
        server.update(server_id=f"node_{number}", host_ip=f"198.51.100.{number + 7}")
    from_variables(monkeypatch, write(tmp_path / "named.json", content))
    assert RankTableEnvironment().main_address == "198.51.100.7"
    for server in content["server_list"]:
        del server["host_ip"]
    from_variables(monkeypatch, write(tmp_path / "named.json", content))
    with pytest.raises(RankTableError, match=r"no address of server node_0.*set MASTER_ADDR.* or add its host_ip"):
        _ = RankTableEnvironment().main_address
    one = write(tmp_path / "one.json", format_rank_table(make_table(("node", [0, 1])), "v1.0"))
    from_variables(monkeypatch, one, RANK_ID=0)
    assert RankTableEnvironment().main_address == "127.0.0.1"


NAME = "zeus"
ONE = [("198.51.100.1", [4, 6])]
TWO = [("198.51.100.1", [0, 1]), ("198.51.100.2", [0, 1])]
ON_THE_SECOND = [("100.64.0.1", [0, 1]), ("127.0.0.1", [0, 1])]
BY_NAME = [("198.51.100.1", [0, 1]), (NAME, [0, 1])]
LOCAL = [("127.0.0.1", [0, 1]), ("127.0.0.2", [0, 1, 2])]


@pytest.mark.parametrize(
    ("servers", "device", "rank"),
    [
        (ONE, 6, 1),
        (ON_THE_SECOND, 0, 2),
        (ON_THE_SECOND, 1, 3),
        (BY_NAME, 1, 3),
        ([("198.51.100.1", [0, 1]), ("198.51.100.2", [2, 3])], 3, 3),  # wherever it is, no other server has it
        (LOCAL, 2, 4),
    ],
)
def test_the_table_gives_a_device_its_rank(
    servers: list[Any], device: int, rank: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(socket, "gethostname", lambda: NAME)
    path = write(tmp_path / "table.json", format_rank_table(make_table(*servers), "v1.0"))
    from_variables(monkeypatch, path, DEVICE_ID=device)
    assert RankTableEnvironment.detect()
    environment = RankTableEnvironment()
    table = read_rank_table(path)
    assert environment.global_rank() == rank
    assert (environment.node_rank(), environment.local_rank()) == table.node_and_local_rank(table.rank(rank))
    assert "with a DEVICE_ID of its own, or unset DEVICE_ID for Lightning" in environment.way_out
    with pytest.raises(RankTableError, match=r"devices=9 .*DEVICE_ID and RANK_TABLE_FILE are set, so this process is"):
        environment.validate_settings(9, 1)
    from_variables(monkeypatch, path, RANK_SIZE=len(table))
    assert RankTableEnvironment().global_rank() == rank
    from_variables(monkeypatch, path, RANK_ID=rank)
    environment = RankTableEnvironment()
    assert environment.global_rank() == rank
    assert "with a RANK_ID of its own" in environment.way_out


@pytest.mark.parametrize(
    ("servers", "variables", "words"),
    [
        (
            TWO,
            {"DEVICE_ID": 1},
            r"DEVICE_ID=1 is rank 1 \(server 198.51.100.1, device 1\) or rank 3 \(.*\) of the rank table, and none of "
            "them is known to be this machine, .*: set RANK_ID to the rank of this process",
        ),
        (LOCAL, {"DEVICE_ID": 1}, "rank 1 .* or rank 3 .* and several of them are known .*: set RANK_ID"),
        (ONE, {"DEVICE_ID": 1}, r"DEVICE_ID=1, but in the rank table server 198\S+ has devices 4, 6: set DEVICE_ID"),
        (ON_THE_SECOND, {"DEVICE_ID": 4}, r"the rank table this machine, server 127.0.0.1 has devices 0, 1: set"),
        (TWO, {"DEVICE_ID": 4}, r"table server \S+1 has devices 0, 1; server \S+2 has devices 0, 1: set DEVICE_ID to"),
        (ONE, {"DEVICE_ID": "x"}, 'DEVICE_ID has to be a whole number from 0, of at most 9 digits, got "x"'),
        (ONE, {"DEVICE_ID": ""}, "DEVICE_ID is empty: set it to the device of this process, or unset it"),
        (ONE, {"DEVICE_ID": 4, "RANK_SIZE": 8}, "RANK_SIZE=8, but the rank table has 2 ranks: set RANK_SIZE=2"),
        (ONE, {"DEVICE_ID": 4, "RANK_ID": ""}, "RANK_ID is empty: set it to the rank of this process"),
    ],
)
def test_a_device_that_has_no_rank(
    servers: list[Any], variables: dict[str, Any], words: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from_variables(monkeypatch, write(tmp_path / "t", format_rank_table(make_table(*servers), "v1.0")), **variables)
    with pytest.raises(RankTableError, match=words):
        L.Trainer(strategy="pipeline", accelerator="cpu", devices=2)


def test_a_host_is_known_with_its_domain_or_without(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "gethostname", lambda: "node1.cluster")
    assert make_table(*((name, [0]) for name in ("node1", "NODE1.cluster", "node"))).servers_here() == [
        "node1",
        "NODE1.cluster",
    ]
    monkeypatch.setattr(socket, "gethostname", lambda: "node1")
    names = ("node1.cluster", "node10", "1", "10.0.0.1")
    assert make_table(*((name, [0]) for name in names)).servers_here() == ["node1.cluster"]


def test_who_has_started_a_process(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    own = LightningEnvironment()
    from_variables(monkeypatch, write(tmp_path / "t", format_rank_table(make_table(*ONE), "v1.0")))
    for variables, is_placed in (
        ({}, False),
        ({"RANK_SIZE": 2}, False),
        ({"DEVICE_ID": 4}, True),
        ({"DEVICE_ID": 4, "RANK_SIZE": 2}, True),
        ({"DEVICE_ID": 4, "RANK_SIZE": 1}, False),
        # Lightning's launcher starts the others with what its own process has.
        ({"LOCAL_RANK": 1, "DEVICE_ID": 4}, False),
        ({"LOCAL_RANK": 1, "DEVICE_ID": 4, "RANK_ID": 0}, True),
    ):
        with monkeypatch.context() as own_variables:
            for name, value in variables.items():
                own_variables.setenv(name, str(value))
            assert isinstance(with_rank_table(own), RankTableEnvironment) == is_placed, variables


@pytest.mark.parametrize(
    ("variables", "words"),
    [
        ({"RANK_ID": 4}, "RANK_ID=4, but the rank table has no rank 4, it has ranks 0-3"),
        ({"RANK_ID": "one"}, 'RANK_ID has to be a whole number from 0, of at most 9 digits, got "one"'),
        ({"RANK_ID": "1" * 5000}, r'RANK_ID has to be a whole number from 0, of at most 9 digits, got "1{59}\.\.\.'),
        ({"RANK_ID": ""}, "RANK_ID is empty"),
        ({"RANK_ID": 1, "RANK_SIZE": 8}, "RANK_SIZE=8, but the rank table has 4 ranks: set RANK_SIZE=4"),
        (
            {"RANK_ID": 3, "DEVICE_ID": 3},
            r"DEVICE_ID=3, but the rank table has rank 3 \(server 198.51.100.2, device 1\): set DEVICE_ID=1",
        ),
    ],
)
def test_variables_that_do_not_fit_the_table(
    variables: dict[str, Any], words: str, monkeypatch: pytest.MonkeyPatch, four: Path
) -> None:
    from_variables(monkeypatch, four, **variables)
    with pytest.raises(RankTableError, match=words):
        L.Trainer(strategy="pipeline", accelerator="cpu", devices=2, num_nodes=2)


def test_a_table_that_cannot_be_used_is_told_at_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    content = v1_0()
    content["server_list"][0]["device"][0]["rank_id"] = "1"
    for path in (tmp_path / "none.json", write(tmp_path / "table.json", content)):
        from_variables(monkeypatch, path, RANK_ID=0)
        with pytest.raises(RankTableError, match=r"cannot read the rank table|rank_id 1 is there 2 times"):
            L.Trainer(strategy="pipeline", accelerator="cpu", devices=2, num_nodes=2)


def test_a_process_on_another_server_than_its_own(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    content = v1_0()
    content["server_list"][0]["server_id"] = "127.0.0.1"
    content["server_list"][1]["server_id"] = "198.51.100.1"
    path = write(tmp_path / "table.json", content)
    from_variables(monkeypatch, path, RANK_ID=1)
    RankTableEnvironment()
    from_variables(monkeypatch, path, RANK_ID=2)
    with pytest.raises(
        RankTableError, match=r"has rank 2 \(server 198.*\), but this machine is server 127\.0\.0\.1: start"
    ):
        RankTableEnvironment()


def test_other_launchers_place_their_processes(monkeypatch: pytest.MonkeyPatch, four: Path) -> None:
    own, torchrun = LightningEnvironment(), TorchElasticEnvironment()
    assert with_rank_table(own) is own
    assert with_rank_table(None) is None
    from_variables(monkeypatch, four)
    assert with_rank_table(own) is own
    from_variables(monkeypatch, four, RANK_ID=2)
    assert isinstance(with_rank_table(own), RankTableEnvironment)
    assert with_rank_table(torchrun) is torchrun
    strategy = PipelineStrategy()
    strategy.cluster_environment = own
    assert isinstance(strategy.cluster_environment, RankTableEnvironment)


def test_a_job_without_its_table_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK_ID": "1", "RANK_SIZE": "8", "DEVICE_ID": "1"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(RankTableError, match=r"RANK_ID=1, RANK_SIZE=8, DEVICE_ID=1 say .* RANK_TABLE_FILE is not set"):
        with_rank_table(LightningEnvironment())
    for name in ("RANK_ID", "DEVICE_ID"):  # one of them is enough, and RANK_SIZE needs one
        with monkeypatch.context() as without:
            without.delenv(name)
            with pytest.raises(RankTableError, match="set it, or unset them and let Lightning start the processes"):
                with_rank_table(LightningEnvironment())
            without.delenv("RANK_SIZE")
            with_rank_table(LightningEnvironment())
    monkeypatch.setenv("LOCAL_RANK", "1")  # started by others who know what they do
    with_rank_table(LightningEnvironment())
    monkeypatch.delenv("LOCAL_RANK")
    monkeypatch.setenv("RANK_SIZE", "1")
    with_rank_table(LightningEnvironment())


# -- checks at the start ----------------------------------------------------------------------------------------------


def torchrun(monkeypatch: pytest.MonkeyPatch, rank: int, world: int, local: int, node: int) -> TorchElasticEnvironment:
    for name, value in {"RANK": rank, "WORLD_SIZE": world, "LOCAL_RANK": local, "GROUP_RANK": node}.items():
        monkeypatch.setenv(name, str(value))
    return TorchElasticEnvironment()


def test_torchruns_ranks_agree_with_the_table(monkeypatch: pytest.MonkeyPatch, four: Path) -> None:
    assert check_processes(torchrun(monkeypatch, 3, 4, 1, 1), CPU) == {"rank table": "none"}
    from_variables(monkeypatch, four, RANK_ID=0)  # which torchrun did not set
    with pytest.warns(UserWarning, match="rank table, 8n devices on several servers"):
        assert check_processes(torchrun(monkeypatch, 3, 4, 1, 1), CPU) == {"rank table": read_rank_table(four).digest}
    with pytest.warns(UserWarning):
        with pytest.raises(RankTableError, match=r"are 8 processes \(TorchElastic\), but the rank table has 4 ranks"):
            check_processes(torchrun(monkeypatch, 3, 8, 1, 1), CPU)
        words = r"rank 1, number 0 of node 1 \(TorchElastic\), but the rank table has rank 1 \(server 198.51.100.1, "
        with pytest.raises(RankTableError, match=words):
            check_processes(torchrun(monkeypatch, 1, 4, 0, 1), CPU)
    # One process has nobody to talk to: whatever the variable says is another job's.
    assert check_processes(torchrun(monkeypatch, 0, 1, 0, 0), CPU) == {"rank table": "none"}


def test_torchruns_processes_on_the_wrong_server(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    content = v1_0()
    content["server_list"][0]["server_id"] = "127.0.0.1"
    content["server_list"][1]["server_id"] = "198.51.100.1"
    from_variables(monkeypatch, write(tmp_path / "table.json", content))
    with pytest.warns(UserWarning), pytest.raises(RankTableError, match=r"this machine is server 127\.0\.0\.1"):
        check_processes(torchrun(monkeypatch, 2, 4, 0, 1), CPU)


def test_the_tables_device_counted_among_the_visible_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    table = make_table(("a", [4, 6]))
    assert visible_index(table, table.rank(1)) == 6
    monkeypatch.setenv("ASCEND_RT_VISIBLE_DEVICES", "4, 6")
    assert visible_index(table, table.rank(1)) == 1
    monkeypatch.setenv("ASCEND_RT_VISIBLE_DEVICES", "4,5")
    with pytest.raises(
        RankTableError, match=r"ASCEND_RT_VISIBLE_DEVICES=4,5 hides that device: unset it, or set it to 4,6"
    ):
        visible_index(table, table.rank(1))


def on_npus(folder: Path) -> dict[str, Any]:
    """With a device type called npu and a machine's name for it: the table chooses the device, and the rules hold."""
    for name in LAUNCHED:
        os.environ.pop(name, None)
    torch.utils.rename_privateuse1_backend("npu")
    names = {"name": "Ascend910B2"}

    class Npu:
        @staticmethod
        def get_device_name(device: torch.device) -> str:
            return names["name"]

    torch._register_device_module("npu", Npu)
    path = write(folder / "table.json", format_rank_table(make_table(("a", [3, 4])), "v1.0"))
    os.environ.update(RANK_TABLE_FILE=str(path), RANK_ID="1")
    strategy = PipelineStrategy(parallel_devices=[torch.device("npu", 0), torch.device("npu", 1)])
    strategy.cluster_environment = LightningEnvironment()
    assert isinstance(strategy.cluster_environment, RankTableEnvironment)
    found = {"device": str(strategy.root_device), "cpu": str(strategy.cluster_environment.device(CPU))}
    check_processes(strategy.cluster_environment, strategy.root_device)
    names["name"] = "Ascend910A"
    with pytest.raises(RankTableError) as error:
        check_processes(strategy.cluster_environment, strategy.root_device)
    found["first generation"] = str(error.value)
    names["name"] = "Ascend910B2"
    os.environ.update(RANK="1", WORLD_SIZE="2", LOCAL_RANK="1", GROUP_RANK="0")
    check_processes(TorchElasticEnvironment(), torch.device("npu", 4))
    with pytest.raises(RankTableError) as error:
        check_processes(TorchElasticEnvironment(), torch.device("npu", 1))
    found["torchrun"] = str(error.value)
    return found


@pytest.mark.multiprocess
def test_npus_are_those_of_the_table(two_ranks: Any) -> None:
    found, _ = two_ranks[2]
    assert found["device"] == "npu:4"
    assert found["cpu"] == "cpu"
    assert "networks 0-3 and 4-7" in found["first generation"]
    assert "rank 1 (server a, device 4), but this process drives npu:1; set devices=[3, 4] in" in found["torchrun"]
