"""Runs the requests of one batch by the handlers of the server's routes."""

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from functools import partial
from itertools import islice
from time import monotonic
from typing import NamedTuple, Protocol

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Message

from sluice.engine.types import BACKGROUND_PRIORITY
from sluice.errors import ErrorCode, SluiceError
from sluice.gateway.answers.batches.lines import RequestLine
from sluice.gateway.answers.batches.places import Place, PlaceKeeper
from sluice.gateway.answers.batches.results import BatchResult, ResultFiles
from sluice.gateway.calls import NO_RETRY
from sluice.gateway.front.http.errors import as_sluice_error, error_response
from sluice.gateway.front.http.exchange import Passage
from sluice.gateway.front.http.guard import Guard
from sluice.gateway.front.http.request import PRIORITY_HEADER
from sluice.gateway.tenancy.access.control import TENANT_HEADER
from sluice.gateway.tenancy.access.identity import Identity
from sluice.record.spans import current_span

_LINES_AHEAD = 32
"""Requests that are read from the file at a time. They may have 16 MiB each, and rarely do."""
_RETRIED = (429, 503)
_RETRY_WAITS_S = (0.5, 1.0, 2.0, 4.0, 8.0)
"""Seconds to wait after each answer that says to come again; the last one is repeated."""
_WINDOW_S = 300.0
"""How far back the rate goes by which the end is forecast."""


class Answered(NamedTuple):
    """An answer: its HTTP status and its body. One that `is_final` comes again at each try."""

    status: int
    body: bytes
    is_final: bool = False


class AnswerLine(Protocol):
    """Answers a POST of `body` to `url` as the server would, under that request id."""

    async def __call__(
        self, url: str, body: bytes, *, request_id: str, tenant: str, sender: Identity | None
    ) -> Answered: ...


class RouteAnswers:
    """Has the handlers of routes answer requests, which come after those of all clients and have no connection."""

    def __init__(self, guard: Guard, handlers: Mapping[str, Callable[[Request], Awaitable[Response]]]) -> None:
        """`handlers` are by path. Their answers are whole."""
        self._guard = guard
        self._handlers = handlers

    async def __call__(
        self, url: str, body: bytes, *, request_id: str, tenant: str, sender: Identity | None
    ) -> Answered:
        """Return the answer to a POST. To cancel the call is to disconnect."""
        named = {PRIORITY_HEADER: str(BACKGROUND_PRIORITY), **({TENANT_HEADER: tenant} if tenant else {})}
        headers = [(name.encode(), value.encode("latin-1", "replace")) for name, value in named.items()]
        passage = Passage("POST", url, headers, "", request_id)
        self._guard.open(passage)
        try:
            try:
                await self._guard.begin_own_call(passage, sender, tenant)
                passage.receive(body, is_last=True)
                response = await self._handlers[url](_request(passage, body))
            except Exception as error:
                response = error_response(url, as_sluice_error(error, request_id))
            is_final = NO_RETRY in passage.start(response.status_code)
            answer = bytes(response.body)
            passage.send(answer)
            return Answered(response.status_code, answer, is_final)
        finally:
            passage.end()
            current_span.set(None)  # the next try of this task may have no recording


def _request(passage: Passage, body: bytes) -> Request:
    """Return a request whose body is there, and whose client stays until it is answered."""
    pending: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive() -> Message:
        if pending:
            return pending.pop()
        await asyncio.Event().wait()
        raise AssertionError("unreachable")

    parts = {"method": passage.method, "path": passage.path, "query_string": b"", "headers": passage.headers}
    return Request({"type": "http", **parts, "state": {"request_id": passage.request_id}}, receive)


class LineRun:
    """Asks the pending requests of a batch, as many at a time as there are places for.

    A request whose place is revoked starts over when it gets another. One that the server has no room for (429, 503) is
    asked again; any other answer is a result, which `observe` gets when it is durable. With `most_retries` the run ends
    in UNAVAILABLE where the server has no room after so many.
    """

    def __init__(
        self,
        batch_id: str,
        tenant: str,
        sender: Identity | None,
        answer: AnswerLine,
        places: PlaceKeeper,
        results: ResultFiles,
        observe: Callable[[BatchResult], None],
        most_retries: int | None = None,
    ) -> None:
        self._batch_id = batch_id
        self._tenant = tenant
        self._sender = sender
        self._answer = answer
        self._places = places
        self._results = results
        self._observe = observe
        self._most_retries = most_retries

    async def run(self, lines: Iterator[RequestLine]) -> None:
        """Run the requests. Raises what reading `lines` and writing results raise; cancelling it ends all requests."""
        try:
            async with asyncio.TaskGroup() as group:
                async for line in _read_aside(lines):
                    place = await self._places.take(line.model)
                    task = group.create_task(self._run_line(line, place))
                    task.add_done_callback(partial(_release, place))  # also of a task that was cancelled too early
        except ExceptionGroup as failed:
            raise failed.exceptions[0] from None

    async def _run_line(self, line: RequestLine, place: Place) -> None:
        request_id = f"{self._batch_id}-{line.number}"
        while (answered := await self._ask_at(place, line, request_id)) is None:
            place = await self._places.take(line.model)
        result = BatchResult.answered(line.custom_id, answered.status, request_id, answered.body)
        await self._results.add(result)
        self._observe(result)

    async def _ask_at(self, place: Place, line: RequestLine, request_id: str) -> Answered | None:
        """Return the answer; None where the place was revoked."""
        if place.is_revoked:
            return None
        work = asyncio.ensure_future(self._ask(line, request_id))
        place.on_revoke = work.cancel
        try:
            await asyncio.wait((work,))
            return None if place.is_revoked else work.result()
        finally:
            place.release()
            if not work.done():
                work.cancel()
                await asyncio.wait((work,))

    async def _ask(self, line: RequestLine, request_id: str) -> Answered:
        num_retries = 0
        while True:
            answered = await self._answer(
                line.url, line.body, request_id=request_id, tenant=self._tenant, sender=self._sender
            )
            if answered.status not in _RETRIED or answered.is_final:
                return answered
            if num_retries == self._most_retries:
                raise SluiceError(ErrorCode.UNAVAILABLE, _error_message(answered.body))
            await asyncio.sleep(_RETRY_WAITS_S[min(num_retries, len(_RETRY_WAITS_S) - 1)])
            num_retries += 1


def _error_message(body: bytes) -> str:
    """Return the message of an error in OpenAI's shape."""
    message: str = msgspec.json.decode(body)["error"]["message"]
    return message


def _release(place: Place, _: "asyncio.Task[None]") -> None:
    place.release()


async def _read_aside(lines: Iterator[RequestLine]) -> AsyncIterator[RequestLine]:
    """Yield the lines, read a few at a time on a thread."""
    while ahead := await asyncio.to_thread(lambda: list(islice(lines, _LINES_AHEAD))):
        for line in ahead:
            yield line


class FinishForecast:
    """Forecasts the end of a batch from the rate at which its requests were finished lately."""

    def __init__(self, clock: Callable[[], float] = monotonic) -> None:
        self._clock = clock
        self._samples: deque[tuple[float, int]] = deque()

    def observe(self, num_finished: int) -> None:
        """Note how many requests are finished now."""
        now = self._clock()
        self._samples.append((now, num_finished))
        while now - self._samples[0][0] > _WINDOW_S:
            self._samples.popleft()

    def remaining_s(self, num_requests: int) -> float | None:
        """Return the seconds until all are finished; None before anything was."""
        with contextlib.suppress(IndexError):
            (start, first), (end, last) = self._samples[0], self._samples[-1]
            if last > first and end > start:
                return (num_requests - last) * (end - start) / (last - first)
        return None
