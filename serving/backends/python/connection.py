"""The gateway's end of a worker's socket."""

import asyncio
import logging
import os
import socket
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from itertools import islice, takewhile
from typing import Any

import msgspec
from numpy.typing import NDArray

from serving.backends.python.frames import Command, Dropped, Freed, Message, Segments, Stored
from serving.backends.python.framing import FrameReader, ancillary, encode
from serving.backends.python.segments import MappedSegments, SegmentPool

log = logging.getLogger(__name__)

MAX_PIECES = 64
"""Frames of one write; the kernel takes up to 1024."""
_decoder = msgspec.msgpack.Decoder(Message)


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
            self._queue(encode(segments), fds)
        if dropped is not None:
            self._queue(encode(dropped))
        self._queue(encode(command))
        if is_urgent:
            self._flush()
        elif not self._is_scheduled:
            self._is_scheduled = True
            self._loop.call_soon(self._flush)

    def store(self, data: NDArray[Any]) -> Stored:
        """Put a large tensor's bytes where the worker can read them; what is returned goes with the next `send`."""
        return self._pool.store(data)

    def open(self, raw: bytes | Stored) -> bytes | memoryview:
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
            sent = self._socket.sendmsg([data], ancillary(fds))
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
            case Segments():
                self._mapped.add(message, self._reader.fds)
            case Dropped():
                self._mapped.drop(message)
            case Freed(numbers):
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
        self.send(Freed(self._mapped.take_freed()))

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
