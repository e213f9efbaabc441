"""Sparse tensors: as buffers, of activations, as gradients of embeddings, kept for later."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.habits.modules import CLASSES, SAMPLES, WIDTH, Layer, Layers
from tests.habits.table import EQUAL, error, habit

DENSE_ONLY = error(r"gradient of words\.weight is sparse.*replicas exchange dense ones only.*sparse=False")


def graph() -> Tensor:
    """A ring of as many nodes as there are features."""
    return (torch.eye(WIDTH) + torch.eye(WIDTH).roll(1, 0)).to_sparse()


class Convolution(Layer):
    """A graph convolution, whose adjacency matrix is a sparse buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("adjacency", graph())

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(torch.sparse.mm(self.adjacency, x.t()).t())


@habit()
class SparseBuffers(Layers):
    """Each layer multiplies with a sparse matrix of its own."""

    layer = Convolution


@habit()
class CompressedBuffers(Layers):
    """As rows."""

    class Compressed(Convolution):
        def __init__(self) -> None:
            super().__init__()
            self.adjacency = self.adjacency.to_sparse_csr()

    layer = Compressed


@habit()
class SparseBatch(Layers):
    """The graph comes with the batch, and each layer takes it."""

    @staticmethod
    def batch(generator: torch.Generator) -> Any:
        return *Layers.batch(generator), graph(), graph().to_sparse_csr()

    def split_batch(self, batch: Any, num_microbatches: int) -> list[Any]:
        x, y, *graphs = batch
        parts = zip(x.chunk(num_microbatches), y.chunk(num_microbatches), strict=True)
        return [(*part, *graphs) for part in parts]

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y, sparse, compressed = batch
        for number, layer in enumerate(self.layers):
            x = layer(((sparse if number % 2 else compressed) @ x.t()).t())
        return F.cross_entropy(self.head(x), y)


@habit()
class SparseAttribute(Layers):
    """The step makes a sparse matrix, in two layouts, and multiplies with it between layers."""

    def features(self, x: Tensor) -> Tensor:
        matrix = graph()
        for number, layer in enumerate(self.layers):
            x = layer(((matrix if number % 2 else matrix.to_sparse_csr()) @ x.t()).t())
        return x


@habit(observed=["counts"])
class SparseActivations(Layers):
    """Activations become sparse within a layer, and their number of values is read."""

    class Sparse(Layer):
        count = 0

        def forward(self, x: Tensor) -> Tensor:
            x = super().forward(x)
            sparse = x.relu().to_sparse()
            self.count = sparse._nnz()
            return x + 0.1 * sparse.to_dense() + 0.01 * torch.sparse.sum(sparse) + sparse.coalesce().values().mean()

    layer = Sparse

    def __init__(self) -> None:
        super().__init__()
        self.counts: list[int] = []

    def features(self, x: Tensor) -> Tensor:
        x = super().features(x)
        self.counts += [layer.count for layer in self.layers]  # type: ignore[misc]
        return x


class Tokens(Layers):
    """Of words."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(20, WIDTH, sparse=True)

    def chain(self) -> list[str]:
        return ["words", *super().chain()]

    @staticmethod
    def batch(generator: torch.Generator) -> Any:
        words = torch.randint(0, 20, (SAMPLES, 5), generator=generator)
        return words, torch.randint(0, CLASSES, (SAMPLES,), generator=generator)

    def features(self, x: Tensor) -> Tensor:
        return super().features(self.words(x).mean(1))


@habit(replicated=DENSE_ONLY, shows=False)
class SparseMomentum(Tokens):
    """Sparse gradients, of which SGD's momentum is sparse as well."""

    def __init__(self) -> None:
        super().__init__()
        self.more_words = nn.Embedding(20, WIDTH, sparse=True)

    def chain(self) -> list[str]:
        return [*super().chain(), "more_words"]

    def features(self, x: Tensor) -> Tensor:
        return super().features(x) + self.more_words(x).mean(1)


@habit(replicated=DENSE_ONLY, shows=False, plain=False)
class SparseGradientsInHook(SparseMomentum):
    """A hook logs the norms of rows, which it takes from sparse gradients of several stages."""

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        for name, words in {"first": self.words, "more": self.more_words}.items():
            assert words.weight.grad is not None
            self.log(name, words.weight.grad.coalesce().values().norm())
            self.log(f"{name}_dense", words.weight.grad.to_dense().norm())


@habit(replicated=DENSE_ONLY)
class SparseGradients(Tokens):
    """`nn.Embedding(sparse=True)` and SGD."""

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


@habit(observed=["kept"])
class SparseKept(Layers):
    """The step keeps a sparse tensor of its last activations."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: list[Tensor] = []

    def features(self, x: Tensor) -> Tensor:
        x = super().features(x)
        self.kept = [x.detach().relu().to_sparse()]
        return x


@habit(expect=error(r"(?s)sparse.*to_dense"), automatic=EQUAL, shows=False)  # which changes no number
class SparseAcrossStages(Layers):
    """A sparse tensor goes from each layer to the next."""

    class Passing(Layer):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x.to_dense()).to_sparse()

    layer = Passing

    def features(self, x: Tensor) -> Tensor:
        return super().features(x.to_sparse()).to_dense()


@habit()
class SparseLoss(Layers):
    """An L1 penalty over a sparse view of the activations."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        hidden = self.features(x)
        loss = F.cross_entropy(self.head(hidden), y) + 0.1 * torch.sparse.sum(hidden.to_sparse()).abs()
        self.log("train_loss", loss)
        return loss


@habit(observed=["norms"], plain=False, replicated=DENSE_ONLY)
class SparseGradientsRead(Tokens):
    """Hooks look at gradients, of which an embedding's is sparse."""

    def __init__(self) -> None:
        super().__init__()
        self.norms: list[float] = []

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        for parameter in self.parameters():
            if parameter.grad is not None:
                dense = parameter.grad.to_dense() if parameter.grad.is_sparse else parameter.grad
                self.norms.append(dense.norm().item())

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)
