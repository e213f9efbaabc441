"""Two nodes of two devices, under each way to start them, train as one node of four does."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch

from lightning_pipeline import PipelineStrategy
from tests.launching import PATIENCE_S, free_port, launch
from tests.scripts import Host
from tests.training.measured import LitLayers, measured_stages, point_loader
from tests.training.runs import QUIET, Losses

pytestmark = pytest.mark.multiprocess

SCRIPT = Path(__file__)
NODES, DEVICES = 2, 2
WORLD = NODES * DEVICES


def train(num_nodes: int, devices: int) -> dict[str, Any]:
    """Where this process is, before training and after, and its losses."""
    L.seed_everything(1, verbose=False)
    losses = Losses()
    strategy = PipelineStrategy(stage_config=measured_stages(2), num_stages=2, num_microbatches=2, timeout=PATIENCE_S)
    trainer = L.Trainer(
        strategy=strategy,
        devices=devices,
        num_nodes=num_nodes,
        callbacks=[losses],
        **{**QUIET, "max_epochs": 1},
    )
    before = place_of(trainer)
    trainer.fit(LitLayers(), point_loader(24, 4, shuffle=True), point_loader(8, 4))
    assert strategy.topology is not None
    return {
        **place_of(trainer),
        "before": before,
        "environment": type(strategy.cluster_environment).__name__,
        "stage": strategy.topology.stage_rank,
        "replica": strategy.topology.replica,
        "losses": losses.values,
        "logged": {name: float(value) for name, value in trainer.callback_metrics.items()},
    }


def place_of(trainer: L.Trainer) -> dict[str, int]:
    return {
        "world": trainer.world_size,
        "nodes": trainer.num_nodes,
        "devices": trainer.num_devices,
        "rank": trainer.global_rank,
        "local_rank": trainer.local_rank,
        "node": trainer.node_rank,
        "is_zero": trainer.is_global_zero,
    }


def under_torchrun() -> Iterator[tuple[list[str], dict[str, str]]]:
    port = str(free_port())
    for node in range(NODES):
        options = ["--nnodes", NODES, "--node-rank", node, "--nproc-per-node", DEVICES]
        where = ["--master-addr", "127.0.0.1", "--master-port", port]
        yield ["-m", "torch.distributed.run", *map(str, options), *where], {}


def under_slurm() -> Iterator[tuple[list[str], dict[str, str]]]:
    """As srun starts them; the environment derives the port from the job's id."""
    port = free_port(15_000)
    for rank in range(WORLD):
        yield (
            [],
            {
                "SLURM_JOB_ID": f"11{port - 15_000:04}",
                "SLURM_JOB_NAME": "train",
                "SLURM_JOB_NUM_NODES": str(NODES),
                "SLURM_NNODES": str(NODES),
                "SLURM_NODELIST": "127.0.0.1",
                "SLURM_NTASKS": str(WORLD),
                "SLURM_NTASKS_PER_NODE": str(DEVICES),
                "SLURM_NODEID": str(rank // DEVICES),
                "SLURM_PROCID": str(rank),
                "SLURM_LOCALID": str(rank % DEVICES),
            },
        )


def under_lightning() -> Iterator[tuple[list[str], dict[str, str]]]:
    """One process a node is started by hand; it starts the others."""
    port = str(free_port())
    for node in range(NODES):
        yield [], {"NODE_RANK": str(node), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}


LAUNCHERS = {
    "TorchElasticEnvironment": under_torchrun,
    "SLURMEnvironment": under_slurm,
    "LightningEnvironment": under_lightning,
}


MORE = {"LightningEnvironment"}
NAMES = [pytest.param(name, marks=[pytest.mark.slow] * (name in MORE)) for name in LAUNCHERS]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory, wanted: Any) -> dict[str, list[dict[str, Any]]]:
    """By environment, what each rank found; all at once."""
    folders = {name: tmp_path_factory.mktemp(name) for name in wanted(LAUNCHERS, MORE, "environment")}
    started = []
    with closing(Host(SCRIPT, PATIENCE_S)) as host:
        for name in folders:
            for options, environment in LAUNCHERS[name]():
                started.append((name, host.start(options, [str(folders[name])], **environment)))
        try:
            for name, process in started:
                output = process.communicate(timeout=PATIENCE_S)[0]
                assert process.returncode == 0, f"{name}: {output}"
        finally:
            for _, process in started:
                process.kill()
    return {
        name: [json.loads((folder / f"{rank}.json").read_text()) for rank in range(WORLD)]
        for name, folder in folders.items()
    }


@pytest.mark.parametrize("environment", NAMES)
def test_every_process_knows_its_place(environment: str, runs: Any) -> None:
    for rank, found in enumerate(runs[environment]):
        assert found["environment"] == environment
        place = {
            "world": WORLD,
            "nodes": NODES,
            "devices": DEVICES,
            "rank": rank,
            "local_rank": rank % DEVICES,
            "node": rank // DEVICES,
            "is_zero": rank == 0,
        }
        assert {name: found[name] for name in place} == place
        assert found["before"] == place
        assert (found["stage"], found["replica"]) == divmod(rank, WORLD // 2)


@pytest.fixture(scope="module")
def one_node() -> list[dict[str, Any]]:
    return launch(train, 1, WORLD, world=WORLD)


@pytest.mark.parametrize("environment", NAMES)
def test_losses_are_those_of_one_node(environment: str, runs: Any, one_node: Any) -> None:
    assert len(one_node[0]["losses"]) == 3
    assert one_node[0]["losses"] != one_node[1]["losses"]
    for found, one in zip(runs[environment], one_node, strict=True):
        assert found["losses"] == one["losses"]
        assert found["logged"] == one["logged"]


def test_devices_and_nodes_that_are_not_those_started_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    _, environment = next(under_slurm())
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    for options, words in (
        ({"devices": 4}, "devices=4.*--ntasks-per-node=2"),
        ({"num_nodes": 1}, "num_nodes=1.*--nodes=2"),
    ):
        strategy = PipelineStrategy(stage_config=measured_stages(2), num_stages=2, timeout=5)
        trainer = L.Trainer(strategy=strategy, **{**QUIET, "devices": DEVICES, "num_nodes": NODES, **options})
        with pytest.raises(ValueError, match=words):
            trainer.fit(LitLayers(), point_loader(8))


if __name__ == "__main__":  # the script that the launchers run; its argument is the folder for results
    torch.set_num_threads(1)
    here = train(NODES, DEVICES)
    Path(sys.argv[1], f"{here['rank']}.json").write_text(json.dumps(here))
