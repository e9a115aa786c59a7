"""Callers: they take a request to the server and its answer to the reader. And the clock by which both are timed."""

import asyncio
import time
from abc import ABC, abstractmethod
from collections.abc import Coroutine
from dataclasses import dataclass
from typing import Any

from sluice.load.apis import Api, ApiContext
from sluice.load.config import LoadTarget, Workload
from sluice.load.connection import ConnectionPool, encode_request
from sluice.load.stream import Failure, FailureKind, PlannedRequest, StreamReader


class Clock:
    """The machine's monotonic clock, in seconds from an arbitrary start. Tests have one that stands still."""

    now = staticmethod(time.perf_counter)

    async def sleep_until(self, moment: float) -> None:
        """Return at `moment` or later; at once where it has passed. A late wake-up counts as client wait."""
        # uvloop counts in milliseconds and wakes up to one early, which would make latencies too small.
        while (left := moment - time.perf_counter()) > 0.0:  # noqa: ASYNC110 - time has no event
            await asyncio.sleep(left if left > 1e-3 else 0.0)


class Caller(ABC):
    """Sends requests to one server."""

    __slots__ = ()
    api: Api
    model: str

    @abstractmethod
    async def call(self, planned: PlannedRequest, reader: StreamReader, leaving: asyncio.Event) -> Failure | None:
        """Send one request, and let `reader` read until the end or until `leaving` is set, which breaks it off.

        Returns how the transport failed, None where it did not. Never raises for what the server does.
        """


@dataclass(slots=True)
class HttpCaller(Caller):
    """Sends requests over HTTP/1.1."""

    target: LoadTarget
    workload: Workload
    model: str
    api: Api
    pool: ConnectionPool

    async def call(self, planned: PlannedRequest, reader: StreamReader, leaving: asyncio.Event) -> Failure | None:
        context = ApiContext(planned.history, planned.images)
        body = self.api.body(self.model, planned.prompt, planned.output_tokens, self.workload, context)
        headers = (*self.target.headers, *self.api.headers())
        request = encode_request("POST", self.target.url, self.api.path(self.model), headers, body)
        try:
            async with asyncio.timeout(self.target.timeout_s):
                connection = await self.pool.acquire()
                try:
                    exchange = connection.exchange(request, reader)
                    await (exchange if planned.leaves_after is None else until(leaving, exchange))
                finally:
                    self.pool.release(connection)
        except TimeoutError as error:  # asyncio's has no text; the system's (an unanswered connection) has
            return Failure(FailureKind.TIMEOUT, str(error) or f"no end within {self.target.timeout_s:g} s")
        except OSError as error:
            return Failure(FailureKind.CONNECTION, f"{error} after {len(reader.times_s)} token events")
        return None


async def until(leaving: asyncio.Event, exchange: Coroutine[Any, Any, None]) -> None:
    """Run an exchange until its end or until its client leaves, which cancels it."""
    exchanging, waiting = asyncio.ensure_future(exchange), asyncio.ensure_future(leaving.wait())
    try:
        await asyncio.wait((exchanging, waiting), return_when=asyncio.FIRST_COMPLETED)
    finally:
        waiting.cancel()
        if not exchanging.done():
            exchanging.cancel()
    if not leaving.is_set():
        await exchanging
    else:
        await asyncio.gather(exchanging, return_exceptions=True)
