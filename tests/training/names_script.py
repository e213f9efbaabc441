"""Trains with Trainers of Lightning's names, and writes what came of it; run by test_names.

One interpreter imports what takes long. Each rank is a fork of it, in the environment that a launcher gives.

Usage: names_script.py FOLDER PORT NUM_STAGES,... NAME...
"""

from __future__ import annotations

import os
import sys
import traceback
from importlib import import_module
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

FOLDER, PORT, NUMBERS, NAMES = Path(sys.argv[1]), sys.argv[2], sys.argv[3].split(","), sys.argv[4:]
LIGHTNING = {name: import_module(name) for name in NAMES}

import lightning_pipeline  # noqa: E402  as scripts do: after Lightning


def fitted(pl: Any, num_stages: int) -> dict[str, Any]:
    class Net(pl.LightningModule):  # type: ignore[name-defined,misc]
        def __init__(self) -> None:
            super().__init__()
            self.save_hyperparameters()
            self.layers = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.1)) for _ in range(4)))
            self.seen: list[float] = []

        def step(self, batch: Any, name: str) -> Tensor:
            x, y = batch
            loss = F.mse_loss(self.layers(x), y)
            self.log(f"{name}/loss", loss, on_epoch=True)
            return loss

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            return self.step(batch, "train")

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.step(batch, "val")

        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            self.seen.append(float(outputs["loss"]) + float(self.layers[3][0].weight.norm()))

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.Adam(self.parameters(), 0.01)
            return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)]

    folder = FOLDER / pl.__name__ / str(num_stages)
    pl.seed_everything(1, verbose=False)
    net = Net()
    loader = DataLoader(TensorDataset(torch.randn(24, 8), torch.randn(24, 8)), 8)
    callbacks = [pl.callbacks.ModelCheckpoint(folder, monitor="val/loss"), pl.callbacks.EarlyStopping("val/loss")]
    if num_stages > 1:
        callbacks.append(lightning_pipeline.PipelineTimeline(folder, every_n_steps=2))
    trainer = pl.Trainer(
        strategy=lightning_pipeline.PipelineStrategy(
            stage_config={"layers.2": 1} if num_stages > 1 else None, num_stages=num_stages, num_microbatches=4
        ),
        devices=num_stages,
        accelerator="cpu",
        max_epochs=2,
        gradient_clip_val=0.5,
        callbacks=callbacks,
        logger=pl.loggers.CSVLogger(folder),
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(net, loader, loader)
    validated = trainer.validate(net, loader, ckpt_path="best", verbose=False)
    loaded = Net.load_from_checkpoint(trainer.checkpoint_callback.best_model_path)
    return {
        "weights": {name: value.detach().clone() for name, value in net.state_dict().items()},
        "loaded": dict(loaded.state_dict()),
        "seen": net.seen,
        "metrics": {name: value for name, value in trainer.callback_metrics.items() if "pipeline" not in name},
        "validated": validated,
        "drawn": (folder / "timeline.png").exists(),
        "own": isinstance(trainer.strategy, pl.strategies.ParallelStrategy),
    }


def run(num_stages: int, rank: int) -> NoReturn:
    """The work of a rank, which ends its process."""
    os.environ.update(LOCAL_RANK=str(rank), NODE_RANK="0", WORLD_SIZE=str(num_stages))
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=PORT)
    try:
        found = {name: fitted(pl, num_stages) for name, pl in LIGHTNING.items()}
        torch.save(found, FOLDER / f"{'+'.join(NAMES)}-{num_stages}-{rank}.pt")
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    os._exit(0)


if __name__ == "__main__":
    failed = 0
    for number in NUMBERS:
        ranks = [os.fork() or run(int(number), rank) for rank in range(int(number))]
        failed += sum(os.waitpid(rank, 0)[1] != 0 for rank in ranks)
    sys.exit(failed)
