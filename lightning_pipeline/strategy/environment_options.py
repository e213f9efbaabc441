"""Options of strategies that are made by a name, from environment variables: for configs that pass a name only."""

from __future__ import annotations

import difflib
import inspect
import os
from typing import Any

import yaml

PREFIX = "LIGHTNING_PIPELINE_"
_OTHERS = ("LAUNCHER",)  # that are no options


def options_in_environment(strategy: type, given_by_trainer: tuple[str, ...]) -> dict[str, Any]:
    """``LIGHTNING_PIPELINE_NUM_MICROBATCHES=8`` gives ``num_microbatches=8``, and so on for each option of `strategy`.

    Args:
        given_by_trainer: arguments that are no options.

    Raises:
        ValueError: a variable of this kind names no option.
    """
    options = [name for name in inspect.signature(strategy).parameters if name not in given_by_trainer]
    found = {}
    for variable, value in os.environ.items():
        name = variable.removeprefix(PREFIX)
        if name == variable or name in _OTHERS:
            continue
        if name.lower() not in options:
            close = difflib.get_close_matches(name.lower(), options, 1) or options
            raise ValueError(
                f"{variable}={value} is set, and PipelineStrategy has no option {name.lower()!r}: unset it, or did you "
                f"mean {', '.join(f'{PREFIX}{each.upper()}' for each in close)}?"
            )
        found[name.lower()] = yaml.safe_load(value)
    return found
