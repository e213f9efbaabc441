"""What the scripts of this folder share: a Trainer's arguments in a configuration, and what of its run is compared."""

from __future__ import annotations

import argparse
import csv
import importlib
import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch

from lightning_pipeline import PipelineStrategy
from lightning_pipeline.partition.placeholder import is_absent
from tests.projects.configurations import CONFIGURATIONS

NUM_MICROBATCHES = 4


@dataclass(frozen=True)
class Case:
    """A model of a package that trains, with the package's own means as far as it has them.

    Attributes:
        train: gets the arguments of the Trainer, trains, and returns what else has to come out the same.
        key: a `stage_config` of two stages; None where there is but one module.
        draws: whether training draws random numbers in the model, as dropout does: each micro-batch draws its own, so
            that one process without the strategy draws others.
        by_name: whether the strategy is named, with its options in the environment: Lightning refuses a strategy object
            that a Trainer has had, and some packages make one for training and one for predictions, or take plain data.
        as_target: whether the strategy is given as configuration, `_target_` and its arguments.
        refused: of the automatic cut, what the error has to say where there is nothing to cut.
    """

    train: Callable[[dict[str, Any]], Any]
    key: Mapping[str, int] | None
    draws: bool = False
    by_name: bool = False
    as_target: bool = False
    refused: str = ""


def main(cases: Mapping[str, Case], lightning: str) -> None:
    """Run the case and the configuration that the command line names, or list the cases.

    Args:
        cases: by name.
        lightning: the namespace that the package imports, "lightning.pytorch" or "pytorch_lightning".
    """
    parser = argparse.ArgumentParser()
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--case", choices=cases)
    parser.add_argument("--configuration", choices=CONFIGURATIONS)
    parser.add_argument("--folder", type=Path)
    arguments = parser.parse_args()
    if arguments.list:
        facts = {name: [case.draws, case.key is not None, case.refused] for name, case in cases.items()}
        print(json.dumps(facts))
        return
    rank = int(os.environ.get("LOCAL_RANK", "0"))
    torch.set_num_threads(1)
    case, folder = cases[arguments.case], arguments.folder
    callback = _watcher(lightning)
    logger = importlib.import_module(f"{lightning}.loggers").CSVLogger(folder, name=None, version="logs")
    importlib.import_module(lightning).seed_everything(7, verbose=False)
    extras = case.train(
        {
            **_strategy(arguments.configuration, case),
            "accelerator": "cpu",
            "logger": logger,
            "log_every_n_steps": 1,
            "callbacks": [callback],
            "default_root_dir": str(folder),
            "enable_progress_bar": False,
            "enable_model_summary": False,
        }
    )
    trainer, rows = callback.seen["trainer"], folder / "logs" / "metrics.csv"
    outcome = {
        "weights": {name: tensor.clone() for name, tensor in trainer.lightning_module.state_dict().items()},
        "metrics": {name: value.clone() for name, value in trainer.callback_metrics.items()},
        "steps": trainer.global_step,
        "rows": list(csv.DictReader(rows.open())) if rank == 0 and rows.exists() else [],
        "extras": extras,
        "held": callback.seen["held"],
    }
    torch.save(outcome, folder / f"rank{rank}.pt")


def _strategy(configuration: str, case: Case) -> dict[str, Any]:
    if configuration == "plain":
        return {"strategy": "auto", "devices": 1}
    stage_config = {"whole": {}, "one": {}, "auto": "auto", "key": dict(case.key or {})}[configuration]
    num_stages = 1 if configuration in ("whole", "one") else 2
    options = {
        "num_stages": num_stages,
        "num_microbatches": 1 if configuration == "whole" else NUM_MICROBATCHES,
        "timeout": 60,
        **({"stage_config": stage_config} if stage_config else {}),
    }
    if case.by_name:
        os.environ.update({f"LIGHTNING_PIPELINE_{name.upper()}": str(value) for name, value in options.items()})
        return {"strategy": "pipeline", "devices": num_stages}
    if case.as_target:
        return {"strategy": {"_target_": "lightning_pipeline.PipelineStrategy", **options}, "devices": num_stages}
    return {"strategy": PipelineStrategy(**options), "devices": num_stages}


def _watcher(lightning: str) -> Any:
    """A callback that notes the Trainer of a fit, and which parameters this rank has while it goes on. What it notes
    belongs to the class: packages train with copies of what they are given."""

    class Watcher(importlib.import_module(f"{lightning}.callbacks").Callback):  # type: ignore[misc]
        seen: ClassVar[dict[str, Any]] = {}

        def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
            self.seen["trainer"] = trainer

        def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
            self.seen["held"] = [name for name, tensor in pl_module.named_parameters() if not is_absent(tensor)]

    return Watcher()
