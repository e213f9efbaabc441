"""Reads the source of a function: what it uses that it is not given, and whether it may do anything but compute.

Any expression may be a module, or a value: a tensor, a number, a tuple or list of them. So what is looked up by a name
has to be harmless on all modules that there are, and on values: methods of tensors are seen as they run, and those of
the others have no effects beyond the function.
"""

from __future__ import annotations

import ast
import builtins
import math
import operator
from collections.abc import Mapping
from functools import lru_cache
from types import CodeType, FunctionType, ModuleType
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lightning_pipeline.recording.source_files import definition_of


class Impure(Exception):
    """The source does not show that the code only computes."""


class Item(NamedTuple):
    """A place that has to hold the same object: a key of a mapping, or an attribute."""

    owner: Any
    name: str
    value: Any


_ATOMS = (
    *(bool, int, float, complex, str, bytes, type(None), type(Ellipsis), torch.Size),
    *(torch.dtype, torch.device, torch.layout, torch.memory_format),
)


def is_plain(value: Any) -> bool:
    """Whether a value cannot change within."""
    return type(value) in _ATOMS or (type(value) is tuple and all(map(is_plain, value)))


class Uses(NamedTuple):
    """What a function uses that it is not given.

    Attributes:
        attributes: names that are read of modules or values.
        items: globals, and attributes of Python's modules.
        absent: (mapping, key) that must not be there.
        functions: of the user's that it calls.
    """

    attributes: set[str]
    items: list[Item]
    absent: list[tuple[Mapping[str, Any], str]]
    functions: list[FunctionType]


def uses_of(function: FunctionType) -> Uses:
    """Read a function, all of whose arguments are modules or values.

    Raises:
        Impure: it may do more than compute.
    """
    code = function.__code__
    if code.co_freevars or function.__kwdefaults__ or not is_plain(function.__defaults__ or ()):
        raise Impure(f"{function.__qualname__} has a closure, or defaults that may change")
    uses = _read(function, code)
    if any(item.owner.get(item.name) is not item.value for item in uses.items):  # since it was read
        return _read.__wrapped__(function, code)
    return uses


@lru_cache(maxsize=1024)
def _read(function: FunctionType, code: CodeType) -> Uses:
    definition = definition_of(code)
    if definition is None:
        raise Impure(f"the source of {function.__qualname__} is not what runs")
    reader = _Reader(function, definition)
    for statement in definition.body:
        reader.read(statement)
    return reader.uses


_NAMESPACES = (torch, nn, F, torch.special, torch.linalg, torch.fft, math, operator)
_CLASSES = (bool, int, float, complex, str, tuple, list, slice, range, enumerate, zip, reversed, Tensor, torch.Size)
_COMPUTING = (
    *(len, range, int, float, bool, complex, min, max, abs, sum, round, any, all, slice, divmod),
    *(enumerate, zip, reversed, list, tuple),
    *(torch.finfo, torch.iinfo, torch.Size, torch.is_tensor, torch.is_grad_enabled),
    *(value for value in vars(math).values() if callable(value)),
    *(getattr(operator, name) for name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "neg", "matmul")),
    *(torch.arange, torch.eye, torch.full, torch.linspace, torch.ones, torch.zeros),
)
_OF_VALUES = frozenset(
    name
    for cls in (Tensor, int, float, complex, str, tuple, list, torch.Size, torch.dtype, torch.device, torch.finfo)
    for name in dir(cls)
)
VALUE_NAMES = frozenset(name for name in _OF_VALUES if not name.startswith("_")) - {
    # Told of a tensor, but not by its spec.
    *("grad", "grad_fn", "is_leaf", "retains_grad", "output_nr", "name", "names", "storage_offset", "is_pinned"),
    *("is_shared", "is_inference", "is_conj", "is_neg", "is_coalesced", "is_set_to", "share_memory_", "data_ptr"),
    *("grad_dtype", "requires_grad_", "format", "format_map"),
}
"""What may be read of any value."""
_READ = (
    *(ast.Expr, ast.Return, ast.Assign, ast.AugAssign, ast.If, ast.For, ast.Delete, ast.Pass, ast.Break, ast.Continue),
    *(ast.Constant, ast.BinOp, ast.UnaryOp, ast.BoolOp, ast.Compare, ast.IfExp, ast.Call, ast.keyword, ast.Starred),
    *(ast.Tuple, ast.List, ast.Dict, ast.Subscript, ast.Slice, ast.ListComp, ast.GeneratorExp, ast.comprehension),
    *(ast.operator, ast.unaryop, ast.boolop, ast.cmpop, ast.expr_context),
)
"""What is as pure as its parts."""


@lru_cache(maxsize=1)
def _torch_functions() -> frozenset[int]:
    """Ids of functions that modes see."""
    functions = torch.overrides.get_overridable_functions()
    return frozenset(id(function) for several in functions.values() for function in several)


def is_torch_function(value: Any) -> bool:
    return callable(value) and not isinstance(value, type) and id(value) in _torch_functions()


def _names_in(code: CodeType) -> set[str]:
    """Names of globals and attributes that code uses, comprehensions within included."""
    return {*code.co_names}.union(*(_names_in(const) for const in code.co_consts if isinstance(const, CodeType)))


class _Reader:
    """Reads the body of one function."""

    def __init__(self, function: FunctionType, definition: ast.FunctionDef) -> None:
        code = function.__code__
        self.uses = Uses(set(), [], [], [])
        self._globals = function.__globals__
        comprehended = {
            name.id
            for node in ast.walk(definition)
            if isinstance(node, ast.comprehension)
            for name in ast.walk(node.target)
            if isinstance(name, ast.Name)
        }
        if not comprehended.isdisjoint(_names_in(code)):
            raise Impure(f"{function.__qualname__} has names in two scopes")
        if function.__globals__.get("__builtins__") not in (builtins, vars(builtins)):
            raise Impure(f"{function.__qualname__} has builtins of its own")
        self._locals = {*code.co_varnames, *code.co_cellvars, *comprehended}

    def read(self, node: ast.AST) -> None:
        """Read a statement or an expression."""
        match node:
            case ast.Raise():  # what is raised leaves no result to go by
                return
            case ast.Assert(test, _):
                self.read(test)
                return
            case ast.AnnAssign(ast.Name(), _, value, _):
                if value is not None:
                    self.read(value)
                return
            case ast.Call(callee, args, keywords) if (static := self._static(callee)) is not None:
                for part in (*args[: self._called(node, static.value)], *keywords):
                    self.read(part)
                return
            case ast.Compare(_, ops, operands) if any(isinstance(op, (ast.Is, ast.IsNot)) for op in ops):
                if len(operands) > 1 or not isinstance(operands[0], ast.Constant):  # equal arguments count as the same
                    raise Impure("the identity of values")
            case ast.Name() | ast.Attribute() if (static := self._static(node)) is not None:
                if not is_plain(static.value):
                    raise Impure(f"{ast.unparse(node)} is more than a value")
                return
            case ast.Name():
                return
            case ast.Attribute(base, name, ast.Load()):
                if name in _OF_VALUES - VALUE_NAMES or name.startswith("__"):
                    raise Impure(f"the attribute {name}")
                self.uses.attributes.add(name)
                self.read(base)
                return
            case ast.Subscript(_, _, ast.Store() | ast.Del()):
                raise Impure(f"stores to {ast.unparse(node)}")
        if not isinstance(node, _READ):
            raise Impure(f"{type(node).__name__} in {ast.unparse(node)}")
        for part in ast.iter_child_nodes(node):
            self.read(part)

    def _called(self, node: ast.Call, function: Any) -> int | None:
        """Take note of a call of a function. Returns how many of its arguments are to be read; None for all."""
        if function is isinstance and len(node.args) == 2:
            classes = node.args[1].elts if isinstance(node.args[1], ast.Tuple) else [node.args[1]]
            for static in map(self._static, classes):
                cls = None if static is None else static.value
                # A class of another metaclass may tell its instances by anything.
                if cls not in _CLASSES and not (type(cls) is type and issubclass(cls, nn.Module)):
                    raise Impure(f"{ast.unparse(node)} is not known to tell classes")
            return 1
        if function is torch.finfo and not node.args:
            raise Impure("torch.finfo() of the default dtype, which may change")
        if not is_torch_function(function) and not any(function is one for one in _COMPUTING):
            if not isinstance(function, FunctionType):
                raise Impure(f"{ast.unparse(node.func)} is not known to compute")
            self.uses.functions.append(function)
        return None

    def _static(self, node: ast.expr) -> Item | None:
        """A global, or an attribute of one of Python's modules; None for other expressions."""
        match node:
            case ast.Name(name):
                if name.startswith("__"):
                    raise Impure(f"{name}, which may be another name where it is read")
                if name in self._locals:
                    return None
                owner: Mapping[str, Any] = self._globals
                if name not in owner:
                    owner = vars(builtins)
                    self.uses.absent.append((self._globals, name))
            case ast.Attribute(base, name) if (static := self._static(base)) is not None:
                if not isinstance(static.value, ModuleType):
                    return None
                if static.value not in _NAMESPACES:
                    raise Impure(f"{static.value.__name__} is not known to compute")
                owner = vars(static.value)
            case _:
                return None
        if name not in owner:
            raise Impure(f"{name} is not there")
        found = Item(owner, name, owner[name])
        self.uses.items.append(found)
        return found
