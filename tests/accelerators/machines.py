"""What a Trainer for NPUs says and does on machines of several kinds, each in a process of its own."""

from __future__ import annotations

import logging
import os
import sys
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.accelerators import AcceleratorRegistry
from torch.utils.data import DataLoader

from lightning_pipeline import NPUAccelerator, PipelineStrategy
from lightning_pipeline.accelerators.availability import NPUUnavailableError
from lightning_pipeline.partition.rng import generators
from tests.accelerators.simulated_npu import install
from tests.training.runs import QUIET

# A file that a machine with an NPU wrote: its one tensor is tagged with npu:0.
FROM_NPU = "from_npu.ckpt"


def fake_torch_npu(folder: Path, version: str, source: str) -> None:
    """A torch_npu that the next import finds."""
    for name, text in (("torch_npu/__init__.py", source), (f"torch_npu-{version}.dist-info/METADATA", "")):
        (folder / name).parent.mkdir(parents=True)
        (folder / name).write_text(text or f"Metadata-Version: 2.1\nName: torch-npu\nVersion: {version}\n")
    sys.path.insert(0, str(folder))


def refusal(folder: Path, **options: Any) -> str:
    """What a Trainer for NPUs says."""
    try:
        trainer = L.Trainer(**{**QUIET, "accelerator": "npu", "max_steps": 1, "default_root_dir": folder, **options})
        trainer.fit(Tiny(), DataLoader(torch.ones(2, 1)))
    except (NPUUnavailableError, ValueError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def drawn_in_training(folder: Path, **options: Any) -> list[float]:
    """What a training step draws on the device, after a validation that draws as well."""
    torch.npu.manual_seed_all(1)
    module, data = Drawing(), DataLoader(torch.ones(2, 1))
    trainer = L.Trainer(**{**QUIET, "accelerator": "npu", "max_steps": 2, "default_root_dir": folder, **options})
    trainer.fit(module, data, data)
    return module.drawn


class Tiny(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.layer(batch).sum()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Drawing(Tiny):
    def __init__(self) -> None:
        super().__init__()
        self.drawn: list[float] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.drawn.append(float(torch.rand((), device=self.device)))
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        torch.rand((), device=self.device)


def without_torch_npu(folder: Path) -> Any:
    told = refusal(folder)
    registered = type(AcceleratorRegistry["npu"]["accelerator"](required=False)) is NPUAccelerator
    return told, registered, NPUAccelerator.is_available(), NPUAccelerator.auto_device_count()


def without_cann(folder: Path) -> Any:
    no_cann = 'import os; os.environ["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"; raise ImportError("libhccl.so: not found")'
    fake_torch_npu(folder, torch.__version__.partition("+")[0], no_cann)
    records: list[logging.LogRecord] = []
    logger = logging.getLogger("lightning_pipeline.accelerators.npu")
    logger.addFilter(lambda record: records.append(record) is not None)
    available = NPUAccelerator.is_available()
    logged = [record.getMessage() for record in records if record.levelno == logging.WARNING]
    return refusal(folder), available, logged, "TORCH_DEVICE_BACKEND_AUTOLOAD" in os.environ


def with_another_version(folder: Path) -> Any:
    fake_torch_npu(folder, "2.1.0.post3", "raise SystemExit('imported')")
    return refusal(folder), "torch_npu" in sys.modules


def with_no_device(folder: Path) -> Any:
    install(num_devices=0)
    os.environ["ASCEND_RT_VISIBLE_DEVICES"] = "1,0"
    return refusal(folder)


def with_eight_devices(folder: Path) -> Any:
    install(num_devices=8)
    os.environ["LOCAL_RANK"] = "3"
    options = {**QUIET, "accelerator": "npu", "strategy": "pipeline"}
    strategy = L.Trainer(**options, devices=8).strategy
    found = [str(device) for device in strategy.parallel_devices], str(strategy.root_device)
    chosen = [
        len(L.Trainer(**options, devices=devices).strategy.parallel_devices) for devices in ("auto", -1, "2,3,5,7")
    ]
    own = generators(torch.device("npu", 3))[1] is torch.npu.default_generators[3]
    os.environ["LOCAL_RANK"] = "0"
    told = refusal(folder, devices=2, strategy="single_npu")
    return found, chosen, own, told


class OwnScaler(torch.amp.GradScaler):
    """In what matters here, torch_npu's."""

    def __init__(self) -> None:
        super().__init__("npu")

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self.dynamic = state["dynamic"]


def with_a_scaler_of_its_own(folder: Path) -> Any:
    install().amp = SimpleNamespace(GradScaler=OwnScaler)
    plugin = L.Trainer(**{**QUIET, "accelerator": "npu"}, precision="16-mixed").precision_plugin
    of_cuda = torch.amp.GradScaler("cpu", init_scale=8.0).state_dict()
    plugin.load_state_dict(of_cuda)
    return type(plugin.scaler).__name__, plugin.scaler.get_scale(), plugin.scaler.dynamic


def with_one_device(folder: Path) -> Any:
    npu = install()
    found: dict[str, Any] = {}
    found["drawn"] = [drawn_in_training(folder, num_sanity_val_steps=steps) for steps in (0, 2)]
    npu.calls.clear()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        options = {**QUIET, "accelerator": "npu", "devices": 1, "default_root_dir": folder}
        trainers = [
            L.Trainer(**options, precision="16-mixed"),
            L.Trainer(**options, precision="bf16-mixed", strategy="single_npu"),
            L.Trainer(**{**options, "accelerator": NPUAccelerator()}, precision="16-mixed"),
            L.Trainer(**options, precision="16-mixed", strategy=PipelineStrategy(num_stages=1)),
        ]
    found["warned"] = [str(w.message) for w in caught if "CUDA" in str(w.message)]
    for trainer in trainers:
        plugin = trainer.precision_plugin
        scaler = plugin.scaler
        scaled = (scaler._device, scaler.is_enabled()) if scaler is not None else None
        found.setdefault("trainers", []).append(
            (type(trainer.strategy).__name__, str(trainer.strategy.root_device), plugin.device, scaled)
        )
    trainer = trainers[0]
    trainer.fit_loop.epoch_loop.max_steps = 1
    trainer.fit(Tiny(), DataLoader(torch.ones(2, 1)))
    trainer.save_checkpoint(folder / "single.ckpt")
    saved = torch.load(folder / "single.ckpt", weights_only=True)
    found["saved"] = {tensor.device.type for tensor in saved["state_dict"].values()}
    found["moved"] = npu.calls.count("set_device"), npu.calls.count("empty_cache")
    torch.save({"state_dict": {"layer.weight": torch.ones(1, 1, device="npu")}}, folder / FROM_NPU)

    found["on the CPU"] = refusal(folder, strategy="single_device")
    found["ddp"] = refusal(folder, strategy="ddp")
    found["gloo"] = refusal(folder, strategy=PipelineStrategy(num_stages=1, process_group_backend="gloo"))
    found["auto"] = type(L.Trainer(**{**QUIET, "accelerator": "auto"}).accelerator).__name__
    with pytest.warns(UserWarning, match="never chooses them"):
        refusal(folder, accelerator="auto", strategy=PipelineStrategy(num_stages=1))
    npu._is_in_bad_fork = lambda: True
    found["forked"] = refusal(folder)
    return found


SCENES = [without_torch_npu, without_cann, with_another_version, with_no_device, with_one_device]
SCENES += [with_eight_devices, with_a_scaler_of_its_own]


def scene(folder: Path) -> Any:
    """Each rank sees another machine."""
    rank = int(os.environ["LOCAL_RANK"])
    os.environ.update(WORLD_SIZE="1", LOCAL_RANK="0")
    os.environ["MASTER_PORT"] = str(int(os.environ["MASTER_PORT"]) + rank)
    return SCENES[rank](folder / str(rank))
