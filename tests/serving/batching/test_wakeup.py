import asyncio
from time import perf_counter_ns

from serving.batching.queue import Wakeup
from tests.serving.batching.parts import turns

MS = 1_000_000


class Woken:
    """Keeps when it was woken. Asks again until `due_ns`, as a queue does."""

    def __init__(self, due_ns: int = 0) -> None:
        self.times: list[int] = []
        self.due_ns = due_ns
        self.wakeup = Wakeup(self.wake)
        self._is_due = asyncio.Event()

    def wake(self) -> None:
        self.times.append(perf_counter_ns())
        if self.times[-1] < self.due_ns:
            self.wakeup.at(self.due_ns)
        else:
            self._is_due.set()

    async def wait(self) -> int:
        """When it was due. Leaves the event loop to wait by itself, which is what rounds timers."""
        async with asyncio.timeout(5):
            await self._is_due.wait()
        return self.times[-1]


async def test_the_nearest_time_counts() -> None:
    woken = Woken()
    begun = perf_counter_ns()
    woken.wakeup.at(begun + 60_000 * MS)
    woken.wakeup.at(begun + 20 * MS)
    woken.wakeup.at(begun + 90_000 * MS)
    assert await woken.wait() - begun >= 19 * MS
    woken.wakeup.cancel()


async def test_less_than_a_millisecond_is_not_rounded_up_to_one() -> None:
    waits = []
    for _ in range(20):
        begun = perf_counter_ns()
        woken = Woken(begun + MS // 5)
        woken.wakeup.at(woken.due_ns)
        waits.append(await woken.wait() - begun)
    assert MS // 5 <= min(waits) < MS * 9 // 10


async def test_soon_is_once_in_the_next_turn() -> None:
    woken = Woken()
    woken.wakeup.soon()
    woken.wakeup.soon()
    assert woken.times == []
    await turns()
    assert len(woken.times) == 1


async def test_cancelled_it_stays_silent() -> None:
    woken = Woken()
    woken.wakeup.soon()
    woken.wakeup.at(perf_counter_ns() + MS)
    woken.wakeup.cancel()
    woken.wakeup.at(perf_counter_ns() + 2 * MS)
    woken.wakeup.cancel()
    await turns(5)
    assert woken.times == []
