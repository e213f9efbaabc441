"""neuralforecast: NHITS and PatchTST, with and without validation."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
from common import Case, main
from neuralforecast import NeuralForecast
from neuralforecast.models import NHITS, PatchTST


def fit(model: Any, trainer_kwargs: dict[str, Any], validation: bool, **options: Any) -> Any:
    days = pd.date_range("2024-01-01", periods=60)
    table = pd.concat(
        pd.DataFrame({"unique_id": f"series {i}", "ds": days, "y": np.sin(np.arange(60) / (3 + i))}) for i in range(4)
    )
    made = model(
        h=4,
        input_size=8,
        max_steps=6,
        val_check_steps=3,
        batch_size=4,
        windows_batch_size=8,
        random_seed=3,
        **options,
        **trainer_kwargs,
    )
    forecast = NeuralForecast([made], freq="D")
    forecast.fit(table, val_size=8 if validation else 0)
    return forecast.predict()[type(made).__name__].to_numpy()


def nhits(trainer_kwargs: dict[str, Any], validation: bool = False) -> Any:
    return fit(NHITS, trainer_kwargs, validation, mlp_units=[[8, 8]] * 3)


def patch_tst(trainer_kwargs: dict[str, Any], validation: bool = False) -> Any:
    sizes = {"encoder_layers": 2, "n_heads": 2, "hidden_size": 8, "linear_hidden_size": 16, "patch_len": 4, "stride": 2}
    return fit(PatchTST, trainer_kwargs, validation, **sizes)


if __name__ == "__main__":
    blocks, layers = {"blocks.1": 1}, {"model.backbone.encoder.layers.1": 1}
    main(
        {
            "NHITS": Case(nhits, key=blocks, draws=True, by_name=True),
            "NHITS, validation": Case(lambda kwargs: nhits(kwargs, True), key=blocks, draws=True, by_name=True),
            "PatchTST": Case(patch_tst, key=layers, draws=True, by_name=True),
            "PatchTST, validation": Case(lambda kwargs: patch_tst(kwargs, True), key=layers, draws=True, by_name=True),
        },
        "pytorch_lightning",
    )
