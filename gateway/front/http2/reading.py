"""Bytes into frames: the receiving half of a connection of HTTP/2, which gives way to others on a long read."""

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable
from time import monotonic

from sluice.gateway.front.http2 import frames
from sluice.gateway.front.http2.frames import (
    HEAD,
    HEAD_BYTES,
    MAX_FRAME_BYTES,
    MAX_WINDOW,
    PREFACE,
    ConnectionFault,
    H2ErrorCode,
)
from sluice.gateway.front.http2.sending import Http2FrameWriter

_TURN_S = 0.005
_FRAMES_BETWEEN_LOOKS = 4
"""The loop goes to others when reading frames has taken so long; the clock is asked each so many frames."""
_VIEWED_BYTES = 4096
"""Length from which data are not copied out of what was read."""
_MAX_UNREAD_ANSWERS = 1 << 20
"""Bytes that may wait for a client that reads nothing. With more, nothing is read from it."""


class FrameReader(Http2FrameWriter, asyncio.Protocol, ABC):
    """Hands each whole frame on. Lives on the event loop's thread."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__(loop)
        self.has_read = False
        """Set whenever anything comes; whoever asks for it takes it back."""
        self._rest = b""
        self._parse: Callable[[bytes, int], int] = self._parse_preface
        self._is_resting = False
        self._is_stalled = False
        """Whether reading rests until the client reads."""

    @abstractmethod
    def begin(self) -> None:
        """The client has sent its preface. Raises ConnectionFault."""

    @abstractmethod
    def refuse_preface(self, data: bytes) -> None:
        """Answer what is no HTTP/2."""

    @abstractmethod
    def take_frame(self, kind: int, flags: int, stream_id: int, payload: bytes | memoryview) -> None:
        """Take a frame; long data are a view. Raises ConnectionFault."""

    @abstractmethod
    def fail(self, fault: ConnectionFault) -> None:
        """End the connection with the reason."""

    @abstractmethod
    def announce_end(self) -> None:
        """Tell the client that `refuse_more` comes soon, so that it sends no more calls."""

    @abstractmethod
    def refuse_more(self) -> None:
        """Tell the client to send its next calls elsewhere; those on their way are refused, and may be repeated."""

    @abstractmethod
    def close(self) -> None:
        """Send what is written, and close. Idempotent."""

    def data_received(self, data: bytes) -> None:
        self.has_read = True
        rest, begin = self._rest, 0
        if rest:
            begin = _missing_bytes(rest)
            if 0 < begin < len(data) and not self._is_resting:
                self._rest = b""
                self._read(rest + data[:begin])  # so that the whole of `data` is not copied
            else:
                data, begin = rest + data, 0
                self._rest = b""
        if self._is_resting:
            self._rest = data
        else:
            self._read(data, begin)

    def pause_writing(self) -> None:
        self.is_write_paused = True

    def resume_writing(self) -> None:
        self.is_write_paused = False
        self.num_answers = 0
        self.send_blocked()
        if self._is_stalled:
            self._is_stalled = False
            self.loop.call_soon(self._go_on)

    def stop_reading(self) -> None:
        """Discard what comes until the connection is closed."""
        self._parse = lambda data, at: len(data) - at

    def _read(self, data: bytes, at: int = 0) -> None:
        """Take the whole frames of `data` from `at` on, for a while, and keep the rest."""
        began = monotonic()
        try:
            while True:
                for _ in range(_FRAMES_BETWEEN_LOOKS):
                    used = self._parse(data, at)
                    if not used:
                        break
                    at += used
                if not used:
                    break
                if monotonic() - began > _TURN_S and at < len(data):
                    self._rest_a_turn()
                    break
        except ConnectionFault as fault:
            self.fail(fault)
            return
        if at < len(data):
            self._rest = data[at:]
        self.flush()
        if self.is_write_paused and self.transport.get_write_buffer_size() > _MAX_UNREAD_ANSWERS:
            self._is_resting = self._is_stalled = True
            self.transport.pause_reading()

    def _rest_a_turn(self) -> None:
        self._is_resting = True
        self.transport.pause_reading()
        self.loop.call_soon(self._go_on)

    def _go_on(self) -> None:
        if self._is_stalled or not self._is_resting or self.transport.is_closing():
            return
        self._is_resting = False
        self.transport.resume_reading()
        data, self._rest = self._rest, b""
        self._read(data)

    def _parse_preface(self, data: bytes, at: int) -> int:
        known = data[: len(PREFACE)]
        if not PREFACE.startswith(known):
            self.refuse_preface(data)
            raise ConnectionFault(H2ErrorCode.HTTP_1_1_REQUIRED, "the client speaks no HTTP/2")
        if len(data) < len(PREFACE):
            return 0
        self.begin()
        self._parse = self._parse_first
        return len(PREFACE)

    def _parse_first(self, data: bytes, at: int) -> int:
        if len(data) - at >= HEAD_BYTES and (data[at + 3] != frames.SETTINGS or data[at + 4] & frames.ACK):
            raise ConnectionFault(H2ErrorCode.PROTOCOL_ERROR, "the first frame must be SETTINGS")
        used = self._parse_frame(data, at)
        if used:
            self._parse = self._parse_frame
        return used

    def _parse_frame(self, data: bytes, at: int) -> int:
        """Take the frame at `at`; return its size, 0 where it is not whole. Raises ConnectionFault."""
        begin = at + HEAD_BYTES
        if begin > len(data):
            return 0
        high, low, kind, flags, stream_id = HEAD.unpack_from(data, at)
        length: int = high << 8 | low
        if length > MAX_FRAME_BYTES:
            text = f"a frame of {length} bytes, more than {MAX_FRAME_BYTES}"
            raise ConnectionFault(H2ErrorCode.FRAME_SIZE_ERROR, text)
        end = begin + length
        if end > len(data):
            return 0
        is_viewed = length >= _VIEWED_BYTES and kind == frames.DATA
        payload = memoryview(data)[begin:end] if is_viewed else data[begin:end]
        self.take_frame(kind, flags, stream_id & MAX_WINDOW, payload)  # the highest bit is reserved
        return HEAD_BYTES + length


def _missing_bytes(begun: bytes) -> int:
    """Return how many bytes a frame lacks that has begun; 0 where its head is not whole."""
    if len(begun) < HEAD_BYTES:
        return 0
    high, low = HEAD.unpack_from(begun)[:2]
    length: int = high << 8 | low
    return max(0, length + HEAD_BYTES - len(begun))
