"""One timer for a whole queue."""

import asyncio
from collections.abc import Callable
from time import perf_counter_ns

_TIMER_NS = 1_000_000
"""Event loops round timers up to a millisecond. Less is waited for turn by turn: queue delays are often 100 us."""


class Wakeup:
    """Calls `wake` at the earliest of the times asked for. Waking too early is harmless, as `wake` asks anew."""

    def __init__(self, wake: Callable[[], None]) -> None:
        self._wake = wake
        self._soon: asyncio.Handle | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._timer_ns = 0

    def soon(self) -> None:
        """In the event loop's next turn, after everything that has come by then."""
        if self._soon is None:
            self._soon = asyncio.get_running_loop().call_soon(self._wake_soon)

    def at(self, time_ns: int) -> None:
        """At `time_ns` of perf_counter_ns, or earlier."""
        if self._soon is not None:
            return
        delay_ns = time_ns - perf_counter_ns()
        if delay_ns < _TIMER_NS:
            self.soon()
        elif self._timer is None or time_ns < self._timer_ns:
            self._cancel_timer()
            self._timer_ns = time_ns
            self._timer = asyncio.get_running_loop().call_later(delay_ns / 1e9, self._wake_timer)

    def cancel(self) -> None:
        """Forget all that was asked for."""
        if self._soon is not None:
            self._soon.cancel()
            self._soon = None
        self._cancel_timer()

    def _cancel_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _wake_soon(self) -> None:
        self._soon = None
        self._wake()

    def _wake_timer(self) -> None:
        self._timer = None
        self._wake()
