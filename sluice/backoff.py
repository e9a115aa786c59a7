"""The restart budget of a process that ends by itself: how often it is started again, and after which delay."""

MAX_FUTILE_STARTS = 5
"""Futile starts in a row after which the process is given up. A start is futile if it served no request."""
CULPRIT_WEIGHT = 0.25
"""Weight of a futile start that a request caused: the next start may succeed without that request, unless every
request ends the process."""
FIRST_DELAY_S = 0.5
"""Delay before the start that follows the first futile one; each further delay is twice as long."""
STABLE_S = 60.0
"""A process that ran for this long counts as a good start, even without a request."""


class RestartBudget:
    """Counts futile starts, sets the delay before the next one, and decides when to give up.

    It reads no clock and starts nothing; a supervisor acts on it.
    """

    def __init__(self) -> None:
        self._num_futile = 0.0

    @property
    def is_exhausted(self) -> bool:
        return self._num_futile >= MAX_FUTILE_STARTS

    def delay_s(self) -> float:
        """Return the seconds to wait before the next start: exponential backoff."""
        return FIRST_DELAY_S * 2.0 ** (int(self._num_futile) - 1) if self._num_futile >= 1 else 0.0

    def refill(self) -> None:
        """Forget the futile starts: the process that ended had served a request, or had run for long."""
        self._num_futile = 0.0

    def spend(self, *, has_culprit: bool = False) -> None:
        """Count one futile start: the process that ended had served no request, or it did not load."""
        self._num_futile += CULPRIT_WEIGHT if has_culprit else 1.0
