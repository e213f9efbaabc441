"""How a rank reaches the ranks that it works with."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from lightning_pipeline.runtime.replicas import Replicas
from lightning_pipeline.runtime.topology import Topology
from lightning_pipeline.runtime.transport import Transport

from .tensor_parallel import TensorGroup


@dataclass(frozen=True)
class Connections:
    """A rank's place in the run and its connections.

    Attributes:
        device: of this rank.
        transport: to the other stages; None with one stage.
        replicas: the ranks that run the same stages on other samples; None if there are none.
        tensor_group: the ranks among which this stage's tensors are split; None if they are whole.
    """

    topology: Topology
    device: torch.device
    transport: Transport | None
    replicas: Replicas | None
    tensor_group: TensorGroup | None
