"""The date and time for what depends on the calendar, steadier than the machine's."""

from collections.abc import Callable
from time import monotonic, time

DRIFT_S = 2.0
"""The largest correction of a machine's clock between two looks that is believed at once."""
LASTING_S = 600.0
"""Seconds for which the machine's clock must be elsewhere until it is believed."""


class CalendarClock:
    """Tells the seconds since 1970 by the machine's clock, except that a jump of it counts only once it has lasted.

    A clock that is set wrong and right again within ten minutes frees no limit of a day, and deletes nothing as too
    old. A jump counts from the first look that is ten minutes after the one that saw it; between looks nothing is known
    of it. One thread at a time may look.
    """

    def __init__(self, wall_clock: Callable[[], float] = time, clock: Callable[[], float] = monotonic) -> None:
        """`wall_clock` is the machine's, `clock` is one that nobody sets."""
        self._wall_clock = wall_clock
        self._clock = clock
        self._offset_s = wall_clock() - clock()
        self._jumped_at: float | None = None
        """The time, by `clock`, at which the machine's clock was first seen elsewhere."""

    def __call__(self) -> float:
        now = self._clock()
        offset_s = self._wall_clock() - now
        if abs(offset_s - self._offset_s) <= DRIFT_S:
            self._offset_s, self._jumped_at = offset_s, None
        elif self._jumped_at is None:
            self._jumped_at = now
        elif now - self._jumped_at >= LASTING_S:
            self._offset_s, self._jumped_at = offset_s, None
        return now + self._offset_s
