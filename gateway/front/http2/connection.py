"""One connection of HTTP/2: frames in, streams, frames out (RFC 9113)."""

import asyncio
import logging
from collections.abc import Callable
from typing import Generic, Protocol, TypeVar, cast

from sluice.gateway.front.http2 import frames, limits
from sluice.gateway.front.http2.frames import (
    CONTINUATION,
    DATA,
    END_HEADERS,
    END_STREAM,
    HEADERS,
    MAX_FRAME_BYTES,
    MAX_WINDOW,
    ConnectionFault,
    Fields,
    H2ErrorCode,
    HeaderBlockReader,
    Setting,
    StreamFault,
)
from sluice.gateway.front.http2.pings import PingRules, Pings
from sluice.gateway.front.http2.reading import FrameReader
from sluice.gateway.front.http2.sending import Stream

log = logging.getLogger(__name__)
H = TypeVar("H")
_PREFACE_TIMEOUT_S = 20.0
_CLOSE_TIMEOUT_S = 20.0
"""Longest time that the last frames may take to leave."""
_FIRST_FRAMES = frames.settings(
    {
        Setting.MAX_CONCURRENT_STREAMS: limits.MAX_STREAMS,
        Setting.INITIAL_WINDOW_SIZE: limits.WINDOW_BYTES,
        Setting.MAX_HEADER_LIST_SIZE: limits.MAX_BLOCK_BYTES,
    }
) + frames.window_update(0, limits.CONNECTION_WINDOW_BYTES - frames.DEFAULT_WINDOW)


class Application(Protocol[H]):
    """The application that a server's connections hand requests to."""

    ping_rules: PingRules

    def read_fields(self, fields: Fields) -> H:
        """Make what `open` needs of a request's fields. Raises ValueError for malformed ones."""

    def open(self, connection: "Http2Connection[H]", stream_id: int, made: H, is_received: bool) -> Stream:
        """Begin a request, which is whole with `is_received`, and add it to the connection's streams."""

    def add(self, connection: "Http2Connection[H]") -> None: ...

    def discard(self, connection: "Http2Connection[H]") -> None: ...

    def answer_http1(self, request: bytes) -> bytes:
        """Return what a client of HTTP/1 gets before its connection is closed."""


class Http2Connection(FrameReader, Generic[H]):
    """Interprets the frames of one connection. Lives on the event loop's thread."""

    def __init__(self, application: Application[H], loop: asyncio.AbstractEventLoop) -> None:
        super().__init__(loop)
        self._application = application
        self._reader: HeaderBlockReader[H] = HeaderBlockReader(application.read_fields)
        self._close_timer: asyncio.TimerHandle | None = None
        self._num_unread = 0
        self._last_id = 0
        self._last_taken_id = MAX_WINDOW
        """The last stream that is served: less than that once GOAWAY has been sent."""
        self._block: tuple[int, int, bytearray] | None = None
        """A block that has not ended: stream, flags, bytes."""
        self._num_block_frames = 0
        self._idle_frames = limits.idle_frames()
        self._resets = limits.resets()
        self._takers: dict[int, Callable[[int, int, bytes], None]] = {
            frames.RST_STREAM: self._take_reset,
            frames.SETTINGS: self._take_settings,
            frames.PING: self._take_ping,
            frames.GOAWAY: self._take_goaway,
            frames.WINDOW_UPDATE: self._take_window_update,
            frames.PRIORITY: self._take_priority,
            frames.PUSH_PROMISE: self._refuse_push,
            CONTINUATION: self._take_continuation,
        }

    # --- the transport ---

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)  # uvloop's are none by name
        self.pings = Pings(self, self._application.ping_rules)
        self._preface_timer = self.loop.call_later(_PREFACE_TIMEOUT_S, self.close)
        self._application.add(self)

    def connection_lost(self, error: Exception | None) -> None:
        self.is_lost = True
        self._preface_timer.cancel()
        if self._close_timer is not None:
            self._close_timer.cancel()
        self.pings.close()
        streams, self.streams = self.streams, {}
        self.forget_unsent()
        for stream in streams.values():
            stream.close()
            stream.take_reset()
        self._application.discard(self)

    def begin(self) -> None:
        self._preface_timer.cancel()
        if not _has_agreed(self.transport):
            raise ConnectionFault(H2ErrorCode.INADEQUATE_SECURITY, "HTTP/2 over TLS needs the protocol h2 in ALPN")
        self.write(_FIRST_FRAMES)

    def refuse_preface(self, data: bytes) -> None:
        self.write(self._application.answer_http1(data))

    def close(self) -> None:
        self.flush()
        if self._close_timer is None:
            self._close_timer = self.loop.call_later(_CLOSE_TIMEOUT_S, self.transport.abort)
        self.transport.close()

    # --- frames ---

    def take_frame(self, kind: int, flags: int, stream_id: int, payload: bytes | memoryview) -> None:
        if self._block is not None and (kind != CONTINUATION or stream_id != self._block[0]):
            raise ConnectionFault(H2ErrorCode.PROTOCOL_ERROR, "a frame within a block of header fields")
        try:
            if kind == DATA:
                self._take_data(stream_id, flags, payload)
            elif kind == HEADERS:
                self._take_headers(stream_id, flags, cast(bytes, payload))
            elif kind in self._takers:
                self._takers[kind](stream_id, flags, cast(bytes, payload))
            else:
                self._idle_frames.take()
        except StreamFault as fault:
            self._fail_stream(fault)

    def _take_data(self, stream_id: int, flags: int, payload: bytes | memoryview) -> None:
        size = len(payload)
        self._num_unread += size
        if self._num_unread >= limits.CONNECTION_WINDOW_BYTES >> 1:
            # A stream's own window bounds what waits in it, so that one that nobody reads stops no other.
            self.send_window_update(0, self._num_unread)
            self._num_unread = 0
        stream = self.streams.get(stream_id)
        if stream is None or stream.is_received:
            self._refuse_late(stream_id, "DATA", is_idle=not size)
            return
        if size:
            stream.count_received(size)
        elif not flags & END_STREAM:
            self._idle_frames.take()
        if flags & frames.PADDED:
            payload = frames.strip_padding(payload)
            stream.return_padding(size - len(payload))
        if flags & END_STREAM:
            stream.is_received = True
        if payload:
            stream.take_data(payload)
        if flags & END_STREAM:
            stream.take_end()

    def _take_headers(self, stream_id: int, flags: int, payload: bytes) -> None:
        if flags & frames.PADDED:
            payload = frames.strip_padding(payload)
        if flags & frames.HAS_PRIORITY:
            if len(payload) < 5:
                raise ConnectionFault(H2ErrorCode.FRAME_SIZE_ERROR, "HEADERS too short for their priority")
            if frames.parse_long(payload[:4]) & MAX_WINDOW == stream_id:
                raise ConnectionFault(H2ErrorCode.PROTOCOL_ERROR, "a stream that depends on itself")
            payload = payload[5:]
        if flags & END_HEADERS:
            self._take_block(stream_id, flags, payload)
        else:
            self._block = stream_id, flags, bytearray(payload)
            self._num_block_frames = 0

    def _take_continuation(self, stream_id: int, flags: int, payload: bytes) -> None:
        if self._block is None:
            raise ConnectionFault(H2ErrorCode.PROTOCOL_ERROR, "CONTINUATION without a block of header fields")
        _, first_flags, block = self._block
        block += payload
        self._num_block_frames += 1
        if len(block) > limits.MAX_BLOCK_BYTES or self._num_block_frames > limits.MAX_BLOCK_FRAMES:
            text = f"header fields in more than {limits.MAX_BLOCK_BYTES} bytes or {limits.MAX_BLOCK_FRAMES} frames"
            raise ConnectionFault(H2ErrorCode.ENHANCE_YOUR_CALM, text)
        if flags & END_HEADERS:
            self._block = None
            self._take_block(stream_id, first_flags, bytes(block))

    def _take_block(self, stream_id: int, flags: int, block: bytes) -> None:
        if not stream_id & 1:
            raise ConnectionFault(H2ErrorCode.PROTOCOL_ERROR, f"a client's stream has an odd number, got {stream_id}")
        if stream_id <= self._last_id:
            self._take_trailers(stream_id, flags, block)
            return
        self._last_id = stream_id
        try:
            made = self._reader.read(block)
        except ValueError as error:
            raise StreamFault(stream_id, H2ErrorCode.PROTOCOL_ERROR, str(error)) from None
        if stream_id > self._last_taken_id or max(len(self.streams), self.num_running) >= limits.MAX_STREAMS:
            raise StreamFault(stream_id, H2ErrorCode.REFUSED_STREAM, "no more calls on this connection")
        is_received = bool(flags & END_STREAM)
        stream = self._application.open(self, stream_id, made, is_received)
        if is_received and not stream.is_ended:
            stream.take_end()

    def _take_trailers(self, stream_id: int, flags: int, block: bytes) -> None:
        """Take the fields behind a request's data, which gRPC's clients do not send and which mean nothing here."""
        fields = self._reader.read_others(block)
        stream = self.streams.get(stream_id)
        if stream is None or stream.is_received:
            self._refuse_late(stream_id, "HEADERS", is_idle=True)
        elif not flags & END_STREAM:
            raise StreamFault(stream_id, H2ErrorCode.PROTOCOL_ERROR, "header fields amid the data")
        elif any(name[:1] == b":" or name != name.lower() for name, _ in fields):
            raise StreamFault(stream_id, H2ErrorCode.PROTOCOL_ERROR, "trailers with pseudo-fields or upper case")
        else:
            stream.is_received = True
            stream.take_end()

    def _refuse_late(self, stream_id: int, what: str, *, is_idle: bool) -> None:
        """Answer a frame for a stream that takes none. What was on its way when this side ended it is no fault.

        It counts as a frame without content if `is_idle`: a refused request may have a window of data on its way.
        """
        self._check_begun(stream_id, what)
        if stream_id in self.streams:
            raise StreamFault(stream_id, H2ErrorCode.STREAM_CLOSED, f"{what} after the end of stream {stream_id}")
        if stream_id in self.reset_ids:
            if is_idle:
                self._idle_frames.take()
            return
        raise ConnectionFault(H2ErrorCode.STREAM_CLOSED, f"{what} on stream {stream_id}, which is closed")

    def _check_begun(self, stream_id: int, what: str) -> None:
        if not stream_id & 1 or stream_id > self._last_id:
            raise ConnectionFault(H2ErrorCode.PROTOCOL_ERROR, f"{what} on stream {stream_id}, which has not begun")

    def _take_reset(self, stream_id: int, flags: int, payload: bytes) -> None:
        if len(payload) != 4:
            raise ConnectionFault(H2ErrorCode.FRAME_SIZE_ERROR, f"RST_STREAM of {len(payload)} bytes, expected 4")
        self._check_begun(stream_id, "RST_STREAM")
        self._resets.take()
        stream = self.streams.get(stream_id)
        if stream is not None:
            stream.close()
            stream.take_reset()

    def _take_settings(self, stream_id: int, flags: int, payload: bytes) -> None:
        if stream_id:
            raise ConnectionFault(H2ErrorCode.PROTOCOL_ERROR, "SETTINGS on a stream")
        if flags & frames.ACK:
            if payload:
                raise ConnectionFault(H2ErrorCode.FRAME_SIZE_ERROR, "an acknowledgement of SETTINGS with a payload")
            return
        self._idle_frames.take()
        window = self.initial_window
        for key, value in frames.parse_settings(payload):
            if key == Setting.INITIAL_WINDOW_SIZE:
                if value > MAX_WINDOW:
                    raise ConnectionFault(H2ErrorCode.FLOW_CONTROL_ERROR, f"INITIAL_WINDOW_SIZE of {value}")
                window = value
            else:
                self._apply(key, value)
        if window != self.initial_window:  # once: a frame has room for thousands of values
            self._move_windows(window)
        self._answer(frames.SETTINGS_ACK)
        self.send_blocked()

    def _move_windows(self, initial_window: int) -> None:
        change = initial_window - self.initial_window
        self.initial_window = initial_window
        for stream in self.streams.values():
            stream.send_window += change
            if stream.send_window > MAX_WINDOW:
                raise ConnectionFault(H2ErrorCode.FLOW_CONTROL_ERROR, "a window of more than 2^31-1 bytes")
            if stream.unsent:
                self.add_blocked(stream)

    def _apply(self, key: int, value: int) -> None:
        if key == Setting.MAX_FRAME_SIZE:
            if not MAX_FRAME_BYTES <= value < 1 << 24:
                raise ConnectionFault(H2ErrorCode.PROTOCOL_ERROR, f"MAX_FRAME_SIZE of {value}")
            self.max_send_frame = value
        elif key == Setting.ENABLE_PUSH:
            if value > 1:
                raise ConnectionFault(H2ErrorCode.PROTOCOL_ERROR, f"ENABLE_PUSH of {value}, expected 0 or 1")
        elif key == Setting.HEADER_TABLE_SIZE and value < 4096:
            self.must_empty_table = True

    def _take_ping(self, stream_id: int, flags: int, payload: bytes) -> None:
        if stream_id:
            raise ConnectionFault(H2ErrorCode.PROTOCOL_ERROR, "PING on a stream")
        if len(payload) != 8:
            raise ConnectionFault(H2ErrorCode.FRAME_SIZE_ERROR, f"PING of {len(payload)} bytes, expected 8")
        if flags & frames.ACK:
            self.pings.take_answer(payload)
        else:
            self.pings.count()
            self._answer(frames.ping(payload, is_ack=True))

    def _answer(self, frame: bytes) -> None:
        """Write an answer that the client could ask for without end. Raises ConnectionFault where it reads none."""
        if self.is_write_paused:
            self.num_answers += 1
            if self.num_answers > limits.MAX_UNSENT_ANSWERS:
                raise ConnectionFault(H2ErrorCode.ENHANCE_YOUR_CALM, "answers that the client does not read")
        self.write(frame)

    def _take_goaway(self, stream_id: int, flags: int, payload: bytes) -> None:
        if stream_id:
            raise ConnectionFault(H2ErrorCode.PROTOCOL_ERROR, "GOAWAY on a stream")
        if len(payload) < 8:
            raise ConnectionFault(H2ErrorCode.FRAME_SIZE_ERROR, f"GOAWAY of {len(payload)} bytes, expected 8 or more")
        self._idle_frames.take()  # the client sends no more calls, and gets its answers

    def _take_window_update(self, stream_id: int, flags: int, payload: bytes) -> None:
        if len(payload) != 4:
            raise ConnectionFault(H2ErrorCode.FRAME_SIZE_ERROR, f"WINDOW_UPDATE of {len(payload)} bytes, expected 4")
        increment = frames.parse_long(payload) & MAX_WINDOW
        if stream_id == 0:
            if increment == 0:
                raise ConnectionFault(H2ErrorCode.PROTOCOL_ERROR, "WINDOW_UPDATE of nothing")
            self.send_window += increment
            if self.send_window > MAX_WINDOW:
                raise ConnectionFault(H2ErrorCode.FLOW_CONTROL_ERROR, "a window of more than 2^31-1 bytes")
        else:
            self._check_begun(stream_id, "WINDOW_UPDATE")
            stream = self.streams.get(stream_id)
            if stream is None:
                return
            if increment == 0:
                raise StreamFault(stream_id, H2ErrorCode.PROTOCOL_ERROR, "WINDOW_UPDATE of nothing")
            stream.send_window += increment
            if stream.send_window > MAX_WINDOW:
                raise StreamFault(stream_id, H2ErrorCode.FLOW_CONTROL_ERROR, "a window of more than 2^31-1 bytes")
            if stream.unsent:
                self.add_blocked(stream)
        self.send_blocked()

    def _take_priority(self, stream_id: int, flags: int, payload: bytes) -> None:
        if stream_id == 0:
            raise ConnectionFault(H2ErrorCode.PROTOCOL_ERROR, "PRIORITY without a stream")
        self._idle_frames.take()
        if len(payload) != 5:
            text = f"PRIORITY of {len(payload)} bytes, expected 5"
            if stream_id > self._last_id:  # what has not begun cannot be reset
                raise ConnectionFault(H2ErrorCode.FRAME_SIZE_ERROR, text)
            raise StreamFault(stream_id, H2ErrorCode.FRAME_SIZE_ERROR, text)
        if stream_id <= self._last_id and frames.parse_long(payload[:4]) & MAX_WINDOW == stream_id:
            raise StreamFault(stream_id, H2ErrorCode.PROTOCOL_ERROR, "a stream that depends on itself")

    def _refuse_push(self, stream_id: int, flags: int, payload: bytes) -> None:
        raise ConnectionFault(H2ErrorCode.PROTOCOL_ERROR, "a client pushes nothing")

    # --- the end ---

    def remove(self, stream: Stream) -> None:
        super().remove(stream)
        self.close_if_done()

    def close_if_done(self) -> None:
        """Close when no more calls are taken and none is left."""
        if self._last_taken_id < MAX_WINDOW and not self.streams and not self.is_lost:
            self.close()

    def refuse_more(self) -> None:
        if self._last_taken_id == MAX_WINDOW and not self.is_lost:
            self._last_taken_id = self._last_id
            self.write(frames.goaway(self._last_id, H2ErrorCode.NO_ERROR))
            self.close_if_done()

    def announce_end(self) -> None:
        if not self.is_lost:
            self.write(frames.goaway(MAX_WINDOW, H2ErrorCode.NO_ERROR))

    def fail(self, fault: ConnectionFault) -> None:
        log.debug("a connection of gRPC ends: %s (%s)", fault, fault.code.name)
        if fault.code is not H2ErrorCode.HTTP_1_1_REQUIRED:
            self.write(frames.goaway(self._last_id, fault.code, str(fault)))
        self.stop_reading()
        self.close()

    def _fail_stream(self, fault: StreamFault) -> None:
        self._idle_frames.take()
        stream = self.streams.get(fault.stream_id)
        if stream is None:
            self.send_reset(fault.stream_id, fault.code)
        else:
            stream.reset(fault.code)
            stream.take_reset()


def _has_agreed(transport: asyncio.Transport) -> bool:
    """Whether both sides have agreed on HTTP/2, as TLS demands it (RFC 9113, section 3.2)."""
    tls = transport.get_extra_info("ssl_object")
    return tls is None or tls.selected_alpn_protocol() == "h2"
