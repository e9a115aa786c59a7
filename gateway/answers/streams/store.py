"""The answers that a server keeps: found by their id or by an idempotency key, bounded in number, bytes and time."""

import asyncio
import secrets
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import NamedTuple, Protocol

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from sluice.errors import ErrorCode, SluiceError
from sluice.gateway.answers.streams.kept import KeptStream, Origin
from sluice.state.log import EventLog

_ID_BYTES = 16
_ENDING_S = 5.0
"""How long answers may take to end when the server does."""


class StreamLimits(NamedTuple):
    """Bounds of what is kept: of all answers together, and of one."""

    max_bytes: int = 64 << 20
    max_count: int = 20_000
    max_stream_bytes: int = 4 << 20


class IdempotencyKey(NamedTuple):
    """A key that a client chose, among those of its owner."""

    owner: str
    key: str


class SharedStore(Protocol):
    """Streams that gateways share."""

    @property
    def problem(self) -> str:
        """Why streams cannot be shared now; "" where they can."""
        ...

    async def begin(self, kept: KeptStream, key: IdempotencyKey | None) -> str:
        """Share a stream that begins, where that is possible. Return the id of the one that has its key already, "" for
        none."""
        ...

    async def find(self, owner: str, stream_id: str) -> KeptStream | None:
        """Return a copy of the owner's stream of another gateway, which follows it; None where there is none."""
        ...

    async def drop(self, stream_id: str) -> None:
        """Delete a stream, whoever generates it, who will stop."""
        ...

    def release(self, stream_id: str) -> None:
        """Delete a stream soon that has ended and is not kept here any more, where it is this gateway's."""
        ...

    async def close(self) -> None: ...


class StreamStore:
    """Answers that are under way or kept after their end. Belongs to the event loop.

    An answer without a reader goes on for its own `keep_s`, and is kept for as long after its end. Past the bounds the
    answers that ended first go; where none has ended, the one that grows loses its first events.
    """

    def __init__(self, limits: StreamLimits) -> None:
        self._limits = limits
        self.shared: SharedStore | None = None
        """Where streams are that other gateways know, too."""
        self._kept: dict[str, KeptStream] = {}
        self._ended: dict[str, KeptStream] = {}
        """The kept answers that have ended, in that order."""
        self._keys: dict[IdempotencyKey, str] = {}
        self._keys_of: dict[str, IdempotencyKey] = {}
        self.num_bytes = 0
        self.counts: Counter[tuple[str, str]] = Counter()
        """Events for the metrics, by kind and outcome."""

    # --- finding ---

    def find(self, owner: str, stream_id: str) -> KeptStream | None:
        """Return the owner's answer where it is kept here."""
        found = self._kept.get(stream_id)
        return found if found is not None and found.origin.owner == owner else None

    def find_by_key(self, key: IdempotencyKey) -> KeptStream | None:
        """Return the answer to the first request with a key."""
        stream_id = self._keys.get(key)
        return None if stream_id is None else self._kept.get(stream_id)

    def live(self) -> list[KeptStream]:
        """Return the answers that have not ended."""
        return [each for each in self._kept.values() if not each.has_ended]

    @property
    def num_kept(self) -> Mapping[str, int]:
        """Numbers of answers by state."""
        return {"live": len(self._kept) - len(self._ended), "ended": len(self._ended)}

    # --- adding ---

    def add(self, origin: Origin, key: IdempotencyKey | None = None) -> KeptStream:
        """Keep an answer from here on. Raises OVERLOADED where as many as may be are under way."""
        if len(self._kept) >= self._limits.max_count:
            if not self._ended:
                message = f"{len(self._kept)} kept streams are under way, and more are not kept (--stream-store-count)"
                raise SluiceError(ErrorCode.OVERLOADED, message, retry_after_s=1)
            self.drop(next(iter(self._ended.values())))
        kept = KeptStream(origin, EventLog(self._limits.max_stream_bytes, self._count_bytes), self._on_change)
        self._kept[kept.id] = kept
        self._count_bytes(len(origin.body))
        if key is not None:
            self._keys[key] = kept.id
            self._keys_of[kept.id] = key
        return kept

    def drop(self, kept: KeptStream, failure: SluiceError | None = None) -> None:
        """Keep an answer no longer. One that is under way is cancelled, and its readers get the `failure`."""
        if self._kept.pop(kept.id, None) is None:
            return
        self._ended.pop(kept.id, None)
        if self.shared is not None:
            self.shared.release(kept.id)
        self.forget_key(kept)
        kept.stop_timer()
        kept.gone.set()
        kept.break_off(failure or SluiceError(ErrorCode.CANCELLED, f"stream {kept.id} was cancelled"))
        self._count_bytes(-kept.log.num_bytes - len(kept.origin.body))

    def forget_key(self, kept: KeptStream) -> None:
        """Let the next request with the key of this answer be answered anew."""
        key = self._keys_of.pop(kept.id, None)
        if key is not None:
            del self._keys[key]

    async def close(self) -> None:
        """Cancel what is under way."""
        tasks = [each.task for each in self._kept.values() if each.task is not None]
        for each in list(self._kept.values()):
            self.drop(each)
        if tasks:
            _, late = await asyncio.wait(tasks, timeout=_ENDING_S)
            for task in late:
                task.cancel()

    # --- bounds ---

    def _count_bytes(self, num_bytes: int) -> None:
        self.num_bytes += num_bytes

    def _on_change(self, kept: KeptStream) -> None:
        """Hold an answer to the bounds after a change of it."""
        if kept.id not in self._kept:
            return
        if kept.has_ended and kept.id not in self._ended:
            self._ended[kept.id] = kept
            if not kept.is_whole or self._is_too_large(kept):
                self.forget_key(kept)
            self._start_timer(kept)
        elif kept.num_readers:
            if not kept.has_ended:
                kept.stop_timer()
        elif kept.timer is None:
            self._start_timer(kept)
        if kept.has_ended and not kept.num_readers and self._is_too_large(kept):
            self.drop(kept)
        elif self.num_bytes > self._limits.max_bytes:
            self._make_room(kept)

    def _is_too_large(self, kept: KeptStream) -> bool:
        """Whether an answer is only for those who wait for it now."""
        return kept.log.num_bytes > self._limits.max_stream_bytes

    def _make_room(self, grown: KeptStream) -> None:
        while self.num_bytes > self._limits.max_bytes:
            oldest = next((each for each in self._ended.values() if each is not grown), None)
            if oldest is None:
                break
            self.drop(oldest)
        excess = self.num_bytes - self._limits.max_bytes
        if excess > 0 and grown.log.max_bytes is not None:
            grown.log.shrink(max(0, grown.log.num_bytes - excess))

    def _start_timer(self, kept: KeptStream) -> None:
        kept.stop_timer()
        kept.timer = asyncio.get_running_loop().call_later(kept.keep_s, self._expire, kept)

    def postpone(self, kept: KeptStream) -> None:
        """Begin the time of an answer anew: it has a reader elsewhere."""
        if kept.id in self._kept and kept.timer is not None:
            self._start_timer(kept)

    def _expire(self, kept: KeptStream) -> None:
        """End an answer whose time is over: one under way is cancelled, and one that has ended is dropped."""
        self.counts["expired", "ended" if kept.has_ended else "live"] += 1
        self.drop(kept)


def make_stream_id() -> str:
    """Return an id that nobody guesses."""
    return secrets.token_hex(_ID_BYTES)


COUNTERS = (
    ("resumption", "sluice_stream_resumptions", "Clients that came back to a stream: resumed, or missing."),
    ("replay", "sluice_idempotent_requests", "Requests whose key had come before: replayed, shared, or conflict."),
    ("takeover", "sluice_stream_takeovers", "Streams of a gateway that was gone: done, or impossible."),
    ("expired", "sluice_stream_expiries", "Streams whose time was over: live (cancelled), or ended (dropped)."),
    ("unshared", "sluice_stream_unshared", "Streams kept here alone, as begun without room or Redis, or as grown."),
)
"""Kinds of the store's counts, with the counters' names and what their outcomes are."""


class StreamCollector(Collector):
    """Turns the numbers of a store of streams into families at each scrape, on the event loop's thread."""

    def __init__(self, store: StreamStore) -> None:
        self._store = store

    def collect(self) -> Iterable[Metric]:
        kept = GaugeMetricFamily("sluice_kept_streams", "Streams and answers that are kept.", labels=("state",))
        for state, number in self._store.num_kept.items():
            kept.add_metric((state,), number)
        yield kept
        num_bytes = GaugeMetricFamily("sluice_kept_stream_bytes", "Bytes of kept streams and answers, in memory.")
        num_bytes.add_metric((), self._store.num_bytes)
        yield num_bytes
        shared = self._store.shared
        if shared is not None:
            up = GaugeMetricFamily("sluice_stream_store_up", "Whether streams are shared through Redis: 1 or 0.")
            up.add_metric((), float(not shared.problem))
            yield up
        for kind, name, text in COUNTERS:
            counter = CounterMetricFamily(name, text, labels=("outcome",))
            for (which, outcome), number in self._store.counts.items():
                if which == kind:
                    counter.add_metric((outcome,), number)
            yield counter
