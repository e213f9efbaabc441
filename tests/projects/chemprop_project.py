"""chemprop: an MPNN that predicts a property of small molecules."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from chemprop import data, models, nn
from chemprop.data.collate import BatchMolGraph, TrainingBatch
from chemprop.data.molgraph import MolGraph
from common import Case, main
from lightning import pytorch as pl


class MPNN(models.MPNN):
    """A batch is one graph of all its molecules: which rows make a micro-batch, chemprop alone knows."""

    def split_batch(self, batch: TrainingBatch, num_microbatches: int) -> list[TrainingBatch]:
        graph, _, *others = batch
        molecules = []
        for i in range(len(graph)):
            atoms = (graph.batch == i).nonzero()[:, 0]
            bonds = (graph.batch[graph.edge_index[0]] == i).nonzero()[:, 0]
            edges, reverse = graph.edge_index[:, bonds] - atoms[0], graph.rev_edge_index[bonds] - bonds[0]
            molecules.append(MolGraph(graph.V[atoms].numpy(), graph.E[bonds].numpy(), edges.numpy(), reverse.numpy()))
        parts = torch.arange(len(graph)).tensor_split(min(num_microbatches, len(graph)))
        graphs = [BatchMolGraph([molecules[i] for i in part]) for part in parts]
        rows = [[None if tensor is None else tensor[part] for tensor in others] for part in parts]
        return [TrainingBatch(graph, None, *part) for graph, part in zip(graphs, rows, strict=True)]


def mpnn(trainer_kwargs: dict[str, Any]) -> Any:
    smiles = ["C" * i + tail for i in range(1, 9) for tail in ("O", "N", "CC(=O)O", "c1ccccc1")]
    molecules = [data.MoleculeDatapoint.from_smi(text, np.array([len(text) / 10])) for text in smiles]
    train, validation = data.MoleculeDataset(molecules[:24]), data.MoleculeDataset(molecules[24:])
    train.normalize_targets()
    predictor = nn.RegressionFFN(input_dim=16, hidden_dim=16)
    module = MPNN(nn.BondMessagePassing(d_h=16, depth=3), nn.MeanAggregation(), predictor)
    trainer = pl.Trainer(max_epochs=2, enable_checkpointing=False, **trainer_kwargs)
    trainer.fit(
        module,
        data.build_dataloader(train, batch_size=8, num_workers=0, seed=1),
        data.build_dataloader(validation, batch_size=8, num_workers=0, shuffle=False),
    )
    return trainer.predict(module, data.build_dataloader(validation, batch_size=8, shuffle=False))


if __name__ == "__main__":
    main({"MPNN": Case(mpnn, key={"agg": 1})}, "lightning.pytorch")
