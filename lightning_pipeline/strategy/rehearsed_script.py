"""Running a training script up to its `Trainer.fit`, without its parameters' memory and without its devices."""

from __future__ import annotations

import runpy
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from torch import nn

from lightning_pipeline.strategy.pipeline import PipelineStrategy


@dataclass
class Rehearsed:
    """What a script came to `Trainer.fit` with.

    Attributes:
        module: built, with its parameters on the meta device.
        trainer: on the CPU, whatever the script asks for.
        strategy: the script's own, if it is a pipeline.
        loader: what the training batches come from.
    """

    module: pl.LightningModule
    trainer: pl.Trainer
    strategy: PipelineStrategy | None
    loader: Any

    def first_batch(self) -> Any:
        """As the script would get it."""
        loader = self.loader.train_dataloader() if hasattr(self.loader, "train_dataloader") else self.loader
        return next(iter(loader))


class _Fitting(BaseException):
    """Ends the script. No Exception, so that no handler of the script's catches it."""


def rehearse_script(path: Path, arguments: Sequence[str]) -> Rehearsed:
    """Run `path` as ``python path arguments...`` does, until it calls `Trainer.fit`.

    Parameters are moved to the meta device as modules register them, so a model takes no more memory than its largest
    one, and what initialises them afterwards has nothing to do.

    Raises:
        ValueError: the script ends without that call.
    """
    found: list[Rehearsed] = []
    with _in_place_of_the_script(path, arguments), _without_devices(found), _parameters_on_meta():
        try:
            runpy.run_path(str(path), run_name="__main__")
        except _Fitting:
            pass
        except SystemExit as end:
            if end.code not in (None, 0):
                raise ValueError(f"{path} ended with exit code {end.code} before it called Trainer.fit") from None
        if not found:
            raise ValueError(f"{path} ended without a call of Trainer.fit, so there is no step to plan for")
        made = found[0]
        made.module.trainer = made.trainer
        if isinstance(made.loader, pl.LightningDataModule):
            made.loader.trainer = made.trainer
            made.loader.setup("fit")
        made.trainer.strategy.connect(made.module)
        made.module.setup("fit")
        made.module.configure_model()
    return made


@contextmanager
def _in_place_of_the_script(path: Path, arguments: Sequence[str]) -> Iterator[None]:
    before, paths = sys.argv, list(sys.path)
    sys.argv = [str(path), *arguments]
    sys.path.insert(0, str(path.resolve().parent))
    try:
        yield
    finally:
        sys.argv, sys.path[:] = before, paths


@contextmanager
def _without_devices(found: list[Rehearsed]) -> Iterator[None]:
    """Trainers are on one CPU device, and end the script in `fit`."""
    plain_init, plain_fit = pl.Trainer.__init__, pl.Trainer.fit
    strategies: dict[int, Any] = {}

    def init(self: pl.Trainer, *args: Any, **kwargs: Any) -> None:
        strategies[id(self)] = kwargs.get("strategy")
        kwargs.update(accelerator="cpu", devices=1, num_nodes=1, strategy="auto", logger=False, callbacks=None)
        plain_init(self, *args, **{**kwargs, "enable_checkpointing": False, "enable_progress_bar": False})

    def fit(self: pl.Trainer, model: Any, train_dataloaders: Any = None, *args: Any, **kwargs: Any) -> None:
        loader = next((x for x in (kwargs.get("datamodule"), train_dataloaders) if x is not None), model)
        asked = strategies.get(id(self))
        found.append(Rehearsed(model, self, asked if isinstance(asked, PipelineStrategy) else None, loader))
        raise _Fitting

    pl.Trainer.__init__, pl.Trainer.fit = init, fit  # type: ignore[method-assign]
    try:
        yield
    finally:
        pl.Trainer.__init__, pl.Trainer.fit = plain_init, plain_fit  # type: ignore[method-assign]


@contextmanager
def _parameters_on_meta() -> Iterator[None]:
    plain = nn.Module.register_parameter
    meta: dict[int, tuple[nn.Parameter, nn.Parameter]] = {}

    def register(self: nn.Module, name: str, param: nn.Parameter | None) -> None:
        if param is not None and not param.is_meta and not nn.parameter.is_lazy(param):
            if id(param) not in meta:  # one that is tied stays so
                empty = nn.Parameter(torch.empty_like(param, device="meta"), requires_grad=param.requires_grad)
                param.data = param.data.new_empty(0)  # the id must not be given out again, but the memory may
                meta[id(param)] = (param, empty)
            param = meta[id(param)][1]
        plain(self, name, param)

    nn.Module.register_parameter = register  # type: ignore[method-assign]
    try:
        yield
    finally:
        nn.Module.register_parameter = plain  # type: ignore[method-assign]
