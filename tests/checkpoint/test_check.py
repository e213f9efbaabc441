"""What does not fit is named, with the way out, and nothing has changed by then; what fits passes."""

from __future__ import annotations

import copy
import re
from typing import Any

import lightning as L
import pytest
import torch
from torch import nn

from lightning_pipeline.checkpoint.check import check_checkpoint, check_format, check_optimizers, with_one_outcome
from lightning_pipeline.checkpoint.files import CheckpointError
from lightning_pipeline.checkpoint.optimizer_layout import OptimizerLayout
from lightning_pipeline.partition.ownership import Ownership, release


class Counter(nn.Linear):
    """Takes its extra state apart."""

    calls = 0

    def get_extra_state(self) -> dict[str, int]:
        return {"calls": self.calls}

    def set_extra_state(self, state: dict[str, int]) -> None:
        self.calls = state.pop("calls")


class Lit(L.LightningModule):
    def __init__(self, width: int = 4, depth: int = 3) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.first = nn.Sequential(*(nn.Linear(width, width) for _ in range(depth)))
        self.second = nn.Sequential(Counter(width, width), nn.BatchNorm1d(width))

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        pytest.fail("the hooks are Lightning's to call")


def make(seed: int = 0, **options: Any) -> Lit:
    torch.manual_seed(seed)
    return Lit(**options)


def saved_by(module: Lit, kind: type[torch.optim.Optimizer] = torch.optim.Adam, **options: Any) -> dict[str, Any]:
    optimizer = kind(module.parameters(), **options)
    for parameter in module.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    return {
        "state_dict": module.state_dict(),
        "optimizer_states": [optimizer.state_dict()],
        "lr_schedulers": [],
        "hyper_parameters": dict(module.hparams),
        "pytorch-lightning_version": L.__version__,
    }


def stage_of(module: Lit, stage: int, kind: type[torch.optim.Optimizer] = torch.optim.Adam) -> OptimizerLayout:
    """Leave one of two stages of a module, and give its optimizer."""
    layout = OptimizerLayout(kind(module.parameters()), module)
    holders = {name: (int(name.startswith("second")),) for name in module.state_dict() if "extra" not in name}
    ownership = Ownership(2, stage, holders)
    release(module, ownership)
    layout.forget_remote()
    return layout


def snapshot(module: Lit, layout: OptimizerLayout) -> Any:
    tensors = {name: t.clone() for name, t in module.state_dict().items() if torch.is_tensor(t) and not t.is_meta}
    return copy.deepcopy((tensors, layout.optimizer.state_dict()["state"], module.second[0].calls))


def problem(checkpoint: dict[str, Any], stage: int, *, strict: bool = True, kind: Any = torch.optim.Adam) -> str:
    """What is said about a checkpoint on a stage; "" if it fits. Checks that nothing changes."""
    module = make(seed=1)
    layout = stage_of(module, stage, kind)
    before = snapshot(module, layout)
    given = repr(checkpoint)
    try:
        check_checkpoint(checkpoint, module, strict=strict, goes_on=True, path="folder/x.ckpt")
        check_optimizers(checkpoint, module, [layout], path="folder/x.ckpt")
        message = ""
    except CheckpointError as error:
        message = str(error)
    torch.testing.assert_close(snapshot(module, layout)[:2], before[:2], rtol=0, atol=0)
    assert repr(checkpoint) == given
    return message


def other(change: Any) -> dict[str, Any]:
    checkpoint = saved_by(make())
    change(checkpoint)
    return checkpoint


def rename(checkpoint: dict[str, Any]) -> None:
    state = checkpoint["state_dict"]
    for name in [name for name in state if name.startswith("first")]:
        state[f"net.{name}"] = state.pop(name)


REFUSED = {
    "names": (
        other(rename),
        r"x\.ckpt is of another model than this Lit: 6 of its entries are missing: first\.0\.weight, first\.0\.bias, "
        r"first\.1\.weight and 3 more; 6 of its entries are unknown to the module: net\.first\.0\.weight, .*"
        r"Nothing was loaded: make the module with the arguments .* strict_loading to False",
    ),
    "shapes": (
        saved_by(make(width=5)),
        r"12 of its entries are of other shapes: first\.0\.weight \(5, 5\) in the file, \(4, 4\) in the module, .*"
        r"with the arguments that the checkpoint was made with \(width=5 instead of 4\)$",
    ),
    "depth": (saved_by(make(depth=4)), r"2 of its entries are unknown .* first\.3\.weight, first\.3\.bias\. .*depth=4"),
    "buffer": (  # which is no error in a file of old, that has no version
        other(lambda c: c["state_dict"].pop("second.1.num_batches_tracked")),
        r"1 of its entries are missing: second\.1\.num_batches_tracked\. Nothing",
    ),
    "no tensor": (other(lambda c: c["state_dict"].update({"first.0.bias": 1})), r"first\.0\.bias.*received .*int"),
    "weights only": (other(lambda c: c.pop("optimizer_states")), r"weights only .*fit\(Lit\.load_from_checkpoint"),
    "two optimizers": (
        other(lambda c: c["optimizer_states"].append({})),
        r"has states of 2 optimizers, and configure_optimizers gave 1: resume with the configure_optimizers",
    ),
    "no optimizer": (
        other(lambda c: c.update(optimizer_states=[{}])),
        r"optimizer state in folder/x\.ckpt has 0 groups with \[\] parameters, and Adam has 1 with \[10\]: resume",
    ),
    "groups": (
        other(lambda c: c["optimizer_states"][0]["param_groups"].append({"params": [99]})),
        r"optimizer state in folder/x\.ckpt has 2 groups with \[10, 1\] parameters, and Adam has 1 with \[10\]: resume",
    ),
    "order": (
        other(lambda c: c["optimizer_states"][0]["param_groups"][0]["params"].reverse()),
        r"has other shapes \(exp_avg of first\.0\.weight is \(4,\) there, and the parameter is \(4, 4\), .* more\)",
    ),
}


@pytest.mark.parametrize("stage", [0, 1])
@pytest.mark.parametrize(("checkpoint", "words"), REFUSED.values(), ids=REFUSED)
def test_what_does_not_fit_is_named_alike_on_every_stage(checkpoint: Any, words: str, stage: int) -> None:
    message = problem(checkpoint, stage)
    assert re.search(words, message), message
    assert message == problem(checkpoint, 1 - stage)


@pytest.mark.parametrize("stage", [0, 1])
def test_what_fits_passes(stage: int) -> None:
    assert not problem(saved_by(make()), stage)
    assert not problem(other(lambda c: c.update(optimizer_states=[{"state": {}, **c["optimizer_states"][0]}])), stage)
    factored = saved_by(make(), torch.optim.Adafactor)
    assert not problem(factored, stage, kind=torch.optim.Adafactor)
    assert not problem(other(lambda c: c.update(optimizer_states=[], lr_schedulers=[])), stage)  # by on_load_checkpoint
    state = saved_by(make())["state_dict"]
    del state["second.1.num_batches_tracked"]  # as torch did before BatchNorm had it
    state._metadata["second.1"]["version"] = 1
    assert not problem({**saved_by(make()), "state_dict": state}, stage)


def test_strict_loading_is_the_modules_choice() -> None:
    assert not problem(other(rename), 0, strict=False)
    message = problem(saved_by(make(width=5)), 0, strict=False)
    assert "of other shapes" in message and "strict_loading" not in message


def test_weights_need_no_optimizer() -> None:
    checkpoint = other(lambda c: c.pop("optimizer_states"))
    check_checkpoint(checkpoint, make(), strict=True, goes_on=False, path=None)
    with pytest.raises(CheckpointError, match=r"^the checkpoint is of another model"):
        check_checkpoint(other(rename), make(), strict=True, goes_on=False, path=None)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ({"weight": torch.ones(2)}, r"bare weights \(weight\).*module\.load_state_dict"),
        ({"model": {}, "step": 3}, r"a dict with the keys model, step, no checkpoint of a Trainer"),
        ({}, "holds an empty dict"),
        (torch.ones(2), "holds a Tensor"),
    ],
)
def test_what_no_trainer_has_saved_is_told(content: Any, words: str) -> None:
    with pytest.raises(CheckpointError, match=rf"folder/x\.ckpt .*{words}"):
        check_format(content, "folder/x.ckpt")


def test_one_process_needs_no_others() -> None:
    assert with_one_outcome(lambda: 3) == 3
    with pytest.raises(ZeroDivisionError):
        with_one_outcome(lambda: 1 // 0)
