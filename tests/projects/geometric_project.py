"""torch_geometric: a GCN that classifies the nodes of one graph, and one that classifies graphs."""

from __future__ import annotations

from typing import Any

import lightning as L
import torch
import torch.nn.functional as F
from common import Case, main
from torch import Tensor
from torch_geometric.data import Batch, Data
from torch_geometric.data.lightning import LightningDataset
from torch_geometric.nn import GCNConv, Linear, global_mean_pool


class GraphClassifier(L.LightningModule):
    """Micro-batches are batches of fewer graphs: their edges count from their own nodes, which PyG knows."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2, self.out = GCNConv(4, 8), GCNConv(8, 8), Linear(8, 3)

    def split_batch(self, batch: Batch, num_microbatches: int) -> list[Batch]:
        graphs = batch.to_data_list()
        parts = torch.arange(len(graphs)).tensor_split(min(num_microbatches, len(graphs)))
        return [Batch.from_data_list([graphs[i] for i in part]) for part in parts]

    def forward(self, x: Tensor, edge_index: Tensor, batch: Tensor) -> Tensor:
        x = F.relu(self.conv1(x, edge_index))
        x = F.relu(self.conv2(x, edge_index))
        return self.out(global_mean_pool(x, batch))

    def training_step(self, data: Batch, batch_idx: int) -> Tensor:
        loss = F.cross_entropy(self(data.x, data.edge_index, data.batch), data.y)
        self.log("train_loss", loss, batch_size=data.num_graphs)
        return loss

    def validation_step(self, data: Batch, batch_idx: int) -> None:
        logits = self(data.x, data.edge_index, data.batch)
        self.log("val_loss", F.cross_entropy(logits, data.y), batch_size=data.num_graphs)
        self.log("val_acc", (logits.argmax(-1) == data.y).float().mean(), batch_size=data.num_graphs)

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=0.01)


def graphs(count: int) -> list[Data]:
    drawn = torch.Generator().manual_seed(0)
    found = []
    for index in range(count):
        nodes = 4 + index % 3
        edges = torch.randint(0, nodes, (2, 3 * nodes), generator=drawn)
        found.append(Data(torch.randn(nodes, 4, generator=drawn), edges, y=torch.tensor([index % 3])))
    return found


def fit(trainer_kwargs: dict[str, Any]) -> None:
    data = LightningDataset(graphs(24), graphs(16), batch_size=8, num_workers=0)
    L.Trainer(max_epochs=2, enable_checkpointing=False, **trainer_kwargs).fit(GraphClassifier(), data)


if __name__ == "__main__":
    main({"GCN": Case(fit, key={"conv2": 1})}, "lightning.pytorch")
