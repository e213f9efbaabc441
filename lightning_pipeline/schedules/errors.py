"""The error every fault in a schedule raises."""


class ScheduleError(ValueError):
    """A schedule that cannot be built, read or run; the message says why and, where it can, shows the faulty cell."""
