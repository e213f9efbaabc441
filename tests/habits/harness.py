"""Runs a habit on one rank and gathers what is compared."""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import faulthandler
import hashlib
import io
import logging
import os
import pickle
import random
import re
import time
import traceback
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import lightning as L
import numpy as np
import torch
from lightning.pytorch.loggers import Logger
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor
from torch.distributed.tensor import DTensor

from lightning_pipeline import PipelineStrategy
from lightning_pipeline.partition.batches import microbatches_of
from lightning_pipeline.partition.rng import mix
from lightning_pipeline.partition.stage_map import StageMap, resolve
from lightning_pipeline.partition.users_code import in_hook
from lightning_pipeline.schedules.builders import V_NAMES
from lightning_pipeline.strategy import partitioner, stage_runner
from lightning_pipeline.strategy.partitioner import Partitioner
from tests import on_device
from tests.habits.table import HABITS, Habit, load

NUM_MICROBATCHES = 4
TIMEOUT_S = 12.0
"""How long a stage waits for another. What ends so is a hang."""


@dataclass(frozen=True)
class Configuration:
    """A number of stages under a schedule, written "2-1f1b", or cut automatically, "2-auto"; "1" is one process of
    ours, "plain" is Lightning alone, and "without" is one process of a module that does without the habit.

    "2x2-1f1b-fsdp" are two replicas, which get the same samples, draw the same numbers, and come to what one does.
    In "2-1f1b-reversed" the last rank has the first stage, in "2-auto-reversed" as soon as the module is cut.
    """

    stages: int
    schedule: str = "1f1b"
    kind: str = "stages"
    replicas: int = 1
    data_parallel: str = "replicate"
    is_reversed: bool = False

    @property
    def world(self) -> int:
        """The number of processes."""
        return self.stages * self.replicas

    @classmethod
    def of(cls, text: str) -> Configuration:
        if text in ("1", "plain", "without"):
            return cls(1, kind=text)
        stages, dash, schedule = text.partition("-")
        if "x" in stages:
            stages, _, replicas = stages.partition("x")
            schedule, _, kind = schedule.partition("-")
            return cls(int(stages), schedule, replicas=int(replicas), data_parallel=kind or "replicate")
        schedule, _, order = schedule.partition("-")
        if not dash or not stages.isdigit() or order not in ("", "reversed"):
            raise ValueError(
                f"{text!r} is no configuration: write stages and schedule, such as 2-1f1b or 4-zero_bubble-reversed"
            )
        return cls(int(stages), schedule, is_reversed=bool(order))

    @property
    def parts(self) -> int:
        """Into how many stages a module is cut, with virtual ones."""
        return self.stages * (2 if self.schedule in ("looped_bfs", *V_NAMES) or "interleaved" in self.schedule else 1)


CONFIGURATIONS = ("2-1f1b", "2-interleaved_1f1b", "2-zero_bubble", "3-1f1b", "4-1f1b", "2-auto")


def cuts(chain: Sequence[str], parts: int) -> dict[str, int]:
    """A stage_config that cuts a chain of modules into even parts."""
    assert len(chain) >= parts, f"{len(chain)} modules make no {parts} stages"
    return {chain[stage * len(chain) // parts]: stage for stage in range(1, parts)}


def stage_config(module: Any, parts: int) -> dict[str, int]:
    """What a user would write for a habit's module."""
    config = cuts(module.chain(), parts) | dict.fromkeys(module.on_last_stage, parts - 1)
    return config | {new: config[old] for new, old in module.beside.items() if old in config}


def resolved_reversed(self: Partitioner, config: Mapping[str, Any], has_virtual_stages: bool) -> StageMap:
    """`Partitioner._resolved` with the first stage on the last rank, and so on."""
    stages = {name: int(str(stage).partition("@")[0]) for name, stage in config.items()}  # a plan may name ranks itself
    count = self._num_stages
    config = {name: f"{stage}@{count - 1 - stage % count}" for name, stage in stages.items()}
    return resolve(self._module, config, count, has_virtual_stages=has_virtual_stages)


class Keeping(Logger):
    """A logger that keeps all it is given, on every rank."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: list[Any] = []

    name = "keeping"  # type: ignore[assignment]
    version = 0  # type: ignore[assignment]

    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        self.kept.append((step, dict(metrics)))

    def log_hyperparams(self, *_: Any, **__: Any) -> None:
        pass


class Watcher(L.Callback):
    """Notes what a callback sees."""

    def __init__(self) -> None:
        self.losses: list[Any] = []
        self.gradients: list[dict[str, Any]] = []
        self.outputs: list[Any] = []
        self.metrics: list[Any] = []

    def on_after_backward(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        named = pl_module.named_parameters()
        self.gradients.append({name: comparable(p.grad) for name, p in named if p.grad is not None})

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: Any, outputs: Any, *_: Any) -> None:
        self.losses.append(comparable(outputs))

    def on_validation_batch_end(self, trainer: L.Trainer, pl_module: Any, outputs: Any, *_: Any) -> None:
        self.outputs.append(("validation", comparable(outputs)))

    def on_test_batch_end(self, trainer: L.Trainer, pl_module: Any, outputs: Any, *_: Any) -> None:
        self.outputs.append(("test", comparable(outputs)))

    def on_predict_batch_end(self, trainer: L.Trainer, pl_module: Any, outputs: Any, *_: Any) -> None:
        self.outputs.append(("prediction", comparable(outputs)))

    def on_train_epoch_start(self, trainer: L.Trainer, pl_module: Any) -> None:
        self.metrics.append(comparable(dict(trainer.callback_metrics)))


def held(trainer: L.Trainer, module: L.LightningModule, *, with_buffers: bool = False) -> Iterator[tuple[str, Tensor]]:
    """The parameters that this rank computes with."""
    ownership = getattr(trainer.strategy, "ownership", None)
    for name, tensor in (*module.named_parameters(), *(module.named_buffers() if with_buffers else ())):
        if ownership is None or name not in ownership or ownership.is_local(name):
            yield name, tensor


def run(habit: Habit, configuration: Configuration, folder: Path) -> dict[str, Any]:
    """What came of a habit on this rank."""
    L.seed_everything(1, verbose=False)
    module = (habit.without if configuration.kind == "without" else habit.module)()  # type: ignore[misc]
    is_plain = configuration.kind == "plain"
    if configuration.parts > 1 and configuration.schedule != "auto":
        module.stage_config = stage_config(module, configuration.parts)
    watcher, logger = Watcher(), Keeping()
    options: dict[str, Any] = {
        "max_epochs": habit.epochs,
        "logger": logger,
        "enable_checkpointing": False,
        "accumulate_grad_batches": NUM_MICROBATCHES if is_plain else 1,
        "num_sanity_val_steps": 2 * (NUM_MICROBATCHES if is_plain else 1),
        **habit.trainer_options(folder),
    }
    if configuration.replicas > 1:
        options["use_distributed_sampler"] = False
    trainer = L.Trainer(
        strategy="auto" if is_plain else strategy(configuration),
        devices=configuration.world,
        accelerator="cpu",
        callbacks=[*habit.callbacks(), watcher],
        log_every_n_steps=1,
        enable_model_summary=False,
        default_root_dir=folder,
        **{"enable_progress_bar": False, **options},
    )
    printed = io.StringIO()
    with (
        contextlib.redirect_stdout(printed),
        mock.patch.object(partitioner, "print_plan"),
        mock.patch.object(stage_runner, "mix", mixed_alike if configuration.replicas > 1 else stage_runner.mix),
        mock.patch.object(
            Partitioner, "_resolved", resolved_reversed if configuration.is_reversed else Partitioner._resolved
        ),
    ):
        returned = [call(trainer, module, name, habit, is_plain) for name in habit.calls]
    return {
        "losses": watcher.losses,
        "outputs": watcher.outputs,
        "logged": comparable(logger.kept),
        "callback_metrics": [*watcher.metrics, comparable(dict(trainer.callback_metrics))],
        "progress_bar_metrics": comparable(dict(trainer.progress_bar_metrics)),
        "gradients": watcher.gradients,
        "state": comparable(dict(trainer.strategy.lightning_module_state_dict())),  # the first rank's
        "held": {name: comparable(whole(tensor)) for name, tensor in held(trainer, module, with_buffers=True)},
        "checkpoint": saved(trainer, folder) if "fit" in habit.calls else {},
        "returned": comparable(returned),
        "observed": {name: comparable(attribute(module, name)) for name in habit.observed},
        "printed": printed.getvalue() if habit.prints else "",
        "random": {
            "python": digest(random.getstate()),
            "numpy": digest(np.random.get_state()),
            "torch": digest(torch.get_rng_state().numpy()),
            **{device: digest(state) for device, state in on_device.generator_states().items()},
        },
    }


def whole(tensor: Tensor) -> Tensor:
    """The tensor of which replicas keep slices; any other one itself."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def mixed_alike(seed: int, *numbers: int) -> int:
    """A seed of steps that is the same on all replicas."""
    return seed if len(numbers) == 1 else mix(seed, *numbers)


def digest(state: Any) -> str:
    return hashlib.sha1(pickle.dumps(state)).hexdigest()[:10]


def strategy(configuration: Configuration) -> PipelineStrategy:
    is_automatic = configuration.schedule == "auto"
    return PipelineStrategy(
        num_stages=configuration.stages,
        stage_config="auto" if is_automatic else None,
        num_microbatches=NUM_MICROBATCHES,
        schedule="1f1b" if is_automatic else configuration.schedule,
        timeout=TIMEOUT_S,
        data_parallel=configuration.data_parallel,
    )


def call(trainer: L.Trainer, module: L.LightningModule, name: str, habit: Habit, is_plain: bool) -> Any:
    """`trainer.fit` and the like, on the habit's data; "test:best" tests the best checkpoint, "fit:last" goes on."""
    loaders = {
        "train": loader(module, habit.batches, 1, is_plain),
        "val": loader(module, 2, 2, is_plain),
        "test": loader(module, 2, 3, is_plain),
    }
    own = is_overridden("val_dataloader", module)
    name, _, path = name.partition(":")
    options = {"ckpt_path": path, "weights_only": False} if path else {}
    if name == "fit":
        validates = is_overridden("validation_step", module) and not own
        training = None if is_overridden("train_dataloader", module) else loaders["train"]
        return trainer.fit(module, training, loaders["val"] if validates else None, **options)
    function: Any = {"validate": trainer.validate, "test": trainer.test, "predict": trainer.predict}[name]
    chosen = None if own and name == "validate" else loaders["val" if name == "validate" else "test"]
    return function(module, chosen, **options)


def loader(module: Any, number: int, seed: int, is_plain: bool) -> Any:
    generator = torch.Generator().manual_seed(seed)
    batches = [module.batch(generator) for _ in range(number)]
    if is_plain:
        batches = [part for batch in batches for part in microbatches_of(batch, NUM_MICROBATCHES, module)]
    return torch.utils.data.DataLoader(batches, batch_size=None)


def saved(trainer: L.Trainer, folder: Path) -> Any:
    """What is in a checkpoint beside the weights; on the first rank, which writes it."""
    path = folder / "of_the_harness.ckpt"
    trainer.save_checkpoint(path)
    if trainer.global_rank:
        return None
    found = torch.load(path, weights_only=False)
    path.unlink()
    return without_folder({key: comparable(found[key]) for key in found if key in COMPARED_OF_CHECKPOINT}, str(folder))


def without_folder(value: Any, folder: str) -> Any:
    """The same with paths as they are inside of a folder, which is another one in each run."""
    if isinstance(value, str):
        return value.replace(folder, "")
    if isinstance(value, dict):
        return {without_folder(key, folder): without_folder(item, folder) for key, item in value.items()}
    return [without_folder(item, folder) for item in value] if isinstance(value, list) else value


COMPARED_OF_CHECKPOINT = ("epoch", "global_step", "callbacks", "optimizer_states", "lr_schedulers", "hyper_parameters")


def attribute(module: Any, name: str) -> Any:
    """What an attribute of a module holds; a word where there is none, as in a module without the habit."""
    for part in name.split("."):
        module = module[int(part)] if part.isdigit() else getattr(module, part, "no such attribute")
    return module


def comparable(value: Any) -> Any:
    """A copy in arrays and builtins, which can be kept and compared."""
    if isinstance(value, Tensor):
        if value.is_meta or (isinstance(value, DTensor) and not in_hook.on):  # where this rank has a slice
            return f"a tensor of shape {tuple(value.shape)} without data"
        if value.is_nested or value.layout is not torch.strided:
            value = value.to_padded_tensor(0.0) if value.is_nested else value.to_dense()
        value = value.detach().cpu().resolve_conj().resolve_neg()
        return np.array((value.float() if value.dtype == torch.bfloat16 else value).numpy())
    if isinstance(value, np.ndarray):
        return value.copy()
    if isinstance(value, enum.Enum) or value is None or isinstance(value, (bool, int, float, complex, str, bytes)):
        return value
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {item.name: comparable(getattr(value, item.name)) for item in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {key if isinstance(key, (int, str)) else str(key): comparable(item) for key, item in value.items()}
    if isinstance(value, (set, frozenset)):
        return sorted(comparable(item) for item in value)
    if isinstance(value, Sequence) or hasattr(value, "maxlen"):
        return [comparable(item) for item in value]
    if isinstance(value, np.generic):
        return value.item()
    return re.sub(r" at 0x[0-9a-f]+", "", repr(value))


# -- one launch ------------------------------------------------------------------------------------------------------


def run_habits(names: Sequence[str], text: str, folder: str, patience_s: float) -> None:
    """Run habits one after the other on this rank, each into a file of its own, up to the first that fails.

    A rank that has spent `patience_s` on one writes where it is, and ends.
    """
    load()
    warnings.filterwarnings("ignore")
    for name in ("lightning.pytorch", "lightning_pipeline", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.ERROR)
    configuration, rank = Configuration.of(text), int(os.environ["LOCAL_RANK"])
    for name in names:
        place = place_of(Path(folder), text, name)
        place.mkdir(parents=True, exist_ok=True)
        began = time.monotonic()
        with (place / f"hang{rank}.txt").open("w") as file:
            faulthandler.dump_traceback_later(patience_s, exit=True, file=file)
            try:
                record = run(HABITS[name], configuration, place / "files")
            except BaseException as failure:
                chain = [failure]
                while (cause := chain[-1].__cause__ or chain[-1].__context__) is not None:
                    chain.append(cause)
                record = {
                    "error": f"{type(failure).__name__}: {failure}",
                    "causes": [f"{type(cause).__name__}: {cause}" for cause in chain],
                    "traceback": trace_of(failure),
                }
            finally:
                faulthandler.cancel_dump_traceback_later()
        record["seconds"] = time.monotonic() - began
        unfinished = place / f"rank{rank}.unfinished"
        torch.save(record, unfinished)
        unfinished.rename(place / f"rank{rank}.pt")
        if "error" in record and configuration.world > 1:
            return  # connections are broken


def trace_of(failure: BaseException) -> str:
    """Its traceback without the frames of Lightning, which are always the same."""
    lines = "".join(traceback.format_exception(failure))
    lines = re.sub(r'  File "[^"]*site-packages/lightning/.*\n(    .*\n)*', "", lines)
    return re.sub(r"^[ ~^]+\n", "", lines, flags=re.MULTILINE)


def place_of(folder: Path, configuration: str, name: str) -> Path:
    """Where the records of a habit are."""
    return folder / configuration / name
