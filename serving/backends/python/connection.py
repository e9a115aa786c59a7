"""The gateway's end of a worker's socket."""

import asyncio
import logging
import os
import socket
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from itertools import islice, takewhile
from typing import Any, cast

import msgspec
import numpy as np
from numpy.typing import NDArray

from serving.backends.python.frames import (
    INLINE_BYTES,
    Command,
    DroppedSegments,
    FrameReader,
    FreedSegments,
    Message,
    NewSegments,
    SegmentRef,
    WireRequest,
    WireResponse,
    WireTensor,
    encode_frame,
    fd_ancillary,
)
from serving.backends.python.shared_memory import MappedSegments, SegmentPool
from serving.request import InferRequest, InferResponse, SequenceFlag
from serving.tensors.datatypes import BYTES
from serving.tensors.tensor import Tensor
from sluice.errors import ErrorCode, SluiceError

log = logging.getLogger(__name__)
MAX_PIECES = 64
"""Frames of one write; the kernel takes up to 1024."""
_decoder = msgspec.msgpack.Decoder(Message)
ERROR_CODES = {
    0: ErrorCode.UNKNOWN,
    1: ErrorCode.INTERNAL,
    2: ErrorCode.NOT_FOUND,
    3: ErrorCode.INVALID,
    4: ErrorCode.UNAVAILABLE,
    5: ErrorCode.UNIMPLEMENTED,
    6: ErrorCode.ALREADY_EXISTS,
    7: ErrorCode.CANCELLED,
}
"""By Triton's number."""
_NUMBERS = {code: number for number, code in ERROR_CODES.items()} | {
    ErrorCode.OVERLOADED: 4,
    ErrorCode.DEADLINE: 4,
}
_INTERNAL = 1


class Connection:
    """Frames to and from one worker, and the shared memory that goes with them. Event loop's thread only."""

    def __init__(self, name: str, on_message: Callable[[Message], None], on_end: Callable[[], None]) -> None:
        """`on_end` is called when the worker has closed its end, or has said what cannot be understood."""
        self._name = name
        self._on_message = on_message
        self._on_end = on_end
        self._loop = asyncio.get_running_loop()
        self._socket, self._far_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.setblocking(False)
        self._reader = FrameReader(self._socket)
        self._unsent: deque[tuple[memoryview, list[int]]] = deque()
        self._pool = SegmentPool()
        self._mapped = MappedSegments(self._freed, can_lend=True)
        self._is_scheduled = False
        self._is_blocked = False
        self._is_freeing = False

    @property
    def far_fd(self) -> int:
        """The worker's end, until `start`."""
        return self._far_end.fileno()

    def start(self) -> None:
        """The worker has its end: begin to read."""
        self._far_end.close()
        self._loop.add_reader(self._socket.fileno(), self._read)

    def read_rest(self) -> None:
        """Take in what a worker has said that has ended."""
        while self._socket.fileno() >= 0 and self._read():
            pass

    def send(self, command: Command, is_urgent: bool = True) -> None:
        """In order, and as soon as the worker's socket takes it. Harmless after its end.

        What is not urgent is written at the end of this turn of the event loop, with what follows.
        """
        news, dropped = self._pool.news()
        for segments, fds in news:
            self._queue(encode_frame(segments), fds)
        if dropped is not None:
            self._queue(encode_frame(dropped))
        self._queue(encode_frame(command))
        if is_urgent:
            self._flush()
        elif not self._is_scheduled:
            self._is_scheduled = True
            self._loop.call_soon(self._flush)

    def store(self, data: NDArray[Any]) -> SegmentRef:
        """Put a large tensor's bytes where the worker can read them; what is returned goes with the next `send`."""
        return self._pool.store(data)

    def open(self, raw: bytes | SegmentRef) -> bytes | memoryview:
        """A tensor of a report, wherever it lies. To be called once for each."""
        return raw if isinstance(raw, bytes) else self._mapped.read(raw)

    def _queue(self, data: bytes, fds: list[int] | None = None) -> None:
        if self._socket.fileno() < 0:
            _close_all(fds or [])
        else:
            self._unsent.append((memoryview(data), fds or []))

    def _flush(self) -> None:
        self._is_scheduled = False
        if not self._is_blocked:
            self._write()

    def _write(self) -> None:
        """Write what is queued; where the socket takes no more of it, the rest when it does."""
        try:
            while self._unsent:
                self._write_some()
        except BlockingIOError:
            if not self._is_blocked:
                self._is_blocked = True
                self._loop.add_writer(self._socket.fileno(), self._write)
        except ConnectionError:  # its end is noticed by who watches the process
            self._discard_unsent()
        else:
            self._unblock()

    def _unblock(self) -> None:
        if self._is_blocked:
            self._is_blocked = False
            self._loop.remove_writer(self._socket.fileno())

    def _write_some(self) -> None:
        data, fds = self._unsent[0]
        if fds:
            sent = self._socket.sendmsg([data], fd_ancillary(fds))
            _close_all(fds)
        else:
            sent = self._socket.sendmsg(self._next_pieces())
        while self._unsent and sent >= len(self._unsent[0][0]):
            sent -= len(self._unsent.popleft()[0])
        if sent:
            self._unsent[0] = (self._unsent[0][0][sent:], [])

    def _next_pieces(self) -> list[memoryview]:
        """Up to those that come with files."""
        without_fds = takewhile(lambda piece: not piece[1], self._unsent)
        return [data for data, _ in islice(without_fds, MAX_PIECES)]

    def _discard_unsent(self) -> None:
        for _, fds in self._unsent:
            _close_all(fds)
        self._unsent.clear()
        self._unblock()

    def _read(self) -> bool:
        """Take in what lies there. False where nothing did."""
        try:
            is_open = self._reader.read()
        except BlockingIOError:
            return False
        except ConnectionError:
            is_open = False
        try:
            for frame in self._reader.frames():
                self._take(_decoder.decode(frame))
        except Exception:  # a frame that is none, or memory that cannot be mapped: nothing after it can be trusted
            log.exception("%s cannot be understood; ending it", self._name)
            is_open = False
        if not is_open:
            self._loop.remove_reader(self._socket.fileno())
            self._on_end()
        return is_open

    def _take(self, message: Message) -> None:
        match message:
            case NewSegments():
                self._mapped.add(message, self._reader.fds)
            case DroppedSegments():
                self._mapped.drop(message)
            case FreedSegments(numbers):
                self._pool.free(numbers)
            case _:
                self._on_message(message)

    def _freed(self) -> None:
        """On any thread: somebody let the last view of a segment go."""
        if not self._is_freeing:
            self._is_freeing = True
            with suppress(RuntimeError):  # the loop may be closed by then
                self._loop.call_soon_threadsafe(self._send_freed)

    def _send_freed(self) -> None:
        self._is_freeing = False
        self.send(FreedSegments(self._mapped.take_freed()))

    def close(self) -> None:
        """Idempotent."""
        self._far_end.close()
        if self._socket.fileno() < 0:
            return
        self._discard_unsent()
        self._loop.remove_reader(self._socket.fileno())
        self._reader.close()
        self._socket.close()
        self._pool.close()
        self._mapped.close()


def _close_all(fds: list[int]) -> None:
    for fd in fds:
        os.close(fd)
    fds.clear()


def to_wire_request(number: int, request: InferRequest, connection: Connection) -> WireRequest:
    """The request for that worker; its large tensors lie where it reads them."""
    return WireRequest(
        number,
        [_wire_tensor(name, tensor, connection) for name, tensor in request.inputs.items()],
        request.id,
        request.correlation_id,
        int(request.sequence),
        request.timeout_us,
        request.requested_outputs,
        request.parameters or None,
    )


def to_wire_response(number: int, response: InferResponse, connection: Connection) -> WireResponse:
    """Another model's response for the worker that asked."""
    if response.error is not None:
        return WireResponse(number, response.is_final, error=to_wire_error(response.error))
    outputs = [_wire_tensor(each.name, each, connection) for each in response.outputs]
    return WireResponse(number, response.is_final, outputs, None, response.parameters or None)


def to_wire_error(error: SluiceError) -> tuple[int, str]:
    """Triton's number of its code, and its message."""
    return _NUMBERS.get(error.code, _INTERNAL), error.message


def _wire_tensor(name: str, tensor: Tensor, connection: Connection) -> WireTensor:
    data_type = tensor.data_type
    if data_type is not BYTES and tensor.num_elements * data_type.itemsize > INLINE_BYTES:
        flat = np.ascontiguousarray(tensor.array, data_type.dtype).reshape(-1)
        return WireTensor(name, tensor.datatype, tensor.shape, connection.store(flat.view(np.uint8)))
    raw = tensor.raw
    if len(raw) > INLINE_BYTES:
        return WireTensor(name, tensor.datatype, tensor.shape, connection.store(np.frombuffer(raw, np.uint8)))
    return WireTensor(name, tensor.datatype, tensor.shape, cast(bytes, raw))  # any buffer is encoded alike


def from_wire_response(reply: WireResponse, connection: Connection) -> InferResponse:
    """The response that a worker's reply is; large tensors are views of the worker's memory, and stay valid."""
    if reply.error is not None:
        code, message = reply.error
        return InferResponse(error=SluiceError(ERROR_CODES[code], message), is_final=reply.is_final)
    outputs = [Tensor(each.name, each.datatype, each.shape, connection.open(each.raw)) for each in reply.outputs]
    return InferResponse(outputs, reply.parameters or {}, is_final=reply.is_final)


def from_wire_request(wire: WireRequest, connection: Connection) -> InferRequest:
    """The request that a worker's model makes to another one."""
    return InferRequest(
        {each.name: Tensor(each.name, each.datatype, each.shape, connection.open(each.raw)) for each in wire.inputs},
        wire.id,
        wire.outputs,
        wire.parameters or {},
        timeout_us=wire.timeout_us,
        correlation_id=wire.correlation_id,
        sequence=SequenceFlag(wire.flags),
    )
