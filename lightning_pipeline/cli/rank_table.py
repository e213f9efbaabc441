"""`lightning-pipeline rank-table`: rank tables of Ascend machines."""

from __future__ import annotations

import os
from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import Annotated

import typer

from lightning_pipeline.accelerators.rank_table import (
    Format,
    Rank,
    RankTable,
    RankTableError,
    device_ids,
    listed,
    rank_ids,
)
from lightning_pipeline.accelerators.rank_table_formats import format_rank_table, lost_in, read_rank_table
from lightning_pipeline.accelerators.rank_table_rules import (
    Generation,
    RuleViolation,
    check_placement,
    check_rank_table,
    place_stages,
    renumber,
    replicas_by_server,
)
from lightning_pipeline.cli.common import CommandError, bare_table, errors_without_traceback, wide_console
from lightning_pipeline.schedules.validation import read_text

MAX_DEVICES = 4096
"""Devices of a server."""
MAX_CONF_BYTES = 2**20

app = typer.Typer(
    help="Rank tables of Ascend machines: check, make, convert and start from them.", no_args_is_help=True
)

File = Annotated[Path, typer.Argument(metavar="FILE", help="A rank table of any format.")]
Stages = Annotated[int | None, typer.Option("--stages", min=1, help="Show where so many stages sit, and check it.")]
Machine = Annotated[
    Generation | None,
    typer.Option("--generation", help="Generation of the servers. Without it, what only 910A forbids is a warning."),
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
        findings = check_rank_table(table, generation)
        # Stages are placed by rank, which means nothing while the ranks are wrong.
        shows_stages = stages is not None and not any(finding.is_error for finding in findings)
        if stages is not None and shows_stages:
            findings += check_placement(table, stages)
        _print_ranks(table)
        if stages is not None and shows_stages:
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
            help="server_id of each server, best its address. With several servers, followed by = and the addresses of "
            "its devices (10.0.0.1=192.168.1.1,192.168.1.2) or a copy of its hccn.conf (10.0.0.1=conf/hccn1.conf).",
        ),
    ],
    devices: Annotated[
        str, typer.Option(metavar="NUMBERS", help="Devices of each server, such as 0-7 or 0,1,4,5.")
    ] = "0-7",
    to: Annotated[Format, typer.Option("--to", help="Format of the file.")] = "v1.0",
    output: Output = None,
    force: Force = False,
) -> None:
    """Make a rank table: ranks go through the servers in the order of their ids, and there through the devices."""
    with errors_without_traceback(RankTableError):
        ids = _numbers(devices)
        ranks = [rank for text in servers for rank in _ranks_of(text, ids)]
        _write(renumber(RankTable(tuple(ranks))), to, output, force=force)


@app.command()
def convert(
    file: File,
    to: Annotated[Format | None, typer.Option("--to", help="Format of the file.", show_default="that of FILE")] = None,
    renumbered: Annotated[
        bool, typer.Option("--renumber", help="Number the ranks by server_id and device_id instead of keeping them.")
    ] = False,
    output: Output = None,
    force: Force = False,
) -> None:
    """Write a rank table in another format, with other ranks, or both."""
    with errors_without_traceback(RankTableError):
        table = read_rank_table(file)
        _write(renumber(table) if renumbered else table, to or table.format, output, force=force)


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
        _report(check_rank_table(table))
        ranks = table.servers[_server_of_processes(table, server)]
    for rank in ranks:
        typer.echo(f"RANK_ID={rank.rank_id} RANK_SIZE={len(table)} DEVICE_ID={rank.device_id}")


def _write(table: RankTable, to: Format, output: Path | None, *, force: bool) -> None:
    """Write a table that can be used."""
    if output is not None and os.path.lexists(output) and not force:
        raise CommandError(f"{output} exists: choose another --output, or replace it with --force")
    if lost := lost_in(table, to):
        typer.echo(f"Warning: {to} has no place for {', '.join(lost)}: left out", err=True)
    _report(check_rank_table(table))
    text = format_rank_table(table, to)
    if output is None:
        typer.echo(text, nl=False)
    else:
        output.write_text(text, encoding="utf-8")
        _print_ranks(table)
        typer.echo(f"Wrote {output} ({to}).")


def _report(findings: Sequence[RuleViolation]) -> None:
    """Print warnings, then errors; with errors the command ends."""
    for finding in sorted(findings, key=lambda finding: finding.is_error):
        typer.echo(f"{'Error' if finding.is_error else 'Warning'}: {finding}", err=True)
    if any(finding.is_error for finding in findings):
        raise typer.Exit(2)


def _ranks_of(text: str, device_ids: list[int]) -> list[Rank]:
    """The devices of a SERVER argument; they have no ranks yet."""
    server_id, equals, rest = text.partition("=")
    if not server_id or (equals and not rest):
        raise CommandError(f"a server is SERVER_ID or SERVER_ID=ADDRESSES, got {text!r}")
    if not rest:
        addresses = [""] * len(device_ids)
    elif rest.endswith(".conf") or os.sep in rest:
        addresses = _hccn_addresses(Path(rest), device_ids)
    else:
        addresses = rest.split(",")
        if len(addresses) != len(device_ids):
            raise CommandError(
                f"server {server_id} has {len(addresses)} addresses for {len(device_ids)} devices "
                f"({listed(device_ids)}): give one for each, or other --devices"
            )
    return [Rank(0, server_id, device_id, address) for device_id, address in zip(device_ids, addresses, strict=True)]


def _hccn_addresses(path: Path, device_ids: list[int]) -> list[str]:
    """The devices' addresses in a server's /etc/hccn.conf: ``address_0=192.168.1.1`` and so on."""
    try:
        text = read_text(path, kind="an hccn.conf", most=MAX_CONF_BYTES)
    except ValueError as error:
        raise CommandError(str(error)) from None
    lines = (line.partition("=") for line in text.splitlines())
    found = {name.strip(): value.strip() for name, _, value in lines}
    missing = [number for number in device_ids if f"address_{number}" not in found]
    if missing:
        raise CommandError(f"{path} has no address of devices {listed(missing)}: give other --devices, or addresses")
    return [found[f"address_{number}"] for number in device_ids]


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


def _server_of_processes(table: RankTable, server_id: str | None) -> str:
    names = list(table.servers)
    if server_id is not None:
        if server_id not in names:
            raise CommandError(f"the rank table has no server {server_id!r}, it has {', '.join(names)}")
        return server_id
    here = names if len(names) == 1 else table.servers_here()
    if len(here) == 1:
        return here[0]
    which = "several of the servers have" if here else "none of the servers has"
    raise CommandError(f"{which} an address or the name of this machine: choose one with --server ({', '.join(names)})")


# -- printed tables ---------------------------------------------------------------------------------------------------


def _print_ranks(table: RankTable) -> None:
    pods = {server_id: pod for pod, server_ids in table.super_pods.items() for server_id in server_ids}
    rows = [
        [listed(rank_ids(ranks)), server_id, _spaced(ranks), *([pods.get(server_id, "")] if pods else [])]
        for server_id, ranks in table.servers.items()
    ]
    _print(["ranks", "server", "devices", *(["super pod"] if pods else [])], rows)


def _print_stages(table: RankTable, num_stages: int) -> None:
    rows = []
    for number, stage in enumerate(place_stages(table, num_stages)):
        for server_id, replicas in replicas_by_server(stage).items():
            ranks = [stage[replica] for replica in replicas]
            first = str(number) if replicas[0] == 0 else ""
            rows.append([first, listed(replicas), listed(rank_ids(ranks)), server_id, _spaced(ranks)])
    _print(["stage", "replicas", "ranks", "server", "devices"], rows)


def _spaced(ranks: Sequence[Rank]) -> str:
    return " ".join(map(str, device_ids(ranks)))


def _print(headers: list[str], rows: list[list[str]]) -> None:
    from rich.markup import escape

    table = bare_table(*headers)
    for row in rows:
        table.add_row(*map(escape, row))
    wide_console().print(table)
    typer.echo()
