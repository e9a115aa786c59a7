"""Sends the requests: a fixed number at a time (closed loop), or at intended times (open loop)."""

import asyncio
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field

from load.callers import Caller
from load.clock import Clock
from load.config import RequestPace, Workload
from load.stream import Failure, FailureKind, LiveCounts, PlannedRequest, RequestResult, StreamReader
from load.workload import due_requests

RECONNECT_PAUSE_S = 0.1
"""Pause of a closed loop's worker after a broken connection, which a dead server gives thousands of times a second."""


@dataclass(slots=True)
class Driver:
    """Sends the requests of one run to one server. `results` has them in the order in which they ended."""

    workload: Workload
    caller: Caller
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
            self.caller.api, self.counts, self.workload.ignore_eos, planned.leaves_after, on_leaving=has_left.set
        )
        self.counts.num_started += 1
        started_s = self.clock.now()
        broken = await self.caller.call(planned, reader, has_left)
        failure = None if has_left.is_set() else reader.find_failure(planned.output_tokens, broken)
        self._record(planned, intended_s, started_s, reader, failure, has_left.is_set())
        return failure

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
