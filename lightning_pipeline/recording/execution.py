"""Running a visit of a program on data: straight-line Python, generated from its events.

For a stage with a Linear and a ReLU, whose output is sent, the generated function reads like this::

    def visit(received, captured, tensors, seed, batch):
        r6_0, = received
        del received
        v7 = c0(r6_0, tensors[2], tensors[3])     # c0 is torch's linear
        r6_0 = None                               # as soon as nobody needs it
        v8 = c1(v7)
        v7 = None
        return [v8], []                           # what is sent, and what the user keeps
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import groupby
from typing import Any

import torch
from torch import Tensor

from lightning_pipeline import _torch
from lightning_pipeline.partition import tree
from lightning_pipeline.partition.users_code import note_line
from lightning_pipeline.recording.event import Event
from lightning_pipeline.recording.operation import NumberSlot, Template, TensorSlot, put_together
from lightning_pipeline.recording.program import Fork, Program, Region, Strand, VisitFunction
from lightning_pipeline.recording.recomputation import recomputed


def run_event(
    event: Event,
    operands: Sequence[Tensor],
    captured: Sequence[Any],
    seed: Callable[[int], None],
    instead: Callable[..., Any] | None = None,
) -> Any:
    """Run one event on data.

    Args:
        instead: called in the place of the event's function.
    """
    numbers = {slot: captured[event.first_captured + place] for slot, place in event.matcher.captured_numbers.items()}
    function = instead or event.function
    if event.draws and hasattr(function, "seeded"):
        function = function.seeded(seed, captured[event.first_captured])
    elif event.draws:
        seed(captured[event.first_captured])
    grad, _, autocast = event.state
    args = put_together(event.call.args, operands, numbers)  # type: ignore[arg-type]
    kwargs = put_together(event.call.kwargs, operands, numbers)  # type: ignore[arg-type]
    with torch.set_grad_enabled(grad), autocast_as(autocast):
        try:
            return function(*args, **kwargs)
        except Exception as error:
            note_line(error, event.line)
            raise


def values_made(event: Event, operands: Sequence[Tensor], found: Any) -> Iterator[tuple[int, Tensor]]:
    """The numbers and tensors of the values that an event has made, those of operands that it writes into included."""
    for value, tensor in zip(event.outputs, tree.leaves(found), strict=True):
        if value is not None:
            yield value, tensor
    for slot, _, value in event.writes:
        yield value, operands[slot]


@contextmanager
def autocast_as(state: Any) -> Iterator[None]:
    """Autocast as ``autocast_state`` gave it."""
    with ExitStack() as stack:
        for kind, dtype, is_kept in state or ():
            stack.enter_context(torch.autocast(kind, dtype=dtype, cache_enabled=is_kept))
        yield


def visit_function(program: Program, visit: int, kept: Sequence[int]) -> VisitFunction:
    """A function that runs a visit.

    Args:
        kept: values that are made in it, to be given back.
    """
    return _Writer(program, visit, kept).function()


_VISIT = "<visit of "
_AT = "  # "
"""In the source of a visit, between a call and the line of the user's code that it is for."""


def note_failed_call(error: Exception) -> None:
    """Add to the message of an error in a visit's function the line of the user's code that was computed."""
    trace = error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code.co_filename.startswith(_VISIT):
            line = trace.tb_frame.f_globals["source"][trace.tb_lineno - 1].partition(_AT)[2]
            if line:
                note_line(error, line)
            return
        trace = trace.tb_next


class _Writer:
    """Writes the source of one visit.

    A value is a variable, ``v17``; what an earlier visit has made, and came as a strand, ``r17_0``. Each is let go
    after its last use, but for what autograd keeps.
    """

    def __init__(self, program: Program, visit: int, kept: Sequence[int]) -> None:
        self._program = program
        self._visit = visit
        self._plan = program.visits[visit]
        self._kept = kept
        self._names: dict[str, Any] = {"fork": _forked, "leaves": tree.leaves}
        self._lines: list[str] = []
        self._indent = 1
        self._used: set[str] = set()  # variables, since a region began
        self._made: set[str] = set()
        given = [*range(program.num_given if visit == 0 else 0)]
        given += [value for value, home in program.carried.items() if home == visit]
        # Of values that are given, made here, or written into.
        self._variables: dict[int, str] = {value: f"batch[{value}]" for value in given}
        self._grad: bool | None = None
        self._autocast: Any = None

    def function(self) -> VisitFunction:
        program, plan = self._program, self._plan
        received = ", ".join(_of(strand) for strand in plan.receives)
        self._line("def visit(received, captured, tensors, seed, batch):", indent=0)
        if received:
            self._line(f"{received}{',' * (len(plan.receives) == 1)} = received")
            self._line("del received")
        forks: dict[int, list[Fork]] = {}
        for fork in plan.forks:
            forks.setdefault(fork.before, []).append(fork)
        last = self._last_uses()
        for region, numbers in groupby(plan.events, program.regions.get):
            if region is None:
                for number in numbers:
                    self._event_with_forks(number, forks)
                    self._free(last.get(number, ()))
            else:
                self._region(region, list(numbers), forks, last)
        self._leave_autocast()
        sends = ", ".join(self._sent(strand, source) for strand, source in plan.sends.items())
        kept = ", ".join(self._whole(value) for value in self._kept)
        self._line(f"return [{sends}], [{kept}]")
        source = "\n".join(self._lines)
        code = compile(source, f"{_VISIT}{program.digest.hex()}>", "exec")
        self._names["source"] = self._lines
        exec(code, self._names)
        return self._names["visit"]

    def _sent(self, strand: Strand, source: Strand | None) -> str:
        text = self._variable(strand.value, source)
        # The gradients that come back for a parameter are to be the first of those that add up here.
        return f"fork({text})" if strand.value < 0 and source is None else text

    def _event_with_forks(self, number: int, forks: dict[int, list[Fork]]) -> None:
        for fork in forks.get(number, ()):
            source = self._variable(fork.strand.value, fork.source)
            self._made.add(_of(fork.strand))
            self._line(f"{_of(fork.strand)} = fork({source})")
        self._event(number, self._program.events[number])

    def _free(self, names: Iterable[str]) -> None:
        if names:
            self._line(f"{' = '.join(sorted(names))} = None")

    def _region(
        self, region: Region, numbers: list[int], forks: dict[int, list[Fork]], last: dict[int, set[str]]
    ) -> None:
        """Events that are computed again in backward: a function of their own."""
        self._leave_autocast()
        before, self._lines, self._indent, self._grad = self._lines, [], self._indent + 1, None
        self._used, self._made = set(), set()
        freed: set[str] = set()
        for number in numbers:
            self._event_with_forks(number, forks)
            self._free({name for name in last.get(number, ()) if name in self._made})
            freed |= last.get(number, set())
        self._leave_autocast()
        made, inner = self._made, self._lines
        given = sorted(name for name in self._used - made if name.isidentifier())
        kept = sorted(made - freed)
        self._lines, self._indent, self._grad = before, self._indent - 1, None
        name = f"region{region.begins}"
        self._line(f"def {name}({', '.join(given)}):")
        self._lines += inner
        self._line(f"    return ({''.join(f'{each}, ' for each in kept)})")
        self._line(f"{self._constant(_torch.set_grad_enabled)}(True)")
        is_last = all(
            self._program.regions.get(number) != region
            for plan in self._program.visits[self._visit + 1 :]
            for number in plan.events
        )
        result = f"{''.join(f'{each}, ' for each in kept)}= " if kept else ""
        arguments = "".join(f"{each}, " for each in given)
        stops = region.stops_early and is_last
        self._line(f"{result}{self._constant(recomputed)}({name}, ({arguments}), {stops})")
        self._free({name for name in freed if name not in made} | {name})

    def _leave_autocast(self) -> None:
        if self._autocast is not None:
            self._line("cast.__exit__(None, None, None)")
            self._autocast = None

    def _event(self, number: int, event: Event) -> None:
        cut = self._program.cut
        if cut is not None and number in cut.skipped:
            return
        if event.state[0] is not self._grad:
            self._grad = event.state[0]
            self._line(f"{self._constant(_torch.set_grad_enabled)}({self._grad})")
        if event.state[2] != self._autocast:
            self._leave_autocast()
            self._autocast = event.state[2]
            if self._autocast is not None:
                self._line(f"cast = {self._constant(autocast_as)}({self._constant(self._autocast)}); cast.__enter__()")
        function, args, kwargs = event.function, event.call.args, event.call.kwargs
        if cut is not None and number in cut.calls:
            function, args, kwargs = cut.calls[number]
        function = self._constant(function)
        if event.draws and hasattr(event.function, "seeded"):
            function = f"{function}.seeded(seed, captured[{event.first_captured}])"
        elif event.draws:
            self._line(f"seed(captured[{event.first_captured}])")
        arguments = [self._text(number, event, template) for template in args]
        for name, template in kwargs.items():
            text = self._text(number, event, template)
            arguments.append(f"{name}={text}" if name.isidentifier() else f"**{{{name!r}: {text}}}")
        call = f"{function}({', '.join(arguments)})"
        where = f"{_AT}{event.line}"
        made = [None if value is None else f"v{value}" for value in event.outputs]
        self._made.update(name for name in made if name is not None)
        layout = event.result.layout
        if not any(made):
            self._line(call + where)
        elif isinstance(layout, tree.Slot):
            self._line(f"{made[0]} = {call}{where}")
        elif isinstance(layout, tree.Sequence) and [*layout.items] == [tree.Slot(i) for i in range(len(made))]:
            self._line(f"{', '.join(name or '_' for name in made)}{',' * (len(made) == 1)} = {call}{where}")
        else:
            self._line(f"{', '.join(name or '_' for name in made)}{',' * (len(made) == 1)} = leaves({call}){where}")
        for value in event.outputs:
            if value is not None:
                self._variables[value] = f"v{value}"
        for slot, _, value in event.writes:
            before = event.inputs[slot]
            if type(before) is int and before >= 0:
                self._variables[value] = self._operand(number, before)
            else:
                self._variables[value] = self._text(number, event, TensorSlot(slot))

    def _text(self, number: int, event: Event, template: Template) -> str:
        kind = type(template)
        if kind is TensorSlot:
            cut = self._program.cut
            if cut is not None and (number, template.number) in cut.taken:
                taken, dim = cut.taken[number, template.number]
                return f"{self._constant(taken)}({self._tensor(number, event, template)}, {dim})"
            return self._tensor(number, event, template)
        if kind is NumberSlot:
            return f"captured[{event.first_captured + event.matcher.captured_numbers[template.number]}]"
        if kind is tuple or kind is list:
            inner = ", ".join(self._text(number, event, item) for item in template)
            return f"[{inner}]" if kind is list else f"({inner}{',' * (len(template) == 1)})"
        if kind is slice:
            parts = (template.start, template.stop, template.step)
            return f"slice({', '.join(self._text(number, event, part) for part in parts)})"
        if kind is dict:
            return f"{{{', '.join(f'{key!r}: {self._text(number, event, item)}' for key, item in template.items())}}}"
        if kind in (int, bool, type(None), str):
            return repr(template)
        return self._constant(template)

    def _tensor(self, number: int, event: Event, slot: TensorSlot) -> str:
        value = event.inputs[slot.number]
        if type(value) is not int:
            return f"captured[{event.first_captured + event.matcher.captured_tensors[slot.number]}]"
        if value < 0 and (number, value) not in self._plan.operands:
            return f"tensors[{-1 - value}]"
        return self._operand(number, value)

    def _whole(self, value: int) -> str:
        """A value, as the user's code sees it."""
        cut, text = self._program.cut, self._variable(value, None)
        return (
            text
            if cut is None or value not in cut.dims
            else f"{self._constant(cut.ranks.join)}({text}, {cut.dims[value]})"
        )

    def _operand(self, number: int, value: int) -> str:
        return self._variable(value, self._plan.operands.get((number, value)))

    def _variable(self, value: int, strand: Strand | None) -> str:
        if strand is None and value < 0:
            return f"tensors[{-1 - value}]"
        name = self._variables[value] if strand is None else _of(strand)
        self._used.add(name)
        return name

    def _last_uses(self) -> dict[int, set[str]]:
        """Variables that nobody needs after an event."""
        names = {**self._variables}
        last: dict[str, int] = {}

        def named(value: int, strand: Strand | None) -> str:
            return names.get(value, f"v{value}") if strand is None else _of(strand)

        for number in self._plan.events:
            event = self._program.events[number]
            for value in event.inputs:
                strand = self._plan.operands.get((number, value)) if type(value) is int else None
                if type(value) is int and (value >= 0 or strand is not None):
                    last[named(value, strand)] = number
            for value in event.outputs:
                if value is not None:
                    last[f"v{value}"] = number
            for slot, _, value in event.writes:
                before = event.inputs[slot]
                if type(before) is int and before >= 0:
                    names[value] = named(before, self._plan.operands.get((number, before)))
                    last[names[value]] = number
        needed = {named(strand.value, source) for strand, source in self._plan.sends.items()}
        needed |= {named(value, None) for value in self._kept}
        needed |= {named(fork.strand.value, fork.source) for fork in self._plan.forks}
        found: dict[int, set[str]] = {}
        for name, number in last.items():
            if name not in needed and not name.startswith("batch"):
                found.setdefault(number, set()).add(name)
        return found

    def _constant(self, value: Any) -> str:
        name = f"c{len(self._names)}"
        self._names[name] = value
        return name

    def _line(self, text: str, *, indent: int | None = None) -> None:
        self._lines.append("    " * (self._indent if indent is None else indent) + text)


def _of(strand: Strand) -> str:
    return f"{'r' if strand.value >= 0 else 'p'}{abs(strand.value)}_{strand.number}"


def _forked(tensor: Tensor) -> Tensor:
    """Another place of a value in the graph, also where the event that it stands before runs under `no_grad`."""
    was_on = torch.is_grad_enabled()
    _torch.set_grad_enabled(True)
    try:
        return torch.ops.aten.alias.default(tensor)
    finally:
        _torch.set_grad_enabled(was_on)
