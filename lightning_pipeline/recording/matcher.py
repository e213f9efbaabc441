"""Generates functions that recognise a known call and answer it with its placeholders.

Their source is made from the event's templates, as the pictured one is from ``F.linear(h, self.weight, None)`` where h
is value 17, the weight the module's tensor 5, and the result value 18::

    def match(function, args, kwargs, recording):
        if function is not F or kwargs or len(args) != 3: return UNLIKE
        a0, a1, a2 = args
        if grad() is not True or inference() is not False or autocast() is not False: return UNLIKE
        if type(a0) is not Placeholder or a0._pl_value != 17 or a0._pl_recording is not recording: return UNLIKE
        if a0._pl_spec is not L0: return UNLIKE
        if a1 is not T[5]: return UNLIKE
        if a2 is not None: return UNLIKE
        p0 = pool[0]
        if refs(p0) != 3 or p0._pl_spec is not M0 or len(p0.__dict__) != 4 or weak_refs(p0):
            p0 = pool[0] = renewed(p0, M0, W)
        p0._pl_value = 18; p0._pl_recording = recording
        return p0

A placeholder that nobody refers to any more, not even weakly, and that has no attribute of the user's, is used again.
What differs between similar calls has names in the source, numbers too, so that it is compiled once for all of them.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import lru_cache
from types import CodeType
from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import getweakrefcount

import torch
from torch import Tensor

from lightning_pipeline import _torch
from lightning_pipeline.partition import tree
from lightning_pipeline.partition.ownership import HELD_BY
from lightning_pipeline.partition.placeholder import NUM_ATTRIBUTES, Placeholder, TensorSpec, placeholder
from lightning_pipeline.partition.torch_functions import function_name
from lightning_pipeline.recording.absorbed import absorb
from lightning_pipeline.recording.operation import Call, NumberSlot, Template, TensorSlot

if TYPE_CHECKING:
    from lightning_pipeline.recording.event import Event

UNLIKE = object()
"""What a matcher returns for another call."""

CAPTURED = None
"""In place of a value's number: the argument is a tensor that every rank has, and is taken along as it is."""


class HookTensor(NamedTuple):
    """In place of a value's number: the argument was made in a hook of what some ranks hold, and so do they hold it. It
    is taken along as it is.

    Attributes:
        stages: the virtual stages on these ranks.
    """

    ranks: tuple[int, ...]
    stages: tuple[int, ...]


class EarlierValue(NamedTuple):
    """In place of a value's number: the argument is a value of an earlier micro-batch, with its home on a visit."""

    visit: int


Given = tuple[Call, Sequence[Any], Sequence[TensorSpec], tuple[bool, bool, Any]]
"""A call, what each of its tensors stands for, their specs, and the `torch_state`."""


_GETTER = type(Tensor.data.__get__)  # type: ignore[attr-defined]
_UNIQUE = (bool, type(None), type(Ellipsis), torch.dtype, torch.memory_format, torch.layout)


class Matcher(NamedTuple):
    """A matcher, and what belongs to it.

    Attributes:
        match: (function, args, kwargs, recording) -> the result, or `UNLIKE`.
        pool: the placeholders that it answers with.
        captured_tensors, captured_numbers: for slots whose content is taken along, its place among what is captured.
        num_captured: by each call.
    """

    match: Callable[..., Any]
    pool: list[Placeholder]
    captured_tensors: dict[int, int]
    captured_numbers: dict[int, int]
    num_captured: int


class Source:
    """The lines of one matcher, and the objects that they name.

    Attributes:
        captures: the lines that take content along.
        captured_tensors, captured_numbers: as in `Matcher`.
    """

    def __init__(self) -> None:
        self.names: dict[str, Any] = {
            "UNLIKE": UNLIKE,
            "Placeholder": Placeholder,
            "Tensor": Tensor,
            "absorb": absorb,
            "renewed": renewed,
            "refs": sys.getrefcount,
            "weak_refs": getweakrefcount,
            "grad": torch.is_grad_enabled,
            "inference": _torch.is_inference_mode_enabled,
            "autocast": _torch.is_any_autocast_enabled,
        }
        self.lines: list[str] = []
        self.captures: list[str] = []
        self.captured_tensors: dict[int, int] = {}
        self.captured_numbers: dict[int, int] = {}

    def constant(self, value: Any) -> str:
        name = f"c{len(self.names)}"
        self.names[name] = value
        return name

    def unless(self, condition: str) -> None:
        self.lines.append(f"    if {condition}: return UNLIKE")

    def function(self, name: str) -> Callable[..., Any]:
        exec(_compiled("\n".join(self.lines)), self.names)
        return self.names[name]


@lru_cache(maxsize=4096)
def _compiled(source: str) -> CodeType:
    """Matchers of similar calls differ in the constants that they name, and are compiled once."""
    return compile(source, "<a matcher>", "exec")


def make_comparison(
    function: Any, given: Given, module_tensors: Sequence[Tensor], read: frozenset[str]
) -> Callable[..., Any]:
    """A function like `Matcher.match`, which takes nothing along and gives the call's tensors, by slot.

    Args:
        read: attributes that the user must not have given the tensors.
    """
    source = Source()
    names = _compare(source, function, given, module_tensors)
    if len(given[0].kwargs) > 1:  # `**others` have the order of the call
        source.unless(f"[*kwargs] != {source.constant([*given[0].kwargs])}")
    for slot, tensor in enumerate(given[0].tensors):
        source.unless(f"type({names[slot]}) is not {source.constant(type(tensor))}")
        source.unless(f"not {source.constant(read.isdisjoint)}({names[slot]}.__dict__)")
    source.lines.append(f"    return [{', '.join(names[slot] for slot in range(len(names)))}]")
    return source.function("match")


def _compare(source: Source, function: Any, given: Given, module_tensors: Sequence[Tensor]) -> dict[int, str]:
    """Write what tells a call from others, and what takes its content along. Returns the names of tensors, by slot."""
    call, inputs, specs, state = given
    args, kwargs = call.args, call.kwargs
    names: dict[int, str] = {}
    source.lines.append("def match(function, args, kwargs, recording):")
    count = len(args)
    # A property's getter is another object each time.
    other = "is not" if type(function) is not _GETTER else "!="
    source.unless(f"function {other} {source.constant(function)} or len(args) != {count}")
    if kwargs:
        source.unless(f"not kwargs or len(kwargs) != {len(kwargs)}")
    else:
        source.unless("kwargs")
    if count:
        source.lines.append(f"    {', '.join(f'a{i}' for i in range(count))}{',' * (count == 1)} = args")
    missing = source.constant(object())
    for index, key in enumerate(kwargs):
        source.lines.append(f"    k{index} = kwargs.get({key!r}, {missing})")
    grad, inference, autocast = state
    source.unless(f"grad() is not {grad} or inference() is not {inference} or autocast() is not {autocast is not None}")
    if autocast is not None:
        source.unless(f"{source.constant(autocast_state)}() != {source.constant(autocast)}")

    def tensor(name: str, slot: int) -> None:
        if slot in names:
            source.unless(f"{name} is not {names[slot]}")
            return
        names[slot] = name
        value, spec = inputs[slot], source.constant(specs[slot])
        if value is CAPTURED:
            l0 = specs[slot]
            source.unless(
                f"type({name}) is Placeholder or not isinstance({name}, Tensor) or {HELD_BY!r} in {name}.__dict__ or "
                f"{name}.shape != {source.constant(l0.shape)} or {name}.dtype is not {source.constant(l0.dtype)} or "
                f"{name}.layout is not {source.constant(l0.layout)} or "
                f"{'' if l0.stride is None else f'{name}.stride() != {l0.stride!r} or '}"
                f"{name}.requires_grad is not {l0.requires_grad} or {name}.device != {source.constant(l0.device)}"
            )
            source.captured_tensors[slot] = len(source.captures)
            source.captures.append(f"recording.capture({name})")
        elif type(value) is HookTensor:
            source.unless(f"not {source.constant(is_held_alike)}({name}, {source.constant(value.ranks)}, {spec})")
            source.captured_tensors[slot] = len(source.captures)
            source.captures.append(f"recording.captured.append({name})")
        elif type(value) is EarlierValue:
            source.unless(
                f"type({name}) is not Placeholder or {name}._pl_recording is recording or "
                f"{name}._pl_recording is None or {name}._pl_spec is not {spec} or "
                f"{name}._pl_recording.home_of({name}._pl_value) != {value.visit}"
            )
            source.captured_tensors[slot] = len(source.captures)
            source.captures.append(f"recording.captured.append(({name}._pl_recording, {name}._pl_value))")
        elif value < 0:
            source.unless(f"{name} is not {source.constant(module_tensors)}[{source.constant(-1 - value)}]")
            if specs[slot].is_parameter:
                source.unless(f"{name}.requires_grad is not {specs[slot].requires_grad}")
        else:
            source.unless(
                f"type({name}) is not Placeholder or {name}._pl_value != {source.constant(value)} or "
                f"{name}._pl_recording is not recording or "
                f"{name}._pl_spec is not {spec}"
            )

    def walk(name: str, template: Template) -> None:
        kind = type(template)
        if kind is TensorSlot:
            tensor(name, template.number)
        elif kind is NumberSlot:
            source.unless(f"type({name}) is not {source.constant(template.type)} or not {name}")
            source.captured_numbers[template.number] = len(source.captures)
            source.captures.append(f"recording.captured.append({name})")
        elif kind is tuple or kind is list:
            source.unless(f"type({name}) is not {kind.__name__} or len({name}) != {len(template)}")
            for index, item in enumerate(template):
                walk(f"{name}[{index}]", item)
        elif kind is slice:
            source.unless(f"type({name}) is not slice")
            for part in ("start", "stop", "step"):
                walk(f"{name}.{part}", getattr(template, part))
        elif kind is dict:
            source.unless(f"type({name}) is not dict or list({name}) != {source.constant(list(template))}")
            for key, item in template.items():
                walk(f"{name}[{source.constant(key)}]", item)
        elif isinstance(template, _UNIQUE):
            source.unless(f"{name} is not {source.constant(template)}")
        elif kind in (int, str, float, torch.Size, torch.device, complex, bytes):
            source.unless(f"type({name}) is not {source.constant(kind)} or {name} != {source.constant(template)}")
            if kind is float and not template:
                source.unless(f"str({name}) != {str(template)!r}")  # 0.0 is not -0.0
        else:
            source.unless(f"{name} is not {source.constant(template)}")

    for index, template in enumerate(args):
        walk(f"a{index}", template)
    for index, template in enumerate(kwargs.values()):
        walk(f"k{index}", template)
    return names


def make_matcher(event: Event, module_tensors: Sequence[Tensor]) -> Matcher:
    inputs, specs = event.inputs, event.specs
    what = f"the result of {function_name(event.function)} ({event.line})"
    source = Source()
    if event.draws:
        source.captures.append("recording.note_draw()")
    names = _compare(source, event.function, (event.call, inputs, specs, event.state), module_tensors)
    source.lines += [f"    {line}" for line in source.captures]
    pool: list[Placeholder] = []
    source.names["pool"] = pool
    found: list[str] = []
    shown = source.constant(what)
    for spec, value in zip(event.result.tensors, event.outputs, strict=True):
        if value is None:
            found.append(names[spec])  # type: ignore[index]
            continue
        assert isinstance(spec, TensorSpec)
        place, name, own = len(pool), f"p{len(pool)}", source.constant(spec)
        pool.append(placeholder(spec, what))
        found.append(name)
        source.lines += [
            f"    {name} = pool[{place}]",
            f"    if refs({name}) != 3 or {name}._pl_spec is not {own} or len({name}.__dict__) != {NUM_ATTRIBUTES} "
            f"or weak_refs({name}):",
            f"        {name} = pool[{place}] = renewed({name}, {own}, {shown})",
            f"    {name}._pl_value = {source.constant(value)}; {name}._pl_recording = recording",
        ]
    for slot, spec, value in event.writes:
        number = source.constant(value)
        if type(inputs[slot]) is EarlierValue:
            source.lines.append(f"    recording.adopt({names[slot]}, {source.constant(spec)}, {number})")
        elif inputs[slot] is CAPTURED:
            spec_after = source.constant(spec)
            source.lines.append(f"    absorb(recording, {names[slot]}, {spec_after}, {number}, {shown})")
        elif inputs[slot] >= 0:
            source.lines.append(f"    {names[slot]}._pl_value = {number}")
            if spec is not specs[slot]:
                source.lines.append(f"    recording.change({names[slot]}, {source.constant(spec)})")
    source.lines.append(f"    return {_result(source, event.result.layout, found)}")
    places = source.captured_tensors, source.captured_numbers
    return Matcher(source.function("match"), pool, *places, len(source.captures))


def is_held_alike(tensor: Any, ranks: tuple[int, ...], spec: TensorSpec) -> bool:
    """Whether an argument is held by these ranks, and looks like this."""
    return (
        isinstance(tensor, Tensor)
        and tensor.__dict__.get(HELD_BY) == ranks
        and TensorSpec.of(tensor) is spec
        and getattr(tensor, "_pl_recording", None) is None
    )


def never(*_: Any) -> Any:
    """The match of a call that is not to be answered at once: its result's specs depend on data, or it does more than
    compute."""
    return UNLIKE


def renewed(old: Placeholder, spec: TensorSpec, what: str) -> Placeholder:
    """A new placeholder in the place of one that somebody still refers to, of which its recording is to know."""
    if old._pl_recording is not None:
        old._pl_recording.keep(old)
    return placeholder(spec, what)


def _result(source: Source, layout: tree.Layout, found: list[str]) -> str:
    if isinstance(layout, tree.Slot):
        return found[layout.number]
    if isinstance(layout, tree.Constant):
        return source.constant(layout.value)
    if isinstance(layout, tree.Sequence) and layout.type in (list, tuple):
        inner = ", ".join(_result(source, item, found) for item in layout.items)
        return f"[{inner}]" if layout.type is list else f"({inner}{',' * (len(layout.items) == 1)})"
    return f"{source.constant(tree.rebuild)}({source.constant(layout)}, [{', '.join(found)}])"


def torch_state() -> tuple[bool, bool, Any]:
    """Whether autograd, and inference mode, are on, and `autocast_state`: what an event's calls have in common."""
    return torch.is_grad_enabled(), _torch.is_inference_mode_enabled(), autocast_state()


def autocast_state() -> Any:
    """Of the devices for which autocast is on, with the dtype of each, and whether it keeps what it has cast.

    Gradients of weights that it keeps add up in the low precision, and those of others, as under Lightning's plugins,
    in the weights' own.
    """
    is_kept = torch.is_autocast_cache_enabled()
    kinds = [kind for kind in _autocast_kinds() if torch.is_autocast_enabled(kind)]
    return tuple((kind, torch.get_autocast_dtype(kind), is_kept) for kind in kinds) or None


def _autocast_kinds() -> list[str]:
    kinds = ["cpu"]
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return kinds if accelerator is None else [*kinds, accelerator.type]
