"""The place of the ledger, a SQLite file or a Postgres database. Both understand the same statements."""

import asyncio
import os
from collections.abc import AsyncIterator, Mapping, Sequence
from datetime import date
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import apsw

from sluice.errors import invalid
from sluice.gateway.tenancy.ledger.rows import DAY_COUNTS, DAY_KEY, DAY_US, DaySum, LedgerRow, day_number, day_of, today
from sluice.state.connections import FileConnections, FileLimits, Schema
from sluice.state.queries import Row, query_rows

GROUPINGS = ("day", "key", "tenant", "model", "adapter")
"""Fields by which usage may be grouped."""
DEFAULT_DAYS = 30
_MICROS = 1_000_000
MAX_GROUPS = 10_000
PAGE_ROWS = 5000
_POSTGRES = ("postgresql://", "postgres://")
_COLUMNS = {"day": "day", "key": "key_id", "tenant": "tenant", "model": "model", "adapter": "adapter"}
_ROW_COLUMNS = ", ".join(LedgerRow._fields)
_TABLES = """
CREATE TABLE IF NOT EXISTS sluice_calls (
    id {id}, arrived_us {int} NOT NULL, first_token_us {int}, ended_us {int} NOT NULL, request_id {text} NOT NULL,
    key_id {text} NOT NULL, key_name {text} NOT NULL, tenant {text} NOT NULL, model {text} NOT NULL,
    adapter {text} NOT NULL, protocol {text} NOT NULL, operation {text} NOT NULL, prompt_tokens {int} NOT NULL,
    cached_tokens {int} NOT NULL, generated_tokens {int} NOT NULL, finish {text} NOT NULL, status {int},
    bytes_in {int} NOT NULL, bytes_out {int} NOT NULL, price_micros {int} NOT NULL
) {rows};
CREATE INDEX IF NOT EXISTS sluice_calls_arrived ON sluice_calls (arrived_us);
CREATE TABLE IF NOT EXISTS sluice_usage_days (
    day {int} NOT NULL, key_id {name} NOT NULL, tenant {name} NOT NULL, model {name} NOT NULL, adapter {name} NOT NULL,
    key_name {text} NOT NULL, requests {int} NOT NULL, failed {int} NOT NULL, prompt_tokens {int} NOT NULL,
    cached_tokens {int} NOT NULL, generated_tokens {int} NOT NULL, bytes_in {int} NOT NULL, bytes_out {int} NOT NULL,
    price_micros {int} NOT NULL, PRIMARY KEY (day, key_id, tenant, model, adapter)
) {keyed};
CREATE TABLE IF NOT EXISTS sluice_ledger_writers (writer {text} PRIMARY KEY, batch {int} NOT NULL) {keyed};
"""
"""The tables. The types of columns and the kinds of tables differ: texts of a {name} are sorted by their bytes."""
_ADD_ROUTE = "ALTER TABLE sluice_calls ADD COLUMN {new} route {text} NOT NULL DEFAULT '';"
"""Upgrades the tables of versions without routes."""
_ADD_SESSION = """
ALTER TABLE sluice_calls ADD COLUMN {new} session {text} NOT NULL DEFAULT '';
ALTER TABLE sluice_calls ADD COLUMN {new} parent_session {text} NOT NULL DEFAULT '';
"""
"""Upgrades the tables of versions without sessions."""
_UPGRADES = (_TABLES, _ADD_ROUTE, _ADD_SESSION)
_IN_FILE = {
    "id": "INTEGER PRIMARY KEY",
    "int": "INTEGER",
    "text": "TEXT",
    "name": "TEXT",
    "rows": "STRICT",
    "keyed": "STRICT, WITHOUT ROWID",
    "new": "",
}
_IN_POSTGRES = {
    "id": "bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY",
    "int": "bigint",
    "text": "text",
    "name": 'text COLLATE "C"',
    "rows": "",
    "keyed": "",
    "new": "IF NOT EXISTS",
}
LEDGER_SCHEMA = Schema(0x534C4C47, tuple(each.format(**_IN_FILE) for each in _UPGRADES))
_NOTE_BATCH = (
    "INSERT INTO sluice_ledger_writers VALUES (?, ?) ON CONFLICT (writer) DO UPDATE SET batch = excluded.batch "
    "WHERE sluice_ledger_writers.batch < excluded.batch RETURNING batch"
)
"""Returns a row unless the batch is already written."""
_INSERT = f"INSERT INTO sluice_calls ({_ROW_COLUMNS}) VALUES ({', '.join('?' * len(LedgerRow._fields))})"
_ADD_DAY = (
    f"INSERT INTO sluice_usage_days ({', '.join(DaySum._fields)}) VALUES ({', '.join('?' * len(DaySum._fields))}) "
    f"ON CONFLICT ({', '.join(DAY_KEY)}) DO UPDATE SET key_name = excluded.key_name, "
    + ", ".join(f"{name} = sluice_usage_days.{name} + excluded.{name}" for name in DAY_COUNTS)
)
_DELETE = "DELETE FROM sluice_calls WHERE id IN (SELECT id FROM sluice_calls WHERE arrived_us < ? LIMIT ?) RETURNING id"
Values = tuple[object, ...]


class UsageQuery(NamedTuple):
    """Which usage to sum up. `last` is included; `key_id` and `tenant` None stand for all."""

    first: date
    last: date
    group_by: tuple[str, ...] = ("day",)
    key_id: str | None = None
    tenant: str | None = None
    most: int = MAX_GROUPS
    """Groups that are returned at most, and one more where there are more."""

    @property
    def fields(self) -> tuple[str, ...]:
        """The names of what `LedgerStore.sum_usage` returns: the group's, the key's name with its id, the counts."""
        return (*self.group_by, *(("key_name",) if "key" in self.group_by else ()), *DAY_COUNTS)

    def owner_filters(self) -> tuple[str, tuple[str, ...]]:
        """Return what a WHERE goes on with for the key and the tenant, and its values."""
        given = {"key_id": self.key_id, "tenant": self.tenant}
        wanted = {column: value for column, value in given.items() if value is not None}
        return "".join(f" AND {column} = ?" for column in wanted), tuple(wanted.values())


class LedgerBatch(NamedTuple):
    """Rows that are written together, once: `number` counts the batches of `writer`, which is one process."""

    writer: str
    number: int
    rows: Sequence[LedgerRow]
    days: Sequence[DaySum]


class Database(Protocol):
    """Runs statements, in which ? stands for values. Methods raise UNAVAILABLE while it cannot be used."""

    async def read(self, statement: str, values: Values) -> list[Row]: ...

    async def write(
        self, statement: str, values: Values, then: Mapping[str, Sequence[Values]] | None = None
    ) -> list[Row]:
        """Run a statement and return its rows. Where it has some, run those of `then` for each of their values, in the
        same transaction."""
        ...

    async def close(self) -> None: ...


class LedgerStore:
    """Keeps rows and their sums by day. Methods raise SluiceError UNAVAILABLE while the place cannot be used."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self.close = database.close
        """Waits for running work, then closes. Idempotent."""

    async def write(self, batch: LedgerBatch) -> None:
        """Write a batch, in one transaction. Does nothing where it is already written: an error can hide a success."""
        added = {_INSERT: batch.rows, _ADD_DAY: batch.days}
        await self._database.write(_NOTE_BATCH, (batch.writer, batch.number), added)

    async def sum_usage(self, query: UsageQuery) -> list[Row]:
        """Return the sums of a checked query, as its `fields` name them."""
        columns = [_COLUMNS[each] for each in query.group_by]
        names = ["max(key_name)"] if "key" in query.group_by else []
        sums = [f"CAST(coalesce(sum({name}), 0) AS BIGINT)" for name in DAY_COUNTS]
        filters, owners = query.owner_filters()
        text = f"SELECT {', '.join([*columns, *names, *sums])} FROM sluice_usage_days WHERE day BETWEEN ? AND ?"
        text += filters
        if columns:
            text += f" GROUP BY {', '.join(columns)} ORDER BY {', '.join(columns)} LIMIT {query.most + 1}"
        return await self._database.read(text, (day_number(query.first), day_number(query.last), *owners))

    async def read_rows(self, query: UsageQuery) -> AsyncIterator[Sequence[LedgerRow]]:
        """Yield the rows of a query's days, key and tenant in the order in which they were written.

        Each page has a snapshot of its own: an export does not keep SQLite's writers from their log.
        """
        filters, owners = query.owner_filters()
        text = f"SELECT id, {_ROW_COLUMNS} FROM sluice_calls WHERE id > ? AND arrived_us >= ? AND arrived_us < ?"
        text += f"{filters} ORDER BY id LIMIT {PAGE_ROWS}"
        values, after = (day_number(query.first) * DAY_US, (day_number(query.last) + 1) * DAY_US, *owners), 0
        while page := await self._database.read(text, (after, *values)):
            after = page[-1][0]
            yield [LedgerRow(*row[1:]) for row in page]

    async def delete_before(self, day: date, most: int) -> int:
        """Delete at most so many rows from before a day, and return how many. The sums stay."""
        return len(await self._database.write(_DELETE, (day_number(day) * DAY_US, most)))


class _DatabaseInFile:
    """A SQLite file, which gateways of one machine may share. Each batch reaches the disk before the next is taken."""

    def __init__(self, path: Path) -> None:
        self._file = FileConnections(path, f"the ledger {path}", LEDGER_SCHEMA, FileLimits(num_readers=2))
        self._file.start()
        self.close = self._file.close

    async def read(self, statement: str, values: Values) -> list[Row]:
        return await self._file.read(_query, statement, values)

    async def write(
        self, statement: str, values: Values, then: Mapping[str, Sequence[Values]] | None = None
    ) -> list[Row]:
        return await self._file.write(_query, statement, values, then or {})


def _query(
    connection: apsw.Connection, statement: str, values: Values, then: Mapping[str, Sequence[Values]] | None = None
) -> list[Row]:
    found = list(query_rows(connection, statement, values))
    for text, rows in (then or {}).items() if found else ():
        connection.executemany(text, rows)
    return found


def is_postgres(place: str) -> bool:
    """Whether the ledger is in a database, not a file."""
    return place.startswith(_POSTGRES)


def open_ledger(place: str) -> LedgerStore:
    """Open the ledger in a file, or in the database of a URL, at the first use. Raises SluiceError INVALID."""
    if not is_postgres(place):
        return LedgerStore(_DatabaseInFile(Path(os.path.expanduser(place))))
    try:
        from sluice.gateway.tenancy.ledger.postgres import DatabaseInPostgres
    except ImportError as error:
        message = f"a ledger in Postgres needs psycopg, which is not here ({error}): pip install 'sluice[postgres]'"
        raise invalid("ledger", message) from None
    return LedgerStore(DatabaseInPostgres(place, "".join(_UPGRADES).format(**_IN_POSTGRES)))


def parse_query(start: str, end: str, group_by: list[str]) -> UsageQuery:
    """Parse days as 2026-11-23, "" for the last 30 days, and groups, any of them several with commas between.

    Raises SluiceError INVALID, naming the field.
    """
    last = parse_day(end, "end") if end else today()
    first = parse_day(start, "start") if start else date.fromordinal(max(1, last.toordinal() - DEFAULT_DAYS + 1))
    groups = tuple(name for text in group_by for each in text.split(",") if (name := each.strip()))
    query = UsageQuery(first, last, groups)
    if first > last:
        raise invalid("start", f"start must not be after end ({last}), got {first}")
    unknown = next((each for each in groups if each not in GROUPINGS), None)
    if unknown is not None or len(set(groups)) != len(groups):
        problem = f"got {unknown[:40]!r}" if unknown is not None else "each once"
        raise invalid("group_by", f"group_by must be of {', '.join(GROUPINGS)}, {problem}")
    return query


def parse_day(text: str, name: str) -> date:
    """Parse a day. Raises SluiceError INVALID, naming the field."""
    try:
        return date.fromisoformat(text)
    except ValueError:
        raise invalid(name, f"{name} must be a day such as 2026-11-23, got {text[:40]!r}") from None


async def describe_usage(store: LedgerStore, query: UsageQuery) -> dict[str, Any]:
    """Return the usage of a query as the answer of GET /v1/usage. Raises as the store, and INVALID for too much."""
    rows = await store.sum_usage(query)
    if len(rows) > query.most:
        raise invalid("group_by", f"there are more than {query.most} groups; ask for fewer days or a coarser grouping")
    return await asyncio.to_thread(_describe_rows, query, rows)


def _describe_rows(query: UsageQuery, rows: list[tuple[object, ...]]) -> dict[str, Any]:
    fields = query.fields
    data = [_describe(dict(zip(fields, row, strict=True))) for row in rows]
    counts = (*DAY_COUNTS[:-1], "price")
    total = {name: sum(each[name] for each in data) for name in counts}
    total["price"] = round(total["price"], 6)
    return {
        "object": "list",
        "start": str(query.first),
        "end": str(query.last),
        "group_by": list(query.group_by),
        "data": data,
        "total": total,
    }


def _describe(fields: dict[str, Any]) -> dict[str, Any]:
    micros = fields.pop("price_micros")
    if "day" in fields:
        fields["day"] = str(day_of(fields["day"]))
    return {**fields, "price": micros / _MICROS}
