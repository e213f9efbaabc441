"""What the tests of the examples share: composing their configuration."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf

ROOT = Path(__file__).parents[2]

Compose = Callable[..., DictConfig]


@pytest.fixture
def compose_train(tmp_path: Path) -> Iterator[Compose]:
    """Composes ``train.yaml`` with overrides as a run would, its outputs and data in ``tmp_path``."""

    def composed(*overrides: str) -> DictConfig:
        cfg = compose("train", list(overrides), return_hydra_config=True)
        cfg.hydra.runtime.output_dir = str(tmp_path)
        HydraConfig.instance().set_config(cfg)
        OmegaConf.set_struct(cfg, False)
        del cfg["hydra"]
        cfg.paths.root_dir = str(tmp_path)
        return cfg

    with initialize_config_dir(str(ROOT / "configs"), version_base="1.3"):
        yield composed
    HydraConfig.instance().cfg = None
