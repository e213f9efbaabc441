"""Imports go downwards only: schedules, partition, runtime, accelerators, strategy."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "lightning_pipeline"
FLOORS = ["schedules", "partition", "runtime", "accelerators", "strategy"]
FOREIGN = {"schedules": {"torch", "lightning", "numpy"}, "partition": {"lightning"}, "runtime": {"lightning"}}

# Rank tables are checked on machines that have no torch yet, so reading them takes the standard library alone.
RANK_TABLES = {
    f"lightning_pipeline.accelerators.{name}"
    for name in ("rank_table", "rank_table_formats", "rank_table_hosts", "rank_table_placement", "rank_table_rules")
}


def imported_modules(path: Path, *, at_once: bool = False) -> set[str]:
    """What a file imports, or what it does as it is imported itself."""
    found: set[str] = set()
    tree = ast.parse(path.read_text())
    for node in tree.body if at_once else ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} has a relative import"
            found.add(node.module or "")
    return found


@pytest.mark.parametrize("floor", FLOORS)
def test_a_floor_imports_none_above_it(floor: str) -> None:
    above = {f"lightning_pipeline.{name}" for name in FLOORS[FLOORS.index(floor) + 1 :]}
    for path in (PACKAGE / floor).glob("**/*.py"):
        for module in imported_modules(path):
            assert not any(module == name or module.startswith(f"{name}.") for name in above), f"{path}: {module}"
            assert module.partition(".")[0] not in FOREIGN.get(floor, set()), f"{path}: {module}"


def test_partition_starts_no_processes() -> None:
    for path in (PACKAGE / "partition").glob("*.py"):
        between = [module for module in imported_modules(path) if module.startswith("torch.distributed")]
        assert set(between) <= {"torch.distributed.tensor"}, path  # a kind of tensor


def test_rank_tables_need_the_standard_library_only() -> None:
    files = [PACKAGE.parent / f"{name.replace('.', '/')}.py" for name in RANK_TABLES]
    for path in [PACKAGE / "accelerators/__init__.py", *files]:
        for module in imported_modules(path, at_once=path.name == "__init__.py"):
            assert module in RANK_TABLES or module.partition(".")[0] in sys.stdlib_module_names, f"{path}: {module}"


def test_the_command_line_needs_schedules_and_rank_tables_only() -> None:
    others = {f"lightning_pipeline.{floor}" for floor in FLOORS[1:]}
    for path in (PACKAGE / "cli").glob("*.py"):
        for module in imported_modules(path, at_once=True):
            assert module.partition(".")[0] not in {"torch", "lightning"}, f"{path}: {module}"
            assert module in RANK_TABLES or ".".join(module.split(".")[:2]) not in others, f"{path}: {module}"
