"""Trains what the configuration says: ``python examples/train.py experiment=gpt_text trainer.devices=4``."""

from typing import Any

import hydra
import lightning as L
from hydra.utils import instantiate
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.utilities import rank_zero_only
from omegaconf import DictConfig, OmegaConf

import lightning_pipeline  # noqa: F401  registers the strategies, so that trainer.strategy=pipeline_gpipe works


def train(cfg: DictConfig) -> L.Trainer:
    """Builds data, model and trainer from ``cfg``, fits, and returns the trainer."""
    L.seed_everything(cfg.seed, workers=True)
    datamodule = instantiate(cfg.data)
    model = instantiate(cfg.model, _convert_="all")
    trainer = instantiate(
        cfg.trainer, callbacks=instantiate_each(cfg.callbacks), logger=instantiate_each(cfg.logger), _convert_="all"
    )
    for logger in trainer.loggers:
        logger.log_hyperparams(OmegaConf.to_container(cfg, resolve=True))
    trainer.fit(model, datamodule=datamodule, ckpt_path=cfg.ckpt_path)
    return trainer


def instantiate_each(group: DictConfig | None) -> list[Any]:
    """The objects of a config group; one that is set to null is left out."""
    return [instantiate(node, _convert_="all") for node in (group or {}).values() if node is not None]


@rank_zero_only
def report(trainer: L.Trainer, output_dir: str) -> None:
    """Prints what came out and where it lies."""
    for name, value in sorted(trainer.callback_metrics.items()):
        print(f"{name:<12} {value:.4f}")
    if isinstance(trainer.checkpoint_callback, ModelCheckpoint):
        print(f"{'checkpoint':<12} {trainer.checkpoint_callback.best_model_path}")
    print(f"{'outputs':<12} {output_dir}")


@hydra.main(version_base="1.3", config_path="../configs", config_name="train")
def main(cfg: DictConfig) -> None:
    report(train(cfg), cfg.paths.output_dir)


if __name__ == "__main__":
    main()
