"""Circuit breakers: a target that fails is left alone for a while, and then tried by one request at a time."""

from collections import deque
from collections.abc import Callable
from enum import IntEnum
from time import monotonic
from typing import NamedTuple

from sluice.pipelines.routes.settings import BreakerSettings


class BreakerState(IntEnum):
    """States in the order of how ill the target is. The numbers are those of the metric."""

    CLOSED = 0
    HALF_OPEN = 1
    OPEN = 2


class Pass(NamedTuple):
    """The leave to ask a target once. `era` counts the changes of the breaker's state; what an attempt of an earlier
    era found out changes nothing."""

    era: int
    is_probe: bool = False


class CircuitBreaker:
    """Judges one target by how its attempts end. Each pass is given back once, by `succeed`, `fail` or `abandon`.

    Closed, every request may pass. A failure opens it that is one of `failures` in a row, or with which at least
    `failure_rate` of the last `window` results are failures. It opens for `open_s`, and for twice as long each time
    that the probe after it fails, up to `max_open_s`. Then it is half open: one request at a time may pass, and closes
    it where it succeeds.
    """

    def __init__(self, settings: BreakerSettings, clock: Callable[[], float] = monotonic) -> None:
        self._settings = settings
        self._clock = clock
        self._era = 0
        self._num_in_row = 0
        self._results: deque[bool] = deque(maxlen=settings.window)
        """The last results: whether each was a failure."""
        self._is_closed = True
        self._num_openings = 0
        """How often it opened since it was closed."""
        self._opens_until = 0.0
        self._has_probe = False

    @property
    def state(self) -> BreakerState:
        if self._is_closed:
            return BreakerState.CLOSED
        return BreakerState.OPEN if self._clock() < self._opens_until else BreakerState.HALF_OPEN

    @property
    def admits(self) -> bool:
        """Whether a request may pass."""
        state = self.state
        return state is BreakerState.CLOSED or (state is BreakerState.HALF_OPEN and not self._has_probe)

    @property
    def closes_in_s(self) -> float:
        """Seconds until it is half open; 0 where it is not open."""
        return max(0.0, self._opens_until - self._clock()) if not self._is_closed else 0.0

    def enter(self) -> Pass:
        """Give a pass. Where the breaker does not admit the request, the caller has nothing better to ask: then its
        success closes the breaker, and its failure does not keep it open for longer."""
        is_probe = self.state is BreakerState.HALF_OPEN and not self._has_probe
        self._has_probe |= is_probe
        return Pass(self._era, is_probe)

    def succeed(self, given: Pass) -> None:
        """Note that the target has answered."""
        if given.era != self._era:
            return
        if self._is_closed:
            self._num_in_row = 0
            self._results.append(False)
        else:
            self._close()

    def fail(self, given: Pass, retry_after_s: float | None = None) -> None:
        """Note that the target could not answer. Where this opens it, it stays open for `retry_after_s` at least."""
        if given.era != self._era:
            return
        if self._is_closed:
            self._num_in_row += 1
            self._results.append(True)
            if self._is_too_much():
                self._open(retry_after_s)
        elif given.is_probe:
            self._open(retry_after_s)

    def abandon(self, given: Pass) -> None:
        """Note that nobody waits for the target's answer any more, which says nothing of the target."""
        if given.era == self._era and given.is_probe:
            self._has_probe = False

    def _is_too_much(self) -> bool:
        settings, results = self._settings, self._results
        is_whole = len(results) == settings.window
        return self._num_in_row >= settings.failures or (
            is_whole and sum(results) >= settings.failure_rate * settings.window
        )

    def _open(self, retry_after_s: float | None) -> None:
        settings = self._settings
        # The exponent has a bound: 2.0 to the power of 1024 is none.
        open_s = min(settings.open_s * 2.0 ** min(self._num_openings, 32), settings.max_open_s)
        self._opens_until = self._clock() + max(open_s, min(retry_after_s or 0.0, settings.max_open_s))
        self._num_openings += 1
        self._change(is_closed=False)

    def _close(self) -> None:
        self._num_openings = 0
        self._change(is_closed=True)

    def _change(self, *, is_closed: bool) -> None:
        self._is_closed = is_closed
        self._era += 1
        self._has_probe = False
        self._num_in_row = 0
        self._results.clear()
