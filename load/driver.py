"""Sends the requests: a fixed number at a time (closed loop), or at intended times (open loop)."""

import asyncio
from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field, replace

from sluice.load.answers import AnswerCheck, schema_check, tool_check
from sluice.load.apis import AskedTurn
from sluice.load.callers import Caller, Clock
from sluice.load.config import RequestPace, Workload
from sluice.load.shares import WHOLE, Share
from sluice.load.stream import Failure, FailureKind, LiveCounts, PlannedRequest, RequestResult, StreamReader
from sluice.load.workload import due_requests

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
    _checks: Mapping[FailureKind, AnswerCheck] = field(init=False)

    def __post_init__(self) -> None:
        self._checks = _answer_checks(self.workload)

    async def run_closed(self, requests: Iterator[PlannedRequest], concurrency: int, deadline_s: float | None) -> None:
        """Run `concurrency` workers, each of which sends its next request when its last has ended."""

        async def work() -> None:
            while deadline_s is None or self.clock.now() < deadline_s:
                planned = next(requests, None)
                if planned is None:
                    return
                failure = await self.send_session(planned, self.clock.now(), deadline_s)
                if failure is not None and failure.kind is FailureKind.CONNECTION:
                    await self.clock.sleep_until(self.clock.now() + RECONNECT_PAUSE_S)

        async with asyncio.TaskGroup() as workers:
            for _ in range(concurrency):
                workers.create_task(work())

    async def run_open(
        self,
        requests: Iterator[PlannedRequest],
        pace: RequestPace,
        share: Share = WHOLE,
        start_s: float | None = None,
    ) -> None:
        """Send each request at its intended time, whatever the state of the others.

        `pace.concurrency` limits the requests in flight, or sessions. `start_s` is the moment at which the run begins,
        now where it is None.
        """
        slots = asyncio.Semaphore(share.part_of(pace.concurrency)) if pace.concurrency else nullcontext()
        start = self.clock.now() if start_s is None else start_s
        deadline_s = None if pace.duration_s is None else start + pace.duration_s

        async def send(planned: PlannedRequest, intended_s: float) -> None:
            async with slots:
                await self.send_session(planned, intended_s, deadline_s)

        async with asyncio.TaskGroup() as sends:
            for offset, planned in due_requests(requests, pace, self.workload.seed, share):
                if pace.duration_s is not None and offset >= pace.duration_s:
                    return
                await self.clock.sleep_until(start + offset)
                sends.create_task(send(planned, start + offset))

    async def send_session(
        self, first: PlannedRequest, intended_s: float, deadline_s: float | None = None
    ) -> Failure | None:
        """Send a request and, one after the other, the later turns of its session.

        A session ends early where a turn fails, its client leaves, or the next turn would start after the deadline.
        """
        history: tuple[AskedTurn, ...] = ()
        turns = (first, *first.later)
        for planned in turns:
            intended_s += planned.think_s
            if planned.turn > 1:
                if deadline_s is not None and intended_s >= deadline_s:
                    return None
                await self.clock.sleep_until(intended_s)
            reader, failure, has_left = await self._exchange(replace(planned, history=history), intended_s)
            if failure is not None or has_left or planned is turns[-1]:
                return failure
            intended_s = self.clock.now()
            history += (AskedTurn(str(planned.prompt), planned.images, reader.answer.text, reader.answer.response_id),)
        return None

    async def send(self, planned: PlannedRequest, intended_s: float) -> Failure | None:
        """Send one request, read its stream and record the result. Never raises for what the server does."""
        return (await self._exchange(planned, intended_s))[1]

    async def _exchange(self, planned: PlannedRequest, intended_s: float) -> tuple[StreamReader, Failure | None, bool]:
        """Send one request. Returns what was read, how it failed, and whether this client left."""
        has_left = asyncio.Event()
        reader = StreamReader(
            self.caller.api,
            self.counts,
            self.workload.ignore_eos,
            planned.leaves_after,
            on_leaving=has_left.set,
            checks=self._checks,
        )
        self.counts.num_started += 1
        started_s = self.clock.now()
        broken = await self.caller.call(planned, reader, has_left)
        failure = None if has_left.is_set() else reader.find_failure(planned.output_tokens, broken)
        self._record(planned, intended_s, started_s, reader, failure, has_left.is_set())
        return reader, failure, has_left.is_set()

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
                planned=replace(planned, history=(), later=(), images=()),
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
                sources_at_s=reader.sources_at_s,
                num_tool_calls=len(reader.answer.calls),
            )
        )


def _answer_checks(workload: Workload) -> dict[FailureKind, AnswerCheck]:
    """Return the checks of answers. A schema does not apply to an answer that calls a tool."""
    checks: dict[FailureKind, AnswerCheck] = {}
    if workload.tool_use is not None:
        checks[FailureKind.TOOL_CALL] = tool_check(workload.tool_use)
    if workload.json_schema is not None:
        meets_schema = schema_check(workload.json_schema)
        checks[FailureKind.SCHEMA] = lambda answer: None if answer.calls else meets_schema(answer)
    return checks
