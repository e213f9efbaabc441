"""What one rank alone does in a step: functions under ``rank_zero_only``, and code under ``if self.global_rank == 0:``.

The first gets tensors with data, which all ranks read before. The second may not read what stages compute, as the other
ranks would not know.
"""

from __future__ import annotations

import ast
import sys
from functools import lru_cache
from types import CodeType, FrameType
from typing import TYPE_CHECKING, Any

from lightning_pipeline import _torch
from lightning_pipeline.partition.users_code import in_hook, is_users, users_line
from lightning_pipeline.recording.operation import put_together, take_apart
from lightning_pipeline.recording.reading import data_of
from lightning_pipeline.recording.source_files import definition_of

if TYPE_CHECKING:
    from lightning_pipeline.recording.recording import Recording


def with_data(recording: Recording, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """The arguments of a call with data in place of what stages compute. All ranks call it."""
    if not recording.is_ours(args) and not recording.is_ours(tuple(kwargs.values())):
        return args, kwargs
    if recording.rank_asked_at:
        refuse_by_one_rank(recording, is_shared=True)
    with _torch.function_modes_taken_off():
        call = take_apart(with_data, args, kwargs)
        data = data_of(recording, call)
        return put_together(call.args, data, call.numbers), put_together(call.kwargs, data, call.numbers)


def note_rank_asked(recording: Recording) -> None:
    """Take note of the line that asks for the rank, and of those that ask it by a function which gives what it says."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if is_users(frame):
            asked = frame.f_code, frame.f_lineno
            recording.rank_asked_at.add(asked)
            if not _is_given_back(*asked):
                return
        frame = frame.f_back


def note_rank_zero_only(recording: Recording, code: CodeType) -> None:
    """Take note that a function under `rank_zero_only` runs, whose wrapper has this code."""
    recording.rank_asked_at.add((code, _ALL))


_ALL = -1
"""In place of a line: all that the code calls."""


def refuse_by_one_rank(recording: Recording, *, is_shared: bool = False) -> None:
    """Refuse what stages compute in code that depends on the rank.

    Args:
        is_shared: all ranks are at `rank_zero_only`.
    """
    lines = [line for line in _asking_lines(recording) if not (line == _ALL and is_shared)]
    if lines:
        line = lines[0]
        where = "in a function under rank_zero_only" if line == _ALL else f"as line {line} asks for the rank"
        raise NotImplementedError(
            f"one rank alone uses what a stage computes ({users_line()}), {where}: the others would not know. "
            f"Read it on every rank, as in number = loss.item(), and use the number there; self.print, "
            f"self.logger and functions under rank_zero_only take tensors as arguments"
        )


def is_first_alone(recording: Recording, call: str, *, is_first: bool) -> bool:
    """Whether the first rank alone comes to a call that waits for all ranks, in code of a step that only it runs.

    Args:
        call: what it is.

    Raises:
        NotImplementedError: another rank is in code that depends on the rank.
    """
    if not _asking_lines(recording):
        return False
    if not is_first:
        raise NotImplementedError(
            f"{call} waits for all ranks, in code of a step that depends on the rank ({users_line()}): let every rank "
            f"run the line"
        )
    return True


def _asking_lines(recording: Recording) -> list[int]:
    """The lines that have asked for the rank, on which the running ones depend, the innermost first; `_ALL` for
    `rank_zero_only`."""
    found = []
    frame: FrameType | None = sys._getframe(1) if recording.rank_asked_at else None
    while frame is not None:
        for code, line in recording.rank_asked_at:
            if frame.f_code is code and _depends_on(code, line, frame.f_lineno):
                found.append(line)
        frame = frame.f_back
    return found


@lru_cache(maxsize=1024)
def _is_given_back(code: CodeType, asked: int) -> bool:
    """Whether a function gives back what the line that asks for the rank comes to."""
    definition = definition_of(code)
    if definition is None:
        return False
    names = _assigned(definition, asked)
    given = [node for node in ast.walk(definition) if isinstance(node, ast.Return) and node.value is not None]
    return any(
        _spans(node, asked)
        or not _names(node).isdisjoint(names)
        or (isinstance(node.value, ast.Constant) and _depends_on(code, asked, node.lineno))
        for node in given
    )


def _assigned(definition: ast.FunctionDef, asked: int) -> set[str]:
    """Names that the line which asks for the rank assigns."""
    return {
        target.id
        for node in ast.walk(definition)
        if isinstance(node, ast.Assign) and _spans(node, asked)
        for target in node.targets
        if isinstance(target, ast.Name)
    }


def _depends_on(code: CodeType, asked: int, line: int) -> bool:
    """Whether a line of a function runs or not by what the line that asks for the rank comes to."""
    if asked == _ALL:
        return True
    definition = definition_of(code)
    if definition is None:
        return False
    names = _assigned(definition, asked)
    for node in ast.walk(definition):
        if isinstance(node, (ast.If, ast.IfExp)) and (_spans(node.test, asked) or _names(node.test) & names):
            body = node.body if isinstance(node.body, list) else [node.body]
            orelse = node.orelse if isinstance(node.orelse, list) else [node.orelse]
            if any(_spans(part, line) for part in (*body, *orelse)) and not _spans(node.test, line):
                return True
            if isinstance(body[-1], (ast.Return, ast.Continue)) and line > (node.end_lineno or 0):
                return True
    return False


def note_kept(frame: FrameType | None) -> None:
    """Take note that a frame of the user's asks for the rank, if it may keep what it is told."""
    if frame is not None and not in_hook.has_kept_rank:
        in_hook.has_kept_rank = _may_keep(frame.f_code, frame.f_lineno)


@lru_cache(maxsize=1024)
def _may_keep(code: CodeType, asked: int) -> bool:
    """Whether what a line of a function comes to, which asks for the rank, may be known after the function: unless it
    decides there, or is given to local names, and the function gives nothing back and stores to local names alone."""
    definition = definition_of(code)
    if definition is None:
        return True
    around = [node for node in ast.walk(definition) if isinstance(node, ast.stmt) and _spans(node, asked)]
    statement = max(around, key=lambda node: node.lineno, default=None)
    return not isinstance(statement, (ast.If, ast.Assign)) or any(map(_is_seen_outside, ast.walk(definition)))


def _is_seen_outside(node: ast.AST) -> bool:
    """Whether a function gives something back, or stores to anything but local names."""
    if isinstance(node, ast.Return):
        return node.value is not None
    if isinstance(node, (ast.Attribute, ast.Subscript)):
        return isinstance(node.ctx, ast.Store)
    return isinstance(node, (ast.Global, ast.Nonlocal))


def _spans(node: ast.AST, line: int) -> bool:
    return bool(node.lineno <= line <= node.end_lineno)  # type: ignore[attr-defined]


def _names(node: ast.AST) -> set[str]:
    return {one.id for one in ast.walk(node) if isinstance(one, ast.Name)}
