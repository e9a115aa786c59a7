"""Copies of other gateways' streams, which follow them in Redis until they end or are taken over."""

import asyncio
import logging
from collections.abc import Coroutine, Sequence
from contextvars import Context
from time import monotonic
from typing import Any, Protocol, cast

import msgspec
from redis.asyncio import Redis

from sluice.engine.types import TokenEvent
from sluice.gateway.streams.kept import Item, KeptStream, Origin, StreamMovedError, Tokens
from sluice.gateway.streams.script import DIGEST, PREFIX
from sluice.gateway.streams.store import StreamStore
from sluice.serving.caching.redis_commands import FAILURES

log = logging.getLogger(__name__)

LEASE_MS = 5_000
"""How long a gateway may be silent until others go on with its streams."""
MAX_COMMANDS = 512
"""Most streams that a message to Redis is about."""
_POLL_S = 0.02
"""How long an event of another gateway's stream waits at most here."""
_LOOK_S = 0.5
"""How often it is looked up whether that gateway lives."""
_RETRY_S = 0.5
_KEEP_S = 5.0
"""How long a copy is kept without a reader."""
_STOP_S = 0.2
Recorded = list[tuple[int, TokenEvent]]
"""Tokens of an answer's sequences, by the numbers of these, in the order in which they came."""
_decode_items = msgspec.msgpack.Decoder(list[Item]).decode
_decode_origin = msgspec.msgpack.Decoder(Origin).decode


class Successor(Protocol):
    """This gateway, as one that goes on with streams of others."""

    client: Redis
    name: str

    @property
    def knows_leases(self) -> bool:
        """Whether a gateway without a lease is gone: Redis has answered for so long that all others have renewed it."""
        ...

    def lose(self, error: Exception) -> None:
        """Note that Redis is away."""
        ...

    async def take_over(self, kept: KeptStream) -> list[bytes] | None:
        """Make a stream this gateway's own, whose gateway is gone. Return its items in batches; None where another one
        goes on with it."""
        ...

    async def go_on(self, kept: KeptStream, num_bytes: int, recorded: Recorded) -> None:
        """Go on with a stream that was taken over, which has so many bytes in Redis."""
        ...


class _Copy:
    """A copy of a stream, and how many batches of its items it has."""

    __slots__ = ("kept", "num_batches")

    def __init__(self, kept: KeptStream) -> None:
        self.kept = kept
        self.num_batches = 0

    def take(self, batches: Sequence[bytes]) -> None:
        """Add batches of items."""
        self.num_batches += len(batches)
        for batch in batches:
            for item in _decode_items(batch):
                self.kept.apply(item)


class StreamCopies:
    """The copies that one gateway has, as many as its clients read."""

    def __init__(self, successor: Successor, store: StreamStore) -> None:
        self._successor = successor
        self._store = store
        self._copies: dict[str, _Copy] = {}
        self._following: asyncio.Task[None] | None = None

    async def find(self, owner: str, stream_id: str) -> KeptStream | None:
        """Return a copy of the owner's stream, which follows it; None where there is none."""
        try:
            encoded = await self._successor.client.hget(f"{PREFIX}{stream_id}:head", "origin")
        except FAILURES as error:
            self._successor.lose(error)
            return None
        origin = None if encoded is None else _decode_origin(cast(bytes, encoded))
        if origin is None or origin.owner != owner:
            return None
        return self._store.find(owner, stream_id) or self._begin(origin)

    def _begin(self, origin: Origin) -> KeptStream:
        kept = self._store.add(origin)
        kept.keep_s = _KEEP_S
        self._copies[kept.id] = _Copy(kept)
        if self._following is None:
            self._following = spawn(self._follow_all())
        return kept

    def forget(self, stream_id: str) -> None:
        """Follow a stream no longer."""
        self._copies.pop(stream_id, None)

    async def _follow_all(self) -> None:
        """Follow the streams while there are any."""
        looked_at = 0.0
        try:
            while self._copies:
                try:
                    await self._read_items()
                    if monotonic() - looked_at > _LOOK_S:
                        looked_at = monotonic()
                        await self._look_at_runners()
                except FAILURES as error:
                    self._successor.lose(error)
                    await asyncio.sleep(_RETRY_S)
                except Exception:  # one stream must not hold up the others
                    log.exception("streams of other gateways cannot be followed")
                    await asyncio.sleep(_RETRY_S)
                await asyncio.sleep(_POLL_S)
        finally:
            self._following = None

    async def _read_items(self) -> None:
        for stream_id in [name for name, each in self._copies.items() if each.kept.has_ended]:
            del self._copies[stream_id]
        copies = list(self._copies.values())
        for first in range(0, len(copies), MAX_COMMANDS):
            some = copies[first : first + MAX_COMMANDS]
            pipeline = self._successor.client.pipeline(transaction=False)
            for copy in some:
                pipeline.lrange(items_key(copy.kept.id), copy.num_batches, -1)
            for copy, batches in zip(some, await pipeline.execute(), strict=True):
                copy.take(batches)

    async def _look_at_runners(self) -> None:
        """Mark the streams that are read here, and go on with those whose gateway is gone."""
        read = [each for each in self._copies.values() if each.kept.num_readers]
        for first in range(0, len(read), MAX_COMMANDS):
            some = read[first : first + MAX_COMMANDS]
            pipeline = self._successor.client.pipeline(transaction=False)
            for copy in some:
                pipeline.set(reader_mark(copy.kept.id), 1, px=LEASE_MS)
                pipeline.evalsha(DIGEST, 0, "look", copy.kept.id)
            for copy, found in zip(some, (await pipeline.execute())[1::2], strict=True):
                await self._note_runner(copy, found)

    async def _note_runner(self, copy: _Copy, found: Sequence[Any]) -> None:
        """Act on the answer to `look`: the stream's runner, whether that lives, and whether the stream has ended and
        was cancelled. One that is not there goes on at its gateway alone: Redis has lost it, or was away from there."""
        if not found:
            self.forget(copy.kept.id)
            self._store.drop(copy.kept, StreamMovedError(copy.kept.id))
            return
        runner, is_alive, has_ended, was_cancelled = found
        if was_cancelled:
            self.forget(copy.kept.id)
            self._store.drop(copy.kept)
        elif not has_ended and (runner == self._successor.name.encode() or self._is_gone(is_alive)):
            await self._take_over(copy)

    def _is_gone(self, is_alive: int) -> bool:
        """Whether a stream's gateway is gone. After an outage of Redis one may be without a lease and go on alone."""
        return not is_alive and self._successor.knows_leases

    async def _take_over(self, copy: _Copy) -> None:
        """Go on with a stream whose gateway is gone, unless another gateway does."""
        batches = await self._successor.take_over(copy.kept)
        if batches is None:
            return
        self.forget(copy.kept.id)
        copy.take(batches[copy.num_batches :])
        items = [item for batch in batches for item in _decode_items(batch)]
        recorded = [(each.sequence, each.event) for each in items if isinstance(each, Tokens)]
        await self._successor.go_on(copy.kept, sum(map(len, batches)), recorded)

    async def close(self) -> None:
        """Follow nothing any more."""
        if self._following is not None:
            await stop(self._following)


def items_key(stream_id: str) -> str:
    """Return the name of the list of a stream's items."""
    return f"{PREFIX}{stream_id}:items"


def reader_mark(stream_id: str) -> str:
    """Return the name of what is there while a stream is read at another gateway than its own."""
    return f"{PREFIX}{stream_id}:reader"


async def stop(task: asyncio.Task[None]) -> None:
    """End a task. Redis' client may take a cancellation that comes with an answer for an answer alone."""
    while not task.done():
        task.cancel()
        await asyncio.wait((task,), timeout=_STOP_S)


def spawn(work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
    """Start a task that belongs to no request."""
    return asyncio.get_running_loop().create_task(work, name="shared-streams", context=Context())
