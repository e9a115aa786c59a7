"""Threads and connections of one file, one that writes and a few that read, and errors of SQLite as UNAVAILABLE."""

import asyncio
import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from queue import Empty, LifoQueue
from time import monotonic, sleep
from typing import Concatenate, ParamSpec, TypeVar

import apsw

from sluice.state.outage import StoreUse, reason_of, unavailable
from sluice.state.queries import read_transaction, write_transaction

T = TypeVar("T")
P = ParamSpec("P")
Work = Callable[[apsw.Connection], T]


class ForeignFileError(Exception):
    """Raised for a file of another program, or of a later version. The message continues "cannot be used: "."""


_PAGE_BYTES = 16384
"""Vectors are read faster than from SQLite's default pages of 4096 bytes. Larger pages only slow down small changes."""
_CACHE_KIB = 16384
_MAX_IDLE_WAL_BYTES = 64 << 20
_STEPS_PER_CANCEL_CHECK = 20_000
"""Steps of SQLite's virtual machine between checks for cancellation: about a millisecond."""
_RETRY_S = 0.01
_LOCKED = (apsw.BusyError, apsw.LockedError)
_UNUSABLE = (
    *_LOCKED,
    *(apsw.AuthError, apsw.CantOpenError, apsw.CorruptError, apsw.FormatError, apsw.FullError, apsw.InterruptError),
    *(apsw.IOError, apsw.NoLFSError, apsw.NoMemError, apsw.NotADBError, apsw.PermissionsError, apsw.ProtocolError),
    *(apsw.ReadOnlyError, ForeignFileError, OSError),
)
"""Errors that mean that the file cannot be used now. All others, wrong SQL and broken constraints, are bugs of ours."""


@dataclass(frozen=True, slots=True)
class Schema:
    """The tables of one kind of file. `application_id` marks the kind in the file's header. `steps` are statements by
    version: step n upgrades a file from version n to n + 1."""

    application_id: int
    steps: tuple[str, ...]

    def upgrade(self, connection: apsw.Connection) -> None:
        """Create or upgrade the tables. Several processes may do so at once. Raises ForeignFileError."""
        if self._version(connection) == len(self.steps):
            return
        with write_transaction(connection):
            for step in self.steps[self._version(connection) :]:  # another process may have upgraded the file
                connection.execute(step)
            connection.pragma("application_id", self.application_id)
            connection.pragma("user_version", len(self.steps))

    def _version(self, connection: apsw.Connection) -> int:
        version, newest = int(connection.pragma("user_version")), len(self.steps)
        is_empty = connection.execute("SELECT count(*) FROM sqlite_schema").get == 0
        if not is_empty and connection.pragma("application_id") != self.application_id:
            raise ForeignFileError("it is another program's database; name a file of its own for the store")
        if version > newest:
            message = f"its version is {version} and this Sluice knows up to {newest}: it needs a newer one"
            raise ForeignFileError(message)
        return version


@dataclass(frozen=True, slots=True)
class FileLimits:
    """Limits of one file. `num_readers` searches run at once.

    A call waits at most `busy_timeout_s` for a lock that another process holds. Each write that `survives_power_cuts`
    waits for the disk; without it a power cut may cost the last seconds.
    """

    num_readers: int = 4
    busy_timeout_s: float = 10.0
    survives_power_cuts: bool = True


class FileConnections:
    """Runs functions in threads, each with exclusive use of a connection.

    Connections are opened on demand. A connection is closed after any error of the file, and once its file is no longer
    the one at `path`, so that a store recovers when its file is back.
    """

    def __init__(self, path: Path, name: str, schema: Schema, limits: FileLimits) -> None:
        self._path = path
        self._name = name
        self._schema = schema
        self._limits = limits
        self._writer: _ConnectionThreads | None = None
        self._readers: _ConnectionThreads | None = None
        self._use = StoreUse(self._attempt)

    def problem(self) -> str:
        """Return the error of the file's last use; "" if there was none."""
        return self._use.problem()

    async def _attempt(self) -> None:
        await self.read(_read_version)
        await self.write(_rewrite_version)

    def start(self) -> None:
        """Start the threads. Opens no connection yet. Idempotent."""
        if self._writer is None:
            self._writer = _ConnectionThreads(1, self._connect)
            self._readers = _ConnectionThreads(self._limits.num_readers, self._connect)

    async def close(self) -> None:
        """Wait for running and queued work, then close. Idempotent."""
        self._use.close()
        started = [threads for threads in (self._writer, self._readers) if threads is not None]
        self._writer = self._readers = None
        for threads in started:
            await asyncio.to_thread(threads.close)

    async def write(self, work: Callable[Concatenate[apsw.Connection, P], T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run `work` in a write transaction, after all earlier writes."""

        def transact(connection: apsw.Connection) -> T:
            with write_transaction(connection):
                return work(connection, *args, **kwargs)

        with self._use.note("write"):
            return await self._run(self._writer, transact)

    async def read(self, work: Callable[Concatenate[apsw.Connection, P], T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run `work` on one snapshot. Cancelling the call interrupts its queries."""
        is_cancelled = threading.Event()

        def transact(connection: apsw.Connection) -> T:
            with _interrupting(connection, is_cancelled), read_transaction(connection):
                return work(connection, *args, **kwargs)

        try:
            with self._use.note("read"):
                return await self._run(self._readers, transact)
        except asyncio.CancelledError:
            is_cancelled.set()
            raise

    async def _run(self, threads: "_ConnectionThreads | None", work: Work[T]) -> T:
        if threads is None:
            raise unavailable(self._name, "it is closed")
        with _translate_errors(self._name, self._limits.busy_timeout_s):
            return await threads.run(work)

    def _connect(self) -> "_FileConnection":
        self._path.parent.mkdir(parents=True, exist_ok=True)
        # Only the owner may read what clients sent. SQLite gives the files beside this one the same mode.
        with suppress(FileExistsError):
            os.close(os.open(self._path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
        connection = apsw.Connection(str(self._path), flags=apsw.SQLITE_OPEN_READWRITE | apsw.SQLITE_OPEN_CREATE)
        try:
            _configure(connection, self._limits)
            self._schema.upgrade(connection)
            return _FileConnection(connection, self._path, _identity(self._path))
        except BaseException:
            connection.close()
            raise


def _read_version(connection: apsw.Connection) -> int:
    return int(connection.pragma("user_version"))


def _rewrite_version(connection: apsw.Connection) -> None:
    """Write the file's header as it is: that takes a page, which a full disk or a read-only file refuses."""
    connection.pragma("user_version", _read_version(connection))


@contextmanager
def _interrupting(connection: apsw.Connection, is_cancelled: threading.Event) -> Iterator[None]:
    """End queries with an InterruptError once `is_cancelled` is set.

    A progress handler checks it, since SQLite forgets an interrupt() that comes between two queries.
    """
    connection.set_progress_handler(is_cancelled.is_set, _STEPS_PER_CANCEL_CHECK)
    try:
        yield
    finally:
        connection.set_progress_handler(None)


def _configure(connection: apsw.Connection, limits: FileLimits) -> None:
    connection.set_busy_timeout(int(limits.busy_timeout_s * 1000))
    connection.pragma("page_size", _PAGE_BYTES)
    _write_ahead(connection, limits.busy_timeout_s)
    connection.pragma("synchronous", "full" if limits.survives_power_cuts else "normal")
    connection.pragma("cache_size", -_CACHE_KIB)
    connection.pragma("journal_size_limit", _MAX_IDLE_WAL_BYTES)


def _write_ahead(connection: apsw.Connection, patience_s: float) -> None:
    """Switch the file to a write-ahead log. SQLite does not wait where several connections change a new file to that at
    once, because each would wait for the others; so this tries again."""
    give_up_at = monotonic() + patience_s
    while True:
        try:
            connection.pragma("journal_mode", "wal")
        except apsw.BusyError:
            if monotonic() > give_up_at:
                raise
            sleep(_RETRY_S)
        else:
            return


@dataclass(frozen=True, slots=True)
class _FileConnection:
    """A connection with the identity of its file, which may have been deleted or replaced since it was opened."""

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


class _ConnectionThreads:
    """A pool of threads that share at most as many connections."""

    def __init__(self, num_threads: int, connect: Callable[[], _FileConnection]) -> None:
        self._threads = ThreadPoolExecutor(num_threads, thread_name_prefix="sluice-sqlite")
        self._connect = connect
        self._idle: LifoQueue[_FileConnection] = LifoQueue()

    async def run(self, work: Work[T]) -> T:
        return await asyncio.wrap_future(self._threads.submit(self._work, work))

    def _work(self, work: Work[T]) -> T:
        opened = self._acquire()
        try:
            result = work(opened.connection)
        except (apsw.Error, OSError):
            opened.connection.close()
            raise
        except BaseException:
            self._idle.put(opened)
            raise
        self._idle.put(opened)
        return result

    def _acquire(self) -> _FileConnection:
        for opened in self._pop_idle():
            if opened.is_current:
                return opened
            opened.connection.close()
        return self._connect()

    def _pop_idle(self) -> Iterator[_FileConnection]:
        """Yield the idle connections, the one with the warmest cache first, and remove each as it is yielded."""
        with suppress(Empty):
            while True:
                yield self._idle.get_nowait()

    def close(self) -> None:
        self._threads.shutdown(wait=True)
        for opened in self._pop_idle():
            opened.connection.close()


@contextmanager
def _translate_errors(name: str, busy_timeout_s: float) -> Iterator[None]:
    """Turn errors that mean that the file cannot be used now into UNAVAILABLE."""
    try:
        yield
    except _UNUSABLE as error:
        reason = reason_of(error)
        if isinstance(error, _LOCKED):
            reason = f"another process held it locked for more than {busy_timeout_s:g} s"
        raise unavailable(name, reason) from error
