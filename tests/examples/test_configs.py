"""Every configuration composes, builds what it names, and takes the overrides that Hydra users expect."""

import lightning as L
import pytest
import torch
from hydra import compose, initialize_config_dir
from hydra.utils import instantiate
from omegaconf import OmegaConf

from lightning_pipeline import PipelineStrategy
from train import instantiate_each

from .conftest import ROOT, Compose

EXPERIMENTS = sorted(path.stem for path in (ROOT / "configs/experiment").glob("*.yaml"))


def options(group: str) -> list[str]:
    return sorted(path.stem for path in (ROOT / "configs" / group).glob("*.yaml"))


@pytest.mark.parametrize("overrides", [[], *([f"experiment={name}"] for name in EXPERIMENTS)])
@pytest.mark.parametrize("num_devices", [2, *(pytest.param(count, marks=pytest.mark.slow) for count in (1, 4))])
def test_an_experiment_builds(overrides: list[str], num_devices: int, compose_train: Compose) -> None:
    cfg = compose_train(*overrides, f"trainer.devices={num_devices}")
    OmegaConf.resolve(cfg)
    datamodule = instantiate(cfg.data)
    model = instantiate(cfg.model, _convert_="all")
    strategy = instantiate(cfg.trainer.strategy, _convert_="all")
    assert isinstance(datamodule, L.LightningDataModule)
    assert isinstance(model, L.LightningModule)
    assert isinstance(strategy, PipelineStrategy)
    names = {name for name, _ in model.named_modules()}
    assert set(model.stage_config or {}) <= names
    if num_devices == 2:
        assert list(model.stage_config.values()) == [1]


@pytest.mark.parametrize("group", ["callbacks", "logger"])
def test_each_callback_and_logger_builds(group: str, compose_train: Compose) -> None:
    for option in options(group):
        cfg = compose_train(f"{group}={option}")
        assert len(instantiate_each(cfg[group])) == len(cfg[group]) > 0


def test_each_option_of_a_group_composes(compose_train: Compose) -> None:
    for group in ("data", "model", "trainer", "paths", "hydra"):
        assert options(group)
        for option in options(group):
            compose_train(f"{group}={option}")


def test_hydra_knows_the_folders_before_a_run_starts() -> None:
    with initialize_config_dir(str(ROOT / "configs"), version_base="1.3"):
        hydra = compose("train", ["experiment=gpt_text"], return_hydra_config=True).hydra
    assert hydra.run.dir.startswith("logs/gpt_text/runs/")
    assert hydra.sweep.dir.startswith("logs/gpt_text/multiruns/")


def test_a_null_callback_is_left_out_and_no_logger_is_none(compose_train: Compose) -> None:
    cfg = compose_train("callbacks.timeline=null", "~logger")
    assert len(instantiate_each(cfg.callbacks)) == len(cfg.callbacks) - 1
    assert instantiate_each(cfg.get("logger")) == []


def test_the_strategy_takes_overrides(compose_train: Compose) -> None:
    cfg = compose_train(
        "trainer.strategy.schedule=gpipe",
        "trainer.strategy.num_microbatches=16",
        "trainer.strategy.stage_config={net.layer2: 1}",
        "trainer.devices=2",
    )
    assert cfg.trainer.strategy.schedule == "gpipe"
    assert cfg.trainer.strategy.num_microbatches == 16
    assert cfg.trainer.strategy.stage_config == {"net.layer2": 1}


def test_plain_lightning_replaces_the_strategy(compose_train: Compose) -> None:
    cfg = compose_train("trainer.strategy=auto", "trainer.devices=1")
    assert cfg.trainer.strategy == "auto"


def test_the_reference_examples_keep_their_numbers(compose_train: Compose) -> None:
    mlp = compose_train("experiment=mlp_oneflow")
    assert (mlp.data.batch_size, mlp.trainer.strategy.num_microbatches, mlp.model.optimizer.lr) == (16, 2, 0.001)
    net = instantiate(mlp.model.net)
    assert [tuple(m.weight.shape) for m in net if hasattr(m, "weight")] == [(512, 784), (512, 512), (10, 512)]

    resnet = compose_train("experiment=resnet50_cifar10")
    assert (resnet.data.batch_size, resnet.data.image_size, resnet.trainer.max_epochs) == (32, 224, 10)
    assert resnet.model.optimizer == {"_target_": "torch.optim.SGD", "_partial_": True, "lr": 0.01, "momentum": 0.9}
    with torch.device("meta"):
        net = instantiate(resnet.model.net)
        boundary = net.layer2(net.layer1(net.stem(torch.empty(2, 3, 224, 224))))
    assert tuple(boundary.shape) == (2, 512, 28, 28)
    # ResNet-50 as published has 23.5 million parameters besides its classifier.
    assert sum(p.numel() for p in net.parameters()) == 23_508_032 + 2048 * 10 + 10


@pytest.mark.parametrize("experiment", EXPERIMENTS)
def test_an_experiment_file_starts_with_its_command(experiment: str) -> None:
    lines = (ROOT / f"configs/experiment/{experiment}.yaml").read_text().splitlines()
    assert lines[0] == "# @package _global_"
    assert lines[1].startswith(f"# python examples/train.py experiment={experiment}")
