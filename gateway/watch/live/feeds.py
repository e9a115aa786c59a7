"""Samples for all who watch: one of each interval is made once, and goes to each listener as bytes."""

import asyncio
import logging
from collections.abc import AsyncGenerator

import msgspec

from sluice.gateway.plane.health import Phase
from sluice.gateway.watch.live.sampler import LiveSampler, WatchedServer

log = logging.getLogger(__name__)

INTERVALS_S = (0.25, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0)
"""The intervals that there are, so that many listeners share few feeds."""
SHORTEST_S, LONGEST_S = INTERVALS_S[0], INTERVALS_S[-1]
_FIRST_S = 0.25
"""Seconds until the first listener of a feed has a sample."""
_MEASURED = 0.9
"""The part of an interval that a sample must have measured, so that one who asks once gets it."""


def choose_interval(seconds: float) -> float:
    """Return the interval of a feed that is closest to so many seconds."""
    return min(INTERVALS_S, key=lambda each: abs(each - seconds))


class _Frame:
    """An encoded sample."""

    __slots__ = ("elapsed_s", "json", "number")

    def __init__(self, number: int, elapsed_s: float, json: bytes) -> None:
        self.number = number
        self.elapsed_s = elapsed_s
        self.json = json


class LiveFeeds:
    """Makes samples while there are listeners. Belongs to the event loop."""

    def __init__(self, server: WatchedServer) -> None:
        self._server = server
        self._feeds: dict[float, _Feed] = {}

    async def listen(self, interval_s: float) -> AsyncGenerator[tuple[int, bytes], None]:
        """Yield samples as JSON with their numbers: the newest one at once, and none twice. A slow listener misses
        those between. Ends when the server drains."""
        feed = self._feeds.get(interval_s)
        if feed is None:
            feed = self._feeds[interval_s] = _Feed(self._server, interval_s)
        feed.num_listeners += 1
        last = 0
        try:
            while not feed.has_ended or (feed.frame is not None and feed.frame.number > last):
                frame = feed.frame
                if frame is not None and frame.number > last:
                    last = frame.number
                    yield frame.number, frame.json
                else:
                    await feed.wait()
        finally:
            feed.num_listeners -= 1
            if not feed.num_listeners:
                feed.cancel()
                self._feeds.pop(interval_s, None)

    async def sample_once(self, interval_s: float) -> bytes:
        """Return one sample as JSON that has measured about `interval_s`."""
        sampler = LiveSampler(self._server, interval_s)
        feed = self._feeds.get(interval_s)
        if feed is not None and feed.frame is not None and feed.frame.elapsed_s >= _MEASURED * interval_s:
            return feed.frame.json
        await sampler.begin()
        await asyncio.sleep(interval_s)
        return msgspec.json.encode(await sampler.sample())


class _Feed:
    """The samples of one interval."""

    def __init__(self, server: WatchedServer, interval_s: float) -> None:
        self.num_listeners = 0
        self.frame: _Frame | None = None
        self._health = server.server.plane.health
        self._sampler = LiveSampler(server, interval_s)
        self._changed = asyncio.Event()
        self._task = asyncio.create_task(self._run(), name="live-feed")

    @property
    def has_ended(self) -> bool:
        return self._task.done()

    def cancel(self) -> None:
        self._task.cancel()

    async def wait(self) -> None:
        """Wait for another sample, or the end. Raises what has ended the feed."""
        waiting = asyncio.ensure_future(self._changed.wait())
        try:
            await asyncio.wait((waiting, self._task), return_when=asyncio.FIRST_COMPLETED)
        finally:
            waiting.cancel()
        if self._task.done() and not self._task.cancelled():
            self._task.result()

    async def _run(self) -> None:
        number, pause_s = 0, min(_FIRST_S, self._sampler.interval_s)
        encoder = msgspec.json.Encoder()
        await self._sampler.begin()
        due = asyncio.get_running_loop().time()
        while True:
            due = max(due + pause_s, asyncio.get_running_loop().time())
            await asyncio.sleep(due - asyncio.get_running_loop().time())
            sample = await self._sampler.sample()
            number += 1
            self.frame = _Frame(number, sample.elapsed_s, encoder.encode(sample))
            self._changed.set()
            self._changed = asyncio.Event()
            if self._health.phase is Phase.DRAINING:
                return
            pause_s = self._sampler.interval_s
