"""predict, test and validate on a pipeline: what one process gives, to the bit, whatever the batch size and the cut."""

from __future__ import annotations

import pickle
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import lightning as L
import numpy as np
import pytest
import torch
from lightning.pytorch.callbacks import BasePredictionWriter, Callback
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics import SumMetric
from transformers.modeling_outputs import CausalLMOutput

from lightning_pipeline import PipelineStrategy
from lightning_pipeline.partition.batches import ListsOfSamples, microbatches_of
from lightning_pipeline.partition.microbatch import split_batch
from lightning_pipeline.strategy.outputs import combine
from tests.launching import PATIENCE_S, launch
from tests.training.runs import QUIET, pipeline_trainer, plain_trainer

pytestmark = pytest.mark.multiprocess

BATCH_SIZES = (1, 3, 7)  # a loader of each, over 8 samples: all but the first end in a smaller batch
NUM_SAMPLES = 8
NUM_LAYERS = 4
WIDTH = 5
MakeTrainer = Callable[..., L.Trainer]
Result = dict[str, Any]


class Pair(NamedTuple):
    hidden: Tensor
    ids: Tensor


@dataclass
class Answer:
    hidden: Tensor
    names: list[str]
    threshold: float


class Begun:
    """How many micro-batches the stages have begun: the last stage's wait until the first has begun a later one.

    So they can end only if stages work at once.
    """

    def __init__(self, path: Path, *, is_last: bool, total: int) -> None:
        path.touch()
        self.path, self.is_last, self.total = path, is_last, total
        self.own = 0

    def note(self) -> None:
        self.own += 1
        if not self.is_last:
            with self.path.open("ab") as file:
                file.write(b".")
            return
        deadline = time.monotonic() + PATIENCE_S
        while self.path.stat().st_size < min(self.own + 1, self.total):
            assert time.monotonic() < deadline, f"micro-batch {self.own} ran, and the first stage began no later one"
            time.sleep(0.001)


class Work:
    """What the operation below does on this rank."""

    begun: Begun | None = None
    most_alive = 0
    alive: list[StorageWeakRef] = []


@torch.library.custom_op("tests::tanh_more", mutates_args=())
def tanh_more(x: Tensor, weight: Tensor) -> Tensor:
    if Work.begun is not None:
        Work.begun.note()
    y = torch.tanh(x * weight) + x
    Work.alive = [ref for ref in Work.alive if not ref.expired()] + [StorageWeakRef(y.untyped_storage())]
    Work.most_alive = max(Work.most_alive, len(Work.alive))
    return y


@tanh_more.register_fake
def _(x: Tensor, weight: Tensor) -> Tensor:
    return torch.empty_like(x)


class Rows(nn.Module):
    """Works on each sample by itself, with the same kernels for any number of them."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x * self.weight) + x if self.training else tanh_more(x, self.weight)


class LitRows(L.LightningModule):
    """Its outputs are of all kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Rows() for _ in range(NUM_LAYERS))
        self.total, self.seen = SumMetric(), SumMetric()

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self(batch[0]).square().mean()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        x, ids = batch
        hidden = self(x)
        self.total.update((hidden > 0).sum())
        self.seen.update(ids)
        self.log_dict({"total": self.total, "ids": self.seen, "mean": hidden.mean()})
        self.log("largest", hidden.max(), on_epoch=True, reduce_fx="max")

    test_step = validation_step

    def predict_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
        x, ids = batch
        hidden = self(x)
        names = [f"sample {number}" for number in ids.tolist()]
        return {
            "hidden": hidden,
            "ids": ids,
            "names": names,
            "rows": list(hidden[:, :3]),
            "tuple": (hidden, {"ids": ids, "none": None}),
            "pair": Pair(hidden, ids),
            "answer": Answer(hidden > 0, names, 0.1),
            "array": hidden.numpy() * 2,
            "by name": dict(zip(names, hidden, strict=True)),
            "weight": self.layers[-1].weight.detach(),
            "constants": ("text", 7, None, dataloader_idx),
        }

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.1)


class LitPair(LitRows):
    """One layer on each of two stages, and an output alone."""

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers[:: NUM_LAYERS // 2]:
            x = layer(x)
        return x

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self(batch[0])


class Writer(BasePredictionWriter):
    """Notes what it would write."""

    def __init__(self) -> None:
        super().__init__("batch_and_epoch")
        self.batches: list[Any] = []
        self.epochs: list[Any] = []

    def write_on_batch_end(
        self, trainer: Any, pl_module: Any, prediction: Any, batch_indices: Any, batch: Any, *numbers: int
    ) -> None:
        ids = prediction if prediction is None else prediction["ids"].tolist()
        self.batches.append((numbers, ids, list(batch_indices)))

    def write_on_epoch_end(self, trainer: Any, pl_module: Any, predictions: Any, batch_indices: Any) -> None:
        ids = [[output and output["ids"].tolist() for output in outputs] for outputs in predictions]
        self.epochs.append((ids, [[list(batch) for batch in batches] for batches in batch_indices]))


def cut(num_stages: int) -> dict[str, int]:
    return {f"layers.{stage * NUM_LAYERS // num_stages}": stage for stage in range(1, num_stages)}


def seeded(module: type[LitRows] = LitRows) -> LitRows:
    L.seed_everything(3, verbose=False)
    return module()


def samples() -> TensorDataset:
    generator = torch.Generator().manual_seed(0)
    return TensorDataset(torch.randn(NUM_SAMPLES, WIDTH, generator=generator), torch.arange(NUM_SAMPLES))


def loaders() -> list[DataLoader]:
    return [DataLoader(samples(), batch_size=size) for size in BATCH_SIZES]


# -- what runs in the processes ---------------------------------------------------------------------------------------


def predictions(make: MakeTrainer) -> Any:
    return make().predict(seeded(), loaders())


def evaluations(make: MakeTrainer) -> list[Any]:
    found = []
    for loader in loaders():
        trainer = make()
        found += trainer.validate(seeded(), loader, verbose=False) + trainer.test(seeded(), loader, verbose=False)
    return found


def written(make: MakeTrainer) -> Result:
    """What prediction writers get, where nothing is returned."""
    writer = Writer()
    returned = make(callbacks=[writer]).predict(seeded(), loaders(), return_predictions=False)
    assert writer.write_on_batch_end.__func__ is Writer.write_on_batch_end  # whatever happened to it in the run
    return {"returned": returned, "batches": writer.batches, "epochs": writer.epochs}


def loaded(make: MakeTrainer, path: str) -> Any:
    return make().predict(seeded(), loaders()[-1:], ckpt_path=path)


def after_fit(make: MakeTrainer, path: str) -> Any:
    """Predictions of a trained module, which is saved as well."""
    trainer = make(max_epochs=1)
    trainer.fit(seeded(), loaders()[1])
    trainer.save_checkpoint(path)
    return trainer.predict(trainer.lightning_module, loaders()[-1:])


def most_alive(make: MakeTrainer) -> int:
    """Of all layers' outputs, how many were there at once."""
    Work.most_alive, Work.alive = 0, []
    make(inference_mode=False).predict(seeded(), DataLoader(samples(), batch_size=NUM_SAMPLES))
    return Work.most_alive


def at_once(make: MakeTrainer, path: str) -> tuple[int, list[Tensor]]:
    """How many micro-batches this stage has begun, and what the last one gives."""
    data = DataLoader(TensorDataset(torch.ones(32, WIDTH)), batch_size=8)

    class FromSecondBatch(Callback):
        """The first one is cut as it runs, one stage after the other."""

        def on_predict_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int, *_: Any) -> None:
            if batch_idx == 1:
                Work.begun = Begun(Path(path), is_last=trainer.global_rank == 1, total=(len(data) - 1) * 8)

    predictions = make(callbacks=[FromSecondBatch()]).predict(seeded(LitPair), data)
    assert Work.begun is not None
    return Work.begun.own, predictions


def run_one(path: str) -> Result:
    def one_stage(num_microbatches: int) -> MakeTrainer:
        return lambda **options: pipeline_trainer(
            {}, world=1, strategy={"num_microbatches": num_microbatches}, **options
        )

    return {
        "plain": predictions(plain_trainer),
        "one stage": [predictions(one_stage(count)) for count in (4, 8)],
        "plain evaluations": evaluations(plain_trainer),
        "evaluations": {count: evaluations(one_stage(count)) for count in (4, 8)},
        "written": written(plain_trainer),
        "loaded": loaded(plain_trainer, path),
    }


def run_two(path: str, with_slow: bool) -> Result:
    def make(stage_config: dict[str, int] = cut(2), strategy: Any = None, **options: Any) -> L.Trainer:  # noqa: B008
        return pipeline_trainer(stage_config, world=2, strategy=strategy, **options)

    def kept(**options: Any) -> L.Trainer:
        return make(strategy={"output_broadcast": False, "num_microbatches": 8}, **options)

    def virtual(schedule: str) -> MakeTrainer:
        return lambda **options: make(cut(4), {"schedule": schedule, "num_microbatches": 4}, **options)

    return {
        "predictions": [predictions(make), predictions(virtual("zbv"))],
        "evaluations": [evaluations(make), *([evaluations(virtual("zbv"))] if with_slow else ())],
        "kept": predictions(kept),
        "written": written(make),
        "kept written": written(kept),
        "after fit": after_fit(make, path),
        "loaded": loaded(make, path),
        "most alive": most_alive(kept),
        "at once": at_once(kept, f"{path}.begun"),
    }


def run_four() -> Result:
    def make(**options: Any) -> L.Trainer:
        return pipeline_trainer(cut(4), world=4, strategy={"num_microbatches": 8}, **options)

    def replicas(**options: Any) -> L.Trainer:
        strategy = PipelineStrategy(
            stage_config=cut(2), num_stages=2, num_microbatches=4, output_broadcast=False, timeout=PATIENCE_S
        )
        return L.Trainer(strategy=strategy, devices=4, **{**QUIET, **options})

    return {"predictions": predictions(make), "evaluations": evaluations(make), "written": written(replicas)}


# -- tests ------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tmp_path_factory.mktemp("inference") / "trained.ckpt")


@pytest.fixture(scope="module")
def two(path: str, with_slow: bool) -> list[Result]:
    return launch(run_two, path, with_slow, world=2)


@pytest.fixture(scope="module")
def one(path: str, two: Any) -> Result:
    return launch(run_one, path, world=1)[0]


@pytest.fixture(scope="module")
def four() -> list[Result]:
    return launch(run_four, world=4)


def difference(found: Any, expected: Any, where: str = "") -> str:
    """Where two nested values differ in a bit, a type or an entry."""
    if isinstance(expected, Answer):
        found, expected = (vars(value) if isinstance(value, Answer) else value for value in (found, expected))
    if type(found) is not type(expected):
        return f"{where} is {type(found).__name__}, not {type(expected).__name__}"
    if isinstance(expected, Tensor):
        return "" if found.dtype == expected.dtype and torch.equal(found, expected) else f"{where}: {found}, {expected}"
    if isinstance(expected, np.ndarray):
        return "" if np.array_equal(found, expected) else f"{where}: {found}, {expected}"
    if isinstance(expected, dict):
        if list(found) != list(expected):
            return f"{where} has {list(found)}, not {list(expected)}"
        found, expected = list(found.values()), list(expected.values())
    if isinstance(expected, (list, tuple)):
        if len(found) != len(expected):
            return f"{where} has {len(found)} entries, not {len(expected)}"
        pairs = enumerate(zip(found, expected, strict=True))
        return next(filter(None, (difference(*values, f"{where}[{index}]") for index, values in pairs)), "")
    return "" if found == expected else f"{where}: {found!r}, not {expected!r}"


def test_predictions_are_those_of_plain_lightning_to_the_bit(one: Any, two: Any) -> None:
    found = one["one stage"] + [run for rank in two for run in rank["predictions"]]
    assert len(one["plain"]) == len(BATCH_SIZES) and len(one["plain"][2]) == 2
    for run in (*found, two[-1]["kept"]):
        assert not difference(run, one["plain"])


@pytest.mark.slow
def test_predictions_on_four_ranks_are_too(one: Any, four: Any) -> None:
    for rank in four:
        assert not difference(rank["predictions"], one["plain"])


def test_predictions_stay_on_the_last_stage_when_asked(two: Any) -> None:
    assert [set(outputs) for outputs in two[0]["kept"]] == [{None}] * len(BATCH_SIZES)


def test_metrics_are_those_of_one_process(one: Any, two: Any) -> None:
    assert all(run == one["evaluations"][4] for rank in two for run in rank["evaluations"])
    for count in (4, 8):
        for found, expected in zip(one["evaluations"][count], one["plain evaluations"], strict=True):
            for name in ("total", "ids", "largest"):
                assert found[name] == expected[name]
            assert found["mean"] == pytest.approx(expected["mean"], rel=1e-5)  # of means over micro-batches


@pytest.mark.slow
def test_metrics_on_four_ranks_are_too(one: Any, four: Any) -> None:
    assert all(rank["evaluations"] == one["evaluations"][8] for rank in four)


def test_writers_get_every_sample_with_its_number(one: Any, two: Any) -> None:
    expected = one["written"]
    given = [number for _, ids, numbers in expected["batches"] for number in numbers]
    assert given == list(range(NUM_SAMPLES)) * len(BATCH_SIZES)
    for found in (two[0]["written"], two[1]["written"], two[1]["kept written"]):
        assert found == expected and found["returned"] is None
    nothing = {"returned": None, "batches": [], "epochs": []}
    assert two[0]["kept written"] == nothing  # the predictions are on the other rank


@pytest.mark.slow
def test_writers_of_replicas_get_what_the_sampler_gave_them(four: Any) -> None:
    # Ranks 0 and 1 are the first stage's replicas, 2 and 3 the last one's.
    for replica in (0, 1):
        assert not four[replica]["written"]["batches"]
        found = four[2 + replica]["written"]
        for loader, size in enumerate(BATCH_SIZES):
            batches = [(ids, numbers) for place, ids, numbers in found["batches"] if place[1] == loader]
            assert [number for _, numbers in batches for number in numbers] == list(range(NUM_SAMPLES))[replica::2]
            assert all(ids == numbers and len(ids) <= size for ids, numbers in batches)
        [(ids, numbers)] = found["epochs"]
        assert ids == numbers


def test_a_trained_module_predicts_the_same_from_its_checkpoint_in_one_process(one: Any, two: Any) -> None:
    for rank in two:
        assert not difference(rank["after fit"], one["loaded"])
        assert not difference(rank["loaded"], one["loaded"])
    assert difference(one["loaded"], one["plain"][-1])


def test_no_activations_are_kept(two: Any) -> None:
    first, last = (rank["most alive"] for rank in two)  # of 4 layers and 8 micro-batches, of which the last has outputs
    assert 0 < first <= 4 and 0 < last <= 4 + 8


def test_stages_work_at_once_and_go_on_with_the_next_batch(two: Any) -> None:
    # The last stage waits in each micro-batch, that of a batch's end included, until the first has begun the next one.
    (first, _), (last, predictions) = (rank["at once"] for rank in two)
    assert first == last == 3 * 8
    assert [len(batch) for batch in predictions] == [8] * 4


# -- putting outputs together -----------------------------------------------------------------------------------------


def test_samples_along_another_dimension_are_concatenated_along_it() -> None:
    whole = torch.arange(12.0).reshape(3, 4)
    assert torch.equal(combine(list(whole.split(2, dim=1)), [2, 2]), whole)
    assert torch.equal(combine(list(whole.split([3, 1], dim=1)), [3, 1]), whole)


def test_numbers_of_each_sample_join_and_fractions_are_averaged() -> None:
    assert combine([[3, 1], [4]], [2, 1]) == [3, 1, 4]
    assert combine([1.0, 4.0], [2, 1]) == 2.0
    assert combine([0.1, 0.1, 0.1], [2, 2, 1]) == 0.1
    assert combine([None, {"a": torch.ones(1)}], [1, 1]) == {"a": torch.ones(1)}


def test_a_tuple_of_different_things_has_no_entry_for_each_sample() -> None:
    loss, logits = torch.ones(()), torch.ones(2, 4)
    whole = combine([(loss, logits), (3 * loss, logits)], [2, 2])
    assert whole[0] == 2 and whole[1].shape == (4, 4)
    names = combine([(logits, ["a", "b"]), (logits, ["c", "d"])], [2, 2])
    assert names[0].shape == (4, 4) and names[1] == ["a", "b", "c", "d"]
    assert combine([[{"box": 1}, {"box": 2}], [None, {"box": 4}]], [2, 2]) == [{"box": 1}, {"box": 2}, None, {"box": 4}]


def test_single_samples_are_found_along_any_dimension() -> None:
    whole = torch.arange(24.0).reshape(3, 4, 2)
    assert torch.equal(combine(list(whole.split(1, dim=1)), [1] * 4), whole)


def test_outputs_of_unknown_numbers_of_samples_are_not_averaged() -> None:
    parts = [torch.ones(2, 4), torch.zeros(2, 4)]
    assert torch.equal(combine(parts, [0, 0]), torch.cat(parts))
    assert combine([[{"box": 1}, {"box": 2}], [{"box": 3}, {"box": 4}]], [0, 0]) == [{"box": i} for i in (1, 2, 3, 4)]
    assert combine([{"loss": 1.0}, {"loss": 2.0}], [0, 0]) == {"loss": 1.5}


def test_samples_in_lists_that_the_module_splits_are_counted() -> None:
    class Split(nn.Module):
        def split_batch(self, batch: list[int], num_microbatches: int) -> list[list[int]]:
            return [batch[:3], batch[3:]]

    assert type(microbatches_of([1, 2, 3, 4], 2, Split())) is ListsOfSamples


def test_texts_and_labels_are_two_fields() -> None:
    parts = split_batch((["a", "b", "c", "d"], [1, 2, 3, 4]), 2)
    assert parts == [(["a", "b"], [1, 2]), (["c", "d"], [3, 4])]
    assert split_batch([("a", "b"), ("x", "y")], 2) == [[("a",), ("x",)], [("b",), ("y",)]]
    assert split_batch([[1, 2], [3, 4]], 2) == [[[1, 2]], [[3, 4]]]  # tokens of two samples


def test_outputs_of_hugging_face_models_join() -> None:
    parts = [CausalLMOutput(logits=torch.ones(n, 3), hidden_states=(torch.ones(n, 1),) * 2) for n in (2, 1)]
    whole = pickle.loads(pickle.dumps(combine(parts, [2, 1])))
    assert type(whole) is CausalLMOutput and whole.keys() == parts[0].keys()
    assert whole.logits.shape == (3, 3) and whole.hidden_states[1].shape == (3, 1)


def test_what_cannot_be_put_together_is_refused_or_told() -> None:
    with pytest.raises(ValueError, match="returned a generator for each of its 2 micro-batches"):
        combine([(x for x in ()), (x for x in ())], [1, 1])
    with pytest.raises(ValueError, match="returned a Normal"):
        combine([torch.distributions.Normal(torch.zeros(2), 1.0)] * 2, [2, 2])
    with pytest.raises(ValueError, match="the same keys for each"):
        combine([{"a": 1, "b": 2}, {"b": 3}], [1, 1])
    with pytest.raises(ValueError, match="pad them in the step"):
        combine([torch.ones(2, 3), torch.ones(2, 4)], [2, 2])
    with pytest.warns(UserWarning, match="a int that differs from micro-batch to micro-batch"):
        assert combine([3, 2], [3, 2]) == 3
