"""The server's end of a worker's socket, and the conversion of requests and responses to and from frames."""

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

from sluice.errors import ErrorCode, SluiceError
from sluice.serving.backends.python import frames
from sluice.serving.backends.python.shared_memory import MappedSegments, SegmentPool
from sluice.serving.request import InferRequest, InferResponse, SequenceFlag
from sluice.serving.tensors.datatypes import BYTES
from sluice.serving.tensors.tensor import Tensor

log = logging.getLogger(__name__)
SEGMENT_IDLE_S = 5.0
"""Time without a large tensor after which free segments are dropped, on both sides."""
MAX_PIECES = 64
"""Most frames of one write; the kernel takes up to 1024."""
_decoder = msgspec.msgpack.Decoder(frames.Message)
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
"""Error codes by Triton's number."""
_ERROR_NUMBERS = {code: number for number, code in ERROR_CODES.items()} | {
    ErrorCode.OVERLOADED: 4,
    ErrorCode.DEADLINE: 4,
}
_INTERNAL = 1


class WorkerConnection:
    """Exchanges frames and shared memory with one worker. Event loop's thread only."""

    def __init__(self, name: str, on_message: Callable[[frames.Message], None], on_end: Callable[[], None]) -> None:
        """`on_end` is called when the worker has closed its end, or has sent what cannot be decoded."""
        self._name = name
        self._on_message = on_message
        self._on_end = on_end
        self._loop = asyncio.get_running_loop()
        self._socket, self._far_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.setblocking(False)
        self._reader = frames.WorkerFrameReader(self._socket)
        self._unsent: deque[tuple[memoryview, list[int]]] = deque()
        self._pool = SegmentPool()
        self._mapped = MappedSegments(self._notice_freed, can_forward=True)
        self._is_scheduled = False
        self._is_blocked = False
        self._is_freeing = False
        self._last_segment_s = 0.0
        self._idle_timer: asyncio.TimerHandle | None = None

    @property
    def far_fd(self) -> int:
        """Descriptor of the worker's end, valid until `start`."""
        return self._far_end.fileno()

    def start(self) -> None:
        """Begin to read. The worker must have inherited its end, which is closed here."""
        self._far_end.close()
        self._loop.add_reader(self._socket.fileno(), self._read)

    def read_rest(self) -> None:
        """Read all that a worker sent before it ended."""
        while self._socket.fileno() >= 0 and self._read():
            pass

    def send(self, command: frames.Command, is_urgent: bool = True) -> None:
        """Send a command, in order, as soon as the socket takes it. Does nothing after the worker's end.

        A command that is not urgent is written at the end of this turn of the event loop, together with those that
        follow.
        """
        notices, dropped = self._pool.take_notices()
        for segments, fds in notices:
            self._queue(frames.encode_frame(segments), fds)
        if dropped is not None:
            self._queue(frames.encode_frame(dropped))
        self._queue(frames.encode_frame(command))
        if is_urgent:
            self._flush()
        elif not self._is_scheduled:
            self._is_scheduled = True
            self._loop.call_soon(self._flush)

    def store(self, data: NDArray[Any]) -> frames.SegmentRef:
        """Store a large tensor where the worker can read it. The result goes with the next `send`."""
        self._note_segment()
        return self._pool.store(data)

    def open(self, raw: bytes | frames.SegmentRef) -> bytes | memoryview:
        """Return a received tensor's bytes, from the frame or from shared memory. Call it once for each tensor."""
        if isinstance(raw, bytes):
            return raw
        self._note_segment()
        return self._mapped.read(raw)

    def _note_segment(self) -> None:
        self._last_segment_s = self._loop.time()
        if self._idle_timer is None:
            self._idle_timer = self._loop.call_later(SEGMENT_IDLE_S, self._trim_segments)

    def _trim_segments(self) -> None:
        """Drop free segments on both sides, once no large tensor has come for SEGMENT_IDLE_S."""
        left_s = self._last_segment_s + SEGMENT_IDLE_S - self._loop.time()
        self._idle_timer = None
        if left_s > 0:
            self._idle_timer = self._loop.call_later(left_s, self._trim_segments)
        else:
            self._pool.drop_free()
            self.send(frames.TrimSegments())

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
        """Write what is queued, or as much as the socket takes now and the rest when it takes more."""
        try:
            while self._unsent:
                self._write_some()
        except BlockingIOError:
            if not self._is_blocked:
                self._is_blocked = True
                self._loop.add_writer(self._socket.fileno(), self._write)
        except ConnectionError:  # the watcher of the process notices its end
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
            sent = self._socket.sendmsg([data], frames.fd_ancillary(fds))
            _close_all(fds)
        else:
            sent = self._socket.sendmsg(self._next_pieces())
        while self._unsent and sent >= len(self._unsent[0][0]):
            sent -= len(self._unsent.popleft()[0])
        if sent:
            self._unsent[0] = (self._unsent[0][0][sent:], [])

    def _next_pieces(self) -> list[memoryview]:
        """Return the next frames that have no file descriptors."""
        without_fds = takewhile(lambda piece: not piece[1], self._unsent)
        return [data for data, _ in islice(without_fds, MAX_PIECES)]

    def _discard_unsent(self) -> None:
        for _, fds in self._unsent:
            _close_all(fds)
        self._unsent.clear()
        self._unblock()

    def _read(self) -> bool:
        """Read once and handle the frames. Return False where nothing was there."""
        try:
            is_open = self._reader.read()
        except BlockingIOError:
            return False
        except ConnectionError:
            is_open = False
        try:
            for frame in self._reader.frames():
                self._receive(_decoder.decode(frame))
        except Exception:  # an invalid frame, or memory that cannot be mapped: nothing after it can be trusted
            log.exception("%s cannot be understood; ending it", self._name)
            is_open = False
        if not is_open:
            self._loop.remove_reader(self._socket.fileno())
            self._on_end()
        return is_open

    def _receive(self, message: frames.Message) -> None:
        match message:
            case frames.NewSegments():
                self._mapped.add(message, self._reader.fds)
            case frames.DroppedSegments():
                self._mapped.drop(message)
            case frames.FreedSegments(numbers):
                self._pool.free(numbers)
            case _:
                self._on_message(message)

    def _notice_freed(self) -> None:
        """Send `FreedSegments` soon. Called on the thread that released the last view of a segment."""
        if not self._is_freeing:
            self._is_freeing = True
            with suppress(RuntimeError):  # the loop may be closed by then
                self._loop.call_soon_threadsafe(self._send_freed)

    def _send_freed(self) -> None:
        self._is_freeing = False
        self.send(frames.FreedSegments(self._mapped.take_freed()))

    def close(self) -> None:
        if self._idle_timer is not None:
            self._idle_timer.cancel()
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


def to_wire_request(
    number: int, request: InferRequest, connection: WorkerConnection, traceparent: str = ""
) -> frames.WireRequest:
    """Convert a request for a worker. Large tensors go to shared memory."""
    return frames.WireRequest(
        number,
        [_wire_tensor(name, tensor, connection) for name, tensor in request.inputs.items()],
        request.id,
        request.correlation_id,
        int(request.sequence),
        request.timeout_us,
        request.requested_outputs,
        request.parameters or None,
        traceparent,
    )


def to_wire_response(number: int, response: InferResponse, connection: WorkerConnection) -> frames.WireResponse:
    """Convert another model's response for the worker that called it."""
    if response.error is not None:
        return frames.WireResponse(number, response.is_final, error=to_wire_error(response.error))
    outputs = [_wire_tensor(each.name, each, connection) for each in response.outputs]
    return frames.WireResponse(number, response.is_final, outputs, None, response.parameters or None)


def to_wire_error(error: SluiceError) -> tuple[int, str]:
    """Return Triton's number of the error's code, and the message."""
    return _ERROR_NUMBERS.get(error.code, _INTERNAL), error.message


def _wire_tensor(name: str, tensor: Tensor, connection: WorkerConnection) -> frames.WireTensor:
    data_type = tensor.data_type
    if data_type is not BYTES and tensor.num_elements * data_type.itemsize > frames.INLINE_BYTES:
        flat = np.ascontiguousarray(tensor.array, data_type.dtype).reshape(-1)
        return frames.WireTensor(name, tensor.datatype, tensor.shape, connection.store(flat.view(np.uint8)))
    raw = tensor.raw
    if len(raw) > frames.INLINE_BYTES:
        return frames.WireTensor(name, tensor.datatype, tensor.shape, connection.store(np.frombuffer(raw, np.uint8)))
    return frames.WireTensor(
        name, tensor.datatype, tensor.shape, cast(bytes, raw)
    )  # msgpack encodes any buffer like bytes


def from_wire_response(wire: frames.WireResponse, connection: WorkerConnection) -> InferResponse:
    """Convert a worker's response. Large tensors are views of the worker's memory, and remain valid."""
    if wire.error is not None:
        code, message = wire.error
        return InferResponse(error=SluiceError(ERROR_CODES[code], message), is_final=wire.is_final)
    outputs = [Tensor(each.name, each.datatype, each.shape, connection.open(each.raw)) for each in wire.outputs]
    return InferResponse(outputs, wire.parameters or {}, is_final=wire.is_final)


def from_wire_request(wire: frames.WireRequest, connection: WorkerConnection) -> InferRequest:
    """Convert a request that a worker's model makes to another one."""
    return InferRequest(
        {each.name: Tensor(each.name, each.datatype, each.shape, connection.open(each.raw)) for each in wire.inputs},
        wire.id,
        wire.outputs,
        wire.parameters or {},
        timeout_us=wire.timeout_us,
        correlation_id=wire.correlation_id,
        sequence=SequenceFlag(wire.flags),
    )
