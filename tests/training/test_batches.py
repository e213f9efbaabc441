"""Batches of other kinds than rows of tensors: graphs in objects of their own, and ragged ones under batch norms."""

from __future__ import annotations

import weakref
from typing import Any

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from tests.launching import launch
from tests.training.runs import Losses, differing, pipeline_trainer, weights

pytestmark = pytest.mark.multiprocess


class Graphs:
    """Several graphs in one, made as torch_geometric's `Batch` is: it can be called, keeps its tensors in a store that
    refers to it weakly, and only its class knows how to pickle it."""

    def __init__(self, x: Tensor, edges: Tensor, graph: Tensor, y: Tensor) -> None:
        self.store = Store(self, {"x": x, "edges": edges, "graph": graph, "y": y})

    def __getattr__(self, name: str) -> Tensor:
        if name == "store" or name not in self.store.tensors:
            raise AttributeError(name)
        return self.store.tensors[name]

    def __call__(self, *names: str) -> Any:
        return ((name, self.store.tensors[name]) for name in names)

    @property
    def num_graphs(self) -> int:
        assert self.store.owner() is self
        return len(self.y)


class Store:
    def __init__(self, owner: Graphs, tensors: dict[str, Tensor]) -> None:
        self.owner, self.tensors = weakref.ref(owner), tensors

    def __getstate__(self) -> dict[str, Any]:
        return {"owner": self.owner(), "tensors": self.tensors}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.owner, self.tensors = weakref.ref(state["owner"]), state["tensors"]


def graph(seed: int) -> Graphs:
    """Of three to eight nodes."""
    generator = torch.Generator().manual_seed(seed)
    nodes = int(torch.randint(3, 9, (), generator=generator))
    edges = torch.randint(0, nodes, (2, 2 * nodes), generator=generator)
    x = torch.randn(nodes, 8, generator=generator)
    return Graphs(x, edges, torch.zeros(nodes, dtype=torch.long), torch.tensor([seed % 3]))


def together(graphs: list[Graphs]) -> Graphs:
    starts = torch.tensor([0, *(len(one.x) for one in graphs)]).cumsum(0).tolist()
    return Graphs(
        torch.cat([one.x for one in graphs]),
        torch.cat([one.edges + start for one, start in zip(graphs, starts, strict=False)], 1),
        torch.cat([torch.full((len(one.x),), number) for number, one in enumerate(graphs)]),
        torch.cat([one.y for one in graphs]),
    )


class Convolution(nn.Module):
    """Kipf & Welling (2017): a node's neighbours and itself, averaged, through a layer."""

    def __init__(self, num_in: int, num_out: int) -> None:
        super().__init__()
        self.layer = nn.Linear(num_in, num_out)

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        source, target = edges
        count = torch.ones(len(x)).index_add(0, target, torch.ones(len(target)))
        return self.layer(x.index_add(0, target, x[source]) / count[:, None])


class LitGraphs(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.head = Convolution(8, 16), Convolution(16, 16), nn.Linear(16, 3)

    def training_step(self, batch: Graphs, batch_idx: int) -> Tensor:
        hidden = self.second(self.first(batch.x, batch.edges).relu(), batch.edges).relu()
        pooled = torch.zeros(batch.num_graphs, 16).index_add(0, batch.graph, hidden)
        return F.cross_entropy(self.head(pooled), batch.y)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class LitSplitGraphs(LitGraphs):
    def split_batch(self, batch: Graphs, num_microbatches: int) -> list[Graphs]:
        """Micro-batches of whole graphs."""
        parts = []
        for numbers in torch.arange(batch.num_graphs).chunk(num_microbatches):
            first, last = numbers[0], numbers[-1]
            nodes = (batch.graph >= first) & (batch.graph <= last)
            start = int(nodes.nonzero()[0])
            edges = batch.edges[:, nodes[batch.edges[0]]] - start
            parts.append(Graphs(batch.x[nodes], edges, batch.graph[nodes] - first, batch.y[numbers]))
        return parts


class LitNorms(L.LightningModule):
    """Batch norms on each of two stages."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU())
        self.second = nn.Sequential(nn.Linear(16, 16), nn.BatchNorm1d(16), nn.ReLU())
        self.head = nn.Linear(16, 3)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return F.cross_entropy(self.head(self.second(self.first(batch[0]))), batch[1])

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class LitSequences(LitNorms):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.head(self.second(self.first(batch[0].flatten(0, 1)))).mean() + batch[1].float().mean()


class LitSamples(LitNorms):
    """Takes samples one by one."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return torch.stack([self.head.weight.sum() * sample["x"].mean() for sample in batch]).mean()


def fit(module: L.LightningModule, data: Any, world: int) -> dict[str, Any]:
    losses = Losses()
    trainer = pipeline_trainer({"second": 1} if world > 1 else {}, world=world, callbacks=[losses], max_epochs=2)
    trainer.fit(module, data)
    return {"losses": losses.values, "weights": weights(trainer)}


def run_all(world: int) -> dict[str, Any]:
    L.seed_everything(1, verbose=False)
    graphs = [graph(seed) for seed in range(22)]
    found: dict[str, Any] = {
        "graphs": fit(LitSplitGraphs(), DataLoader(graphs, batch_size=8, collate_fn=together), world)
    }
    for last in (7, 3, 2):
        data = torch.randn(8 + last, 8), torch.arange(8 + last) % 3
        found[f"ragged by {last}"] = fit(LitNorms(), DataLoader(TensorDataset(*data), batch_size=8), world)
    samples = [{"x": torch.randn(8), "y": torch.tensor(number % 3)} for number in range(8)]
    wrong = {
        "samples in a list": (LitSamples(), DataLoader(samples, batch_size=4, collate_fn=list)),
        "graphs without a split": (LitGraphs(), DataLoader(graphs, batch_size=8, collate_fn=together)),
        "time first": (LitSequences(), DataLoader([(torch.randn(12, 4, 8), torch.arange(4))], batch_size=None)),
        "one sample": (LitNorms(), DataLoader(TensorDataset(torch.randn(1, 8), torch.ones(1).long()))),
    }
    for name, (module, data) in wrong.items() if world > 1 else ():
        with pytest.raises((ValueError, RuntimeError)) as error:
            fit(module, data, world)
        found[name] = str(error.value)
    return found


@pytest.fixture(scope="module")
def one() -> dict[str, Any]:
    return launch(run_all, 1, world=1)[0]


@pytest.fixture(scope="module")
def ranks() -> list[dict[str, Any]]:
    return launch(run_all, 2, world=2)


@pytest.mark.parametrize("name", ["graphs", "ragged by 7", "ragged by 3", "ragged by 2"])
def test_the_bits_are_those_of_one_stage(name: str, one: Any, ranks: Any) -> None:
    for rank in ranks:
        assert rank[name]["losses"] == one[name]["losses"]
    assert not differing(ranks[0][name]["weights"], one[name]["weights"])


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("graphs without a split", "cannot split an object of type Graphs in the batch; define split_batch(batch, num"),
        ("samples in a list", "list of 4 items, as many as it has samples, so each of them seems to be a sample"),
        ("time first", "not say how many samples it has ([0] [12, 4, 8], [1] [4]); define split_batch(batch, num"),
        ("one sample", "micro-batch 0 has one sample, of which a batch norm has no statistics: give batches two"),
    ],
)
def test_what_cannot_be_split_is_told_on_every_rank(name: str, words: str, ranks: Any) -> None:
    for rank in ranks:
        assert words in rank[name]
