"""darts: TFT and TiDE."""

from __future__ import annotations

from typing import Any

import numpy as np
from common import Case, main
from darts import TimeSeries
from darts.models import TFTModel, TiDEModel
from torch.nn import MSELoss


def fit(model: Any, trainer_kwargs: dict[str, Any], **options: Any) -> Any:
    series = [TimeSeries.from_values(np.sin(np.arange(60) / (3 + i)).astype(np.float32)) for i in range(3)]
    made = model(
        input_chunk_length=8,
        output_chunk_length=4,
        n_epochs=2,
        batch_size=16,
        random_state=5,
        pl_trainer_kwargs=trainer_kwargs,
        **options,
    )
    made.fit([one[:36] for one in series], val_series=[one[30:] for one in series])
    return made.predict(n=6, series=series[0]).values()


def tft(trainer_kwargs: dict[str, Any]) -> Any:
    sizes = {"hidden_size": 8, "num_attention_heads": 2, "dropout": 0.0}
    return fit(TFTModel, trainer_kwargs, add_relative_index=True, loss_fn=MSELoss(), **sizes)


def tft_with_dropout(trainer_kwargs: dict[str, Any]) -> Any:
    return fit(TFTModel, trainer_kwargs, add_relative_index=True, hidden_size=8, num_attention_heads=2)


def tide(trainer_kwargs: dict[str, Any]) -> Any:
    sizes = {"hidden_size": 16, "decoder_output_dim": 4, "temporal_decoder_hidden": 8, "dropout": 0.0}
    return fit(TiDEModel, trainer_kwargs, use_reversible_instance_norm=True, **sizes)


if __name__ == "__main__":
    key = {"multihead_attn": 1}
    main(
        {
            "TFT": Case(tft, key=key, by_name=True),
            "TFT, dropout": Case(tft_with_dropout, key=key, draws=True, by_name=True),
            "TiDE": Case(tide, key={"decoders": 1}, by_name=True),
        },
        "pytorch_lightning",
    )
