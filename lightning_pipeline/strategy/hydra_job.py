"""The job of Hydra that runs in this process, and the arguments with which other processes run the same one.

Imported only where Hydra is.
"""

from __future__ import annotations

from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.types import Quote, QuotedString
from hydra.utils import get_original_cwd, to_absolute_path
from omegaconf import OmegaConf

__all__ = ["arguments", "get_original_cwd", "identity", "runs", "to_absolute_path"]


def runs() -> bool:
    """Whether a job of Hydra runs in this process."""
    return HydraConfig.initialized()


def identity() -> str:
    """Tells the running job from the others of a sweep."""
    return " ".join([HydraConfig.get().runtime.output_dir, *_job_identity()])


def arguments(local_rank: int) -> list[str]:
    """Those with which the script runs the current job in another process, as ``local_rank``.

    It composes the same configuration from the job's overrides, writes to the job's output folder without a second
    ``.hydra`` folder, and logs to a file of its own. It must be started in `get_original_cwd`.
    """
    hydra = HydraConfig.get()
    return [
        *_config_flags(),
        *hydra.overrides.hydra,
        *hydra.overrides.task,
        # The last override of a key counts, so these follow the user's.
        "hydra.mode=RUN",
        f"hydra.run.dir={_quoted(hydra.runtime.output_dir)}",
        "hydra.output_subdir=null",
        f"hydra.job.name={_quoted(f'{hydra.job.name}_rank{local_rank}')}",
        *_job_identity(),
    ]


def _config_flags() -> list[str]:
    """``--config-name``, ``--config-path`` and ``--config-dir``, as Hydra has resolved them."""
    hydra = HydraConfig.get()
    flags = [] if hydra.job.config_name is None else ["--config-name", hydra.job.config_name]
    names = {"main": "--config-path", "command-line": "--config-dir"}
    for source in hydra.runtime.config_sources:
        if source.provider in names and source.path:
            path = source.path if source.schema == "file" else f"{source.schema}://{source.path}"
            flags += [names[source.provider], path]
    return flags


def _job_identity() -> list[str]:
    """Overrides with the number and id of a sweep's job, to which a configuration may refer."""
    job = HydraConfig.get().job
    number = [] if OmegaConf.is_missing(job, "num") else [f"hydra.job.num={job.num}"]
    return number if OmegaConf.is_missing(job, "id") else [*number, f"hydra.job.id={_quoted(job.id)}"]


def _quoted(text: str) -> str:
    """The text quoted for a Hydra override."""
    return QuotedString(text, Quote.single).with_quotes()
