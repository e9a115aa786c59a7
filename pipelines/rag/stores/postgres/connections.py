"""Connections to one Postgres server: few, kept, and given up on in time.

psycopg_pool is not used: while the server is down it has every caller wait out the pool's whole timeout, and does not
tell why it could not connect.
"""

import asyncio
import os
import select
import socket
from collections.abc import AsyncGenerator, Generator, Iterable, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import psycopg
from psycopg import AsyncConnection, AsyncCursor
from psycopg.adapt import Dumper
from psycopg.pq import TransactionStatus
from psycopg.rows import TupleRow

from pipelines.rag.stores.postgres.address import Address
from pipelines.rag.stores.postgres.failures import unavailable

Parameters: TypeAlias = Sequence[Any] | dict[str, Any]

_SNAPSHOT = "BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY"
_GRACE_S = 2.0
"""How much later than a statement's timeout, which the server itself sees to, the server counts as gone."""
_SETTINGS = """
SELECT set_config('statement_timeout', %(statement_timeout_ms)s, false),
       set_config('idle_in_transaction_session_timeout', '60s', false),
       set_config('client_min_messages', 'warning', false),
       set_config('jit', 'off', false)  -- compiling takes longer than any search here
"""
_SEARCH_PATH = (
    "SELECT set_config('search_path', concat_ws(', ', quote_ident(%s), current_setting('search_path')), false)"
)


@dataclass(frozen=True, slots=True)
class ConnectionLimits:
    """Timeouts in seconds: to connect, for one statement, and for one of the `max_connections` to become free."""

    connect_timeout_s: float = 3.0
    statement_timeout_s: float = 10.0
    acquire_timeout_s: float = 5.0
    max_connections: int = 8


class Session:
    """One connection, lent to one caller. Its statements end in time even where the server answers nothing at all."""

    def __init__(self, connection: AsyncConnection[TupleRow], timeout_s: float) -> None:
        self._connection = connection
        self._timeout_s = timeout_s

    async def execute(self, statement: str, parameters: Parameters | None = None) -> AsyncCursor[TupleRow]:
        """Raises psycopg.Error. Without parameters there may be several statements."""
        with self._answering():
            return await self._connection.execute(statement.encode(), parameters)

    async def execute_many(self, statement: str, rows: Iterable[Parameters]) -> None:
        """For each row, without waiting between; within the time of one statement in all."""
        with self._answering():
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
        """All statements within see one state of the database."""
        async with self.transaction(_SNAPSHOT):
            yield

    @contextmanager
    def _answering(self) -> Generator[None, None, None]:
        """Hangs up on a server that is silent for too long, which no timeout of its own can end."""
        timer = asyncio.get_running_loop().call_later(self._timeout_s, _hang_up, self._connection)
        try:
            yield
        except psycopg.OperationalError as error:
            if timer.when() <= asyncio.get_running_loop().time():
                raise psycopg.OperationalError(f"no answer within {self._timeout_s:g} s") from error
            raise
        finally:
            timer.cancel()


class Connections:
    """At most `limits.max_connections` at once. Event loop's thread only."""

    def __init__(self, address: Address, limits: ConnectionLimits) -> None:
        self.limits = limits
        self._address = address
        self._vector_dumper: type[Dumper] | None = None
        self._idle: list[AsyncConnection[TupleRow]] = []
        self._free = asyncio.Semaphore(limits.max_connections)
        self._closing = asyncio.Lock()
        self._is_open = False

    def open(self) -> None:
        self._is_open = True

    async def send_vectors_by(self, dumper: type[Dumper]) -> None:
        """Connections that nobody has now are made anew with it."""
        self._vector_dumper = dumper
        await self._close_idle()

    async def close(self) -> None:
        """Waits for who has one."""
        self._is_open = False
        async with self._closing:  # of two that take turns by turns neither would get them all
            for _ in range(self.limits.max_connections):
                await self._free.acquire()
            await self._close_idle()
            for _ in range(self.limits.max_connections):
                self._free.release()

    @asynccontextmanager
    async def session(self) -> AsyncGenerator[Session, None]:
        """Raises psycopg.Error where there is no connection to be had, SluiceError UNAVAILABLE where all are busy."""
        async with self._turn():
            connection = await self._kept() or await self._connect()
            try:
                yield self._session_of(connection)
            finally:
                await self._take_back(connection)

    @asynccontextmanager
    async def new_session(self) -> AsyncGenerator[Session, None]:
        """On a connection of its own, which nobody has afterwards."""
        async with self._turn():
            connection = await self._connect()
            try:
                yield self._session_of(connection)
            finally:
                await connection.close()

    @asynccontextmanager
    async def _turn(self) -> AsyncGenerator[None, None]:
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

    def _session_of(self, connection: AsyncConnection[TupleRow]) -> Session:
        return Session(connection, self.limits.statement_timeout_s + _GRACE_S)

    async def _kept(self) -> AsyncConnection[TupleRow] | None:
        while self._idle:
            connection = self._idle.pop()
            if not _was_hung_up(connection):
                return connection
            await connection.close()
        return None

    async def _take_back(self, connection: AsyncConnection[TupleRow]) -> None:
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
            await self._set_up(self._session_of(connection))
            if self._vector_dumper is not None:
                connection.adapters.register_dumper(np.ndarray, self._vector_dumper)
        except BaseException:
            await connection.close()
            raise
        return connection

    async def _set_up(self, session: Session) -> None:
        timeout_ms = str(round(self.limits.statement_timeout_s * 1000))
        await session.execute(_SETTINGS, {"statement_timeout_ms": timeout_ms})
        if self._address.schema:
            await session.execute(_SEARCH_PATH, [self._address.schema])


def _was_hung_up(connection: AsyncConnection[TupleRow]) -> bool:
    """An idle connection has nothing to read, unless the server has ended it: saying so, or by going."""
    if connection.closed:
        return True
    poll = select.poll()
    poll.register(connection.fileno(), select.POLLIN)
    return bool(poll.poll(0))


def _hang_up(connection: AsyncConnection[TupleRow]) -> None:
    """As if the server had: who waits for its answer is woken."""
    if not connection.closed:
        with suppress(OSError), socket.socket(fileno=os.dup(connection.fileno())) as duplicate:
            duplicate.shutdown(socket.SHUT_RDWR)
