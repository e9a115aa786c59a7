"""Commands to Redis: many small ones are sent as few large ones, and none while Redis is away."""

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Generic, NamedTuple, Protocol, TypeVar

from redis.exceptions import RedisError

from sluice.serving.statistics import CacheUsage

_log = logging.getLogger(__name__)

FAILURES = (RedisError, OSError, TimeoutError)
"""Exceptions of commands where Redis is away, slow, or refuses them."""
_MAX_FAILURES = 3
"""Failures in a row that count as an outage; a single slow answer is none."""
_MAX_WAITING = 4096
_MAX_BATCH = 32
"""Small enough for a batch of large values to arrive within the time limit."""

Item = TypeVar("Item")
Answer = TypeVar("Answer")


class RedisState(Protocol):
    """Whether Redis answers, and who learns of each answer."""

    @property
    def is_up(self) -> bool: ...
    def succeeded(self) -> None: ...
    def failed(self, error: Exception) -> None: ...


class Availability:
    """Whether Redis answers. It counts failures, and while Redis is away pings it every `retry_s`.

    To be made on the event loop. It is down until the first answer.
    """

    def __init__(self, ping: Callable[[], Awaitable[object]], name: str, usage: CacheUsage, retry_s: float) -> None:
        self._ping = ping
        self._name = name
        self._usage = usage
        self._retry_s = retry_s
        self._num_failures = 0
        usage.is_up = False
        self._watch: asyncio.Task[None] | None = asyncio.create_task(self._wait_until_up(), name="cache-availability")

    @property
    def is_up(self) -> bool:
        return self._usage.is_up

    def succeeded(self) -> None:
        self._num_failures = 0

    def failed(self, error: Exception) -> None:
        """Count a failed command. Too many in a row mean that Redis is away."""
        self._usage.num_errors += 1
        self._num_failures += 1
        if self.is_up and self._num_failures >= _MAX_FAILURES:
            self._usage.is_up = False
            self._warn(error)
            self._watch = asyncio.create_task(self._wait_until_up(self._retry_s), name="cache-availability")

    async def _wait_until_up(self, delay_s: float = 0.0) -> None:
        is_reported = delay_s > 0
        while True:
            await asyncio.sleep(delay_s)
            delay_s = self._retry_s
            try:
                await self._ping()
            except FAILURES as error:
                self._usage.num_errors += 1
                if not is_reported:
                    self._warn(error)
                is_reported = True
            else:
                break
        self._num_failures = 0
        self._usage.is_up = True
        if is_reported:
            _log.warning("the response cache at %s answers again", self._name)

    def _warn(self, error: Exception) -> None:
        reason = str(error) or type(error).__name__
        _log.warning(
            "the response cache at %s is not available, requests are served without it: %s", self._name, reason
        )

    async def close(self) -> None:
        self._usage.is_up = False
        watch, self._watch = self._watch, None
        if watch is not None:
            watch.cancel()
            await asyncio.wait((watch,))


class _Waiting(NamedTuple, Generic[Item, Answer]):
    item: Item
    answer: asyncio.Future[Answer]
    expires_at: float


class CommandBatcher(Generic[Item, Answer]):
    """Sends items in batches: those that arrive while a batch is in flight go together in the next one.

    `send` takes a batch and returns an answer for each item. An item that cannot be sent in time is answered with
    `nothing`. A look-up sent alone costs the event loop about 0.1 ms, one of 32 sent together 0.006 ms.
    """

    def __init__(
        self,
        send: Callable[[list[Item]], Awaitable[list[Answer]]],
        nothing: Answer,
        availability: RedisState,
        *,
        max_wait_s: float,
        width: int = 1,
    ) -> None:
        """`max_wait_s` limits the wait until an item is sent, not `send` itself. `width`: batches in flight at once."""
        self._send = send
        self._nothing = nothing
        self._availability = availability
        self._max_wait_s = max_wait_s
        self._width = width
        self._waiting: deque[_Waiting[Item, Answer]] = deque()
        self._senders: set[asyncio.Task[None]] = set()
        self._num_sending = 0
        """Number of tasks that still send. A task that has found nothing more to send exists for a moment longer."""
        self._loop = asyncio.get_running_loop()

    def put(self, item: Item) -> asyncio.Future[Answer]:
        """Return the answer to come, which never is an error."""
        answer: asyncio.Future[Answer] = self._loop.create_future()
        if not self._availability.is_up or len(self._waiting) >= _MAX_WAITING:
            answer.set_result(self._nothing)
            return answer
        self._waiting.append(_Waiting(item, answer, self._loop.time() + self._max_wait_s))
        if self._num_sending < self._width:
            self._num_sending += 1
            sender = asyncio.create_task(self._send_all(), name="cache-commands")
            self._senders.add(sender)
            sender.add_done_callback(self._senders.discard)
        return answer

    async def _send_all(self) -> None:
        try:
            while batch := self._next_batch():
                await self._send_batch(batch)
        finally:
            self._num_sending -= 1

    async def _send_batch(self, batch: list[_Waiting[Item, Answer]]) -> None:
        answers = [self._nothing] * len(batch)
        try:
            answers = await self._attempt([each.item for each in batch])
        finally:
            for each, answer in zip(batch, answers, strict=True):
                _set_answer(each.answer, answer)

    async def _attempt(self, items: list[Item]) -> list[Answer]:
        try:
            answers = await self._send(items)
        except FAILURES as error:
            self._availability.failed(error)
            return [self._nothing] * len(items)
        self._availability.succeeded()
        return answers

    def _next_batch(self) -> list[_Waiting[Item, Answer]]:
        """Return the next batch, empty where nothing waits. Items that waited too long are answered on the way."""
        batch: list[_Waiting[Item, Answer]] = []
        now = self._loop.time()
        while self._waiting and len(batch) < _MAX_BATCH:
            first = self._waiting.popleft()
            if self._availability.is_up and now < first.expires_at:
                batch.append(first)
            else:
                _set_answer(first.answer, self._nothing)
        return batch

    async def close(self) -> None:
        """Answer everything that waits or is in flight with `nothing`. Close the availability first."""
        senders = list(self._senders)
        for sender in senders:
            sender.cancel()
        if senders:
            await asyncio.wait(senders)
        self._next_batch()


def _set_answer(future: asyncio.Future[Answer], answer: Answer) -> None:
    if not future.done():
        future.set_result(answer)
