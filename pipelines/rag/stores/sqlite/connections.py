"""The threads and connections of one file: one that writes, a few that read."""

import asyncio
import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from queue import Empty, LifoQueue
from typing import TypeVar

import apsw

from pipelines.rag.stores.sqlite.failures import translated, unavailable
from pipelines.rag.stores.sqlite.schema import upgrade
from pipelines.rag.stores.sqlite.transactions import reading, writing

T = TypeVar("T")
Work = Callable[[apsw.Connection], T]

_PAGE_BYTES = 16384
"""Vectors are read sooner than from pages of SQLite's 4096 bytes; still larger ones only make small changes dearer."""
_CACHE_KIB = 16384
_WAL_KEPT_BYTES = 64 << 20
_STEPS_BETWEEN_LOOKS = 20_000
"""Of SQLite's virtual machine: about a millisecond."""


@dataclass(frozen=True, slots=True)
class FileLimits:
    """`num_readers` searches run at once; a call waits `busy_timeout_s` for a lock that another process holds."""

    num_readers: int = 4
    busy_timeout_s: float = 10.0


class Connections:
    """Runs work in threads, each on a connection that is its alone while it runs.

    A connection is made when there is none to be had, and given up after any error of the file and where its file
    is no longer the one at `path`: so a store that was down goes on when its file is back.
    """

    def __init__(self, path: Path, name: str, limits: FileLimits) -> None:
        self._path = path
        self._name = name
        self._limits = limits
        self._writer: _Lane | None = None
        self._readers: _Lane | None = None

    def start(self) -> None:
        """Idempotent. Opens nothing yet."""
        if self._writer is None:
            self._writer = _Lane(1, self._connect)
            self._readers = _Lane(self._limits.num_readers, self._connect)

    async def close(self) -> None:
        """Wait for what runs and what is queued, then close. Idempotent."""
        lanes = [lane for lane in (self._writer, self._readers) if lane is not None]
        self._writer = self._readers = None
        for lane in lanes:
            await asyncio.to_thread(lane.close)

    async def write(self, work: Work[T]) -> T:
        """Run in a transaction of its own, after all writes that were asked for before."""

        def transact(connection: apsw.Connection) -> T:
            with writing(connection):
                return work(connection)

        return await self._run(self._writer, transact)

    async def read(self, work: Work[T]) -> T:
        """Run on one snapshot. Cancelled, it stops what it does in SQLite."""
        is_cancelled = threading.Event()

        def transact(connection: apsw.Connection) -> T:
            with _stopping(connection, is_cancelled), reading(connection):
                return work(connection)

        try:
            return await self._run(self._readers, transact)
        except asyncio.CancelledError:
            is_cancelled.set()
            raise

    async def _run(self, lane: "_Lane | None", work: Work[T]) -> T:
        if lane is None:
            raise unavailable(self._name, "it is closed")
        with translated(self._name, self._limits.busy_timeout_s):
            return await lane.run(work)

    def _connect(self) -> "_Link":
        self._path.parent.mkdir(parents=True, exist_ok=True)
        # Documents are their owner's; SQLite gives the files beside it the same rights.
        with suppress(FileExistsError):
            os.close(os.open(self._path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
        connection = apsw.Connection(str(self._path), flags=apsw.SQLITE_OPEN_READWRITE | apsw.SQLITE_OPEN_CREATE)
        try:
            _configure(connection, self._limits.busy_timeout_s)
            upgrade(connection)
            return _Link(connection, self._path, _identity(self._path))
        except BaseException:
            connection.close()
            raise


@contextmanager
def _stopping(connection: apsw.Connection, is_cancelled: threading.Event) -> Iterator[None]:
    """End queries, in an InterruptError, once that is set.

    Asked for now and then: SQLite forgets an interrupt() that comes between two queries.
    """
    connection.set_progress_handler(is_cancelled.is_set, _STEPS_BETWEEN_LOOKS)
    try:
        yield
    finally:
        connection.set_progress_handler(None)


def _configure(connection: apsw.Connection, busy_timeout_s: float) -> None:
    connection.set_busy_timeout(int(busy_timeout_s * 1000))
    connection.pragma("page_size", _PAGE_BYTES)
    connection.pragma("journal_mode", "wal")
    connection.pragma("synchronous", "full")  # a document that was put survives a power cut
    connection.pragma("cache_size", -_CACHE_KIB)
    connection.pragma("journal_size_limit", _WAL_KEPT_BYTES)


@dataclass(frozen=True, slots=True)
class _Link:
    """A connection, and which file it is to: one that was deleted or replaced lives on for those who have it open."""

    connection: apsw.Connection
    path: Path
    identity: tuple[int, int]

    @property
    def is_current(self) -> bool:
        try:
            return _identity(self.path) == self.identity
        except OSError:
            return False


def _identity(path: Path) -> tuple[int, int]:
    status = os.stat(path)
    return status.st_dev, status.st_ino


class _Lane:
    """A few threads, and as many connections at most."""

    def __init__(self, num_threads: int, connect: Callable[[], _Link]) -> None:
        self._threads = ThreadPoolExecutor(num_threads, thread_name_prefix="sluice-sqlite")
        self._connect = connect
        self._idle: LifoQueue[_Link] = LifoQueue()

    async def run(self, work: Work[T]) -> T:
        return await asyncio.wrap_future(self._threads.submit(self._work, work))

    def _work(self, work: Work[T]) -> T:
        link = self._link()
        try:
            answer = work(link.connection)
        except (apsw.Error, OSError):
            link.connection.close()
            raise
        except BaseException:
            self._idle.put(link)
            raise
        self._idle.put(link)
        return answer

    def _link(self) -> _Link:
        for link in self._all_idle():
            if link.is_current:
                return link
            link.connection.close()
        return self._connect()

    def _all_idle(self) -> Iterator[_Link]:
        """Each taken out as it comes, the one with the warmest cache first."""
        with suppress(Empty):
            while True:
                yield self._idle.get_nowait()

    def close(self) -> None:
        self._threads.shutdown(wait=True)
        for link in self._all_idle():
            link.connection.close()
