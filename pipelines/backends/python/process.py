"""One worker process, from its start to its end, and the gateway's end of its socket."""

import asyncio
import logging
import os
import signal
import socket
import sys
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from itertools import islice, takewhile
from typing import Any

import msgspec
from numpy.typing import NDArray

from engine.errors import ErrorCode, SluiceError
from pipelines.backends.python.frames import (
    Call,
    Command,
    Completed,
    Dropped,
    EndCall,
    Failed,
    FrameReader,
    Freed,
    Loaded,
    Logged,
    Message,
    Report,
    Segments,
    Shutdown,
    Stored,
    ancillary,
    encode,
)
from pipelines.backends.python.segments import MappedSegments, SegmentPool

log = logging.getLogger(__name__)

MODULE = "pipelines.backends.python.worker.main"
MAX_PIECES = 64
"""Frames of one write; the kernel takes up to 1024."""
_STDERR = 2
_decoder = msgspec.msgpack.Decoder(Message)


class WorkerProcess:
    """Started once, closed once; event loop's thread only. What the model prints goes to the server's stderr."""

    def __init__(self, name: str, on_message: Callable[[Report | Call | EndCall], None]) -> None:
        self._name = name
        self._on_message = on_message
        self._loop = asyncio.get_running_loop()
        self._process: asyncio.subprocess.Process | None = None
        self._socket, self._far_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.setblocking(False)
        self._reader = FrameReader(self._socket)
        self._unsent: deque[tuple[memoryview, list[int]]] = deque()
        self._pool = SegmentPool()
        self._mapped = MappedSegments(self._freed, can_lend=True)
        self._is_scheduled = False
        self._is_blocked = False
        self._is_freeing = False
        self._is_ending = False
        self._first: asyncio.Future[Loaded | Completed | Failed] = self._loop.create_future()
        self.exited: asyncio.Future[int] = self._loop.create_future()
        """The exit code, when it has ended and all that it said was heard; negative for the signal that ended it."""

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process is not None else None

    async def ask(self, command: Command) -> Loaded | Completed:
        """Start the process with its first command, and wait for the answer.

        Raises SluiceError INTERNAL with the model's reason, or where the process ends instead of answering.
        """
        await self._start()
        self.send(command)
        await asyncio.wait((self._first, self.exited), return_when=asyncio.FIRST_COMPLETED)
        if not self._first.done():
            raise SluiceError(ErrorCode.INTERNAL, not_healthy(self._name))
        answer = self._first.result()
        if isinstance(answer, Failed):
            raise SluiceError(ErrorCode.INTERNAL, answer.message)
        return answer

    async def _start(self) -> None:
        fd = self._far_end.fileno()
        try:
            self._process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", MODULE, str(fd)),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=_STDERR,
                pass_fds=(fd,),
                # A terminal's Ctrl-C is the gateway's to act on; and what the model starts ends with it.
                start_new_session=True,
            )
        finally:
            self._far_end.close()
        self._loop.add_reader(self._socket.fileno(), self._read)
        self._watcher = self._loop.create_task(self._watch(self._process))

    async def _watch(self, process: asyncio.subprocess.Process) -> None:
        code = await process.wait()
        self._kill_group()
        while self._socket.fileno() >= 0 and self._read():
            pass
        self._close_socket()
        self.exited.set_result(code)

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
            if not self._is_ending:
                self.kill()
        return is_open

    def _take(self, message: Message) -> None:
        match message:
            case Report() | Call() | EndCall():
                self._on_message(message)
            case Segments():
                self._mapped.add(message, self._reader.fds)
            case Dropped():
                self._mapped.drop(message)
            case Freed(numbers):
                self._pool.free(numbers)
            case Logged(level, place, text):
                log.log(level, "[%s %s] %s", self._name, place, text)
            case _:
                if not self._first.done():
                    self._first.set_result(message)

    def _freed(self) -> None:
        """On any thread: somebody let the last view of a segment go."""
        if not self._is_freeing:
            self._is_freeing = True
            with suppress(RuntimeError):  # the loop may be closed by then
                self._loop.call_soon_threadsafe(self._send_freed)

    def _send_freed(self) -> None:
        self._is_freeing = False
        self.send(Freed(self._mapped.take_freed()))

    def kill(self) -> None:
        """End it now, with everything that it started. Idempotent."""
        self._is_ending = True
        if self._process is not None and self._process.returncode is None:
            with suppress(ProcessLookupError):
                os.kill(self._process.pid, signal.SIGKILL)

    def _kill_group(self) -> None:
        assert self._process is not None
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)

    async def close(self, timeout_s: float) -> None:
        """Let the model finalize, for so long, and end the process. Idempotent."""
        if self._process is None:
            self._far_end.close()
            self._close_socket()
            return
        if not self._is_ending:
            self._is_ending = True
            self.send(Shutdown())
            await asyncio.wait((self.exited,), timeout=timeout_s)
            if not self.exited.done():
                log.warning("%s did not end within %g s; killing it", self._name, timeout_s)
                self.kill()
        await asyncio.wait((self.exited,))

    def _close_socket(self) -> None:
        if self._socket.fileno() < 0:
            return
        self._discard_unsent()
        self._loop.remove_reader(self._socket.fileno())
        self._reader.close()
        self._socket.close()
        self._pool.close()


def not_healthy(name: str) -> str:
    """What the real server says of a process that has ended."""
    return f"Stub process '{name}' is not healthy."


def describe_exit(code: int) -> str:
    """An exit code as one reads it."""
    if code >= 0:
        return f"exit code {code}"
    try:
        return signal.Signals(-code).name
    except ValueError:
        return f"signal {-code}"


def _close_all(fds: list[int]) -> None:
    for fd in fds:
        os.close(fd)
    fds.clear()
