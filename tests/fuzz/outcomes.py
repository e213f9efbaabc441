"""What may come of reading what somebody gives: it is taken, or an error of the package's own says what is wrong."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hypothesis import strategies as st

import lightning_pipeline
from tests.memory_limit import little_memory

PACKAGE = Path(lightning_pipeline.__file__).parent
MOST_WORDS = 2000
"""Characters of a message: it quotes what it was given, and does not repeat it."""


def taken(read: Callable[[], Any], *errors: type[Exception], words: str = "") -> Any:
    """What `read` returns; None if it raises one of `errors`, by a line of the package, whose message has `words`."""
    try:
        with little_memory():
            return read()
    except errors as error:
        where = traceback.extract_tb(error.__traceback__)[-1]
        assert Path(where.filename).is_relative_to(PACKAGE), f"{type(error).__name__} is raised by {where}: {error}"
        assert type(error) in errors, f"{type(error).__name__}: {error}"
        assert words in str(error), error
        assert len(str(error)) < MOST_WORDS, f"{type(error).__name__} of {len(str(error))} characters"
        return None


def damaged(content: bytes) -> st.SearchStrategy[bytes]:
    """A file's content with some bits flipped, or a part cut out, repeated, or put in place of another."""
    place = st.integers(0, len(content))

    def flip(bits: list[int]) -> bytes:
        changed = bytearray(content)
        for bit in bits:
            changed[bit // 8] ^= 1 << bit % 8
        return bytes(changed)

    def splice(start: int, stop: int, new: bytes) -> bytes:
        start, stop = sorted((start, stop))
        return content[:start] + new + content[stop:]

    parts = st.tuples(place, place).map(lambda ends: content[min(ends) : max(ends)])
    return st.one_of(
        st.lists(st.integers(0, 8 * len(content) - 1), min_size=1, max_size=8).map(flip),
        place.map(lambda end: content[:end]),
        st.builds(splice, place, place, st.one_of(st.just(b""), st.binary(max_size=16), parts)),
        st.binary(max_size=64),
    )


def mutated(tree: Any, values: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """Nested dicts and lists in which one to three things are other values, or are left out."""
    paths = list(_paths(tree))

    def change(changes: list[tuple[tuple[Any, ...], bool, Any]]) -> Any:
        changed = tree
        for path, is_left_out, value in changes:
            changed = _replaced(changed, path, is_left_out, value)
        return changed

    one = st.tuples(st.sampled_from(paths), st.booleans(), values)
    return st.lists(one, min_size=1, max_size=3).map(change)


def _paths(tree: Any, path: tuple[Any, ...] = ()) -> Any:
    yield path
    if isinstance(tree, dict):
        for key, value in tree.items():
            yield from _paths(value, (*path, key))
    elif isinstance(tree, list):
        for index, value in enumerate(tree):
            yield from _paths(value, (*path, index))


def _replaced(tree: Any, path: tuple[Any, ...], is_left_out: bool, value: Any) -> Any:
    if not path:
        return value
    first, rest = path[0], path[1:]
    if isinstance(tree, dict) and first in tree:
        if not rest and is_left_out:
            return {key: item for key, item in tree.items() if key != first}
        return {**tree, first: _replaced(tree[first], rest, is_left_out, value)}
    if isinstance(tree, list) and isinstance(first, int) and first < len(tree):
        if not rest and is_left_out:
            return [*tree[:first], *tree[first + 1 :]]
        return [*tree[:first], _replaced(tree[first], rest, is_left_out, value), *tree[first + 1 :]]
    return tree


DIGITS = st.sampled_from(["0", "1", "7", "255", "262143", "99999999999", "9" * 30, "9" * 5000, "00", "²", "٣", "-1"])
NUMBERS = st.one_of(
    st.integers(-2, 9), st.sampled_from([255, 2**18, 10**12, 2**63, 10**4000, -(10**4000)]), st.integers()
)
_STRANGE = ["", "\0", "\ud800", "x" * 10_000, "../x", "/x", "\x1b[2J"]
TEXTS = st.one_of(DIGITS, st.text(max_size=8), st.sampled_from(_STRANGE))
SCALARS = st.one_of(st.none(), st.booleans(), NUMBERS, st.floats(), TEXTS)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(TEXTS, inner, max_size=3)),
    max_leaves=6,
)
"""What JSON and YAML can hold."""
