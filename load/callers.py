"""Callers: they take a request to the server and its answer to the reader."""

import asyncio
from collections.abc import Coroutine
from dataclasses import dataclass
from typing import Any, Protocol

from sluice.load.apis import Api, ApiContext
from sluice.load.config import LoadTarget, Workload
from sluice.load.connection import ConnectionPool, encode_request
from sluice.load.stream import Failure, FailureKind, PlannedRequest, StreamReader


class Caller(Protocol):
    """Sends requests to one server."""

    @property
    def api(self) -> Api: ...

    @property
    def model(self) -> str: ...

    async def call(self, planned: PlannedRequest, reader: StreamReader, leaving: asyncio.Event) -> Failure | None:
        """Send one request, and let `reader` read until the end or until `leaving` is set, which breaks it off.

        Returns how the transport failed, None where it did not. Never raises for what the server does.
        """
        ...


@dataclass(slots=True)
class HttpCaller:
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
