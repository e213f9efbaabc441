"""A schedule: what each rank does, in which order, as a value."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass, field, replace

from lightning_pipeline.schedules.action import Action, Kind
from lightning_pipeline.schedules.errors import ScheduleError
from lightning_pipeline.schedules.grid import format_grid, format_marked


def loop_placement(num_ranks: int, num_virtual_stages: int) -> tuple[int, ...]:
    """The rank of each virtual stage where stages go round the ranks: 0, 1, 2, 0, 1, 2."""
    return tuple(stage % num_ranks for stage in range(num_ranks * num_virtual_stages))


def v_placement(num_ranks: int) -> tuple[int, ...]:
    """The rank of each virtual stage where stages go down the ranks and back up: 0, 1, 2, 2, 1, 0."""
    return (*range(num_ranks), *reversed(range(num_ranks)))


@dataclass(frozen=True, repr=False)
class Schedule:
    """One list of actions for each rank; iterates, indexes and compares as that.

    The name is a label only: two schedules are equal when they do the same on every rank.

    Args:
        name: what to call it in messages.
        orders: for each rank, its actions in the order it does them.
        num_microbatches: micro-batches in one step.
        placement: for each virtual stage, counted along the data, the rank it is on.
        lowered: True once sends and receives are part of the orders.

    Raises:
        ScheduleError: if the placement names a rank that does not exist.
    """

    name: str = field(compare=False)
    orders: tuple[tuple[Action, ...], ...]
    num_microbatches: int
    placement: tuple[int, ...]
    lowered: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "orders", tuple(tuple(order) for order in self.orders))
        object.__setattr__(self, "placement", tuple(self.placement))
        for stage, rank in enumerate(self.placement):
            if not 0 <= rank < self.num_ranks:
                raise ScheduleError(f"stage {stage} is placed on rank {rank}, but there are {self.num_ranks} ranks")

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

    def take(self, num_microbatches: int) -> Schedule:
        """This schedule for the first micro-batches only, such as those of a last batch that is smaller.

        What is left keeps its order, so it is as sound as the whole.

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
