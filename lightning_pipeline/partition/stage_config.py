"""stage_config as users write it: in a mapping, a string, a file, or as attributes of modules."""

from __future__ import annotations

import re
from collections.abc import Mapping
from os import PathLike
from pathlib import Path

import yaml
from torch import nn

from lightning_pipeline.schedules.validation import MAX_PASSES, read_text, shown

MAX_PLAN_BYTES = 2**18
"""The largest file of a plan; it holds thousands of keys."""

# The stage follows the last colon, as slices have one of their own.
_KEY = re.compile(r"""\s*["']?(?P<name>[\w.:-]+?)["']?\s*[:=]\s*["']?(?P<stage>[0-9]{1,9}(@[0-9]{1,9})?)["']?\s*""")
_STAGE_ON_RANK = re.compile(r"(?P<stage>[0-9]{1,9})@(?P<rank>[0-9]{1,9})")

AUTO = "auto"

Stage = int | str
"""A stage as keys give it: 1, or "1@0" for stage 1 on the first rank of the pipeline."""
StageConfig = Mapping[str, Stage] | str | PathLike[str]


def read_stage_config(module: nn.Module, config: StageConfig | None = None) -> dict[str, Stage]:
    """The keys to use: `config`, else `module.stage_config`, else the `pipeline_stage` attributes of its modules.

    A string may hold the keys (``"layers.4:1,head:2@0"``); else it is the path of a saved plan. The result is empty if
    the cut is to be found automatically, as for "auto", or if there are no keys anywhere.

    Raises:
        FileNotFoundError: there is no such file.
        TypeError: `config` is neither a mapping nor a path.
        ValueError: the file is no plan, or a value is no stage.
    """
    if config is None:
        config = getattr(module, "stage_config", None)
    if isinstance(config, (str, PathLike)):
        if config == AUTO:
            return {}
        config = (_keys_in(config) if isinstance(config, str) else None) or _read_file(Path(config))
    if config is None:
        config = {
            name: sub.pipeline_stage
            for name, sub in module.named_modules()
            if isinstance(getattr(sub, "pipeline_stage", None), (int, str))
        }
    if not isinstance(config, Mapping):
        raise TypeError(
            f"stage_config is a mapping from module names to stages, such as {{'layers.4': 1}}; got {shown(config)}"
        )
    for key, stage in config.items():
        if not isinstance(key, str) and not (isinstance(key, int) and abs(key) < MAX_PASSES):
            raise ValueError(f"stage_config has the key {shown(key)}, which is no name of a module")
        stage_and_rank(key, stage)
    return {str(key): value for key, value in config.items()}


def _keys_in(text: str) -> dict[str, Stage] | None:
    """The keys in text such as ``layers.4:1,head:2``, as command lines and configs pass it; None for other text."""
    parts = text.strip().removeprefix("{").removesuffix("}").split(",")
    keys = [_KEY.fullmatch(part) for part in parts]
    if not all(keys):
        return None
    stages = {key["name"]: key["stage"] for key in keys if key is not None}
    return {name: int(stage) if stage.isdigit() else stage for name, stage in stages.items()}


def stage_and_rank(key: object, value: object) -> tuple[int, int | None]:
    """The stage that a key of stage_config gives, and the rank if it names one."""
    match = _STAGE_ON_RANK.fullmatch(value) if isinstance(value, str) else None
    stage, rank = (int(match["stage"]), int(match["rank"])) if match else (value, None)
    if isinstance(stage, bool) or not isinstance(stage, int) or not 0 <= stage < MAX_PASSES:
        raise ValueError(
            f"stage_config[{shown(key)}] is {shown(value)}; a stage is a whole number from 0 to {MAX_PASSES - 1:,}, "
            f'or with its rank such as "1@0"'
        )
    return stage, rank


class _PlanLoader(yaml.SafeLoader):
    """Loads plain values without aliases: a few nested aliases make a value that fits into no memory."""

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        if self.check_event(yaml.AliasEvent):
            raise yaml.YAMLError(f"an alias in line {self.peek_event().start_mark.line + 1}, and plans have none")
        return super().compose_node(parent, index)


def _read_file(path: Path) -> Mapping[str, Stage]:
    """The stage_config in a YAML file, by itself or under that key, as `StagePlan.save` writes it."""
    if not path.is_file():
        raise FileNotFoundError(
            f'stage_config={str(path)!r} is no file: give "auto", a mapping, keys such as "layers.4:1", or the path '
            f"of a plan that was saved"
        )
    text = read_text(path, kind="a plan", most=MAX_PLAN_BYTES)
    try:
        content = yaml.load(text, Loader=_PlanLoader)
    except Exception as error:  # values such as 0000-00-00 raise whatever their constructors raise
        reason = str(error).replace("\n", " ")[:500]
        raise ValueError(f"{path} is not a plan in YAML: {type(error).__name__}: {reason}") from None
    config = content.get("stage_config") if isinstance(content, Mapping) and "stage_config" in content else content
    if not isinstance(config, Mapping) or not config:
        raise ValueError(f"{path} has no stage_config: it needs a mapping of modules to stages, such as 'layers.4: 1'")
    return config


def count_stages(config: Mapping[str, Stage]) -> int | None:
    """The number of stages that `config` uses; None for an empty one."""
    stages = [stage_and_rank(key, stage)[0] for key, stage in config.items()]
    return max(stages) + 1 if stages else None
