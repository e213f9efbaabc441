"""Manual optimization: what comes of it is what plain Lightning makes of the whole batches, but for rounding."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor

from lightning_pipeline import PipelineStrategy
from tests.habits import by_hand, generated
from tests.habits.modules import Layers
from tests.habits.once_a_batch import ON_WHOLE_BATCHES
from tests.launching import PATIENCE_S, launch
from tests.training import gan_script, ppo_script
from tests.training.runs import QUIET

pytestmark = pytest.mark.multiprocess


def flipped(module: by_hand.Adversarial, x: Tensor) -> Tensor:
    """No random numbers, which a whole batch draws otherwise."""
    return x.flip(1)


TOGGLING = type("Toggling", (by_hand.GANWithToggles,), {"noise": flipped})
ONE_FORWARD = type("OneForward", (by_hand.GANWithOneForward,), {"noise": flipped})


MODULES = (
    by_hand.ReturnsItsLoss,
    by_hand.AccumulatesByHand,
    by_hand.StepsItsScheduler,
    by_hand.StepsWithAClosure,
    by_hand.ClipsByTorch,
    by_hand.CallsTorchsBackward,
    by_hand.OverridesManualBackward,
    by_hand.StepsTorchsOptimizer,
    by_hand.TwiceABatch,
    by_hand.RetainsTheGraph,
    by_hand.KeepsDetachedValues,
    TOGGLING,
    ONE_FORWARD,
    *ON_WHOLE_BATCHES,
)


def trained(
    module: type[Layers], strategy: Any, folder: Path, devices: int = 1
) -> tuple[dict[str, Tensor], dict[str, Tensor], int]:
    """The weights after training, what was logged, and how many optimizer steps Lightning has counted."""
    L.seed_everything(1, verbose=False)
    generator = torch.Generator().manual_seed(2)
    loader = torch.utils.data.DataLoader([module.batch(generator) for _ in range(4)], batch_size=None)
    trainer = L.Trainer(strategy=strategy, devices=devices, max_epochs=2, default_root_dir=folder, **QUIET)
    made = module()
    trainer.fit(made, loader)
    return dict(made.state_dict()), dict(trainer.callback_metrics), trainer.global_step


def all_trained(folder: Path) -> dict[str, list[Any]]:
    """By module, with one stage and by plain Lightning."""
    strategies = (lambda: PipelineStrategy(num_stages=1, num_microbatches=4), lambda: "auto")
    return {module.__name__: [trained(module, make(), folder) for make in strategies] for module in MODULES}


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Any]]:
    return launch(all_trained, tmp_path_factory.mktemp("run"), world=1)[0]


@pytest.mark.parametrize("module", MODULES, ids=lambda module: module.__name__)
def test_micro_batches_come_to_what_the_batch_does(module: type[Layers], found: dict[str, list[Any]]) -> None:
    (weights, logged, steps), (expected, expected_logged, expected_steps) = found[module.__name__]
    assert steps == expected_steps
    assert logged.keys() == expected_logged.keys()
    torch.testing.assert_close(weights, expected)
    torch.testing.assert_close(logged, expected_logged)


def often(first: type[Layers], *others: type[Layers]) -> list[Any]:
    """Modules, all but the first of which are slow."""
    slow = [pytest.param(module, id=module.__name__, marks=pytest.mark.slow) for module in others]
    return [pytest.param(first, id=first.__name__), *slow]


# -- whole scripts --------------------------------------------------------------------------------------------------

SCRIPTS: dict[str, Any] = {"GAN": gan_script, "PPO": ppo_script}


def scripts_run(stages: int, left_out: Collection[str]) -> dict[tuple[str, str], Any]:
    """What each script gives on so many stages, by where it is cut."""
    options = {key: value for key, value in QUIET.items() if key != "accelerator"}
    return {
        (name, cut): script.main(stages, cut, **options)
        for name, script in SCRIPTS.items()
        for cut, begins in script.CUTS.items()
        if max(begins.values(), default=0) == stages - 1 and cut not in left_out
    }


@pytest.mark.parametrize("stages", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_scripts_give_the_same_wherever_they_are_cut(stages: int, with_slow: bool) -> None:
    left_out = () if with_slow else {"between the two"}  # the cut that is easiest
    [alone] = launch(scripts_run, 1, (), world=1)
    for rank in launch(scripts_run, stages, left_out, world=stages):
        assert len(rank) >= 2
        for (name, cut), found in rank.items():
            torch.testing.assert_close(found, alone[name, "one"], rtol=0, atol=0, msg=f"{name}, {cut}")
    assert len(alone["GAN", "one"]["images"]) == 2


# -- automatic cuts -------------------------------------------------------------------------------------------------


class CallsBackward(by_hand.ByHand):
    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.loss(batch).backward()
        optimizer.step()


def cut_by_itself(module: type[Layers], folder: Path, stages: int) -> dict[str, Tensor]:
    """The weights, where nothing says how the module is cut."""
    strategy = PipelineStrategy(num_stages=stages, num_microbatches=4, timeout=PATIENCE_S)
    return trained(module, strategy, folder, devices=stages)[0]


@pytest.mark.slow
@pytest.mark.parametrize("module", [by_hand.AccumulatesByHand, CallsBackward, by_hand.OverridesManualBackward])
def test_the_automatic_cut_measures_steps_by_hand(module: type[Layers], tmp_path: Path) -> None:
    [alone] = launch(cut_by_itself, module, tmp_path, 1, world=1)
    for rank in launch(cut_by_itself, module, tmp_path, 2, world=2):
        torch.testing.assert_close(rank, alone, rtol=0, atol=0)


# -- replicas -------------------------------------------------------------------------------------------------------

LAYOUTS: dict[str, dict[str, Any]] = {
    "whole": {},
    "zero1": {"data_parallel": "zero1"},
    "fsdp": {"data_parallel": "fsdp"},
}
REPLICATED = often(by_hand.GANWithToggles, by_hand.StepsTorchsOptimizer, generated.ProximalPolicy)


def replicated(module: type[Layers], folder: Path, layouts: Sequence[str]) -> dict[str, Any]:
    """By layout, what a checkpoint of 2 stages with 2 replicas each holds, and what was logged."""
    found: dict[str, Any] = {}
    for layout in layouts:
        L.seed_everything(1, verbose=False)
        made = module()
        generator = torch.Generator().manual_seed(2)
        loader = torch.utils.data.DataLoader([made.batch(generator) for _ in range(4)], batch_size=None)
        strategy = PipelineStrategy(
            num_stages=2,
            num_microbatches=2,
            stage_config={made.chain()[-1]: 1},
            timeout=PATIENCE_S,
            **LAYOUTS[layout],
        )
        trainer = L.Trainer(strategy=strategy, devices=4, max_epochs=2, default_root_dir=folder, **QUIET)
        trainer.fit(made, loader)
        trainer.save_checkpoint(folder / "end.ckpt")
        checkpoint = torch.load(folder / "end.ckpt", weights_only=True) if trainer.global_rank == 0 else {}
        saved = {key: checkpoint.get(key) for key in ("state_dict", "optimizer_states")}
        found[layout] = saved, dict(trainer.callback_metrics)
    return found


@pytest.mark.skipif(
    torch.__version__ < (2, 11) and torch.version.cuda is not None and not torch.cuda.is_available(),
    reason="torch 2.10's builds for GPUs end the process where there is none, in a second run with FSDP",
)
@pytest.mark.parametrize("module", REPLICATED)
def test_replicas_may_shard_several_optimizers(module: type[Layers], tmp_path: Path, with_slow: bool) -> None:
    layouts = [layout for layout in LAYOUTS if with_slow or layout != "zero1"]
    runs = launch(replicated, module, tmp_path, layouts, world=4)[0]
    expected, expected_logged = runs["whole"]
    for layout, (saved, logged) in runs.items():
        torch.testing.assert_close(logged, expected_logged, rtol=0, atol=0, msg=layout)
        torch.testing.assert_close(saved, expected, rtol=0, atol=0, msg=layout)


class GoesBackAfterAnUpdate(by_hand.ByHand):
    """The backward of a loss from before an update of the weights that it needs, once they may be in slices."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()
        before = self.loss(batch)
        self.manual_backward(self.loss(batch))
        optimizer.step()
        if batch_idx == 1:
            self.manual_backward(before)


def refused(folder: Path, options: dict[str, Any]) -> str:
    made = GoesBackAfterAnUpdate()
    generator = torch.Generator().manual_seed(2)
    loader = torch.utils.data.DataLoader([made.batch(generator) for _ in range(4)], batch_size=None)
    strategy = PipelineStrategy(num_stages=1, num_microbatches=2, timeout=PATIENCE_S, **options)
    trainer = L.Trainer(strategy=strategy, devices=2, max_epochs=1, default_root_dir=folder, **QUIET)
    try:
        trainer.fit(made, loader)
    except RuntimeError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("layout", [pytest.param("whole", marks=pytest.mark.slow), "fsdp"])
def test_a_graph_from_before_an_update_is_refused(layout: str, tmp_path: Path) -> None:
    """Also where a slice is updated, and the parameter that the graph has kept is gathered anew."""
    for message in launch(refused, tmp_path, LAYOUTS[layout], world=2):
        assert "modified by an inplace operation" in message


# -- resuming -------------------------------------------------------------------------------------------------------


class Quadratic(Layers):
    """Trained by LBFGS, whose state is of all parameters together."""

    def configure_optimizers(self) -> Any:
        return torch.optim.LBFGS(self.parameters(), lr=0.1, max_iter=4)


def resumed(module: type[Layers], folder: Path, stages: int, checkpoints: str) -> list[Any]:
    """The weights of three epochs at once, and of two and then one more, from another layout's checkpoint."""
    ends = []
    for start, epochs in ((None, 3), (None, 2), (folder / f"{checkpoints}.ckpt", 3)):
        L.seed_everything(1, verbose=False)
        made = module()
        made.stage_config = {name: i for i, name in enumerate(made.chain()[:: len(made.chain()) // stages]) if i}
        generator = torch.Generator().manual_seed(2)
        loader = torch.utils.data.DataLoader([made.batch(generator) for _ in range(2)], batch_size=None)
        trainer = L.Trainer(
            strategy=PipelineStrategy(num_stages=stages, num_microbatches=4, timeout=PATIENCE_S),
            devices=stages,
            max_epochs=epochs,
            default_root_dir=folder,
            **QUIET,
        )
        trainer.fit(made, loader, ckpt_path=start)
        if epochs == 2:
            trainer.save_checkpoint(folder / f"{stages}.ckpt")
        ends.append({name: tensor.clone() for name, tensor in made.state_dict().items()})
    return ends


LAYOUT_CHANGES = (
    pytest.param(((2, "2"), (1, "2")), id="2 and 1"),
    pytest.param(((1, "1"), (2, "1")), id="1 and 2", marks=pytest.mark.slow),
    pytest.param(((4, "4"), (1, "4"), (4, "1"), (2, "4")), id="4", marks=pytest.mark.slow),
)
"""Numbers of stages, and of those whose checkpoint is resumed."""


@pytest.mark.parametrize("module", often(by_hand.GANWithOneForward, Quadratic))
@pytest.mark.parametrize("changes", LAYOUT_CHANGES)
def test_runs_resume_on_other_layouts(changes: Any, module: type[Layers], tmp_path: Path) -> None:
    for stages, checkpoints in changes:
        for whole, _, again in launch(resumed, module, tmp_path, stages, checkpoints, world=stages):
            assert whole.keys() == again.keys()
            for name, tensor in whole.items():
                assert torch.equal(tensor, again[name]), (stages, checkpoints, name)
