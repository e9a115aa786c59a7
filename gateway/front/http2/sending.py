"""The sending half of an HTTP/2 connection: frames are batched, and stay within the client's flow-control windows."""

import asyncio
from collections import OrderedDict

from sluice.gateway.front.http2 import frames
from sluice.gateway.front.http2.frames import (
    DATA,
    END_HEADERS,
    END_STREAM,
    HEADERS,
    MAX_FRAME_BYTES,
    ErrorCode,
    head,
)
from sluice.gateway.front.http2.header_blocks import EMPTY_TABLE
from sluice.gateway.front.http2.stream import Stream

_JOINED_BYTES = 64 << 10
"""Most bytes that are copied into one piece before they are written."""
_LONG_WRITE = 512 << 10
_MAX_REMEMBERED = 4096
"""Streams that this side has reset, whose frames may still be on their way."""


class FrameWriter:
    """A `Carrier` of streams: the sending half of a connection. Lives on the event loop's thread."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self.transport: asyncio.Transport
        self.initial_window = frames.DEFAULT_WINDOW
        self.num_running = 0
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

    # --- as `Carrier` describes it ---

    def can_send(self, size: int) -> bool:
        return size <= self.max_send_frame and size <= self.send_window and not self.is_write_paused

    def send_headers(self, stream_id: int, block: bytes, *, is_last: bool) -> None:
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
        size = len(data)
        self.send_window -= size
        self.has_sent = True
        self._out.append(head(size, DATA, 0, stream_id))
        self.write(data)

    def send_whole(self, stream_id: int, first: bytes, data: bytes, last: bytes) -> None:
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
        self.write(frames.window_update(stream_id, increment))

    def send_reset(self, stream_id: int, code: ErrorCode) -> None:
        self.reset_ids[stream_id] = None
        if len(self.reset_ids) > _MAX_REMEMBERED:
            del self.reset_ids[next(iter(self.reset_ids))]
        self.write(frames.reset(stream_id, code))

    def send_ping(self, payload: bytes) -> None:
        self.write(frames.ping(payload, is_ack=False))

    def add_blocked(self, stream: Stream) -> None:
        self._ready[stream.id] = stream

    def send_blocked(self) -> None:
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
        self.streams.pop(stream.id, None)
        if self._ready:
            self._ready.pop(stream.id, None)

    def forget_unsent(self) -> None:
        """The connection is lost: nothing can be sent any more."""
        self._out.clear()
        self._ready.clear()
