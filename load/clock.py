"""The clock of a run."""

import asyncio
import time
from typing import Protocol


class Clock(Protocol):
    """A monotonic clock in seconds from an arbitrary start. Tests pass one of their own."""

    def now(self) -> float: ...

    async def sleep_until(self, moment: float) -> None:
        """Return at `moment` or later; at once where it has passed."""
        ...


class RealClock:
    """The machine's clock. What an event loop wakes up late counts as client wait."""

    now = staticmethod(time.perf_counter)

    async def sleep_until(self, moment: float) -> None:
        # uvloop counts in milliseconds and wakes up to one early, which would make latencies too small.
        while (left := moment - time.perf_counter()) > 0.0:  # noqa: ASYNC110 - time has no event
            await asyncio.sleep(left if left > 1e-3 else 0.0)
