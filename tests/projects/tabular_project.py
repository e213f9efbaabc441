"""pytorch-tabular: FT-Transformer."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
from common import Case, main
from pytorch_tabular import TabularModel
from pytorch_tabular.config import DataConfig, OptimizerConfig, TrainerConfig
from pytorch_tabular.models import FTTransformerConfig


def fit(trainer_kwargs: dict[str, Any], dropout: float) -> Any:
    draws = np.random.default_rng(0)
    table = pd.DataFrame(draws.normal(size=(64, 3)), columns=["a", "b", "c"])
    table["kind"] = draws.integers(0, 3, 64).astype(str)
    table["target"] = (table.a + table.b > 0).astype(int)
    # Its TrainerConfig holds plain data alone.
    callbacks, logger = trainer_kwargs.pop("callbacks"), trainer_kwargs.pop("logger")
    root = trainer_kwargs.pop("default_root_dir")
    options = {name: trainer_kwargs.pop(name) for name in ("accelerator", "devices")}
    trainer_kwargs.pop("enable_progress_bar")
    model = TabularModel(
        data_config=DataConfig(target=["target"], continuous_cols=["a", "b", "c"], categorical_cols=["kind"]),
        model_config=FTTransformerConfig(
            task="classification",
            input_embed_dim=8,
            num_attn_blocks=2,
            num_heads=2,
            attn_dropout=dropout,
            add_norm_dropout=dropout,
            ff_dropout=dropout,
            seed=1,
        ),
        optimizer_config=OptimizerConfig(),
        trainer_config=TrainerConfig(
            batch_size=16,
            max_epochs=2,
            progress_bar="none",
            load_best=False,
            checkpoints=None,
            early_stopping=None,
            trainer_kwargs={**trainer_kwargs, "default_root_dir": root},
            **options,
        ),
        verbose=False,
    )
    model.logger = logger
    model.fit(train=table[:48], validation=table[48:], callbacks=callbacks)
    return model.predict(table[48:]).to_numpy()


if __name__ == "__main__":
    key = {"_backbone.transformer_blocks.mha_block_1": 1}
    main(
        {
            "FT-Transformer": Case(lambda kwargs: fit(kwargs, 0.0), key=key, by_name=True),
            "FT-Transformer, dropout": Case(lambda kwargs: fit(kwargs, 0.1), key=key, draws=True, by_name=True),
        },
        "pytorch_lightning",
    )
