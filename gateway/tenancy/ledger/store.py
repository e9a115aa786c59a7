"""Where the ledger is kept: a SQLite file, or a Postgres database."""

from collections.abc import AsyncIterator, Sequence
from datetime import date
from typing import NamedTuple, Protocol

from sluice.gateway.tenancy.ledger.rows import DAY_COUNTS, DAY_KEY, DAY_US, DaySum, LedgerRow, day_number

GROUPINGS = ("day", "key", "tenant", "model", "adapter")
"""Fields by which usage may be grouped."""
MAX_GROUPS = 10_000
PAGE_ROWS = 5000
ROW_COLUMNS = ", ".join(LedgerRow._fields)
_COLUMNS = {"day": "day", "key": "key_id", "tenant": "tenant", "model": "model", "adapter": "adapter"}


class UsageQuery(NamedTuple):
    """Which usage to sum up. `last` is included; `key_id` and `tenant` None stand for all."""

    first: date
    last: date
    group_by: tuple[str, ...] = ("day",)
    key_id: str | None = None
    tenant: str | None = None
    most: int = MAX_GROUPS
    """Groups that are returned at most, and one more where there are more."""


class UsageStatement(NamedTuple):
    """A SELECT of the group's columns, the key's name where it is one of them, and the counts."""

    text: str
    values: tuple[object, ...]
    fields: tuple[str, ...]


def _owner_filters(query: UsageQuery, mark: str) -> tuple[str, tuple[str, ...]]:
    """Return what a WHERE goes on with for the query's key and tenant, and its values."""
    given = {"key_id": query.key_id, "tenant": query.tenant}
    wanted = {column: value for column, value in given.items() if value is not None}
    return "".join(f" AND {column} = {mark}" for column in wanted), tuple(wanted.values())


def rows_statement(query: UsageQuery, mark: str, after: int) -> tuple[str, tuple[object, ...]]:
    """Return the SELECT of a page of rows, each behind its id, from after an id on."""
    filters, values = _owner_filters(query, mark)
    text = f"SELECT id, {ROW_COLUMNS} FROM sluice_calls WHERE id > {mark} AND arrived_us >= {mark}"
    text += f" AND arrived_us < {mark}{filters} ORDER BY id LIMIT {PAGE_ROWS}"
    return text, (after, day_number(query.first) * DAY_US, (day_number(query.last) + 1) * DAY_US, *values)


def usage_statement(query: UsageQuery, mark: str) -> UsageStatement:
    """Return the statement of a checked query. `mark` stands for values in its text."""
    columns = [_COLUMNS[each] for each in query.group_by]
    names = ["max(key_name)"] if "key" in query.group_by else []
    fields = (*query.group_by, *("key_name" for _ in names), *DAY_COUNTS)
    sums = [f"CAST(coalesce(sum({name}), 0) AS BIGINT)" for name in DAY_COUNTS]
    filters, owners = _owner_filters(query, mark)
    days = f"day BETWEEN {mark} AND {mark}"
    text = f"SELECT {', '.join([*columns, *names, *sums])} FROM sluice_usage_days WHERE {days}{filters}"
    if columns:
        text += f" GROUP BY {', '.join(columns)} ORDER BY {', '.join(columns)} LIMIT {query.most + 1}"
    return UsageStatement(text, (day_number(query.first), day_number(query.last), *owners), fields)


def add_day_statement(mark: str) -> str:
    """Return the statement that adds a DaySum to the sums."""
    columns = ", ".join(DaySum._fields)
    added = ", ".join(f"{name} = sluice_usage_days.{name} + excluded.{name}" for name in DAY_COUNTS)
    return (
        f"INSERT INTO sluice_usage_days ({columns}) VALUES ({', '.join([mark] * len(DaySum._fields))})"
        f" ON CONFLICT ({', '.join(DAY_KEY)}) DO UPDATE SET key_name = excluded.key_name, {added}"
    )


class LedgerBatch(NamedTuple):
    """Rows that are written together, once: `number` counts the batches of `writer`, which is one process."""

    writer: str
    number: int
    rows: Sequence[LedgerRow]
    days: Sequence[DaySum]


class LedgerStore(Protocol):
    """Keeps rows and their sums by day. Methods raise SluiceError UNAVAILABLE while the place cannot be used."""

    async def write(self, batch: LedgerBatch) -> None:
        """Write a batch, in one transaction. Does nothing where it is already written: an error can hide a success."""

    async def sum_usage(self, query: UsageQuery) -> list[tuple[object, ...]]:
        """Return the rows of `usage_statement`."""

    def read_rows(self, query: UsageQuery) -> AsyncIterator[Sequence[LedgerRow]]:
        """Yield the rows of a query's days, key and tenant in the order in which they were written, some at a time."""

    async def delete_before(self, day: date, most: int) -> int:
        """Delete at most so many rows from before a day, and return how many. The sums stay."""

    async def close(self) -> None: ...
