"""Which of a recording's placeholders the user's code refers to: what it may still ask the values of.

Events keep the placeholders that they have handed out in pools, to hand them out again. Whoever counts references has
to know its own: two are the list's and that of the call to `getrefcount`.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING

from lightning_pipeline.partition.placeholder import Placeholder, placeholder

if TYPE_CHECKING:
    from lightning_pipeline.recording.event import Event
    from lightning_pipeline.recording.recording import Recording


def take_alive(recording: Recording) -> list[Placeholder]:
    """Take the placeholders that the user's code refers to out of the pools, in the order of their values."""
    found: dict[int, Placeholder] = {}
    for pool in _pools(recording):
        for index in range(len(pool)):
            if sys.getrefcount(pool[index]) > 2 and pool[index]._pl_recording is recording:
                place = pool[index]
                _take(recording, found, place)
                pool[index] = placeholder(place._pl_spec, place._pl_what)
    while recording.kept:
        place = recording.kept.pop()
        if sys.getrefcount(place) > 2:
            _take(recording, found, place)
    for reference in recording.batch_places:  # the batch's, in which the step may have written
        of_batch = reference()
        if type(of_batch) is Placeholder and of_batch._pl_recording is recording and sys.getrefcount(of_batch) > 2:
            _take(recording, found, of_batch)
    return [found[value] for value in sorted(found)]


def _take(recording: Recording, found: dict[int, Placeholder], place: Placeholder) -> None:
    if found.setdefault(place._pl_value, place) is not place:
        recording.twins.append(place)


def values_in_use(recording: Recording) -> set[int]:
    """The values that the user's code refers to in the middle of a step."""
    of_batch = (reference() for reference in recording.batch_places)
    found = {place._pl_value for place in of_batch if type(place) is Placeholder}
    for places in (recording.kept, *_pools(recording)):
        for index in range(len(places)):
            if sys.getrefcount(places[index]) > 2 and places[index]._pl_recording is recording:
                found.add(places[index]._pl_value)
    return found


def _pools(recording: Recording) -> Iterator[list[Placeholder]]:
    """The pools of the events so far, which may hold placeholders that were not handed out."""
    event: Event | None = recording.event
    while event is not None:
        yield event.pool
        skipped = recording.skipped.get(event)
        if skipped is None:
            event = event.parent
            continue
        before, makers = skipped
        for maker in makers - {event}:
            yield maker.pool
        event = before
