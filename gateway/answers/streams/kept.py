"""One kept answer: what is published of it, in order, and who reads it."""

import asyncio
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import aclosing, contextmanager
from typing import Protocol

import msgspec

from sluice.engine.types import TokenEvent
from sluice.errors import ErrorCode, SluiceError
from sluice.state.log import EventLog

HeaderPairs = list[tuple[bytes, bytes]]
_EVENTS = b"text/event-stream"


class Head(msgspec.Struct, frozen=True, array_like=True, tag=0):
    """The status and the headers of an answer."""

    status: int
    headers: HeaderPairs

    @property
    def is_event_stream(self) -> bool:
        """Whether the body consists of server-sent events."""
        return any(name == b"content-type" and value.startswith(_EVENTS) for name, value in self.headers)


class Pieces(msgspec.Struct, frozen=True, array_like=True, tag=1):
    """More of its body: whole events of a stream."""

    pieces: list[bytes]


class Tokens(msgspec.Struct, frozen=True, array_like=True, tag=2):
    """Tokens of its sequence number `sequence`, before the pieces that are made of them."""

    sequence: int
    event: TokenEvent


class End(msgspec.Struct, frozen=True, array_like=True, tag=3):
    """The end. Without `is_whole` the answer is not to be given again: it failed, or was cancelled."""

    is_whole: bool


class TakenOver(msgspec.Struct, frozen=True, array_like=True, tag=4):
    """Another gateway goes on from here."""


Item = Head | Pieces | Tokens | End | TakenOver


class Origin(msgspec.Struct, frozen=True, array_like=True):
    """The request of an answer, enough to answer it again. `path` is the request's, `body` its bytes.

    A stream that `is_resumable` has an id in each of its events. `began_at` is in seconds since 1970.
    """

    stream_id: str
    owner: str
    request_id: str
    path: str
    query: bytes
    headers: HeaderPairs
    body: bytes
    is_resumable: bool
    keep_s: float
    began_at: float
    fingerprint: str = ""
    """A digest that all requests with one idempotency key must have alike; "" without a key."""
    model: str = ""


class StreamMovedError(SluiceError):
    """A stream goes on at another gateway. A connection to it is broken off, so that its client comes back."""

    def __init__(self, stream_id: str) -> None:
        message = f"stream {stream_id} goes on at another gateway: come back to it"
        super().__init__(ErrorCode.UNAVAILABLE, message, retry_after_s=1)


class Publisher(Protocol):
    """Where the items of an answer go before its readers may see them."""

    def put(self, kept: "KeptStream", item: Item) -> None:
        """Have `kept.apply` called with the item, in the order in which they are put."""
        ...


class KeptStream:
    """An answer that is kept: the sum of its items. Belongs to the event loop.

    Items that this server makes go through `publish`, and count from `apply` on.
    """

    def __init__(self, origin: Origin, log: EventLog, on_change: Callable[["KeptStream"], None]) -> None:
        """`on_change` is called after each item, and when the number of readers becomes 0 or ceases to be."""
        self.origin = origin
        self.log = log
        self.head: Head | None = None
        self.is_whole = False
        """Whether it has ended well, so that it may be given again."""
        self.failure: SluiceError | None = None
        """The error that its readers get at its end, where its pieces do not have it."""
        self.keep_s = origin.keep_s
        """How long it goes on without a reader, and is kept after its end."""
        self.num_readers = 0
        self.num_takeovers = 0
        """How many gateways have taken it over, the next of its pieces are those of the last one."""
        self.task: asyncio.Task[None] | None = None
        """The task that generates it, where that is done here."""
        self.gone = asyncio.Event()
        """Set when nobody wants it any more: its client, as its request sees it, has disconnected."""
        self.publisher: Publisher | None = None
        """None: what is published counts at once, and is nowhere else."""
        self.timer: asyncio.TimerHandle | None = None
        """Ends it: for want of readers, or when its time is over."""
        self._on_change = on_change

    @property
    def id(self) -> str:
        return self.origin.stream_id

    @property
    def event_prefix(self) -> str:
        """The part of its next event's id before the number. It names the takeover, because a lost gateway may have
        sent another event with that number."""
        return f"{self.id}.{self.num_takeovers}" if self.num_takeovers else self.id

    @property
    def has_ended(self) -> bool:
        return self.log.has_ended

    def take_over(self) -> None:
        """Go on with it in place of its gateway."""
        self.num_takeovers = len(self.log.takeovers) + 1
        self.publish(TakenOver())

    def publish(self, item: Item) -> None:
        """Add the next item, once the publisher has it."""
        if self.publisher is None:
            self.apply(item)
        else:
            self.publisher.put(self, item)

    def apply(self, item: Item) -> None:
        """Add an item for the readers here."""
        if self.has_ended:
            return
        if isinstance(item, Pieces):
            self.log.append(item.pieces)
        elif isinstance(item, Head):
            self.head = item
            if not item.is_event_stream:
                self.log.max_bytes = None  # nobody can use a part of it
            self.log.append(())
        elif isinstance(item, TakenOver):
            self.log.note_takeover()
        elif isinstance(item, End):
            self.is_whole = item.is_whole
            self.log.end()
        self._on_change(self)

    def break_off(self, failure: SluiceError) -> None:
        """End it for the readers here, whatever is still to be published. Nothing happens to one that has ended."""
        if not self.has_ended:
            self.failure = failure
            self.apply(End(False))

    async def wait_head(self) -> Head | None:
        """Return the head of the answer when it has come; None where the answer ended without."""
        while self.head is None and not self.has_ended:
            await self.log.changed()
        return self.head

    async def follow(self, start: int) -> AsyncGenerator[bytes, None]:
        """Yield its pieces as `EventLog.follow`, as a reader. Raises its failure at its end, where it has one."""
        with self.reading():
            async with aclosing(self.log.follow(start)) as pieces:
                async for piece in pieces:
                    yield piece
        if self.failure is not None:
            raise self.failure

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Count a reader."""
        self.num_readers += 1
        if self.num_readers == 1:
            self._on_change(self)
        try:
            yield
        finally:
            self.num_readers -= 1
            if self.num_readers == 0:
                self._on_change(self)

    def stop_timer(self) -> None:
        if self.timer is not None:
            self.timer.cancel()
            self.timer = None
