"""What Python objects lead to, and what is in them: noted at one time, compared or put back later.

    roots ── attributes, items ── lists, dictionaries, arrays, generators, closures ...
             └─ globals and class attributes that their methods name

Who walks says how far, what is left alone, and what else there is to note (`Walk`).
"""

from __future__ import annotations

import dis
import operator
import pickle
import random
import sys
import types
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from functools import cache, lru_cache, partial
from typing import Any, ClassVar, NamedTuple

import numpy
import torch
from torch import Tensor

from lightning_pipeline._names import PACKAGES
from lightning_pipeline.partition.attributes import slots_of

PLAIN = frozenset(
    (bool, int, float, complex, str, bytes, type(None), range, slice, torch.dtype, torch.device, torch.Size)
)
_FIXED = (
    *(type, types.ModuleType, types.BuiltinFunctionType, types.MethodWrapperType, property),
    *(weakref.ReferenceType, weakref.ProxyType, weakref.CallableProxyType),
)
GENERATORS = (random.Random, numpy.random.Generator, numpy.random.RandomState, torch.Generator)
_OTHERS = frozenset(("torch", "numpy", "triton", "lightning_pipeline", *PACKAGES)) | sys.stdlib_module_names
"""Modules whose functions and attributes count as fixed: a part of their state alone could be inconsistent."""

Path = tuple[tuple[str, Any], ...]
"""How an object is reached, a kind of step and its name each."""


@lru_cache(maxsize=1024)
def names_in(code: types.CodeType) -> frozenset[str]:
    """Names of globals and attributes that code uses, with that of functions within."""
    inner = (names_in(one) for one in code.co_consts if isinstance(one, types.CodeType))
    return frozenset(code.co_names).union(*inner)


@lru_cache(maxsize=1024)
def globals_set_in(code: types.CodeType) -> frozenset[str]:
    """Names of globals that code sets, with those of functions within."""
    inner = (globals_set_in(one) for one in code.co_consts if isinstance(one, types.CodeType))
    own = (one.argval for one in dis.get_instructions(code) if one.opname == "STORE_GLOBAL")
    return frozenset(own).union(*inner)


@cache
def is_of_others(module: str | None) -> bool:
    return (module or "").partition(".")[0] in _OTHERS


def is_made_by_python(cls: type) -> bool:
    """Whether a class and its bases are made by class statements."""
    return all(base is object or base.__flags__ & 1 << 9 for base in cls.__mro__)  # Py_TPFLAGS_HEAPTYPE


class Missing:
    """In place of an attribute that is not there."""


Difference = tuple[str, Any, Any]
"""A kind of change (`SETTERS`), its key, and the value."""


def parts_of(value: Any, longest: int) -> list[Any] | None:
    """What is in a container, a method, a partial or a closure; nothing of long containers. None for other objects."""
    if isinstance(value, (dict, list, tuple, set, frozenset, deque)):
        return list(dict.values(value) if isinstance(value, dict) else value) if len(value) < longest else []
    if isinstance(value, partial):
        return [value.func, *value.args, *value.keywords.values()]
    if isinstance(value, types.MethodType):
        return [value.__func__, value.__self__]
    return list(map(in_cell, value.__closure__ or ())) if isinstance(value, types.FunctionType) else None


def in_cell(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # it has none yet
        return None


class Kind(NamedTuple):
    """A kind of what holds something.

    Attributes:
        now: what is in a holder, in the form of what was noted of it.
        differences: what changes contents (the second) into others (the first).
    """

    now: Callable[[Any, Any], Any]
    differences: Callable[[Any, Any], Iterator[Difference]]

    def has_changed(self, holder: Any, content: Any) -> bool:
        return any(True for _ in self.differences(self.now(holder, content), content))


class Walk:
    """What roots lead to, and what is in it now. It is met in the order of its distance from the roots.

    Attributes:
        MOST: objects that are looked at.
        DEEPEST: entries of a container whose own contents are looked at.
        LARGEST: entries of a container beyond which only its length is noted.
        LARGEST_ARRAY: bytes of an array that is noted.
        LOOKS: by which method an object of a class is looked at.
        paths: of all objects, by their ids.
        noted: what is in holders: its kind, their paths, they, and what it is; of a large container its length.
    """

    MOST = 100_000
    DEEPEST = 1000
    LARGEST: float = float("inf")
    LARGEST_ARRAY = 1 << 28
    LOOKS: ClassVar[tuple[tuple[Any, str], ...]] = (
        (GENERATORS, "look_at_generator"),
        (numpy.ndarray, "look_at_array"),
        (dict, "look_at_dict"),
        (tuple, "look_at_tuple"),
        ((list, deque), "look_at_list"),
        (set, "look_at_set"),
        (types.FunctionType, "look_at_function"),
        ((types.MethodType, partial), "look_at_parts"),
    )

    def __init__(self, roots: Iterable[tuple[Any, Path]]) -> None:
        self.paths: dict[int, Path] = {}
        self.noted: list[tuple[Kind, Path, Any, Any]] = []
        self._kept: list[Any] = []  # so that no other object gets the same id
        self._next = deque(roots)
        user: Any = type(self)
        while self._next and len(self.paths) < self.MOST:
            value, path = self._next.popleft()
            cls: Any = type(value)
            look = _look_of(user, cls)
            if look is not None and id(value) not in self.paths:
                self.pass_over(value, path)
                look(self, value, path)

    @classmethod
    def is_open(cls, kind: type) -> bool:
        """Whether the attributes of an object of a class are looked at."""
        raise NotImplementedError

    def pass_over(self, value: Any, path: Path = ()) -> None:
        self.paths[id(value)] = path
        self._kept.append(value)

    def note(self, kind: Kind, path: Path, holder: Any, content: Any) -> None:
        self.noted.append((kind, path, holder, content))

    def put_back(self) -> None:
        for kind, _, holder, content in self.noted:
            for change, key, value in list(kind.differences(content, kind.now(holder, content))):
                SETTERS[change](holder, key, value)

    def go_on(self, items: Iterable[tuple[Any, Any]], path: Path, kind: str = "item") -> None:
        for key, one in items:
            if type(one) not in PLAIN:
                self._next.append((one, (*path, (kind, key))))

    def look_at_generator(self, value: Any, path: Path) -> None:
        self.note(GENERATOR, path, value, _state_of(value))

    def look_at_array(self, value: Any, path: Path) -> None:
        if value.nbytes <= self.LARGEST_ARRAY and value.flags.writeable:
            self.note(ARRAY, path, value, value.copy())
        if value.dtype.hasobject and value.dtype.fields is None and value.size <= self.DEEPEST:
            self.go_on(((place, value[place]) for place in numpy.ndindex(value.shape)), path)

    def look_at_dict(self, value: dict[Any, Any], path: Path) -> None:
        self.look_at_own(value, path)
        self.note(DICT, path, value, _plain(value).copy() if len(value) <= self.LARGEST else len(value))
        if len(value) <= self.DEEPEST:
            self.go_on(dict.items(value), path)

    def look_at_list(self, value: Any, path: Path) -> None:
        self.look_at_own(value, path)
        self.note(LIST, path, value, list(value) if len(value) <= self.LARGEST else len(value))
        self.look_at_tuple(value, path)

    def look_at_tuple(self, value: Any, path: Path) -> None:
        if len(value) <= self.DEEPEST:
            self.go_on(enumerate(value), path)

    def look_at_set(self, value: set[Any], path: Path) -> None:
        self.note(SET, path, value, value.copy() if len(value) <= self.LARGEST else len(value))

    def look_at_own(self, value: Any, path: Path) -> None:
        """At the attributes of a container of a class of the user's."""
        if not is_of_others(type(value).__module__) and type(attributes := getattr(value, "__dict__", None)) is dict:
            self.look_at_space(attributes, path)

    def look_at_parts(self, value: Any, path: Path) -> None:
        """At what a method or a partial is made of."""
        names = ("__self__", "__func__") if isinstance(value, types.MethodType) else ("func", "args", "keywords")
        self.go_on(((name, getattr(value, name)) for name in names), path, "get")

    def look_at_function(self, value: types.FunctionType, path: Path) -> None:
        """At its closure, its attributes, and the globals that its code names, of other modules as well."""
        if not is_of_others(value.__module__):
            self.look_at_space(vars(value), path)
            for use in uses_of(value, path):
                self.look_at_attributes(*use)

    def look_at_space(self, space: dict[str, Any], path: Path) -> None:
        """At the attributes of the object at a path."""
        path = (*path, ("get", "__dict__"))
        self.note(DICT, path, space, space.copy())
        self.go_on(space.items(), path)

    def look_at_attributes(self, holder: Any, content: dict[str, Any], path: Path) -> None:
        self.note(ATTRIBUTES, path, holder, content)
        self.go_on(content.items(), path, "get")

    def look_at_object(self, value: Any, path: Path) -> None:
        cls: Any = type(value)
        if type(attributes := getattr(value, "__dict__", None)) is dict:
            self.look_at_space(attributes, path)
        if slots := slots_of(cls):
            self.look_at_attributes(value, {name: getattr(value, name, Missing) for name in slots}, path)
        self.look_at_class(cls, (*path, ("get", "__class__")))

    def look_at_class(self, cls: type, path: Path) -> None:
        if id(cls) in self.paths:
            return
        for index, base in enumerate(cls.__mro__):
            if id(base) in self.paths or is_of_others(base.__module__):  # as object is
                continue
            where = (*path, ("base", index))
            self.pass_over(base, where)
            space = vars(base)
            data, functions = ({n: space[n] for n in names if n in space} for names in _members_of(base, len(space)))
            self.note(CLASS, where, base, data)
            self.go_on((data | functions).items(), where, "get")


@cache
def _look_of(user: Any, cls: Any) -> Callable[[Any, Any, Path], None] | None:
    """How an object of a class is looked at; None for what is plain, and for what nothing is known of."""
    if cls in PLAIN or issubclass(cls, _FIXED):
        return None
    for kinds, name in user.LOOKS:
        if issubclass(cls, kinds):
            look: Callable[[Any, Any, Path], None] = getattr(user, name)
            return look
    return user.look_at_object if user.is_open(cls) else None


@cache
def _members_of(cls: type, size: int) -> tuple[list[str], list[str]]:
    """The names of a class's attributes that are data, and of its functions."""
    data = [
        name for name, value in vars(cls).items() if not name.startswith("__") and not hasattr(type(value), "__get__")
    ]
    return data, [name for name, value in vars(cls).items() if isinstance(value, types.FunctionType)]


def _data_of(cls: type) -> dict[str, Any]:
    space = vars(cls)
    return {name: space[name] for name in _members_of(cls, len(space))[0] if name in space}


def uses_of(function: types.FunctionType, path: Path) -> Iterator[tuple[Any, dict[str, Any], Path]]:
    """What a function uses in its closure and in modules: the cell or module, what is in it, and its path."""
    for index, cell in enumerate(function.__closure__ or ()):
        with suppress(ValueError):  # it has no content yet
            yield cell, {"cell_contents": cell.cell_contents}, (*path, ("get", "__closure__"), ("item", index))
    name = function.__globals__.get("__name__", "")
    if name in sys.modules and vars(sys.modules[name]) is function.__globals__:
        for used, names in _globals_named(function.__code__, name, len(function.__globals__)).items():
            module = sys.modules[used]
            yield module, {name: vars(module).get(name, Missing) for name in names}, (("module", used),)


@cache
def _globals_named(code: types.CodeType, module: str, size: int) -> dict[str, list[str]]:
    names = names_in(code)
    scope = vars(sys.modules[module])
    named = {one.__name__ for name in names if isinstance(one := scope.get(name), types.ModuleType)}
    found: dict[str, list[str]] = {}
    for space in sorted({module, *named}):
        if space in sys.modules and not is_of_others(space):
            values = vars(sys.modules[space])
            used = [name for name in sorted(names) if name in values and not _is_code_of_others(values[name])]
            used += sorted(globals_set_in(code) - values.keys()) if space == module else []
            found.update({space: used} if used else {})
    return found


def _is_code_of_others(value: Any) -> bool:
    return isinstance(value, _FIXED) or (isinstance(value, types.FunctionType) and is_of_others(value.__module__))


# -- what differs, by the kind of holder ------------------------------------------------------------------------------


def _is_same(one: Any, other: Any) -> bool:
    if one is other or type(one) is not type(other) or type(one) not in PLAIN:
        return one is other
    return one == other if isinstance(one, (str, bytes)) else repr(one) == repr(other)  # NaN is NaN, -0.0 is not 0.0


def _plain(value: dict[Any, Any]) -> dict[Any, Any]:
    """What is in a dictionary: one of a subclass may make a new object of it each time that it is asked."""
    return value if type(value) is dict else dict(_base(value).items(value))


def _of_dict(wanted: dict[Any, Any], there: Any) -> Iterator[Difference]:
    if isinstance(there, int):  # it was long
        for key in list(wanted)[there:] if len(wanted) > there else ():
            yield "entry", key, wanted[key]
        return
    wanted, there = _plain(wanted), _plain(there)
    is_in_order = len(wanted) == len(there) and all(map(operator.is_, wanted, there))
    if is_in_order and all(map(operator.is_, wanted.values(), there.values())):
        return
    for key in there:
        if key not in wanted:
            yield "less", key, None
    for key, value in wanted.items():
        if key not in there or not _is_same(there[key], value):
            yield "entry", key, value
    if [*wanted] != [*(key for key in there if key in wanted), *(key for key in wanted if key not in there)]:
        yield "order", None, [*wanted]


def _of_list(wanted: Any, there: Any) -> Iterator[Difference]:
    if isinstance(there, int):
        if len(wanted) > there:
            yield "entries", there, list(wanted)[there:]
        return
    if len(wanted) == len(there) and all(map(operator.is_, wanted, there)):
        return
    pairs = enumerate(zip(wanted, there, strict=False))
    same = next((place for place, pair in pairs if not _is_same(*pair)), min(len(wanted), len(there)))
    if same < len(wanted) or same < len(there):
        yield "entries", same, list(wanted)[same:]


def _of_set(wanted: set[Any], there: Any) -> Iterator[Difference]:
    if len(wanted) != there if isinstance(there, int) else wanted != there:
        yield "all", None, wanted.copy()


def _of_attributes(wanted: dict[str, Any], there: dict[str, Any]) -> Iterator[Difference]:
    for name in there | wanted:
        value = wanted.get(name, Missing)
        if not _is_same(there.get(name, Missing), value):
            yield ("without", name, None) if value is Missing else ("attribute", name, value)


def _of_array(wanted: Any, there: Any) -> Iterator[Difference]:
    if wanted.tobytes() != there.tobytes():
        yield "data", None, wanted.copy()


def _of_generator(wanted: bytes, there: bytes) -> Iterator[Difference]:
    if wanted != there:
        yield "state", None, wanted


def _of_tensor(wanted: Tensor, there: Tensor) -> Iterator[Difference]:
    if wanted._version != there:
        yield "data", None, wanted.detach().clone()


def _state_of(generator: Any) -> bytes:
    if isinstance(generator, numpy.random.Generator):
        return pickle.dumps(generator.bit_generator.state)
    if isinstance(generator, torch.Generator):
        return pickle.dumps(generator.get_state().numpy())
    return pickle.dumps(generator.getstate() if isinstance(generator, random.Random) else generator.get_state())


def _itself(holder: Any, content: Any) -> Any:
    return holder


DICT = Kind(_itself, _of_dict)
LIST = Kind(_itself, _of_list)
SET = Kind(_itself, _of_set)
ATTRIBUTES = Kind(lambda holder, content: {name: getattr(holder, name, Missing) for name in content}, _of_attributes)
"""Attributes of an object, a module or a cell, by their names."""
CLASS = Kind(lambda holder, _: _data_of(holder), _of_attributes)
"""All data of a class."""
ARRAY = Kind(_itself, _of_array)
GENERATOR = Kind(lambda holder, content: _state_of(holder), _of_generator)
TENSOR = Kind(_itself, _of_tensor)
"""Noted by its version."""


# -- how it is changed ------------------------------------------------------------------------------------------------


def _base(holder: Any) -> Any:
    """A container's class of Python's own: methods of subclasses may do more, as Counter.update adds."""
    return next(base for base in (OrderedDict, dict, list, set, deque) if isinstance(holder, base))


def _methods_of(holder: Any) -> Any:
    """By which attributes are set and deleted: not those of an object's class, which may do more, or refuse."""
    if isinstance(holder, (type, types.ModuleType)):
        return type if isinstance(holder, type) else types.ModuleType
    return object


def _set_attribute(holder: Any, name: str, value: Any) -> None:
    _methods_of(holder).__setattr__(holder, name, value)


def _delete_attribute(holder: Any, name: str, _: Any) -> None:
    with suppress(AttributeError):
        _methods_of(holder).__delattr__(holder, name)


def _set_entries(holder: Any, start: int, value: list[Any]) -> None:
    base = _base(holder)
    while len(holder) > start:
        base.pop(holder)
    base.extend(holder, value)


def _set_all(holder: Any, _: Any, value: Any) -> None:
    set.clear(holder)
    set.update(holder, value)


def _set_order(holder: Any, _: Any, keys: list[Any]) -> None:
    base = _base(holder)
    for key in keys:
        base.__setitem__(holder, key, base.pop(holder, key))


def _set_data(holder: Any, _: Any, value: Any) -> None:
    if isinstance(holder, numpy.ndarray) and holder.shape == value.shape:
        holder[...] = value
    elif type(holder) is Tensor and holder.shape == value.shape:
        with torch.no_grad():
            holder.copy_(value)


def _set_state(generator: Any, _: Any, value: bytes) -> None:
    state = pickle.loads(value)
    if isinstance(generator, numpy.random.Generator):
        generator.bit_generator.state = state
    elif isinstance(generator, random.Random):
        generator.setstate(state)
    else:
        generator.set_state(torch.from_numpy(state.copy()) if isinstance(generator, torch.Generator) else state)


SETTERS: dict[str, Callable[[Any, Any, Any], Any]] = {
    "entry": lambda holder, key, value: _base(holder).__setitem__(holder, key, value),
    "less": lambda holder, key, _: _base(holder).pop(holder, key, None),
    "order": _set_order,
    "entries": _set_entries,
    "all": _set_all,
    "attribute": _set_attribute,
    "without": _delete_attribute,
    "data": _set_data,
    "state": _set_state,
}
"""The kinds of changes: what makes each, given the holder, a key and the value."""
