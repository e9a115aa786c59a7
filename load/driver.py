"""Sends the requests: a fixed number at a time (closed loop), or at intended times (open loop)."""

import asyncio
import time
from collections.abc import Coroutine, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any, Protocol

from load.apis import Api
from load.config import LoadTarget, RequestPace, Workload
from load.connection import ConnectionPool, encode_request
from load.stream import Failure, FailureKind, LiveCounts, PlannedRequest, RequestResult, StreamReader
from load.workload import due_requests

RECONNECT_PAUSE_S = 0.1
"""Pause of a closed loop's worker after a broken connection, which a dead server gives thousands of times a second."""


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


@dataclass(slots=True)
class Driver:
    """Sends the requests of one run to one server. `results` has them in the order in which they ended."""

    target: LoadTarget
    workload: Workload
    model: str
    api: Api
    pool: ConnectionPool
    clock: Clock
    counts: LiveCounts = field(default_factory=LiveCounts)
    results: list[RequestResult] = field(default_factory=list)

    async def run_closed(self, requests: Iterator[PlannedRequest], concurrency: int, deadline_s: float | None) -> None:
        """Run `concurrency` workers, each of which sends its next request when its last has ended."""

        async def work() -> None:
            while deadline_s is None or self.clock.now() < deadline_s:
                planned = next(requests, None)
                if planned is None:
                    return
                failure = await self.send(planned, self.clock.now())
                if failure is not None and failure.kind is FailureKind.CONNECTION:
                    await self.clock.sleep_until(self.clock.now() + RECONNECT_PAUSE_S)

        async with asyncio.TaskGroup() as workers:
            for _ in range(concurrency):
                workers.create_task(work())

    async def run_open(self, requests: Iterator[PlannedRequest], pace: RequestPace) -> None:
        """Send each request at its intended time, whatever the state of the others.

        `pace.concurrency` limits the requests in flight.
        """
        slots = asyncio.Semaphore(pace.concurrency) if pace.concurrency else nullcontext()

        async def send(planned: PlannedRequest, intended_s: float) -> None:
            async with slots:
                await self.send(planned, intended_s)

        start = self.clock.now()
        async with asyncio.TaskGroup() as sends:
            for offset, planned in due_requests(requests, pace, self.workload.seed):
                if pace.duration_s is not None and offset >= pace.duration_s:
                    return
                await self.clock.sleep_until(start + offset)
                sends.create_task(send(planned, start + offset))

    async def send(self, planned: PlannedRequest, intended_s: float) -> Failure | None:
        """Send one request, read its stream and record the result. Never raises for what the server does."""
        has_left = asyncio.Event()
        reader = StreamReader(
            self.api, self.counts, self.workload.ignore_eos, planned.leaves_after, on_leaving=has_left.set
        )
        body = self.api.body(self.model, planned.prompt, planned.output_tokens, self.workload)
        path = self.api.path(self.model)
        headers = (*self.target.headers, *self.api.headers())
        request = encode_request("POST", self.target.url, path, headers, body)
        self.counts.num_started += 1
        started_s = self.clock.now()
        broken = await self._exchange(request, reader, has_left if planned.leaves_after else None)
        failure = None if has_left.is_set() else reader.find_failure(planned.output_tokens, broken)
        self._record(planned, intended_s, started_s, reader, failure, has_left.is_set())
        return failure

    async def _exchange(self, request: bytes, reader: StreamReader, leaving: asyncio.Event | None) -> Failure | None:
        try:
            async with asyncio.timeout(self.target.timeout_s):
                connection = await self.pool.acquire()
                try:
                    if leaving is None:
                        await connection.exchange(request, reader)
                    else:
                        await _until(leaving, connection.exchange(request, reader))
                finally:
                    self.pool.release(connection)
        except TimeoutError as error:  # asyncio's has no text; the system's (an unanswered connection) has
            return Failure(FailureKind.TIMEOUT, str(error) or f"no end within {self.target.timeout_s:g} s")
        except OSError as error:
            return Failure(FailureKind.CONNECTION, f"{error} after {len(reader.times_s)} token events")
        return None

    def _record(
        self,
        planned: PlannedRequest,
        intended_s: float,
        started_s: float,
        reader: StreamReader,
        failure: Failure | None,
        has_left: bool,
    ) -> None:
        if has_left:
            self.counts.num_left += 1
        elif failure is None:
            self.counts.num_served += 1
        else:
            self.counts.num_failed += 1
        self.results.append(
            RequestResult(
                planned=planned,
                intended_s=intended_s,
                started_s=started_s,
                ended_s=reader.last_read_s if failure is None else self.clock.now(),
                event_times_s=reader.times_s,
                prompt_tokens=reader.prompt_tokens,
                output_tokens=reader.output_tokens,
                output_tokens_counted_by=reader.counted_by,
                finish_reason=reader.finish_reason,
                failure=failure,
                has_left=has_left,
            )
        )


async def _until(leaving: asyncio.Event, exchange: Coroutine[Any, Any, None]) -> None:
    """Run an exchange until its end or until its client leaves, which drops the connection."""
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
