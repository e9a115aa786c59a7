"""The worker's end of the socket.

There is no reader thread: the socket is read while some thread waits for a command or a response. Writing is shared:
the thread that finds the socket free writes what all threads have posted, as one frame.
"""

import itertools
import os
import signal
import socket
import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from select import POLLHUP, poll
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from sluice.serving.backends.python import frames
from sluice.serving.backends.python.shared_memory import MappedSegments, SegmentPool
from sluice.serving.backends.python.worker.errors import TritonModelException


def escape(value: Any) -> Any:
    """Return a message, or a part of one, with text that UTF-8 cannot encode written as escapes: `caf\\udce9`. Python
    reads so what is in another encoding, such as the name of a file."""
    if isinstance(value, str):
        return value.encode(errors="backslashreplace").decode()
    if isinstance(value, msgspec.Struct):
        fields = {name: escape(getattr(value, name)) for name in value.__struct_fields__}
        return msgspec.structs.replace(value, **fields)
    if isinstance(value, dict):
        return {escape(key): escape(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(map(escape, value))
    return value


if TYPE_CHECKING:
    from sluice.serving.backends.python.worker.tensor import PbTensor

MAX_POSTED = 4096
"""Posted messages that may wait for the socket; a thread with more waits with them."""
_CANCELLED = (7, "the call was cancelled")


@dataclass(slots=True, eq=False)
class PendingCall:
    """A call to another model, until its final response. One thread waits for its responses."""

    number: int
    responses: deque[frames.WireResponse] = field(default_factory=deque)
    is_cancelled: bool = False
    """Whether the model has cancelled the call. The final response then only wakes a thread that waits."""


class Channel:
    """Receives commands and sends messages. `receive` is for the main thread; everything else is thread-safe."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        self._reader = frames.WorkerFrameReader(sock)
        self._decoder = msgspec.msgpack.Decoder(frames.Command)
        self._inbox: deque[frames.Command] = deque()
        self._condition = threading.Condition()
        self._is_reading = False
        self._calls: dict[int, PendingCall] = {}
        self._server_calls: dict[int, frames.ServerResponse | None] = {}
        self._numbers = itertools.count()
        self._write_lock = threading.Lock()
        self._posted: deque[frames.Message | frames.WireResponse | frames.Execution] = deque()
        self._live: set[int] = set()
        self._cancelled: set[int] = set()
        self._pool = SegmentPool()
        self._mapped = MappedSegments(self.flush)
        self._must_announce = False
        """Whether segments were dropped of which the server does not know."""
        self._is_owner = True
        os.register_at_fork(after_in_child=self._disown)

    def _disown(self) -> None:
        """Close the socket in a process that the model has forked: it must neither send messages nor take commands."""
        self._is_owner = False
        self._socket.close()

    @property
    def has_command(self) -> bool:
        """Whether `receive` would return at once."""
        return bool(self._inbox)

    def receive(self) -> frames.Command:
        """Wait for the next command. Ends the process where the server is gone."""
        self._wait_until(lambda: bool(self._inbox))
        return self._inbox.popleft()

    def _wait_until(self, is_done: Callable[[], bool]) -> None:
        """Read until the condition holds. Of several waiting threads one reads for all, then the next one."""
        while True:
            with self._condition:
                self._condition.wait_for(lambda: is_done() or not self._is_reading)
                if is_done():
                    return
                self._is_reading = True
            self._read_and_notify(0)

    def _poll(self) -> None:
        """Read what has arrived, unless another thread is reading."""
        if not self._condition.acquire(blocking=False):
            return
        try:
            if self._is_reading:
                return
            self._is_reading = True
        finally:
            self._condition.release()
        with suppress(BlockingIOError):
            self._read_and_notify(socket.MSG_DONTWAIT)

    def _read_and_notify(self, flags: int) -> None:
        try:
            self._read(flags)
        finally:
            with self._condition:
                self._is_reading = False
                self._condition.notify_all()

    def _read(self, flags: int) -> None:
        if not self._is_owner:
            os._exit(1)
        try:
            is_open = self._reader.read(flags)
        except ConnectionError:
            is_open = False
        if not is_open:
            exit_with_server()
        for frame in self._reader.frames():
            self._receive(self._decoder.decode(frame))

    def _receive(self, command: frames.Command) -> None:
        match command:
            case frames.NewSegments():
                self._mapped.add(command, self._reader.fds)
            case frames.ForwardedSegment():
                self._mapped.add_forwarded(command, self._reader.fds)
            case frames.DroppedSegments():
                self._mapped.drop(command)
            case frames.TrimSegments():
                self._must_announce |= self._pool.drop_free()
                self.flush()
            case frames.FreedSegments(numbers):
                self._pool.free(numbers)
            case frames.CancelRequests(numbers):
                self._cancelled.update(self._live.intersection(numbers))
            case frames.CallResponse(response):
                self._receive_response(response)
            case frames.ServerResponse(number):
                self._server_calls[number] = command
            case frames.ExecuteBatch(requests):
                self._live.update([each.number for each in requests])
                self._inbox.append(command)
            case _:
                self._inbox.append(command)

    def is_cancelled(self, number: int) -> bool:
        self._poll()
        return number in self._cancelled

    def _receive_response(self, response: frames.WireResponse) -> None:
        call = self._calls[response.number]
        if response.is_final:
            del self._calls[response.number]
        if not call.is_cancelled:
            call.responses.append(response)
            return
        self._discard(response)
        if response.is_final:
            call.responses.append(frames.WireResponse(response.number, True, error=_CANCELLED))

    def _discard(self, response: frames.WireResponse) -> None:
        """Free the shared memory of a response that nobody reads."""
        for tensor in response.outputs:
            self.open(tensor.raw)

    def _check_owner(self) -> None:
        if not self._is_owner:
            raise TritonModelException("a process that the model has forked cannot ask the server")

    def begin_call(self, call: frames.CallModel) -> PendingCall:
        """Call another model. Raises TritonModelException in a process that the model has forked."""
        self._check_owner()
        pending = PendingCall(next(self._numbers))
        call.request.number = pending.number
        self._calls[pending.number] = pending
        self.post(call)
        self.flush()
        return pending

    def wait_response(self, call: PendingCall) -> None:
        """Wait until `next_response` has a response. Must not be called after the final one."""
        self._wait_until(lambda: bool(call.responses))

    def next_response(self, call: PendingCall) -> frames.WireResponse:
        """Wait for the next response. Must not be called after the final one."""
        while True:
            self.wait_response(call)
            with suppress(IndexError):  # the call was cancelled in the meantime, and its responses discarded
                return call.responses.popleft()

    def cancel_call(self, call: PendingCall) -> None:
        """Cancel a call. Idempotent, and does nothing after its end."""
        if call.is_cancelled:
            return
        call.is_cancelled = True
        with suppress(IndexError):
            while True:
                self._discard(call.responses.popleft())
        if call.number in self._calls:
            self.post(frames.CancelCall(call.number))
            self.flush()

    def call_server(self, request: frames.ServerRequest) -> frames.ServerResponse:
        """Call the server and wait for its response. Raises as `begin_call`."""
        self._check_owner()
        number = next(self._numbers)
        self._server_calls[number] = None
        self.post(frames.ServerCall(number, request))
        self.flush()
        self._wait_until(lambda: self._server_calls[number] is not None)
        response = self._server_calls.pop(number)
        assert response is not None
        return response

    def wire_tensor(self, tensor: "PbTensor") -> frames.WireTensor:
        """Return the tensor's present contents for a frame."""
        raw = tensor.wire_form()
        stored: bytes | frames.SegmentRef
        if len(raw) > frames.INLINE_BYTES:
            stored = self.store(memoryview(raw))
        else:
            stored = raw if isinstance(raw, bytes) else bytes(raw)
        return frames.WireTensor(tensor.name(), tensor.datatype, tensor._shape, stored)

    def open(self, raw: bytes | frames.SegmentRef) -> bytes | memoryview:
        """Return a tensor's bytes, from the frame or from shared memory."""
        return raw if isinstance(raw, bytes) else self._mapped.read(raw)

    def store(self, data: memoryview) -> frames.SegmentRef:
        """Copy a large tensor to where the server can read it."""
        if not self._pool.has_free(data.nbytes):
            self._poll()
        return self._pool.store(np.frombuffer(data, np.uint8))

    def post_response(self, response: frames.WireResponse) -> None:
        if response.is_final:
            self._live.discard(response.number)
            self._cancelled.discard(response.number)
        self._posted.append(response)

    def post(self, message: frames.Message | frames.Execution) -> None:
        """Post a message, which the next `flush` sends."""
        self._posted.append(message)

    def flush(self) -> None:
        """Send what was posted, or leave it to the thread that is sending."""
        if not self._is_owner:
            return
        if len(self._posted) > MAX_POSTED and self._write_lock.acquire(timeout=1):
            self._write_lock.release()
        while self._posted or self._mapped.freed or self._must_announce:
            if not self._write_lock.acquire(blocking=False):
                return
            try:
                self._write()
            finally:
                self._write_lock.release()

    def _write(self) -> None:
        self._must_announce = False
        responses: list[frames.WireResponse] = []
        executions: list[frames.Execution] = []
        others: list[frames.Message] = []
        while self._posted:
            each = self._posted.popleft()
            if isinstance(each, frames.WireResponse):
                responses.append(each)
            elif isinstance(each, frames.Execution):
                executions.append(each)
            else:
                others.append(each)
        self._write_segments(others)
        if self._mapped.freed:
            others.append(frames.FreedSegments(self._mapped.take_freed()))
        if responses or executions:
            others.append(frames.WorkerReport(responses, executions))
        self._send(b"".join(map(_encode, others)))

    def _write_segments(self, others: list[frames.Message]) -> None:
        """Send new segments ahead of the responses that refer to them."""
        notices, dropped = self._pool.take_notices()
        for segments, fds in notices:
            self._send(frames.encode_frame(segments), fds)
            for fd in fds:
                os.close(fd)
        if dropped is not None:
            others.append(dropped)

    def _send(self, data: bytes, fds: list[int] | None = None) -> None:
        try:
            if fds:
                sent = self._socket.sendmsg([data], frames.fd_ancillary(fds))
                data = data[sent:]
            self._socket.sendall(data)
        except ConnectionError:
            exit_with_server()


def _encode(message: frames.Message) -> bytes:
    try:
        return frames.encode_frame(message)
    except UnicodeEncodeError:  # in the text of an error or of a line for the log
        return frames.encode_frame(escape(message))


def exit_with_server() -> None:
    """End this process and those it started, because the server that would do so is gone."""
    if os.getpgrp() == os.getpid():
        os.killpg(0, signal.SIGKILL)
    os._exit(1)


def watch_server(sock: socket.socket) -> None:
    """Start a thread that ends the process when the server is gone, whatever the model is doing."""

    def watch() -> None:
        poller = poll()
        poller.register(sock, 0)  # without events: a hang-up is always reported
        while not any(event & POLLHUP for _, event in poller.poll()):
            pass
        exit_with_server()

    threading.Thread(target=watch, name="server-watch", daemon=True).start()
