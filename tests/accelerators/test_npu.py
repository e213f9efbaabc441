"""The accelerator itself: devices, availability, what a Trainer makes of one NPU, and errors that say the way out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_pipeline.accelerators.npu import parse_devices
from lightning_pipeline.runtime.backends import backend_for
from tests.accelerators import machines
from tests.launching import launch


@pytest.mark.parametrize(
    ("devices", "numbers"),
    [
        (2, [0, 1]),
        ("2", [0, 1]),
        ("0,1", [0, 1]),
        ("3,", [3]),
        ([1, 3], [1, 3]),
        ((0,), [0]),
        (-1, [0, 1, 2, 3]),
        ("-1", [0, 1, 2, 3]),
        ("auto", [0, 1, 2, 3]),
    ],
)
def test_devices(devices: Any, numbers: list[int]) -> None:
    assert parse_devices(devices, 4) == numbers


@pytest.mark.parametrize(
    ("devices", "reason"),
    [
        (5, "needs NPU 4, and 4 are visible by ASCEND_RT_VISIBLE_DEVICES='0,1,2,3'"),
        ([1, 1], "names a device twice"),
        (0, "names no device"),
        (-2, "names no device"),
        ([0, -1], "names no device"),
        ("", "not understood"),
        ("npu:0", "not understood"),
        (True, "not understood"),
        ([0, "1"], "not understood"),
        (1.0, "not understood"),
    ],
)
def test_devices_that_are_none(devices: Any, reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ASCEND_RT_VISIBLE_DEVICES", "0,1,2,3")
    with pytest.raises(ValueError, match=reason) as raised:
        parse_devices(devices, 4)
    assert f"devices={devices!r}" in str(raised.value)


def test_a_device_for_each_process_is_number_0_in_each(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "1")
    with pytest.raises(ValueError, match="needs NPU 7, and 1 are visible"):
        parse_devices(8, 1)  # a machine of one NPU
    monkeypatch.setenv("ASCEND_RT_VISIBLE_DEVICES", "5")
    assert parse_devices(8, 1) == [0] * 8


def test_the_device_chooses_the_backend() -> None:
    assert backend_for(torch.device("cpu")) == "gloo"
    assert backend_for(torch.device("cuda", 0)) == "cpu:gloo,cuda:nccl"
    assert backend_for(torch.device("cuda", 0), "gloo") == "gloo"
    assert backend_for(torch.device("cpu"), "cpu:gloo,cuda:nccl") == "cpu:gloo,cuda:nccl"
    with pytest.raises(RuntimeError, match="torch_npu adds hccl"):
        backend_for(torch.device("privateuseone", 0))


@pytest.fixture(scope="module")
def seen(folder: Path) -> dict[Any, Any]:
    return dict(zip(machines.SCENES, launch(machines.scene, folder, world=len(machines.SCENES)), strict=True))


def test_missing_torch_npu_is_named_with_its_version(seen: dict[Any, Any]) -> None:
    told, is_registered, is_available, count = seen[machines.without_torch_npu]
    release = torch.__version__.partition("+")[0]
    assert told.startswith("NPUUnavailableError: torch_npu is not installed")
    assert f"pip install 'torch-npu=={release}'" in told and "CANN" in told
    assert (is_registered, is_available, count) == (True, False, 0)


def test_a_torch_npu_without_cann_is_as_good_as_none(seen: dict[Any, Any]) -> None:
    told, is_available, logged, has_traces = seen[machines.without_cann]
    assert not is_available and not has_traces
    assert len(logged) == 1 and logged[0] in told
    assert "libhccl.so: not found" in told and "set_env.sh" in told


def test_a_torch_npu_for_another_torch_is_not_imported(seen: dict[Any, Any]) -> None:
    told, was_imported = seen[machines.with_another_version]
    assert not was_imported
    assert "torch_npu 2.1.0.post3 is made for torch 2.1.0" in told and "pip install" in told


def test_no_visible_device(seen: dict[Any, Any]) -> None:
    told = seen[machines.with_no_device]
    assert "npu-smi info" in told and "ASCEND_RT_VISIBLE_DEVICES='1,0'" in told and "ascending" in told


def test_one_npu_is_never_the_cpu(seen: dict[Any, Any]) -> None:
    found = seen[machines.with_one_device]
    assert found["trainers"] == [
        ("SingleNPUStrategy", "npu:0", "npu", ("npu", True)),
        ("SingleNPUStrategy", "npu:0", "npu", None),
        ("SingleNPUStrategy", "npu:0", "npu", ("npu", True)),
        ("PipelineStrategy", "npu:0", "npu", ("npu", True)),
    ]
    assert found["warned"] == []
    assert found["saved"] == {"cpu"}
    assert found["moved"][0] == 1 and found["moved"][1] >= 2
    assert found["on the CPU"].startswith("ValueError") and 'strategy="single_npu"' in found["on the CPU"]
    assert found["auto"] == "CPUAccelerator"


def test_a_validation_before_training_changes_no_random_numbers(seen: dict[Any, Any]) -> None:
    without, with_check = seen[machines.with_one_device]["drawn"]
    assert without == with_check and len(set(without)) == 2


def test_eight_npus(seen: dict[Any, Any]) -> None:
    found, chosen, has_own_generator, told = seen[machines.with_eight_devices]
    assert found == ([f"npu:{index}" for index in range(8)], "npu:3")
    assert chosen == [8, 8, 4] and has_own_generator
    assert "single_npu" in told and "2 devices" in told


def test_the_device_s_own_scaler_loads_the_state_of_any(seen: dict[Any, Any]) -> None:
    assert seen[machines.with_a_scaler_of_its_own] == ("OwnScaler", 8.0, True)


@pytest.mark.skipif(torch.__version__ >= (2, 15), reason="torch_npu is for torch 2.13: see test_npu_training")
def test_what_cannot_work_on_npus_names_what_can(seen: dict[Any, Any]) -> None:
    found = seen[machines.with_one_device]
    assert "PipelineStrategy(num_stages=1)" in found["ddp"]
    assert "process_group_backend='gloo'" in found["gloo"] and "hccl is used" in found["gloo"]
    assert found["forked"].startswith("RuntimeError") and "spawn" in found["forked"]


def test_a_checkpoint_of_an_npu_loads_where_there_is_none(seen: dict[Any, Any], folder: Path) -> None:
    path = folder / str(machines.SCENES.index(machines.with_one_device)) / machines.FROM_NPU
    assert torch.load(path, weights_only=True)["state_dict"]["layer.weight"].device.type == "cpu"
