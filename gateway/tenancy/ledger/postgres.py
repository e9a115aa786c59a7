"""The database of a ledger in Postgres, which any number of gateways may share."""

from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import asynccontextmanager

import psycopg

from sluice.state.postgres import (
    GONE_ERRORS,
    ConnectionLimits,
    PostgresPool,
    PostgresSession,
    parse_address,
    translate_error,
)
from sluice.state.queries import Row

_LOCK = "SELECT pg_advisory_xact_lock(hashtextextended('sluice_ledger schema', 0))"
Values = tuple[object, ...]


class DatabaseInPostgres:
    """The tables in the schema that the URL names or the role's own. Used on the event loop's thread."""

    def __init__(self, url: str, create: str) -> None:
        """`create` makes the tables that are missing. Raises SluiceError INVALID for a URL that is none."""
        self._create = create
        self._address = parse_address(url)
        self._limits = ConnectionLimits(max_connections=3)
        self._pool = PostgresPool(self._address, self._limits)
        self._is_prepared = False
        self.close = self._pool.close

    async def read(self, statement: str, values: Values) -> list[Row]:
        async with self._session() as session:
            return await (await session.execute(_marked(statement), values)).fetchall()

    async def write(
        self, statement: str, values: Values, then: Mapping[str, Sequence[Values]] | None = None
    ) -> list[Row]:
        async with self._session() as session, session.transaction():
            found = await (await session.execute(_marked(statement), values)).fetchall()
            for text, rows in (then or {}).items() if found else ():
                await session.execute_many(_marked(text), rows)
            return found

    @asynccontextmanager
    async def _session(self) -> AsyncGenerator[PostgresSession, None]:
        """Acquire a connection to a database with the tables. Raises SluiceError UNAVAILABLE."""
        self._pool.open()
        try:
            async with self._pool.session() as session:
                if not self._is_prepared:
                    await self._prepare(session)
                yield session
        except psycopg.Error as error:
            if isinstance(error, GONE_ERRORS):
                self._is_prepared = False
            raise translate_error(error, self._address.name, self._limits.statement_timeout_s) from error

    async def _prepare(self, session: PostgresSession) -> None:
        """Create what is missing. Several gateways may come at once."""
        async with session.transaction():
            await session.execute(_LOCK)
            if self._address.schema:
                quoted = self._address.schema.replace('"', '""')
                await session.execute(f'CREATE SCHEMA IF NOT EXISTS "{quoted}"')
            await session.execute(self._create)
        self._is_prepared = True


def _marked(statement: str) -> str:
    """Return a statement with psycopg's marks of values."""
    return statement.replace("?", "%s")
