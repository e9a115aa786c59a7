"""Sends the requests: so many at a time (closed loop), or at their appointed times (open loop)."""

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass, field

from load.apis import Dialect
from load.clock import Clock
from load.config import Pace, Target, Workload
from load.connection import ConnectionPool, encode_request
from load.stream import Failure, FailureKind, PlannedRequest, RequestResult, StreamReader, Tally
from load.workload import arrival_offsets

RECONNECT_PAUSE_S = 0.1
"""A closed loop's worker waits so long after a broken connection: a dead server answers thousands of times a second."""


@dataclass(slots=True)
class Driver:
    """One run against one server. `results` grows as requests end, in the order of their ends."""

    target: Target
    workload: Workload
    model: str
    dialect: Dialect
    pool: ConnectionPool
    clock: Clock
    tally: Tally = field(default_factory=Tally)
    results: list[RequestResult] = field(default_factory=list)

    async def run_closed(self, requests: Iterator[PlannedRequest], concurrency: int, deadline_s: float | None) -> None:
        """`concurrency` workers, each sending its next request when its last has ended."""

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

    async def run_open(self, requests: Iterator[PlannedRequest], pace: Pace) -> None:
        """Each request at its intended time whatever became of the others; `concurrency` bounds those in flight."""
        assert pace.request_rate is not None, "an open loop needs a rate"
        slots = asyncio.Semaphore(pace.concurrency) if pace.concurrency else None
        start = self.clock.now()
        async with asyncio.TaskGroup() as sends:
            for offset in arrival_offsets(pace.request_rate, pace.arrival, self.workload.seed):
                if pace.duration_s is not None and offset >= pace.duration_s:
                    return
                planned = next(requests, None)
                if planned is None:
                    return
                await self.clock.sleep_until(start + offset)
                sends.create_task(self._send_in_slot(planned, start + offset, slots))

    async def _send_in_slot(self, planned: PlannedRequest, intended_s: float, slots: asyncio.Semaphore | None) -> None:
        if slots is None:
            await self.send(planned, intended_s)
            return
        async with slots:
            await self.send(planned, intended_s)

    async def send(self, planned: PlannedRequest, intended_s: float) -> Failure | None:
        """One request from connection to verdict; never raises for what the server does."""
        reader = StreamReader(self.dialect, self.tally, must_be_full=self.workload.ignore_eos)
        body = self.dialect.body(self.model, planned.prompt, planned.output_tokens, self.workload)
        path = self.dialect.path(self.model)
        request = encode_request("POST", self.target.url, path, self.target.headers, body)
        self.tally.num_started += 1
        started_s = self.clock.now()
        failure = reader.judge(planned.output_tokens, await self._exchange(request, reader))
        self._record(planned, intended_s, started_s, reader, failure)
        return failure

    async def _exchange(self, request: bytes, reader: StreamReader) -> Failure | None:
        try:
            async with asyncio.timeout(self.target.timeout_s):
                connection = await self.pool.acquire()
                try:
                    await connection.exchange(request, reader)
                finally:
                    self.pool.release(connection)
        except TimeoutError as error:  # ours has no text, the system's (nobody answers the connection) has
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
    ) -> None:
        if failure is None:
            self.tally.num_served += 1
        else:
            self.tally.num_failed += 1
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
            )
        )
