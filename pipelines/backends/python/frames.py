"""What crosses the socket between gateway and worker: msgpack frames, each behind its length.

Small tensors lie in the frames, large ones in shared memory (`segments.py`). Both sides import this module, so it
imports next to nothing.
"""

import os
import socket
from array import array
from collections import deque
from collections.abc import Iterator
from struct import Struct

import msgspec

INLINE_BYTES = 64 * 1024
"""Tensors up to this size travel in the frame; copying those costs less than keeping count of a segment."""
MAX_FDS = 64
"""Of one frame; the kernel takes up to 253."""

_LENGTH = Struct("<I")
_FDS_SPACE = socket.CMSG_SPACE(MAX_FDS * array("i").itemsize)
_READ_BYTES = 256 * 1024
_KEEP_BYTES = 16 * _READ_BYTES


class Stored(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """A tensor's bytes at the start of a shared segment, numbered by the side that sends it."""

    segment: int
    size: int


class WireTensor(msgspec.Struct, array_like=True, gc=False):
    """`raw` is the protocol's wire form, or where it lies."""

    name: str
    datatype: str
    shape: tuple[int, ...]
    raw: bytes | Stored


class WireRequest(msgspec.Struct, array_like=True, gc=False):
    """`outputs` empty asks for all."""

    number: int
    inputs: list[WireTensor]
    id: str = ""
    correlation_id: int | str = 0
    flags: int = 0
    timeout_us: int = 0
    outputs: tuple[str, ...] = ()
    parameters: dict[str, bool | int | float | str] | None = None


class Load(msgspec.Struct, array_like=True, tag="load"):
    """Import `model_file` and initialize the model with Triton's `args`."""

    model_file: str
    args: dict[str, str]


class Complete(msgspec.Struct, array_like=True, tag="complete"):
    """Import `model_file` and let it complete this configuration."""

    model_file: str
    config_json: str
    model_name: str


class Batch(msgspec.Struct, array_like=True, tag="batch"):
    requests: list[WireRequest]


class Cancel(msgspec.Struct, array_like=True, tag="cancel"):
    numbers: list[int]


class Called(msgspec.Struct, array_like=True, tag="called"):
    """A response to the call of that number."""

    reply: "Reply"


class Shutdown(msgspec.Struct, array_like=True, tag="shutdown"):
    """Finalize the model and end."""


class Segments(msgspec.Struct, array_like=True, tag="segments"):
    """New segments of the sender; their file descriptors come with this frame, in order."""

    numbers: list[int]
    sizes: list[int]


class Lent(msgspec.Struct, array_like=True, tag="lent"):
    """A segment of another worker, whose file comes with this frame, for one tensor: to be mapped privately."""

    number: int
    size: int


class Dropped(msgspec.Struct, array_like=True, tag="dropped"):
    """Segments that the sender will not use again."""

    numbers: list[int]


class Freed(msgspec.Struct, array_like=True, tag="freed"):
    """Segments of the other side that nobody here reads any more."""

    numbers: list[int]


class Call(msgspec.Struct, array_like=True, tag="call"):
    """The model asks another one; `request.number` is the call's. Without `is_decoupled` it takes one response only."""

    model_name: str
    version: int
    is_decoupled: bool
    request: WireRequest


class EndCall(msgspec.Struct, array_like=True, tag="end_call"):
    """The model wants no more of it."""

    number: int


class Loaded(msgspec.Struct, array_like=True, tag="loaded"):
    pass


class Completed(msgspec.Struct, array_like=True, tag="completed"):
    config_json: str


class Failed(msgspec.Struct, array_like=True, tag="failed"):
    """The model could not be imported, initialized or completed."""

    message: str


class Logged(msgspec.Struct, array_like=True, tag="logged"):
    """A line of the model's logger; `level` as in `logging`."""

    level: int
    place: str
    message: str


class Reply(msgspec.Struct, array_like=True, gc=False):
    """One response. `error` is a number of Triton's error codes and a message."""

    number: int
    is_final: bool
    outputs: list[WireTensor] = []
    error: tuple[int, str] | None = None
    parameters: dict[str, bool | int | float | str] | None = None


class Execution(msgspec.Struct, array_like=True, gc=False):
    """`execute` has returned for the oldest batch that it had not. Times are perf_counter_ns, one clock for all."""

    taken_ns: int
    started_ns: int
    ended_ns: int


class Report(msgspec.Struct, array_like=True, tag="report"):
    """Replies, in order, and then executions."""

    replies: list[Reply]
    executions: list[Execution]


Command = Load | Complete | Batch | Cancel | Called | Shutdown | Segments | Lent | Dropped | Freed
"""From the gateway."""
Message = Loaded | Completed | Failed | Logged | Report | Call | EndCall | Segments | Dropped | Freed
"""From the worker."""

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
        """Give up what came and nobody took."""
        while self.fds:
            os.close(self.fds.popleft())
