"""What a virtual stage notes of micro-batches whose structure is not fixed."""

from __future__ import annotations

import copy

from lightning_pipeline.partition.interception import Interception
from lightning_pipeline.partition.observer import Observer
from lightning_pipeline.partition.record import Record
from lightning_pipeline.runtime.microbatch import Microbatch
from lightning_pipeline.runtime.site import Site
from lightning_pipeline.runtime.structure import Report, Structure


class Rehearsal:
    """Observes a stage's part of such micro-batches, and reports on it.

    Args:
        site: the stage.
        interception: the module's intercepted calls.
        template: a settled structure of the same kind of step, whose events a new structure is likely to share.
        training: whether gradients come back.

    Attributes:
        reports: on each structure, by its number.
    """

    def __init__(self, site: Site, interception: Interception, template: Structure | None, *, training: bool) -> None:
        self.reports: dict[int, Report] = {}
        self._site = site
        self._interception = interception
        self._template = template
        self._training = training
        self._tensor_names = interception.tensor_names()

    def begin(self, state: Microbatch) -> Record:
        """Before the stage runs: the events before it, to which its own will be added."""
        record = state.header.record if state.header is not None else Record()
        known = self._template.records[self._site.stage].events if self._template is not None else None
        state.observer = Observer(
            record, self._interception.streams, self._tensor_names, self._interception.module_names, known=known
        )
        if state.header is not None:
            state.observer.note_alias_groups(state.header.aliases)
        return record

    def end(self, state: Microbatch, passed: str) -> None:
        """After the stage ran. `passed`: how the data went past it, if no module of it was called."""
        observer, structure, stage = state.observer, state.structure, self._site.stage
        assert observer is not None
        record = observer.end(stage)
        counts_before = record.counts
        streams = self._interception.streams
        record.counts = {name: count for name, count in streams.counts.items() if name in streams.drawing}
        own = record.events[record.starts[stage] :]
        report = Report(
            usage=observer.usage,
            start=record.starts[stage],
            leaves=set(observer.leaves),
            dynamic=any(event.dynamic for event in own),
            events=tuple(event.name for event in own),
            passed=passed,
        )
        self.reports.setdefault(structure.number, Report()).merge(report)
        self._narrow(state, record)
        if not structure.settled:
            kept = copy.copy(record)
            kept.counts = counts_before
            structure.records[stage] = kept

    def note_gradients(self, state: Microbatch) -> None:
        """After the stage's backward: for which values of earlier stages there is a gradient."""
        assert state.received is not None
        self.reports[state.structure.number].gradients |= set(state.received.gradients)

    def _narrow(self, state: Microbatch, record: Record) -> None:
        """Events that are those of a known structure, in other shapes, send what is known to be needed."""
        template = self._template
        state.gradients_out = None if self._training else ()
        if self._site.last or template is None or record.dynamic:
            return
        if record.names() != template.records[self._site.stage].names():
            return
        state.outputs = {value: state.outputs[value] for value in template.crossing[self._site.stage]}
        if self._training:
            state.gradients_out = template.gradients[self._site.stage]
