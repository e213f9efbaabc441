"""Every name of ``torch.npu`` that the package uses is in the source of torch_npu's wheel."""

from __future__ import annotations

import ast
import importlib.metadata
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "lightning_pipeline"
MODULE = Path(str(importlib.metadata.distribution("torch-npu").locate_file("torch_npu/npu")))

# Functions that give `torch.npu`, here or in torch.
GIVE_MODULE = {"npu_module", "device_module", "get_device_module"}


def test_names_are_in_the_wheel() -> None:
    used = {name: path for path in PACKAGE.rglob("*.py") for name in names_used(path.read_text())}
    assert {"device_count", "set_device", "default_generators"} <= used.keys(), "the search misses what is there"
    missing = [f"torch.npu.{name} ({path.name})" for name, path in used.items() if not is_defined(MODULE, name)]
    assert not missing


def test_a_name_that_is_not_there() -> None:
    source = "def f(device):\n    module = torch.get_device_module(device)\n    return module.amp.no_such_name()"
    assert names_used(source) == {"amp", "amp.no_such_name"}
    assert not is_defined(MODULE, "amp.no_such_name")
    assert not is_defined(MODULE, "no_such_name")


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ("torch.npu.is_available()", "is_available"),
        ("import torch_npu\ntorch_npu.npu.Stream", "Stream"),
        ("npu_module().memory_stats(device)", "memory_stats"),
        ("own: Any = getattr(device_module(kind), 'amp', None)\nmake = getattr(own, 'GradScaler')", "amp.GradScaler"),
    ],
)
def test_names_are_found(source: str, name: str) -> None:
    assert name in names_used(source)
    assert is_defined(MODULE, name)


def names_used(source: str) -> set[str]:
    """Dotted names in ``torch.npu`` that `source` reads."""
    tree = ast.parse(source)
    variables: dict[str, str] = {}
    for node in ast.walk(tree):  # a variable's name means one thing in a file
        if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
            path = _path(node.value, variables)
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            variables.update({t.id: path for t in targets if isinstance(t, ast.Name) and path is not None})
    return {path for node in ast.walk(tree) if (path := _path(node, variables))}


def _path(node: ast.AST, variables: dict[str, str]) -> str | None:
    """Where in ``torch.npu`` an expression is: "" for the module itself, None for what is not in it."""
    if ast.unparse(node) in ("torch.npu", "torch_npu.npu"):
        return ""
    if isinstance(node, ast.Name):
        return variables.get(node.id)
    if isinstance(node, ast.Attribute):
        return _member(_path(node.value, variables), node.attr)
    if isinstance(node, ast.Call):
        function = ast.unparse(node.func).rpartition(".")[2]
        if function in GIVE_MODULE:
            return ""
        if function == "getattr" and isinstance(node.args[1], ast.Constant):
            return _member(_path(node.args[0], variables), node.args[1].value)
    return None


def _member(path: str | None, name: str) -> str | None:
    return None if path is None else f"{path}.{name}".lstrip(".")


def is_defined(package: Path, name: str) -> bool:
    """Whether the package's ``__init__.py`` binds the name, a dotted one in its submodule."""
    first, _, rest = name.partition(".")
    if rest:
        return is_defined(package / first, rest)
    is_module = (package / f"{name}.py").exists() or (package / name).is_dir()
    return is_module or name in set(_bound(package / "__init__.py"))


def _bound(file: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.ImportFrom) and node.names[0].name == "*":
            module = file.parent / str(node.module).replace(".", "/") if node.level == 1 else None
            if module is not None:
                yield from _bound(module / "__init__.py" if module.is_dir() else module.with_suffix(".py"))
        elif isinstance(node, ast.ImportFrom | ast.Import):
            yield from (alias.asname or alias.name for alias in node.names)
        elif isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
