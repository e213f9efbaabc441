"""Reads the source of a function: what it uses that it is not given, and whether it may do anything but compute.

What a name or an expression may be is followed in two kinds: modules, of which attributes are read and which are
called, and values (tensors, numbers, tuples and lists of them), on which any method may be called: those of tensors
are seen as they run, the others have no effects beyond the function.
"""

from __future__ import annotations

import ast
import builtins
import inspect
import math
import operator
from collections.abc import Iterable, Mapping
from enum import Enum, auto
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


class _Kind(Enum):
    """What an expression may be at most."""

    VALUE = auto()  # no module
    MODULE = auto()


class _Static(NamedTuple):
    """An expression whose object is known: a global, or an attribute of one."""

    value: Any


_Result = _Kind | _Static


class Uses(NamedTuple):
    """What a function uses that it is not given.

    Attributes:
        attributes: names that are read of modules.
        items: globals, and attributes of Python's modules.
        absent: (mapping, key) that must not be there.
        functions: of the user's that it calls.
    """

    attributes: set[str]
    items: list[Item]
    absent: list[tuple[Mapping[str, Any], str]]
    functions: list[FunctionType]


def uses_of(function: FunctionType, own: frozenset[str] | None, children: frozenset[str]) -> Uses:
    """Read a function, all of whose arguments are values.

    Args:
        own: names of the modules in its first argument, which is a module; None where that is a value, too.
        children: names of modules in any module.

    Raises:
        Impure: it may do more than compute.
    """
    code = function.__code__
    if code.co_freevars or function.__kwdefaults__ or not is_plain(function.__defaults__ or ()):
        raise Impure(f"{function.__qualname__} has a closure, or defaults that may change")
    uses = _read(function, code, own, children)
    if any(item.owner.get(item.name) is not item.value for item in uses.items):  # since it was read
        return _read.__wrapped__(function, code, own, children)
    return uses


@lru_cache(maxsize=1024)
def _read(function: FunctionType, code: CodeType, own: frozenset[str] | None, children: frozenset[str]) -> Uses:
    if code.co_flags & (inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR):
        raise Impure(f"{function.__qualname__} is a generator")
    definition = definition_of(code)
    if definition is None:
        raise Impure(f"the source of {function.__qualname__} is not what runs")
    reader = _Reader(function, definition, own, children)
    while True:  # a name that turns out to be a module's may have been used before
        before = set(reader.modules)
        reader.read()
        if reader.modules == before:
            return reader.uses


OF_CONTAINERS = frozenset(("__getitem__", "__iter__", "__len__", "__reversed__"))
"""By which an object's parts are looked at."""
_NAMESPACES = (torch, nn, F, torch.special, torch.linalg, torch.fft, math, operator)
_CLASSES = (bool, int, float, complex, str, tuple, list, slice, range, enumerate, zip, reversed, Tensor, torch.Size)
_OF_MODULES = (enumerate, zip, reversed, list, tuple)
"""What gives modules where it is given some."""
_COMPUTING = frozenset(
    (
        *(len, isinstance, range, int, float, bool, complex, str, min, max, abs, sum, round, any, all, slice, divmod),
        *(torch.finfo, torch.iinfo, torch.Size, torch.is_tensor, torch.is_grad_enabled),
        *(value for value in vars(math).values() if callable(value)),
        *(getattr(operator, name) for name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "neg", "matmul")),
        *_OF_MODULES,
        *(torch.arange, torch.eye, torch.full, torch.linspace, torch.ones, torch.zeros),
    )
)
_VALUE_NAMES = frozenset(
    name
    for cls in (Tensor, int, float, complex, str, tuple, list, torch.Size, torch.dtype, torch.device, torch.finfo)
    for name in dir(cls)
    if not name.startswith("_")
) - {
    # Told of a tensor, but not by its spec.
    *("grad", "grad_fn", "is_leaf", "retains_grad", "output_nr", "name", "names", "storage_offset", "is_pinned"),
    *("is_shared", "is_inference", "is_conj", "is_neg", "is_coalesced", "is_set_to", "share_memory_", "data_ptr"),
    *("grad_dtype", "requires_grad_", "format", "format_map"),
}


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

    def __init__(
        self, function: FunctionType, definition: ast.FunctionDef, own: frozenset[str] | None, children: frozenset[str]
    ) -> None:
        code = function.__code__
        is_method = own is not None
        self.uses = Uses(set(), [], [], [])
        self.modules: set[str] = {code.co_varnames[0]} if is_method and code.co_argcount else set()
        """Local names that may be modules."""
        names = (node for node in ast.walk(definition) if isinstance(node, ast.Name))
        self._selves = self.modules - {name.id for name in names if not isinstance(name.ctx, ast.Load)}
        """The name of the module whose method is read, unless it is given another meaning."""
        self._body, self._globals = definition.body, function.__globals__
        self._own, self._children = own, children
        self._locals = {*code.co_varnames, *code.co_cellvars}
        comprehended = {
            name.id
            for node in ast.walk(definition)
            if isinstance(node, ast.comprehension)
            for name in ast.walk(node.target)
            if isinstance(name, ast.Name)
        }
        if not comprehended.isdisjoint(_names_in(code)) or (is_method and not code.co_argcount):
            raise Impure(f"{function.__qualname__} has names in two scopes")
        if function.__globals__.get("__builtins__") not in (builtins, vars(builtins)):
            raise Impure(f"{function.__qualname__} has builtins of its own")
        self._locals |= comprehended

    def read(self) -> None:
        self._statements(self._body)

    def _statements(self, statements: Iterable[ast.stmt]) -> None:
        for statement in statements:
            self._statement(statement)

    def _statement(self, node: ast.stmt) -> None:
        match node:
            case ast.Pass() | ast.Break() | ast.Continue() | ast.Raise():  # what is raised leaves no result to go by
                pass
            case ast.Expr(value):
                self._expression(value)
            case ast.Return(value):
                self._values(value)
            case ast.Assign(targets, value):
                kind = self._expression(value)
                for target in targets:
                    self._bind(target, kind)
            case ast.AugAssign(ast.Name() as target, _, value):
                self._values(value, ast.Name(target.id, ast.Load()))
            case ast.AnnAssign(ast.Name() as target, _, value, _):
                if value is not None:
                    self._bind(target, self._expression(value))
            case ast.If(test, body, orelse):
                self._value(test)
                self._statements((*body, *orelse))
            case ast.For(target, iterated, body, orelse):
                self._bind_each(target, iterated)
                self._statements((*body, *orelse))
            case ast.Assert(test, _):
                self._value(test)
            case ast.Delete(targets) if all(isinstance(target, ast.Name) for target in targets):
                pass
            case _:
                raise Impure(f"{type(node).__name__} in line {node.lineno}")

    def _bind(self, target: ast.expr, kind: _Result) -> None:
        if isinstance(kind, _Static) and not is_plain(kind.value):
            raise Impure(f"{ast.unparse(target)} is another name of something global")
        match target:
            case ast.Name(name):
                if kind is _Kind.MODULE:
                    self.modules.add(name)
            case ast.Tuple(items) | ast.List(items):
                self._go_through(kind)
                for item in items:
                    self._bind(item, kind)
            case ast.Starred(inner):
                self._bind(inner, kind)
            case _:
                raise Impure(f"stores to {ast.unparse(target)}")

    def _bind_each(self, target: ast.expr, node: ast.expr) -> None:
        """Bind what going through something gives."""
        kind = self._expression(node)
        self._go_through(kind)
        match node, target:
            case ast.Call(ast.Name("enumerate")), ast.Tuple([ast.Name(), item]):
                self._bind(item, kind)  # its number is no module
            case _:
                self._bind(target, kind)

    def _go_through(self, kind: _Result) -> None:
        """Note that an object's parts are looked at, in whatever way."""
        if kind is _Kind.MODULE:
            self.uses.attributes.update(OF_CONTAINERS)

    def _value(self, node: ast.expr) -> None:
        """Read an expression that must be no module."""
        kind = self._expression(node)
        if kind is _Kind.MODULE or (isinstance(kind, _Static) and not is_plain(kind.value)):
            raise Impure(f"{ast.unparse(node)} is more than a value")

    def _values(self, *nodes: ast.expr | None) -> _Kind:
        for node in nodes:
            if node is not None:
                self._value(node)
        return _Kind.VALUE

    def _either(self, nodes: Iterable[ast.expr]) -> _Kind:
        """Several expressions of which one is taken, or all are put together."""
        kinds = [self._expression(node) for node in nodes]
        if any(isinstance(kind, _Static) and not is_plain(kind.value) for kind in kinds):
            raise Impure("a function or class among values")
        return _Kind.MODULE if _Kind.MODULE in kinds else _Kind.VALUE

    def _expression(self, node: ast.expr) -> _Result:
        match node:
            case ast.Constant():
                return _Kind.VALUE
            case ast.Name(name):
                return self._name(name)
            case ast.Attribute(ast.Name(base), name) if base in self._selves and self._own is not None:
                return self._attribute(_Kind.MODULE, name, self._own)
            case ast.Attribute(base, name):
                return self._attribute(self._expression(base), name, self._children)
            case ast.Call():
                return self._call(node)
            case ast.BinOp(left, _, right):
                return self._values(left, right)
            case ast.UnaryOp(_, operand):
                return self._values(operand)
            case ast.BoolOp(_, values):
                return self._values(*values)
            case ast.Compare(left, ops, comparators):
                operands = (left, *comparators)
                if not any(isinstance(op, (ast.Is, ast.IsNot)) for op in ops):
                    return self._values(*operands)
                if len(operands) > 2 or not isinstance(operands[1], ast.Constant):  # equal arguments count as the same
                    raise Impure("the identity of values")
                self._either(operands)
                return _Kind.VALUE
            case ast.IfExp(test, body, orelse):
                self._value(test)
                return self._either((body, orelse))
            case ast.Tuple(items) | ast.List(items):
                return self._either(items)
            case ast.Dict(keys, values):
                return self._values(*keys, *values)
            case ast.JoinedStr(parts):
                formatted = [part for part in parts if isinstance(part, ast.FormattedValue)]
                return self._values(*(part.value for part in formatted), *(part.format_spec for part in formatted))
            case ast.Starred(inner):
                kind = self._expression(inner)
                self._go_through(kind)
                return kind
            case ast.Slice(lower, upper, step):
                return self._values(lower, upper, step)
            case ast.Subscript(base, index):
                self._value(index)
                kind = self._expression(base)
                self._go_through(kind)
                if isinstance(kind, _Static):
                    raise Impure(f"a part of {ast.unparse(base)}")
                return kind
            case ast.ListComp(element, generators) | ast.GeneratorExp(element, generators):
                for generator in generators:
                    self._bind_each(generator.target, generator.iter)
                    self._values(*generator.ifs)
                return self._either([element])
            case _:
                raise Impure(f"{type(node).__name__} in line {node.lineno}")

    def _name(self, name: str) -> _Result:
        if name.startswith("__"):
            raise Impure(f"{name}, which may be another name where it is read")
        if name in self._locals:
            return _Kind.MODULE if name in self.modules else _Kind.VALUE
        if name in self._globals:
            owner: Mapping[str, Any] = self._globals
        elif hasattr(builtins, name):
            owner = vars(builtins)
            self.uses.absent.append((self._globals, name))
        else:
            raise Impure(f"{name} is not there")
        self.uses.items.append(Item(owner, name, owner[name]))
        return _Static(owner[name])

    def _attribute(self, base: _Result, name: str, children: frozenset[str]) -> _Result:
        if name.startswith("__"):
            raise Impure(f"{name}, which may be another name where it is read")
        if base is _Kind.MODULE:
            self.uses.attributes.add(name)
            return _Kind.MODULE if name in children else _Kind.VALUE
        if isinstance(base, _Static) and isinstance(base.value, ModuleType):
            if base.value not in _NAMESPACES or name not in vars(base.value):
                raise Impure(f"{base.value.__name__}.{name} is not known to compute")
            found = vars(base.value)[name]
            self.uses.items.append(Item(vars(base.value), name, found))
            return _Static(found)
        if isinstance(base, _Static) and not is_plain(base.value):
            raise Impure(f"an attribute of {base.value}")
        if name not in _VALUE_NAMES:
            raise Impure(f"the attribute {name}")
        return _Kind.VALUE

    def _call(self, node: ast.Call) -> _Kind:
        called = self._expression(node.func)
        given = [*node.args, *(keyword.value for keyword in node.keywords)]
        if not isinstance(called, _Static):
            return self._values(*given)
        function = called.value
        if isinstance(function, FunctionType) and not is_torch_function(function) and function not in _COMPUTING:
            self.uses.functions.append(function)
        elif function is isinstance and len(given) == 2:
            self._expression(given[0])
            self._classes(given[1])
            return _Kind.VALUE
        elif function in _OF_MODULES or function is len:
            kind = self._either(given)
            self._go_through(kind)
            return _Kind.VALUE if function is len else kind
        elif function is torch.finfo and not given:
            raise Impure("torch.finfo() of the default dtype, which may change")
        elif not is_torch_function(function) and function not in _COMPUTING:
            raise Impure(f"{ast.unparse(node.func)} is not known to compute")
        return self._values(*given)

    def _classes(self, node: ast.expr) -> None:
        """Read what `isinstance` is given."""
        several = node.elts if isinstance(node, ast.Tuple) else [node]
        for kind in map(self._expression, several):
            cls = kind.value if isinstance(kind, _Static) else None
            # A class of another metaclass may tell its instances by anything.
            if cls not in _CLASSES and not (type(cls) is type and issubclass(cls, nn.Module)):
                raise Impure(f"{ast.unparse(node)} is not known to tell classes")
