"""The tables of a run."""

import statistics
from typing import Any

from rich.table import Table

from contenders import Contender
from lightning_pipeline.schedules import build, default_virtual_stages, simulate


def ideal_share(schedule: str, num_ranks: int, num_microbatches: int) -> float:
    """The share of one process's time that the schedule takes if nothing costs but equal forwards and backwards.

    For 1F1B that is (m + p - 1) / (m p).
    """
    built = build(schedule, num_ranks, num_microbatches, default_virtual_stages(schedule))
    return 1 / (num_ranks * (1 - simulate(built).bubble))


def gpt_table(measured: dict[str, Any], contenders: list[Contender], settings: dict[str, Any]) -> Table:
    """Milliseconds of a step, and ratios to the ideals and to torch."""
    counts = settings["num_stages"], settings["num_microbatches"]
    table = _table("GPT: time of a step", "ms", "/ ideal", "/ own ideal", "ours / torch")
    table.add_column("loss")
    for contender in contenders:
        if contender.name not in measured:
            continue
        times = median_and_min(measured[contender.name])
        ratios = [""] * 6
        if contender.schedule is not None:
            alone = median_and_min(measured["one process"])
            shares = ideal_share("1f1b", *counts), ideal_share(contender.schedule, *counts)
            ideals = [time / (share * one) for share in shares for time, one in zip(times, alone, strict=True)]
            ratios = [*(f"{ratio:.3f}" for ratio in ideals), *to_torch(measured, contender)]
        loss = f"{measured[contender.name]['loss']:.5f}"
        table.add_row(contender.name, *(f"{time * 1e3:.1f}" for time in times), *ratios, loss)
    return table


def linear_table(measured: dict[str, Any], contenders: list[Contender], settings: dict[str, Any]) -> Table:
    """Milliseconds of a micro-batch, and ratios to torch."""
    share = 1e3 / settings["num_linear_microbatches"]
    table = _table("An 8x8 Linear a stage: time of a micro-batch", "ms", "ours / torch")
    for contender in contenders:
        if contender.name in measured:
            times = median_and_min(measured[contender.name])
            table.add_row(contender.name, *(f"{time * share:.3f}" for time in times), *to_torch(measured, contender))
    return table


def to_torch(measured: dict[str, Any], contender: Contender) -> list[str]:
    """Ours / torch of the same schedule, of medians and of minima."""
    theirs = measured.get(f"torch {contender.schedule}")
    if contender.who != "ours" or theirs is None:
        return ["", ""]
    times = zip(median_and_min(measured[contender.name]), median_and_min(theirs), strict=True)
    return [f"{ours / torch:.3f}" for ours, torch in times]


def median_and_min(result: dict[str, Any]) -> tuple[float, float]:
    """Of the seconds of a step."""
    return statistics.median(result["seconds"]), min(result["seconds"])


def _table(title: str, *quantities: str) -> Table:
    """Two columns for each quantity, of the median and of the minimum."""
    table = Table(title=title)
    table.add_column("", no_wrap=True)
    for quantity in quantities:
        table.add_column(f"{quantity}\nmedian", justify="right")
        table.add_column("\nmin", justify="right")
    return table
