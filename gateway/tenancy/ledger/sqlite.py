"""The ledger in a SQLite file, which gateways of one machine may share."""

from collections.abc import AsyncIterator, Sequence
from datetime import date
from pathlib import Path

import apsw

from sluice.gateway.tenancy.ledger.rows import DAY_US, LedgerRow, day_number
from sluice.gateway.tenancy.ledger.store import (
    ROW_COLUMNS,
    LedgerBatch,
    UsageQuery,
    add_day_statement,
    rows_statement,
    usage_statement,
)
from sluice.state.connections import FileConnections, FileLimits, Schema
from sluice.state.queries import Row, query_row, query_rows

LEDGER_SCHEMA = Schema(
    0x534C4C47,
    (
        """
        CREATE TABLE sluice_calls (
            id INTEGER PRIMARY KEY, arrived_us INTEGER NOT NULL, first_token_us INTEGER, ended_us INTEGER NOT NULL,
            request_id TEXT NOT NULL, key_id TEXT NOT NULL, key_name TEXT NOT NULL, tenant TEXT NOT NULL,
            model TEXT NOT NULL, adapter TEXT NOT NULL, protocol TEXT NOT NULL, operation TEXT NOT NULL,
            prompt_tokens INTEGER NOT NULL, cached_tokens INTEGER NOT NULL, generated_tokens INTEGER NOT NULL,
            finish TEXT NOT NULL, status INTEGER, bytes_in INTEGER NOT NULL, bytes_out INTEGER NOT NULL,
            price_micros INTEGER NOT NULL
        ) STRICT;
        CREATE INDEX sluice_calls_arrived ON sluice_calls (arrived_us);
        CREATE TABLE sluice_usage_days (
            day INTEGER NOT NULL, key_id TEXT NOT NULL, tenant TEXT NOT NULL, model TEXT NOT NULL,
            adapter TEXT NOT NULL, key_name TEXT NOT NULL, requests INTEGER NOT NULL, failed INTEGER NOT NULL,
            prompt_tokens INTEGER NOT NULL, cached_tokens INTEGER NOT NULL, generated_tokens INTEGER NOT NULL,
            bytes_in INTEGER NOT NULL, bytes_out INTEGER NOT NULL, price_micros INTEGER NOT NULL,
            PRIMARY KEY (day, key_id, tenant, model, adapter)
        ) STRICT, WITHOUT ROWID;
        CREATE TABLE sluice_ledger_writers (writer TEXT PRIMARY KEY, batch INTEGER NOT NULL) STRICT, WITHOUT ROWID;
        """,
        "ALTER TABLE sluice_calls ADD COLUMN route TEXT NOT NULL DEFAULT '';",
    ),
)
_MARKS = ", ".join("?" * len(LedgerRow._fields))
_INSERT = f"INSERT INTO sluice_calls ({ROW_COLUMNS}) VALUES ({_MARKS})"
_ADD_DAY = add_day_statement("?")
_NOTE_BATCH = (
    "INSERT INTO sluice_ledger_writers VALUES (?, ?) ON CONFLICT (writer) DO UPDATE SET batch = excluded.batch"
)
_DELETE = "DELETE FROM sluice_calls WHERE id IN (SELECT id FROM sluice_calls WHERE arrived_us < ? LIMIT ?)"


class SqliteLedger:
    """Rows in a file. One thread writes, and each batch reaches the disk before the next is taken."""

    def __init__(self, path: Path) -> None:
        self._file = FileConnections(path, f"the ledger {path}", LEDGER_SCHEMA, FileLimits(num_readers=2))

    async def write(self, batch: LedgerBatch) -> None:
        """Write a batch, unless it is already written."""
        self._file.start()
        await self._file.write(_write, batch)

    async def sum_usage(self, query: UsageQuery) -> list[tuple[object, ...]]:
        """Sum up usage."""
        self._file.start()
        statement = usage_statement(query, "?")
        return await self._file.read(_query, statement.text, statement.values)

    async def read_rows(self, query: UsageQuery) -> AsyncIterator[Sequence[LedgerRow]]:
        """Yield rows, each page from a snapshot of its own: an export does not keep writers from their log."""
        self._file.start()
        after = 0
        while page := await self._file.read(_query, *rows_statement(query, "?", after)):
            after = page[-1][0]
            yield [LedgerRow(*row[1:]) for row in page]

    async def delete_before(self, day: date, most: int) -> int:
        """Delete some old rows."""
        self._file.start()
        return await self._file.write(_delete, day_number(day) * DAY_US, most)

    async def close(self) -> None:
        """Wait for running work, then close. Idempotent."""
        await self._file.close()


def _query(connection: apsw.Connection, statement: str, values: tuple[object, ...]) -> list[Row]:
    return list(query_rows(connection, statement, values))


def _write(connection: apsw.Connection, batch: LedgerBatch) -> None:
    found = query_row(connection, "SELECT batch FROM sluice_ledger_writers WHERE writer = ?", (batch.writer,))
    if found is not None and found[0] >= batch.number:
        return
    connection.executemany(_INSERT, batch.rows)
    connection.executemany(_ADD_DAY, batch.days)
    connection.execute(_NOTE_BATCH, (batch.writer, batch.number))


def _delete(connection: apsw.Connection, before_us: int, most: int) -> int:
    connection.execute(_DELETE, (before_us, most))
    return connection.changes()
