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
    """The machine's clock. Event loops wake up to a millisecond late, which counts as client wait."""

    now = staticmethod(time.perf_counter)

    async def sleep_until(self, moment: float) -> None:
        await asyncio.sleep(max(0.0, moment - time.perf_counter()))
