"""A store in a SQLite file, which servers of one machine share."""

import time
from collections.abc import Callable
from math import inf
from pathlib import Path
from typing import NamedTuple

import apsw

from sluice.state.connections import FileConnections, FileLimits, Schema
from sluice.state.interface import ABSENT, Key, Put, Record
from sluice.state.queries import query_row, query_rows

_SWEPT_AT_ONCE = 64
"""Most records that one write deletes because they have expired: it must not take long."""
RECORDS = """
    CREATE TABLE records (
        owner TEXT NOT NULL,
        id TEXT NOT NULL,
        version INTEGER NOT NULL,
        written_s REAL NOT NULL,
        expires_s REAL NOT NULL,
        num_bytes INTEGER NOT NULL,
        body BLOB NOT NULL,
        PRIMARY KEY (owner, id)
    ) STRICT;
    CREATE INDEX records_by_expiry ON records (expires_s);
    CREATE INDEX records_by_age ON records (written_s);
    CREATE TABLE totals (num_records INTEGER NOT NULL, num_bytes INTEGER NOT NULL) STRICT;
    INSERT INTO totals VALUES (0, 0);
    CREATE TRIGGER added AFTER INSERT ON records BEGIN
        UPDATE totals SET num_records = num_records + 1, num_bytes = num_bytes + new.num_bytes;
    END;
    CREATE TRIGGER changed AFTER UPDATE ON records BEGIN
        UPDATE totals SET num_bytes = num_bytes + new.num_bytes - old.num_bytes;
    END;
    CREATE TRIGGER deleted AFTER DELETE ON records BEGIN
        UPDATE totals SET num_records = num_records - 1, num_bytes = num_bytes - old.num_bytes;
    END;
"""
"""The step of a file's schema that makes its tables. `owner` is the shelf, and `id` the name."""


class FileLayout(NamedTuple):
    """The layout of a store in a file."""

    name: str
    """Names the store in errors; {} stands for its path."""
    schema: Schema
    limits: FileLimits


class Bounds(NamedTuple):
    """The most that a file holds: past that the records that were written longest ago go."""

    max_records: int
    max_bytes: int


class StoreInFile:
    """Records in a file, which opens at the first use."""

    def __init__(
        self, path: Path, layout: FileLayout, bounds: Bounds | None = None, clock: Callable[[], float] = time.time
    ) -> None:
        """`clock` returns seconds since 1970."""
        self._bounds = bounds
        self._clock = clock
        self._connections = FileConnections(path.absolute(), layout.name.format(path), layout.schema, layout.limits)
        self._connections.start()
        self.problem, self.close = self._connections.problem, self._connections.close

    async def get(self, key: Key) -> Record | None:
        return await self._connections.read(_get, key, self._clock())

    async def scan(self, shelf: str) -> dict[str, Record]:
        return await self._connections.read(_scan, shelf, self._clock())

    async def put(self, *puts: Put) -> bool:
        return await self._connections.write(_put, puts, self._clock(), self._bounds)

    async def delete(self, key: Key) -> bool:
        return await self._connections.write(_delete, key, self._clock())


def _get(connection: apsw.Connection, key: Key, now: float) -> Record | None:
    query = "SELECT body, version FROM records WHERE owner = ? AND id = ? AND expires_s > ?"
    row = query_row(connection, query, (*key, now))
    return None if row is None else Record(*row)


def _scan(connection: apsw.Connection, shelf: str, now: float) -> dict[str, Record]:
    query = "SELECT id, body, version FROM records WHERE owner = ? AND expires_s > ?"
    return {name: Record(body, version) for name, body, version in query_rows(connection, query, (shelf, now))}


def _put(connection: apsw.Connection, puts: tuple[Put, ...], now: float, bounds: Bounds | None) -> bool:
    _sweep(connection, now)
    query = "SELECT version FROM records WHERE owner = ? AND id = ? AND expires_s > ?"
    found = [query_row(connection, query, (*each.key, now)) for each in puts]
    versions = [ABSENT if each is None else int(each[0]) for each in found]
    if any(each.version not in (None, version) for each, version in zip(puts, versions, strict=True)):
        return False
    for each, version in zip(puts, versions, strict=True):
        if each.body is None:
            _delete(connection, each.key, now)
            continue
        expires_s = inf if each.ttl_s is None else now + each.ttl_s
        connection.execute(
            "INSERT INTO records (owner, id, version, written_s, expires_s, num_bytes, body) "
            "VALUES (?, ?, ?, ?, ?, ?, ?) "
            "ON CONFLICT (owner, id) DO UPDATE SET version = excluded.version, written_s = excluded.written_s, "
            "expires_s = excluded.expires_s, num_bytes = excluded.num_bytes, body = excluded.body",
            (*each.key, version + 1, now, expires_s, len(each.body), each.body),
        )
    if bounds is not None:
        _evict(connection, bounds)
    return True


def _delete(connection: apsw.Connection, key: Key, now: float) -> bool:
    row = query_row(connection, "DELETE FROM records WHERE owner = ? AND id = ? RETURNING expires_s", key)
    return row is not None and row[0] > now


def _sweep(connection: apsw.Connection, now: float) -> None:
    oldest = "SELECT rowid FROM records WHERE expires_s <= ? ORDER BY expires_s LIMIT ?"
    connection.execute(f"DELETE FROM records WHERE rowid IN ({oldest})", (now, _SWEPT_AT_ONCE))


def _evict(connection: apsw.Connection, bounds: Bounds) -> None:
    """Delete the records that were written longest ago, until the bounds hold."""
    [(num_records, num_bytes)] = query_rows(connection, "SELECT num_records, num_bytes FROM totals")
    surplus, surplus_bytes = num_records - bounds.max_records, num_bytes - bounds.max_bytes
    evicted = []
    if surplus > 0 or surplus_bytes > 0:
        for row, size in query_rows(connection, "SELECT rowid, num_bytes FROM records ORDER BY written_s, rowid"):
            evicted.append((row,))
            surplus, surplus_bytes = surplus - 1, surplus_bytes - size
            if surplus <= 0 and surplus_bytes <= 0:
                break
    connection.executemany("DELETE FROM records WHERE rowid = ?", evicted)
