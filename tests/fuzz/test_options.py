"""Runs with options, callbacks and loaders that are drawn at random come to what one process does.

OPTIONS_FROM, OPTIONS and OPTIONS_ON are environment variables with the first seed, their number and the
configurations, for longer hunts; OPTIONS_CASE has one run instead, as a failure tells it.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import random
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import lightning as L
import numpy as np
import pytest
import torch
from lightning.pytorch.loggers import CSVLogger

from lightning_pipeline.strategy import partitioner, stage_runner
from tests.fuzz import options
from tests.fuzz.option_parts import Classifier, Data
from tests.habits import driver, harness
from tests.habits.driver import compare, load_records, run_configuration
from tests.habits.harness import Configuration, comparable, digest, held, place_of
from tests.habits.table import Habit

FIRST, NUMBER = int(os.environ.get("OPTIONS_FROM", "0")), int(os.environ.get("OPTIONS", "15"))
CONFIGURATIONS = os.environ.get("OPTIONS_ON", "2-1f1b 3-zero_bubble").split()
PATIENCE_S = 60.0
FOUND: list[dict[str, Any]] = [
    {  # a fit goes on from the checkpoint of an error, and meets it again before a step has shown what stages need
        "seed": 13,
        "module": {},
        "trainer": {"max_epochs": 2},
        "callbacks": ["ModelCheckpoint(every_n_train_steps=1)", "Ending('error', 4)", "OnExceptionCheckpoint(folder)"],
        "loggers": [],
        "data": [50, 12, "one plain", "one plain"],
        "given": "datamodule",
        "phases": ["fit", "load first", "fit", "test"],
    },
]
"""Runs that once came to something else."""
ANEW = re.compile(r"\S*/tmp\S*|lr_find_[-\w]+|0x[0-9a-f]+")
"""What is another in each run."""
OWN = ("time_elapsed", "pipeline_plan")
"""Entries of checkpoints that are another in each run, or are there only on stages."""
ENDLESS = re.compile("no answer in time|Timeout|Deadlock")
"""Errors by which ranks end that wait for one another. Where one process refuses, any other one is right."""


class Watcher(L.Callback):
    """Notes which hooks are called when, what they are given, and what they find."""

    def __init__(self) -> None:
        self.calls: list[Any] = []
        self.given: list[Any] = []

    def note(self, name: str, trainer: Any, module: Any, *args: Any, **keywords: Any) -> None:
        place = (trainer.state.fn, trainer.state.stage, trainer.current_epoch, trainer.global_step)
        self.calls.append([name, *map(str, place), trainer.is_last_batch, trainer.should_stop, module.training])
        if name.endswith(("batch_start", "batch_end")):
            self.given.append((name, comparable(args)))
        if name.endswith(("epoch_end", "train_batch_end", "validation_end")):
            rates = [group["lr"] for optimizer in trainer.optimizers for group in optimizer.param_groups]
            self.given.append((name, comparable(dict(trainer.callback_metrics)), rates))


for hook in [name for name in dir(L.Callback) if name.startswith("on_") or name in ("setup", "teardown")]:
    setattr(Watcher, hook, lambda self, *args, hook=hook, **keywords: self.note(hook, *args, **keywords))


class Run:
    """A drawn run on one rank."""

    def __init__(self, case: Mapping[str, Any], configuration: Configuration, folder: Path) -> None:
        self.case, self.configuration, self.folder = case, configuration, folder
        self.watcher, self.kept, self.data, self.epochs = Watcher(), harness.Keeping(), Data(*case["data"]), 0
        self.module, self.trainer = self.new_module(), self.new_trainer()
        self.found: list[Any] = []

    def new_module(self, path: Path | None = None) -> Any:
        options: dict[str, Any] = {"map_location": "cpu", "weights_only": False}
        module: Any = Classifier.load_from_checkpoint(path, **options) if path else Classifier(**self.case["module"])
        if self.configuration.parts > 1 and self.configuration.schedule != "auto":
            module.stage_config = harness.cuts(module.chain(), self.configuration.parts)
        if self.case["given"] == "of the module":
            for name in ("train", "val", "test", "predict"):
                setattr(module, f"{name}_dataloader", getattr(self.data, f"{name}_dataloader"))
        return module

    def new_trainer(self) -> L.Trainer:
        given = dict(self.case["trainer"])
        if not given.get("barebones"):
            given = {"enable_progress_bar": False, "enable_model_summary": False, **given}
            written = [CSVLogger(self.folder, name, flush_logs_every_n_steps=1) for name in self.case["loggers"]]
            given["logger"] = [*written, self.kept]
        if self.epochs and "max_epochs" in given:
            given["max_epochs"] += self.epochs
        is_plain = self.configuration.kind == "plain"
        return L.Trainer(
            strategy="auto" if is_plain else harness.strategy(self.configuration),
            devices=self.configuration.world,
            accelerator="cpu",
            callbacks=[*options.callbacks_of(self.case, self.folder), self.watcher],
            default_root_dir=self.folder,
            use_distributed_sampler=False,
            **given,
        )

    def checkpoint(self, word: str) -> Any:
        """The path of the first checkpoint, or of one in the middle; other words are Lightning's."""
        if word == "best" and not getattr(self.trainer.checkpoint_callback, "best_model_path", ""):
            return None
        if word not in ("first", "middle"):
            return word or None
        steps = {path: torch.load(path, weights_only=False)["global_step"] for path in self.folder.rglob("*.ckpt")}
        paths = sorted(steps, key=lambda path: (steps[path], path))
        return paths[0 if word == "first" else len(paths) // 2] if paths else None

    def do(self, phase: str) -> Any:
        name, _, word = phase.partition(" ")
        path = self.checkpoint(word)
        if name == "more":
            self.epochs += 1
            self.trainer.fit_loop.epoch_loop.max_steps += 3 if self.trainer.max_steps > 0 else 0
            if self.trainer.max_epochs is not None and self.trainer.max_epochs > 0:
                self.trainer.fit_loop.max_epochs = self.trainer.max_epochs + 1
            self.trainer.should_stop = False
        elif name in ("new", "again", "module", "load"):
            self.epochs += name == "new"
            if name != "again":
                self.module = self.new_module(path if name == "load" else None)
            if name != "module":
                self.trainer = self.new_trainer()
        else:
            given: dict[str, Any] = {"ckpt_path": path, "weights_only": False} if path else {}
            if self.case["given"] == "datamodule":
                given["datamodule"] = self.data
            elif self.case["given"] == "loaders":
                kind = {"fit": "train", "validate": "val"}.get(name, name)
                loader = getattr(self.data, f"{kind}_dataloader")()
                more = {"val_dataloaders": self.data.val_dataloader()} if name == "fit" else {}
                given |= {"train_dataloaders" if name == "fit" else "dataloaders": loader, **more}
            with contextlib.suppress(ArithmeticError):
                return getattr(self.trainer, name)(self.module, **given)
        return None

    def facts(self) -> dict[str, Any]:
        trainer: Any = self.trainer
        loop = trainer.fit_loop
        return {
            "metrics": [trainer.callback_metrics, trainer.logged_metrics, trainer.progress_bar_metrics],
            "state": [str(trainer.state), trainer.current_epoch, trainer.global_step, trainer.should_stop],
            "loops": [loop.epoch_progress.state_dict(), loop.epoch_loop.batch_progress.state_dict(), loop.restarting],
            "batches": [trainer.num_training_batches, trainer.num_val_batches, trainer.val_check_batch],
            "callbacks": {c.state_key: c.state_dict() for c in trainer.callbacks},
            "groups": [[(group["lr"], len(group["params"])) for group in o.param_groups] for o in trainer.optimizers],
            "schedulers": [config.scheduler.state_dict() for config in trainer.lr_scheduler_configs],
            "module": [self.module.counts, self.module.best, self.module.lr, self.data.made],
            "frozen": [name for name, p in self.module.named_parameters() if not p.requires_grad],
            "training": [name for name, each in self.module.named_modules() if each.training],
        }

    def run(self) -> dict[str, Any]:
        for number, phase in enumerate(self.case["phases"]):
            self.found.append(comparable([phase, self.do(phase), self.facts()]))
            marker = self.folder.parent / f"done{number}"
            if self.trainer.global_rank == 0:
                marker.touch()
            while not marker.exists():  # the files of the first rank
                time.sleep(0.01)
        strategy, has_failed = self.trainer.strategy, self.trainer.state.status == "interrupted"
        return {
            "found": self.found,
            "calls": self.watcher.calls,
            "given": self.watcher.given,
            "logged": comparable(self.kept.kept),
            "state": {} if has_failed else comparable(dict(strategy.lightning_module_state_dict())),
            "held": {name: comparable(tensor) for name, tensor in held(self.trainer, self.module, with_buffers=True)},
            "random": [digest(random.getstate()), digest(np.random.get_state()), digest(torch.get_rng_state().numpy())],
            "flags": [torch.are_deterministic_algorithms_enabled(), torch.is_anomaly_enabled()],
        }


def run(habit: Habit, configuration: Configuration, folder: Path) -> dict[str, Any]:
    """In place of that of habits: their launches serve here, too."""
    case = json.loads((folder.parents[2] / f"{habit.name}.json").read_text())
    L.seed_everything(case["seed"], verbose=False)
    folder.mkdir(parents=True, exist_ok=True)
    torch.use_deterministic_algorithms(False)
    torch.autograd.set_detect_anomaly(False)
    draws = harness.mixed_alike if configuration.replicas > 1 else stage_runner.mix
    with (
        contextlib.redirect_stdout(io.StringIO()),
        mock.patch.object(partitioner, "print_plan"),
        mock.patch.object(stage_runner, "mix", draws),
    ):
        return Run(case, configuration, folder).run()


def run_cases(names: list[str], text: str, folder: str, patience_s: float) -> None:
    """On each rank: as `run_habits`, for the runs in files of the folder."""
    habits = {name: Habit(name, "options", Classifier) for name in names}
    with mock.patch.multiple(harness, HABITS=habits, load=lambda: habits, run=run):
        harness.run_habits(names, text, folder, patience_s)


def files(folder: Path) -> dict[str, Any]:
    """What was written, by path."""
    read = {
        ".ckpt": lambda path: comparable(torch.load(path, weights_only=False)),
        ".csv": lambda path: path.read_text().splitlines(),
    }
    paths = [path for path in folder.rglob("*") if path.is_file()]
    return {str(path.relative_to(folder)): read.get(path.suffix, lambda path: "")(path) for path in paths}


def stripped(value: Any) -> Any:
    """Without what is another in each run."""
    if isinstance(value, str):
        return ANEW.sub("", value)
    if isinstance(value, dict):
        return {stripped(key): stripped(item) for key, item in value.items() if key not in OWN}
    return [stripped(item) for item in value] if isinstance(value, (list, tuple)) else value


def differences(name: str, text: str, folder: Path) -> list[str]:
    """What another number of processes comes to otherwise, errors included."""
    configuration = Configuration.of(text)
    [expected] = load_records(folder, "1", name, 1)
    records = load_records(folder, text, name, configuration.world)
    failed = [record for record in records if "error" in record]
    if "error" in expected:
        is_told = failed and not any(ENDLESS.search(record["error"]) for record in failed)
        return [] if is_told else [f"{[record['error'] for record in failed]} instead of {expected['error']}"]
    if failed:
        return [f"{record['error']}\n{record['traceback'][-1500:]}" for record in failed]
    told = []
    for rank, record in enumerate(records):
        for part in ("calls",) if configuration.kind == "plain" else expected.keys() - {"seconds"}:
            if part != "state" or rank == 0:
                found, wanted = stripped(record[part]), stripped(expected[part])
                tolerance = 2e-6 if configuration.replicas > 1 else 0.0
                partial = part == "held" and configuration.stages > 1
                told += [f"rank {rank}: {each}" for each in compare(found, wanted, part, tolerance, partial=partial)]
    if configuration.kind != "plain":
        found, wanted = (stripped(files(place_of(folder, each, name) / "files")) for each in (text, "1"))
        told += compare(found, wanted, "files", tolerance)
    return told


def compared(cases: list[dict[str, Any]], texts: Sequence[str], folder: Path) -> Iterator[str]:
    """Run the cases in one process and under the configurations; tells which come to something else."""
    habits = [Habit(f"O{number}", "options", Classifier) for number, _ in enumerate(cases)]
    for habit, case in zip(habits, cases, strict=True):
        (folder / f"{habit.name}.json").write_text(json.dumps(case))
    with mock.patch.object(driver, "run_habits", run_cases):
        for text in ("1", *texts):
            list(run_configuration(habits, text, folder, PATIENCE_S))
            for habit, case in zip(habits, cases, strict=True):
                if found := differences(habit.name, text, folder):
                    yield "\n    ".join([f"{text} {json.dumps(case)}: {len(found)} differences", *found[:6]])


@pytest.mark.slow
@pytest.mark.multiprocess
@pytest.mark.parametrize("configuration", CONFIGURATIONS)
def test_runs_come_to_what_one_process_does(configuration: str, tmp_path: Path) -> None:
    given = os.environ.get("OPTIONS_CASE")
    drawn = [json.loads(given)] if given else [options.draw(seed) for seed in range(FIRST, FIRST + NUMBER)]
    cases = drawn if given else [*FOUND, *drawn]
    told = list(compared(cases, [configuration], tmp_path))
    assert not told, "\n".join(told)
