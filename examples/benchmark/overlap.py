"""What it gains that gradients travel between replicas while backwards run: ``python examples/benchmark/overlap.py``.

One run with overlap in every other step. In the other steps all buckets of gradients start after the schedule.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from processes import HERE, argument_parser, environment, torchrun

# A network namespace has a loopback interface of its own, which may be slowed without rights and without harm.
IN_NAMESPACE = ("unshare", "--map-root-user", "--net", "sh", "-c")
SLOWED = 'ip link set lo up && tc qdisc add dev lo root tbf rate {mbit}mbit burst 256kb limit 64mb && exec "$@"'


def parse_arguments() -> argparse.Namespace:
    parser = argument_parser(__doc__, ("1f1b", "interleaved_1f1b"))
    parser.add_argument("--num-stages", type=int, default=2)
    parser.add_argument("--num-replicas", type=int, default=2)
    parser.add_argument("--num-microbatches", type=int, default=8)
    parser.add_argument("--num-layers", type=int, default=8, help="of the whole model")
    parser.add_argument("--width", type=int, default=512, help="of the layers")
    parser.add_argument("--layer-ms", type=float, default=5.0, help="that a layer waits; 0: GPT blocks that compute")
    parser.add_argument("--link-mbit", type=float, default=1000.0, help="a second, for all ranks together; 0: no limit")
    parser.add_argument("--num-steps", type=int, default=20, help="counted ones with overlap, and as many without")
    parser.add_argument("--timelines", type=Path, help="folder for the timeline of the last step, which overlaps")
    return parser.parse_args()


def measure(schedule: str, settings: dict[str, Any], folder: Path) -> list[list[dict[str, Any]]]:
    """What each rank noted of each counted step."""
    num_ranks = settings["num_stages"] * settings["num_replicas"]
    worker = [str(HERE / "overlap_worker.py"), schedule, json.dumps(settings), str(folder)]
    command = [*torchrun(num_ranks, "--local-addr", "127.0.0.1"), *worker]
    if settings["link_mbit"]:
        command = [*IN_NAMESPACE, SLOWED.format(mbit=settings["link_mbit"]), "sh", *command]
    try:
        subprocess.run(command, env=environment(GLOO_SOCKET_IFNAME="lo"), check=True, capture_output=True, text=True)
    except (OSError, subprocess.CalledProcessError) as error:
        hint = "; a slowed link needs unshare, ip and tc, and --link-mbit 0 does not" if settings["link_mbit"] else ""
        sys.exit(f"{getattr(error, 'stderr', '')}\n{schedule} failed: {error}{hint}")
    return [json.loads((folder / f"{schedule}-{rank}.json").read_text()) for rank in range(num_ranks)]


def summary(ranks: list[list[dict[str, Any]]]) -> tuple[float, float, float]:
    """Median seconds of a step with overlap and without, and the median share of the all-reduces' time that overlaps.

    A step takes as long as on the slowest rank.
    """
    seconds: dict[bool, list[float]] = {True: [], False: []}
    shares: dict[bool, list[float]] = {True: [], False: []}
    for step in zip(*ranks, strict=True):
        overlaps = step[0]["overlaps"]
        seconds[overlaps].append(max(rank["seconds"] for rank in step))
        shares[overlaps].append(step[0]["share"])
    return statistics.median(seconds[True]), statistics.median(seconds[False]), statistics.median(shares[True])


def main() -> None:
    settings = vars(parse_arguments())
    schedules, timelines = settings.pop("schedules"), settings.pop("timelines")
    table = Table(title=f"{settings['num_stages']} stages x {settings['num_replicas']} replicas: median step")
    for name in ("schedule", "with overlap, ms", "without, ms", "ratio", "all-reduce time\nunder backwards"):
        table.add_column(name, justify="left" if name == "schedule" else "right")
    with tempfile.TemporaryDirectory() as temporary:
        folder = timelines or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        for schedule in schedules:
            overlapping, after, share = summary(measure(schedule, settings, folder))
            numbers = f"{overlapping * 1e3:.1f}", f"{after * 1e3:.1f}", f"{overlapping / after:.3f}", f"{share:.0%}"
            table.add_row(schedule, *numbers)
    console = Console(width=None if sys.stdout.isatty() else 120)
    console.print(table)
    if settings["layer_ms"]:
        ms = settings["layer_ms"]
        console.print(f"Simulated: a layer waits {ms:g} ms forward and {2 * ms:g} ms backward in place of computing.")
    if settings["link_mbit"]:
        console.print(f"Simulated: a loopback interface of {settings['link_mbit']:g} Mbit/s that all ranks share.")


if __name__ == "__main__":
    main()
