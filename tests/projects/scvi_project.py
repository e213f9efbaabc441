"""scvi-tools: SCVI on counts of a few genes."""

from __future__ import annotations

from typing import Any

import anndata
import numpy as np
import scvi
from common import Case, main


def trained(trainer_kwargs: dict[str, Any], **options: Any) -> Any:
    scvi.settings.seed = 7  # else each process splits the cells in its own way
    draws = np.random.default_rng(0)
    cells = anndata.AnnData(draws.poisson(2.0, (64, 12)).astype(np.float32))
    cells.obs["batch"] = [f"batch {i % 2}" for i in range(64)]
    scvi.model.SCVI.setup_anndata(cells, batch_key="batch")
    model = scvi.model.SCVI(cells, n_hidden=8, n_latent=3, n_layers=2, **options)
    model.train(max_epochs=2, batch_size=16, train_size=0.75, check_val_every_n_epoch=1, **trainer_kwargs)
    return {"latent": model.get_latent_representation(), "elbo": float(model.get_elbo())}


def with_dropout(trainer_kwargs: dict[str, Any]) -> Any:
    return trained(trainer_kwargs)


def without_dropout(trainer_kwargs: dict[str, Any]) -> Any:
    return trained(trainer_kwargs, dropout_rate=0.0)


if __name__ == "__main__":
    main(
        {
            "SCVI": Case(with_dropout, key={"module.decoder": 1}, draws=True),
            "SCVI, no dropout": Case(without_dropout, key={"module.decoder": 1}, draws=True),
        },
        "lightning.pytorch",
    )
