"""`lightning-pipeline rank-table`: rank tables of Ascend machines."""

from __future__ import annotations

import os
from collections.abc import Sequence
from enum import Enum
from itertools import islice
from pathlib import Path
from typing import Annotated

import typer

from lightning_pipeline.accelerators.rank_table import Device, RankTable, RankTableError, Server, is_this_host, listed
from lightning_pipeline.accelerators.rank_table_formats import format_rank_table, lost_in, read_rank_table
from lightning_pipeline.accelerators.rank_table_rules import (
    RuleViolation,
    check_placement,
    check_rank_table,
    place_stages,
    renumber,
)
from lightning_pipeline.cli.common import CommandError, bare_table, errors_without_traceback, wide_console
from lightning_pipeline.schedules.validation import read_text

MAX_DEVICES = 4096
"""Devices of a server."""
MAX_CONF_BYTES = 2**20

app = typer.Typer(
    help="Rank tables of Ascend machines: check, make, convert and start from them.", no_args_is_help=True
)


class Format(str, Enum):
    """Formats of files."""

    V1_0 = "v1.0"
    V1_2 = "v1.2"
    GROUP_LIST = "group_list"


class Generation(str, Enum):
    """Generations of machines."""

    ATLAS_910A = "910a"
    A2 = "a2"
    A3 = "a3"


File = Annotated[Path, typer.Argument(metavar="FILE", help="A rank table of any format.")]
Stages = Annotated[int | None, typer.Option("--stages", min=1, help="Show where this many stages sit.")]
Machine = Annotated[
    Generation | None,
    typer.Option(
        "--generation", help="What the servers are; what only 910A servers forbid is a warning where it is not known."
    ),
]
Output = Annotated[
    Path | None, typer.Option("--output", "-o", metavar="FILE", help="Write there.", show_default="the terminal")
]
Force = Annotated[bool, typer.Option("--force", help="Replace the file that --output names.")]


@app.command()
def check(file: File, stages: Stages = None, generation: Machine = None) -> None:
    """Check a rank table, and show where its ranks and the stages of a pipeline sit."""
    with errors_without_traceback(RankTableError):
        table = read_rank_table(file)
        findings = _findings(table, generation, stages)
        _print_ranks(table)
        if stages is not None and not _has_errors(findings):
            _print_stages(table, stages)
        _report(findings)
    servers = f"{len(table.servers)} server{'s' * (len(table.servers) > 1)}"
    typer.echo(f"{file}: a rank table ({table.format}) of {len(table)} ranks on {servers} that can be used.")


@app.command()
def make(
    servers: Annotated[
        list[str],
        typer.Argument(
            metavar="SERVER",
            help="server_id of each server, best its address. With several servers, then = and the addresses of its "
            "devices (10.0.0.1=192.168.1.1,192.168.1.2) or a copy of its hccn.conf (10.0.0.1=conf/hccn1.conf).",
        ),
    ],
    devices: Annotated[
        str, typer.Option(metavar="NUMBERS", help="Devices of each server, such as 0-7 or 0,1,4,5.")
    ] = "0-7",
    to: Annotated[Format, typer.Option("--to", help="Format of the file.")] = Format.V1_0,
    output: Output = None,
    stages: Stages = None,
    generation: Machine = None,
    force: Force = False,
) -> None:
    """Make a rank table: ranks go through the servers in the order of their ids, and there through the devices."""
    with errors_without_traceback(RankTableError):
        ids = _numbers(devices)
        made = [_server(text, ids) for text in servers]
        _finish(renumber(RankTable(tuple(made))), to, output, stages, generation, force=force)


@app.command()
def convert(
    file: File,
    to: Annotated[Format, typer.Option("--to", help="Format of the file.", show_default="that of FILE")] = None,  # type: ignore[assignment]
    renumbered: Annotated[
        bool, typer.Option("--renumber", help="Number the ranks by server_id and device_id instead of keeping them.")
    ] = False,
    output: Output = None,
    stages: Stages = None,
    generation: Machine = None,
    force: Force = False,
) -> None:
    """Write a rank table in another format, with other ranks, or both."""
    with errors_without_traceback(RankTableError):
        table = read_rank_table(file)
        if renumbered:
            table = renumber(table)
        _finish(table, to or Format(table.format), output, stages, generation, force=force)


@app.command()
def processes(
    file: File,
    server: Annotated[
        str | None,
        typer.Option(
            metavar="SERVER_ID", help="The server.", show_default="this machine's, by address or name, or the only one"
        ),
    ] = None,
) -> None:
    """Print the variables of each process of a server, a line for each: `env $LINE python train.py` starts one."""
    with errors_without_traceback(RankTableError):
        table = read_rank_table(file)
        _report(_findings(table, None, None))
        chosen = _chosen(table, server)
    for device in chosen.devices:
        typer.echo(f"RANK_ID={device.rank} RANK_SIZE={len(table)} DEVICE_ID={device.device_id}")


def _finish(
    table: RankTable,
    to: Format,
    output: Path | None,
    stages: int | None,
    generation: Generation | None,
    *,
    force: bool,
) -> None:
    """Check the table and write it, unless it has errors."""
    if output is not None and os.path.lexists(output) and not force:
        raise CommandError(f"{output} exists: choose another --output, or replace it with --force")
    findings = _findings(table, generation, stages)
    lost = lost_in(table, to.value)
    if lost:
        typer.echo(f"Warning: {to.value} has no place for {', '.join(lost)}: left out", err=True)
    _report(findings)
    text = format_rank_table(table, to.value)
    if output is None:
        typer.echo(text, nl=False)
        return
    output.write_text(text, encoding="utf-8")
    _print_ranks(table)
    if stages is not None:
        _print_stages(table, stages)
    typer.echo(f"Wrote {output} ({to.value}).")


def _findings(table: RankTable, generation: Generation | None, stages: int | None) -> list[RuleViolation]:
    findings = check_rank_table(table, None if generation is None else generation.value)
    # Stages are placed by rank numbers, which are meaningless in a table with errors.
    if stages is not None and not _has_errors(findings):
        findings += check_placement(table, stages)
    return findings


def _has_errors(findings: Sequence[RuleViolation]) -> bool:
    return any(finding.is_error for finding in findings)


def _report(findings: Sequence[RuleViolation]) -> None:
    """Print warnings, then errors; with errors the command ends."""
    for finding in sorted(findings, key=lambda finding: finding.is_error):
        typer.echo(f"{'Error' if finding.is_error else 'Warning'}: {finding}", err=True)
    if _has_errors(findings):
        raise typer.Exit(2)


def _server(text: str, device_ids: list[int]) -> Server:
    server_id, equals, rest = text.partition("=")
    if not server_id or (equals and not rest):
        raise CommandError(f"a server is SERVER_ID or SERVER_ID=ADDRESSES, got {text!r}")
    if not rest:
        addresses = dict.fromkeys(device_ids, "")
    elif rest.endswith(".conf") or os.sep in rest:
        addresses = _hccn_addresses(Path(rest), device_ids)
    else:
        listed_addresses = rest.split(",")
        if len(listed_addresses) != len(device_ids):
            raise CommandError(
                f"server {server_id} has {len(listed_addresses)} addresses for {len(device_ids)} devices "
                f"({listed(device_ids)}): give one for each, or other --devices"
            )
        addresses = dict(zip(device_ids, listed_addresses, strict=True))
    return Server(server_id, tuple(Device(number, number, addresses[number]) for number in device_ids))


def _hccn_addresses(path: Path, device_ids: list[int]) -> dict[int, str]:
    """The addresses in a server's /etc/hccn.conf: ``address_0=192.168.1.1`` and so on."""
    try:
        text = read_text(path, kind="an hccn.conf", most=MAX_CONF_BYTES)
    except ValueError as error:
        raise CommandError(str(error)) from None
    lines = (line.partition("=") for line in text.splitlines())
    found = {name.strip(): value.strip() for name, _, value in lines}
    missing = [number for number in device_ids if f"address_{number}" not in found]
    if missing:
        raise CommandError(f"{path} has no address of devices {listed(missing)}: give other --devices, or addresses")
    return {number: found[f"address_{number}"] for number in device_ids}


def _numbers(text: str) -> list[int]:
    """Parse ``"0-3,6"``."""
    numbers: list[int] = []
    try:
        for part in text.split(","):
            first, _, last = part.partition("-")
            numbers += islice(range(int(first), int(last or first) + 1), MAX_DEVICES + 1)
    except ValueError:
        numbers = []
    if not numbers or len(set(numbers)) < len(numbers) or max(numbers) >= MAX_DEVICES:
        raise CommandError(
            f"--devices takes different numbers such as 0-7 or 0,1,4,5, got {text[:40]!r} (all below {MAX_DEVICES})"
        )
    return numbers


def _chosen(table: RankTable, server_id: str | None) -> Server:
    names = [server.server_id for server in table.servers]
    if server_id is None:
        here = table.servers if len(table.servers) == 1 else [s for s in table.servers if is_this_host(s)]
        if len(here) == 1:
            return here[0]
        which = "several of the servers have" if here else "none of the servers has"
        raise CommandError(
            f"{which} an address or the name of this machine: choose one with --server ({', '.join(names)})"
        )
    if server_id not in names:
        raise CommandError(f"the rank table has no server {server_id!r}, it has {', '.join(names)}")
    return table.servers[names.index(server_id)]


# -- printed tables ---------------------------------------------------------------------------------------------------


def _print_ranks(table: RankTable) -> None:
    pods = {name: pod.super_pod_id for pod in table.super_pods for name in pod.server_ids}
    rows = [
        [
            listed(server.ranks),
            server.server_id,
            " ".join(str(device.device_id) for device in server.devices),
            *([pods.get(server.server_id, "")] if pods else []),
        ]
        for server in table.servers
    ]
    _print(["ranks", "server", "devices", *(["super pod"] if pods else [])], rows)


def _print_stages(table: RankTable, num_stages: int) -> None:
    rows = []
    for place in place_stages(table, num_stages):
        for number, (server, replicas) in enumerate(place.parts):
            ranks = [place.ranks[replica] for replica in replicas]
            devices = " ".join(str(rank.device.device_id) for rank in ranks)
            stage = str(place.stage) if number == 0 else ""
            rows.append([stage, listed(replicas), listed([r.rank for r in ranks]), server.server_id, devices])
    _print(["stage", "replicas", "ranks", "server", "devices"], rows)


def _print(headers: list[str], rows: list[list[str]]) -> None:
    from rich.markup import escape

    table = bare_table(*headers)
    for row in rows:
        table.add_row(*map(escape, row))
    wide_console().print(table)
    typer.echo()
