"""Schedules as values: which actions each rank runs, in which order, and the text they are printed in."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from itertools import zip_longest

from lightning_pipeline.schedules.validation import MAX_PASSES, ScheduleError, shown


class Kind(str, Enum):
    """What an action does. Members compare and hash as their text, so ``Kind.F == "F"``."""

    F = "F"
    """Forward."""
    B = "B"
    """Whole backward: gradients of inputs and of weights."""
    I = "I"  # noqa: E741 - the field's own letter
    """Gradients of the inputs only."""
    W = "W"
    """Gradients of the weights only, after ``I``."""
    SEND_F = "SEND_F"
    """Send the stage's outputs to the next stage."""
    RECV_F = "RECV_F"
    """Receive the stage's inputs from the previous stage."""
    SEND_B = "SEND_B"
    """Send the gradients of the stage's inputs to the previous stage."""
    RECV_B = "RECV_B"
    """Receive the gradients of the stage's outputs from the next stage."""

    # Without it, Python 3.12 formats a member as "Kind.F".
    __str__ = str.__str__

    @property
    def is_compute(self) -> bool:
        """True for F, B, I and W."""
        return self in _COMPUTE


_COMPUTE = frozenset({Kind.F, Kind.B, Kind.I, Kind.W})
_NOTATION = re.compile(r"([0-9]+)(F|B|I|W|SEND_F|RECV_F|SEND_B|RECV_B)([0-9]+)")
_MAX_DIGITS = 18  # of a number, with leading zeros


@dataclass(frozen=True, slots=True, repr=False)
class Action:
    """A kind, a virtual stage and a micro-batch, printed as ``2F0``: stage 2, forward, micro-batch 0.

    ``kind`` may be given as text. The notation is that of ``torch.distributed.pipelining``.

    Raises:
        ScheduleError: for an unknown kind, a negative stage or micro-batch, or one beyond what any schedule has.
    """

    kind: Kind
    stage: int
    microbatch: int

    def __post_init__(self) -> None:
        if not isinstance(self.kind, Kind):
            try:
                object.__setattr__(self, "kind", Kind(self.kind))
            except ValueError:
                kinds = ", ".join(Kind)
                raise ScheduleError(f"unknown kind of action {self.kind!r}; the kinds are {kinds}") from None
        if not (0 <= self.stage < MAX_PASSES and 0 <= self.microbatch < MAX_PASSES):
            raise ScheduleError(
                f"stage and micro-batch of an action count from 0 to {MAX_PASSES - 1:,}, got "
                f"stage={shown(self.stage)}, microbatch={shown(self.microbatch)}"
            )

    @classmethod
    def parse(cls, text: str) -> Action:
        """Read ``2F0``, ``3RECV_B1`` and the like; surrounding blanks do not matter.

        Raises:
            ScheduleError: if ``text`` is anything else.
        """
        match = _NOTATION.fullmatch(text.strip())
        if match is None or max(len(match[1]), len(match[3])) > _MAX_DIGITS:
            raise ScheduleError(
                f"cannot read the action {shown(text)}; write stage, kind and micro-batch, such as 2F0, "
                f"with one of the kinds {', '.join(Kind)}, and numbers below {MAX_PASSES:,}"
            )
        stage, kind, microbatch = match.groups()
        return cls(Kind(kind), int(stage), int(microbatch))

    def __str__(self) -> str:
        return f"{self.stage}{self.kind.value}{self.microbatch}"

    __repr__ = __str__


_MAX_MARKED_COLUMNS = 24  # a wider marked grid is cut to the columns around its first mark


def format_grid(rows: Sequence[Sequence[str]]) -> str:
    """One line for each rank, with cells centred in columns as wide as their widest cell."""
    widths = [max(map(len, column)) for column in zip_longest(*rows, fillvalue="")]
    label = len(str(len(rows) - 1))
    return "\n".join(
        f"rank {rank:>{label}}  "
        + " ".join(cell.center(width) for cell, width in zip(row, widths, strict=False)).rstrip()
        for rank, row in enumerate(rows)
    )


def format_marked(rows: Sequence[Sequence[str]], marks: Collection[tuple[int, int]]) -> str:
    """The grid with each ``(rank, column)`` of ``marks`` shown as ``>cell<``."""
    marked = [
        [f">{cell}<" if (rank, column) in marks else cell for column, cell in enumerate(row)]
        for rank, row in enumerate(rows)
    ]
    if max(map(len, marked)) <= _MAX_MARKED_COLUMNS or not marks:
        return format_grid(marked)
    first = max(0, min(column for _, column in marks) - _MAX_MARKED_COLUMNS // 3)
    last = first + _MAX_MARKED_COLUMNS
    return format_grid(
        [["..."] * (first > 0) + row[first:last] + ["..."] * (len(row) > last) for row in marked],
    )


def loop_placement(num_ranks: int, num_virtual_stages: int) -> tuple[int, ...]:
    """The rank of each virtual stage where stages go round the ranks: 0, 1, 2, 0, 1, 2."""
    return tuple(stage % num_ranks for stage in range(num_ranks * num_virtual_stages))


def v_placement(num_ranks: int) -> tuple[int, ...]:
    """The rank of each virtual stage where stages go down the ranks and back up: 0, 1, 2, 2, 1, 0."""
    return (*range(num_ranks), *reversed(range(num_ranks)))


class LargeOrders(Sequence[Sequence[Action]]):
    """Orders of more actions than objects can be made for; see ``compact``."""

    has_backward: bool


@dataclass(frozen=True, repr=False)
class Schedule:
    """One list of actions for each rank; iterates, indexes and compares as that.

    The name is only a label: two schedules are equal if they do the same on every rank.

    Args:
        name: used in messages.
        orders: for each rank, its actions in order; tuples, but for a large schedule.
        num_microbatches: micro-batches in one step.
        placement: for each virtual stage, in the order of the data, its rank.
        lowered: whether the orders contain sends and receives.

    Raises:
        ScheduleError: if the placement names a rank that does not exist.
    """

    name: str = field(compare=False)
    orders: Sequence[Sequence[Action]]
    num_microbatches: int
    placement: tuple[int, ...]
    lowered: bool = False

    def __post_init__(self) -> None:
        if not self.is_large:
            object.__setattr__(self, "orders", tuple(tuple(order) for order in self.orders))
        object.__setattr__(self, "placement", tuple(self.placement))
        for stage, rank in enumerate(self.placement):
            if not 0 <= rank < self.num_ranks:
                raise ScheduleError(f"stage {stage} is placed on rank {rank}, but there are {self.num_ranks} ranks")

    @property
    def is_large(self) -> bool:
        """Whether it is beyond ``validation.MAX_PASSES``: it can be checked, simulated and summed up, nothing else."""
        return isinstance(self.orders, LargeOrders)

    def require_small(self, purpose: str) -> None:
        """Raise a ScheduleError where it is large; `purpose` says what it is not for."""
        if self.is_large:
            raise ScheduleError(
                f"schedule {self.name!r} has {self.num_stages * self.num_microbatches:,} passes of a micro-batch "
                f"through a virtual stage; beyond {MAX_PASSES:,} it can be checked and simulated, not {purpose}"
            )

    @property
    def num_ranks(self) -> int:
        """Ranks that work together on one copy of the model."""
        return len(self.orders)

    @property
    def num_stages(self) -> int:
        """Virtual stages over all ranks."""
        return len(self.placement)

    @property
    def has_backward(self) -> bool:
        """True for training, False for a forward-only schedule."""
        if isinstance(self.orders, LargeOrders):
            return self.orders.has_backward
        return any(action.kind in (Kind.B, Kind.I, Kind.W) for order in self.orders for action in order)

    def stages_on(self, rank: int) -> list[int]:
        """The virtual stages on ``rank``, ascending."""
        return [stage for stage, place in enumerate(self.placement) if place == rank]

    def peer(self, action: Action) -> int:
        """The rank a SEND goes to, or a RECV comes from.

        Raises:
            ScheduleError: for a compute action.
        """
        if action.kind.is_compute:
            raise ScheduleError(f"{action} has no peer; only sends and receives have one")
        ahead = action.kind in (Kind.SEND_F, Kind.RECV_B)
        return self.placement[action.stage + (1 if ahead else -1)]

    def compute(self) -> Schedule:
        """This schedule without its sends and receives."""
        if not self.lowered:
            return self
        orders = tuple(tuple(action for action in order if action.kind.is_compute) for order in self.orders)
        return replace(self, orders=orders, lowered=False)

    def on_ranks(self, named: Mapping[int, int]) -> Schedule:
        """This schedule with its ranks in another order, in which stages lie where they are to.

        Args:
            named: the rank of some stages. Ranks that it does not name take the places that are left, ascending.

        Raises:
            ScheduleError: a rank does not exist, or the schedule's placement does not allow these.
        """
        if not named:
            return self
        self.require_small("put on other ranks")
        asked = ", ".join(f"{stage}@{rank}" for stage, rank in sorted(named.items()))
        if max(named.values()) >= self.num_ranks:
            raise ScheduleError(
                f"stage_config puts stages on ranks ({asked}), and there are ranks 0 to {self.num_ranks - 1} of a "
                f"pipeline: name one of these"
            )
        pairs = {(self.placement[stage], rank) for stage, rank in named.items()}
        given = dict(pairs)  # the rank of each place
        if len(given) < len(pairs) or len(set(given.values())) < len(pairs):
            together = ", ".join("+".join(map(str, self.stages_on(rank))) for rank in range(self.num_ranks))
            raise ScheduleError(
                f"stage_config puts stages on ranks ({asked}), and {self.name!r} needs a rank of its own for each of "
                f"{together}: name ranks accordingly, number virtual stages along the data, or choose another schedule"
            )
        left = iter(sorted(set(range(self.num_ranks)) - set(given.values())))
        ranks = [given[place] if place in given else next(left) for place in range(self.num_ranks)]
        orders = tuple(self.orders[ranks.index(rank)] for rank in range(self.num_ranks))
        return replace(self, orders=orders, placement=tuple(ranks[place] for place in self.placement))

    def take(self, num_microbatches: int) -> Schedule:
        """This schedule for the first micro-batches only, such as those of a smaller last batch.

        The remaining actions keep their order, so it is as sound as the whole.

        Raises:
            ScheduleError: unless ``num_microbatches`` is between 1 and what the schedule has.
        """
        if not 1 <= num_microbatches <= self.num_microbatches:
            raise ScheduleError(
                f"schedule {self.name!r} has {self.num_microbatches} micro-batches; take between 1 and "
                f"{self.num_microbatches} of them, got {num_microbatches}"
            )
        orders = tuple(tuple(a for a in order if a.microbatch < num_microbatches) for order in self.orders)
        return replace(self, orders=orders, num_microbatches=num_microbatches)

    def error(self, sentence: str, marks: Collection[tuple[int, int]]) -> ScheduleError:
        """An error that says ``sentence`` and shows the grid with the cells ``(rank, position)`` marked."""
        return ScheduleError(f"schedule {self.name!r}: {sentence}\n{format_marked(self._cells(), marks)}")

    def _cells(self) -> list[list[str]]:
        return [[str(action) for action in order] for order in self.orders]

    def __len__(self) -> int:
        return self.num_ranks

    def __iter__(self) -> Iterator[list[Action]]:
        return (list(order) for order in self.orders)

    def __getitem__(self, rank: int) -> list[Action]:
        return list(self.orders[rank])

    def __str__(self) -> str:
        return f"{self._title()}\n{format_grid(self._cells())}"

    def __repr__(self) -> str:
        return f"<Schedule {self._title()}>"

    def _title(self) -> str:
        return (
            f"{self.name}: {self.num_ranks} ranks, {self.num_stages} stages, {self.num_microbatches} micro-batches"
            + ", lowered" * self.lowered
        )
