"""The ledger in a Postgres database, which any number of gateways may share."""

from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import asynccontextmanager
from datetime import date

import psycopg
from psycopg.rows import TupleRow

from sluice.gateway.tenancy.ledger.rows import DAY_US, LedgerRow, day_number
from sluice.gateway.tenancy.ledger.store import (
    ROW_COLUMNS,
    LedgerBatch,
    UsageQuery,
    add_day_statement,
    rows_statement,
    usage_statement,
)
from sluice.state.postgres import (
    GONE_ERRORS,
    ConnectionLimits,
    PostgresPool,
    PostgresSession,
    parse_address,
    translate_error,
)

_LOCK = "SELECT pg_advisory_xact_lock(hashtextextended('sluice_ledger schema', 0))"
_CREATE = """
CREATE TABLE IF NOT EXISTS sluice_calls (
    id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY, arrived_us bigint NOT NULL, first_token_us bigint,
    ended_us bigint NOT NULL, request_id text NOT NULL, key_id text NOT NULL, key_name text NOT NULL,
    tenant text NOT NULL, model text NOT NULL, adapter text NOT NULL, protocol text NOT NULL, operation text NOT NULL,
    prompt_tokens bigint NOT NULL, cached_tokens bigint NOT NULL, generated_tokens bigint NOT NULL,
    finish text NOT NULL, status int, bytes_in bigint NOT NULL, bytes_out bigint NOT NULL, price_micros bigint NOT NULL
);
ALTER TABLE sluice_calls ADD COLUMN IF NOT EXISTS route text NOT NULL DEFAULT '';
CREATE INDEX IF NOT EXISTS sluice_calls_arrived ON sluice_calls (arrived_us);
CREATE TABLE IF NOT EXISTS sluice_usage_days (
    day int NOT NULL, key_id text COLLATE "C" NOT NULL, tenant text COLLATE "C" NOT NULL,
    model text COLLATE "C" NOT NULL, adapter text COLLATE "C" NOT NULL, key_name text NOT NULL,
    requests bigint NOT NULL, failed bigint NOT NULL, prompt_tokens bigint NOT NULL, cached_tokens bigint NOT NULL,
    generated_tokens bigint NOT NULL, bytes_in bigint NOT NULL, bytes_out bigint NOT NULL, price_micros bigint NOT NULL,
    PRIMARY KEY (day, key_id, tenant, model, adapter)
);
CREATE TABLE IF NOT EXISTS sluice_ledger_writers (writer text PRIMARY KEY, batch bigint NOT NULL);
"""
_INSERT = f"INSERT INTO sluice_calls ({ROW_COLUMNS}) VALUES ({', '.join(['%s'] * len(LedgerRow._fields))})"
_ADD_DAY = add_day_statement("%s")
_NOTE_BATCH = """
INSERT INTO sluice_ledger_writers VALUES (%s, %s) ON CONFLICT (writer) DO UPDATE SET batch = excluded.batch
WHERE sluice_ledger_writers.batch < excluded.batch RETURNING batch
"""
_DELETE = "DELETE FROM sluice_calls WHERE id IN (SELECT id FROM sluice_calls WHERE arrived_us < %s LIMIT %s)"


class PostgresLedger:
    """Rows in a database, in the schema that the URL names or the role's own. Used on the event loop's thread."""

    def __init__(self, url: str) -> None:
        """Raises SluiceError INVALID for a URL that is none."""
        self._address = parse_address(url)
        self._limits = ConnectionLimits(max_connections=3)
        self._pool = PostgresPool(self._address, self._limits)
        self._is_prepared = False

    async def write(self, batch: LedgerBatch) -> None:
        """Write a batch, unless it is already written."""
        async with self._session() as session, session.transaction():
            noted = await session.execute(_NOTE_BATCH, (batch.writer, batch.number))
            if await noted.fetchone() is not None:
                await session.execute_many(_INSERT, batch.rows)
                await session.execute_many(_ADD_DAY, batch.days)

    async def sum_usage(self, query: UsageQuery) -> list[tuple[object, ...]]:
        """Sum up usage."""
        statement = usage_statement(query, "%s")
        async with self._session() as session:
            return await (await session.execute(statement.text, statement.values)).fetchall()

    async def read_rows(self, query: UsageQuery) -> AsyncIterator[Sequence[LedgerRow]]:
        """Yield rows, page by page."""
        after = 0
        while page := await self._read_page(query, after):
            after = page[-1][0]
            yield [LedgerRow(*row[1:]) for row in page]

    async def _read_page(self, query: UsageQuery, after: int) -> list[TupleRow]:
        async with self._session() as session:
            return await (await session.execute(*rows_statement(query, "%s", after))).fetchall()

    async def delete_before(self, day: date, most: int) -> int:
        """Delete some old rows."""
        async with self._session() as session:
            return (await session.execute(_DELETE, (day_number(day) * DAY_US, most))).rowcount

    async def close(self) -> None:
        """Close the connections. Idempotent."""
        await self._pool.close()

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
            await session.execute(_CREATE)
        self._is_prepared = True
