"""Runs drawn at random: options of the Trainer, callbacks, loggers, loaders, modules, and what is called in turn.

A line of the tables says how likely it is that something is there, and what it may be: each word is a choice of
arguments, of which one may be none.
"""
# ruff: noqa: E501 -- a choice is a line

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning as L
from lightning.pytorch import callbacks

from tests.fuzz import option_parts

MODULE = """
80% block='dropped'|block='normed'|block='attending'|block='recurrent'
50% style='by-hand'|style='kept'|style='kept'
70% optimizer='Adam'|optimizer='AdamW'|optimizer='AdamW'|optimizer='RMSprop'|optimizer='Adamax'|optimizer='LBFGS'
60% scheduler='decay'|scheduler='decay,step'|scheduler='decay,step,2,mine'|scheduler='decay,epoch,2'|scheduler='plateau'|scheduler='plateau,step'|scheduler='cycle,step'|scheduler='sequence,step'
60% logs='step,epoch'|logs='epoch'|logs='step,max'|logs='step,epoch,max'
20% tied=True
"""
TRAINER = """
100% max_epochs=1|max_epochs=2|max_epochs=3|max_steps=1|max_steps=5|max_steps=9|max_epochs=2,min_steps=5|max_epochs=3,max_steps=4|max_epochs=3,min_epochs=2|max_epochs=2,max_time={'hours':2}
30% accumulate_grad_batches=2|accumulate_grad_batches=3
30% gradient_clip_val=0.05|gradient_clip_val=0.5 |gradient_clip_algorithm='value'
25% precision='bf16-mixed'|precision='64-true'|precision='bf16-true'
40% val_check_interval=0.5|val_check_interval=0.34|val_check_interval=1.0|val_check_interval=1|val_check_interval=2|val_check_interval=3,check_val_every_n_epoch=None|val_check_interval=7,check_val_every_n_epoch=None
15% check_val_every_n_epoch=2
25% limit_train_batches=0|limit_train_batches=1|limit_train_batches=3|limit_train_batches=0.5
20% limit_val_batches=0|limit_val_batches=1|limit_val_batches=0.5
15% limit_test_batches=1,limit_predict_batches=2|limit_test_batches=0.5
7% overfit_batches=2|overfit_batches=0.5
5% fast_dev_run=True|fast_dev_run=2
50% num_sanity_val_steps=0|num_sanity_val_steps=1|num_sanity_val_steps=-1
20% reload_dataloaders_every_n_epochs=1|reload_dataloaders_every_n_epochs=2
80% log_every_n_steps=1|log_every_n_steps=2|log_every_n_steps=3
10% detect_anomaly=True
15% inference_mode=False
10% deterministic=True|deterministic='warn'
3% barebones=True
10% profiler='simple'|profiler='advanced'
5% sync_batchnorm=True
15% enable_progress_bar=True
15% enable_model_summary=True
"""
CALLBACKS = """
25% EarlyStopping monitor='val_loss'|monitor='train_loss_epoch'|monitor='val_weight'|monitor='none' strict=False patience=0|patience=1|patience=2,min_delta=0.01 |mode='max' |check_on_train_epoch_end=True|check_on_train_epoch_end=False |stopping_threshold=1.5|divergence_threshold=1.6
80% ModelCheckpoint dirpath=folder/'a' |save_top_k=-1|save_top_k=0|monitor='val_weight',save_top_k=2|monitor='train_acc' |every_n_train_steps=1|every_n_train_steps=2|every_n_epochs=2|train_time_interval=timedelta(0) |save_on_train_epoch_end=True|save_on_train_epoch_end=False |save_last=True|save_last=True|save_last='link' |filename='{epoch}-{step}-{train_acc:.3f}'|filename='a',enable_version_counter=False |||save_weights_only=True|mode='max'|save_on_exception=True
20% ModelCheckpoint dirpath=folder/'b' monitor='val_weight',filename='b-{step}'
20% LearningRateMonitor |logging_interval='step'|log_momentum=True,log_weight_decay=True
12% StochasticWeightAveraging swa_lrs=0.02 swa_epoch_start=1|swa_epoch_start=0.5 annealing_epochs=1|annealing_epochs=2
12% EMAWeightAveraging decay=0.7 |update_every_n_steps=2|update_starting_at_epoch=1 |use_buffers=False
12% GradientAccumulationScheduler {0:1,1:2}|{0:2,1:3,2:1}
10% Unfreezing 0|1
10% BackboneFinetuning unfreeze_backbone_at_epoch=1 |train_bn=False|backbone_initial_lr=0.01
10% Timer duration={'hours':3} interval='step'|interval='epoch'
6% ModelPruning 'l1_unstructured' parameter_names=['weight'] amount=0.3 |use_lottery_ticket_hypothesis=False|use_global_unstructured=False
5% LearningRateFinder num_training_steps=5 early_stop_threshold=None |update_attr=False
15% functions
10% Saving
15% Ending 'stop'|'skip'|'error' 1|3|4
15% Writing 'batch'|'epoch'|'batch_and_epoch'
8% ModelSummary max_depth=2
10% OnExceptionCheckpoint folder
"""
LOADERS = ("plain", "shuffled", "noisy", "weighted", "batches", "stream", "sized")
EVALUATED = (
    *("one plain", "one plain", "one stream", "several plain stream", "dict plain sized"),
    *("sequential plain sized", "max_size plain weighted"),
)
AFTER_FIT = (
    *("validate", "test best", "test last", "predict", "predict best", "fit", "more; fit", "again; fit", "again; test"),
    *("new; fit middle", "new; fit middle; predict", "new; fit first; validate", "new; fit last", "new; test middle"),
    *("more; fit last", "load middle; validate; predict", "load first; fit; test best", "module; fit"),
)
"""What may follow on the first fit. "again" makes another Trainer, "new" another module, too, "module" the module alone;
"more" is one epoch more, and "load" makes the module of a checkpoint."""
NOT_BAREBONES = ("fast_dev_run", "num_sanity_val_steps", "log_every_n_steps", "detect_anomaly", "profiler")
NOT_BAREBONES += ("enable_progress_bar", "enable_model_summary")


def draw(seed: int) -> dict[str, Any]:
    """A run, in what JSON can hold."""
    dice = random.Random(seed)

    def drawn(table: str) -> Iterator[list[str]]:
        for line in table.strip().splitlines():
            odds, *words = line.split()
            if dice.random() < float(odds.rstrip("%")) / 100:
                yield [one for one in (dice.choice(word.split("|")) for word in words) if one]

    def arguments(table: str) -> dict[str, Any]:
        chosen = [eval(f"dict({one})") for each in drawn(table) for one in each]
        return {name: value for one in chosen for name, value in one.items()}

    module, trainer = arguments(MODULE), arguments(TRAINER)
    found = {words[0]: f"{words[0]}({', '.join(words[1:])})" for words in drawn(CALLBACKS)}
    mode = dice.choice(("one", "one", "one", "min_size", "max_size", "max_size_cycle"))
    kinds = " ".join(dice.sample(LOADERS, 1 if mode == "one" else 2)) if dice.random() < 0.97 else "workers"
    data = [dice.choice((24, 37, 44, 50)), dice.choice((8, 8, 12)), f"{mode} {kinds}", dice.choice(EVALUATED)]
    # What Lightning refuses, or what makes no sense:
    if module.get("style") == "by-hand":
        trainer = {name: value for name, value in trainer.items() if name[:8] not in ("gradient", "accumula")}
        excluded = (
            "GradientAccumulationScheduler Unfreezing BackboneFinetuning LearningRateFinder StochasticWeightAveraging"
        )
        found = {name: text for name, text in found.items() if name not in excluded.split()}
    if module.get("style") == "kept":
        trainer["inference_mode"] = False  # its metrics are those of training, too
    if module.get("optimizer") == "LBFGS" and module.keys() & {"block", "style"}:
        del module["optimizer"]
    if "accumulate_grad_batches" in trainer:
        found.pop("GradientAccumulationScheduler", None)
    for name, value in [*trainer.items()]:
        is_part = isinstance(value, float) and name.startswith(("limit", "val_check", "overfit"))
        if is_part and "stream" in data[2] + data[3]:
            del trainer[name]
    if trainer.get("barebones"):
        trainer = {name: value for name, value in trainer.items() if name not in NOT_BAREBONES}
        found = {name: found[name] for name in found if name not in ("ModelCheckpoint", "LearningRateMonitor")}
    follows = [one for some in dice.sample(AFTER_FIT, dice.choice((0, 1, 1, 2, 3))) for one in some.split("; ")]
    return {
        "seed": seed,
        "module": module,
        "trainer": trainer,
        "callbacks": [*found.values()],
        "loggers": [] if trainer.get("barebones") else dice.choice(([], ["csv"], ["first", "second"])),
        "data": data,
        "given": dice.choice(("loaders", "datamodule", "of the module")),
        "phases": [*["validate"] * (dice.random() < 0.15), "fit", *follows],
    }


def callbacks_of(case: Mapping[str, Any], folder: Path) -> list[L.Callback]:
    names = {**vars(callbacks), **vars(option_parts), "folder": folder, "timedelta": timedelta}
    return [eval(text, names) for text in case["callbacks"]]
