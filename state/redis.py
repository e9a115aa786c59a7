"""The one client of Redis, and a batcher of its commands, which sends none while Redis is away.

Its import takes 0.2 s: whoever needs it only where a Redis is named imports this there.
"""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Any, Generic, NamedTuple, TypeVar

from sluice.errors import ErrorCode, SluiceError
from sluice.state.outage import Outage, unavailable

try:
    from redis.asyncio import BlockingConnectionPool, Redis
    from redis.asyncio.retry import Retry
    from redis.backoff import NoBackoff
    from redis.exceptions import RedisError
except ImportError as _error:
    _TEXT = f"a Redis URL needs the package redis, which is not installed ({_error}): pip install 'sluice[redis]'"
    raise SluiceError(ErrorCode.UNIMPLEMENTED, _TEXT) from None

FAILURES = (RedisError, OSError, TimeoutError)
"""Exceptions of commands where Redis is away, slow, or refuses them."""
RedisClient = Redis
_MAX_WAITING = 4096
_MAX_BATCH = 32
"""Small enough for a batch of large values to arrive within the time limit."""

Item = TypeVar("Item")
Answer = TypeVar("Answer")


class Pool(NamedTuple):
    """The connections of a client of many commands at once: at most `size`, for one of which a command waits."""

    size: int
    wait_s: float


def connect(
    url: str, timeout_s: float, *, connect_timeout_s: float | None = None, pool: Pool | None = None, **options: Any
) -> RedisClient:
    """Return a client of the Redis at `url`, which connects at its first use. Raises ValueError for a wrong URL.

    A command waits at most `timeout_s`, and is sent once: who uses a store decides what follows from a failure.
    """
    options |= {
        "socket_timeout": timeout_s,
        "socket_connect_timeout": connect_timeout_s or timeout_s,
        "retry": Retry(NoBackoff(), 0),
    }
    if pool is None:
        return Redis.from_url(url, **options)
    connections = BlockingConnectionPool.from_url(url, max_connections=pool.size, timeout=pool.wait_s, **options)
    return Redis.from_pool(connections)


@contextmanager
def translated_errors(name: str) -> Iterator[None]:
    """Turn failures of commands into UNAVAILABLE of the store `name`."""
    try:
        yield
    except FAILURES as error:
        raise unavailable(name, error) from error


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
        availability: Outage,
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
        for sender in self._senders:
            sender.cancel()
        if self._senders:
            await asyncio.wait(self._senders)
        self._next_batch()


def _set_answer(future: asyncio.Future[Answer], answer: Answer) -> None:
    if not future.done():
        future.set_result(answer)
