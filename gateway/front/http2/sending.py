"""The sending half of an HTTP/2 connection, and its streams: frames are batched, and stay within the client's
flow-control windows."""

import asyncio
from abc import ABC, abstractmethod
from asyncio import Future
from collections import OrderedDict, deque

from sluice.gateway.front.http2 import frames
from sluice.gateway.front.http2.frames import (
    DATA,
    EMPTY_TABLE,
    END_HEADERS,
    END_STREAM,
    HEADERS,
    MAX_FRAME_BYTES,
    MAX_WINDOW,
    H2ErrorCode,
    StreamFault,
    head,
)
from sluice.gateway.front.http2.limits import WINDOW_BYTES

_JOINED_BYTES = 64 << 10
"""Most bytes that are copied into one piece before they are written."""
_LONG_WRITE = 512 << 10
_MAX_REMEMBERED = 4096
"""Streams that this side has reset, whose frames may still be on their way."""
_MAX_UNSENT = 256 << 10
"""Bytes that may wait for the client's window before a writer waits."""
assert frames.DEFAULT_WINDOW < WINDOW_BYTES


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

    def __init__(self, connection: "Http2FrameWriter", stream_id: int) -> None:
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
            raise StreamFault(self.id, H2ErrorCode.FLOW_CONTROL_ERROR, "more data than the window allows")

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

    def reset(self, code: H2ErrorCode) -> None:
        """End it from this side, in either direction. Idempotent."""
        if not self.is_ended:
            self.connection.send_reset(self.id, code)
            self.close()

    def _end(self) -> None:
        if not self.is_received:
            self.connection.send_reset(self.id, H2ErrorCode.NO_ERROR)  # it need not send the rest
        self.close()

    def close(self) -> None:
        """Forget what is unsent. Called when nothing more can be sent."""
        self.is_ended = True
        self.unsent = None
        self._num_unsent = 0
        if self._room is not None and not self._room.done():
            self._room.set_result(None)
        self.connection.remove(self)


class Http2FrameWriter:
    """The sending half of a connection, as its streams see it. Lives on the event loop's thread."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self.transport: asyncio.Transport
        self.initial_window = frames.DEFAULT_WINDOW
        """Bytes of a new stream that the client takes."""
        self.num_running = 0
        """Calls whose work has not ended. The client may have left them; they count as long as they run."""
        self.streams: dict[int, Stream] = {}
        self.is_lost = False
        self.has_sent = False
        """Set whenever header fields or data are sent; whoever asks for it takes it back."""
        self.send_window = frames.DEFAULT_WINDOW
        """Bytes that the client takes now on all streams together."""
        self.max_send_frame = MAX_FRAME_BYTES
        self.must_empty_table = False
        """Whether the client has to be told that no table of header fields is used."""
        self.is_write_paused = False
        self.reset_ids: dict[int, None] = {}
        """Streams that this side has reset, whose frames may still be on their way."""
        self._out: list[bytes | memoryview] = []
        self._num_out = 0
        self._is_flushing = False
        self.num_answers = 0
        """Answers that have been written since the client last read."""
        self._ready: OrderedDict[int, Stream] = OrderedDict()
        """Streams with unsent data for which they have windows, in the order of their turns."""

    def can_send(self, size: int) -> bool:
        """Whether data of `size` bytes fit into one frame, and into what the client takes now on all streams."""
        return size <= self.max_send_frame and size <= self.send_window and not self.is_write_paused

    def send_headers(self, stream_id: int, block: bytes, *, is_last: bool) -> None:
        """Send the block that begins or ends a response."""
        if self.must_empty_table:
            self.must_empty_table = False
            block = EMPTY_TABLE + block
        self.has_sent = True
        if len(block) > MAX_FRAME_BYTES:
            self.write(frames.long_headers(stream_id, block, is_last=is_last))
            return
        flags = END_HEADERS | END_STREAM if is_last else END_HEADERS
        self.write(head(len(block), HEADERS, flags, stream_id) + block)

    def send_data(self, stream_id: int, data: bytes | memoryview) -> None:
        """Send a frame of data; the caller has asked `can_send` and counted the stream's window."""
        size = len(data)
        self.send_window -= size
        self.has_sent = True
        self._out.append(head(size, DATA, 0, stream_id))
        self.write(data)

    def send_whole(self, stream_id: int, first: bytes, data: bytes, last: bytes) -> None:
        """Send a stream's only frame of data between its header fields; the caller has asked `can_send`."""
        if self.must_empty_table:
            self.must_empty_table = False
            first = EMPTY_TABLE + first
        size = len(data)
        self.send_window -= size
        self.has_sent = True
        parts = (
            head(len(first), HEADERS, END_HEADERS, stream_id),
            first,
            head(size, DATA, 0, stream_id),
            data,
            head(len(last), HEADERS, END_HEADERS | END_STREAM, stream_id),
            last,
        )
        self.write(b"".join(parts))

    def send_window_update(self, stream_id: int, increment: int) -> None:
        """Let the client send more."""
        self.write(frames.window_update(stream_id, increment))

    def send_reset(self, stream_id: int, code: H2ErrorCode) -> None:
        """End a stream in both directions."""
        self.reset_ids[stream_id] = None
        if len(self.reset_ids) > _MAX_REMEMBERED:
            del self.reset_ids[next(iter(self.reset_ids))]
        self.write(frames.reset(stream_id, code))

    def send_ping(self, payload: bytes) -> None:
        self.write(frames.ping(payload, is_ack=False))

    def add_blocked(self, stream: Stream) -> None:
        """Remember a stream that has unsent data, and may have a window for them."""
        self._ready[stream.id] = stream

    def send_blocked(self) -> None:
        """Send what waits for windows, a frame of each stream in turn."""
        ready = self._ready
        while ready and self.send_window > 0 and not self.is_write_paused:
            stream = next(iter(ready.values()))
            most = min(stream.send_window, self.send_window, self.max_send_frame)
            if most <= 0:
                del ready[stream.id]  # until its window grows
                continue
            self.send_data(stream.id, stream.take_unsent(most))
            if not stream.unsent:
                del ready[stream.id]
                stream.finish_unsent()
            elif self.send_window > 0:
                ready.move_to_end(stream.id)  # else its turn has been cut short, and goes on
            if self._num_out >= _LONG_WRITE:
                self.flush()  # the transport may pause now

    def write(self, frame: bytes | memoryview) -> None:
        """Add a frame to those that leave together, at the end of the loop's turn at the latest."""
        self._out.append(frame)
        self._num_out += len(frame)
        if not self._is_flushing:
            self._is_flushing = True
            self.loop.call_soon(self.flush)

    def flush(self) -> None:
        """Give the transport what is written."""
        self._is_flushing = False
        out = self._out
        if not out or self.is_lost:
            return
        self._out = []
        if self._num_out < _JOINED_BYTES:
            self.transport.write(b"".join(out))
        else:
            self.transport.writelines(out)
        self._num_out = 0

    def remove(self, stream: Stream) -> None:
        """Forget a stream that has ended."""
        self.streams.pop(stream.id, None)
        if self._ready:
            self._ready.pop(stream.id, None)

    def forget_unsent(self) -> None:
        """The connection is lost: nothing can be sent any more."""
        self._out.clear()
        self._ready.clear()
