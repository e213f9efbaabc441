"""Finds the source of a function, if it is what the function runs."""

from __future__ import annotations

import ast
import linecache
from functools import lru_cache
from types import CodeType
from typing import Any


def definition_of(code: CodeType) -> ast.FunctionDef | None:
    """The definition that a function's code was compiled from; None if the source is not there, or has changed."""
    definitions, compiled = _file(code.co_filename)
    place = code.co_name, code.co_firstlineno
    is_it = any(_is_same(one, code) for one in compiled.get(place, ()))
    return definitions.get(place) if is_it else None


@lru_cache(maxsize=64)
def _file(name: str) -> tuple[dict[tuple[str, int], ast.FunctionDef], dict[tuple[str, int], list[CodeType]]]:
    """The functions of a source file, by name and first line, and the code that they compile to."""
    # As a whole: how a function is compiled depends on what its file imports.
    try:
        tree = ast.parse("".join(linecache.getlines(name)))
        pending = [compile(tree, name, "exec", dont_inherit=True)]
    except (SyntaxError, ValueError):
        return {}, {}
    compiled: dict[tuple[str, int], list[CodeType]] = {}
    while pending:
        code = pending.pop()
        compiled.setdefault((code.co_name, code.co_firstlineno), []).append(code)
        pending.extend(const for const in code.co_consts if isinstance(const, CodeType))
    definitions = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef):
            first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
            definitions[node.name, first] = node
    return definitions, compiled


def _is_same(one: Any, other: Any) -> bool:
    """Whether two constants of compiled code, code among them, are the same."""
    if type(one) is not type(other):
        return False
    if not isinstance(one, CodeType):
        return repr(one) == repr(other) or (isinstance(one, frozenset) and one == other)
    counts = ("co_argcount", "co_posonlyargcount", "co_kwonlyargcount", "co_flags")
    parts = ("co_code", "co_names", "co_varnames", "co_cellvars", "co_freevars", *counts)
    return (
        all(getattr(one, part) == getattr(other, part) for part in parts)
        and len(one.co_consts) == len(other.co_consts)
        and all(map(_is_same, one.co_consts, other.co_consts))
    )
