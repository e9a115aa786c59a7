"""Where responses and conversations are kept: records by owner and id, here in a SQLite file.

A record has a version, which each change raises: who changes a record that another has changed meanwhile is told.
"""

import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple, Protocol

import apsw

from sluice.errors import ErrorCode, SluiceError
from sluice.pipelines.sqlite.connections import FileConnections, FileLimits, Schema
from sluice.pipelines.sqlite.queries import query_row, query_rows

ABSENT = 0
"""The version of a record that is not there."""
_SWEPT_AT_ONCE = 64
"""Most records that one write deletes because they have expired: it must not take long."""
_APPLICATION_ID = 0x536C7270
_SCHEMA = Schema(
    _APPLICATION_ID,
    (
        """
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
        """,
    ),
)


class RecordKey(NamedTuple):
    """The owner and the id of a record. Nobody finds another owner's."""

    owner: str
    id: str


class Record(NamedTuple):
    """A record's content and its version."""

    body: bytes
    version: int


class StoreLimits(NamedTuple):
    """How long a record is kept after its last change, and how many there are at most: past that the oldest go."""

    ttl_s: float
    max_records: int
    max_bytes: int


class RecordStore(Protocol):
    """Keeps records. Every method raises UNAVAILABLE where the store cannot be used now."""

    async def read(self, key: RecordKey) -> Record | None: ...

    async def write(self, key: RecordKey, body: bytes, version: int, ttl_s: float | None = None) -> bool:
        """Replace the record of that version, or add one for ABSENT. False where there is another version. `ttl_s` is
        how long it is kept; None for the store's own limit."""
        ...

    async def delete(self, key: RecordKey) -> bool:
        """Delete the record. False where there is none."""
        ...

    def problem(self) -> str:
        """Return why the store could not be used the last time; "" where it could."""
        ...

    async def close(self) -> None: ...


class SqliteRecords:
    """Records in a SQLite file, which servers of one machine may share. The file opens at the first use."""

    def __init__(self, path: Path, limits: StoreLimits, clock: Callable[[], float] = time.time) -> None:
        """`clock` returns seconds since 1970."""
        self._limits = limits
        self._clock = clock
        file_limits = FileLimits(num_readers=2, survives_power_cuts=False)  # each response would wait for the disk
        self._connections = FileConnections(path.absolute(), f"--responses-store {path}", _SCHEMA, file_limits)
        self._connections.start()

    async def read(self, key: RecordKey) -> Record | None:
        return await self._connections.read(_read, key, self._clock())

    async def write(self, key: RecordKey, body: bytes, version: int, ttl_s: float | None = None) -> bool:
        check_size(body, self._limits)
        now = self._clock()
        expires_s = now + (ttl_s or self._limits.ttl_s)
        return await self._connections.write(_write, key, body, version, (now, expires_s), self._limits)

    async def delete(self, key: RecordKey) -> bool:
        return await self._connections.write(_delete, key)

    def problem(self) -> str:
        return self._connections.problem()

    async def close(self) -> None:
        await self._connections.close()


def check_size(body: bytes, limits: StoreLimits) -> None:
    """Raise TOO_LARGE for a record that is larger than all of the store may be."""
    if len(body) > limits.max_bytes:
        message = f"{len(body)} bytes cannot be stored; the store takes {limits.max_bytes} (--responses-max-size)"
        raise SluiceError(ErrorCode.TOO_LARGE, message)


def _read(connection: apsw.Connection, key: RecordKey, now: float) -> Record | None:
    query = "SELECT body, version FROM records WHERE owner = ? AND id = ? AND expires_s > ?"
    row = query_row(connection, query, (*key, now))
    return None if row is None else Record(*row)


def _write(
    connection: apsw.Connection,
    key: RecordKey,
    body: bytes,
    version: int,
    times: tuple[float, float],
    limits: StoreLimits,
) -> bool:
    """Write at the first of `times` what expires at the second."""
    _sweep(connection, times[0])
    found = query_row(connection, "SELECT version FROM records WHERE owner = ? AND id = ?", key)
    if (ABSENT if found is None else found[0]) != version:
        return False
    connection.execute(
        "INSERT INTO records (owner, id, version, written_s, expires_s, num_bytes, body) VALUES (?, ?, ?, ?, ?, ?, ?) "
        "ON CONFLICT (owner, id) DO UPDATE SET version = excluded.version, written_s = excluded.written_s, "
        "expires_s = excluded.expires_s, num_bytes = excluded.num_bytes, body = excluded.body",
        (*key, version + 1, *times, len(body), body),
    )
    _evict(connection, limits)
    return True


def _delete(connection: apsw.Connection, key: RecordKey) -> bool:
    connection.execute("DELETE FROM records WHERE owner = ? AND id = ?", key)
    return connection.changes() > 0


def _sweep(connection: apsw.Connection, now: float) -> None:
    oldest = "SELECT rowid FROM records WHERE expires_s <= ? ORDER BY expires_s LIMIT ?"
    connection.execute(f"DELETE FROM records WHERE rowid IN ({oldest})", (now, _SWEPT_AT_ONCE))


def _evict(connection: apsw.Connection, limits: StoreLimits) -> None:
    """Delete the records that were written longest ago, until the limits hold."""
    [(num_records, num_bytes)] = query_rows(connection, "SELECT num_records, num_bytes FROM totals")
    surplus, surplus_bytes = num_records - limits.max_records, num_bytes - limits.max_bytes
    evicted = []
    if surplus > 0 or surplus_bytes > 0:
        for row, size in query_rows(connection, "SELECT rowid, num_bytes FROM records ORDER BY written_s, rowid"):
            evicted.append((row,))
            surplus, surplus_bytes = surplus - 1, surplus_bytes - size
            if surplus <= 0 and surplus_bytes <= 0:
                break
    connection.executemany("DELETE FROM records WHERE rowid = ?", evicted)
