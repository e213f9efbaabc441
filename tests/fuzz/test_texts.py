"""Schedules, plans, rank tables, indexes and traces of any content are taken, or refused by an error of ours."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import yaml
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import nn

from lightning_pipeline.accelerators.rank_table import RankTableError
from lightning_pipeline.accelerators.rank_table_formats import FORMATS, format_rank_table, lost_in, read_rank_table
from lightning_pipeline.accelerators.rank_table_rules import check_placement, check_rank_table, place_stages, renumber
from lightning_pipeline.checkpoint.torch_files import CheckpointError
from lightning_pipeline.checkpoint.weights import load_weights
from lightning_pipeline.partition.stage_config import count_stages, read_stage_config
from lightning_pipeline.partition.stage_map import resolve
from lightning_pipeline.schedules import (
    Schedule,
    ScheduleError,
    as_schedule,
    build,
    check,
    load_csv,
    lower,
    render,
    save_chrome_trace,
    save_csv,
    simulate,
)
from lightning_pipeline.schedules.chrome_trace import load_chrome_trace
from tests.accelerators.tables import group_list, v1_0, v1_2
from tests.fuzz.outcomes import DIGITS, NUMBERS, SCALARS, TEXTS, VALUES, damaged, mutated, taken

more = settings(max_examples=2 * settings.default.max_examples)
"""These are read fast."""


def as_json(value: Any) -> bytes:
    return json.dumps(value).encode()


def as_bytes(text: str) -> bytes:
    return text.encode(errors="surrogatepass")


# -- schedules ------------------------------------------------------------------------------------------------------


def written(save: Callable[[Path], Any]) -> bytes:
    with TemporaryDirectory() as folder:
        save(Path(folder) / "file")
        return (Path(folder) / "file").read_bytes()


CELLS = st.one_of(
    st.builds("{}{}{}".format, st.integers(0, 3), st.sampled_from("FBIW"), st.integers(0, 3)),
    st.builds("{}{}{}".format, DIGITS, st.sampled_from(["F", "B", "SEND_F", "X", ""]), DIGITS),
    st.sampled_from(["", " ", "\t0F0 ", '"0F0"', '"', "\n", "0F0\r", ";"]),
    TEXTS,
)
ROWS = st.lists(st.lists(CELLS, max_size=6), max_size=5)
CSV = written(lambda path: save_csv(build("zbv", 2, 3, 2), path))


def use(schedule: Schedule) -> None:
    """What follows for a schedule that has passed the check has to work."""
    if taken(lambda: check(schedule) or True, ScheduleError):
        assert lower(schedule).lowered and simulate(schedule).makespan > 0 and render(schedule)


@more
@given(st.one_of(ROWS.map(lambda rows: as_bytes("\n".join(map(",".join, rows)))), damaged(CSV), st.binary()))
@example(b"0F0,0B0\n99999999999F0")
@example(b"0F" + b"9" * 5000)
def test_tables_of_schedules(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "mine.csv").write_bytes(content)
    schedule = taken(lambda: load_csv(tmp_path / "mine.csv"), ScheduleError, words="mine.csv")
    if schedule is not None:
        use(schedule)


@more
@given(st.one_of(VALUES, st.lists(st.lists(st.one_of(CELLS, SCALARS), max_size=6), max_size=4)), st.integers(1, 4))
def test_lists_of_schedules(value: Any, num_microbatches: int) -> None:
    make = lambda: as_schedule(value, name="mine", num_microbatches=num_microbatches)  # noqa: E731
    schedule = taken(make, ScheduleError, words="mine")
    if schedule is not None:
        use(schedule)


@more
@given(st.sampled_from(["forward", "gpipe", "1f1b", "interleaved_1f1b", "zbv"]), NUMBERS, NUMBERS, NUMBERS)
def test_counts_of_schedules(name: str, num_ranks: int, num_microbatches: int, num_virtual_stages: int) -> None:
    small = all(count < 10 for count in (num_ranks, num_microbatches, num_virtual_stages))
    schedule = taken(lambda: build(name, num_ranks, num_microbatches, num_virtual_stages), ScheduleError)
    if schedule is not None and small:
        use(schedule)


TRACE = written(lambda path: save_chrome_trace(simulate(build("1f1b", 2, 2)).spans, path))


@more
@given(st.one_of(mutated(json.loads(TRACE), VALUES).map(as_json), damaged(TRACE)))
def test_traces(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "trace.json").write_bytes(content)
    taken(lambda: load_chrome_trace(tmp_path / "trace.json"), ScheduleError, words="trace.json")


# -- stage_config and plans -----------------------------------------------------------------------------------------


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(1, 1), nn.ReLU()) for _ in range(4))
        self.head = nn.Linear(1, 1)


NAMES = st.one_of(
    st.sampled_from(
        ["layers.1", "layers.2", "layers.3", "head", "layers", "layers.2.0", "layers.1:3", "layers.:2", ":1", ""]
    ),
    st.builds("{}{}:{}".format, st.sampled_from(["layers.", "layers", "", "head."]), DIGITS, DIGITS),
    TEXTS,
)
CONFIGS = st.dictionaries(NAMES, st.one_of(st.integers(0, 3), VALUES), max_size=5)
PLAN = b'# 2 stages\nstage_config:\n  "layers.2": 1\nnum_stages: 2\nnum_microbatches: 8\nschedule: 1f1b\n'
TAGS = ("!!int", "!!float", "!!timestamp", "!!binary", "!!set", "!!omap", "!!python/name:os.system")
MARKS = (
    "&a",
    "*a",
    "<<",
    "?",
    "-",
    ":",
    "|",
    ">",
    "[",
    "]",
    "{",
    "}",
    ",",
    "#",
    "'",
    '"',
    "\t",
    "%YAML",
    "---",
    "...",
    "@",
    "`",
)
PLAIN = (
    "1:30",
    "0x1f",
    "0b1",
    "0o7",
    ".inf",
    ".nan",
    "~",
    "=",
    "2020-01-01",
    "yes",
    "head",
    "stage_config:",
    "head: 1",
)
YAML = st.lists(st.one_of(st.sampled_from([*TAGS, *MARKS, *PLAIN]), TEXTS), max_size=12)


def dumped(value: Any) -> bytes:
    try:
        return yaml.safe_dump(value).encode()
    except Exception:  # not all that Python holds can be written
        return b"head: 1"


@more
@given(CONFIGS, st.one_of(st.integers(1, 4), st.just(10**12)), st.booleans())
@example({"head": 10**12}, 2, True)
def test_stage_configs(config: dict[str, Any], num_stages: int, has_virtual_stages: bool) -> None:
    net = Net()

    def read() -> Any:
        checked = read_stage_config(net, config)
        assert count_stages(checked) is None or count_stages(checked) <= 2**18
        return resolve(net, checked, num_stages, has_virtual_stages=has_virtual_stages)

    stages = taken(read, ValueError, KeyError)
    if stages is not None and num_stages > 1:
        assert set(stages.exact) <= {name for name, _ in net.named_modules()}


@more
@given(
    st.one_of(
        st.builds(lambda config: dumped({"stage_config": config}), CONFIGS),
        VALUES.map(dumped),
        st.tuples(YAML, st.sampled_from([" ", "\n", "\n  "])).map(
            lambda p: p[1].join(p[0]).encode(errors="surrogatepass")
        ),
        damaged(PLAN),
        st.binary(),
    )
)
@example(b"a: &a [1]\nb: *a")
@example(b"head: !!int ''")
def test_plans(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "plan.yaml").write_bytes(content)
    config = taken(lambda: read_stage_config(Net(), tmp_path / "plan.yaml"), ValueError)
    if config is not None:
        assert all(isinstance(name, str) and 0 <= stage < 2**18 for name, stage in config.items())


# -- rank tables ----------------------------------------------------------------------------------------------------

TABLES = {name: make() for name, make in (("v1.0", v1_0), ("v1.2", v1_2), ("group_list", group_list))}


@pytest.mark.parametrize("format", FORMATS)
@more
@given(st.data())
def test_rank_tables(tmp_path: Path, format: str, data: st.DataObject) -> None:
    content = data.draw(
        st.one_of(mutated(TABLES[format], VALUES).map(as_json), damaged(as_json(TABLES[format])), st.binary())
    )
    (tmp_path / "table.json").write_bytes(content)
    table = taken(lambda: read_rank_table(tmp_path / "table.json"), RankTableError, words="table.json")
    if table is None:
        return
    assert all(str(finding) for finding in check_rank_table(table)) and table.digest
    assert set(table.servers_here()) <= set(table.servers)
    for num_stages in (1, 2, 3):
        if taken(lambda: place_stages(table, num_stages), RankTableError):  # noqa: B023 - called at once
            assert len(check_placement(table, num_stages)) <= 1
    for other in FORMATS:
        assert all(lost_in(table, other)) and format_rank_table(renumber(table), other)


# -- indexes of weights ---------------------------------------------------------------------------------------------

INDEX = {"metadata": {"total_size": 4}, "weight_map": {"weight": "1.safetensors", "bias": "2.safetensors"}}


@more
@given(st.one_of(mutated(INDEX, VALUES).map(as_json), damaged(as_json(INDEX)), st.binary()))
def test_indexes_of_weights(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "model.safetensors.index.json"
    path.write_bytes(content)
    errors = (CheckpointError, FileNotFoundError, ValueError)
    assert taken(lambda: load_weights(nn.Linear(1, 1), path, ["weight"]), *errors, words=str(tmp_path)) is None
