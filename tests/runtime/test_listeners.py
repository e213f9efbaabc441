"""A run listens on no other addresses than plain torch does for the same processes, and on fewer on one machine."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import lightning as L
import psutil
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.plugins import AsyncCheckpointIO
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_pipeline import PipelineStrategy
from tests.launching import PATIENCE_S, launch
from tests.training.runs import QUIET

pytestmark = pytest.mark.multiprocess

Addresses = tuple[set[str], set[str]]
"""Where a process listens for those who meet, at MASTER_PORT, and where for its peers."""


def interfaces() -> list[str]:
    """Interfaces that are up and have an address, loopback first."""
    found = [
        name
        for name, addresses in psutil.net_if_addrs().items()
        if psutil.net_if_stats()[name].isup and any(a.family.name == "AF_INET" for a in addresses)
    ]
    return sorted(found, key=lambda name: name != "lo")[:2]


def listening() -> Addresses:
    sockets = [c for c in psutil.Process().net_connections("inet") if c.status == psutil.CONN_LISTEN]
    master = int(os.environ["MASTER_PORT"])
    return (
        {socket.laddr.ip for socket in sockets if socket.laddr.port == master},
        {socket.laddr.ip for socket in sockets if socket.laddr.port != master},
    )


class Lit(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.second(self.first(batch[0])).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def ours(interface: str, num_stages: int, folder: Path) -> Addresses:
    """With all the groups that a run makes: between stages, replicas, and of checkpoints in the background."""
    if interface:
        os.environ["GLOO_SOCKET_IFNAME"] = interface
    strategy = PipelineStrategy(
        stage_config={"second": 1},
        num_stages=num_stages,
        save_distributed_checkpoint=True,
        timeout=PATIENCE_S,
    )
    devices = int(os.environ["WORLD_SIZE"])
    trainer = L.Trainer(strategy=strategy, devices=devices, max_epochs=1, plugins=[AsyncCheckpointIO()], **QUIET)
    trainer.fit(Lit(), DataLoader(TensorDataset(torch.ones(32, 4)), batch_size=8))
    trainer.save_checkpoint(folder / "x.ckpt")
    return listening()


def torchs(interface: str) -> Addresses:
    if interface:
        os.environ["GLOO_SOCKET_IFNAME"] = interface
    dist.init_process_group("gloo", rank=int(os.environ["LOCAL_RANK"]))
    dist.new_group()
    dist.barrier()
    addresses = listening()
    dist.barrier()
    return addresses


@pytest.mark.parametrize(
    "interface",
    ["", *(pytest.param(name, marks=pytest.mark.slow) for name in interfaces())],
    ids=lambda name: name or "as it comes",
)
def test_a_run_listens_where_torch_does(interface: str, tmp_path: Path) -> None:
    for rank, (own, plain) in enumerate(
        zip(launch(ours, interface, 2, tmp_path, world=4), launch(torchs, interface, world=4), strict=True)
    ):
        assert own[0] == ({"127.0.0.1"} if rank == 0 else set())  # torch's are on all addresses
        assert own[1] == plain[1] and len(own[1]) == 1


def test_a_process_that_is_alone_waits_for_nobody(tmp_path: Path) -> None:
    [(master, peers)] = launch(ours, "", 1, tmp_path, world=1)
    assert not master
    assert peers <= launch(torchs, "", world=1)[0][1]
