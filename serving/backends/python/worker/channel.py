"""The worker's end of the socket. Nobody reads it while nobody waits for a command: there is no second thread.

Writing is shared: whoever finds the socket free writes what everybody has posted, as one frame.
"""

import itertools
import os
import signal
import socket
import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from select import POLLHUP, poll
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from serving.backends.python.frames import (
    INLINE_BYTES,
    CallModel,
    CallResponse,
    CallServer,
    CancelCall,
    CancelRequests,
    Command,
    DroppedSegments,
    ExecuteBatch,
    Execution,
    ForwardedSegment,
    FrameReader,
    FreedSegments,
    Message,
    NewSegments,
    Report,
    SegmentRef,
    ServerRequest,
    ServerResponse,
    WireResponse,
    WireTensor,
    encode_frame,
    fd_ancillary,
)
from serving.backends.python.shared_memory import MappedSegments, SegmentPool
from serving.backends.python.worker.errors import TritonModelException

if TYPE_CHECKING:
    from serving.backends.python.worker.tensor import Tensor

MAX_POSTED = 4096
"""Posts that wait for the socket; who has more to say waits with them."""
_CANCELLED = (7, "the call was cancelled")


class PendingCall:
    """A call to another model, until its final response has come. One thread waits for its replies."""

    __slots__ = ("is_ended", "number", "replies")

    def __init__(self, number: int) -> None:
        self.number = number
        self.replies: deque[WireResponse] = deque()
        self.is_ended = False
        """The model wants no more of it; its final reply only wakes who waits for one."""


class Channel:
    """Commands in, messages out. `receive` is the main thread's; everything else is any thread's."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        self._reader = FrameReader(sock)
        self._decoder = msgspec.msgpack.Decoder(Command)
        self._inbox: deque[Command] = deque()
        self._turn = threading.Condition()
        self._is_reading = False
        self._calls: dict[int, PendingCall] = {}
        self._questions: dict[int, ServerResponse | None] = {}
        self._numbers = itertools.count()
        self._write_lock = threading.Lock()
        self._posted: deque[Message | WireResponse | Execution] = deque()
        self._live: set[int] = set()
        self._cancelled: set[int] = set()
        self._pool = SegmentPool()
        self._mapped = MappedSegments(self.flush)
        self._is_ours = True
        os.register_at_fork(after_in_child=self._disown)

    def _disown(self) -> None:
        """A process that the model forked has nothing to say here, and no commands to take."""
        self._is_ours = False
        self._socket.close()

    @property
    def has_command(self) -> bool:
        """Whether `receive` would return at once."""
        return bool(self._inbox)

    def receive(self) -> Command:
        """The next command, waiting for it. Ends the process where the gateway is gone."""
        self._wait_until(lambda: bool(self._inbox))
        return self._inbox.popleft()

    def _wait_until(self, has_come: Callable[[], bool]) -> None:
        """Read until it has. Of several threads that wait one reads for all; when it has its own, the next one does."""
        while True:
            with self._turn:
                self._turn.wait_for(lambda: has_come() or not self._is_reading)
                if has_come():
                    return
                self._is_reading = True
            self._read_and_tell(0)

    def _poll(self) -> None:
        """Take in what lies there, unless somebody is at it."""
        if not self._turn.acquire(blocking=False):
            return
        try:
            if self._is_reading:
                return
            self._is_reading = True
        finally:
            self._turn.release()
        with suppress(BlockingIOError):
            self._read_and_tell(socket.MSG_DONTWAIT)

    def _read_and_tell(self, flags: int) -> None:
        try:
            self._read(flags)
        finally:
            with self._turn:
                self._is_reading = False
                self._turn.notify_all()

    def _read(self, flags: int) -> None:
        if not self._is_ours:
            os._exit(1)
        try:
            is_open = self._reader.read(flags)
        except ConnectionError:
            is_open = False
        if not is_open:
            exit_with_gateway()
        for frame in self._reader.frames():
            self._take(self._decoder.decode(frame))

    def _take(self, command: Command) -> None:
        match command:
            case NewSegments():
                self._mapped.add(command, self._reader.fds)
            case ForwardedSegment():
                self._mapped.add_lent(command, self._reader.fds)
            case DroppedSegments():
                self._mapped.drop(command)
            case FreedSegments(numbers):
                self._pool.free(numbers)
            case CancelRequests(numbers):
                self._cancelled.update(self._live.intersection(numbers))
            case CallResponse(reply):
                self._take_reply(reply)
            case ServerResponse(number):
                self._questions[number] = command
            case ExecuteBatch(requests):
                self._live.update([each.number for each in requests])
                self._inbox.append(command)
            case _:
                self._inbox.append(command)

    def is_cancelled(self, number: int) -> bool:
        self._poll()
        return number in self._cancelled

    def _take_reply(self, reply: WireResponse) -> None:
        call = self._calls[reply.number]
        if reply.is_final:
            del self._calls[reply.number]
        if not call.is_ended:
            call.replies.append(reply)
            return
        self._discard(reply)
        if reply.is_final:
            call.replies.append(WireResponse(reply.number, True, error=_CANCELLED))

    def _discard(self, reply: WireResponse) -> None:
        """Nobody reads it; what it has in shared memory is given back."""
        for tensor in reply.outputs:
            self.open(tensor.raw)

    def _check_ours(self) -> None:
        if not self._is_ours:
            raise TritonModelException("a process that the model has forked cannot ask the server")

    def begin_call(self, call: CallModel) -> PendingCall:
        """Ask another model. Raises TritonModelException in a process that the model has forked."""
        self._check_ours()
        pending = PendingCall(next(self._numbers))
        call.request.number = pending.number
        self._calls[pending.number] = pending
        self.post(call)
        self.flush()
        return pending

    def wait_reply(self, call: PendingCall) -> None:
        """Until `next_reply` has one. Not to be called after the final one."""
        self._wait_until(lambda: bool(call.replies))

    def next_reply(self, call: PendingCall) -> WireResponse:
        """Waits for it. Not to be called after the final one."""
        while True:
            self.wait_reply(call)
            with suppress(IndexError):  # the call was ended meanwhile, and its replies discarded
                return call.replies.popleft()

    def end_call(self, call: PendingCall) -> None:
        """Want no more of it. Idempotent, and harmless after its end."""
        if call.is_ended:
            return
        call.is_ended = True
        with suppress(IndexError):
            while True:
                self._discard(call.replies.popleft())
        if call.number in self._calls:
            self.post(CancelCall(call.number))
            self.flush()

    def ask(self, question: ServerRequest) -> ServerResponse:
        """The server's answer, waiting for it. Raises as `begin_call`."""
        self._check_ours()
        number = next(self._numbers)
        self._questions[number] = None
        self.post(CallServer(number, question))
        self.flush()
        self._wait_until(lambda: self._questions[number] is not None)
        answer = self._questions.pop(number)
        assert answer is not None
        return answer

    def wire_tensor(self, tensor: "Tensor") -> WireTensor:
        """The tensor as it is now, for a frame."""
        raw = tensor.wire_form()
        stored: bytes | SegmentRef
        if len(raw) > INLINE_BYTES:
            stored = self.store(memoryview(raw))
        else:
            stored = raw if isinstance(raw, bytes) else bytes(raw)
        return WireTensor(tensor.name(), tensor.datatype, tensor._shape, stored)

    def open(self, raw: bytes | SegmentRef) -> bytes | memoryview:
        """A tensor's bytes, wherever they lie."""
        return raw if isinstance(raw, bytes) else self._mapped.read(raw)

    def store(self, data: memoryview) -> SegmentRef:
        """Copy a large tensor to where the gateway can read it."""
        if not self._pool.has_free(data.nbytes):
            self._poll()
        return self._pool.store(np.frombuffer(data, np.uint8))

    def post_reply(self, reply: WireResponse) -> None:
        if reply.is_final:
            self._live.discard(reply.number)
            self._cancelled.discard(reply.number)
        self._posted.append(reply)

    def post(self, message: Message | Execution) -> None:
        """To be sent with the next `flush`."""
        self._posted.append(message)

    def flush(self) -> None:
        """Send what was posted, or leave it to the thread that is sending."""
        if not self._is_ours:
            return
        if len(self._posted) > MAX_POSTED and self._write_lock.acquire(timeout=1):
            self._write_lock.release()
        while self._posted or self._mapped.freed:
            if not self._write_lock.acquire(blocking=False):
                return
            try:
                self._write()
            finally:
                self._write_lock.release()

    def _write(self) -> None:
        replies: list[WireResponse] = []
        executions: list[Execution] = []
        others: list[Message] = []
        while self._posted:
            each = self._posted.popleft()
            if isinstance(each, WireResponse):
                replies.append(each)
            elif isinstance(each, Execution):
                executions.append(each)
            else:
                others.append(each)
        self._write_segments(others)
        if self._mapped.freed:
            others.append(FreedSegments(self._mapped.take_freed()))
        if replies or executions:
            others.append(Report(replies, executions))
        self._send(b"".join(map(encode_frame, others)))

    def _write_segments(self, others: list[Message]) -> None:
        """New segments go ahead of the replies that name them."""
        news, dropped = self._pool.news()
        for segments, fds in news:
            self._send(encode_frame(segments), fds)
            for fd in fds:
                os.close(fd)
        if dropped is not None:
            others.append(dropped)

    def _send(self, data: bytes, fds: list[int] | None = None) -> None:
        try:
            if fds:
                sent = self._socket.sendmsg([data], fd_ancillary(fds))
                data = data[sent:]
            self._socket.sendall(data)
        except ConnectionError:
            exit_with_gateway()


def exit_with_gateway() -> None:
    """End this process and what it has started: nobody is left who would."""
    if os.getpgrp() == os.getpid():
        os.killpg(0, signal.SIGKILL)
    os._exit(1)


def watch_gateway(sock: socket.socket) -> None:
    """Never outlive the gateway, whatever the model is doing."""

    def watch() -> None:
        poller = poll()
        poller.register(sock, 0)  # a hang-up is reported always
        while not any(event & POLLHUP for _, event in poller.poll()):
            pass
        exit_with_gateway()

    threading.Thread(target=watch, name="gateway-watch", daemon=True).start()
