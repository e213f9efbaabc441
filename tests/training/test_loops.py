"""Trainer's functions, its options about data, and the user's hooks, as in plain Lightning."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import BasePredictionWriter, EMAWeightAveraging
from lightning.pytorch.utilities import CombinedLoader
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from lightning_pipeline.partition.microbatch import split_batch
from tests.launching import launch
from tests.training.measured import LitLayers, LitMeasured, measured_stages, point_loader, points
from tests.training.runs import Losses, pipeline_trainer, plain_trainer, weights

pytestmark = pytest.mark.multiprocess

WORLD = 2
MORE = {
    "several",
    "predict_first",
    "overfit",
    "averaged",
    "endless",
    "combined",
    "fast_dev_run",
}  # which other files show, or Lightning does alone
MakeTrainer = Callable[..., L.Trainer]
Result = dict[str, Any]


# -- scenarios: each runs on a pipeline and in plain Lightning, to compare ---------------------------------------------


def sequence(make: MakeTrainer) -> Result:
    """fit, validate, test and predict on one Trainer, then fit again on another module."""
    trainer = make(
        max_epochs=1, limit_train_batches=4, limit_val_batches=2, val_check_interval=0.5, inference_mode=False
    )
    result = {
        "fit": fit(trainer, seeded(LitMeasured, scheduler="one_cycle"), point_loader(45), point_loader(21, seed=1))
    }
    module = trainer.lightning_module
    result["validate"] = trainer.validate(module, point_loader(21, seed=2), verbose=False)
    result["test"] = trainer.test(module, point_loader(21, seed=3), verbose=False)
    result["predict"] = trainer.predict(module, point_loader(21, seed=4))
    result["weights"] = weights(trainer)
    trainer.fit_loop.max_epochs = 2
    result["fit more"] = fit(trainer, module, point_loader(45), point_loader(21, seed=1))
    return result


def predict_first(make: MakeTrainer) -> Result:
    """Predictions and tests without a fit; several loaders."""
    writer = Writer()
    trainer = make(callbacks=[writer])
    loaders = [point_loader(13, seed=4), point_loader(9, batch_size=3, seed=5)]
    predictions = trainer.predict(seeded(LitMany), loaders)
    tested = make().test(seeded(LitMany), point_loader(13, seed=4), verbose=False)
    return {"predict": predictions, "test": tested, "written": writer.written}


def endless(make: MakeTrainer) -> Result:
    """An IterableDataset without length, a number of steps, validation between them."""
    trainer = make(max_steps=4, val_check_interval=3, accumulate_grad_batches=2)
    result = fit(trainer, seeded(LitLayers), DataLoader(Endless(), batch_size=8), point_loader(21, seed=1))
    return {**result, "step": trainer.global_step}


def ending(make: MakeTrainer) -> Result:
    """An IterableDataset that ends, so the end is found out by reading."""
    trainer = make(max_epochs=2)
    return {**fit(trainer, seeded(LitLayers), DataLoader(Ending(), batch_size=8)), "step": trainer.global_step}


def several(make: MakeTrainer) -> Result:
    """A dict of training loaders, several validation loaders."""
    loaders = {"a": point_loader(12, batch_size=6), "b": point_loader(9, batch_size=3, seed=7)}
    trainer = make(max_epochs=2)
    return fit(trainer, seeded(LitSplit), loaders, [point_loader(21, seed=1), point_loader(13, seed=2)])


def combined(make: MakeTrainer) -> Result:
    """CombinedLoaders for training and validation."""
    loaders = {"a": point_loader(16), "b": point_loader(24, seed=7)}
    validation = CombinedLoader([point_loader(21, seed=1), point_loader(13, seed=2)], "sequential")
    return fit(make(max_epochs=2), seeded(LitMany), CombinedLoader(loaders, "max_size_cycle"), validation)


def data_module(make: MakeTrainer) -> Result:
    """A LightningDataModule with transfer hooks, reloaded each epoch."""
    data = Data()
    trainer = make(max_epochs=2, reload_dataloaders_every_n_epochs=1)
    module = seeded(LitLayers)
    result = fit(trainer, module, datamodule=data)
    return {**result, "test": trainer.test(module, datamodule=data, verbose=False), "called": data.called}


def overfit(make: MakeTrainer) -> Result:
    trainer = make(max_epochs=2, overfit_batches=2)
    return fit(trainer, seeded(LitLayers), point_loader(45), point_loader(21, seed=1))


def averaged(make: MakeTrainer) -> Result:
    """Averaged weights, the module's own clipping, and a loader that reads in another process."""
    trainer = make(max_epochs=2, callbacks=[EMAWeightAveraging(decay=0.5)])
    loader = DataLoader(points(21), batch_size=8, num_workers=1)
    return fit(trainer, seeded(LitClipping), loader, point_loader(21, seed=1))


def fast_dev_run(make: MakeTrainer) -> Result:
    return fit(make(fast_dev_run=2), seeded(LitLayers), point_loader(45), point_loader(21, seed=1))


def hooks(make: MakeTrainer) -> Result:
    """What the module's hooks see, in the order of their calls."""
    module = seeded(LitHooks)
    result = fit(make(max_epochs=1, accumulate_grad_batches=2, gradient_clip_val=0.1), module, point_loader(29))
    return {**result, "calls": module.calls, "seen": module.seen}


SCENARIOS: dict[str, Callable[[MakeTrainer], Result]] = {
    scenario.__name__: scenario
    for scenario in (
        sequence,
        predict_first,
        endless,
        ending,
        several,
        combined,
        data_module,
        overfit,
        averaged,
        fast_dev_run,
        hooks,
    )
}


# -- their modules and data --------------------------------------------------------------------------------------------


class LitMany(LitLayers):
    """Takes a dict of batches, and tells loaders apart."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        logits = self(torch.cat([x for x, _ in batch.values()]))
        parts = logits.split([len(x) for x, _ in batch.values()])
        losses = {key: F.cross_entropy(part, batch[key][1]) for key, part in zip(batch, parts, strict=True)}
        self.log_dict({f"losses/{key}": loss for key, loss in losses.items()}, on_epoch=True)
        return sum(losses.values())

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        loss = F.cross_entropy(self(batch[0]), batch[1])
        self.log(f"named_{dataloader_idx}", loss, add_dataloader_idx=False)
        self.log("val_loss", loss)

    def predict_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
        return {"logits": self(batch[0]), "loader": dataloader_idx, "labels": batch[1].tolist()}


class LitSplit(LitMany):
    """Its dict of batches has entries of different batch sizes."""

    def split_batch(self, batch: Any, num_microbatches: int) -> Any:
        """Micro-batches of dicts whose entries differ in batch size; other batches are split as ever."""
        if not isinstance(batch, dict):
            return split_batch(batch, num_microbatches)
        parts = [split_batch(value, num_microbatches) for value in batch.values()]
        return [dict(zip(batch, values, strict=True)) for values in zip(*parts, strict=True)]


class LitClipping(LitLayers):
    """Clips by itself."""

    def configure_gradient_clipping(self, optimizer: Any, *args: Any, **kwargs: Any) -> None:
        self.clip_gradients(optimizer, gradient_clip_val=0.1, gradient_clip_algorithm="norm")


class Writer(BasePredictionWriter):
    """Notes which samples it would write."""

    def __init__(self) -> None:
        super().__init__("batch")
        self.written: list[tuple[list[int], int]] = []

    def write_on_batch_end(
        self, trainer: Any, pl_module: Any, prediction: Any, batch_indices: Any, batch: Any, *numbers: int
    ) -> None:
        self.written.append((list(batch_indices), len(prediction["logits"])))


class LitHooks(LitLayers):
    """Notes the calls of its hooks, and what the local parameters' gradients are in them."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[str] = []
        self.seen: list[tuple[str, dict[str, float]]] = []

    def note(self, name: str) -> None:
        self.calls.append(name)
        gradients = {n: float(p.grad.norm()) for n, p in self.named_parameters() if p.grad is not None}
        self.seen.append((name, gradients))

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.note("on_train_batch_start")

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.note("on_train_batch_end")

    def on_before_zero_grad(self, optimizer: Any) -> None:
        self.note("on_before_zero_grad")

    def on_before_backward(self, loss: Tensor) -> None:
        self.note("on_before_backward")

    def on_after_backward(self) -> None:
        self.note("on_after_backward")

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.note("on_before_optimizer_step")

    def optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        self.note("optimizer_step")
        super().optimizer_step(*args, **kwargs)
        self.note("optimizer_step ends")


class Data(L.LightningDataModule):
    """Batches that its transfer hooks change; notes the hooks that ran, which read weights of all stages."""

    def __init__(self) -> None:
        super().__init__()
        self.called: list[str] = []

    def note(self, hook: str) -> None:
        assert all(parameter.norm() > 0 for parameter in self.trainer.lightning_module.parameters())
        self.called.append(hook)

    def train_dataloader(self) -> DataLoader:
        self.note("train")
        return point_loader(21, seed=self.trainer.current_epoch)

    def val_dataloader(self) -> DataLoader:
        return point_loader(21, seed=11)

    def test_dataloader(self) -> DataLoader:
        return point_loader(21, seed=12)

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        self.note("before")
        return [batch[0] + 1, batch[1]]

    def transfer_batch_to_device(self, batch: Any, device: torch.device, dataloader_idx: int) -> Any:
        self.note("transfer")
        return super().transfer_batch_to_device(batch, device, dataloader_idx)

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        self.note("after")
        return [batch[0] * 2, batch[1]]


class Endless(IterableDataset):
    def __iter__(self) -> Iterator[Any]:
        while True:
            yield from points(24)


class Ending(IterableDataset):
    def __iter__(self) -> Iterator[Any]:
        yield from points(21)


# -- running them ------------------------------------------------------------------------------------------------------


def seeded(module: type[L.LightningModule], **arguments: Any) -> Any:
    """The same module on every rank and in every run."""
    L.seed_everything(5, verbose=False)
    return module(**arguments)


def fit(trainer: L.Trainer, module: L.LightningModule, *data: Any, **named: Any) -> Result:
    losses = Losses()
    trainer.callbacks.append(losses)
    trainer.fit(module, *data, **named)
    trainer.callbacks.remove(losses)
    metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
    return {"losses": losses.values, "metrics": metrics}


def run(world: int, names: list[str]) -> dict[str, Result]:
    def make(**options: Any) -> L.Trainer:
        strategy = {"num_microbatches": 3}  # not all are of the same size
        return pipeline_trainer(measured_stages(WORLD), world=WORLD, strategy=strategy, **options)

    return {name: SCENARIOS[name](plain_trainer if world == 1 else make) for name in names}


@pytest.fixture(scope="module")
def names(wanted: Any) -> list[str]:
    return wanted(SCENARIOS, MORE, "name")


@pytest.fixture(scope="module")
def plain(names: list[str]) -> dict[str, Result]:
    return launch(run, 1, names, world=1)[0]


@pytest.fixture(scope="module")
def ranks(names: list[str]) -> list[dict[str, Result]]:
    return launch(run, WORLD, names, world=WORLD)


def close(found: Any, expected: Any) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5, equal_nan=True)


def compare_losses_and_metrics(found: Result, expected: Result) -> None:
    assert len(expected["losses"]) > 0
    close(found["losses"], expected["losses"])
    # The standard deviation over a micro-batch is another number than that over a batch.
    close(*({n: value for n, value in r["metrics"].items() if n != "logits/std"} for r in (found, expected)))
    assert found.get("step") == expected.get("step")


@pytest.mark.parametrize(
    "name",
    [
        *("ending", "data_module", "hooks"),
        *(pytest.param(name, marks=pytest.mark.slow) for name in sorted(MORE - {"predict_first"})),
    ],
)
def test_losses_and_metrics_are_those_of_plain_lightning(name: str, plain: Any, ranks: Any) -> None:
    for rank in ranks:
        compare_losses_and_metrics(rank[name], plain[name])


def test_all_functions_in_sequence_give_what_plain_lightning_gives(plain: Any, ranks: Any) -> None:
    expected = plain["sequence"]
    for rank in ranks:
        found = rank["sequence"]
        for name in ("fit", "fit more"):
            compare_losses_and_metrics(found[name], expected[name])
        for name in ("validate", "test", "predict"):
            close(found[name], expected[name])
    close(ranks[0]["sequence"]["weights"], expected["weights"])
    assert len(expected["predict"]) == 3 and len(expected["fit more"]["losses"]) == 4


@pytest.mark.slow
@pytest.mark.parametrize("name", ["predict_first"])
def test_predictions_are_in_the_samples_order(name: str, plain: Any, ranks: Any) -> None:
    for rank in ranks:
        close(rank[name], plain[name])
    first, second = ranks[0][name]["predict"]
    assert [label for batch in first for label in batch["labels"]] == points(13, seed=4).tensors[1].tolist()
    assert [label for batch in second for label in batch["labels"]] == points(9, seed=5).tensors[1].tolist()


def test_transfer_hooks_run_on_every_rank(plain: Any, ranks: Any) -> None:
    assert {"train", "before", "transfer", "after"} == set(plain["data_module"]["called"])
    for rank in ranks:
        assert rank["data_module"]["called"] == plain["data_module"]["called"]
        close(rank["data_module"]["test"], plain["data_module"]["test"])


def test_hooks_run_in_lightnings_order_and_see_gradients(plain: Any, ranks: Any) -> None:
    for rank in ranks:
        assert rank["hooks"]["calls"] == plain["hooks"]["calls"]
    for index, (name, expected) in enumerate(plain["hooks"]["seen"]):
        if name == "on_before_backward":  # the schedule has run the backwards by then
            continue
        seen: dict[str, float] = {}
        for rank in ranks:
            seen.update(rank["hooks"]["seen"][index][1])
        assert seen.keys() == expected.keys(), name
        close(seen, expected)
    assert all(seen for name, seen in plain["hooks"]["seen"] if name in ("on_after_backward", "optimizer_step ends"))
