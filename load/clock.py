"""Time as a run sees it, so that a test can hold it still."""

import asyncio
import time
from typing import Protocol


class Clock(Protocol):
    """Seconds that only grow, from an arbitrary start."""

    def now(self) -> float: ...

    async def sleep_until(self, moment: float) -> None:
        """Return at `moment` or later; at once where it has passed."""
        ...


class RealClock:
    """The machine's. Event loops wake up to a millisecond late; that counts as client wait."""

    now = staticmethod(time.perf_counter)

    async def sleep_until(self, moment: float) -> None:
        await asyncio.sleep(max(0.0, moment - time.perf_counter()))
