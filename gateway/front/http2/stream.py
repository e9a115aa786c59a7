"""One request and its response: what may be sent and what has come. What is done with it is a subclass's affair."""

from abc import ABC, abstractmethod
from asyncio import AbstractEventLoop, Future
from collections import deque
from typing import Protocol

from sluice.gateway.front.http2.frames import DEFAULT_WINDOW, MAX_WINDOW, ErrorCode, StreamFault
from sluice.gateway.front.http2.limits import WINDOW_BYTES

_MAX_UNSENT = 256 << 10
"""Bytes that may wait for the client's window before a writer waits."""


class Carrier(Protocol):
    """The connection, as its streams see it."""

    initial_window: int
    """Bytes of a new stream that the client takes."""
    num_running: int
    """Calls whose work has not ended. The client may have left them; they count as long as they run."""

    @property
    def loop(self) -> AbstractEventLoop: ...

    def can_send(self, size: int) -> bool:
        """Whether data of `size` bytes fit into one frame, and into what the connection's client takes now."""

    def send_headers(self, stream_id: int, block: bytes, *, is_last: bool) -> None:
        """Send the block that begins or ends a response."""

    def send_data(self, stream_id: int, data: bytes | memoryview) -> None:
        """Send a frame of data; the caller has asked `can_send` and counted the stream's window."""

    def send_whole(self, stream_id: int, first: bytes, data: bytes, last: bytes) -> None:
        """Send a stream's only frame of data between its header fields; the caller has asked `can_send`."""

    def send_window_update(self, stream_id: int, increment: int) -> None:
        """Let the client send more."""

    def send_reset(self, stream_id: int, code: ErrorCode) -> None:
        """End a stream in both directions."""

    def add_blocked(self, stream: "Stream") -> None:
        """Remember a stream that has unsent data, and may have a window for them."""

    def send_blocked(self) -> None:
        """Send what waits for windows, a frame of each stream in turn."""

    def remove(self, stream: "Stream") -> None:
        """Forget a stream that has ended."""


class Stream(ABC):
    """A stream of `connection`. Lives on the event loop's thread."""

    __slots__ = (
        "_allowed",
        "_num_padding",
        "_num_unsent",
        "_room",
        "connection",
        "id",
        "is_ended",
        "is_received",
        "send_window",
        "trailers",
        "unsent",
    )

    def __init__(self, connection: Carrier, stream_id: int) -> None:
        self.connection = connection
        self.id = stream_id
        self.send_window = connection.initial_window
        """Bytes that the client takes now."""
        self.is_received = False
        """Whether the client has sent all that it will."""
        self.is_ended = False
        """Whether nothing more will be sent: all is out, or either side has reset it."""
        self.unsent: deque[bytes | memoryview] | None = None
        """Data for which there is no window."""
        self.trailers: bytes | None = None
        """The block that follows the data."""
        self._num_unsent = 0
        self._room: Future[None] | None = None
        self._allowed = WINDOW_BYTES
        """Bytes that the client may still send."""
        self._num_padding = 0
        """Bytes of padding that have used its window."""

    @abstractmethod
    def take_data(self, payload: bytes | memoryview) -> None:
        """Take what has come. Raises StreamFault."""

    @abstractmethod
    def take_end(self) -> None:
        """The client has sent everything."""

    @abstractmethod
    def take_reset(self) -> None:
        """The client, or the connection's end, has ended it: nothing can be sent any more. Called at most once."""

    # --- what comes ---

    def count_received(self, num_bytes: int) -> None:
        """Take `num_bytes` from what the client may send. Raises StreamFault for more than that."""
        self._allowed -= num_bytes
        if self._allowed < 0:
            raise StreamFault(self.id, ErrorCode.FLOW_CONTROL_ERROR, "more data than the window allows")

    def return_padding(self, num_bytes: int) -> None:
        """Let the client send as much again as was padding, which nobody will read, once that is much."""
        self._num_padding += num_bytes
        if self._num_padding >= WINDOW_BYTES >> 1 and not self.is_received:
            more, self._num_padding = min(self._num_padding, MAX_WINDOW - self._allowed), 0
            self._allowed += more
            self.connection.send_window_update(self.id, more)

    def allow(self, num_bytes: int) -> None:
        """Let the client send at least so many bytes more, where less than half of them are allowed now."""
        if self._allowed >= num_bytes >> 1 or self.is_received:
            return
        more = min(num_bytes, MAX_WINDOW) - self._allowed
        self._allowed += more
        self.connection.send_window_update(self.id, more)

    # --- what is sent ---

    def send_headers(self, block: bytes) -> None:
        """Send the block that begins the response. The caller has not ended it."""
        self.connection.send_headers(self.id, block, is_last=False)

    def send_whole(self, first: bytes, data: bytes, last: bytes) -> None:
        """Send a whole response: the block that begins it, data, and the block that ends it."""
        connection, size = self.connection, len(data)
        if size <= self.send_window and connection.can_send(size):
            connection.send_whole(self.id, first, data, last)
            self._end()
            return
        self.send_headers(first)
        self.send_data(data)
        self.send_trailers(last)

    def send_data(self, data: bytes | memoryview) -> None:
        """Send, or keep until the client takes it; `wait_for_room` says when to send more."""
        connection, size = self.connection, len(data)
        if self.unsent is None and size <= self.send_window and connection.can_send(size):
            self.send_window -= size
            connection.send_data(self.id, data)
            return
        if self.unsent is None:
            self.unsent = deque()
            connection.add_blocked(self)
        self.unsent.append(data)
        self._num_unsent += size
        connection.send_blocked()

    def send_trailers(self, block: bytes) -> None:
        """End the response with `block` behind all data."""
        if self.unsent is None:
            self.connection.send_headers(self.id, block, is_last=True)
            self._end()
        else:
            self.trailers = block

    def take_unsent(self, most: int) -> bytes | memoryview:
        """Return at most so many bytes of what waits; the caller has made sure that there are some."""
        assert self.unsent is not None
        first = self.unsent[0]
        size = min(most, len(first))
        if size == len(first):
            self.unsent.popleft()
        else:
            view = memoryview(first)
            first, self.unsent[0] = view[:size], view[size:]
        self.send_window -= size
        self._num_unsent -= size
        if self._room is not None and self._num_unsent < _MAX_UNSENT and not self._room.done():
            self._room.set_result(None)
        return first

    def finish_unsent(self) -> None:
        """All that waited is sent."""
        self.unsent = None
        if self.trailers is not None:
            self.connection.send_headers(self.id, self.trailers, is_last=True)
            self._end()

    async def wait_for_room(self) -> None:
        """Wait while much is unsent. Returns at once when the stream has ended: what is sent then goes nowhere."""
        while self._num_unsent >= _MAX_UNSENT and not self.is_ended:
            self._room = self.connection.loop.create_future()
            await self._room

    @property
    def has_much_unsent(self) -> bool:
        return self._num_unsent >= _MAX_UNSENT

    def reset(self, code: ErrorCode) -> None:
        """End it from this side, in either direction. Idempotent."""
        if not self.is_ended:
            self.connection.send_reset(self.id, code)
            self.close()

    def _end(self) -> None:
        if not self.is_received:
            self.connection.send_reset(self.id, ErrorCode.NO_ERROR)  # it need not send the rest
        self.close()

    def close(self) -> None:
        """Forget what is unsent. Called when nothing more can be sent."""
        self.is_ended = True
        self.unsent = None
        self._num_unsent = 0
        if self._room is not None and not self._room.done():
            self._room.set_result(None)
        self.connection.remove(self)


assert DEFAULT_WINDOW < WINDOW_BYTES
