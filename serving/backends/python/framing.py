"""Frames on a stream socket: each behind its length, with the file descriptors that come along."""

import os
import socket
from array import array
from collections import deque
from collections.abc import Iterator
from struct import Struct

import msgspec

from serving.backends.python.frames import Command, Message

MAX_FDS = 64
"""Of one frame; the kernel takes up to 253."""

_LENGTH = Struct("<I")
_FDS_SPACE = socket.CMSG_SPACE(MAX_FDS * array("i").itemsize)
_READ_BYTES = 256 * 1024
_KEEP_BYTES = 16 * _READ_BYTES

_encoder = msgspec.msgpack.Encoder()


def encode(frame: Command | Message) -> bytes:
    """The bytes that stand for it on the socket."""
    body = _encoder.encode(frame)
    return _LENGTH.pack(len(body)) + body


def ancillary(fds: list[int]) -> list[tuple[int, int, "array[int]"]]:
    """How `sendmsg` takes file descriptors."""
    return [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array("i", fds))] if fds else []


class FrameReader:
    """Frames out of a stream socket, and the file descriptors that come with them."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        self._buffer = bytearray(2 * _READ_BYTES)
        self._start = 0
        self._end = 0
        self.fds: deque[int] = deque()
        """Received and not taken yet, in order; the taker closes them."""

    def read(self, flags: int = 0) -> bool:
        """Read once. False at the end of it. Raises BlockingIOError where nothing is there and it may not wait."""
        self._make_room()
        with memoryview(self._buffer) as view, view[self._end :] as room:
            size, received, _, _ = self._socket.recvmsg_into([room], _FDS_SPACE, flags | socket.MSG_CMSG_CLOEXEC)
        for level, kind, data in received:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                self.fds.extend(array("i", data[: len(data) - len(data) % array("i").itemsize]))
        self._end += size
        return size > 0

    def frames(self) -> Iterator[memoryview]:
        """The whole frames read so far. Each is valid until the next is asked for."""
        while self._end - self._start >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._buffer, self._start)
            start, end = self._start + _LENGTH.size, self._start + _LENGTH.size + length
            if end > self._end:
                return
            self._start = end
            with memoryview(self._buffer) as view, view[start:end] as frame:
                yield frame

    def _make_room(self) -> None:
        if self._start == self._end:
            self._start = self._end = 0
            if len(self._buffer) > _KEEP_BYTES:
                self._buffer = bytearray(2 * _READ_BYTES)
        if len(self._buffer) - self._end >= _READ_BYTES:
            return
        unread = self._buffer[self._start : self._end]
        self._buffer = unread + bytearray(max(self._missing(), 2 * _READ_BYTES))
        self._start, self._end = 0, len(unread)

    def _missing(self) -> int:
        """Bytes that the frame begun still lacks."""
        if self._end - self._start < _LENGTH.size:
            return 0
        (length,) = _LENGTH.unpack_from(self._buffer, self._start)
        return int(length) + _LENGTH.size - (self._end - self._start)

    def close(self) -> None:
        """Give up what came and nobody took, and the buffer: who refers to this may be garbage for long."""
        while self.fds:
            os.close(self.fds.popleft())
        self._buffer = bytearray()
        self._start = self._end = 0
