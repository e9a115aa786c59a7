"""Connections to one Postgres server: its address, a pool with deadlines, and errors of the server as UNAVAILABLE.

psycopg_pool is not used: while the server is down, every caller would wait out the pool's whole timeout, and would not
learn why it cannot connect.
"""

import asyncio
import os
import re
import select
import socket
from collections.abc import AsyncGenerator, Generator, Iterable, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, TypeAlias
from urllib.parse import parse_qsl, quote, urlencode

import psycopg
from psycopg import AsyncConnection, AsyncCursor, errors
from psycopg.adapt import Dumper
from psycopg.conninfo import conninfo_to_dict, make_conninfo
from psycopg.pq import TransactionStatus
from psycopg.rows import TupleRow

from sluice.errors import ErrorCode, SluiceError, invalid

Parameters: TypeAlias = Sequence[Any] | dict[str, Any]

_DEFAULTS = {"application_name": "sluice", "keepalives_idle": "15", "keepalives_interval": "5", "keepalives_count": "3"}
_SCHEMES = ("postgresql://", "postgres://")
_PORTS = re.compile(r"[\d,]*")
_SNAPSHOT = "BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY"
_GRACE_S = 2.0
"""Seconds after a statement's timeout, which the server itself enforces, until the server counts as gone."""
_SETTINGS = """
SELECT set_config('statement_timeout', %(statement_timeout_ms)s, false),
       set_config('idle_in_transaction_session_timeout', '60s', false),
       set_config('client_min_messages', 'warning', false),
       set_config('jit', 'off', false)  -- compiling takes longer than any search here
"""
_SEARCH_PATH = (
    "SELECT set_config('search_path', concat_ws(', ', quote_ident(%s), current_setting('search_path')), false)"
)
GONE_ERRORS = (errors.UndefinedTable, errors.InvalidSchemaName)
"""Errors of a missing table: its collection was just deleted, or the database was created anew."""
LOST_RACE_ERRORS = (errors.DeadlockDetected, errors.SerializationFailure)
"""Errors of a transaction that lost against another one. Nothing was changed, and a retry may succeed."""
_SERVER_ERRORS = (errors.InsufficientPrivilege, errors.ReadOnlySqlTransaction, *GONE_ERRORS, *LOST_RACE_ERRORS)


@dataclass(frozen=True, slots=True)
class PostgresAddress:
    """The address of a database. `name` stands in messages; `conninfo` is libpq's, with the password.

    `schema` "" stands for the first schema of the role's search_path.
    """

    name: str
    conninfo: str = field(repr=False)
    schema: str = ""


def parse_address(url: str) -> PostgresAddress:
    """Parse `postgresql://user:password@host:port/database`, with options of libpq after `?`, and our own: `schema`.

    Raises SluiceError INVALID (param "store"), which repeats no part of the URL: any part may be the password.
    """
    base, _, query = url.partition("?")
    try:
        options = dict(parse_qsl(query, keep_blank_values=True, strict_parsing=bool(query)))
        schema = options.pop("schema", "")
        given = conninfo_to_dict(f"{base}?{urlencode(options, quote_via=quote)}")
    except (ValueError, psycopg.Error):
        raise _bad_address() from None
    texts = {key: str(value) for key, value in given.items()}
    if not base.startswith(_SCHEMES) or not _PORTS.fullmatch(texts.get("port", "")):
        raise _bad_address()
    return PostgresAddress(_format_name(texts), make_conninfo(**_DEFAULTS | texts), schema)


def _format_name(given: dict[str, str]) -> str:
    hosts = given.get("host") or given.get("hostaddr") or "localhost"
    ports = given.get("port") or "5432"
    database = given.get("dbname") or given.get("user") or ""
    return f"Postgres store {hosts}:{ports}/{database}"


def _bad_address() -> SluiceError:
    form = "postgresql://user:password@host:port/database?sslmode=require"
    return invalid("store", f"the store's URL is not of the form {form}, with '/' and '@' in names as %2F and %40")


@dataclass(frozen=True, slots=True)
class ConnectionLimits:
    """Limits of a pool. `acquire_timeout_s` bounds the wait until one of the `max_connections` is free."""

    connect_timeout_s: float = 3.0
    statement_timeout_s: float = 10.0
    acquire_timeout_s: float = 5.0
    max_connections: int = 8


class PostgresSession:
    """A connection in use by one caller. Its statements end in time even if the server does not respond at all."""

    def __init__(self, connection: AsyncConnection[TupleRow], timeout_s: float) -> None:
        self._connection = connection
        self._timeout_s = timeout_s

    async def execute(self, statement: str, parameters: Parameters | None = None) -> AsyncCursor[TupleRow]:
        """Run a statement, or several if there are no parameters. Raises psycopg.Error."""
        with self._deadline():
            return await self._connection.execute(statement.encode(), parameters)

    async def execute_many(self, statement: str, rows: Iterable[Parameters]) -> None:
        """Run a statement for each row, pipelined. All rows share the timeout of one statement."""
        with self._deadline():
            async with self._connection.cursor() as cursor:
                await cursor.executemany(statement.encode(), rows)

    @asynccontextmanager
    async def transaction(self, begin: str = "BEGIN") -> AsyncGenerator[None, None]:
        await self.execute(begin)
        try:
            yield
            await self.execute("COMMIT")
        except BaseException:
            with suppress(psycopg.Error):  # a connection that cannot even do this is not kept
                await self.execute("ROLLBACK")
            raise

    @asynccontextmanager
    async def snapshot(self) -> AsyncGenerator[None, None]:
        """Run all statements within on one snapshot of the database."""
        async with self.transaction(_SNAPSHOT):
            yield

    @contextmanager
    def _deadline(self) -> Generator[None, None, None]:
        """Hang up on a server that is silent for too long, so that its own timeouts cannot help."""
        timer = asyncio.get_running_loop().call_later(self._timeout_s, _hang_up, self._connection)
        try:
            yield
        except psycopg.OperationalError as error:
            if timer.when() <= asyncio.get_running_loop().time():
                raise psycopg.OperationalError(f"no answer within {self._timeout_s:g} s") from error
            raise
        finally:
            timer.cancel()


class PostgresPool:
    """Holds at most `limits.max_connections` connections. Used on the event loop's thread only."""

    def __init__(self, address: PostgresAddress, limits: ConnectionLimits) -> None:
        self.limits = limits
        self._address = address
        self._dumpers: dict[type, type[Dumper]] = {}
        self._idle: list[AsyncConnection[TupleRow]] = []
        self._free = asyncio.Semaphore(limits.max_connections)
        self._closing = asyncio.Lock()
        self._is_open = False

    def open(self) -> None:
        self._is_open = True

    async def set_dumper(self, of: type, dumper: type[Dumper]) -> None:
        """Send values of a type with `dumper` on new connections. Closes the idle ones."""
        self._dumpers[of] = dumper
        await self._close_idle()

    async def close(self) -> None:
        """Wait for the connections in use, then close all."""
        self._is_open = False
        async with self._closing:  # two concurrent calls would each acquire a part and wait for the other
            for _ in range(self.limits.max_connections):
                await self._free.acquire()
            await self._close_idle()
            for _ in range(self.limits.max_connections):
                self._free.release()

    @asynccontextmanager
    async def session(self) -> AsyncGenerator[PostgresSession, None]:
        """Acquire a connection. Raises psycopg.Error if it cannot connect, SluiceError UNAVAILABLE if all are busy."""
        async with self._acquire():
            connection = await self._pop_idle() or await self._connect()
            try:
                yield self._session(connection)
            finally:
                await self._release(connection)

    @asynccontextmanager
    async def new_session(self) -> AsyncGenerator[PostgresSession, None]:
        """Open a connection that is closed afterwards. Raises as `session` does."""
        async with self._acquire():
            connection = await self._connect()
            try:
                yield self._session(connection)
            finally:
                await connection.close()

    @asynccontextmanager
    async def _acquire(self) -> AsyncGenerator[None, None]:
        try:
            async with asyncio.timeout(self.limits.acquire_timeout_s):
                await self._free.acquire()
        except TimeoutError:
            busy = f"all {self.limits.max_connections} connections were busy for {self.limits.acquire_timeout_s:g} s"
            raise unavailable(self._address.name, f"is not available: {busy}") from None
        try:
            if not self._is_open:
                raise unavailable(self._address.name, "is closed")
            yield
        finally:
            self._free.release()

    def _session(self, connection: AsyncConnection[TupleRow]) -> PostgresSession:
        return PostgresSession(connection, self.limits.statement_timeout_s + _GRACE_S)

    async def _pop_idle(self) -> AsyncConnection[TupleRow] | None:
        while self._idle:
            connection = self._idle.pop()
            if not _was_hung_up(connection):
                return connection
            await connection.close()
        return None

    async def _release(self, connection: AsyncConnection[TupleRow]) -> None:
        if self._is_open and connection.info.transaction_status is TransactionStatus.IDLE:
            self._idle.append(connection)
        else:
            await connection.close()

    async def _close_idle(self) -> None:
        while self._idle:
            await self._idle.pop().close()

    async def _connect(self) -> AsyncConnection[TupleRow]:
        timeout_s = self.limits.connect_timeout_s
        try:
            async with asyncio.timeout(timeout_s):
                connection = await AsyncConnection.connect(self._address.conninfo, autocommit=True)
        except TimeoutError:
            raise psycopg.OperationalError(f"no connection within {timeout_s:g} s") from None
        try:
            await self._configure(self._session(connection))
            for of, dumper in self._dumpers.items():
                connection.adapters.register_dumper(of, dumper)
        except BaseException:
            await connection.close()
            raise
        return connection

    async def _configure(self, session: PostgresSession) -> None:
        timeout_ms = str(round(self.limits.statement_timeout_s * 1000))
        await session.execute(_SETTINGS, {"statement_timeout_ms": timeout_ms})
        if self._address.schema:
            await session.execute(_SEARCH_PATH, [self._address.schema])


def _was_hung_up(connection: AsyncConnection[TupleRow]) -> bool:
    """Whether the server ended an idle connection: only then has it something to read."""
    if connection.closed:
        return True
    poll = select.poll()
    poll.register(connection.fileno(), select.POLLIN)
    return bool(poll.poll(0))


def _hang_up(connection: AsyncConnection[TupleRow]) -> None:
    """Shut the socket down, which wakes the caller that waits for the server."""
    if not connection.closed:
        with suppress(OSError), socket.socket(fileno=os.dup(connection.fileno())) as duplicate:
            duplicate.shutdown(socket.SHUT_RDWR)


def unavailable(store: str, reason: str) -> SluiceError:
    return SluiceError(ErrorCode.UNAVAILABLE, f"{store} {reason}")


def translate_error(error: psycopg.Error, store: str, statement_timeout_s: float) -> Exception:
    """Return UNAVAILABLE for an error due to the server's state, and any other error, which is a bug, unchanged."""
    if isinstance(error, errors.QueryCanceled):
        return unavailable(store, f"took longer than {statement_timeout_s:g} s for a statement")
    if isinstance(error, (psycopg.OperationalError, psycopg.InterfaceError, *_SERVER_ERRORS)):
        return unavailable(store, format_reason(error))
    return error


def format_reason(error: Exception) -> str:
    """Format an error on one line. libpq's messages name host, database and role, but never the password."""
    primary = error.diag.message_primary if isinstance(error, psycopg.Error) else None
    return "is not available: " + " ".join((primary or str(error)).split())
