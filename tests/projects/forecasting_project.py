"""pytorch-forecasting: TFT, N-HiTS and DeepAR on a few series."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
from common import Case, main
from lightning import pytorch as pl
from pytorch_forecasting import DeepAR, NHiTS, TemporalFusionTransformer, TimeSeriesDataSet
from pytorch_forecasting.data import GroupNormalizer
from pytorch_forecasting.metrics import MAE, NormalDistributionLoss, QuantileLoss

LENGTH = 4


def fit(model: Any, trainer_kwargs: dict[str, Any], **options: Any) -> Any:
    steps = np.arange(40)
    table = pd.concat(
        pd.DataFrame({"time": steps, "series": str(i), "value": np.sin(steps / (2 + i)) + 2, "week": steps % 7.0})
        for i in range(4)
    ).reset_index(drop=True)
    is_plain = model is NHiTS
    training = TimeSeriesDataSet(
        table[table.time < 32],
        time_idx="time",
        target="value",
        group_ids=["series"],
        max_encoder_length=8,
        min_encoder_length=8,
        max_prediction_length=LENGTH,
        static_categoricals=[] if is_plain else ["series"],
        time_varying_known_reals=[] if is_plain else ["week"],
        time_varying_unknown_reals=["value"],
        target_normalizer=GroupNormalizer(groups=["series"]),
    )
    validation = TimeSeriesDataSet.from_dataset(training, table, min_prediction_idx=32)
    module = model.from_dataset(training, learning_rate=0.01, **options)
    trainer = pl.Trainer(max_epochs=2, limit_train_batches=3, gradient_clip_val=0.1, **trainer_kwargs)
    trainer.fit(
        module,
        training.to_dataloader(train=True, batch_size=8, num_workers=0),
        validation.to_dataloader(train=False, batch_size=8, num_workers=0),
    )
    return []


def tft(trainer_kwargs: dict[str, Any], dropout: float = 0.0) -> Any:
    sizes = {"hidden_size": 8, "attention_head_size": 2, "hidden_continuous_size": 4, "dropout": dropout}
    return fit(TemporalFusionTransformer, trainer_kwargs, loss=QuantileLoss(), reduce_on_plateau_patience=1, **sizes)


def tft_with_dropout(trainer_kwargs: dict[str, Any]) -> Any:
    return tft(trainer_kwargs, dropout=0.1)


def nhits(trainer_kwargs: dict[str, Any]) -> Any:
    return fit(NHiTS, trainer_kwargs, loss=MAE(), hidden_size=8, weight_decay=0.01, backcast_loss_ratio=0.1)


def deepar(trainer_kwargs: dict[str, Any]) -> Any:
    sizes = {"hidden_size": 8, "rnn_layers": 2, "dropout": 0.0}
    return fit(DeepAR, trainer_kwargs, loss=NormalDistributionLoss(), **sizes)


if __name__ == "__main__":
    main(
        {
            "TFT": Case(tft, key={"multihead_attn": 1}),
            "TFT, dropout": Case(tft_with_dropout, key={"multihead_attn": 1}, draws=True),
            "N-HiTS": Case(nhits, key={"model.blocks.1": 1}),
            "DeepAR": Case(deepar, key={"distribution_projector": 1}, draws=True),
        },
        "lightning.pytorch",
    )
