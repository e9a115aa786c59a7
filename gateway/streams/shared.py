"""Streams in a Redis that gateways share: what is published goes there first, and another gateway can go on with it.

While Redis is away streams go on, and can be come back to on their own gateway only.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from hashlib import sha256
from secrets import token_hex
from time import monotonic
from typing import Any, cast

import msgspec
from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff

from sluice.errors import ErrorCode, SluiceError
from sluice.gateway.streams.copies import (
    LEASE_MS,
    MAX_COMMANDS,
    Recorded,
    StreamCopies,
    items_key,
    reader_mark,
    spawn,
    stop,
)
from sluice.gateway.streams.kept import End, Item, KeptStream, StreamMovedError
from sluice.gateway.streams.script import DIGEST, PREFIX, SCRIPT
from sluice.gateway.streams.store import IdempotencyKey, StreamLimits, StreamStore
from sluice.serving.caching.redis_commands import FAILURES

log = logging.getLogger(__name__)

_TIMEOUT_S = 2.0
"""How long events wait for Redis before they go out without it."""
_BEAT_S = 1.0
_RETRY_S = 0.5
_RENEWED_S = LEASE_MS / 1000
"""How long after an outage every gateway that lives has found Redis again."""
_SILENT_S = 5.0
"""How long a stream is silent until Redis is told that it goes on."""
_SLACK_S = 60.0
"""How much longer than its own time a stream under way stays in Redis."""
_WRITTEN, _ANOTHERS, _LOST = 1, 0, -2
"""Answers to `append`; another one means that the stream was cancelled."""
_LEAST_MS = 1000
_AWAY = "the stream store is away: streams can be come back to on their own gateway only"
Rescue = Callable[[KeptStream, Recorded], Awaitable[None]]
"""Goes on with a stream whose gateway is gone, from the tokens that were published."""
_encode = msgspec.msgpack.Encoder().encode


class _Own:
    """A stream that this gateway generates, and its size in Redis."""

    __slots__ = ("appended_at", "kept", "num_bytes")

    def __init__(self, kept: KeptStream, num_bytes: int) -> None:
        self.kept = kept
        self.num_bytes = num_bytes
        self.appended_at = monotonic()


class SharedStreams:
    """The streams of all gateways of one Redis. To be made on the event loop."""

    def __init__(self, url: str, store: StreamStore, limits: StreamLimits, rescue: Rescue) -> None:
        """Connects by itself, again after an outage. Raises ValueError for a wrong URL."""
        self.is_up = False
        self._store = store
        self._limits = limits
        self._rescue = rescue
        self.client = Redis.from_url(
            url, socket_timeout=_TIMEOUT_S, socket_connect_timeout=_TIMEOUT_S, retry=Retry(NoBackoff(), 0)
        )
        self.name = token_hex(6)
        self._own: dict[str, _Own] = {}
        self._copies = StreamCopies(self, store)
        self._stale: list[tuple[str, str]] = []
        """Streams to delete from Redis, and the name under which this gateway had them there."""
        self._ended: set[str] = set()
        """Streams of this gateway that have ended, and are kept here and in Redis."""
        self._waiting: dict[str, list[Item]] = {}
        """Items to be sent, by stream."""
        self._in_flight: dict[str, list[Item]] = {}
        """Items that are sent, and not shown yet."""
        self._has_work = asyncio.Event()
        self._is_reported = False
        self._leases_known_at = 0.0
        self.num_bytes = 0
        """Bytes in Redis of streams under way here."""
        self._tasks = [spawn(self._write_forever()), spawn(self._beat_forever())]

    @property
    def problem(self) -> str:
        return "" if self.is_up else _AWAY

    @property
    def knows_leases(self) -> bool:
        return self.is_up and monotonic() >= self._leases_known_at

    # --- own streams ---

    async def begin(self, kept: KeptStream, key: IdempotencyKey | None) -> str:
        origin = _encode(kept.origin)
        if not self.is_up or self.num_bytes + len(origin) > self._limits.max_bytes:
            self._store.counts["unshared", "begun"] += 1
            return ""
        try:
            name = "" if key is None else f"{PREFIX}key:{key.owner}:{sha256(key.key.encode()).hexdigest()}"
            found: bytes = await self.run("begin", kept.id, origin, self.name, _live_ms(kept), name)
        except FAILURES as error:
            self.lose(error)
            self._stale.append((kept.id, self.name))  # Redis may have it all the same
            return ""
        if not found:
            self._adopt(kept, len(origin))
        return found.decode()

    def _adopt(self, kept: KeptStream, num_bytes: int) -> None:
        self._own[kept.id] = _Own(kept, num_bytes)
        self.num_bytes += num_bytes
        kept.publisher = self

    def put(self, kept: KeptStream, item: Item) -> None:
        self._waiting.setdefault(kept.id, []).append(item)
        self._has_work.set()

    async def _write_forever(self) -> None:
        while True:
            await self._has_work.wait()
            self._has_work.clear()
            self._in_flight, self._waiting = self._waiting, {}
            try:
                while self._in_flight:
                    await self._write(list(self._in_flight)[:MAX_COMMANDS])
            except FAILURES as error:
                self.lose(error)
            except Exception as error:  # whatever it is, streams must go on
                log.exception("streams cannot be shared")
                self.lose(error)

    async def _write(self, stream_ids: Sequence[str]) -> None:
        """Store items of some streams in one command, and then show them."""
        sizes, parts = [], list[Any]()
        for stream_id in stream_ids:
            items = self._in_flight[stream_id]
            batch = _encode(items) if items else b""
            sizes.append(len(batch))
            parts += (stream_id, *self._lifetime(stream_id, items), batch)
        answers = await self.run("append", self.name, *parts)
        for stream_id, answer, size in zip(stream_ids, answers, sizes, strict=True):
            items, own = self._in_flight.pop(stream_id, []), self._own.get(stream_id)
            if own is not None:
                self._note_answer(own, items, answer, size)

    def _lifetime(self, stream_id: str, items: Sequence[Item]) -> tuple[int, str]:
        """Return how many milliseconds Redis keeps a stream after these items, and a word for its end, "" for none."""
        own = self._own.get(stream_id)
        end = next((each for each in items if isinstance(each, End)), None)
        if own is None or end is None:
            return _LEAST_MS if own is None else _live_ms(own.kept), ""
        return max(1, int(own.kept.keep_s * 1000)), "whole" if end.is_whole else "broken"

    def _note_answer(self, own: _Own, items: Sequence[Item], answer: int, num_bytes: int) -> None:
        """Show items that are stored. A stream that Redis has lost goes on; any other that was not stored ends here."""
        if answer == _WRITTEN:
            own.appended_at = monotonic()
            own.num_bytes += num_bytes
            self.num_bytes += num_bytes
            self._show(own, items)
        elif answer == _LOST:
            self._store.counts["unshared", "lost"] += 1
            self._go_on_alone(own, items)
        else:
            self._release(own)
            self._store.drop(own.kept, StreamMovedError(own.kept.id) if answer == _ANOTHERS else None)

    def _show(self, own: _Own, items: Sequence[Item]) -> None:
        for item in items:
            own.kept.apply(item)
        if own.kept.has_ended:
            self._ended.add(own.kept.id)
            self._release(own)
        elif own.num_bytes > self._limits.max_stream_bytes:
            self._store.counts["unshared", "grown"] += 1
            self._stale.append((own.kept.id, self.name))
            self._go_on_alone(own)

    def _go_on_alone(self, own: _Own, unshown: Sequence[Item] = ()) -> None:
        """Have a stream go on without Redis."""
        self._release(own)
        for item in (*unshown, *self._waiting.pop(own.kept.id, ())):
            own.kept.apply(item)

    def _release(self, own: _Own) -> None:
        """Have nothing to do with a stream any more; it goes on here where it has not ended."""
        if self._own.pop(own.kept.id, None) is not None:
            own.kept.publisher = None
            self.num_bytes -= own.num_bytes

    def release(self, stream_id: str) -> None:
        if stream_id in self._ended:
            self._ended.discard(stream_id)
            self._stale.append((stream_id, self.name))

    # --- outages ---

    def lose(self, error: Exception) -> None:
        """Go on without Redis: what is under way here is kept here alone."""
        self.is_up = False
        if not self._is_reported:
            log.warning("%s: %s", _AWAY, str(error) or type(error).__name__)
            self._is_reported = True
        sent, self._in_flight = self._in_flight, {}
        for stream_id, own in list(self._own.items()):
            self._stale.append((stream_id, self.name))
            self._go_on_alone(own, sent.get(stream_id, ()))
        self._waiting.clear()

    async def _beat_forever(self) -> None:
        while True:
            try:
                await self._beat()
            except FAILURES as error:
                self.lose(error)
            await asyncio.sleep(_BEAT_S if self.is_up else _RETRY_S)

    async def _beat(self) -> None:
        """Renew the lease of this gateway, and say of silent streams that they go on."""
        if not self.is_up:
            # Those from before an outage are closed at the other end, and each would seem to be another outage.
            await self.client.connection_pool.disconnect(inuse_connections=False)
            await self.client.script_load(SCRIPT)
        await self.client.set(f"{PREFIX}gateway:{self.name}", 1, px=LEASE_MS)
        await self._drop_stale()
        if not self.is_up and self._is_reported:
            log.warning("the stream store answers again")
            self._leases_known_at = monotonic() + _RENEWED_S
        self.is_up, self._is_reported = True, False
        await self._find_readers()
        now = monotonic()
        for stream_id, own in self._own.items():
            if now - own.appended_at > _SILENT_S:
                self._waiting.setdefault(stream_id, [])
                self._has_work.set()

    async def _drop_stale(self) -> None:
        """Delete what Redis has of streams that went on without it."""
        while self._stale:
            await self.run("drop", *self._stale[-1])
            self._stale.pop()

    async def _find_readers(self) -> None:
        """Give time to streams that are read on other gateways only."""
        unread = [own.kept for own in self._own.values() if not own.kept.num_readers]
        for first in range(0, len(unread), MAX_COMMANDS):
            some = unread[first : first + MAX_COMMANDS]
            marks = await self.client.mget([reader_mark(each.id) for each in some])
            for kept, mark in zip(some, marks, strict=True):
                if mark is not None:
                    self._store.postpone(kept)

    async def run(self, *command: Any) -> Any:
        return await self.client.evalsha(DIGEST, 0, *command)

    # --- streams of others ---

    async def find(self, owner: str, stream_id: str) -> KeptStream | None:
        return await self._copies.find(owner, stream_id) if self.is_up else None

    async def drop(self, stream_id: str) -> None:
        self._copies.forget(stream_id)
        try:
            await self.run("cancel", stream_id)
        except FAILURES as error:
            self.lose(error)

    async def take_over(self, kept: KeptStream) -> list[bytes] | None:
        """Make a stream this gateway's own, whose gateway is gone. Return its items in batches; None where another one
        goes on with it."""
        if not await self.run("take", kept.id, self.name, int((kept.origin.keep_s + _SLACK_S) * 1000)):
            return None
        return cast(list[bytes], await self.client.lrange(items_key(kept.id), 0, -1))

    async def go_on(self, kept: KeptStream, num_bytes: int, recorded: Recorded) -> None:
        """Go on with a stream that was taken over, which has so many bytes in Redis."""
        kept.keep_s = kept.origin.keep_s
        self._adopt(kept, num_bytes)
        # While it was without Redis, that gateway may have sent events that are nowhere else. Others come in their
        # place, as tokens that arrive together share an event, so that their ids must differ.
        kept.take_over()
        if len(kept.log) and not recorded:
            self._store.counts["takeover", "impossible"] += 1
            message = "the gateway of this stream is gone, and no other can go on with an answer of its model"
            kept.failure = SluiceError(ErrorCode.UNAVAILABLE, message)
            kept.publish(End(False))
            return
        self._store.counts["takeover", "done"] += 1
        log.warning("stream %s goes on here: its gateway is gone", kept.id)
        await self._rescue(kept, recorded)

    async def close(self) -> None:
        """Stop at once; what was begun here is for the other gateways to go on with."""
        await self._copies.close()
        for task in self._tasks:
            await stop(task)
        try:
            if self.is_up:
                await self.client.delete(f"{PREFIX}gateway:{self.name}")
        except FAILURES as error:
            log.warning("the lease of this gateway's streams runs out by itself: %s", error)
        self.is_up = False
        for own in list(self._own.values()):
            self._release(own)
            self._store.drop(own.kept, StreamMovedError(own.kept.id))
        await self.client.aclose()


def _live_ms(kept: KeptStream) -> int:
    return int((kept.keep_s + _SLACK_S) * 1000)
