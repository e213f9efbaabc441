"""Trains what the configuration says: ``python examples/train.py experiment=gpt_text trainer.devices=4``."""

import time
from pathlib import Path
from statistics import median
from typing import Any

import hydra
import lightning as L
from hydra.utils import instantiate
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from lightning.pytorch.plugins.environments import LightningEnvironment
from lightning.pytorch.utilities import rank_zero_only
from omegaconf import DictConfig, OmegaConf

import lightning_pipeline  # noqa: F401  registers the strategies, so that trainer.strategy=pipeline_gpipe works

WARM_UP_STEPS, COMPARED_STEPS = 5, 10


class StepTimes(Callback):
    """Seconds of each optimizer step, of one batch or several, but the first ones, in which much is set up."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        self._step_seconds, self._begin, self._step = 0.0, 0.0, 0

    def on_train_batch_start(self, *args: Any) -> None:
        self._begin = time.perf_counter()

    def on_train_batch_end(self, trainer: L.Trainer, *args: Any) -> None:
        self._step_seconds += time.perf_counter() - self._begin
        if trainer.global_step != self._step:
            if trainer.global_step > WARM_UP_STEPS:
                self.seconds.append(self._step_seconds)
            self._step_seconds, self._step = 0.0, trainer.global_step


def train(cfg: DictConfig) -> L.Trainer:
    """Builds data, model and trainer from ``cfg``, fits, and returns the trainer."""
    L.seed_everything(cfg.seed, workers=True)
    datamodule = instantiate(cfg.data)
    model = instantiate(cfg.model, _convert_="all")
    callbacks = [*instantiate_each(cfg.callbacks), StepTimes()]
    trainer = instantiate(cfg.trainer, callbacks=callbacks, logger=instantiate_each(cfg.logger), _convert_="all")
    for logger in trainer.loggers:
        logger.log_hyperparams(OmegaConf.to_container(cfg, resolve=True))
    trainer.fit(model, datamodule=datamodule, ckpt_path=cfg.ckpt_path)
    return trainer


def times_in_one_process(cfg: DictConfig, num_microbatches: int = 1) -> StepTimes:
    """The times of some steps of the same training without a pipeline, each batch in so many parts."""
    times = StepTimes()
    limits = {
        "max_steps": WARM_UP_STEPS + COMPARED_STEPS,
        "max_epochs": -1,
        "limit_train_batches": 1.0,
        "accumulate_grad_batches": num_microbatches,
        "limit_val_batches": 0,
        "num_sanity_val_steps": 0,
    }
    quiet = {
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    alone = {"devices": 1, "strategy": "auto", **limits, **quiet}
    settings = OmegaConf.merge({**cfg.trainer, "strategy": "auto"}, alone)
    trainer = instantiate(settings, callbacks=[times], _convert_="all")
    data = OmegaConf.merge(cfg.data, {"batch_size": max(1, cfg.data.batch_size // num_microbatches)})
    trainer.fit(instantiate(cfg.model, _convert_="all"), datamodule=instantiate(data))
    return times


def instantiate_each(group: DictConfig | None) -> list[Any]:
    """The objects of a config group; one that is set to null is left out."""
    return [instantiate(node, _convert_="all") for node in (group or {}).values() if node is not None]


@rank_zero_only
def report(trainer: L.Trainer, cfg: DictConfig) -> None:
    """Prints what came out, how long it took beside one process, and where it lies."""
    output_dir = Path(cfg.paths.output_dir)
    for name, value in sorted(trainer.callback_metrics.items()):
        print(f"{name:<12} {value:.4f}")
    if isinstance(trainer.checkpoint_callback, ModelCheckpoint):
        print(f"{'checkpoint':<12} {trainer.checkpoint_callback.best_model_path}")
    model, stages = type(trainer.lightning_module).__name__, pipeline_stages(trainer)
    print(f"{'trained':<12} {model}, {trainer.global_step} steps{f' on {stages} stages' if stages else ''}")
    # Other launchers, such as torchrun, have started all processes, and one of them cannot train by itself.
    is_launched_here = isinstance(getattr(trainer.strategy, "cluster_environment", None), LightningEnvironment)
    [times] = [callback for callback in trainer.callbacks if isinstance(callback, StepTimes)]  # type: ignore[attr-defined]
    if cfg.compare and stages > 1 and is_launched_here and times.seconds:
        parts = trainer.strategy.pipeline.num_microbatches  # type: ignore[attr-defined]
        here, alike, whole = (
            median(one.seconds) * 1e3 for one in (times, times_in_one_process(cfg, parts), times_in_one_process(cfg))
        )
        print(
            f"{'a step':<12} {here:.1f} ms on {stages} stages; in one process {alike:.1f} ms with the same {parts} "
            f"micro-batches ({alike / here:.2f} times that), {whole:.1f} ms with the batch as one ({whole / here:.2f})"
        )
    if (output_dir / "report.html").exists():
        print(f"{'report':<12} {output_dir / 'report.html'}")
    print(f"{'outputs':<12} {output_dir}")


def pipeline_stages(trainer: L.Trainer) -> int:
    """The stages of a pipeline; 0 for another strategy."""
    topology = getattr(trainer.strategy, "topology", None)
    return 0 if topology is None else topology.num_stages


@hydra.main(version_base="1.3", config_path="../configs", config_name="train")
def main(cfg: DictConfig) -> None:
    report(train(cfg), cfg)


if __name__ == "__main__":
    main()
