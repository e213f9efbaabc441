"""Imports go downwards only, from one folder to those named before it."""

from __future__ import annotations

import ast
import re
import sys
from pathlib import Path

import pytest

from lightning_pipeline._names import PACKAGES

PACKAGE = Path(__file__).parents[1] / "lightning_pipeline"
FLOORS = [
    *("schedules", "partition", "recording", "runtime", "engine", "hooks"),
    *("planning", "accelerators", "checkpoint", "strategy", "cli"),
]
FOREIGN = {"schedules": {"torch", "numpy"}}
# Imported only for schedules that are too large for anything else.
EXCEPTIONS = {"schedules/compact.py": {"numpy"}}

# Rank tables are checked on machines that have no torch yet.
RANK_TABLES = {
    f"lightning_pipeline.accelerators.{name}" for name in ("rank_table", "rank_table_formats", "rank_table_rules")
}

# Costs of plans on paper are computed where torch is not imported yet.
WITHOUT_TORCH = RANK_TABLES | {"lightning_pipeline.planning.cost_model", "lightning_pipeline.planning.search"}


def imported_modules(path: Path, *, at_once: bool = False) -> set[str]:
    """What a file imports, or what it does as it is imported itself. A relative import begins with dots."""
    found: set[str] = set()
    tree = ast.parse(path.read_text())
    for node in tree.body if at_once else ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            if node.module:
                found.add("." * node.level + node.module)
            else:
                found |= {"." * node.level + alias.name for alias in node.names}
    return found


def absolute(module: str, path: Path) -> str:
    """What a file of a floor calls a module, by its own name."""
    if module.startswith(".."):
        return f"lightning_pipeline.{module[2:]}"
    return f"lightning_pipeline.{path.parent.name}.{module[1:]}" if module.startswith(".") else module


@pytest.mark.parametrize("floor", FLOORS)
def test_a_floor_imports_none_above_it(floor: str) -> None:
    above = {f"lightning_pipeline.{name}" for name in FLOORS[FLOORS.index(floor) + 1 :]}
    for path in (PACKAGE / floor).glob("**/*.py"):
        for module in (absolute(module, path) for module in imported_modules(path)):
            assert not any(module == name or module.startswith(f"{name}.") for name in above), f"{path}: {module}"
            foreign = FOREIGN.get(floor, set()) - EXCEPTIONS.get(path.relative_to(PACKAGE).as_posix(), set())
            assert module.partition(".")[0] not in foreign, f"{path}: {module}"


def test_one_file_imports_lightning() -> None:
    for path in PACKAGE.rglob("*.py"):
        named = {module.partition(".")[0] for module in imported_modules(path)} & set(PACKAGES)
        assert not named or path == PACKAGE / "_lightning.py", path


def test_what_takes_lightning_is_imported_relatively() -> None:
    """It exists once for each of Lightning's names, and what one takes from the other would be the other name's."""
    files = [path for floor in ("accelerators", "checkpoint", "strategy") for path in (PACKAGE / floor).glob("*.py")]
    imported = {path: {absolute(module, path) for module in imported_modules(path)} for path in files}
    name = {path: f"lightning_pipeline.{path.parent.name}.{path.stem}" for path in files}
    bound = {"lightning_pipeline._lightning"}
    while more := {name[path] for path in files if imported[path] & bound} - bound:
        bound |= more
    assert "lightning_pipeline.strategy.pipeline" in bound and "lightning_pipeline.accelerators.npu" in bound
    for path in files:
        for module in imported_modules(path):
            # The floor's own package imports all of it.
            assert module not in bound and not module.startswith("lightning_pipeline.strategy"), f"{path}: {module}"


@pytest.mark.parametrize("floor", ["partition", "recording"])
def test_what_cuts_and_records_starts_no_processes(floor: str) -> None:
    for path in (PACKAGE / floor).glob("*.py"):
        between = [module for module in imported_modules(path) if module.startswith("torch.distributed")]
        assert set(between) <= {"torch.distributed.tensor"}, path  # a kind of tensor


def test_private_parts_of_torch_have_one_home() -> None:
    private = re.compile(r"(torch|dist)(\.\w+)*\._(?!_)")
    for path in set(PACKAGE.rglob("*.py")) - {PACKAGE / "_torch.py"}:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute):
                assert not private.match(ast.unparse(node)), f"{path}:{node.lineno}: {ast.unparse(node)}"
            elif isinstance(node, ast.ImportFrom):
                for alias in node.names:
                    assert not private.match(f"{node.module}.{alias.name}"), f"{path}:{node.lineno}: {alias.name}"


def test_rank_tables_need_no_torch() -> None:
    files = [PACKAGE.parent / f"{name.replace('.', '/')}.py" for name in RANK_TABLES]
    for path in [PACKAGE / "accelerators/__init__.py", *files]:
        for module in imported_modules(path, at_once=path.name == "__init__.py"):
            is_known = module in RANK_TABLES or module.startswith("lightning_pipeline.schedules")
            assert is_known or module.partition(".")[0] in sys.stdlib_module_names, f"{path}: {module}"


def test_costs_on_paper_need_schedules_only() -> None:
    for name in WITHOUT_TORCH - RANK_TABLES:
        for module in imported_modules(PACKAGE.parent / f"{name.replace('.', '/')}.py"):
            is_known = module in WITHOUT_TORCH or module.startswith("lightning_pipeline.schedules")
            assert is_known or module.partition(".")[0] in sys.stdlib_module_names, f"{name}: {module}"


def test_the_command_line_needs_schedules_and_rank_tables_only() -> None:
    others = {f"lightning_pipeline.{floor}" for floor in FLOORS[1:-1]}
    for path in (PACKAGE / "cli").glob("*.py"):
        for module in imported_modules(path, at_once=True):
            assert module.partition(".")[0] not in {"torch", *PACKAGES}, f"{path}: {module}"
            assert module in WITHOUT_TORCH or ".".join(module.split(".")[:2]) not in others, f"{path}: {module}"


def test_no_circle_in_what_is_imported_at_once() -> None:
    """Of the whole package: a circle is where two files are one subject."""
    files = {module_of(path): path for path in PACKAGE.rglob("*.py")}
    uses = {name: imported_files(path) & files.keys() - {name} for name, path in files.items()}
    while leaves := {name for name, used in uses.items() if not used & uses.keys()}:
        uses = {name: used for name, used in uses.items() if name not in leaves}
    assert uses == {}


def module_of(path: Path) -> str:
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imported_files(path: Path) -> set[str]:
    """What a file imports as it is imported itself, and what of that are names or modules, as both may be."""
    found: set[str] = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.ImportFrom):
            module = absolute("." * node.level + (node.module or ""), path).rstrip(".")
            of_names = {f"{module}.{alias.name}" for alias in node.names}
            found |= of_names | ({module} if path.name != "__init__.py" else set())
    return found
