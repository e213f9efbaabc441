"""GluonTS: DeepAR and PatchTST by their estimators, on sines."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import torch
from common import Case, main
from gluonts.dataset.common import ListDataset
from gluonts.torch import DeepAREstimator, PatchTSTEstimator

LENGTH = 6


def fit(estimator: Any, trainer_kwargs: dict[str, Any], **options: Any) -> Any:
    # seed_everything has seeded numpy, from which GluonTS draws its windows
    series = [np.sin(np.arange(80) / (3 + i)) + 2 for i in range(8)]
    sines = ListDataset([{"start": "2024-01-01", "target": values} for values in series], freq="D")
    estimator = estimator(
        prediction_length=LENGTH,
        context_length=2 * LENGTH,
        batch_size=8,
        num_batches_per_epoch=4,
        trainer_kwargs={"max_epochs": 2, **trainer_kwargs},
        **options,
    )
    output = estimator.train_model(sines, sines)
    torch.manual_seed(3)
    return [forecast.mean for forecast in output.predictor.predict(sines)]


deepar = partial(fit, DeepAREstimator, freq="D", hidden_size=8, num_parallel_samples=4, dropout_rate=0.0)
deepar_with_dropout = partial(fit, DeepAREstimator, freq="D", hidden_size=8, num_parallel_samples=4)
patch_tst = partial(fit, PatchTSTEstimator, patch_len=4, stride=2, d_model=8, nhead=2, dim_feedforward=16, dropout=0.0)

if __name__ == "__main__":
    main(
        {
            "DeepAR": Case(lambda kwargs: deepar(trainer_kwargs=kwargs), key={"model.param_proj": 1}),
            "DeepAR, dropout": Case(
                lambda kwargs: deepar_with_dropout(trainer_kwargs=kwargs), key={"model.param_proj": 1}, draws=True
            ),
            "PatchTST": Case(lambda kwargs: patch_tst(trainer_kwargs=kwargs), key={"model.encoder.layers.1": 1}),
        },
        "lightning.pytorch",
    )
