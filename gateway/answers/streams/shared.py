"""Streams in a Redis that gateways share: what is published goes there first, and another gateway can go on with it.

While Redis is away streams go on, and can be come back to on their own gateway only.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from contextvars import Context
from hashlib import sha256
from math import inf
from secrets import token_hex
from time import monotonic
from typing import Any

import msgspec

from sluice.engine.types import TokenEvent
from sluice.errors import ErrorCode, SluiceError
from sluice.gateway.answers.streams.kept import End, Item, KeptStream, Origin, StreamMovedError, Tokens
from sluice.gateway.answers.streams.store import IdempotencyKey, StreamLimits, StreamStore
from sluice.state.outage import Outage, heed_cancellation, keep_trying
from sluice.state.redis import FAILURES, connect
from sluice.state.redis_log import MAX_LOGS, Append, LogBatch, LogState, RedisLogs

log = logging.getLogger(__name__)

LEASE_MS = 5_000
"""How long a gateway may be silent until others go on with its streams."""
_POLL_S = 0.02
"""How long an event of another gateway's stream waits at most here."""
_LOOK_S = 0.5
"""How often it is looked up whether that gateway lives."""
_KEEP_S = 5.0
"""How long a copy is kept without a reader."""
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
_PREFIX = "sluice:streams:"
_LEAST_MS = 1000
_AWAY = "the stream store is away: streams can be come back to on their own gateway only"
Recorded = list[tuple[int, TokenEvent]]
"""Tokens of an answer's sequences, by the numbers of these, in the order in which they came."""
Rescue = Callable[[KeptStream, Recorded], Awaitable[None]]
"""Goes on with a stream whose gateway is gone, from the tokens that were published."""
_decode_items = msgspec.msgpack.Decoder(list[Item]).decode
_decode_origin = msgspec.msgpack.Decoder(Origin).decode
_encode = msgspec.msgpack.Encoder().encode


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

    def __init__(self, successor: "SharedStreams", store: StreamStore) -> None:
        self._successor = successor
        self._store = store
        self._copies: dict[str, _Copy] = {}
        self._following: asyncio.Task[None] | None = None

    async def find(self, owner: str, stream_id: str) -> KeptStream | None:
        """Return a copy of the owner's stream, which follows it; None where there is none."""
        try:
            encoded = await self._successor.logs.origin(stream_id)
        except FAILURES as error:
            self._successor.lose(error)
            return None
        origin = None if encoded is None else _decode_origin(encoded)
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
                heed_cancellation()
                await asyncio.sleep(_POLL_S)
        finally:
            self._following = None

    async def _read_items(self) -> None:
        for stream_id in [name for name, each in self._copies.items() if each.kept.has_ended]:
            del self._copies[stream_id]
        copies = list(self._copies.values())
        found = await self._successor.logs.read([(each.kept.id, each.num_batches) for each in copies])
        for copy, batches in zip(copies, found, strict=True):
            copy.take(batches)

    async def _look_at_runners(self) -> None:
        """Mark the streams that are read here, and go on with those whose gateway is gone."""
        read = [each for each in self._copies.values() if each.kept.num_readers]
        found = await self._successor.logs.look([each.kept.id for each in read], LEASE_MS)
        for copy, state in zip(read, found, strict=True):
            await self._note_runner(copy, state)

    async def _note_runner(self, copy: _Copy, found: LogState | None) -> None:
        """Act on the state of a stream. One that is not there goes on at its gateway alone: Redis has lost it, or was
        away from there."""
        if found is None:
            self.forget(copy.kept.id)
            self._store.drop(copy.kept, StreamMovedError(copy.kept.id))
        elif found.was_cancelled:
            self.forget(copy.kept.id)
            self._store.drop(copy.kept)
        elif not found.has_ended and (found.writer == self._successor.name or self._is_gone(found)):
            await self._take_over(copy)

    def _is_gone(self, found: LogState) -> bool:
        """Whether a stream's gateway is gone. After an outage of Redis one may be without a lease and go on alone."""
        return not found.is_alive and self._successor.knows_leases

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
            self._following.cancel()
            await asyncio.wait((self._following,))


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
        self._outage = Outage(_AWAY, "the stream store answers again")
        self._store = store
        self._limits = limits
        self._rescue = rescue
        self.client = connect(url, _TIMEOUT_S)
        self.name = token_hex(6)
        self.logs = RedisLogs(self.client, _PREFIX, self.name)
        self._own: dict[str, _Own] = {}
        self._copies = StreamCopies(self, store)
        self._stale: list[str] = []
        """Streams to delete from Redis."""
        self._ended: set[str] = set()
        """Streams of this gateway that have ended, and are kept here and in Redis."""
        self._waiting: dict[str, list[Item]] = {}
        """Items to be sent, by stream."""
        self._in_flight: dict[str, list[Item]] = {}
        """Items that are sent, and not shown yet."""
        self._has_work = asyncio.Event()
        self._leases_known_at = 0.0
        """When all other gateways have renewed their leases; infinite while Redis is away."""
        self.num_bytes = 0
        """Bytes in Redis of streams under way here."""
        beating = keep_trying(self._outage, self._beat, FAILURES, retry_s=_RETRY_S, beat_s=_BEAT_S)
        self._tasks = [spawn(self._write_forever()), spawn(beating)]

    @property
    def is_up(self) -> bool:
        return self._outage.is_up

    @property
    def problem(self) -> str:
        return "" if self.is_up else _AWAY

    @property
    def knows_leases(self) -> bool:
        """Whether a gateway without a lease is gone: Redis has answered for so long that all others have renewed it."""
        return self.is_up and monotonic() >= self._leases_known_at

    # --- own streams ---

    async def begin(self, kept: KeptStream, key: IdempotencyKey | None) -> str:
        origin = _encode(kept.origin)
        if not self.is_up or self.num_bytes + len(origin) > self._limits.max_bytes:
            self._store.counts["unshared", "begun"] += 1
            return ""
        try:
            name = "" if key is None else f"{key.owner}:{sha256(key.key.encode()).hexdigest()}"
            found = await self.logs.begin(kept.id, origin, _live_ms(kept), name)
        except FAILURES as error:
            self.lose(error)
            self._stale.append(kept.id)  # Redis may have it all the same
            return ""
        if not found:
            self._adopt(kept, len(origin))
        return found

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
                    await self._write(list(self._in_flight)[:MAX_LOGS])
            except FAILURES as error:
                self.lose(error)
            except Exception as error:  # whatever it is, streams must go on
                log.exception("streams cannot be shared")
                self.lose(error)
            heed_cancellation()

    async def _write(self, stream_ids: Sequence[str]) -> None:
        """Store items of some streams in one command, and then show them."""
        batches = [self._batch(each, self._in_flight[each]) for each in stream_ids]
        answers = await self.logs.append(batches)
        heed_cancellation()
        for batch, answer in zip(batches, answers, strict=True):
            items, own = self._in_flight.pop(batch.log_id, []), self._own.get(batch.log_id)
            if own is not None:
                self._note_answer(own, items, answer, len(batch.items))

    def _batch(self, stream_id: str, items: Sequence[Item]) -> LogBatch:
        """Return items as they are stored."""
        encoded = _encode(items) if items else b""
        own = self._own.get(stream_id)
        end = next((each for each in items if isinstance(each, End)), None)
        if own is None or end is None:
            return LogBatch(stream_id, _LEAST_MS if own is None else _live_ms(own.kept), "", encoded)
        return LogBatch(stream_id, max(1, int(own.kept.keep_s * 1000)), "whole" if end.is_whole else "broken", encoded)

    def _note_answer(self, own: _Own, items: Sequence[Item], answer: Append, num_bytes: int) -> None:
        """Show items that are stored. A stream that Redis has lost goes on; any other that was not stored ends here."""
        if answer is Append.DONE:
            own.appended_at = monotonic()
            own.num_bytes += num_bytes
            self.num_bytes += num_bytes
            self._show(own, items)
        elif answer is Append.LOST:
            self._store.counts["unshared", "lost"] += 1
            self._go_on_alone(own, items)
        else:
            self._release(own)
            self._store.drop(own.kept, StreamMovedError(own.kept.id) if answer is Append.ANOTHERS else None)

    def _show(self, own: _Own, items: Sequence[Item]) -> None:
        for item in items:
            own.kept.apply(item)
        if own.kept.has_ended:
            self._ended.add(own.kept.id)
            self._release(own)
        elif own.num_bytes > self._limits.max_stream_bytes:
            self._store.counts["unshared", "grown"] += 1
            self._stale.append(own.kept.id)
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
            self._stale.append(stream_id)

    # --- outages ---

    def lose(self, error: Exception) -> None:
        """Go on without Redis: what is under way here is kept here alone."""
        self._outage.failed(error)
        self._leases_known_at = inf
        sent, self._in_flight = self._in_flight, {}
        for stream_id, own in list(self._own.items()):
            self._stale.append(stream_id)
            self._go_on_alone(own, sent.get(stream_id, ()))
        self._waiting.clear()

    async def _beat(self) -> None:
        try:
            await self._renew()
        except FAILURES as error:
            self.lose(error)
            raise

    async def _renew(self) -> None:
        """Renew the lease of this gateway, and say of silent streams that they go on."""
        if not self.is_up:
            await self.logs.load()
        await self.logs.renew(LEASE_MS)
        while self._stale:
            await self.logs.drop(self._stale[-1])
            self._stale.pop()
        if self._leases_known_at == inf:
            self._leases_known_at = monotonic() + _RENEWED_S
        self._outage.end()
        await self._find_readers()
        now = monotonic()
        for stream_id, own in self._own.items():
            if now - own.appended_at > _SILENT_S:
                self._waiting.setdefault(stream_id, [])
                self._has_work.set()

    async def _find_readers(self) -> None:
        """Give time to streams that are read on other gateways only."""
        unread = [own.kept for own in self._own.values() if not own.kept.num_readers]
        for kept, is_read in zip(unread, await self.logs.are_read([each.id for each in unread]), strict=True):
            if is_read:
                self._store.postpone(kept)

    # --- streams of others ---

    async def find(self, owner: str, stream_id: str) -> KeptStream | None:
        return await self._copies.find(owner, stream_id) if self.is_up else None

    async def drop(self, stream_id: str) -> None:
        self._copies.forget(stream_id)
        try:
            await self.logs.cancel(stream_id)
        except FAILURES as error:
            self.lose(error)

    async def take_over(self, kept: KeptStream) -> list[bytes] | None:
        """Make a stream this gateway's own, whose gateway is gone. Return its items in batches; None where another one
        goes on with it."""
        return await self.logs.take(kept.id, int((kept.origin.keep_s + _SLACK_S) * 1000))

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
            task.cancel()
        await asyncio.wait(self._tasks)
        try:
            if self.is_up:
                await self.logs.leave()
        except FAILURES as error:
            log.warning("the lease of this gateway's streams runs out by itself: %s", error)
        self._outage.close()
        for own in list(self._own.values()):
            self._release(own)
            self._store.drop(own.kept, StreamMovedError(own.kept.id))
        await self.client.aclose()


def _live_ms(kept: KeptStream) -> int:
    return int((kept.keep_s + _SLACK_S) * 1000)


def spawn(work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
    """Start a task that belongs to no request."""
    return asyncio.get_running_loop().create_task(work, name="shared-streams", context=Context())
